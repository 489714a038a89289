"""One model on one benchmark: one run of lm-evaluation-harness."""

import json
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

TASK_FILES = Path(__file__).parent / "tasks"  # in place of tasks that the harness cannot load or scores wrongly
LONGEST = 4096  # tokens of a question; with a context of 262,144 the harness would find room for one at a time


class NoResult(Exception):
    """The harness ended without an error, but what it left is no result of this task."""


class Benchmark(NamedTuple):
    name: str
    task: str  # as the harness calls it
    shots: int | None  # None: as many as the task itself says
    metric: str  # "metric" or "metric,filter" of the harness


# The paper does not state its tasks, shots and metrics: these are this project's choice.
# A further line needs no other code: tables, report and studies take the names from the results. It enters the
# geometric mean, which then no longer compares with the paper's. After a change of shots, or of a file in TASK_FILES,
# take another --output_dir: a finished result is refused with other shots, and kept with another file.
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
    """Ask a model a benchmark. Returns its metrics and the harness's version, as README.md describes.

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
    """The harness's flags, with an output folder of this run alone.

    Another backend of the harness, such as vLLM, takes the place of "hf" here, with its own names in --model_args. As
    it may change scores, `ask_all` in tools/evaluate_reasoning.py must put it into `settings`, which records compare.
    """
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
        raise UserError(f"it left {len(paths)} files results_*.json in the place of one")
    output = read_json(paths[0])
    results = output["results"].get(task, {})  # a tag has results of its tasks alone
    numbers = {key: value for key, value in results.items() if isinstance(value, Number)}
    metrics = {
        key: {"value": value, "stderr": numbers.get(key.replace(",", "_stderr,"))}
        for key, value in numbers.items()
        if "," in key and "_stderr," not in key
    }
    return {"metrics": metrics, "harness": output["lm_eval_version"]}
