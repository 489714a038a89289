"""Who meets whom with which words: the games of an evaluation, in the order in which they are played."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tools.matches.stats import Match


def pairs(players: Sequence[str], against: str | None = None) -> list[tuple[str, str]]:
    """The players in the first and the second role of every match; matches of the same two stand side by side."""
    if len(players) == 1:
        return [(players[0], players[0])]
    meetings = itertools.combinations(players, 2)
    if against is not None:
        meetings = ((player, against) for player in players if player != against)
    return [pair for one, other in meetings for pair in ((one, other), (other, one))]


class Schedule(NamedTuple):
    """The games, match after match: in each, every word of its list once, then all again."""

    matches: list[Match]
    words: list[str]  # of all games
    match_of: list[int]  # of all games, the number of their match


def make_schedule(
    players: Sequence[str],
    lists: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    *,
    against: str | None = None,
    games_per_word: int = 1,
) -> Schedule:
    """All matches of the players with each word list (by name) and each seed."""
    matches = [Match(*pair, name, seed) for pair in pairs(players, against) for name in lists for seed in seeds]
    games = [list(lists[match.words]) * games_per_word for match in matches]
    numbers = [number for number, words in enumerate(games) for _ in words]
    return Schedule(matches, list(itertools.chain.from_iterable(games)), numbers)
