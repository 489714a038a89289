"""Results of match play as a plot: points with their intervals, and how games ended."""

import logging
from pathlib import Path

from tools.games.game import Game
from tools.matches.stats import BOTH
from tools.matches.text import as_role, pooled_rows, shown_pairs
from utils import replacing

# Colour, marker and size for both roles, the first and the second; colours that colour-blind readers can tell apart.
ROLE_STYLES = (("#222222", "D", 7), ("#D55E00", "o", 6), ("#0072B2", "s", 6))
SHARE_COLOURS = {
    "win": "#2a7f62",
    "win by breach": "#9fd3bf",
    "tie": "#dcdcdc",
    "loss by breach": "#f3bfa0",
    "loss": "#c4572e",
}
LABELLED_SHARE = 7  # percent; narrower parts of a bar have no room for their number
BAR_HEIGHT = 0.36
INCHES_PER_PAIR, INCHES_PER_LIST = 0.85, 5.2
LEGEND_STYLE = {"loc": "outside upper center", "ncols": 5, "frameon": False, "columnspacing": 1.4, "handlelength": 1.5}
logger = logging.getLogger(__name__)


def write_plot(path: Path, results: dict, game: Game) -> bool:
    """Draw points and rates as SVG; without matplotlib, which is optional, say how to get it and write nothing."""
    try:
        import matplotlib
    except ImportError:
        logger.warning("%s is not drawn: that needs pip install matplotlib", path)
        return False
    from matplotlib.figure import Figure

    pairs, lists = shown_pairs(results), results["settings"]["words"]
    rows, roles = pooled_rows(results), (BOTH, *game.roles)
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.family": "sans-serif"}):
        size = (1.6 + INCHES_PER_LIST * len(lists), 2.6 + 2 * INCHES_PER_PAIR * len(pairs))
        figure = Figure(figsize=size, layout="constrained")
        for half, draw in zip(figure.subfigures(2, 1), (_draw_points, _draw_rates), strict=True):
            axes = half.subplots(1, len(lists), sharex=True, sharey=True, squeeze=False)[0]
            for axis, words in zip(axes, lists, strict=True):
                draw(axis, roles, [[rows.get((words, *pair, role)) for role in roles] for pair in pairs])
                games = sum(row["games"] for key, row in rows.items() if (key[0], key[3]) == (words, roles[1]))
                axis.set_title(f"{words}: {games} games", fontsize=10)
                axis.spines[["top", "right", "left"]].set_visible(False)
                axis.tick_params(axis="y", length=0)
            half.legend(*axes[0].get_legend_handles_labels(), **LEGEND_STYLE)
            axes[0].set_yticks(range(len(pairs)), [f"{player}\nvs {opponent}" for player, opponent in pairs])
            axes[0].set_ylim(len(pairs) - 0.5, -0.5)
        with replacing(path, "wb") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
    return True


def _draw_points(axis, roles: tuple[str, ...], pairs: list[list[dict | None]]) -> None:
    """Points with intervals, a line for each of the roles; each pair has a row for each of them."""
    axis.axvline(50, color="#666666", linewidth=1.2, linestyle="--", zorder=1)
    for number, (role, (colour, marker, size)) in enumerate(zip(roles, ROLE_STYLES, strict=True)):
        drawn = [(place + (number - 1) * 0.24, pair[number]) for place, pair in enumerate(pairs) if pair[number]]
        if not drawn:  # of a player against itself there is nothing to pool
            continue
        points = [100 * row["points"] for _, row in drawn]
        lower = [100 * (row["points"] - row["points_interval"][0]) for _, row in drawn]
        upper = [100 * (row["points_interval"][1] - row["points"]) for _, row in drawn]
        heights = [height for height, _ in drawn]
        line = {"color": colour, "fmt": marker, "markersize": size, "capsize": 3, "linewidth": 1.6}
        axis.errorbar(points, heights, xerr=[lower, upper], label=as_role(role), **line)
    axis.grid(axis="x", color="#eeeeee")
    axis.set_axisbelow(True)
    axis.set_xlabel("points, % (95% interval)")


def _draw_rates(axis, roles: tuple[str, ...], pairs: list[list[dict | None]]) -> None:
    """Stacked shares of outcomes: for each pair, the player in the first role above, in the second below."""
    for number, offset in ((1, -0.2), (2, 0.2)):
        heights = [place + offset for place in range(len(pairs))]
        shares = [_parts(pair[number]) for pair in pairs]
        for height in heights:
            name, colour = roles[number][:3] + ".", ROLE_STYLES[number][0]
            axis.text(-1, height, name, ha="right", va="center", fontsize=8, color=colour)
        left = [0.0] * len(heights)
        for part, colour in SHARE_COLOURS.items():
            widths = [100 * share[part] for share in shares]
            label = part if number == 1 else None
            axis.barh(heights, widths, BAR_HEIGHT, left, color=colour, label=label)
            for height, start, width in zip(heights, left, widths, strict=True):
                if width >= LABELLED_SHARE:
                    ink = "white" if part in ("win", "loss") else "black"
                    middle = start + width / 2
                    axis.text(middle, height, f"{width:.0f}", ha="center", va="center", fontsize=8, color=ink)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.set_xlim(0, 100)
    axis.tick_params(axis="y", pad=28)  # room for the names of the roles
    axis.set_xlabel("share of games, %")


def _parts(row: dict) -> dict[str, float]:
    """Shares of a bar: games won and lost by a breach of the rules stand beside the other wins and losses."""
    won, lost = row["breach_wins"], row["breach_losses"]
    games = (row["wins"] - won, won, row["ties"], lost, row["losses"] - lost)
    return {part: number / row["games"] for part, number in zip(SHARE_COLOURS, games, strict=True)}
