"""Scores of models on benchmarks, in percent. An unknown standard error is nan, and null in JSON."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tools.measure.estimates import MEAN, UNKNOWN, markdown
from utils import UserError

NORMAL = 1.96  # standard errors on either side of a value, in a 95% interval
ROUNDING = 1e-4  # in percent: how far the mean of the questions' scores may be from the harness's value
MARK = "≈"


class Score(NamedTuple):
    value: float
    stderr: float
    by_question: dict[str, float]  # empty if the value is not the mean of these


def read_score(result: Mapping, metric: str) -> Score:
    """One metric of a stored result (`ask` in harness.py). UserError unless exactly one has this name and a value."""
    names = [name for name in result["metrics"] if metric in (name, name.partition(",")[0])]
    if len(names) != 1:
        raise UserError(f"--tasks NAME:METRIC: choose one metric of {' '.join(result['metrics'])}; found {metric!r}")
    value, stderr = (result["metrics"][names[0]][key] for key in ("value", "stderr"))
    if value is None:  # as NaN is stored
        raise UserError(f"the harness's value of {names[0]} is not a number")
    scores = result["scores"].get(names[0], {})
    by_question = {question: 100 * score for question, score in scores.items() if score is not None}
    if not by_question or abs(np.mean(list(by_question.values())) - 100 * value) > ROUNDING:
        by_question = {}
    return Score(100 * value, math.nan if stderr is None else 100 * stderr, by_question)


def geometric_mean(scores: Sequence[Score]) -> tuple[float, float, np.ndarray]:
    """Geometric mean G of k values x with errors s, its error sqrt(sum (G s / k x)^2), and its slopes G / k x.

    Error and slopes are nan where a value is 0. A single score is its own mean.
    """
    if len(scores) == 1:
        return scores[0].value, scores[0].stderr, np.ones(1)
    values = np.array([score.value for score in scores])
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = float(np.exp(np.log(values).mean()))
        slopes = mean / len(values) / values
    return mean, math.hypot(*(slopes * [score.stderr for score in scores])), slopes


def difference(scores: Sequence[Score], others: Sequence[Score]) -> tuple[float, float]:
    """The difference of two geometric means over the same benchmarks, and its standard error to first order."""
    (mean, _, slopes), (other_mean, _, other_slopes) = geometric_mean(scores), geometric_mean(others)
    return mean - other_mean, math.hypot(*map(_weighted_stderr, scores, slopes, others, other_slopes))


def _weighted_stderr(score: Score, weight: float, other: Score, other_weight: float) -> float:
    """Standard error of weight * score - other_weight * other: question by question if both were asked the same."""
    if score.by_question and score.by_question.keys() == other.by_question.keys():
        gaps = [weight * value - other_weight * other.by_question[key] for key, value in score.by_question.items()]
        return float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
    return math.hypot(weight * score.stderr, other_weight * other.stderr)  # of independent draws


def score_rows(table: Mapping[str, Mapping[str, Score]], against: str, benchmarks: Sequence[str]) -> list[dict]:
    """A row for each model and benchmark, and for each model's geometric mean, with the difference from `against`.

    What was not asked has no row, and a model that lacks a benchmark has no mean.
    """
    rows, columns = [], {name: [name] for name in benchmarks} | {MEAN: benchmarks}
    for model, column in itertools.product(table, columns):
        scores, others = ([table[side].get(name) for name in columns[column]] for side in (model, against))
        if not all(scores):
            continue
        row = {"model": model, "benchmark": column, **_for_json(*geometric_mean(scores)[:2]), "difference": None}
        if model != against and all(others):
            row["difference"] = {"from": against, **_for_json(*difference(scores, others))}
        rows.append(row)
    return rows


def _for_json(value: float, stderr: float) -> dict[str, float | None]:
    return {"value": value, "stderr": None if math.isnan(stderr) else stderr}


def table_text(rows: Sequence[Mapping], settings: Mapping) -> str:
    """The table in Markdown, and what was asked."""
    columns, asked = [benchmark["name"] for benchmark in settings["benchmarks"]], []
    cells = {(row["model"], row["benchmark"]): cell_text(row) for row in rows}
    lines = [["", *columns, MEAN]]
    for model in settings["models"]:
        lines.append([model, *(cells.get((model, column), UNKNOWN) for column in (*columns, MEAN))])
    for benchmark in settings["benchmarks"]:
        shots = "default" if benchmark["shots"] is None else benchmark["shots"]
        asked.append(f"{benchmark['name']} {shots}-shot {benchmark['metric']}")
    dtype = settings["dtype"] or "each model in the type of its config"
    questions = "all questions" if settings["limit"] is None else f"the first {settings['limit']} questions of a task"
    return f"""{markdown(lines)}

Percentages ± one standard error over draws of the questions; it does not cover the randomness of training. {MARK}: the
difference from {settings["against"]}, question by question where both were asked the same, is at most {NORMAL} of its
standard errors.
lm-evaluation-harness {settings["harness"]}, {dtype}, {questions}: {", ".join(asked)}.
"""


def cell_text(row: Mapping) -> str:
    """Value, standard error, and a mark if the 95% interval of the difference from the first model holds 0."""
    text = f"{row['value']:.2f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.2f}")
    gap = row["difference"]
    unclear = gap and gap["stderr"] is not None and abs(gap["value"]) <= NORMAL * gap["stderr"]
    return f"{text} {MARK}" if unclear else text
