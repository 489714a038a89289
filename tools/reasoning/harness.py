"""One model on tasks of lm-evaluation-harness, in a process of its own: started by tools/evaluate_reasoning.py.

    python -m tools.reasoning.harness '[[{"model": "DIR", "task": "piqa", "shots": 0, ...}, "RESULT.json"], ...]'

The only file here that imports the harness. It keeps every question's score, so that models can be compared question
by question; RESULT.json is described in tools/reasoning/README.md.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from pathlib import Path

import lm_eval
import torch
import transformers
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from transformers import AutoConfig

from tools.engine.vllm import VLLM, VLLMFlags
from utils import end_with_parent, replacing, run_program

CPU_BATCH = 8  # where the harness' search for a batch size takes longer than it saves, or cannot be made
LONGEST, REQUESTS = 4096, 32  # tokens of a question, and requests at a time, of servers


def find_task(task: str, include_path: str | None) -> TaskManager:
    """An index of tasks that has this one. The user's folder is tried alone first: the harness' own takes a while.

    Raises ValueError for a task that is in neither.
    """
    if include_path:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if task in own.all_tasks:
            return own
    manager = TaskManager(include_path=include_path)
    if task not in manager.all_tasks:
        raise ValueError(f"{task}: no task of the harness; `lm-eval ls tasks` names all, --include_path adds your own")
    if task in manager.all_tags:
        raise ValueError(f"{task}: a name for several tasks without a common result; name them one by one")
    return manager


@contextmanager
def model_of(job: Mapping) -> Iterator[tuple[str, dict]]:
    """The harness' name of the kind of model, and its arguments: in this process, or behind a vLLM server.

    The server gets the same token ids, and gives the log-probabilities of a prompt's tokens.
    """
    how = {name: job[name] for name in ("dtype", "trust_remote_code")}
    if job["engine"] != VLLM:
        yield "hf", {"pretrained": job["model"], **how}
        return
    config = AutoConfig.from_pretrained(job["model"], trust_remote_code=job["trust_remote_code"]).get_text_config()
    length = min(getattr(config, "max_position_embeddings", LONGEST), LONGEST)
    with VLLMFlags(**job["vllm"]).vllm_server(Path(job["model"]), max_length=length, **how) as server:
        os.environ["OPENAI_API_KEY"] = server.key
        yield (
            "local-completions",
            {
                "model": server.model,
                "base_url": f"{server.url}/completions",
                "tokenizer": job["model"],
                "tokenizer_backend": "huggingface",
                "max_length": length,
                "num_concurrent": REQUESTS,
            },
        )


def evaluate(job: Mapping, model: LM, how: Mapping) -> dict:
    """Ask the model a task; `metrics` are shares or what else the task counts, `scores` the same for each question."""
    started = time.monotonic()
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[job["task"]],
        num_fewshot=job["shots"],
        limit=job["limit"],
        task_manager=find_task(job["task"], job["include_path"]),
        log_samples=True,
    )
    parts = sorted(found["samples"])
    shots = sorted({found["n-shot"][part] for part in parts})
    return {
        "questions": sum(found["n-samples"][part]["effective"] for part in parts),
        "shots": shots[0] if len(shots) == 1 else shots,
        "metrics": metrics_of(found["results"][job["task"]]),
        "scores": question_scores([found["samples"][part] for part in parts]),
        "task_versions": {part: found["versions"][part] for part in parts},
        "made_with": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if how["device"] == "cuda" else how["device"],
            "batch_size": how["batch_size"],
            "seconds": time.monotonic() - started,
        },
    }


def metrics_of(results: Mapping) -> dict[str, dict]:
    """Value and standard error (None where the harness has none) by "metric,filter"."""
    metrics = {}
    for key, value in results.items():
        name, comma, chosen = key.partition(",")
        if comma and isinstance(value, Number) and not name.endswith("_stderr"):
            error = results.get(f"{name}_stderr,{chosen}")
            metrics[key] = {"value": float(value), "stderr": float(error) if isinstance(error, Number) else None}
    return metrics


def question_scores(parts: Sequence[Sequence[Mapping]]) -> dict[str, list[float]]:
    """Every question's score by "metric,filter", part after part and in the order of the data."""
    scores: dict[str, list[float]] = {}
    for samples in parts:
        for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
            for name in sample["metrics"]:
                # Numbers and numpy's truth values; what is counted over the whole task, such as F1, has tuples here.
                if not isinstance(sample[name], (tuple, list, str)):
                    scores.setdefault(f"{name},{sample['filter']}", []).append(float(sample[name]))
    return scores


def main() -> None:
    end_with_parent()
    jobs = json.loads(sys.argv[1])
    first, _ = jobs[0]
    find_task(first["task"], first["include_path"])  # before a model is loaded
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch_size = first["batch_size"] or ("auto" if device == "cuda" and first["engine"] != VLLM else CPU_BATCH)
    how = {"batch_size": batch_size, "device": device}
    with model_of(first) as (kind, arguments):
        model = get_model(kind).create_from_arg_obj(arguments, how)
        for job, path in jobs:
            result = {"settings": job["settings"], **evaluate(job, model, how)}
            with replacing(path) as file:
                json.dump(result, file)


if __name__ == "__main__":
    run_program(main)
