"""One model on tasks of lm-evaluation-harness, in a process of its own: started by tools/evaluate_reasoning.py.

    python -m tools.reasoning.harness '[[{"model": "DIR", "settings": {"task": "piqa", ...}, ...}, "RESULT"], ...]'

The only file here that imports the harness. It keeps every question's score, so that models can be compared question
by question; RESULT.json is described in tools/reasoning/README.md.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
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
from tools.reasoning.jobs import BEGINS
from utils import end_with_parent, replacing, run_program

CPU_BATCH = 8  # where the harness' search for a batch size takes longer than it saves, or cannot be made
LONGEST, REQUESTS = 4096, 32  # tokens of a question, and requests at a time, of servers


index_of = cache(TaskManager)  # which reads thousands of files of the harness


def find_task(task: str, include_path: str | None) -> TaskManager:
    """An index of tasks that has this one, of the user's folder alone if that does; ValueError for an unknown one."""
    index = index_of(include_path=include_path, include_defaults=include_path is None)
    if task not in index.all_tasks:
        index = index_of(include_path=include_path, include_defaults=True)
    if task not in index.all_tasks or task in index.all_tags:  # a tag stands for tasks without a common result
        raise ValueError(f"{task}: no task of the harness; `lm-eval ls tasks` names all, --include_path adds your own")
    return index


@contextmanager
def model_of(job: Mapping) -> Iterator[tuple[str, dict]]:
    """The harness' name of the kind of model, and its arguments: in this process, or behind a vLLM server.

    The server gets the same token ids, and gives the log-probabilities of a prompt's tokens.
    """
    how = {"dtype": job["settings"]["dtype"], "trust_remote_code": job["trust_remote_code"]}
    if job["engine"] != VLLM:
        yield "hf", {"pretrained": job["model"], **how}
        return
    config = AutoConfig.from_pretrained(job["model"], trust_remote_code=job["trust_remote_code"]).get_text_config()
    length = min(getattr(config, "max_position_embeddings", LONGEST), LONGEST)
    with VLLMFlags(**job["vllm"]).vllm_server(Path(job["model"]), max_length=length, **how) as server:
        os.environ["OPENAI_API_KEY"] = server.key
        arguments = {"model": server.model, "base_url": f"{server.url}/completions", "max_length": length}
        arguments |= {"tokenizer": job["model"], "tokenizer_backend": "huggingface", "num_concurrent": REQUESTS}
        yield "local-completions", arguments


def evaluate(job: Mapping, model: LM) -> dict:
    """Ask the model a task; the result without what it was made with."""
    asked = job["settings"]
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[asked["task"]],
        num_fewshot=asked["shots"],
        limit=asked["limit"],
        task_manager=find_task(asked["task"], job["include_path"]),
    )
    parts = sorted(found["samples"])
    shots = sorted({found["n-shot"][part] for part in parts})
    return {
        "settings": asked,
        "questions": sum(found["n-samples"][part]["effective"] for part in parts),
        "shots": shots[0] if len(shots) == 1 else shots,
        "metrics": metrics_of(found["results"][asked["task"]]),
        "scores": question_scores(sample for part in parts for sample in found["samples"][part]),
        "task_versions": {part: found["versions"][part] for part in parts},
    }


def metrics_of(results: Mapping) -> dict[str, dict]:
    """Value and standard error (None where the harness has none) by "metric,filter"."""
    numbers = {key: float(value) for key, value in results.items() if isinstance(value, Number)}
    metrics = {}
    for key, value in numbers.items():
        name, comma, chosen = key.partition(",")
        if comma and not name.endswith("_stderr"):
            metrics[key] = {"value": value, "stderr": numbers.get(f"{name}_stderr,{chosen}")}
    return metrics


def question_scores(samples: Iterable[Mapping]) -> dict[str, list[float]]:
    """Every question's score by "metric,filter", in the order of the questions."""
    scores: dict[str, list[float]] = {}
    for sample in samples:
        for name in sample["metrics"]:
            # Numbers and numpy's truth values; what is counted over the whole task, such as F1, has tuples here.
            if not isinstance(sample[name], (tuple, list, str)):
                scores.setdefault(f"{name},{sample['filter']}", []).append(float(sample[name]))
    return scores


def main() -> None:
    end_with_parent()
    jobs, failed = json.loads(sys.argv[1]), []
    first, _ = jobs[0]
    for job, _ in jobs:  # before the model is loaded
        find_task(job["settings"]["task"], job["include_path"])
    cuda = torch.cuda.is_available()
    batch_size = first["batch_size"] or ("auto" if cuda and first["engine"] != VLLM else CPU_BATCH)
    made_with = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "batch_size": batch_size,
    }
    with model_of(first) as (kind, arguments):
        how = {"batch_size": batch_size, "device": "cuda" if cuda else "cpu"}
        model = get_model(kind).create_from_arg_obj(arguments, how)
        for job, path in jobs:
            started = time.monotonic()
            print(f"\n{BEGINS}", flush=True)
            try:
                result = evaluate(job, model)
            except Exception as error:  # of one task, such as a data set that is not there
                traceback.print_exc()
                failed.append(f"{job['settings']['task']}: {' '.join(str(error).split())}")
                continue
            with replacing(path) as file:
                json.dump(result | {"made_with": made_with | {"seconds": time.monotonic() - started}}, file)
    if failed:
        raise ValueError("; ".join(failed))


if __name__ == "__main__":
    run_program(main)
