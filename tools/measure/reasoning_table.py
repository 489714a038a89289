"""Scores of models on benchmarks, in percent, as one table."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tools.common.errors import UserError
from tools.measure.estimates import UNKNOWN, markdown

MEAN = "geometric mean"  # a column of the table


class Score(NamedTuple):
    value: float
    stderr: float | None  # the harness's own; None where it gives none


def read_score(result: Mapping, metric: str) -> Score:
    """One metric of a result of `ask` in reasoning.py. UserError unless exactly one has this name and a value."""
    names = [name for name in result["metrics"] if metric in (name, name.partition(",")[0])]
    if len(names) != 1:
        raise UserError(f"--tasks NAME:METRIC: choose one metric of {' '.join(result['metrics'])}; found {metric!r}")
    value = result["metrics"][names[0]]["value"]
    stderr = result["metrics"][names[0]]["stderr"]
    if value is None:  # as NaN is stored
        raise UserError(f"the harness's value of {names[0]} is not a number")
    return Score(100 * value, None if stderr is None else 100 * stderr)


def geometric_mean(values: Sequence[float]) -> float:
    """The k-th root of the product of k values, as the paper takes it over its benchmarks.

    It gets no standard error: the harness gives one for each benchmark alone. For another mean, change the call in
    `score_rows` and the name MEAN. Report and studies take the name from results.json, which each start writes anew.
    """
    return math.prod(values) ** (1 / len(values))


def score_rows(scores: Mapping[str, Mapping[str, Score]], benchmarks: Sequence[str]) -> list[dict]:
    """A row for each model and benchmark, and for each model's geometric mean.

    What was not asked has no row, and a model that lacks a benchmark has no mean.
    """
    rows = []
    for model, of_model in scores.items():
        asked = [name for name in benchmarks if name in of_model]
        for name in asked:
            rows.append({"model": model, "benchmark": name, **of_model[name]._asdict()})
        if asked == list(benchmarks):
            mean = geometric_mean([of_model[name].value for name in benchmarks])
            rows.append({"model": model, "benchmark": MEAN, "value": mean, "stderr": None})
    return rows


def table_text(rows: Sequence[Mapping], settings: Mapping) -> str:
    """The table in Markdown, and what was asked."""
    columns = [benchmark["name"] for benchmark in settings["benchmarks"]] + [MEAN]
    cells = {(row["model"], row["benchmark"]): cell_text(row) for row in rows}
    lines = [["", *columns]]
    for model in settings["models"]:
        lines.append([model, *(cells.get((model, column), UNKNOWN) for column in columns)])
    asked = []
    for benchmark in settings["benchmarks"]:
        shots = "default" if benchmark["shots"] is None else benchmark["shots"]
        asked.append(f"{benchmark['name']} {shots}-shot {benchmark['metric']}")
    dtype = settings["dtype"] or "each model in the type of its config"
    questions = "all questions" if settings["limit"] is None else f"the first {settings['limit']} questions of a task"
    layout = "in the chat template of each model" if settings["chat_template"] else "without a chat template"
    return f"""{markdown(lines)}

Percentages ± one standard error over draws of the questions; it does not cover the randomness of training.
lm-evaluation-harness {settings["harness"]}, {layout}, {dtype}, {questions}: {", ".join(asked)}.
"""


def cell_text(row: Mapping) -> str:
    error = "" if row["stderr"] is None else f" ± {row['stderr']:.2f}"
    return f"{row['value']:.2f}{error}"
