"""Runs of the harness that the reasoning table needs: what each depends on, which are finished, running the rest."""

import json
import logging
import math
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from huggingface_hub.constants import ENDPOINT

from tools.engine.model import model_folder
from tools.engine.vllm import VLLM, VLLMFlags
from tools.reasoning.scores import Score, read_score
from tools.reasoning.table import BENCHMARKS, Benchmark
from utils import (
    NamedPath,
    RunSettings,
    differences,
    file_digest,
    flag,
    model_fingerprint,
    named_path,
    plain_environment,
)

ROOT = Path(__file__).resolve().parents[2]
HARNESS_VERSION = "0.4.13"
HUB_TIMEOUT = 10  # seconds
HF = "hf"  # of --engine: the harness' own way with transformers
REMEDY = "use another --output_dir, or --overwrite True to run it again"
logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """One model on one benchmark."""

    model: str
    benchmark: Benchmark
    request: dict  # what tools/reasoning/harness.py is told; its `settings` are what the result depends on
    path: Path  # of the result; the harness' messages are beside it

    @property
    def name(self) -> str:
        return f"{self.model} on {self.benchmark.name}"

    def is_to_run(self, *, overwrite: bool) -> bool:
        """Whether the result is not there. ValueError for one of other settings, unless it may be run again."""
        if not self.path.is_file():
            return True
        made_with = RunSettings(self.path, results=lambda: self.path, remedy=REMEDY)
        made_with.check(self.request["settings"], overwrite=overwrite)
        return bool(differences(made_with.read(), self.request["settings"]))

    def score(self) -> Score:
        """The score of a finished one."""
        try:
            score = read_score(json.loads(self.path.read_text(encoding="utf-8")), self.benchmark.metric)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path}: not a result ({error!r}); delete it to have it made again") from None
        if self.benchmark.shots not in (None, score.shots):
            logger.warning("%s: %s shots, since the task fixes them", self.name, score.shots)
        return score


