"""Runs of the harness that the reasoning table needs: which are finished, running the rest."""

import json
import logging
import math
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub.constants import ENDPOINT

from tools.reasoning.scores import Score, read_score
from tools.reasoning.table import Benchmark
from utils import RunSettings, differences, file_digest, plain_environment

ROOT = Path(__file__).resolve().parents[2]
HARNESS_VERSION = "0.4.13"
HUB_TIMEOUT = 10  # seconds
BEGINS = "--- the next task begins ---"  # a line of the harness' log
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
            return read_score(json.loads(self.path.read_text(encoding="utf-8")), self.benchmark.metric)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path}: not a result ({error!r}); delete it to have it made again") from None


def tasks_digest(include_path: str | None) -> str | None:
    """SHA-256 over all files of the folder of own tasks; None without one."""
    if include_path is None:
        return None
    paths = sorted(Path(include_path).rglob("*"))
    files = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    if not files:
        raise ValueError(f"--include_path {include_path}: no files there; expected a folder of task files (YAML)")
    return file_digest(files)


def gpus(together: int) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, so many at a time."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return [",".join(names[at : at + together]) for at in range(0, len(names) - together + 1, together)]


def look_for_hub() -> None:
    """Say once that the hub cannot be reached; the harness then takes what is in the cache, or fails at once."""
    if os.environ.get("HF_HUB_OFFLINE"):
        return
    try:
        with suppress(urllib.error.HTTPError):  # then it answers
            urllib.request.urlopen(ENDPOINT, timeout=HUB_TIMEOUT).close()
    except OSError as error:
        logger.warning("%s cannot be reached (%s): only data sets that are in the cache can be used", ENDPOINT, error)
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run_portion(jobs: Sequence[Job], device: str | None) -> list[str]:
    """Run the harness for a model's tasks in one process, on one GPU (None: where it likes). What went wrong.

    A process that is killed at a task, for want of memory perhaps, is followed by one for the tasks after it.
    """
    for job in jobs:
        job.path.parent.mkdir(parents=True, exist_ok=True)
        job.path.unlink(missing_ok=True)  # one made under other settings
    log = jobs[0].path.with_suffix(".log")
    told = json.dumps([[job.request, str(job.path.resolve())] for job in jobs])
    command = [sys.executable, "-m", "tools.reasoning.harness", told]
    environment = plain_environment() | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    with open(log, "wb") as file:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, cwd=ROOT)
    if done.returncode == 0:
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
    begun = lines.count(BEGINS)
    if done.returncode > 0 or not begun:  # not killed, or before its first task: another one would get no further
        begun = len(jobs)
    said = [line.strip() for line in lines if line.strip() not in ("", BEGINS)] or ["no message"]
    names = ", ".join(job.name for job in jobs[:begun] if not job.path.is_file())
    problem = f"{names} ended with status {done.returncode}: {said[-1]} ({log})"
    return [problem, *(run_portion(jobs[begun:], device) if begun < len(jobs) else [])]


def run_jobs(jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
    """Run all jobs, a process at a time on each device. Raises ValueError at the end if some failed, naming them.

    A process runs all tasks of a model, or a part of them where there are more devices than models.
    """
    by_model = [list(own) for _, own in groupby(jobs, key=lambda job: job.model)]
    parts = math.ceil(len(devices) / len(by_model))
    waiting = [own[at::parts] for own in by_model for at in range(min(parts, len(own)))]
    dealt, problems = iter(waiting), []

    def work(device: str | None) -> None:
        for portion in dealt:
            names = f"{portion[0].model} on {', '.join(job.benchmark.name for job in portion)}"
            logger.info("%s starts", names)
            found = run_portion(portion, device)
            logger.info("%s: %s", names, "; ".join(found) or "done")
            problems.extend(found)

    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            list(pool.map(work, devices))
        finally:
            waiting.clear()  # what interrupts this process lets no other portion begin
    if problems:
        raise ValueError("; ".join(problems) + "; the same command runs what is missing")
