"""Checkpoints on reasoning benchmarks, through lm-evaluation-harness, as a table beside the published one.

    python -m tools.evaluate_reasoning --models base=MODEL imitation=DIR epoch1=DIR epoch2=DIR --output_dir DIR

Every model meets its tasks in a process of its own, one per GPU at a time. DIR/MODEL/TASK.json is a finished one: the
same command runs those that are missing. tools/reasoning/README.md tells what is written.
"""

import argparse
import logging
import os
import re
from dataclasses import dataclass, fields
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tools.engine.model import model_folder
from tools.engine.vllm import VLLM, VLLMFlags
from tools.flags import NamedPath, flag, named_path, parse_flags
from tools.reasoning.jobs import HARNESS_VERSION, Job, gpus, look_for_hub, run_jobs, tasks_digest
from tools.reasoning.scores import Score
from tools.reasoning.table import BENCHMARKS, RESULT_FILES, Benchmark, write_results
from utils import end_with_launcher, lock, model_fingerprint, run_program, set_up_logging, too_small, world_size

HARNESS = "lm-eval"
HF = "hf"  # of --engine: the harness' own way with transformers
LOCK = ".evaluate_reasoning.lock"
OWN_METRIC = "acc"  # of tasks that are none of the eight
logger = logging.getLogger(__name__)


def benchmark_of(text: str) -> Benchmark:
    """The `type` of --tasks: one of the eight or a task of the harness, perhaps with shots and a metric."""
    name, *changes = text.split(":")
    if not all([name, *changes]):
        raise argparse.ArgumentTypeError(f"expected NAME, NAME:SHOTS, NAME:METRIC or NAME:SHOTS:METRIC, got {text!r}")
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    found = known.get(name, Benchmark(name, name, None, OWN_METRIC))
    for change in changes:
        found = found._replace(shots=int(change)) if change.isdecimal() else found._replace(metric=change)
    return found


@dataclass(kw_only=True)
class Flags(VLLMFlags):
    """The flags of this program."""

    models: list[NamedPath] = flag(
        "folders or names; the first is compared with", type=named_path, metavar="NAME=MODEL"
    )
    tasks: list[Benchmark] = flag(
        "the harness' names", default=list(BENCHMARKS), type=benchmark_of, metavar="NAME[:SHOTS][:METRIC]"
    )
    output_dir: str = flag("folder of the results")
    limit: int | None = flag("ask only the first so many questions of each task, for a trial", default=None)
    batch_size: str | None = flag("of the harness; auto: by the free memory; unset: auto, on a CPU 8", default=None)
    dtype: str = flag("of the models", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    engine: str = flag("hf: the model in the harness' process; vllm: behind a server", default=HF, choices=(HF, VLLM))
    include_path: str | None = flag("folder of your own tasks, as YAML files of the harness", default=None)
    trust_remote_code: bool = flag("True: run the code that comes with a model", default=False)
    num_processes: int | None = flag("that run at a time; unset: one per GPU, else one", default=None)
    overwrite: bool = flag("True: run again what was made under other settings", default=False)

    def check(self) -> None:
        """Raise one ValueError for all that is wrong with the flags."""
        names, tasks = [model.name for model in self.models], [task.task for task in self.tasks]
        problems = too_small(self, limit=1, num_processes=1) + self.vllm_problems(self.engine)
        for given, values in (("models", names), ("tasks", tasks)):
            problems += [f"--{given} names {value} twice" for value in sorted(set(values)) if values.count(value) > 1]
        no_folders = [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]
        problems += [f"--models {name}: it names a folder too; use letters, digits, . _ and -" for name in no_folders]
        if world_size() > 1:
            problems.append("start it without torchrun: it uses every GPU that it sees by itself")
        if problems:
            raise ValueError("; ".join(problems))

    def jobs(self) -> list[Job]:
        """All models on all benchmarks."""
        how = {name: getattr(self, name) for name in ("batch_size", "engine", "trust_remote_code")}
        how["vllm"] = {field.name: getattr(self, field.name) for field in fields(VLLMFlags)}
        engine = {} if self.engine == HF else {"engine": self.engine}
        own_tasks, jobs = tasks_digest(self.include_path), []
        for name, model in self.models:
            folder = model_folder(model).resolve()
            made_of = {"model": {"path": str(folder), "sha256": model_fingerprint(folder)}} | engine
            for benchmark in self.tasks:
                own = benchmark.task not in {known.task for known in BENCHMARKS}  # those are never the user's
                asked = {"task": benchmark.task, "shots": benchmark.shots, "limit": self.limit, "dtype": self.dtype}
                settings = {"harness": HARNESS_VERSION, **asked, **made_of, "own_tasks": own_tasks if own else None}
                include_path = os.path.abspath(self.include_path) if own and self.include_path else None
                request = how | {"model": str(folder), "include_path": include_path, "settings": settings}
                path = Path(self.output_dir) / name / f"{benchmark.task.replace('/', '_')}.json"
                jobs.append(Job(name, benchmark, request, path))
        return jobs

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
    if engine == VLLM and find_spec("tenacity") is None:
        raise ValueError(f"--engine {VLLM} needs more: pip install '{HARNESS}[api]=={HARNESS_VERSION}'")


def main() -> None:
    end_with_launcher()
    flags = parse_flags(Flags, description="Checkpoints on reasoning benchmarks, through lm-evaluation-harness.")
    set_up_logging()
    flags.check()
    check_harness(flags.engine)
    jobs, folder = flags.jobs(), Path(flags.output_dir)
    lock(folder / LOCK)
    to_run = [job for job in jobs if job.is_to_run(overwrite=flags.overwrite)]
    if to_run:
        logger.info("%d of %d results are there; %s comes next", len(jobs) - len(to_run), len(jobs), to_run[0].name)
        for name in RESULT_FILES:  # of other results than those to come
            (folder / name).unlink(missing_ok=True)
        look_for_hub()
        run_jobs(to_run, flags.devices())
    table: dict[str, dict[str, Score]] = {}
    for job in jobs:
        table.setdefault(job.model, {})[job.benchmark.name] = job.score()
    settings = {
        "harness": HARNESS_VERSION,
        "dtype": flags.dtype,
        "limit": flags.limit,
        "against": flags.models[0].name,
        "models": {job.model: job.request["settings"]["model"] for job in jobs},
        "benchmarks": [benchmark._asdict() for benchmark in flags.tasks],
    }
    print(write_results(folder, table, settings), end="")


if __name__ == "__main__":
    run_program(main)
