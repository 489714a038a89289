"""Evaluate models on reasoning benchmarks with lm-evaluation-harness, and write a table.

python -m tools.evaluate_reasoning --models base=MODEL imitation=DIR epoch1=DIR epoch2=DIR --output_dir DIR
"""

import itertools
import json
import logging
import math
import os
import shlex
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tools.common.errors import require
from tools.common.files import ROOT, read_json, write_json, write_text
from tools.common.flags import NAMED_MODELS, NamedPath, compared_values, defaults, flag, parse_flags
from tools.common.models import load_tokenizer, model_folder, model_setting
from tools.common.programs import run_program
from tools.common.ranks import LAUNCHER_VARIABLES
from tools.common.records import stage
from tools.engine.flags import ModelFlags
from tools.measure.estimates import UNKNOWN, markdown

logger = logging.getLogger(__name__)
TASK_FILES = ROOT / "tools/measure/tasks"  # replacements for tasks that the harness cannot load or scores wrongly
TOKENIZER = "tokenizer"  # folder beside the harness's output
MEAN = "geometric mean"  # a column of the table
LONGEST = 4096  # tokens; with a context of 262,144 the harness would choose batch size 1


class NoResult(Exception):
    """The harness left no result for a task, or without the requested metric."""


class Benchmark(NamedTuple):
    name: str
    task: str  # the harness's name
    shots: int | None  # None: the task's default
    metric: str  # the harness's "metric" or "metric,filter"


class Score(NamedTuple):
    value: float  # in percent
    stderr: float | None  # the harness's, if it has one


# The paper does not state its tasks, shots and metrics, so these are our choice.
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


def benchmark_of(text: str) -> Benchmark:
    """The `type` of --tasks: one of BENCHMARKS or a task of the harness, optionally with shots and metric."""
    name, *changes = text.split(":")
    if set(name) & set(",*?["):
        raise ArgumentTypeError(f"{name!r} is a list or a pattern; name the tasks one by one, separated by spaces")
    benchmark = {each.name: each for each in BENCHMARKS}.get(name, Benchmark(name, name, None, "acc"))
    for change in changes:
        field = {"shots": int(change)} if change.isdecimal() else {"metric": change}
        benchmark = benchmark._replace(**field)
    return benchmark


@dataclass(kw_only=True)
class Flags(ModelFlags):
    models: list[NamedPath] = flag("models to evaluate", compared=False, **NAMED_MODELS)
    tasks: list[Benchmark] = flag(
        "benchmarks, or other tasks by the harness's names",
        default=list(BENCHMARKS),
        type=benchmark_of,
        metavar="NAME[:SHOTS][:METRIC]",
        unique=attrgetter("task"),  # result files are named by task
        compared=False,  # each model and task has its own record
    )
    output_dir: str = flag("folder for the results", compared=False)
    chat_template: bool = flag("ask in each model's chat template, for instruct models", default=False, shared=True)
    limit: int | None = flag("for a trial: ask only this many questions per task", default=None, at_least=1)
    batch_size: str | None = flag("the harness's --batch_size; unset: auto, or 8 on a CPU", default=None)
    lm_eval: str | None = flag(
        "the harness's command, such as 'accelerate launch -m lm_eval'", default=None, machine=True
    )


def ask_all(flags: Flags) -> tuple[dict[str, dict[str, Score]], set[str]]:
    """Scores by model and benchmark, and the harness's versions.

    Each model and benchmark is a separate run of the harness, so that a failure is only logged and the same command
    runs what is missing. The harness's output is in OUTPUT_DIR/MODEL/TASK.log.
    """
    import torch

    if flags.lm_eval is None:
        require("lm_eval", "lm-eval==0.4.13")
    command = shlex.split(flags.lm_eval) if flags.lm_eval else [sys.executable, "-m", "lm_eval"]
    # On CPUs the harness's search for a batch size is slow.
    batch_size = flags.batch_size or ("auto" if torch.cuda.is_available() else "8")
    settings = compared_values(flags) | {"batch_size": batch_size}
    scores: dict[str, dict[str, Score]] = {name: {} for name, _ in flags.models}
    versions = set()
    models = [(name, model_setting(model)) for name, model in flags.models]  # UserError for a missing model
    for (name, model), benchmark in itertools.product(models, flags.tasks):
        logger.info("%s on %s", name, benchmark.name)
        path = Path(flags.output_dir, name, f"{benchmark.task.replace('/', '_')}.json")
        record = path.with_name(f"{path.stem}_settings.json")
        log = path.with_suffix(".log")
        # Without the metric: all metrics of a task are stored, so another one needs no new run.
        asked = settings | {"model": model, "task": benchmark.task, "shots": benchmark.shots}
        try:
            with stage(record, asked, results=[path.name], defaults=defaults(Flags), ranks=False) as work:
                if work.todo:
                    write_json(path, ask(command, asked, log, trust_remote_code=flags.trust_remote_code))
            result = read_json(path)
            versions.add(result["harness"])
            scores[name][benchmark.name] = read_score(result, benchmark.metric)
        except NoResult as error:
            logger.error("%s on %s: %s; see %s", name, benchmark.name, error, log)
    return scores, versions


