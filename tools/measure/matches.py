"""Matches: pairings, points and rates with intervals, and the files matches.json and matches.txt.

Games about the same target word are not independent, so standard errors are clustered by word.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.common.files import read_json, read_json_or_jsonl, write_json, write_text
from tools.games.game import Game
from tools.measure.estimates import CONFIDENCE, estimate, with_interval

BOTH = "both"
ALL = "all"  # the row that pools all word lists
WIN, TIE, LOSS = "win", "tie", "loss"
RESULTS = "matches.json"  # `results` below are its content
TABLE = "matches.txt"
NAMES = ("player", "opponent", "words", "role")
HOW_COUNTED = (
    "Points are mean points per game: (wins + ties / 2) / games, unless the game defines others. Breaches are games "
    f"that ended by a rule violation. Shares are in percent, with {CONFIDENCE:.0%} intervals over target words, not "
    "over trainings. Empty: the player's empty replies."
)


class Side(NamedTuple):
    """One game from one player's side."""

    points: float
    result: str  # WIN, TIE or LOSS
    breach: bool  # the game ended by a rule violation
    length: int  # messages up to the decisive one
    messages: int  # of this player
    empty: int  # empty ones of these


class Measure(NamedTuple):
    """A statistic of a player in a match, under this name in matches.json, its table, the report and studies."""

    name: str
    count: Callable[[Side], float]  # a game's contribution
    per: str = "games"  # denominator of the mean: "games" or "messages"
    interval: bool = True  # only for values between 0 and 1
    form: str = ".1%"


MEASURES = (
    Measure("points", lambda side: side.points),
    Measure(WIN, lambda side: side.result == WIN),
    Measure(TIE, lambda side: side.result == TIE),
    Measure(LOSS, lambda side: side.result == LOSS),
    Measure("breach", lambda side: side.breach),
    Measure("length", lambda side: side.length, interval=False, form=".2f"),
    Measure("empty", lambda side: side.empty, per="messages", interval=False),
)
HEAD = (*NAMES, "games", *(measure.name for measure in MEASURES))


def pairs(players: Sequence[str], against: str | None = None) -> list[tuple[str, str]]:
    """The players of each match, in the first and the second role.

    A pair's two matches are adjacent, so that its models are loaded once.
    """
    if len(players) == 1:
        return [(players[0], players[0])]
    meetings = list(itertools.combinations(players, 2))
    if against is not None:
        meetings = [(player, against) for player in players if player != against]
    both_ways = []
    for one, other in meetings:
        both_ways += [(one, other), (other, one)]
    return both_ways


# Games to rows.


def result_rows(episodes: Sequence[Mapping], game: Game) -> Iterator[dict]:
    """Yield a row for each player, opponent, word list, role and seed, and rows that pool lists, roles and seeds.

    Episodes have their players under their roles, `words` (the list) and `seed`. All numbers are from the player's
    side. A player against itself has no row for both roles, which would count each game twice. Pooled means are over
    games, so longer lists weigh more.
    """
    rows: dict[tuple, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))  # sums by target word
    for episode in episodes:
        for role in game.roles:
            players = (episode[role], episode[game.other(role)])  # the player first, then its opponent
            side = side_of(episode, game, role)
            sums = {"games": 1, "messages": side.messages} | {each.name: each.count(side) for each in MEASURES}
            for words in (episode["words"], ALL):
                for pooled_role in (role, BOTH):
                    for seed in (episode["seed"], None):
                        rows[players, words, pooled_role, seed][episode["target_word"]].update(sums)
    met = dict.fromkeys(players for players, *_ in rows)
    lists = list(dict.fromkeys(episode["words"] for episode in episodes))
    if len(lists) > 1:
        lists.append(ALL)
    seeds = sorted({episode["seed"] for episode in episodes})
    for key in itertools.product(met, lists, (*game.roles, BOTH), (None, *seeds)):
        (player, opponent), words, role, seed = key
        if key in rows and not (player == opponent and role == BOTH):
            head = {"player": player, "opponent": opponent, "words": words, "role": role, "seed": seed}
            yield head | summarise(rows[key])


