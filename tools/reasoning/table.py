"""Scores of models on benchmarks, in percent: errors, differences, the geometric mean, and the published rows.

An unknown standard error is nan, and so is every error computed from it. JSON has null instead.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tools.reasoning.harness import BENCHMARKS
from utils import UserError

MEAN = "geometric mean"
NORMAL = 1.96  # standard errors on either side of a value, in a 95% interval
ROUNDING = 1e-4  # in percent: how far the mean of the questions' scores may be from the harness's value
MARK, UNKNOWN = "≈", "-"
# Accuracies as texts, with the digits that are known, and last the geometric mean of all eight. Base rows and values
# with one decimal were read off a figure, or checked only through the mean.
PUBLISHED_SOURCE = "Cheng et al., NeurIPS 2024, arXiv 2404.10642"
PUBLISHED_NAMES = (*(benchmark.name for benchmark in BENCHMARKS), MEAN)
PUBLISHED = {
    name: dict(zip(PUBLISHED_NAMES, values.split(), strict=True))
    for name, values in {
        "LLaMA-2-7B base": "45.80 32.48 50.90 76.30 43.26 25.32 69.14 78.07 49.17",
        "LLaMA-2-7B SPAG-1": "- 34.4 54.8 77.7 45.7 29.8 68.9 78.8 51.69",
        "LLaMA-2-7B SPAG-2": "- 34.7 55.0 78.2 46.9 30.1 69.6 79.1 52.19",
        "LLaMA-2-7B SPAG-3": "- 34.94 55.30 78.54 47.53 30.98 69.93 79.38 52.58",
    }.items()
}


class Score(NamedTuple):
    """A model on a benchmark."""

    value: float
    stderr: float
    by_question: dict[str, float]  # empty if the value is not the mean of these


def read_score(result: Mapping, metric: str) -> Score:
    """One metric of a stored result (`ask` in harness.py). UserError unless exactly one has this name."""
    names = [name for name in result["metrics"] if metric in (name, name.partition(",")[0])]
    if len(names) != 1:
        there = " ".join(result["metrics"])
        raise UserError(f"{len(names)} metrics are called {metric!r}; choose one with --tasks NAME:METRIC: {there}")
    value, stderr = (result["metrics"][names[0]][key] for key in ("value", "stderr"))
    by_question = {question: 100 * score for question, score in result["scores"].get(names[0], {}).items()}
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
    """Standard error of weight * score - other_weight * other: over questions if both were asked the same ones.

    Otherwise the two errors add as those of independent draws.
    """
    if score.by_question and score.by_question.keys() == other.by_question.keys():
        pairs = ((value, other.by_question[question]) for question, value in score.by_question.items())
        gaps = [weight * value - other_weight * other_value for value, other_value in pairs]
        return float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return math.hypot(weight * score.stderr, other_weight * other.stderr)


def result_rows(table: Mapping[str, Mapping[str, Score]], against: str, benchmarks: Sequence[str]) -> list[dict]:
    """A row for each model and benchmark, and for each model's geometric mean, with the difference from `against`.

    What was not asked has no row, and a model that lacks a benchmark has no mean.
    """
    rows, columns = [], {name: [name] for name in benchmarks} | {MEAN: list(benchmarks)}
    for model, column in itertools.product(table, columns):
        scores, others = ([table[side].get(name) for name in columns[column]] for side in (model, against))
        if not all(scores):
            continue
        value, stderr, _ = geometric_mean(scores)
        row = {"model": model, "benchmark": column, "value": value, "stderr": _for_json(stderr), "difference": None}
        if model != against and all(others):
            value, stderr = difference(scores, others)
            row["difference"] = {"from": against, "value": value, "stderr": _for_json(stderr)}
        rows.append(row)
    return rows


def _for_json(error: float) -> float | None:
    return None if math.isnan(error) else error


def table_text(rows: Sequence[Mapping], settings: Mapping) -> str:
    """The table in Markdown with the published rows below, and what was asked."""
    columns = [benchmark["name"] for benchmark in settings["benchmarks"]]
    cells = {(row["model"], row["benchmark"]): cell_text(row) for row in rows}
    lines = [["", *columns, MEAN]]
    lines += [[model, *(cells.get((model, name), UNKNOWN) for name in lines[0][1:])] for model in settings["models"]]
    mean = MEAN if {*columns, MEAN} == {*PUBLISHED_NAMES} else None  # published only of all eight
    for name, published in PUBLISHED.items():
        lines.append([f"{name}, published", *(published.get(column, UNKNOWN) for column in [*columns, mean])])
    asked = [
        f"{each['name']} {'default' if each['shots'] is None else each['shots']}-shot {each['metric']}"
        for each in settings["benchmarks"]
    ]
    questions = "all questions" if settings["limit"] is None else f"the first {settings['limit']} questions of a task"
    note = (
        "Percentages ± one standard error over draws of the questions; it does not cover the randomness of training. "
        f"{MARK}: the difference from {settings['against']}, question by question where both were asked the same, is "
        f"at most {NORMAL} of its standard errors. Published rows: {PUBLISHED_SOURCE}; their tasks, shots and metrics "
        f"are not known. lm-evaluation-harness {settings['harness']}, {settings['dtype']}, {questions}: "
    )
    return f"{markdown(lines)}\n\n{note}{', '.join(asked)}.\n"


def cell_text(row: Mapping) -> str:
    """Value, standard error, and a mark if 0 lies in the 95% interval of the difference from the first model."""
    text = f"{row['value']:.2f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.2f}")
    gap = row["difference"]
    unclear = gap and gap["stderr"] is not None and abs(gap["value"]) <= NORMAL * gap["stderr"]
    return f"{text} {MARK}" if unclear else text


def markdown(lines: Iterable[Sequence]) -> str:
    """A table, whose first line is its head."""
    head, *body = lines
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *body))
