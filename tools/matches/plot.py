"""Results of match play as a plot: points, wins, ties and breaches with their intervals."""

import logging
from pathlib import Path

from tools.games.game import Game
from tools.matches.stats import BOTH
from tools.matches.text import as_role, shown_rows
from utils import replacing

# Colour and marker for both roles, the first and the second; colours that colour-blind readers can tell apart.
ROLE_STYLES = (("#222222", "D"), ("#D55E00", "o"), ("#0072B2", "s"))
PANELS = ("points", "win", "tie", "breach")
logger = logging.getLogger(__name__)


def write_plot(path: Path, results: dict, game: Game) -> None:
    """Draw points and rates as SVG, a row of panels for each word list; needs matplotlib, which is optional."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = shown_rows(results)
    pairs = list(dict.fromkeys((row["player"], row["opponent"]) for row in rows))
    lists = list(dict.fromkeys(row["words"] for row in rows))
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.family": "sans-serif"}):
        size = (2 + 2.6 * len(PANELS), 1 + len(lists) * (0.9 + 0.6 * len(pairs)))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(lists), len(PANELS), sharex="col", sharey=True, squeeze=False)
        for words, line in zip(lists, grid, strict=True):
            line[0].set_yticks(range(len(pairs)), [f"{one}\nvs {other}" for one, other in pairs], parse_math=False)
            line[0].set_ylim(len(pairs) - 0.5, -0.5)
            for axis, panel in zip(line, PANELS, strict=True):
                axis.set_title(f"{panel}, %, words: {words}", fontsize=10, parse_math=False)
                axis.grid(axis="x", color="#eeeeee")
                axis.spines[["top", "right", "left"]].set_visible(False)
                of_list = [
                    (pairs.index((row["player"], row["opponent"])), row) for row in rows if row["words"] == words
                ]
                _draw(axis, panel, of_list, (BOTH, *game.roles))
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        with replacing(path, "wb") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})


def _draw(axis, panel: str, rows: list[tuple[int, dict]], roles: tuple[str, ...]) -> None:
    """One quantity of the pairs in each role; `rows` stand at the heights of their pairs."""
    if panel == "points":
        axis.axvline(50, color="#666666", linewidth=1.2, linestyle="--", zorder=1)
    for number, (role, (colour, marker)) in enumerate(zip(roles, ROLE_STYLES, strict=True)):
        for height, row in rows:
            if row["role"] == role:
                rate = {"share": row["points"], "interval": row["points_interval"]}
                rate = rate if panel == "points" else row["rates"][panel]
                share, (low, high) = rate["share"], rate["interval"]
                bars = [[100 * (share - low)], [100 * (high - share)]]
                label = as_role(role) if height == rows[0][0] else None
                place = height + (number - 1) * 0.24
                axis.errorbar(100 * share, place, xerr=bars, label=label, color=colour, fmt=marker, capsize=3)
