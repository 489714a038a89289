"""Scores of models on benchmarks, in percent: standard errors, differences, the geometric mean. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

MEAN = "geometric mean"
MATCHING = 1e-6  # how near the mean of the questions' scores must be to the harness' value, to be what it is made of


class Score(NamedTuple):
    """A model on a benchmark."""

    value: float
    stderr: float | None
    questions: int
    shots: int | list[int]
    metric: str
    scores: np.ndarray | None  # of each question, if their mean is the value


def read_score(result: Mapping, metric: str) -> Score:
    """One metric of a result of tools/reasoning/harness.py.

    Raises ValueError, naming those that there are, unless exactly one fits, and for values that are no shares.
    """
    metrics = result["metrics"]
    fitting = [key for key in metrics if metric in (key, key.partition(",")[0])]
    if len(fitting) != 1:
        kind = "no metric" if not fitting else "more than one metric"
        raise ValueError(f"{kind} {metric!r}; there are: {' '.join(metrics)}; choose with --metrics NAME=METRIC")
    value, stderr = metrics[fitting[0]]["value"], metrics[fitting[0]]["stderr"]
    if not 0 <= value <= 1:
        raise ValueError(f"{fitting[0]} is {value}, no share between 0 and 1; choose another with --metrics")
    if not isinstance(stderr, float | int | None):
        raise TypeError(f"the standard error of {fitting[0]} is {stderr!r}, no number")
    scores = np.array(result["scores"].get(fitting[0], []))
    whole = len(scores) > 1 and abs(scores.mean() - value) < MATCHING
    return Score(
        value=100 * value,
        stderr=None if stderr is None else 100 * stderr,
        questions=result["questions"],
        shots=result["shots"],
        metric=fitting[0],
        scores=100 * scores if whole else None,
    )


def geometric_mean(scores: Sequence[Score]) -> tuple[float, float | None]:
    """Geometric mean G of k values x_i, and its standard error to first order, G/k sqrt(sum (s_i / x_i)^2).

    The error is None where a value is 0 or has none. A single score is its own mean.
    """
    if len(scores) == 1:
        return scores[0].value, scores[0].stderr
    if min(score.value for score in scores) <= 0:
        return 0.0, None
    mean = math.exp(sum(math.log(score.value) for score in scores) / len(scores))
    if any(score.stderr is None for score in scores):
        return mean, None
    return mean, mean / len(scores) * math.hypot(*(score.stderr / score.value for score in scores))


def difference(own: Sequence[Score], other: Sequence[Score]) -> dict:
    """Difference of two geometric means over the same benchmarks, which count as independent.

    Its `stderr` is to first order, and None where an error is not known; `paired`: from the scores of each question;
    `within_stderr`: whether it is at most its error.
    """
    means = [geometric_mean(side)[0] for side in (own, other)]
    found = {"value": means[0] - means[1], "stderr": None, "paired": all(map(_paired, own, other))}
    if len(own) == 1 or all(means):
        slopes = [
            [mean / len(side) / score.value if len(side) > 1 else 1.0 for score in side]
            for mean, side in zip(means, (own, other), strict=True)
        ]
        stderrs = list(map(_weighted_stderr, own, other, *slopes))
        found["stderr"] = None if None in stderrs else math.hypot(*stderrs)
    return found | {"within_stderr": None if found["stderr"] is None else abs(found["value"]) <= found["stderr"]}


def _paired(own: Score, other: Score) -> bool:
    """Whether both scores are known question by question, for as many questions."""
    return own.scores is not None and other.scores is not None and len(own.scores) == len(other.scores)


def _weighted_stderr(own: Score, other: Score, weight: float, other_weight: float) -> float | None:
    """Standard error of weight * own - other_weight * other, over draws of the questions that both were asked.

    Where the questions' scores are not known, as if the two had been asked different ones; None without any error.
    """
    if _paired(own, other):
        terms = weight * own.scores - other_weight * other.scores
        return float(terms.std(ddof=1)) / math.sqrt(len(terms))
    if own.stderr is None or other.stderr is None:
        return None
    return math.hypot(weight * own.stderr, other_weight * other.stderr)


def result_rows(table: Mapping[str, Mapping[str, Score]], against: str) -> list[dict]:
    """A row per model and benchmark, and per model for the geometric mean, with the difference from `against`."""
    rows = []
    for model, scores in table.items():
        for name, benchmarks in [*((name, [name]) for name in scores), (MEAN, list(scores))]:
            own, other = ([table[side][benchmark] for benchmark in benchmarks] for side in (model, against))
            value, stderr = geometric_mean(own)
            row = {"model": model, "benchmark": name, "value": value, "stderr": stderr}
            if name != MEAN:
                row |= {key: getattr(own[0], key) for key in ("questions", "shots", "metric")}
            away = None if model == against else {"from": against} | difference(own, other)
            rows.append(row | {"difference": away})
    return rows
