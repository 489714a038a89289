"""One model on one benchmark: runs lm-evaluation-harness once and keeps its result."""

import logging
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.constants import HF_HUB_CACHE

from tools.reasoning.table import BENCHMARKS, Benchmark
from utils import (
    RunSettings,
    UserError,
    end_with_parent,
    file_digest,
    iter_records,
    plain_environment,
    read_json,
    write_json,
)

OWN_TASKS = Path(__file__).parent / "tasks"  # benchmarks that no longer load from the harness
logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """One model on one benchmark."""

    model: str
    benchmark: Benchmark
    settings: dict  # what the result depends on
    path: Path  # of the result, MODEL/TASK.json

    def is_finished(self) -> bool:
        """Whether there is a result. UserError if it was made with other settings."""
        remedy = f"delete {self.path} to run it again, or use another --output_dir"
        result = RunSettings(self.path, results=lambda: self.path if self.path.is_file() else None, remedy=remedy)
        result.check(self.settings)
        return self.path.is_file()

    def run(self, command: Sequence[str], include_path: Path | None) -> None:
        """Run the harness in a fresh folder and write the result; if it fails, UserError with its log's last line."""
        folder, log = self.path.with_suffix(""), self.path.with_suffix(".log")
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
        folder.mkdir(parents=True)
        words = [*command, "--tasks", self.benchmark.task, "--output_path", str(folder), "--log_samples"]
        words += [] if self.benchmark.shots is None else ["--num_fewshot", str(self.benchmark.shots)]
        words += ["--include_path", str(include_path)] if include_path else []
        with open(log, "w", encoding="utf-8") as file:
            file.write(f"{shlex.join(words)}\n")
            file.flush()
            how = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "env": plain_environment()}
            status = subprocess.run(words, preexec_fn=end_with_parent, **how).returncode  # never outlives this process
        if status:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
            raise UserError(f"{self.model} on {self.benchmark.name}: status {status}: {last} ({log})")
        write_json(self.path, {"settings": self.settings, **read_result(folder, self.benchmark.task)})
        shutil.rmtree(folder)  # its samples hold every prompt: gigabytes


def result_path(folder: Path, model: str, task: str) -> Path:
    """Where the result of a model on a task is kept."""
    return folder / model / f"{task.replace('/', '_')}.json"


def read_result(folder: Path, task: str) -> dict:
    """The harness's output for one task: metrics, the score of each question, versions. UserError if it is incomplete.

    `scores` has {"PART/DOC_ID": score} by "metric,filter". A group of tasks, such as MMLU, has several parts.
    """
    results = list(folder.rglob("results_*.json"))
    if len(results) != 1:
        raise UserError(f"{folder}: {len(results)} results_*.json; the harness writes one")
    found = read_json(results[0])
    if task not in found["results"]:
        raise UserError(f"{results[0]}: no result of {task}; it has {', '.join(found['results'])}")
    parts = sorted(found["n-samples"])
    scores: dict[str, dict[str, float]] = {}
    for part in parts:
        docs = _read_samples(folder, part, scores)
        if docs != (expected := found["n-samples"][part]["effective"]):
            raise UserError(f"{folder}: the samples of {part} hold {docs} of {expected} questions")
    shots = sorted({found["n-shot"][part] for part in parts})
    data = {found["configs"][part]["dataset_path"]: found["configs"][part].get("dataset_kwargs") for part in parts}
    return {
        "questions": sum(found["n-samples"][part]["effective"] for part in parts),
        "shots": shots[0] if len(shots) == 1 else shots,
        "metrics": metrics_of(found["results"][task]),
        "scores": scores,
        "harness": found["lm_eval_version"],
        "transformers": found["transformers_version"],
        "task_versions": {part: found["versions"][part] for part in parts},
        "data_revisions": {path: _revision(path, how or {}) for path, how in data.items()},
        "seconds": float(found["total_evaluation_time_seconds"]),
    }


def _read_samples(folder: Path, part: str, scores: dict[str, dict[str, float]]) -> int:
    """Add the scores of one part's questions to `scores`; return the number of questions."""
    docs = set()
    for path in folder.rglob("samples_*.jsonl"):
        if not re.fullmatch(rf"samples_{re.escape(part)}_\d{{4}}-.*", path.name):
            continue
        for _, sample in iter_records(path):
            docs.add(sample["doc_id"])
            for name in sample["metrics"]:
                if isinstance(sample[name], Number):  # metrics over the whole task, such as F1, have tuples here
                    of_metric = scores.setdefault(f"{name},{sample['filter']}", {})
                    of_metric[f"{part}/{sample['doc_id']}"] = float(sample[name])
    return len(docs)


def metrics_of(results: Mapping) -> dict[str, dict]:
    """Value and standard error (None where the harness has none) by "metric,filter"."""
    numbers = {key: float(value) for key, value in results.items() if isinstance(value, Number)}
    return {
        key: {"value": value, "stderr": numbers.get(key.replace(",", "_stderr,"))}
        for key, value in numbers.items()
        if "," in key and "_stderr," not in key
    }


def _revision(dataset: str, how: Mapping) -> str | None:
    """The commit of a data set in the hub's cache, or None."""
    refs = Path(HF_HUB_CACHE, f"datasets--{dataset.replace('/', '--')}", "refs", how.get("revision", "main"))
    return refs.read_text(encoding="utf-8").strip() if refs.is_file() else None


def task_folder(task: str, include_path: str | None) -> Path | None:
    """The folder whose files define this task in place of the harness's: the user's, ours, or None.

    Tasks that are no benchmarks of the table are the user's; of the benchmarks, those that his files name.
    """
    if include_path:
        folder = Path(include_path).resolve()
        texts = [file.read_text(encoding="utf-8") for file in folder.rglob("*.yaml")]
        if not texts:
            raise UserError(f"--include_path {folder}: no YAML files of tasks there")
        named = re.compile(rf"^(?:task|group|tag): *[\"']?{re.escape(task)}\b", re.MULTILINE)
        if task not in {benchmark.task for benchmark in BENCHMARKS} or any(map(named.search, texts)):
            return folder
    return OWN_TASKS if (OWN_TASKS / f"{task}.yaml").is_file() else None


def folder_digest(folder: Path | None) -> str | None:
    """SHA-256 over all files of a folder of tasks; None without one."""
    if folder is None:
        return None
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return file_digest(files)


def run_jobs(jobs: Sequence[Job], command: Sequence[str], include_path: str | None) -> None:
    """Run jobs one after the other. A failed job does not stop the others; one UserError at the end names all."""
    problems = []
    for number, job in enumerate(jobs, start=1):
        logger.info("%s on %s starts (%d of %d)", job.model, job.benchmark.name, number, len(jobs))
        model = f"pretrained={job.settings['model']['path']},dtype={job.settings['dtype']}"
        try:
            job.run([*command, "--model_args", model], task_folder(job.benchmark.task, include_path))
        except UserError as error:
            logger.error("%s", error)
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems) + "; the same command runs what is missing")