def ask(command: Sequence[str], settings: Mapping, log: Path, *, trust_remote_code: bool = False) -> dict:
    """Run the harness for a model and a task. Returns {"metrics": {NAME: {"value", "stderr"}}, "harness": version}.

    `settings`: model (of `model_setting`), task, shots, limit, dtype (None: that of the model's config), batch_size,
    and chat_template. NoResult if the harness fails or leaves no result; its output goes to `log`.
    """
    # Otherwise the harness would take itself for a rank of this program's launch.
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    with TemporaryDirectory(prefix=f".{log.stem}.", dir=log.parent) as folder:
        # The harness's own loading gives some models other token ids than play and training use.
        tokenizer = load_tokenizer(settings["model"]["path"], trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(f"{folder}/{TOKENIZER}")
        argv = [*command, "run", *harness_flags(settings, folder)]
        if trust_remote_code:
            argv.append("--trust_remote_code")
        with open(log, "w", encoding="utf-8") as file:
            print(shlex.join(argv), file=file, flush=True)
            status = subprocess.run(argv, env=environment, stdout=file, stderr=file, check=False).returncode
        paths = list(Path(folder).rglob("results_*.json"))
        if status or len(paths) != 1:
            raise NoResult(f"the harness failed: status {status}, {len(paths)} files results_*.json")
        output = read_json(paths[0])
    results = output["results"].get(settings["task"], {})  # a tag only has results of its tasks
    numbers = {key: value for key, value in results.items() if isinstance(value, Number)}
    metrics = {
        key: {"value": value, "stderr": numbers.get(key.replace(",", "_stderr,"))}
        for key, value in numbers.items()
        if "," in key and "_stderr," not in key
    }
    return {"metrics": metrics, "harness": output["lm_eval_version"]}


def harness_flags(settings: Mapping, folder: str) -> list[str]:
    """The harness's flags, with a folder for this run's output, which also holds the tokenizer."""
    config = read_json(model_folder(settings["model"]["path"]) / "config.json")
    model = {"pretrained": settings["model"]["path"], "tokenizer": f"{folder}/{TOKENIZER}"}
    model["dtype"] = settings["dtype"] or "auto"
    # The harness knows other names for a model without this one.
    if length := config.get("text_config", config).get("max_position_embeddings"):
        model["max_length"] = min(length, LONGEST)
    # As JSON, because the harness splits other formats at commas and equals signs, even in a path.
    flags = ["--model", "hf", "--model_args", json.dumps(model), "--batch_size", settings["batch_size"]]
    flags += ["--tasks", settings["task"], "--include_path", str(TASK_FILES), "--output_path", folder]
    for name, value in (("--num_fewshot", settings["shots"]), ("--limit", settings["limit"])):
        if value is not None:
            flags += [name, str(value)]
    if settings["chat_template"]:
        flags.append("--apply_chat_template")
    return flags


def read_score(result: Mapping, metric: str) -> Score:
    """One metric from a result of `ask`. NoResult unless exactly one has this name and a value."""
    names = [name for name in result["metrics"] if metric in (name, name.partition(",")[0])]
    if len(names) != 1:
        raise NoResult(f"--tasks NAME:METRIC: choose one metric of {' '.join(result['metrics'])}; found {metric!r}")
    value = result["metrics"][names[0]]["value"]
    stderr = result["metrics"][names[0]]["stderr"]
    if value is None:  # NaN is stored as null
        raise NoResult(f"the harness's value of {names[0]} is not a number")
    return Score(100 * value, None if stderr is None else 100 * stderr)


def geometric_mean(values: Sequence[float]) -> float:
    """The k-th root of the product of k values, which the paper reports over its benchmarks.

    It has no standard error, because the harness provides one only for each benchmark.
    """
    return math.prod(values) ** (1 / len(values))


def score_rows(scores: Mapping[str, Mapping[str, Score]], benchmarks: Sequence[str]) -> list[dict]:
    """A row for each model and benchmark with a score, and for the geometric mean of each model that has all."""
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
    columns = [benchmark["name"] for benchmark in settings["benchmarks"]] + [MEAN]
    cells = {(row["model"], row["benchmark"]): cell_text(row) for row in rows}
    lines = [["", *columns]]
    for model in settings["models"]:
        lines.append([model, *(cells.get((model, column), UNKNOWN) for column in columns)])
    asked = []
    for benchmark in settings["benchmarks"]:
        shots = "default" if benchmark["shots"] is None else benchmark["shots"]
        asked.append(f"{benchmark['name']} {shots}-shot {benchmark['metric']}")
    dtype = settings["dtype"] or "each model in its config's dtype"
    questions = "all questions" if settings["limit"] is None else f"the first {settings['limit']} questions per task"
    layout = "in each model's chat template" if settings["chat_template"] else "without a chat template"
    return f"""{markdown(lines)}

Percentages ± one standard error over questions, which does not cover the randomness of training.
lm-evaluation-harness {settings["harness"]}, {layout}, {dtype}, {questions}: {", ".join(asked)}.
"""


def cell_text(row: Mapping) -> str:
    error = "" if row["stderr"] is None else f" ± {row['stderr']:.2f}"
    return f"{row['value']:.2f}{error}"


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    scores, versions = ask_all(flags)
    settings = {
        "harness": ", ".join(sorted(versions)),
        "dtype": flags.dtype,
        "limit": flags.limit,
        "chat_template": flags.chat_template,
        "models": dict(flags.models),
        "benchmarks": [benchmark._asdict() for benchmark in flags.tasks],
    }
    rows = score_rows(scores, [benchmark.name for benchmark in flags.tasks])
    write_json(f"{flags.output_dir}/results.json", {"settings": settings, "results": rows})
    text = table_text(rows, settings)
    write_text(f"{flags.output_dir}/table.md", text)
    means = ", ".join(f"{row['model']} {cell_text(row)}" for row in rows if row["benchmark"] == MEAN)
    print(f"{text}\nreasoning, {MEAN}: {means or '-'}")
    if number := len(flags.models) * len(flags.tasks) - sum(map(len, scores.values())):
        logger.error("%d results are missing, see above; rerun the same command to retry", number)
        sys.exit(1)


if __name__ == "__main__":
    run_program(main, kept="finished results are kept; rerun the same command for the others")
