"""Reasoning benchmarks: the real harness on data of our own, a stand-in for failures, the table."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bigrams
import numpy as np
import pytest
from conftest import ROOT
from helpers import as_a_process, call, copy_model, flags_of
from transformers import AutoTokenizer

from tools import evaluate_reasoning
from tools.common.files import read_json, write_json
from tools.common.models import load_tokenizer
from tools.evaluate_reasoning import (
    BENCHMARKS,
    MEAN,
    NoResult,
    Score,
    cell_text,
    geometric_mean,
    read_score,
    score_rows,
)

ODD_NAME = "lr=1e-5,kl=0.2"  # of a model's folder


@pytest.fixture
def real_harness(monkeypatch):
    """Run the harness in this process, with its task files of our benchmarks. Keeps samples by model and part."""
    index = pytest.importorskip("lm_eval.tasks._index", reason="needs lm-eval").TaskIndex
    from lm_eval.__main__ import cli_evaluate

    folder, build, kept = Path(sys.modules["lm_eval"].__file__).parent / "tasks", index.build, {}
    of_harness = build([folder / name for name in ("arc", "bbh", "mmlu", "mutual", "piqa", "winogrande")])
    monkeypatch.setattr(index, "build", staticmethod(lambda paths: of_harness | build(paths[1:])))
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)  # asks pip for all packages

    def run(words, stdout, **options):
        with as_a_process(), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
            sys.argv = ["lm_eval", *words[words.index("run") :], "--log_samples"]
            cli_evaluate()
        model = json.loads(words[words.index("--model_args") + 1])["pretrained"]
        for path in Path(words[words.index("--output_path") + 1]).rglob("samples_*.jsonl"):
            part = re.fullmatch(r"samples_(.+?)_\d{4}-.*", path.name)[1]
            kept[model, part] = [json.loads(line) for line in path.read_text().splitlines()]
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(evaluate_reasoning, "subprocess", SimpleNamespace(run=run))
    return kept


def test_the_eight_benchmarks_are_scored_as_without_the_harness(real_harness, tmp_path, monkeypatch):
    """Data as local folders; MMLU and BBH cut to two parts. One model's folder has a name that needs JSON, the other a
    tokenizer that transformers reads otherwise.

    The right answers stand at different places, and models with a byte-level tokenizer begin theirs with a blank.
    """
    yaml = pytest.importorskip("yaml")
    right = bigrams.write_data(tmp_path / "data")
    models = {"yes": bigrams.write_model(tmp_path / ODD_NAME, "yes"), "no": bigrams.write_model(tmp_path / "no", "no")}
    name_another_class(models["no"])
    shutil.copytree(evaluate_reasoning.TASK_FILES, tmp_path / "ours")
    bbh = yaml.safe_load((tmp_path / "ours/bbh_fewshot.yaml").read_text())
    write_json(tmp_path / "ours/bbh_fewshot.yaml", bbh | {"task": [part for part in bbh["task"] if part in right]})
    mmlu = {"group": "mmlu", "task": [part for part in right if "mmlu" in part]}
    mmlu |= {"aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
    write_json(tmp_path / "ours/mmlu.yaml", mmlu)
    monkeypatch.setattr(evaluate_reasoning, "TASK_FILES", tmp_path / "ours")
    monkeypatch.chdir(tmp_path / "data")
    flags = {"models": [f"{name}={folder}" for name, folder in models.items()], "dtype": "float32"}
    call(evaluate_reasoning.main, *flags_of(flags | {"output_dir": tmp_path / "out"}))
    values = {}
    for name, folder in models.items():
        for benchmark in BENCHMARKS:
            expected = []
            for part in (part for part in right if part.startswith(benchmark.task)):
                for sample in real_harness[str(folder), part]:
                    requests = [list(request.values()) for request in sample["arguments"].values()]
                    question = {"prompts": list(dict.fromkeys(prompt for prompt, *_ in requests))}
                    question["choices"] = [choice for _, choice, *_ in requests if isinstance(choice, str)]
                    answered = bigrams.is_right(folder, question, right[part][sample["doc_id"]])
                    assert sample[benchmark.metric] == answered
                    expected.append(100.0 * answered)
            values[name, benchmark.name] = pytest.approx(float(np.mean(expected)))
    for name in ("BBH", "MuTual", "ARC-e", "ARC-c", "LogiQA2", "PIQA"):  # two of three answers are `yes`, one is `no`
        assert [values[model, name].expected for model in models] == pytest.approx([200 / 3, 100 / 3]), name
    rows = json.loads((tmp_path / "out/results.json").read_text())["results"]
    assert {(row["model"], row["benchmark"]): row["value"] for row in rows if row["benchmark"] != MEAN} == values
    assert not list((tmp_path / "out").rglob("samples_*"))  # gigabytes of prompts


def test_the_harness_asks_in_the_chat_template_of_a_model(real_harness, tmp_path, monkeypatch):
    bigrams.write_data(tmp_path / "data")
    model = bigrams.write_model(tmp_path / "model", "yes")
    shutil.copy(ROOT / "tests/chat_templates/chatml.jinja", model / "chat_template.jinja")
    monkeypatch.chdir(tmp_path / "data")
    flags = {"models": f"m={model}", "tasks": "PIQA", "dtype": "float32", "chat_template": True}
    call(evaluate_reasoning.main, *flags_of(flags | {"output_dir": tmp_path / "out"}))
    for sample in real_harness[str(model), "piqa"]:
        for request in sample["arguments"].values():
            prompt, answer = request.values()
            assert prompt.endswith("<|im_start|>assistant\n") and "im_" not in answer


def test_the_harness_gets_the_tokens_of_play_and_training(tmp_path, monkeypatch):
    """transformers would read this byte-level tokenizer by the class named in tokenizer_config.json."""
    model, asked = bigrams.write_model(tmp_path / "model", "yes"), []
    name_another_class(model)

    def run(words, **_):
        arguments = json.loads(words[words.index("--model_args") + 1])
        for folder in (arguments["pretrained"], arguments["tokenizer"]):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            asked.append((tokenizer(": yes it is").input_ids, tokenizer.chat_template))
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(evaluate_reasoning, "subprocess", SimpleNamespace(run=run))
    shutil.copy(ROOT / "tests/chat_templates/chatml.jinja", model / "chat_template.jinja")
    flags = {"models": f"m={model}", "tasks": "PIQA", "lm_eval": "x", "output_dir": tmp_path / "out"}
    call(evaluate_reasoning.main, *flags_of(flags), status=1)
    ours = load_tokenizer(str(model))
    (by_class, _), of_harness = asked
    assert of_harness == (ours(": yes it is").input_ids, ours.chat_template) and of_harness[1] is not None
    assert by_class != of_harness[0]


def name_another_class(model: Path) -> None:
    path = model / "tokenizer_config.json"
    write_json(path, read_json(path) | {"tokenizer_class": "GemmaTokenizer"})


@pytest.fixture
def evaluate(tmp_path, tiny_model, monkeypatch):
    """Evaluate with a stand-in for the harness, and return its calls too.

    `right` has the number of right answers of 100, by the name of a model or task; None is a task that fails.
    """

    def start(right=None, models=("base", "epoch1"), status=0, groups=(), gone=(), left=None, **changes):
        calls, right = [], right or {}

        def run(words, env, **_):
            assert "RANK" not in env
            value = dict(zip(words, words[1:], strict=False))
            task, out = value["--tasks"], Path(value["--output_path"])
            arguments = json.loads(value["--model_args"])
            assert arguments["max_length"] == 4096  # else `auto` looks for room for the longest context
            model = Path(arguments["pretrained"]).name
            calls.append((model, task, value.get("--num_fewshot")))
            number = right.get(task, right.get(model, 50))
            if number is None:
                return subprocess.CompletedProcess(words, 3)
            values = {"acc,none": number / 100, "acc_stderr,none": 0.05}
            part = f"part_of_{task}" if task in groups else task
            results = {"results": {part: values}, "lm_eval_version": "0.4.13"}
            (out / "results_2026.json").write_text(json.dumps(results))  # as the harness does: NaN too
            if left and task == "piqa":
                left(out)
            return subprocess.CompletedProcess(words, 0)

        monkeypatch.setattr(evaluate_reasoning, "subprocess", SimpleNamespace(run=run))
        for model in models:
            copy_model(tiny_model, tmp_path / model, max_position_embeddings=262_144)
        flags = {"models": [f"{name}={tmp_path / name}" for name in (*models, *gone)], "output_dir": tmp_path / "out"}
        flags |= {"tasks": ["PIQA", "ARC-e"], "lm_eval": "stand-in"} | changes
        return call(evaluate_reasoning.main, *flags_of(flags), status=status), calls

    return start


def test_finished_results_are_not_asked_again_new_ones_join_and_other_settings_are_refused(evaluate, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # of the platform: not for this program or the harness
    first, calls = evaluate()
    assert calls == [(model, task, "0") for model in ("base", "epoch1") for task in ("piqa", "arc_easy")]
    again, calls = evaluate()
    assert again.output == first.output and calls == []
    assert len(evaluate(models=("base", "epoch1", "epoch2"))[1]) == 2
    refused, calls = evaluate(dtype="float32", status=2)
    assert "dtype: None then, float32 now" in refused.errors and "piqa.json" in refused.errors and calls == []


def test_instruct_models_are_asked_in_their_chat_template_and_the_results_say_so(evaluate, tmp_path):
    without, _ = evaluate()
    assert "without a chat template" in without.output
    path = tmp_path / "out/base/piqa_settings.json"
    record = read_json(path)
    del record["settings"]["chat_template"]  # as versions without this flag recorded
    write_json(path, record)
    assert evaluate()[1] == []
    refused, _ = evaluate(chat_template=True, status=2)
    assert "chat_template: False then, True now" in refused.errors
    shutil.rmtree(tmp_path / "out")
    inside, calls = evaluate(chat_template=True)
    assert len(calls) == 4 and "in each model's chat template" in inside.output
    assert "--apply_chat_template" in (tmp_path / "out/base/piqa.log").read_text()
    assert json.loads((tmp_path / "out/results.json").read_text())["settings"]["chat_template"] is True


def test_a_failed_task_is_a_dash_and_does_not_stop_the_others(evaluate):
    ended, _ = evaluate({"piqa": None}, status=1)
    assert "base on PIQA: the harness failed" in ended.errors and "out/base/piqa.log" in ended.errors
    assert "| base | - | 50.00 ± 5.00 | - |" in ended.output
    assert len(evaluate()[1]) == 2  # the two that failed are asked again
    ended, calls = evaluate(models=("epoch2", "epoch3"), tasks=["PIQA:f1", "tag", "ARC-e"], groups=["tag"], status=1)
    assert "epoch3 on PIQA: --tasks NAME:METRIC: choose one metric of acc,none" in ended.errors and len(calls) == 6
    assert "epoch3 on tag: " in ended.errors and "4 results are missing" in ended.errors
    assert "| epoch2 | - | - | 50.00 ± 5.00 | - |" in ended.output


LEFT = {  # what the harness may leave of a task although it ends with status 0
    "0 files": lambda out: (out / "results_2026.json").unlink(),
    "2 files": lambda out: write_json(out / "other" / "results_2027.json", {}),
}


@pytest.mark.parametrize("complaint", LEFT)
def test_a_harness_that_leaves_no_result_does_not_stop_the_others(evaluate, complaint):
    ended, calls = evaluate(status=1, left=LEFT[complaint])
    assert f"{complaint}" in ended.errors and "out/base/piqa.log" in ended.errors and len(calls) == 4
    assert "2 results are missing" in ended.errors and "| base | - | 50.00 ± 5.00 | - |" in ended.output
    assert len(evaluate()[1]) == 2  # the two are asked again


def test_a_score_that_is_no_number_is_missing_and_null_in_json(evaluate, tmp_path):
    ended, _ = evaluate({"piqa": math.nan}, status=1)
    assert "base on PIQA: the harness's value of acc,none is not a number" in ended.errors
    assert "| base | - | 50.00 ± 5.00 | - |" in ended.output
    stored = (tmp_path / "out/base/piqa.json").read_text()
    assert "NaN" not in stored and json.loads(stored)["metrics"]["acc,none"]["value"] is None
    assert "NaN" not in (tmp_path / "out/results.json").read_text()


@pytest.mark.parametrize("tasks", [["arc_easy,piqa"], ["mmlu_*"], ["arc_easy", "ARC-e:25"], ["PIQA", "PIQA:acc_norm"]])
def test_lists_patterns_and_two_columns_of_a_task_are_refused_before_anything_is_asked(tasks, evaluate):
    ended, calls = evaluate(tasks=tasks, status=2)
    assert "tasks: " in ended.errors and calls == []


def test_a_model_that_is_nowhere_is_told_before_any_question(evaluate):
    ended, calls = evaluate(gone=["epoch2"], status=2)
    assert "epoch2" in ended.errors and calls == []


def test_a_context_that_has_another_name_is_left_to_the_harness(tiny_model, tmp_path):
    settings = {"dtype": "float32", "batch_size": "8", "task": "piqa", "shots": None, "limit": None}
    settings["chat_template"] = False
    for config, length in (({"n_positions": 1024}, None), ({"max_position_embeddings": 512}, 512)):
        write_json(tmp_path / "config.json", config)
        flags = evaluate_reasoning.harness_flags(settings | {"model": {"path": str(tmp_path)}}, "out")
        assert json.loads(flags[flags.index("--model_args") + 1]).get("max_length") == length


def test_benchmarks_have_their_shots_and_metric(evaluate):
    tasks = [benchmark.name for benchmark in BENCHMARKS if benchmark.name != "BBH"]
    ended, calls = evaluate(models=("base",), tasks=[*tasks, "BBH:acc"])
    assert [shots for _, _, shots in calls] == list("50000003")
    assert "MMLU 5-shot acc, MuTual 0-shot acc" in ended.output and "BBH 3-shot acc" in ended.output


def test_the_geometric_mean_is_that_of_the_paper():
    assert geometric_mean([40.0, 90.0]) == pytest.approx(60.0)
    assert geometric_mean([75.0]) == 75.0 and geometric_mean([0.0, 90.0]) == 0
    published = (45.80, 32.48, 50.90, 76.30, 43.26, 25.32, 69.14, 78.07)
    assert geometric_mean(published) == pytest.approx(49.17, abs=0.01)


def test_a_table_has_the_harnesses_errors_and_a_mean_where_no_benchmark_is_missing():
    scores = {"base": {"A": Score(40.0, 1.0), "B": Score(90.0, None)}, "epoch1": {"B": Score(80.0, 2.0)}}
    rows = score_rows(scores, ["A", "B"])
    assert rows[1] == {"model": "base", "benchmark": "B", "value": 90.0, "stderr": None}
    by_cell = {(row["model"], row["benchmark"]): cell_text(row) for row in rows}
    assert by_cell.pop(("base", MEAN)) == "60.00"
    assert by_cell == {("base", "A"): "40.00 ± 1.00", ("base", "B"): "90.00", ("epoch1", "B"): "80.00 ± 2.00"}


def test_a_metric_of_two_filters_must_be_chosen():
    metrics = {name: {"value": 0.5, "stderr": None} for name in ("acc,strict", "acc,flexible")}
    with pytest.raises(NoResult, match="choose one metric of acc,strict acc,flexible"):
        read_score({"metrics": metrics}, "acc")
    assert read_score({"metrics": metrics}, "acc,strict") == Score(50.0, None)
