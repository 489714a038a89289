"""Means with confidence intervals, and numbers as text. No torch, no files.

Observations with the same target word, question or seed are not independent, so standard errors are clustered by it.
"""

import math
from collections.abc import Iterable, Sequence

CONFIDENCE = 0.95  # level of all intervals
# TOST rejects at 1 - CONFIDENCE exactly if the interval of this level lies inside the margin.
EQUIVALENCE = 2 * CONFIDENCE - 1
ROUNDING = 1e-9  # smaller standard errors are 0 up to rounding
UNKNOWN = "-"  # in tables


def estimate(sizes: Sequence[int], totals: Sequence[float]) -> tuple[float, list[float]]:
    """Return the mean of values between 0 and 1 and its interval of level CONFIDENCE.

    `sizes` are the numbers of observations per cluster, `totals` the sums of their values. The interval is Wilson's
    with n_eff = p(1-p)/SE^2, for the clustered standard error SE, and with Student's quantile, because SE is itself
    estimated from the clusters. If SE is 0 (all observations equal) or unknown (a single cluster), n_eff is the number
    of clusters. Wilson's interval stays between 0 and 1, and is not a point even if all observations are equal.
    """
    mean = sum(totals) / sum(sizes)
    error = clustered_standard_error(sizes, totals)
    if error is None or error < ROUNDING:
        return mean, wilson(mean, len(sizes), t_quantile(math.inf))
    return mean, wilson(mean, mean * (1 - mean) / error**2, t_quantile(len(sizes) - 1))


def clustered_standard_error(sizes: Sequence[int], totals: Sequence[float]) -> float | None:
    """Standard error of sum(totals) / sum(sizes) for any dependence within clusters; None for fewer than two clusters.

    sqrt(G / (G - 1) * sum_c (total_c - mean * size_c)^2) / observations, over G non-empty clusters.
    """
    clusters, observations, total = len(sizes), sum(sizes), sum(totals)
    if clusters < 2:
        return None
    # Residuals times `observations`, so that half points stay exact and equal games give exactly 0.
    squares = sum((part * observations - total * size) ** 2 for size, part in zip(sizes, totals, strict=True))
    return math.sqrt(clusters / (clusters - 1) * squares) / observations**2


def wilson(rate: float, observations: float, quantile: float) -> list[float]:
    """Wilson's score interval for a rate of independent observations (J. Am. Stat. Assoc. 22, 1927)."""
    spread = quantile**2 / observations
    centre = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(spread * rate * (1 - rate) + spread**2 / 4) / (1 + spread)
    # Rounding must not put the rate outside the interval or a bound outside [0, 1].
    low = max(0.0, min(rate, centre - half))
    high = min(1.0, max(rate, centre + half))
    return [low, high]


def student(values: Sequence[float], margin: float | None = None) -> tuple[float, list[float] | None, float]:
    """The mean of independent values, Student's interval, and a p value.

    Without a margin: the interval of level CONFIDENCE, and the p value of a mean of 0. With a margin: the interval of
    level EQUIVALENCE, and the p value of |mean| >= margin by two one-sided tests (Schuirmann, J. Pharmacokinet.
    Biopharm. 15, 1987), which is below 1 - CONFIDENCE exactly if the interval lies between -margin and margin.
    Interval None and p value nan for a single value and for equal values, whose spread cannot be estimated.
    """
    from scipy import stats  # takes a second

    number = len(values)
    mean = sum(values) / number
    if max(values) - min(values) < ROUNDING:
        return mean, None, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (number - 1)
    error = math.sqrt(variance / number)
    if margin is None:
        level, p_value = CONFIDENCE, 2 * stats.t.sf(abs(mean) / error, number - 1)
    else:
        level, p_value = EQUIVALENCE, stats.t.sf((margin - abs(mean)) / error, number - 1)
    half = t_quantile(number - 1, level) * error
    return mean, [mean - half, mean + half], float(p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted by Holm's method (Scand. J. Stat. 6, 1979).

    A nan stays but counts, because its comparison was declared like the others.
    """
    adjusted = [math.nan] * len(p_values)
    known = [index for index, p in enumerate(p_values) if not math.isnan(p)]
    largest = 0.0
    for smaller, index in enumerate(sorted(known, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - smaller) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def t_quantile(freedom: float, level: float = CONFIDENCE) -> float:
    """Student's quantile for a two-sided interval of this level; the normal one for infinite degrees of freedom."""
    from scipy import stats  # takes a second

    return float(stats.t.ppf((1 + level) / 2, freedom))


def with_interval(value: float | None, interval: Sequence[float] | None, form: str = ".3f") -> str:
    """A number and its interval: 0.540 [0.512, 0.568], or with ".1%" 54.0% [51.2, 56.8]; UNKNOWN for None."""
    if value is None:
        return UNKNOWN
    if interval is None:
        return format(value, form)
    low, high = (format(bound, form).removesuffix("%") for bound in interval)
    return f"{value:{form}} [{low}, {high}]"


def markdown(lines: Iterable[Sequence]) -> str:
    """Lines of cells as a Markdown table."""
    head, *body = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))
