"""Results of match play to look at: a table as text, and a plot.

`results` is what it writes to matches.json.
"""

import logging
from pathlib import Path

from tools.games.taboo import ATTACKER, DEFENDER
from tools.matches.stats import ALL, BOTH
from utils import replacing

ROLE_ORDER = (BOTH, ATTACKER, DEFENDER)
logger = logging.getLogger(__name__)


def shown_pairs(results: dict) -> list[tuple[str, str]]:
    """(player, opponent) of each two players once: the later one against the earlier, or against `against`."""
    settings = results["settings"]
    players, against = settings["players"], settings["against"]
    place = {player: number if player != against else -1 for number, player in enumerate(players)}
    played = {(row["player"], row["opponent"]): None for row in results["results"]}
    ordered = sorted(played, key=lambda pair: (place[pair[1]], place[pair[0]]))
    return [(player, opponent) for player, opponent in ordered if place[player] >= place[opponent]]


def pooled_rows(results: dict) -> dict[tuple[str, str, str, str], dict]:
    """The rows over all seeds, by word list, player, opponent and role."""
    return {
        (row["words"], row["player"], row["opponent"], row["role"]): row
        for row in results["results"]
        if row["seed"] is None
    }


def word_lists(results: dict) -> list[str]:
    """Names of the lists that have rows, the pooled one last."""
    lists = results["settings"]["words"]
    return [*lists, ALL] if len(lists) > 1 else lists


# --- text ----------------------------------------------------------------------------------------------------------


def matches_text(results: dict) -> str:
    """Tables to read: for each word list points of every pair, then points and rates by role."""
    settings = results["settings"]
    seeds = ", ".join(map(str, settings["seeds"]))
    parts = [
        f"Adversarial Taboo by match: --task_type {settings['task_type']}, seeds {seeds}, games per word "
        f"{settings['games_per_word']}, turns {settings['taboo_max_turns']}\n"
        "Points are (wins + ties/2) / games. All shares are in percent, with 95% intervals over target words.\n"
        "A breach is a game that its attacker ended by breaking the rules: a loss of the attacker, a win of the\n"
        "defender. Clean games are decided without breach, tie or empty reply. Empty: the player's empty replies."
    ]
    for words in word_lists(results):
        parts.append(f"== words: {words} ==")
        if len(settings["players"]) > 2 and settings["against"] is None:
            parts.append(
                "Points in both roles, of the player on the left against the one above:\n" + _matrix(results, words)
            )
        parts.append(_details(results, words))
    return "\n\n".join(parts) + "\n"


def _matrix(results: dict, words: str) -> str:
    rows, players = pooled_rows(results), results["settings"]["players"]
    opponents = [name for name in players if any((words, player, name, BOTH) in rows for player in players)]
    lines = [["", *opponents]]
    for player in players:
        cells = [rows.get((words, player, opponent, BOTH)) for opponent in opponents]
        lines.append([player, *(_share(row["points"], row["points_interval"]) if row else "-" for row in cells)])
    return align(lines)


def _details(results: dict, words: str) -> str:
    rows = pooled_rows(results)
    head = ["player", "opponent", "role", "games", "points", "win", "tie", "loss", "breach"]
    lines = [[*head, "clean", "clean points", "length", "empty"]]
    for player, opponent in shown_pairs(results):
        names = (player, opponent)
        for role in ROLE_ORDER:
            if row := rows.get((words, player, opponent, role)):
                lines.append([*names, role, *_numbers(row)])
                names = ("", "")
    return align(lines)


def _numbers(row: dict) -> list[str]:
    """The cells of a row after its names."""
    rates = [row["rates"][name] for name in ("win", "tie", "loss", "breach")]
    clean = row["clean"]
    return [
        str(row["games"]),
        _share(row["points"], row["points_interval"]),
        *(_share(rate["share"], rate["interval"]) for rate in rates),
        str(clean["games"]),
        _share(clean["points"], clean["points_interval"]),
        f"{row['mean_length']:.2f}",
        f"{100 * row['empty_replies'] / row['messages']:.1f}" if row["messages"] else "-",
    ]


