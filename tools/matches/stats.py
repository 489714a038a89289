"""Match play: who meets whom, and rates, points and their intervals, from finished games as they come.

Games of the same target word are not independent, whoever plays them: standard errors count words, not games. Memory
grows with matches and words, not with games. No torch, no files.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from tools.games.game import Game

CONFIDENCE = 0.95
ROUNDING = 1e-9  # a standard error below this is none
BOTH = "both"
ALL = "all"  # the row that pools all word lists
RATES = ("win", "loss", "tie", "breach")


def estimate(sizes: Sequence[int], totals: Sequence[float]) -> tuple[float | None, list[float] | None]:
    """A mean between 0 and 1 and its 95% interval, from clusters of dependent observations; None, None of none.

    `sizes` are the observations per cluster, `totals` their sums. The interval is Wilson's, with as many observations
    as would give the clustered standard error, and Student's quantile for the number of clusters. Where that error
    says nothing (all observations alike, a single cluster), every cluster counts as one observation.
    """
    observations = sum(sizes)
    if not observations:
        return None, None
    mean = sum(totals) / observations
    clusters = sum(size > 0 for size in sizes)
    error = clustered_standard_error(sizes, totals)
    if error is None or error < ROUNDING:
        return mean, wilson(mean, clusters, NormalDist().inv_cdf((1 + CONFIDENCE) / 2))
    return mean, wilson(mean, mean * (1 - mean) / error**2, t_quantile(clusters - 1))


def mean_difference(sizes: Sequence[int], totals: Sequence[float]) -> tuple[float, list[float]]:
    """A mean of differences, of any sign, and its 95% interval; clusters as in `estimate`, at least two."""
    mean = sum(totals) / sum(sizes)
    half = t_quantile(len(sizes) - 1) * clustered_standard_error(sizes, totals)
    return mean, [mean - half, mean + half]


def clustered_standard_error(sizes: Sequence[int], totals: Sequence[float]) -> float | None:
    """Standard error of sum(totals) / sum(sizes), whatever the dependence within clusters; None of fewer than two.

    sqrt(G / (G - 1) * sum_c (total_c - mean * size_c)^2) / observations, over the G clusters that are not empty.
    """
    clusters, observations, total = sum(size > 0 for size in sizes), sum(sizes), sum(totals)
    if clusters < 2:
        return None
    # Times the observations, so that whole and half points stay exact and equal games give exactly 0.
    squares = sum((part * observations - total * size) ** 2 for size, part in zip(sizes, totals, strict=True))
    return math.sqrt(clusters / (clusters - 1) * squares) / observations**2


def wilson(share: float, observations: float, quantile: float) -> list[float]:
    """Wilson's score interval for a share of so many independent observations (J. Am. Stat. Assoc. 22, 1927)."""
    spread = quantile**2 / observations
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    return [max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))]  # also after rounding


def t_quantile(freedom: int) -> float:
    """Student's quantile of a two-sided interval with our CONFIDENCE."""
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, without the second that importing it takes

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


class Match(NamedTuple):
    """Games of one player in the game's first role against another in its second."""

    first: str
    second: str
    words: str  # name of the word list
    seed: int

    @staticmethod
    def keys(game: Game) -> tuple[str, str, str, str]:
        """Under what an episode stores the fields: the players by the roles that they had."""
        return (*game.roles, "words", "seed")


def pairs(players: Sequence[str], against: str | None = None) -> list[tuple[str, str]]:
    """The players in the first and the second role of every match; matches of the same two stand side by side."""
    if len(players) == 1:
        return [(players[0], players[0])]
    meetings = itertools.combinations(players, 2)
    if against is not None:
        meetings = ((player, against) for player in players if player != against)
    return [pair for one, other in meetings for pair in ((one, other), (other, one))]


def schedule(
    pairs: Iterable[tuple[str, str]], lists: Mapping[str, Sequence[str]], seeds: Sequence[int], games_per_word: int = 1
) -> list[tuple[Match, str]]:
    """The games of all pairs with each word list (by name) and each seed, match after match.

    In each match every word of its list is played once, then all again.
    """
    matches = (Match(*pair, name, seed) for pair in pairs for name in lists for seed in seeds)
    return [(match, word) for match in matches for word in [*lists[match.words]] * games_per_word]


