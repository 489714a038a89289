"""Results of match play as a plot: points, wins, ties and breaches with their intervals."""

from pathlib import Path

from tools.games.game import Game
from tools.matches.stats import BOTH
from tools.matches.text import as_role, shown_rows
from utils import replacing

# Colour and marker for both roles, the first and the second; colours that colour-blind readers can tell apart.
ROLE_STYLES = (("#222222", "D"), ("#D55E00", "o"), ("#0072B2", "s"))
PANELS = ("points", "win", "tie", "breach")


def write_plot(path: Path, results: dict, game: Game) -> None:
    """Draw points and rates over all words as SVG; needs matplotlib, which is optional."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = shown_rows(results)
    rows = [row for row in shown if row["words"] == shown[0]["words"]]
    pairs = list(dict.fromkeys((row["player"], row["opponent"]) for row in rows))
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.family": "sans-serif"}):
        figure = Figure(figsize=(2 + 2.6 * len(PANELS), 1.5 + 0.6 * len(pairs)), layout="constrained")
        axes = figure.subplots(1, len(PANELS), sharey=True)
        axes[0].set_yticks(range(len(pairs)), [f"{one}\nvs {other}" for one, other in pairs], parse_math=False)
        axes[0].set_ylim(len(pairs) - 0.5, -0.5)
        axes[0].axvline(50, color="#666666", linewidth=1.2, linestyle="--")
        for axis, panel in zip(axes, PANELS, strict=True):
            axis.set_title(f"{panel}, %", fontsize=10)
            axis.grid(axis="x", color="#eeeeee")
            axis.spines[["top", "right", "left"]].set_visible(False)
            for row in rows:
                place = pairs.index((row["player"], row["opponent"]))
                number = (BOTH, *game.roles).index(row["role"])
                rate = row["rates"].get(panel, {"share": row["points"], "interval": row["points_interval"]})
                share, (low, high) = rate["share"], rate["interval"]
                bars = [[100 * (share - low)], [100 * (high - share)]]
                style = dict(zip(("color", "fmt"), ROLE_STYLES[number], strict=True))
                label = None if place else as_role(row["role"])
                axis.errorbar(100 * share, place + (number - 1) * 0.24, xerr=bars, label=label, capsize=3, **style)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        with replacing(path, "wb") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
