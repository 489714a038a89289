"""Reasoning benchmarks: runs of lm-evaluation-harness, one for each model and benchmark, and the table of scores."""

import json
import math
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tools.common.errors import UserError
from tools.common.files import read_json
from tools.common.models import model_folder
from tools.common.ranks import LAUNCHER_VARIABLES
from tools.measure.estimates import UNKNOWN, markdown

TASK_FILES = Path(__file__).parent / "tasks"  # instead of tasks that the harness cannot load or scores wrongly
MEAN = "geometric mean"  # a column of the table
LONGEST = 4096  # tokens of a question; with a context of 262,144 the harness would find room for one at a time


class NoResult(Exception):
    """The harness ended without an error, but what it left is no result of this task."""


class Benchmark(NamedTuple):
    name: str
    task: str  # as the harness calls it
    shots: int | None  # None: as many as the task itself says
    metric: str  # "metric" or "metric,filter" of the harness


class Score(NamedTuple):
    value: float  # in percent
    stderr: float | None  # the harness's own; None where it gives none


# The paper does not state its tasks, shots and metrics: these are this project's choice. All of them enter the
# geometric mean.
BENCHMARKS = (
    Benchmark("MMLU", "mmlu", 5, "acc"),
    Benchmark("BBH", "bbh_fewshot", 3, "exact_match"),
    Benchmark("MuTual", "mutual", 0, "acc"),
    Benchmark("ARC-e", "arc_easy", 0, "acc"),
    Benchmark("ARC-c", "arc_challenge", 0, "acc"),
    Benchmark("LogiQA2", "logiqa2", 0, "acc"),
    Benchmark("WinoGrande", "winogrande", 0, "acc"),
    Benchmark("PIQA", "piqa", 0, "acc"),
)


def ask(command: Sequence[str], settings: Mapping, log: Path) -> dict:
    """Ask a model a benchmark. Returns {"metrics": {NAME: {"value", "stderr"}}, "harness": version}.

    `settings`: model (of `model_setting`), task, shots, limit, dtype (None: that of the model's config), batch_size,
    and chat_template if it is true.
    CalledProcessError if the harness fails, NoResult if it leaves no result; `log` gets its messages.
    """
    with TemporaryDirectory(prefix=f".{log.stem}.", dir=log.parent) as folder:
        run_harness([*command, *harness_flags(settings, folder)], log)
        try:
            return read_result(Path(folder), settings["task"])
        except UserError as error:
            raise NoResult(str(error)) from error


def harness_flags(settings: Mapping, folder: str) -> list[str]:
    """The harness's flags, with an output folder of this run alone."""
    config = read_json(model_folder(settings["model"]["path"]) / "config.json")
    model = {"pretrained": settings["model"]["path"], "dtype": settings["dtype"] or "auto"}
    if length := config.get("text_config", config).get("max_position_embeddings"):  # else the harness knows more names
        model["max_length"] = min(length, LONGEST)
    # As JSON, because the harness splits other arguments at commas and equals signs, also those of a path.
    flags = ["--model", "hf", "--model_args", json.dumps(model), "--batch_size", settings["batch_size"]]
    flags += ["--tasks", settings["task"], "--include_path", str(TASK_FILES), "--output_path", folder]
    for name, value in (("--num_fewshot", settings["shots"]), ("--limit", settings["limit"])):
        if value is not None:
            flags += [name, str(value)]
    if settings.get("chat_template"):
        flags.append("--apply_chat_template")
    return flags


def run_harness(command: Sequence[str], log: Path) -> None:
    # The harness must not take itself for a rank of the launch that this program may have been started in.
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    with open(log, "w", encoding="utf-8") as file:
        file.write(f"{shlex.join(command)}\n")
        file.flush()
        subprocess.run(command, env=environment, stdout=file, stderr=file, check=True)


def read_result(folder: Path, task: str) -> dict:
    """The result of a task, or of a group of tasks such as MMLU, from the harness's output. UserError without one."""
    paths = list(folder.rglob("results_*.json"))
    if len(paths) != 1:
        raise UserError(f"it left {len(paths)} files results_*.json instead of one")
    output = read_json(paths[0])
    results = output["results"].get(task, {})  # a tag has results of its tasks alone
    numbers = {key: value for key, value in results.items() if isinstance(value, Number)}
    metrics = {
        key: {"value": value, "stderr": numbers.get(key.replace(",", "_stderr,"))}
        for key, value in numbers.items()
        if "," in key and "_stderr," not in key
    }
    return {"metrics": metrics, "harness": output["lm_eval_version"]}


# The table.


def read_score(result: Mapping, metric: str) -> Score:
    """One metric of a result of `ask`. UserError unless exactly one has this name and a value."""
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

    It gets no standard error: the harness gives one for each benchmark alone.
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
