"""The figures of data/RESULTS.md and configs/README.md: `python -m tools.study.figure`. Needs matplotlib."""

import argparse
import itertools
from pathlib import Path

from tools.estimates import with_interval
from tools.study.collect import IMITATION, POINTS, SELF_PLAY
from tools.study.table import read_results, student, to_frame
from utils import ROOT, require, run_program

# SPAG has one colour in all figures. The others, too, show on white and on black.
OURS, OTHER, CONTROL, INK = "#3b82f6", "#d97706", "#8b949e", "#7d8590"
LABELS = {
    "released": "SPAG, as released",
    "losers": "losers' rows too",
    "losers_ties": "losers' rows too, ties cost",
    "cloning": "copy the winners",
    "sft": "no games",
    "coin_by_length": "rewards shuffled",
}
TITLES = {"tiny": "Toy world: it learns to win", "english": "English, 135M: no gain is shown"}
SHOWN = {  # in points.svg: arm and epoch of each line of a world
    "tiny": [(arm, 3) for arm in ("released", "cloning", "sft", "coin_by_length")],
    "english": [("released", 3), ("sft", 3)],
}


def stored(world: str, table: str, column: str):
    """A column of a world's stored results: a line for each arm, epoch and seed."""
    frame = to_frame(read_results(sorted((ROOT / "data" / world / "results").glob("seed*.json"))))
    return frame[(frame.table == table) & (frame.column == column)].sort_values(["seed", "epoch"])


def draw_points(figure) -> None:
    """Mean, 95% interval over seeds, and seeds of each arm, in a panel a world."""
    panels = figure.subplots(len(SHOWN), 1, sharex=True, height_ratios=[len(lines) for lines in SHOWN.values()])
    for panel, (world, lines) in zip(panels, SHOWN.items(), strict=True):
        points = stored(world, f"{POINTS} {IMITATION}", "points")
        for place, (arm, epoch) in enumerate(lines):
            colour = OURS if arm == "released" else CONTROL
            values = points[(points.arm == arm) & (points.epoch == epoch)].value.tolist()
            mean, (low, high), _ = student(values)
            panel.plot(values, [place] * len(values), ".", color=colour, alpha=0.5, markersize=5)
            panel.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color=colour, linewidth=2)
            panel.text(0.82, place, with_interval(mean, [low, high]), va="center", fontsize=10)
        panel.set_yticks(range(len(lines)), [LABELS[arm] for arm, _ in lines], fontsize=11)
        panel.set_title(TITLES[world], loc="left", fontsize=12)
        panel.axvline(0.5, color=INK, linestyle=":", linewidth=1)
        panel.set(xlim=(0.35, 0.8), ylim=(len(lines) - 0.4, -0.6))
    panels[-1].set_xlabel("points after three epochs; 0.5 is even; bars: 95% over seeds", fontsize=11)


def draw_ties(figure) -> None:
    """The share of ties in a model's games against itself after each epoch, from imitation on, a line a seed."""
    panel, frame = figure.subplots(), stored("tiny", SELF_PLAY, "tied game")
    for arm, style in {"released": "-", "losers": "--", "losers_ties": ":"}.items():
        name, colour = LABELS[arm], OURS if arm == "released" else OTHER
        for seed in frame[frame.arm == arm].seed.unique():
            line = frame[frame.arm.isin([IMITATION, arm]) & (frame.seed == seed)]
            panel.plot(line.epoch, line.value, style, color=colour, label=name, alpha=0.7)
            name = None  # one line of an arm is in the legend
    last = frame.epoch.max()
    panel.set(xticks=range(last + 1), xlabel="epoch; 0: imitation", ylabel="ties in games against itself")
    figure.legend(loc="outside upper center", ncols=2)


def draw_gradient(figure) -> None:
    """The derivative of a game row's loss with respect to l, over l - l_ref, as `offline_po_loss` has it."""
    import torch

    from trainers import offline_po_loss

    panel, zeros = figure.subplots(), torch.zeros(551)
    for reward, detach_kl in itertools.product((0.3, -0.5), (False, True)):
        logprob = torch.linspace(-4, 1.5, 551, requires_grad=True)
        rows = {"rewards": zeros + reward, "weights": zeros + 1, "sft_mask": zeros.bool(), "num_game_rows": 1}
        coefficients = {"kl_coeff": 0.2, "sft_coeff": 0.5, "clip_range": 0.2, "detach_kl": detach_kl}
        loss, _ = offline_po_loss(logprob, zeros, **rows, **coefficients)
        (gradient,) = torch.autograd.grad(loss, logprob)
        label = f"reward {reward}, KL detached" if detach_kl else f"reward {reward}, as released"
        style, colour = "--" if detach_kl else "-", OURS if reward > 0 else OTHER
        panel.plot(logprob.detach(), gradient, style, color=colour, label=label)
    panel.axhline(0, color=INK, linewidth=0.5)
    panel.set(ylim=(-0.5, 1.2), xlabel="l - l_ref, nats a token", ylabel="gradient by l (above 0: made less likely)")
    panel.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "data", help="folder of the figures")
    folder = parser.parse_args().output_dir
    require("matplotlib", "matplotlib>=3.10,<4")
    import matplotlib
    from matplotlib.figure import Figure

    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
    same_file = {"svg.hashsalt": "spag", "svg.fonttype": "none"}  # the same bytes at each call
    matplotlib.rcParams |= dict.fromkeys(inks, INK) | same_file | {"legend.frameon": False}
    wide = {draw_points: (6.5, 3.6)}  # read on a phone too
    for draw in (draw_points, draw_ties, draw_gradient):
        figure = Figure(figsize=wide.get(draw, (6, 3.2)), layout="constrained")
        draw(figure)
        name = draw.__name__.removeprefix("draw_")
        figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    run_program(main)
