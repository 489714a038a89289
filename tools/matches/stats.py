"""Statistics of match play: rates, points and their intervals, from finished games as they come.

Games of the same target word are not independent, whoever plays them: standard errors count words, not games. Memory
grows with matches and words, not with games. No torch, no files.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from tools.games.taboo import ATTACKER, ATTACKER_BREAKS, DEFENDER, ROLES, TIED, WINNERS

CONFIDENCE = 0.95
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
    if not error:
        return mean, wilson(mean, clusters, NormalDist().inv_cdf((1 + CONFIDENCE) / 2))
    return mean, wilson(mean, mean * (1 - mean) / error**2, t_quantile((1 + CONFIDENCE) / 2, clusters - 1))


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


def t_quantile(probability: float, freedom: int) -> float:
    """Student's quantile, within 0.2%: exact to two degrees of freedom, then Abramowitz and Stegun 26.7.5."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


# --- counting ------------------------------------------------------------------------------------------------------


class Match(NamedTuple):
    """Games of one player as attacker against another as defender."""

    attacker: str
    defender: str
    words: str  # name of the word list
    seed: int


class MatchCounts:
    """What the games of one match came to."""

    def __init__(self):
        # By target word, games per (outcome, whether clean): decided without breach, tie or empty reply.
        self.outcomes: dict[str, Counter[tuple[str, bool]]] = defaultdict(Counter)
        self.length = 0  # of all games, in messages
        self.messages: Counter[str] = Counter()  # by role
        self.empty_replies: Counter[str] = Counter()

    def add(self, episode: Mapping) -> None:
        """Count one game."""
        for message in episode["history"]:
            self.messages[message["role"]] += 1
            self.empty_replies[message["role"]] += not message["content"]
        clean = episode["outcome"] in WINNERS and all(message["content"] for message in episode["history"])
        self.outcomes[episode["target_word"]][episode["outcome"], clean] += 1
        self.length += episode["length"]


def count_matches(episodes: Iterable[Mapping]) -> dict[Match, MatchCounts]:
    """Counts by match, of episodes that say who played them, with which word list and seed."""
    counts: dict[Match, MatchCounts] = defaultdict(MatchCounts)
    for episode in episodes:
        counts[Match(*(episode[field] for field in Match._fields))].add(episode)
    return dict(counts)


# --- results -------------------------------------------------------------------------------------------------------


def result_rows(counts: Mapping[Match, MatchCounts]) -> Iterator[dict]:
    """One row per player, opponent, word list, role and seed that played, and those that pool lists and seeds.

    Everything is seen from the player's side. Of a player against itself there is no row for both roles: each game
    would be in it twice.
    """
    pairs = dict.fromkeys(pair for match in counts for pair in (match[:2], match[1::-1]))
    lists = list(dict.fromkeys(match.words for match in counts))
    for player, opponent in pairs:
        for words in [*lists, ALL] if len(lists) > 1 else lists:
            for role in ROLES if player == opponent else (*ROLES, BOTH):
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
    for match in counts:
        if words in (ALL, match.words):
            if role in (ATTACKER, BOTH) and match[:2] == (player, opponent):
                yield match, ATTACKER
            if role in (DEFENDER, BOTH) and match[:2] == (opponent, player):
                yield match, DEFENDER


def summarise(sides: Sequence[tuple[MatchCounts, str]]) -> dict:
    """The numbers of a row, over matches in each of which the player had the given role."""
    by_word: dict[str, Counter[str]] = defaultdict(Counter)
    for match, role in sides:
        for word, outcomes in match.outcomes.items():
            for (outcome, clean), games in outcomes.items():
                by_word[word].update(dict.fromkeys(_labels(outcome, clean, role), games))
    words, total = list(by_word.values()), Counter()
    for word in words:
        total.update(word)
    games = [word["games"] for word in words]
    clean_games = [word["clean"] for word in words]
    points, interval = estimate(games, [word["win"] + word["tie"] / 2 for word in words])
    clean_points, clean_interval = estimate(clean_games, [word["clean win"] for word in words])
    rates = {rate: estimate(games, [word[rate] for word in words]) for rate in RATES}
    return {
        "games": total["games"],
        "wins": total["win"],
        "losses": total["loss"],
        "ties": total["tie"],
        "breaches": total["breach"],
        "points": points,
        "points_interval": interval,
        "rates": {rate: {"share": share, "interval": bounds} for rate, (share, bounds) in rates.items()},
        "clean": {"games": total["clean"], "points": clean_points, "points_interval": clean_interval},
        "mean_length": sum(match.length for match, _ in sides) / total["games"] if total["games"] else None,
        "empty_replies": sum(match.empty_replies[role] for match, role in sides),
        "messages": sum(match.messages[role] for match, role in sides),
        "target_words": len(words),
    }


def _labels(outcome: str, clean: bool, role: str) -> list[str]:
    """Under what a game counts for the player who had this role."""
    if outcome == TIED:
        return ["games", "tie"]
    winner = DEFENDER if outcome == ATTACKER_BREAKS else WINNERS[outcome]
    result = "win" if winner == role else "loss"
    labels = ["games", result]
    if outcome == ATTACKER_BREAKS:
        labels.append("breach")
    if clean:
        labels += ["clean", f"clean {result}"]
    return labels
