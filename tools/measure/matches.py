"""Match play: who meets whom, and points and rates with their intervals. No torch, no files.

Games of the same target word are not independent, so standard errors count words instead of games.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tools.games.game import Game
from tools.measure.estimates import estimate

BOTH = "both"
ALL = "all"  # the row that pools all word lists
RATES = ("win", "tie", "loss", "breach")


class Match(NamedTuple):
    """Games of one player in the game's first role against another in its second."""

    first: str
    second: str
    words: str  # name of the word list
    seed: int


def pairs(players: Sequence[str], against: str | None = None) -> list[tuple[str, str]]:
    """The players of each match, in the first and the second role.

    Each pair plays its two matches in a row, so its models are loaded once (`_loaded` in tools/players/make.py).
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


def result_rows(episodes: Sequence[Mapping], game: Game) -> Iterator[dict]:
    """Yield a row for each player, opponent, word list, role and seed, and rows that pool lists, roles and seeds.

    An episode holds its players under their roles, `words` (the list) and `seed`. All numbers are from the player's
    side. A player against itself has no row for both roles, which would count each game twice. In a pooled row each
    game counts the same, so a longer list weighs more: the mean is the sum over games, divided by their number.
    """
    rows: dict[tuple, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))  # sums by target word
    for episode in episodes:
        for role in game.roles:
            players = (episode[role], episode[game.other(role)])  # the player first, then its opponent
            sums = sums_of_side(episode, game, role)
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


def sums_of_side(episode: Mapping, game: Game, role: str) -> dict[str, float]:
    """What one game adds to the sums of the player in this role.

    An outcome without a winner counts as a tie, even if both roles have reached a common aim; the points tell that.
    """
    history = episode["history"]
    outcome = game.outcome(episode["outcome"])
    points = game.points(episode["target_word"], history[: episode["length"]], outcome.name)
    result = "tie" if outcome.winner is None else "win" if outcome.winner == role else "loss"
    messages = [message["content"].strip() for message in history if message["role"] == role]
    sums = {"games": 1, "points": points[game.roles.index(role)], result: 1, "length": episode["length"]}
    sums |= {"messages": len(messages), "empty": messages.count("")}
    if outcome.breach:
        sums |= {"breach": 1, f"breach {result}": 1}
    return sums


def summarise(sums_by_word: Mapping[str, Counter[str]]) -> dict:
    """The numbers of a row, from the player's sums of each target word.

    A new number is counted for one game in `sums_of_side` and gets a key here. To be shown, it needs a column in HEAD
    and `cells` of tools/measure/match_text.py, which the report uses too, and a name in `match_numbers` of
    tools/lab/table.py, for studies. Finished matches lack the key. To count their stored games again, delete
    matches.txt and give the same command. `estimate` makes intervals of values between 0 and 1 alone, so mean_length
    has none.
    """
    all_sums = sums_by_word.values()
    total = sum(all_sums, Counter())
    games = [sums["games"] for sums in all_sums]
    means = {name: estimate(games, [sums[name] for sums in all_sums]) for name in ("points", *RATES)}
    return {
        "games": total["games"],
        "wins": total["win"],
        "losses": total["loss"],
        "ties": total["tie"],
        "breaches": total["breach"],
        "breach_losses": total["breach loss"],
        "points": means["points"][0],
        "points_interval": means["points"][1],
        "rates": {rate: dict(zip(("share", "interval"), means[rate], strict=True)) for rate in RATES},
        "mean_length": total["length"] / total["games"],
        "empty_replies": total["empty"],
        "messages": total["messages"],
    }