@dataclass(kw_only=True)
class HarnessFlags(VLLMFlags):
    """What every run of the harness is told."""

    models: list[NamedPath] = flag("folders or hub names", type=named_path, metavar="NAME=MODEL")
    output_dir: str = flag("folder of the results")
    limit: int | None = flag("ask only the first so many questions of each task, for a trial", default=None)
    batch_size: str | None = flag("of the harness; auto: by the free memory; unset: auto, on a CPU 8", default=None)
    dtype: str = flag("of the models", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    engine: str = flag("hf: the model in the harness' process; vllm: behind a server", default=HF, choices=(HF, VLLM))
    include_path: str | None = flag("folder of your own tasks, as YAML files of the harness", default=None)
    trust_remote_code: bool = flag("True: run the code that comes with a model", default=False)

    def jobs(self, benchmarks: Sequence[Benchmark]) -> list[Job]:
        """All models on all benchmarks."""
        folders = {model.name: model_folder(model.path).resolve() for model in self.models}
        prints = {name: {"path": str(folder), "sha256": model_fingerprint(folder)} for name, folder in folders.items()}
        own_tasks = tasks_digest(self.include_path)
        jobs = []
        for benchmark in benchmarks:
            own = benchmark.task not in {known.task for known in BENCHMARKS}  # those are never the user's
            asked = {"task": benchmark.task, "shots": benchmark.shots, "limit": self.limit, "dtype": self.dtype}
            for model, folder in folders.items():
                settings = {"harness": HARNESS_VERSION, **asked, "model": prints[model]}
                settings |= {} if self.engine == HF else {"engine": self.engine}
                request = {
                    **asked,
                    "model": str(folder),
                    "batch_size": self.batch_size,
                    "trust_remote_code": self.trust_remote_code,
                    "engine": self.engine,
                    "vllm": {field.name: getattr(self, field.name) for field in fields(VLLMFlags)},
                    "include_path": str(Path(self.include_path).resolve()) if own and self.include_path else None,
                    "settings": settings | {"own_tasks": own_tasks if own else None},
                }
                path = Path(self.output_dir) / model / f"{benchmark.task.replace('/', '_')}.json"
                jobs.append(Job(model, benchmark, request, path))
        return jobs


def tasks_digest(include_path: str | None) -> str | None:
    """SHA-256 over all files of the folder of own tasks; None without one."""
    if include_path is None:
        return None
    found = sorted(path for path in Path(include_path).rglob("*") if path.is_file())
    files = [path for path in found if "__pycache__" not in path.parts]
    if not files:
        raise ValueError(f"--include_path {include_path}: no files there; expected a folder of task files (YAML)")
    return file_digest(files)


def gpus(together: int = 1) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, so many at a time."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    if names and len(names) < together:
        raise ValueError(f"--tensor_parallel_size {together}: there are {len(names)} GPUs")
    return [",".join(names[at : at + together]) for at in range(0, len(names) - together + 1, together)]


def look_for_hub() -> None:
    """Say once that the hub cannot be reached; the harness then takes what is in the cache, or fails at once."""
    if os.environ.get("HF_HUB_OFFLINE"):
        return
    try:
        urllib.request.urlopen(ENDPOINT, timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        logger.warning("%s cannot be reached (%s): only data sets that are in the cache can be used", ENDPOINT, error)
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run_portion(jobs: Sequence[Job], device: str | None) -> list[str]:
    """Run the harness on one GPU (None: where it likes), a model's tasks in one process.

    Returns what went wrong. A task that fails ends its process; another takes on the tasks after it.
    """
    environment = plain_environment() | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    problems: list[str] = []
    while jobs:
        for job in jobs:
            job.path.parent.mkdir(parents=True, exist_ok=True)
            job.path.unlink(missing_ok=True)  # one made under other settings
        log = jobs[0].path.with_suffix(".log")
        told = json.dumps([[job.request, str(job.path.resolve())] for job in jobs])
        command = [sys.executable, "-m", "tools.reasoning.harness", told]
        with open(log, "wb") as file:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
            )
        if done.returncode == 0:
            break
        failed, *jobs = [job for job in jobs if not job.path.is_file()] or jobs[-1:]
        *_, last = log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
        problems.append(f"{failed.name} ended with status {done.returncode}: {last.strip() or 'no message'} ({log})")
    return problems


def portions(jobs: Sequence[Job], devices: int) -> list[list[Job]]:
    """What each process runs: all tasks of a model, or a part of them where there are more devices than models."""
    by_model: dict[str, list[Job]] = {}
    for job in jobs:
        by_model.setdefault(job.model, []).append(job)
    parts = math.ceil(devices / len(by_model))
    return [own[at::parts] for own in by_model.values() for at in range(min(parts, len(own)))]


def run_jobs(
    jobs: Sequence[Job], devices: Sequence[str | None], run: Callable[[Sequence[Job], str | None], list[str]]
) -> None:
    """Run all jobs, a process at a time on each device. Raises ValueError at the end if some failed, naming them."""
    free: SimpleQueue[str | None] = SimpleQueue()
    for device in devices:
        free.put(device)

    def take_turn(portion: Sequence[Job]) -> list[str]:
        device, names = free.get(), f"{portion[0].model} on {', '.join(job.benchmark.name for job in portion)}"
        try:
            logger.info("%s starts", names)
            problems = run(portion, device)
            logger.info("%s: %s", names, "; ".join(problems) or "done")
            return problems
        finally:
            free.put(device)

    pool = ThreadPoolExecutor(len(devices))
    try:
        problems = [problem for found in pool.map(take_turn, portions(jobs, len(devices))) for problem in found]
    finally:
        pool.shutdown(cancel_futures=True)
    if problems:
        raise ValueError("; ".join(problems) + "; the same command runs what is missing")