Counts = dict[str, dict[str, Counter[str]]]  # sums over games, by role and target word


def count_matches(episodes: Iterable[Mapping], game: Game) -> dict[Match, Counts]:
    """Counts by match, of episodes that say who played them, with which word list and seed.

    Raises ValueError for an outcome that the game does not have.
    """
    counts: dict[Match, Counts] = {}
    for episode in episodes:
        match = Match(*(episode[key] for key in Match.keys(game)))
        by_role = counts.setdefault(match, {role: defaultdict(Counter) for role in game.roles})
        for role, sums in _sums_of(episode, game):
            by_role[role][episode["target_word"]].update(sums)
    return counts


def _sums_of(episode: Mapping, game: Game) -> Iterator[tuple[str, dict[str, float]]]:
    """What one game adds to the sums of each role. Clean: decided without breach or empty reply."""
    history, ended = episode["history"], game.outcome(episode["outcome"])
    decided = ended.name != game.outcomes[-1].name and not ended.breach
    clean = decided and all(message["content"].strip() for message in history)
    gained = game.checked_points(episode["target_word"], history[: episode["length"]], ended.name)
    for role, points in zip(game.roles, gained, strict=True):
        result = "tie" if ended.winner is None else "win" if ended.winner == role else "loss"
        said = [message["content"].strip() for message in history if message["role"] == role]
        sums = {"games": 1, "points": points, result: 1, "length": episode["length"]}
        sums |= {"messages": len(said), "empty": said.count("")}
        if ended.breach:
            sums |= {"breach": 1, f"breach {result}": 1}
        if clean:
            sums |= {"clean": 1, "clean points": points}
        yield role, sums


def result_rows(counts: Mapping[Match, Counts]) -> Iterator[dict]:
    """One row per player, opponent, word list, role and seed that played, and those that pool lists and seeds.

    Everything is seen from the player's side. Of a player against itself there is no row for both roles: each game
    would be in it twice.
    """
    pairs = dict.fromkeys(pair for match in counts for pair in (match[:2], match[1::-1]))
    lists = list(dict.fromkeys(match.words for match in counts))
    roles = tuple(next(iter(counts.values()), ()))
    for player, opponent in pairs:
        for words in [*lists, ALL] if len(lists) > 1 else lists:
            for role in roles if player == opponent else (*roles, BOTH):
                sides = [
                    (match, own)
                    for match in counts
                    for own, met in zip(roles, ((player, opponent), (opponent, player)), strict=True)
                    if role in (own, BOTH) and match[:2] == met and words in (ALL, match.words)
                ]
                for seed in (None, *sorted({match.seed for match, _ in sides})):
                    of_seed = [counts[match][own] for match, own in sides if seed in (None, match.seed)]
                    head = {"player": player, "opponent": opponent, "words": words, "role": role, "seed": seed}
                    yield head | summarise(of_seed)


def summarise(sides: Iterable[Mapping[str, Counter[str]]]) -> dict:
    """The numbers of a row, from the player's sums by word in each of its matches."""
    by_word: dict[str, Counter[str]] = defaultdict(Counter)
    for side in sides:
        for word, sums in side.items():
            by_word[word].update(sums)
    words, total = by_word.values(), Counter()
    for sums in words:
        total.update(sums)

    def mean(name: str, of: str = "games"):
        return estimate([sums[of] for sums in words], [sums[name] for sums in words])

    points, interval = mean("points")
    clean_points, clean_interval = mean("clean points", of="clean")
    return {
        "games": total["games"],
        "wins": total["win"],
        "losses": total["loss"],
        "ties": total["tie"],
        "breaches": total["breach"],
        "breach_wins": total["breach win"],
        "breach_losses": total["breach loss"],
        "points": points,
        "points_interval": interval,
        "rates": {rate: dict(zip(("share", "interval"), mean(rate), strict=True)) for rate in RATES},
        "clean": {"games": total["clean"], "points": clean_points, "points_interval": clean_interval},
        "mean_length": total["length"] / total["games"] if total["games"] else None,
        "empty_replies": total["empty"],
        "messages": total["messages"],
        "target_words": len(words),
    }
