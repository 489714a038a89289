"""Statistics of match play: rates, points and their intervals, from finished games as they come.

Games of the same target word are not independent, whoever plays them: standard errors count words, not games. Memory
grows with matches and words, not with games. No torch, no files.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from tools.games.game import Game
from tools.selfplay.counts import GameCounts

CONFIDENCE = 0.95
ROUNDING = 1e-9  # a standard error below this is none
BOTH = "both"
ALL = "all"  # the row that pools all word lists
RATES = ("win", "loss", "tie", "breach")


# --- intervals -----------------------------------------------------------------------------------------------------


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


# --- counting ------------------------------------------------------------------------------------------------------


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


class MatchCounts(GameCounts):
    """What the games of one match came to, and for each role and target word how they counted.

    A game is clean if it was decided without breach or empty reply.
    """

    def __init__(self, game: Game):
        super().__init__(game)
        self.words: dict[str, dict[str, Counter[str]]] = {role: defaultdict(Counter) for role in game.roles}

    def add(self, episode: Mapping) -> None:
        """Count one game."""
        super().add(episode)
        word, history = episode["target_word"], episode["history"]
        ended = self.game.outcome(episode["outcome"])
        decided = ended.name != self.game.outcomes[-1].name and not ended.breach
        clean = decided and all(message["content"].strip() for message in history)
        for role, points in zip(self.game.roles, self.game.checked_points(word, history, ended.name), strict=True):
            result = "tie" if ended.winner is None else "win" if ended.winner == role else "loss"
            counts = {"games": 1, "points": points, result: 1}
            if ended.breach:
                counts |= {"breach": 1, f"breach {result}": 1}
            if clean:
                counts |= {"clean": 1, "clean points": points}
            self.words[role][word].update(counts)


def count_matches(episodes: Iterable[Mapping], game: Game) -> dict[Match, MatchCounts]:
    """Counts by match, of episodes that say who played them, with which word list and seed.

    Raises ValueError for an outcome that the game does not have.
    """
    counts: dict[Match, MatchCounts] = {}
    for episode in episodes:
        match = Match(*(episode[key] for key in Match.keys(game)))
        counts.setdefault(match, MatchCounts(game)).add(episode)
    return counts


# --- results -------------------------------------------------------------------------------------------------------


def result_rows(counts: Mapping[Match, MatchCounts]) -> Iterator[dict]:
    """One row per player, opponent, word list, role and seed that played, and those that pool lists and seeds.

    Everything is seen from the player's side. Of a player against itself there is no row for both roles: each game
    would be in it twice.
    """
    pairs = dict.fromkeys(pair for match in counts for pair in (match[:2], match[1::-1]))
    lists = list(dict.fromkeys(match.words for match in counts))
    roles = next((counted.game.roles for counted in counts.values()), ())
    for player, opponent in pairs:
        for words in [*lists, ALL] if len(lists) > 1 else lists:
            for role in roles if player == opponent else (*roles, BOTH):
                sides = list(_sides(counts, player, opponent, words, role))
                seeds = sorted({match.seed for match, _ in sides})
                for seed in (None, *seeds):
                    of_seed = [(counts[match], own) for match, own in sides if seed in (None, match.seed)]
                    head = {"player": player, "opponent": opponent, "words": words, "role": role, "seed": seed}
                    yield head | summarise(of_seed)


def _sides(
    counts: Mapping[Match, MatchCounts], player: str, opponent: str, words: str, role: str
) -> Iterator[tuple[Match, str]]:
    """The matches of a row, each with the role that the player had."""
    for match, counted in counts.items():
        if words in (ALL, match.words):
            first, second = counted.game.roles
            if role in (first, BOTH) and match[:2] == (player, opponent):
                yield match, first
            if role in (second, BOTH) and match[:2] == (opponent, player):
                yield match, second


def summarise(sides: Sequence[tuple[MatchCounts, str]]) -> dict:
    """The numbers of a row, over matches in each of which the player had the given role."""
    by_word: dict[str, Counter[str]] = defaultdict(Counter)
    for match, role in sides:
        for word, counts in match.words[role].items():
            by_word[word].update(counts)
    words, total = list(by_word.values()), Counter()
    for word in words:
        total.update(word)
    games, clean_games = ([word[of] for word in words] for of in ("games", "clean"))
    points, interval = estimate(games, [word["points"] for word in words])
    clean_points, clean_interval = estimate(clean_games, [word["clean points"] for word in words])
    rates = {rate: estimate(games, [word[rate] for word in words]) for rate in RATES}
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
        "rates": {rate: {"share": share, "interval": bounds} for rate, (share, bounds) in rates.items()},
        "clean": {"games": total["clean"], "points": clean_points, "points_interval": clean_interval},
        "mean_length": sum(match.lengths.total() for match, _ in sides) / total["games"] if total["games"] else None,
        "empty_replies": sum(match.empty_replies[role] for match, role in sides),
        "messages": sum(match.messages[role] for match, role in sides),
        "target_words": len(words),
    }
