"""Match play: who meets whom, and points and rates with their intervals. No torch, no files.

Games of the same target word are not independent, so standard errors count words instead of games.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tools.games.game import Game

CONFIDENCE = 0.95
ROUNDING = 1e-9  # a smaller standard error is 0 up to rounding
BOTH = "both"
ALL = "all"  # the row that pools all word lists
RATES = ("win", "loss", "tie", "breach")


def estimate(sizes: Sequence[int], totals: Sequence[float]) -> tuple[float, list[float]]:
    """Return the mean of values between 0 and 1 and its 95% interval.

    `sizes` are the numbers of observations in each cluster, `totals` the sums of their values. The interval is
    Wilson's with n_eff = p(1-p)/SE^2 observations, for the clustered standard error SE, and with Student's quantile.
    Where SE is 0 (all observations are alike) or unknown (a single cluster), a cluster counts as one observation.
    """
    mean = sum(totals) / sum(sizes)
    clusters = sum(size > 0 for size in sizes)
    error = clustered_standard_error(sizes, totals)
    if error is None or error < ROUNDING:
        return mean, wilson(mean, clusters, t_quantile(math.inf))
    return mean, wilson(mean, mean * (1 - mean) / error**2, t_quantile(clusters - 1))


def mean_difference(sizes: Sequence[int], totals: Sequence[float]) -> tuple[float, list[float]]:
    """The mean of differences of any sign and its 95% interval, from at least two clusters as in `estimate`."""
    mean = sum(totals) / sum(sizes)
    half = t_quantile(sum(size > 0 for size in sizes) - 1) * clustered_standard_error(sizes, totals)
    return mean, [mean - half, mean + half]


def clustered_standard_error(sizes: Sequence[int], totals: Sequence[float]) -> float | None:
    """Standard error of sum(totals) / sum(sizes) for any dependence within clusters; None for fewer than two clusters.

    sqrt(G / (G - 1) * sum_c (total_c - mean * size_c)^2) / observations, over the G clusters that are not empty.
    """
    clusters, observations, total = sum(size > 0 for size in sizes), sum(sizes), sum(totals)
    if clusters < 2:
        return None
    # Residuals times `observations`: whole and half points stay exact, and equal games give exactly 0.
    squares = sum((part * observations - total * size) ** 2 for size, part in zip(sizes, totals, strict=True))
    return math.sqrt(clusters / (clusters - 1) * squares) / observations**2


def wilson(share: float, observations: float, quantile: float) -> list[float]:
    """Wilson's score interval for a share of independent observations (J. Am. Stat. Assoc. 22, 1927)."""
    spread = quantile**2 / observations
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    return [max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))]  # also after rounding


def t_quantile(freedom: float) -> float:
    """Student's quantile of a two-sided interval of level CONFIDENCE; the normal one for infinite freedom."""
    from scipy import stats  # takes a second

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


class Match(NamedTuple):
    """Games of one player in the game's first role against another in its second."""

    first: str
    second: str
    words: str  # name of the word list
    seed: int


def pairs(players: Sequence[str], against: str | None = None) -> list[tuple[str, str]]:
    """The players of each match, in the first and the second role. Each pair plays two matches in a row."""
    if len(players) == 1:
        return [(players[0], players[0])]
    meetings = itertools.combinations(players, 2)
    if against is not None:
        meetings = ((player, against) for player in players if player != against)
    return [pair for one, other in meetings for pair in ((one, other), (other, one))]


def result_rows(episodes: Sequence[Mapping], game: Game) -> Iterator[dict]:
    """Yield a row for each player, opponent, word list, role and seed, and rows that pool lists, roles and seeds.

    An episode holds its players under their roles, `words` (the list) and `seed`. All numbers are from the player's
    side. A player against itself has no row for both roles, which would count each game twice.
    """
    rows: dict[tuple, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))  # sums by target word
    for episode in episodes:
        first, second = (episode[role] for role in game.roles)
        for role, players in zip(game.roles, ((first, second), (second, first)), strict=True):
            sums = sums_of_side(episode, game, role)
            for key in itertools.product([players], {episode["words"], ALL}, (role, BOTH), (episode["seed"], None)):
                rows[key][episode["target_word"]].update(sums)
    met = dict.fromkeys(players for players, *_ in rows)
    lists = list(dict.fromkeys(episode["words"] for episode in episodes))
    lists += [ALL] if len(lists) > 1 else []
    seeds = sorted({episode["seed"] for episode in episodes})
    for key in itertools.product(met, lists, (*game.roles, BOTH), (None, *seeds)):
        (player, opponent), words, role, seed = key
        if key in rows and not (player == opponent and role == BOTH):
            head = {"player": player, "opponent": opponent, "words": words, "role": role, "seed": seed}
            yield head | summarise(rows[key].values())


def sums_of_side(episode: Mapping, game: Game, role: str) -> dict[str, float]:
    """What one game adds to the sums of the player in this role."""
    history, outcome = episode["history"], game.outcome(episode["outcome"])
    points = game.points(episode["target_word"], history[: episode["length"]], outcome.name)
    result = "tie" if outcome.winner is None else "win" if outcome.winner == role else "loss"
    messages = [message["content"].strip() for message in history if message["role"] == role]
    sums = {"games": 1, "points": points[game.roles.index(role)], result: 1, "length": episode["length"]}
    sums |= {"messages": len(messages), "empty": messages.count("")}
    return sums | ({"breach": 1, f"breach {result}": 1} if outcome.breach else {})


def pooled_rows(results: Iterable[Mapping], player: str, opponent: str) -> dict[str, dict[str, dict]]:
    """The rows of a player against an opponent that pool seeds, by word list and role. A single list is also ALL."""
    rows: dict[str, dict[str, dict]] = defaultdict(dict)
    for row in results:
        if (row["player"], row["opponent"], row["seed"]) == (player, opponent, None):
            rows[row["words"]][row["role"]] = dict(row)
    return {ALL: next(iter(rows.values()), {})} | dict(rows)


def summarise(words: Collection[Counter[str]]) -> dict:
    """The numbers of a row, from the player's sums of each target word."""
    total, games = sum(words, Counter()), [sums["games"] for sums in words]
    means = {name: estimate(games, [sums[name] for sums in words]) for name in ("points", *RATES)}
    return {
        "games": total["games"],
        "wins": total["win"],
        "losses": total["loss"],
        "ties": total["tie"],
        "breaches": total["breach"],
        "breach_wins": total["breach win"],
        "breach_losses": total["breach loss"],
        "points": means["points"][0],
        "points_interval": means["points"][1],
        "rates": {rate: dict(zip(("share", "interval"), means[rate], strict=True)) for rate in RATES},
        "mean_length": total["length"] / total["games"],
        "empty_replies": total["empty"],
        "messages": total["messages"],
        "target_words": len(words),
    }
