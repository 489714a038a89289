"""One model on one benchmark: checks the task, runs lm-evaluation-harness once, and keeps its result."""

import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.constants import HF_HUB_CACHE

from tools.reasoning.scores import read_score
from utils import (
    LAUNCHER_VARIABLES,
    UserError,
    end_with_parent,
    file_digest,
    iter_records,
    read_json,
    stage,
    stored_record,
    write_json,
    write_records,
)

OWN_TASKS = Path(__file__).parent / "tasks"  # benchmarks that the harness cannot load or scores wrongly
KEPT = 3  # questions of each task whose answers are kept
logger = logging.getLogger(__name__)


class Benchmark(NamedTuple):
    """A column of the table."""

    name: str
    task: str  # as the harness calls it
    shots: int | None  # None: as many as the task itself says
    metric: str  # "metric" or "metric,filter" of the harness

    def __str__(self) -> str:
        return f"{self.name}:{self.shots}"


# The paper does not state its tasks, shots and metrics: these are this project's choice.
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


class Job(NamedTuple):
    """One model on one benchmark."""

    model: str
    benchmark: Benchmark
    settings: dict  # what the result depends on
    path: Path  # of the result, MODEL/TASK.json, which is the record of its stage too

    @property
    def samples(self) -> Path:
        """The file of the first questions, as they were asked."""
        return self.path.with_suffix(".samples.jsonl")

    def is_finished(self) -> bool:
        """Whether there is a result. UserError if it was made with other settings or other data."""
        stored = stored_record(self.path, self.settings, [self.samples.name])
        then = stored.get("data_revisions", {})
        if moved := [name for name in then if then[name] and data_revision(name) not in (None, then[name])]:
            raise UserError(f"{self.path}: asked with other data of {', '.join(moved)}; delete this file to ask again")
        return stored["finished"]

    def run(self, command: Sequence[str]) -> None:
        """Ask the model and write its result and some of its answers. UserError if the harness fails."""
        folder = self.path.with_suffix("")
        arguments = f"pretrained={self.settings['model']['path']},dtype={self.settings['dtype']}"
        with stage(self.path, self.settings, results=[self.samples.name]) as todo:
            if todo:
                run_harness([*command, "--model_args", arguments], self.benchmark, folder)
                result, samples = read_result(folder, self.benchmark.task)
                write_records(self.samples, samples)
                todo.notes.update(result)
        shutil.rmtree(folder, ignore_errors=True)  # the harness's samples hold every prompt: gigabytes


def result_path(folder: Path, model: str, task: str) -> Path:
    """Where the result of a model on a task is kept."""
    return folder / model / f"{task.replace('/', '_')}.json"


def run_harness(command: Sequence[str], benchmark: Benchmark, folder: Path) -> None:
    """Run the harness into a fresh folder, with its messages in FOLDER.log. UserError with the last if it fails."""
    if folder.exists():
        logger.info("%s: an unfinished run; it starts from its first question", folder)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    words = [*command, "--tasks", benchmark.task, "--output_path", str(folder), "--log_samples"]
    words += [] if benchmark.shots is None else ["--num_fewshot", str(benchmark.shots)]
    with open(log := folder.with_name(f"{folder.name}.log"), "w", encoding="utf-8") as file:
        file.write(f"{shlex.join(words)}\n")
        file.flush()
        no_rank = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        how = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "env": no_rank}
        # It ends with this process; after a SIGKILL workers of `accelerate launch` stay.
        status = subprocess.run(words, preexec_fn=end_with_parent, **how).returncode
    if status:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
        shutil.rmtree(folder)
        raise UserError(f"status {status}: {last} ({log})")


