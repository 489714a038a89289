"""Scores of models on benchmarks, in percent: standard errors, differences, the geometric mean. Pure.

An unknown standard error is nan, and so is every error computed from it. Rows have None instead.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from utils import UserError

MEAN = "geometric mean"
NORMAL = 1.96  # standard errors on either side of a value, in a 95% interval
MATCHING = 1e-4  # in percent: how far the mean of the questions' scores may be from the harness's value


class Score(NamedTuple):
    """A model on a benchmark."""

    value: float
    stderr: float
    questions: int
    shots: int | list[int]
    metric: str
    scores: dict[str, float] | None  # by question; None if their mean is another than the value


def read_score(result: Mapping, metric: str) -> Score:
    """One metric of a stored result (`read_result` in tools/reasoning/jobs.py).

    UserError unless exactly one of the result's metrics has this name and its value lies between 0 and 1.
    """
    metrics = result["metrics"]
    fitting = [key for key in metrics if metric in (key, key.partition(",")[0])]
    if len(fitting) != 1:
        kind = "no metric" if not fitting else "more than one metric"
        raise UserError(f"{kind} {metric!r}; there are: {' '.join(metrics)}; choose with --tasks NAME:METRIC")
    (name,) = fitting
    value, stderr = metrics[name]["value"], metrics[name]["stderr"]
    if not 0 <= value <= 1:
        raise UserError(f"{name} is {value}, not between 0 and 1; choose another metric with --tasks NAME:METRIC")
    scores = {question: 100 * score for question, score in result["scores"].get(name, {}).items()}
    whole = len(scores) > 1 and abs(np.mean(list(scores.values())) - 100 * value) < MATCHING
    stderr = math.nan if stderr is None else 100 * float(stderr)
    return Score(100 * value, stderr, result["questions"], result["shots"], name, scores if whole else None)


def geometric_mean(scores: Sequence[Score]) -> tuple[float, float, np.ndarray]:
    """Geometric mean G of k values x with errors s, its error sqrt(sum (G s / k x)^2), and its slopes G / k x.

    Both are nan where a value is 0. A single score is its own mean.
    """
    if len(scores) == 1:
        return scores[0].value, scores[0].stderr, np.ones(1)
    values = np.array([score.value for score in scores])
    mean = float(stats.gmean(values))
    with np.errstate(invalid="ignore"):
        slopes = mean / len(values) / values
    return mean, math.hypot(*(slopes * [score.stderr for score in scores])), slopes


def difference(own: Sequence[Score], other: Sequence[Score]) -> dict:
    """Difference of two geometric means over the same benchmarks, which count as independent.

    `stderr` is to first order. `paired`: whether it was computed question by question. `unclear`: whether 0 lies in
    the difference's 95% interval.
    """
    (mean, _, slopes), (other_mean, _, other_slopes) = geometric_mean(own), geometric_mean(other)
    value = mean - other_mean
    stderr = known(math.hypot(*map(_weighted_stderr, own, slopes, other, other_slopes)))
    unclear = None if stderr is None else abs(value) <= NORMAL * stderr
    return {"value": value, "stderr": stderr, "paired": all(map(_paired, own, other)), "unclear": unclear}


def _paired(own: Score, other: Score) -> bool:
    """Whether both scores are known question by question, for the same questions."""
    return own.scores is not None and other.scores is not None and own.scores.keys() == other.scores.keys()


def _weighted_stderr(own: Score, weight: float, other: Score, other_weight: float) -> float:
    """Standard error of weight * own - other_weight * other, over draws of the questions that both were asked.

    Where the questions' scores are unknown, the two errors add as those of independent draws.
    """
    if _paired(own, other):
        gaps = {key: weight * score - other_weight * other.scores[key] for key, score in own.scores.items()}
        return stderr_over_parts(gaps)
    return math.hypot(weight * own.stderr, other_weight * other.stderr)


def stderr_over_parts(values: Mapping[str, float]) -> float:
    """Standard error of the mean of values by "PART/QUESTION", whose number in each part is fixed.

    sqrt(pooled variance within the parts / questions), as the harness's `pooled_sample_stderr`; nan if each part has
    one question. With one part it is the usual standard error of a mean.
    """
    parts = defaultdict(list)
    for question, value in values.items():
        parts[question.rpartition("/")[0]].append(value)
    freedom = len(values) - len(parts)
    squares = sum(float(np.var(part)) * len(part) for part in parts.values())
    return math.sqrt(squares / freedom / len(values)) if freedom else math.nan


def known(error: float) -> float | None:
    """A standard error for JSON: None instead of nan."""
    return None if math.isnan(error) else error


def result_rows(table: Mapping[str, Mapping[str, Score]], against: str, benchmarks: Sequence[str]) -> list[dict]:
    """A row for each model and benchmark, and for each model's geometric mean, with the difference from `against`.

    What was not asked has no row, and a model that lacks a benchmark has no mean.
    """
    rows = []
    for model in table:
        for name, columns in [*((name, [name]) for name in benchmarks), (MEAN, list(benchmarks))]:
            own, other = ([table.get(side, {}).get(column) for column in columns] for side in (model, against))
            if not all(own):
                continue
            value, stderr, _ = geometric_mean(own)
            row = {"model": model, "benchmark": name, "value": value, "stderr": known(stderr)}
            if name != MEAN:
                row |= {key: getattr(own[0], key) for key in ("questions", "shots", "metric")}
            away = {"from": against} | difference(own, other) if model != against and all(other) else None
            rows.append(row | {"difference": away})
    return rows
