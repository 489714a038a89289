"""Checkpoints on reasoning benchmarks, through lm-evaluation-harness, as a table beside the published one.

    python -m tools.evaluate_reasoning --models base=MODEL imitation=DIR epoch1=DIR epoch2=DIR --output_dir DIR

Needs the harness (pip install lm-eval==0.4.13); its data sets come from the Hugging Face hub. Every model meets its
tasks in a process of its own, one per GPU at a time. DIR/MODEL/TASK.json is a finished one: the same command runs
those that are missing, and refuses those that were made in another way. Writes DIR/results.json, table.md and
radar.svg; tools/reasoning/README.md tells what is in them.
"""

import argparse
import importlib.util
import logging
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tools.engine.vllm import VLLM
from tools.reasoning.jobs import HARNESS_VERSION, HarnessFlags, gpus, look_for_hub, run_jobs, run_portion
from tools.reasoning.scores import Score
from tools.reasoning.table import BENCHMARKS, RESULT_FILES, Benchmark, write_results
from utils import (
    NamedPath,
    end_with_launcher,
    flag,
    lock,
    named_path,
    parse_flags,
    run_program,
    set_up_logging,
    too_small,
    world_size,
)

HARNESS = "lm-eval"
LOCK = ".evaluate_reasoning.lock"
OWN_METRIC = "acc"  # of tasks that are none of the eight
logger = logging.getLogger(__name__)


def benchmark_of(text: str) -> Benchmark:
    """The `type` of --tasks: one of the eight or a task of the harness, perhaps with shots."""
    name, colon, shots = text.partition(":")
    if not name or (colon and not shots.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected NAME or NAME:SHOTS, got {text!r}")
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    found = known.get(name, Benchmark(name, name, None, OWN_METRIC))
    return found._replace(shots=int(shots)) if colon else found


@dataclass(kw_only=True)
class Flags(HarnessFlags):
    """The flags of this program."""

    against: str | None = flag("the model that differences are from; unset: the first one", default=None)
    tasks: list[Benchmark] = flag(
        "of the eight, or as the harness names them",
        default=list(BENCHMARKS),
        type=benchmark_of,
        metavar="NAME[:SHOTS]",
    )
    metrics: list[NamedPath] = flag(
        "another metric of a task, such as ARC-c=acc_norm; needs no new run",
        default=[],
        type=named_path,
        metavar="NAME=METRIC",
    )
    num_processes: int | None = flag("that run at a time; unset: one per GPU, else one", default=None)
    overwrite: bool = flag("True: run again what was made under other settings", default=False)

    def check(self) -> None:
        """Raise one ValueError for all that is wrong with the flags."""
        names, tasks = [model.name for model in self.models], [task.name for task in self.tasks]
        problems = too_small(self, limit=1, num_processes=1) + self.vllm_problems(self.engine)
        metrics, harness_tasks = [metric.name for metric in self.metrics], [task.task for task in self.tasks]
        for name, values in (("models", names), ("tasks", harness_tasks), ("metrics", metrics)):
            if repeated := sorted({value for value in values if values.count(value) > 1}):
                problems.append(f"--{name} names {repeated[0]} twice")
        for name in names:
            if not re.fullmatch(r"\w[\w.-]*", name):
                problems.append(f"--models {name}: a name is also a folder's; use letters, digits, . _ and -")
        problems += [f"--metrics {name} is none of the --tasks" for name in metrics if name not in tasks]
        if self.against is not None and self.against not in names:
            problems.append(f"--against {self.against} is none of the --models {', '.join(names)}")
        if self.batch_size and not re.fullmatch("auto|0*[1-9][0-9]*", self.batch_size):
            problems.append(f"--batch_size {self.batch_size} is neither a number nor auto")
        if world_size() > 1:
            problems.append("start it without torchrun: it uses every GPU that it sees by itself")
        if problems:
            raise ValueError("; ".join(problems))

    def benchmarks(self) -> list[Benchmark]:
        """The tasks, with the metrics to show."""
        metrics = dict(self.metrics)
        return [task._replace(metric=metrics.get(task.name, task.metric)) for task in self.tasks]

    def devices(self) -> list[str | None]:
        """Where models run at the same time: GPUs, None where there is none."""
        devices: list[str | None] = list(gpus(self.tensor_parallel_size)) or [None]
        return [devices[number % len(devices)] for number in range(self.num_processes or len(devices))]


def check_harness(engine: str) -> None:
    """Raise ValueError unless the right version of the harness is installed, with its client of servers if needed."""
    try:
        installed = metadata.version(HARNESS)
    except metadata.PackageNotFoundError:
        installed = None
    if installed != HARNESS_VERSION:
        found = f"there is {installed}, and results change with its version" if installed else "it is not there"
        raise ValueError(f"needs lm-evaluation-harness; {found}: pip install {HARNESS}=={HARNESS_VERSION}")
    if engine == VLLM and importlib.util.find_spec("tenacity") is None:
        raise ValueError(f"--engine {VLLM} needs more: pip install '{HARNESS}[api]=={HARNESS_VERSION}'")


def main() -> None:
    end_with_launcher()
    flags = parse_flags(Flags, description="Checkpoints on reasoning benchmarks, through lm-evaluation-harness.")
    set_up_logging()
    flags.check()
    check_harness(flags.engine)
    jobs, folder = flags.jobs(flags.benchmarks()), Path(flags.output_dir)
    lock(folder / LOCK)
    to_run = [job for job in jobs if job.is_to_run(overwrite=flags.overwrite)]
    if to_run:
        logger.info("%d of %d results are there; %s comes next", len(jobs) - len(to_run), len(jobs), to_run[0].name)
        for name in RESULT_FILES:  # of other results than those to come
            (folder / name).unlink(missing_ok=True)
        look_for_hub()
        run_jobs(to_run, flags.devices(), run_portion)
    table: dict[str, dict[str, Score]] = {}
    for job in jobs:
        table.setdefault(job.model, {})[job.benchmark.name] = job.score()
    settings = {
        **{"harness": HARNESS_VERSION, "dtype": flags.dtype, "limit": flags.limit},
        "against": flags.against or flags.models[0].name,
        "models": {job.model: job.request["settings"]["model"] for job in jobs},
        "benchmarks": [benchmark._asdict() for benchmark in flags.benchmarks()],
    }
    print(write_results(folder, table, settings), end="")


if __name__ == "__main__":
    run_program(main)
