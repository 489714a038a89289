"""Who meets whom with which words: the games of an evaluation, in the order in which they are played."""

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from tools.matches.stats import Match


def pairs(players: Sequence[str], against: str | None = None) -> list[tuple[str, str]]:
    """The players in the first and the second role of every match; matches of the same two stand side by side."""
    if len(players) == 1:
        return [(players[0], players[0])]
    meetings = itertools.combinations(players, 2)
    if against is not None:
        meetings = ((player, against) for player in players if player != against)
    return [pair for one, other in meetings for pair in ((one, other), (other, one))]


class Schedule(Sequence[str]):
    """The target words of all games, match after match: in each, every word of its list once, then all again."""

    def __init__(self, matches: Sequence[Match], lists: Mapping[str, Sequence[str]], games_per_word: int):
        self.matches, self.lists = matches, lists
        lengths = (len(lists[match.words]) * games_per_word for match in matches)
        self.starts = list(itertools.accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = self.match_of(index)
        words = self.lists[self.matches[number].words]
        return words[(index - self.starts[number]) % len(words)]

    def match_of(self, index: int) -> int:
        """The number of the match that a game belongs to."""
        return bisect_right(self.starts, index) - 1


def make_schedule(
    players: Sequence[str],
    lists: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    *,
    against: str | None = None,
    games_per_word: int = 1,
) -> Schedule:
    """All matches of the players with each word list (by name) and each seed."""
    meetings = itertools.product(pairs(players, against), lists, seeds)
    return Schedule([Match(*pair, words, seed) for pair, words, seed in meetings], lists, games_per_word)