def _share(share: float | None, interval: list[float] | None) -> str:
    """In percent: 54.0 [51.2, 56.8]."""
    if share is None:
        return "-"
    return f"{100 * share:.1f} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def align(lines: list[list[str]]) -> str:
    """Cells in columns, names on the left and numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    named = {number for number, title in enumerate(lines[0]) if title in ("", "player", "opponent", "role")}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in named else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


# --- plot ----------------------------------------------------------------------------------------------------------

ROLE_STYLES = {  # colour, marker, size; colours that colour-blind readers can tell apart
    BOTH: ("#222222", "D", 7),
    ATTACKER: ("#D55E00", "o", 6),
    DEFENDER: ("#0072B2", "s", 6),
}
SHARE_COLOURS = {
    "win": "#2a7f62",
    "win by breach": "#9fd3bf",
    "tie": "#dcdcdc",
    "loss by breach": "#f3bfa0",
    "loss": "#c4572e",
}
LEGEND = {BOTH: "both roles", ATTACKER: "as attacker", DEFENDER: "as defender"}
LABELLED_SHARE = 7  # percent; narrower parts of a bar have no room for their number
BAR_HEIGHT = 0.36
INCHES_PER_PAIR, INCHES_PER_LIST = 0.85, 5.2
LEGEND_STYLE = {"loc": "outside upper center", "ncols": 5, "frameon": False, "columnspacing": 1.4, "handlelength": 1.5}


def write_plot(path: Path, results: dict) -> bool:
    """Draw points and rates as SVG; without matplotlib, which is optional, say how to get it and write nothing."""
    try:
        import matplotlib
    except ImportError:
        logger.warning("%s is not drawn: that needs pip install matplotlib", path)
        return False
    from matplotlib.figure import Figure

    pairs, lists = shown_pairs(results), results["settings"]["words"]
    rows = pooled_rows(results)
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.family": "sans-serif"}):
        size = (1.6 + INCHES_PER_LIST * len(lists), 2.6 + 2 * INCHES_PER_PAIR * len(pairs))
        figure = Figure(figsize=size, layout="constrained")
        for half, draw in zip(figure.subfigures(2, 1), (_draw_points, _draw_rates), strict=True):
            axes = half.subplots(1, len(lists), sharex=True, sharey=True, squeeze=False)[0]
            for axis, words in zip(axes, lists, strict=True):
                draw(axis, [[rows.get((words, *pair, role)) for role in ROLE_ORDER] for pair in pairs])
                games = sum(row["games"] for key, row in rows.items() if key[0] == words and key[3] == ATTACKER)
                axis.set_title(f"{words}: {games} games", fontsize=10)
                axis.spines[["top", "right", "left"]].set_visible(False)
                axis.tick_params(axis="y", length=0)
            half.legend(*axes[0].get_legend_handles_labels(), **LEGEND_STYLE)
            axes[0].set_yticks(range(len(pairs)), [f"{player}\nvs {opponent}" for player, opponent in pairs])
            axes[0].set_ylim(len(pairs) - 0.5, -0.5)
        with replacing(path, "wb") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
    return True


def _draw_points(axis, pairs: list[list[dict | None]]) -> None:
    """Points with intervals, a line for each role; `pairs` are the rows in ROLE_ORDER."""
    axis.axvline(50, color="#666666", linewidth=1.2, linestyle="--", zorder=1)
    for number, role in enumerate(ROLE_ORDER):
        colour, marker, size = ROLE_STYLES[role]
        drawn = [(place + (number - 1) * 0.24, pair[number]) for place, pair in enumerate(pairs) if pair[number]]
        if not drawn:  # of a player against itself there is nothing to pool
            continue
        points = [100 * row["points"] for _, row in drawn]
        lower = [100 * (row["points"] - row["points_interval"][0]) for _, row in drawn]
        upper = [100 * (row["points_interval"][1] - row["points"]) for _, row in drawn]
        heights = [height for height, _ in drawn]
        line = {"color": colour, "fmt": marker, "markersize": size, "capsize": 3, "linewidth": 1.6}
        axis.errorbar(points, heights, xerr=[lower, upper], label=LEGEND[role], **line)
    axis.grid(axis="x", color="#eeeeee")
    axis.set_axisbelow(True)
    axis.set_xlabel("points, % (95% interval)")


def _draw_rates(axis, pairs: list[list[dict | None]]) -> None:
    """Stacked shares of outcomes: for each pair, the player as attacker above, as defender below."""
    for role, offset in ((ATTACKER, -0.2), (DEFENDER, 0.2)):
        heights = [place + offset for place in range(len(pairs))]
        shares = [_parts(pair[ROLE_ORDER.index(role)]) for pair in pairs]
        for height in heights:
            axis.text(-1, height, role[:3] + ".", ha="right", va="center", fontsize=8, color=ROLE_STYLES[role][0])
        left = [0.0] * len(heights)
        for part, colour in SHARE_COLOURS.items():
            widths = [100 * share[part] for share in shares]
            label = part if role == ATTACKER else None
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
    """Shares of a bar: an attacker's breaches are among its losses, a defender's wins hold those of the other."""
    rates = {name: rate["share"] for name, rate in row["rates"].items()}
    own, other = (rates["breach"], 0.0) if row["role"] == ATTACKER else (0.0, rates["breach"])
    shares = (rates["win"] - other, other, rates["tie"], own, rates["loss"] - own)
    return dict(zip(SHARE_COLOURS, shares, strict=True))
