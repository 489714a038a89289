"""Runs of the harness that the reasoning table needs: what each depends on, which are finished, running the rest."""

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from tools.engine import model as models
from tools.reasoning.table import BENCHMARKS, Benchmark
from utils import NamedPath, RunSettings, differences, file_digest, model_fingerprint, plain_environment

ROOT = Path(__file__).resolve().parents[2]
logger = logging.getLogger(__name__)


# --- jobs ----------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """One model on one benchmark."""

    model: NamedPath  # its path: folder or hub name
    benchmark: Benchmark
    request: dict  # what tools/reasoning/harness.py is told
    path: Path  # of the result

    @property
    def name(self) -> str:
        return f"{self.model.name} on {self.benchmark.name}"

    @property
    def settings(self) -> dict:
        """What the result depends on."""
        return self.request["settings"]

    def finished(self) -> dict:
        """The result."""
        return json.loads(self.path.read_text(encoding="utf-8"))

    def is_to_run(self, *, overwrite: bool) -> bool:
        """Whether the result is not there. ValueError for one of other settings, unless it may be run again."""
        if not self.path.is_file():
            return True
        remedy = "use another --output_dir, or --overwrite True to run it again"
        made_with = RunSettings(self.path, results=lambda: self.path, remedy=remedy)
        made_with.check(self.settings, overwrite=overwrite)
        return bool(differences(made_with.read(), self.settings))


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """All models on all benchmarks; the models of a benchmark stand side by side."""
    folders = {model.name: models.model_folder(model.path).resolve() for model in args.models}
    fingerprints = {
        name: {"path": str(folder), "sha256": model_fingerprint(folder)} for name, folder in folders.items()
    }
    own_tasks = tasks_digest(args.include_path)
    jobs = []
    for benchmark in args.tasks:
        own = benchmark.task not in {known.task for known in BENCHMARKS}  # those are never the user's
        for model in args.models:
            settings = {
                "harness": args.harness_version,
                "task": benchmark.task,
                "shots": benchmark.shots,
                "limit": args.limit,
                "dtype": args.dtype,
                "model": fingerprints[model.name],
                "own_tasks": own_tasks if own else None,
            }
            request = {
                "model": str(folders[model.name]),
                "batch_size": args.batch_size,
                "trust_remote_code": args.trust_remote_code,
                "include_path": args.include_path if own else None,
                **{key: settings[key] for key in ("task", "shots", "limit", "dtype")},
                "settings": settings,
            }
            jobs.append(Job(model, benchmark, request, result_path(args.output_dir, model.name, benchmark)))
    return jobs


def result_path(output_dir: str, model: str, benchmark: Benchmark) -> Path:
    """Where a finished model and task is kept; the harness' messages are beside it."""
    return Path(output_dir) / model / f"{benchmark.task.replace('/', '_')}.json"


def tasks_digest(include_path: str | None) -> str | None:
    """SHA-256 over all files of the folder of own tasks; None without one."""
    if include_path is None:
        return None
    found = sorted(path for path in Path(include_path).rglob("*") if path.is_file())
    files = [path for path in found if "__pycache__" not in path.parts]
    if not files:
        raise ValueError(f"--include_path {include_path}: no files there; expected a folder of task files (YAML)")
    return file_digest(files)


def unfinished(jobs: Sequence[Job], *, overwrite: bool) -> list[Job]:
    """The jobs to run. Raises ValueError for a result made under other settings, unless it may be run again."""
    return [job for job in jobs if job.is_to_run(overwrite=overwrite)]


# --- running -------------------------------------------------------------------------------------------------------


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def run_job(job: Job, device: str | None) -> str | None:
    """Run the harness on one GPU (None: where it likes); returns what went wrong, None if nothing did."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = (
        plain_environment() | {"PYTHONPATH": path} | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    )
    job.path.parent.mkdir(parents=True, exist_ok=True)
    log = job.path.with_suffix(".log")
    command = [sys.executable, "-m", "tools.reasoning.harness", json.dumps(job.request), str(job.path.resolve())]
    job.path.unlink(missing_ok=True)  # one made under other settings
    with open(log, "wb") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
    if status == 0:
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "no message")
    return f"{job.name} ended with status {status}: {last.strip()} ({log})"


def run_jobs(jobs: Sequence[Job], devices: Sequence[str | None], run: Callable[[Job, str | None], str | None]) -> None:
    """Run all jobs, one at a time on each device. Raises ValueError at the end if some failed; the others are kept."""
    free: SimpleQueue[str | None] = SimpleQueue()
    for device in devices:
        free.put(device)

    def take_turn(job: Job) -> str | None:
        device = free.get()
        try:
            logger.info("%s starts", job.name)
            problem = run(job, device)
            logger.info("%s: %s", job.name, problem or "done")
            return problem
        finally:
            free.put(device)

    pool = ThreadPoolExecutor(len(devices))
    try:
        problems = [problem for problem in pool.map(take_turn, jobs) if problem]
    finally:
        pool.shutdown(cancel_futures=True)
    if problems:
        raise ValueError("; ".join(problems) + "; the same command runs what is missing")