def side_of(episode: Mapping, game: Game, role: str) -> Side:
    """A game from a role's side.

    An outcome without a winner counts as a tie even if both roles reached a common goal, which only the points show.
    """
    history = episode["history"]
    outcome = game.outcome(episode["outcome"])
    points = game.points(episode["target_word"], history[: episode["length"]], outcome.name)
    result = TIE if outcome.winner is None else WIN if outcome.winner == role else LOSS
    texts = [message["content"].strip() for message in history if message["role"] == role]
    return Side(points[game.roles.index(role)], result, outcome.breach, episode["length"], len(texts), texts.count(""))


def summarise(sums_by_word: Mapping[str, Counter[str]]) -> dict:
    """A row's numbers, NAME and NAME_interval, from the player's sums by target word."""
    all_sums = sums_by_word.values()
    total = sum(all_sums, Counter())
    row = {"games": total["games"], "wins": total[WIN], "ties": total[TIE], "losses": total[LOSS]}
    for measure in MEASURES:
        name = measure.name
        if measure.interval:
            sizes, sums = ([each[key] for each in all_sums] for key in (measure.per, name))
            row[name], row[f"{name}_interval"] = estimate(sizes, sums)
        else:
            row[name] = total[name] / total[measure.per] if total[measure.per] else None
    return row


# Rows to files and back.


def read_matches(path: Path) -> dict:
    """The content of matches.json, with None for measures that an earlier version's file lacks."""
    results = read_json(path)
    unknown = dict.fromkeys(measure.name for measure in MEASURES)
    return results | {"results": [unknown | row for row in results["results"]]}


def write_results(folder: Path, games_path: Path, settings: dict, game: Game) -> None:
    rows = list(result_rows(read_json_or_jsonl(games_path), game))
    results = {"settings": settings, "results": rows, "games_path": games_path.name}
    write_json(folder / RESULTS, results)
    write_text(folder / TABLE, matches_text(results, game))


def matches_text(results: dict, game: Game) -> str:
    """A table of players, word lists and roles; the last line has the points of all pairs."""
    settings = results["settings"]
    rows = shown_rows(results)
    return (
        f"{game.title} by match: --task_type {settings['task_type']}, seeds {', '.join(map(str, settings['seeds']))}, "
        f"games per word {settings['games_per_word']}, turns {settings['max_turns']}\n{HOW_COUNTED}\n\n"
        f"{aligned([HEAD, *map(cells, rows)])}\n\n{points_line(results)}\n"
    )


def aligned(lines: Iterable[Sequence[str]]) -> str:
    """Lines of cells as right-aligned columns of text."""
    columns = []
    for column in zip(*lines, strict=True):
        width = max(map(len, column))
        columns.append([cell.rjust(width) for cell in column])
    return "\n".join(map(" ".join, zip(*columns, strict=True)))


def shown_rows(results: dict) -> list[dict]:
    """The rows of a table, pooled over seeds, with each pair once, from the side of the later player.

    With `against`, that is its opponent. Rows that pool word lists and roles come first.
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
    numbers = [
        with_interval(row[measure.name], row.get(f"{measure.name}_interval"), measure.form).replace("%", "")
        for measure in MEASURES
    ]
    return [*(row[name] for name in NAMES), f"{row['games']:,}", *numbers]


def points_line(results: dict) -> str:
    return "; ".join(
        f"{row['player']} against {row['opponent']} {as_role(row['role'])}: points "
        f"{with_interval(row['points'], row['points_interval'], '.1%')} in {row['games']:,} games "
        f"({row['wins']:,} wins, {row['ties']:,} ties, {row['losses']:,} losses)"
        for row in pooled_rows(results)
    )


def pooled_rows(results: dict) -> list[dict]:
    """The first of the shown rows for each pair of players, which pools word lists and roles."""
    groups = itertools.groupby(shown_rows(results), key=lambda row: (row["player"], row["opponent"]))
    return [next(group) for _, group in groups]


def as_role(role: str) -> str:
    return "in both roles" if role == BOTH else f"as {role}"
