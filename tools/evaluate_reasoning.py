"""Checkpoints on reasoning benchmarks, through lm-evaluation-harness, as a table beside the published one.

    python -m tools.evaluate_reasoning --models base=MODEL imitation=DIR epoch1=DIR epoch2=DIR --output_dir DIR

Each model is asked each benchmark by one command of the harness, whose result is kept as DIR/MODEL/TASK.json. The same
command runs those that are missing. tools/reasoning/README.md describes the files.
"""

import argparse
import logging
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tools.flags import NamedPath, flag, named_path, parse_flags  # isort: skip  (first: it imports utils, see train.py)
import torch

from tools.reasoning.jobs import Job, folder_digest, result_path, run_jobs, task_folder
from tools.reasoning.table import BENCHMARKS, Benchmark, write_results
from utils import (
    UserError,
    lock,
    model_fingerprint,
    model_folder,
    run_program,
    set_up_logging,
    too_small,
)

LOCK = ".evaluate_reasoning.lock"
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
                own = folder_digest(task_folder(benchmark.task, self.include_path))
                asked = {"task": benchmark.task, "shots": benchmark.shots, "limit": self.limit, "dtype": self.dtype}
                settings = asked | {"model": of_model, "backend": self.backend, "own_tasks": own}
                path = result_path(Path(self.output_dir), name, benchmark.task)
                jobs.append(Job(name, benchmark, settings, path))
        return jobs

    def command(self) -> list[str]:
        """The harness's command with the words that are the same for all models and tasks."""
        program = shlex.split(self.lm_eval) if self.lm_eval else [sys.executable, "-m", "lm_eval"]
        words = [*program, "run", "--model", self.backend]
        words += ["--batch_size", self.batch_size or ("auto" if torch.cuda.is_available() else CPU_BATCH)]
        words += [] if self.limit is None else ["--limit", str(self.limit)]
        return words + (["--trust_remote_code"] if self.trust_remote_code else [])


def main() -> None:
    flags = parse_flags(Flags, description="Checkpoints on reasoning benchmarks, through lm-evaluation-harness.")
    set_up_logging()
    flags.check()
    jobs, folder = flags.jobs(), Path(flags.output_dir)
    lock(folder / LOCK)
    missing = [job for job in jobs if not job.is_finished()]
    if missing:
        logger.info("%d of %d results are there", len(jobs) - len(missing), len(jobs))
        run_jobs(missing, flags.command(), flags.include_path)
    print(write_results(folder, jobs, flags.dtype, flags.limit), end="")


if __name__ == "__main__":
    run_program(main)