def check_jobs(jobs: Sequence[Job], command: Sequence[str], folder: Path) -> dict[Path, str]:
    """Ask one question of each task, but no model: `command` names the harness's dummy. Returns reasons by job.path.

    Thus names, data and metrics of all tasks are known to be there before the first model is asked.
    """
    problems = {}
    for benchmark in dict.fromkeys(job.benchmark for job in jobs):
        logger.info("%s: checking its name, data and metric", benchmark.name)
        out = result_path(folder, "", benchmark.task).with_suffix("")
        try:
            run_harness(command, benchmark, out)
            metrics = metrics_of(read_results(out, benchmark.task)["results"][benchmark.task])
            read_score({"metrics": metrics, "scores": {}, "questions": 1, "shots": 0}, benchmark.metric)
            shutil.rmtree(out)
        except UserError as error:
            logger.error("%s: %s", benchmark.name, error)
            problems |= {job.path: str(error) for job in jobs if job.benchmark == benchmark}
    return problems


def run_jobs(jobs: Sequence[Job], command: Sequence[str]) -> dict[Path, str]:
    """Run jobs one after the other. A failed job does not stop the others. Returns reasons by job.path."""
    problems = {}
    for number, job in enumerate(jobs, start=1):
        logger.info("%s on %s starts (%d of %d)", job.model, job.benchmark.name, number, len(jobs))
        try:
            job.run(command)
        except UserError as error:
            logger.error("%s on %s: %s", job.model, job.benchmark.name, error)
            problems[job.path] = str(error)
    return problems


# Results.


def read_results(folder: Path, task: str) -> dict:
    """The harness's results file. UserError if there is none, or if it has no line for this task."""
    results = sorted(folder.rglob("results_*.json"))  # the dummy under `accelerate launch` leaves one for each process
    if not results:
        raise UserError(f"{folder}: no results_*.json; the harness writes one")
    found = read_json(results[0])
    if task not in found["results"]:
        raise UserError(f"{results[0]}: no result of {task}; it has {', '.join(found['results'])}")
    return found


def read_result(folder: Path, task: str) -> tuple[dict, list[dict]]:
    """The harness's output for one task, and its first questions as they were asked. UserError if it is incomplete.

    The output has metrics, the score of each question and versions. `scores` has {"PART/DOC_ID": score} by
    "metric,filter". A group of tasks, such as MMLU, has several parts.
    """
    found = read_results(folder, task)
    parts, kept = sorted(found["n-samples"]), []
    scores: dict[str, dict[str, float]] = {}
    for part in parts:
        docs = set()
        for sample in _samples(folder, part):
            docs.add(sample["doc_id"])
            for name in sample["metrics"]:
                if isinstance(sample[name], Number):  # metrics over the whole task, such as F1, have tuples here
                    of_metric = scores.setdefault(f"{name},{sample['filter']}", {})
                    of_metric[f"{part}/{sample['doc_id']}"] = float(sample[name])
            if sample["doc_id"] < KEPT:
                kept.append(_readable(part, sample))
        if len(docs) != (expected := found["n-samples"][part]["effective"]):
            raise UserError(f"{folder}: the samples of {part} hold {len(docs)} of {expected} questions")
    shots = sorted({found["n-shot"][part] for part in parts})
    data = sorted({name for part in parts for name in data_names(found["configs"][part])})
    return {
        "questions": sum(found["n-samples"][part]["effective"] for part in parts),
        "shots": shots[0] if len(shots) == 1 else shots,
        "metrics": metrics_of(found["results"][task]),
        "scores": scores,
        "harness": found["lm_eval_version"],
        "transformers": found["transformers_version"],
        "task_versions": {part: found["versions"][part] for part in parts},
        "data_revisions": {name: data_revision(name) for name in data},
        "seconds": float(found["total_evaluation_time_seconds"]),
    }, kept


def _samples(folder: Path, part: str) -> Iterator[dict]:
    """The samples of one part: a question has one for each filter."""
    for path in folder.rglob("samples_*.jsonl"):
        if re.fullmatch(rf"samples_{re.escape(part)}_\d{{4}}-.*", path.name):
            yield from (sample for _, sample in iter_records(path))


