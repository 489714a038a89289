"""The files of an evaluation by match: matches.json, called `results` here, and its table matches.txt."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from tools.common.files import read_json_or_jsonl, write_json, write_text
from tools.games.game import Game
from tools.measure.estimates import with_interval
from tools.measure.matches import ALL, BOTH, RATES, result_rows

RESULTS = "matches.json"
TABLE = "matches.txt"
NAMES = ("player", "opponent", "words", "role")
HEAD = (*NAMES, "games", "points", *RATES, "length", "empty")
HOW_COUNTED = (
    "Points are the mean points of a game: (wins + ties / 2) / games, unless the game pays otherwise. Breaches are "
    "games that ended by breaking the rules. All shares are in percent, with 95% intervals over target words, not "
    "over trainings. Empty: the player's empty replies."
)


def write_results(folder: Path, games_path: Path, settings: dict, game: Game) -> None:
    rows = list(result_rows(read_json_or_jsonl(games_path), game))
    results = {"settings": settings, "results": rows, "games_path": games_path.name}
    write_json(folder / RESULTS, results)
    write_text(folder / TABLE, matches_text(results, game))


def matches_text(results: dict, game: Game) -> str:
    """A table of players, word lists and roles, and a last line with the points of all pairs.

    The loop shows the last line at the end of a match (`report_end` in tools/loop/stages.py), and the quick start at
    its own end (`last_lines` in tools/loop/quickstart.py).
    """
    settings = results["settings"]
    rows = shown_rows(results)
    table = pd.DataFrame(map(cells, rows), columns=HEAD)
    return (
        f"{game.title} by match: --task_type {settings['task_type']}, seeds {', '.join(map(str, settings['seeds']))}, "
        f"games per word {settings['games_per_word']}, turns {settings['max_turns']}\n{HOW_COUNTED}\n\n"
        f"{table.to_string(index=False)}\n\n{points_line(rows)}\n"
    )


def shown_rows(results: dict) -> list[dict]:
    """The rows of a table: seeds are pooled, and each pair is there once, from the side of the later player.

    With `against` that is the one that meets it. Rows that pool word lists and roles come first.
    """
    settings = results["settings"]
    rows = [row for row in results["results"] if row["seed"] is None]
    order_of = {player: number for number, player in enumerate(settings["players"])} | {settings["against"]: -1}
    lists = list(dict.fromkeys([ALL, *(row["words"] for row in rows)]))
    shown = [row for row in rows if order_of[row["player"]] >= order_of[row["opponent"]]]

    def order(row: dict) -> tuple:
        return order_of[row["opponent"]], order_of[row["player"]], lists.index(row["words"]), row["role"] != BOTH

    return sorted(shown, key=order)


def cells(row: dict) -> list[str]:
    """The cells of a row, in the order of HEAD."""
    rates = [row["rates"][name] for name in RATES]
    empty = row["empty_replies"] / row["messages"] if row["messages"] else None
    return [
        *(row[name] for name in NAMES),
        f"{row['games']:,}",
        _percent(row["points"], row["points_interval"]),
        *(_percent(rate["share"], rate["interval"]) for rate in rates),
        f"{row['mean_length']:.2f}",
        _percent(empty, None),
    ]


def points_line(rows: Sequence[dict]) -> str:
    """One line with the points of each pair of players, and the games behind them."""
    return "; ".join(
        f"{row['player']} against {row['opponent']} {as_role(row['role'])}: points "
        f"{with_interval(row['points'], row['points_interval'], '.1%')} in {row['games']:,} games "
        f"({row['wins']:,} wins, {row['ties']:,} ties, {row['losses']:,} losses)"
        for row in pooled_rows(rows)
    )


def pooled_rows(rows: Sequence[dict]) -> list[dict]:
    """Of the shown rows one for each pair of players: the first, which pools word lists and roles.

    The last line of a match (`points_line`) and the first table of the report (`headline` in
    tools/measure/report_page.py) show the points of these rows.
    """
    groups = itertools.groupby(rows, key=lambda row: (row["player"], row["opponent"]))
    return [next(group) for _, group in groups]


def as_role(role: str) -> str:
    return "in both roles" if role == BOTH else f"as {role}"


def _percent(share: float | None, interval: Sequence[float] | None) -> str:
    return with_interval(share, interval, ".1%").replace("%", "")
