"""The figures of data/RESULTS.md, drawn from the stored results and from the loss itself. Needs matplotlib.

    python -m tools.study.figure --output_dir data

Writes points.svg, ties.svg and gradient.svg, whose lines and texts are readable on light and on dark pages.
"""

import argparse
from pathlib import Path

import pandas as pd

from tools.matches.text import with_interval
from tools.study.collect import POINTS, SELF_PLAY
from tools.study.table import read_results, student, to_frame
from utils import ROOT, replacing, require, run_program

OURS, CONTROL, INK = "#3b82f6", "#8b949e", "#7d8590"  # a grey that shows on white and on black
WORLDS = {
    "tiny": "The embedded world: a Llama of a million parameters, 3 epochs",
    "english": "English: SmolLM2-135M-Instruct, 400 words",
}
ARMS = (
    ("tiny", "released", 3, "SPAG, as released"),
    ("tiny", "losers_ties", 3, "losers' rows too, ties cost, KL detached"),
    ("tiny", "cloning", 3, "copy the winners"),
    ("tiny", "sft", 3, "no games, as many steps"),
    ("tiny", "coin_by_length", 3, "winners shuffled"),
    ("english", "released", 3, "SPAG, as released, 3 epochs"),
    ("english", "sft", 3, "no games, as many steps, 3 epochs"),
    ("english", "released", 1, "SPAG, as released, 1 epoch"),
    ("english", "cloning", 1, "copy the winners, 1 epoch"),
    ("english", "coin_by_length", 1, "winners shuffled, 1 epoch"),
)  # world, arm, epoch, label
TYING = [("released", "SPAG", "-"), ("losers", "losers' rows", "--"), ("losers_ties", "losers' rows, ties cost", ":")]


def stored(world: str, table: str, column: str) -> pd.DataFrame:
    """A column of a world's stored results: a line for each arm, epoch and seed."""
    frame = to_frame(read_results(sorted(map(str, (ROOT / "data" / world / "results").glob("seed*.json")))))
    return frame[(frame.table == table) & (frame.column == column)].dropna(subset=["value"])


def draw_points(figure) -> None:
    """Mean, 95% interval over seeds, and seeds of each arm, in a panel a world."""
    panels = figure.subplots(len(WORLDS), 1, sharex=True)
    for panel, (world, title) in zip(panels, WORLDS.items(), strict=True):
        arms = [arm for arm in ARMS if arm[0] == world]
        frame = stored(world, f"{POINTS} imitation", "points").sort_values("seed")
        panel.set_title(title, loc="left", fontsize=10)
        panel.axvline(0.5, color=INK, linestyle=":", linewidth=1)
        for place, (_, arm, epoch, _) in enumerate(arms):
            colour = OURS if arm in ("released", "losers_ties") else CONTROL
            values = frame[(frame.arm == arm) & (frame.epoch == epoch)].value.tolist()
            mean, (low, high), _ = student(values)
            panel.plot([low, high], [-place, -place], color=colour, linewidth=2)
            panel.plot(values, [-place] * len(values), ".", color=colour, alpha=0.5, markersize=5)
            panel.plot([mean], [-place], "o", color=colour)
            panel.text(0.93, -place, with_interval(mean, [low, high]), va="center", fontsize=8)
        panel.set_yticks([-place for place in range(len(arms))], [label for *_, label in arms], fontsize=9)
        panel.set_ylim(-len(arms) + 0.4, 0.6)
    panels[-1].set_xlim(0.3, 0.92)
    panels[-1].set_xlabel("points against imitation; 0.5 = equal; bars: 95% over seeds; small dots: seeds", fontsize=9)


def draw_ties(figure) -> None:
    """The share of ties in a model's games against itself after each epoch, a line a seed."""
    frame, panel = stored("tiny", SELF_PLAY, "tied game"), figure.subplots()
    for arm, label, style in TYING:
        for number, (_, seed) in enumerate(frame[frame.arm == arm].groupby("seed")):
            colour = OURS if arm != "released" else CONTROL
            panel.plot(seed.epoch, seed.value, style, color=colour, label=label if number == 0 else None, alpha=0.7)
    panel.set(xticks=[1, 2, 3], xlabel="epoch", ylabel="ties in games against itself")
    panel.legend(frameon=False, labelcolor=INK)


def draw_gradient(figure) -> None:
    """The derivative of a game row's loss with respect to l, over l - l_ref, as `offline_po_loss` has it."""
    import torch

    from trainers import offline_po_loss

    panel, log_ratios = figure.subplots(), torch.linspace(-3, 1.5, 301)
    zeros, ones = torch.zeros(301), torch.ones(301)
    coefficients = {"kl_coeff": 0.2, "sft_coeff": 0.5, "clip_range": 0.2, "num_game_rows": 1}
    for reward, colour in ((0.3, CONTROL), (-0.5, OURS)):
        for detach_kl, style in ((False, "-"), (True, "--")):
            logprob = log_ratios.clone().requires_grad_()
            rows = logprob, zeros, reward * ones, ones, zeros.bool()
            loss, _ = offline_po_loss(*rows, **coefficients, detach_kl=detach_kl)
            (gradient,) = torch.autograd.grad(loss, logprob)
            label = f"reward {reward}" + (", KL detached" if detach_kl else ", as released")
            panel.plot(log_ratios, gradient, style, color=colour, label=label)
    panel.axhline(0, color=INK, linewidth=0.5)
    panel.set(ylim=(-0.5, 1.2), xlabel="l - l_ref, nats a token", ylabel="gradient of the loss by l")
    panel.legend(frameon=False, labelcolor=INK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=ROOT / "data", help="folder of the figures")
    folder = parser.parse_args().output_dir
    require("matplotlib", "matplotlib>=3.10,<4")
    import matplotlib
    from matplotlib.figure import Figure

    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    same_file = {"svg.hashsalt": "spag", "svg.fonttype": "none"}  # the same bytes at each call
    matplotlib.rcParams |= dict.fromkeys(inks, INK) | same_file
    for draw, size in ((draw_points, (9.5, 5.2)), (draw_ties, (6, 3.2)), (draw_gradient, (6, 3.2))):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        with replacing(folder / f"{draw.__name__.removeprefix('draw_')}.svg", "wb") as file:
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    run_program(main)