def _readable(part: str, sample: Mapping) -> dict:
    """A question as it was asked. `replies` are texts, or (log-probability, whether greedy) of each choice."""
    requests = [list(request.values()) for request in sample["arguments"].values()]
    return {
        "question": f"{part}/{sample['doc_id']}",
        "prompts": list(dict.fromkeys(prompt for prompt, *_ in requests)),
        "choices": [choice for _, choice, *_ in requests if isinstance(choice, str)],
        "replies": [reply for reply, *_ in sample["resps"]],
        "target": sample["target"],
        "filter": sample["filter"],
        **{name: sample[name] for name in sample["metrics"]},
    }


def metrics_of(results: Mapping) -> dict[str, dict]:
    """Value and standard error (None where the harness has none) by "metric,filter"."""
    numbers = {key: float(value) for key, value in results.items() if isinstance(value, Number)}
    return {
        key: {"value": value, "stderr": numbers.get(key.replace(",", "_stderr,"))}
        for key, value in numbers.items()
        if "," in key and "_stderr," not in key
    }


# Data and task files.


def data_names(config: Mapping) -> list[str]:
    """The data of a task: its local files, else its data set, as "NAME @ REVISION" if a revision is asked for."""
    how = config.get("dataset_kwargs") or {}
    if files := how.get("data_files"):
        splits = files.values() if isinstance(files, Mapping) else [files]
        return [str(file) for split in splits for file in ([split] if isinstance(split, str) else split)]
    name = config.get("dataset_path")
    return [f"{name} @ {how['revision']}" if how.get("revision") else str(name)]


def data_revision(name: str) -> str | None:
    """The SHA-256 of a local file or folder, or the commit of a data set in the hub's cache, or None.

    The harness takes a folder of the working directory that is named like a data set for that data set.
    """
    dataset, _, revision = name.partition(" @ ")
    if (local := Path(dataset)).exists():
        return folder_digest(local)
    cache = Path(HF_HUB_CACHE, f"datasets--{dataset.replace('/', '--')}")
    if (ref := cache / "refs" / (revision or "main")).is_file():
        return ref.read_text(encoding="utf-8").strip()
    return " ".join(sorted(path.name for path in (cache / "snapshots").glob("*"))) or None


def folder_digest(path: Path) -> str:
    """SHA-256 over a file, or over all files of a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return file_digest(file for file in files if file.is_file() and "__pycache__" not in file.parts)


def task_digest(task: str, include_path: str | None) -> str | None:
    """SHA-256 of what defines a task in place of the harness's files: the user's folder, our file, or None.

    Tasks that are no benchmarks of the table are the user's; of the benchmarks, those that his files name, or parts
    of which they name, such as mmlu_anatomy.
    """
    named = re.compile(rf"^(?:task|group|tag): *[\"']?{re.escape(task)}(?:_|\b)", re.MULTILINE)
    texts = [file.read_text(encoding="utf-8") for file in _yaml_files(include_path)]
    if texts and (task not in {benchmark.task for benchmark in BENCHMARKS} or any(map(named.search, texts))):
        return folder_digest(Path(include_path))
    own = OWN_TASKS / f"{task}.yaml"
    return folder_digest(own) if own.is_file() else None


def write_task_files(folder: Path, include_path: str | None) -> Path:
    """Make the one folder of task files that the harness takes; each file includes one of the user's or of ours.

    The user's come first: of two tasks with one name in a folder, the harness keeps the first.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, file in enumerate([*_yaml_files(include_path), *_yaml_files(OWN_TASKS)]):
        write_json(folder / f"{number:05}_{file.stem}.yaml", {"include": str(file)})  # JSON is YAML
    return folder


def _yaml_files(folder: str | Path | None) -> list[Path]:
    """The task files of a folder. UserError if it has none."""
    files = sorted(Path(folder).resolve().rglob("*.yaml")) if folder else []
    if folder and not files:
        raise UserError(f"--include_path {folder}: no YAML files of tasks there")
    return files
