"""Checkpoints on reasoning benchmarks, through lm-evaluation-harness, as a table beside the published one.

    python -m tools.evaluate_reasoning --models base=MODEL imitation=DIR epoch1=DIR epoch2=DIR --output_dir DIR

All tasks are checked first. Then each model is asked each benchmark by one command of the harness, whose result is
kept as DIR/MODEL/TASK.json. The same command runs those that are missing; a task that was stopped starts from its
first question. The exit status is 1 if a result is missing. tools/reasoning/README.md describes the files.
"""

import argparse
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tools.flags import NamedPath, flag, named_path, parse_flags  # isort: skip  (first: it imports utils, see train.py)
import torch

from tools.reasoning.jobs import (
    BENCHMARKS,
    Benchmark,
    Job,
    check_jobs,
    result_path,
    run_jobs,
    task_digest,
    write_task_files,
)
from tools.reasoning.table import write_results
from utils import (
    UserError,
    lock,
    model_fingerprint,
    model_folder,
    run_program,
    set_up_logging,
    too_small,
)

LOCK, CHECKS, TASK_FILES = ".evaluate_reasoning.lock", ".checks", ".tasks"  # in --output_dir
STOPPED = 130  # exit status after Ctrl-C
METRIC = "acc"  # of tasks outside the eight benchmarks
CPU_BATCH = "8"  # on a CPU the harness's search for a batch size takes longer than it saves
logger = logging.getLogger(__name__)


def benchmark_of(text: str) -> Benchmark:
    """The `type` of --tasks: one of the eight benchmarks or a task of the harness, perhaps with shots and metric."""
    name, *changes = text.split(":")
    if not all([name, *changes]):
        raise argparse.ArgumentTypeError(f"expected NAME, NAME:SHOTS, NAME:METRIC or NAME:SHOTS:METRIC, got {text!r}")
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    found = known.get(name, Benchmark(name, name, None, METRIC))
    for change in changes:
        found = found._replace(shots=int(change)) if change.isdecimal() else found._replace(metric=change)
    return found


@dataclass(kw_only=True)
class Flags:
    """The flags of this program."""

    models: list[NamedPath] = flag(
        "folders or hub names; all are compared with the first", type=named_path, metavar="NAME=MODEL"
    )
    tasks: list[Benchmark] = flag(
        "benchmarks of the table, or other tasks by the harness's names",
        default=list(BENCHMARKS),
        type=benchmark_of,
        metavar="NAME[:SHOTS][:METRIC]",
    )
    output_dir: str = flag("folder of the results")
    limit: int | None = flag("for a trial: ask only the first so many questions of each task", default=None)
    batch_size: str | None = flag("the harness's --batch_size; unset: auto, on a CPU 8", default=None)
    dtype: str = flag("of the models", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    lm_eval: str | None = flag(
        "the harness's command; unset: this environment's. '/ENV/bin/lm_eval' uses another environment, "
        "'accelerate launch -m lm_eval' several GPUs",
        default=None,
        metavar="COMMAND",
    )
    backend: str = flag("the harness's --model, which runs the model: hf or vllm", default="hf")
    include_path: str | None = flag("folder of your own tasks, as YAML files of the harness", default=None)
    trust_remote_code: bool = flag("True: run the code that comes with a model", default=False)

    def check(self) -> None:
        """Raise one UserError for all that is wrong with the flags."""
        names, tasks = [model.name for model in self.models], [task.task for task in self.tasks]
        problems = too_small(self, limit=1)
        for given, values in (("models", names), ("tasks", tasks)):
            problems += [f"--{given} names {value} twice" for value in sorted(set(values)) if values.count(value) > 1]
        no_folders = [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]
        problems += [f"--models {name}: a name may have letters, digits and . _ -" for name in no_folders]
        if self.lm_eval is None and not find_spec("lm_eval"):
            problems.append("needs lm-evaluation-harness: pip install lm-eval==0.4.13, or --lm_eval names its command")
        if problems:
            raise UserError("; ".join(problems))

    def jobs(self) -> list[Job]:
        """All models on all benchmarks."""
        jobs = []
        for name, model in self.models:
            folder = model_folder(model).resolve()
            of_model = {"path": str(folder), "sha256": model_fingerprint(folder)}
            for benchmark in self.tasks:
                asked = {"task": benchmark.task, "shots": benchmark.shots, "limit": self.limit, "dtype": self.dtype}
                settings = asked | {"model": of_model, "backend": self.backend, "batch_size": self.batches()}
                settings["own_tasks"] = task_digest(benchmark.task, self.include_path)
                path = result_path(Path(self.output_dir), name, benchmark.task)
                jobs.append(Job(name, benchmark, settings, path))
        return jobs

    def batches(self) -> str:
        """The harness's --batch_size. In bfloat16 it changes some answers, because sums are rounded differently."""
        return self.batch_size or ("auto" if torch.cuda.is_available() else CPU_BATCH)

    def ask(self, jobs: Sequence[Job]) -> dict[Path, str]:
        """Check the tasks of these jobs; if all are right, ask the models. Returns reasons of failures by job.path."""
        folder = Path(self.output_dir)
        program = shlex.split(self.lm_eval) if self.lm_eval else [sys.executable, "-m", "lm_eval"]
        program += ["run", "--include_path", str(write_task_files(folder / TASK_FILES, self.include_path).resolve())]
        program += ["--trust_remote_code"] if self.trust_remote_code else []
        if problems := check_jobs(jobs, [*program, "--model", "dummy", "--limit", "1"], folder / CHECKS):
            return {job.path: "not asked, because another task failed its check" for job in jobs} | problems
        limit = [] if self.limit is None else ["--limit", str(self.limit)]
        return run_jobs(jobs, [*program, "--model", self.backend, "--batch_size", self.batches(), *limit])


def main() -> None:
    flags = parse_flags(Flags, description="Checkpoints on reasoning benchmarks, through lm-evaluation-harness.")
    set_up_logging()
    flags.check()
    jobs, folder = flags.jobs(), Path(flags.output_dir)
    lock(folder / LOCK)
    missing = [job for job in jobs if not job.is_finished()]
    logger.info("%d of %d results are there", len(jobs) - len(missing), len(jobs))
    try:
        problems = flags.ask(missing) if missing else {}
    except KeyboardInterrupt:
        logger.error("stopped; the same command runs what is missing, the stopped task from its first question")
        sys.exit(STOPPED)
    if len(problems) == len(jobs):
        raise UserError("; ".join(dict.fromkeys(problems.values())))
    print(write_results(folder, jobs, problems, flags.dtype, flags.limit), end="")
    if problems:
        logger.error("%d of %d results are missing; the same command asks for them", len(problems), len(jobs))
        sys.exit(1)


if __name__ == "__main__":
    run_program(main)
