"""Reasoning benchmarks: the real harness on data of our own, a stand-in for failures, statistics worked by hand."""

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
from helpers import as_a_process, call, flags_of

from tools import evaluate_reasoning
from tools.reasoning import harness
from tools.reasoning.harness import BENCHMARKS, result_path
from tools.reasoning.table import MARK, MEAN, PUBLISHED, Score, difference, geometric_mean, read_score
from utils import UserError, write_json

ODD_NAME = "lr=1e-5,kl=0.2"  # of a model's folder
# Stands in for the command of the harness: `right` questions of 100 are answered, by the name of the model's folder.
STAND_IN = """import json, os, sys
from pathlib import Path

words = sys.argv[2:]
value = lambda name: words[words.index(name) + 1]
task, out = value("--tasks"), Path(value("--output_path"))
model = Path(json.loads(value("--model_args"))["pretrained"]).name
answers = json.loads(Path(__file__).with_name("answers.json").read_text())
with open(Path(__file__).with_name("asked.txt"), "a") as file:
    file.write(f"{model} {task} {os.environ.get('RANK')} {' '.join(words)}\\n")
answers = answers.get(model, {}) | answers.get(task, {})
if "status" in answers:
    sys.exit(print("no data set") or answers["status"])
right, metric = answers.get("right", 50), answers.get("metric", "acc")
values = {f"{metric},none": right / 100, f"{metric}_stderr,none": 0.05}
(out / "results_2026.json").write_text(json.dumps({"results": {task: values}, "lm_eval_version": "0.4.13"}))
lines = [{"doc_id": n, "filter": "none", "metrics": [metric], metric: float(n < right)} for n in range(100)]
(out / f"samples_{task}_2026.jsonl").write_text(json.dumps(lines))
"""


@pytest.fixture
def real_harness(monkeypatch):
    """Run the harness's command in this process, with the index of its 14,000 task files, which takes 7 s, made once.

    Keeps the samples that it writes, by model and part of a task.
    """
    index = pytest.importorskip("lm_eval.tasks._index", reason="needs lm-eval").TaskIndex
    from lm_eval.__main__ import cli_evaluate

    of_harness, build, kept = index.build([Path(sys.modules["lm_eval"].__file__).parent / "tasks"]), index.build, {}
    monkeypatch.setattr(index, "build", staticmethod(lambda paths: of_harness | build(paths[1:])))

    def run(words, stdout, **options):
        with as_a_process(), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
            sys.argv = ["lm_eval", *words[words.index("run") :]]
            cli_evaluate()
        model = json.loads(words[words.index("--model_args") + 1])["pretrained"]
        for path in Path(words[words.index("--output_path") + 1]).rglob("samples_*.jsonl"):
            part = re.fullmatch(r"samples_(.+?)_\d{4}-.*", path.name)[1]
            kept[model, part] = [json.loads(line) for line in path.read_text().splitlines()]
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(harness, "subprocess", SimpleNamespace(run=run))
    return kept


def test_the_eight_benchmarks_are_scored_as_without_the_harness(real_harness, tmp_path, monkeypatch):
    """Data as local folders; MMLU and BBH cut to two parts. One model's folder has a name that needs JSON.

    The right answers stand at different places, and models with a byte-level tokenizer begin theirs with a blank.
    """
    yaml = pytest.importorskip("yaml")
    right = bigrams.write_data(tmp_path / "data")
    models = {"yes": bigrams.write_model(tmp_path / ODD_NAME, "yes"), "no": bigrams.write_model(tmp_path / "no", "no")}
    shutil.copytree(harness.TASK_FILES, tmp_path / "ours")
    bbh = yaml.safe_load((tmp_path / "ours/bbh_fewshot.yaml").read_text())
    write_json(tmp_path / "ours/bbh_fewshot.yaml", bbh | {"task": [part for part in bbh["task"] if part in right]})
    mmlu = {"group": "mmlu", "task": [part for part in right if "mmlu" in part]}
    mmlu |= {"aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
    write_json(tmp_path / "ours/mmlu.yaml", mmlu)
    monkeypatch.setattr(harness, "TASK_FILES", tmp_path / "ours")
    monkeypatch.chdir(tmp_path / "data")
    flags = {"models": [f"{name}={folder}" for name, folder in models.items()], "dtype": "float32"}
    call(evaluate_reasoning.main, *flags_of(flags | {"output_dir": tmp_path / "out"}))
    values = {}
    for name, folder in models.items():
        for benchmark in BENCHMARKS:
            expected = {}
            for part in (part for part in right if part.startswith(benchmark.task)):
                for sample in real_harness[str(folder), part]:
                    requests = [list(request.values()) for request in sample["arguments"].values()]
                    question = {"prompts": list(dict.fromkeys(prompt for prompt, *_ in requests))}
                    question["choices"] = [choice for _, choice, *_ in requests if isinstance(choice, str)]
                    answered = bigrams.is_right(folder, question, right[part][sample["doc_id"]])
                    expected[f"{part}/{sample['doc_id']}"] = 100.0 * answered
            result = json.loads(result_path(tmp_path / "out", name, benchmark.task).read_text())
            score = read_score(result, benchmark.metric)
            assert score.by_question == expected
            values[name, benchmark.name] = pytest.approx(float(np.mean(list(expected.values()))))
    for name in ("BBH", "MuTual", "ARC-e", "ARC-c", "LogiQA2", "PIQA"):  # two of three answers are `yes`, one is `no`
        assert [values[model, name].expected for model in models] == pytest.approx([200 / 3, 100 / 3]), name
    rows = json.loads((tmp_path / "out/results.json").read_text())["results"]
    assert {(row["model"], row["benchmark"]): row["value"] for row in rows if row["benchmark"] != MEAN} == values
    assert not list((tmp_path / "out").rglob("samples_*"))  # gigabytes of prompts


def test_our_bbh_has_the_parts_of_the_harness():
    yaml = pytest.importorskip("yaml")
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")
    theirs = Path(lm_eval.__file__).parent / "tasks/bbh/fewshot/_bbh_fewshot.yaml"
    groups = [yaml.safe_load(path.read_text()) for path in (theirs, harness.TASK_FILES / "bbh_fewshot.yaml")]
    assert groups[0]["task"] == groups[1]["task"]


@pytest.fixture
def stand_in(tmp_path, tiny_model):
    """Evaluate models with a stand-in for the harness; `answers` says how it answers, by model or task."""
    (tmp_path / "harness.py").write_text(STAND_IN)

    def evaluate(answers=None, models=("base", "epoch1"), status=0, **changes):
        (tmp_path / "answers.json").write_text(json.dumps(answers or {}))
        for model in models:
            shutil.copytree(tiny_model, tmp_path / model, dirs_exist_ok=True)
        flags = {"models": [f"{name}={tmp_path / name}" for name in models], "output_dir": tmp_path / "out"}
        flags |= {"tasks": ["PIQA", "ARC-e"], "lm_eval": f"{sys.executable} {tmp_path / 'harness.py'}"} | changes
        return call(evaluate_reasoning.main, *flags_of(flags), status=status)

    return evaluate


@pytest.fixture
def asked(tmp_path):
    """The words of each call of the stand-in."""
    return lambda: [line.split() for line in (tmp_path / "asked.txt").read_text().splitlines()]


def test_finished_results_are_not_asked_again_and_new_ones_join(stand_in, asked, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)  # of the platform: not for this program or the harness
    first = stand_in()
    calls = [[model, task, "None"] for model in ("base", "epoch1") for task in ("piqa", "arc_easy")]
    assert [words[:3] for words in asked()] == calls
    assert stand_in().output == first.output and len(asked()) == 4
    stand_in(models=("base", "epoch1", "epoch2"))
    assert len(asked()) == 6


def test_results_of_other_settings_are_refused_by_the_file_to_delete(stand_in, asked, tmp_path):
    stand_in()
    before = (tmp_path / "out/results.json").read_bytes()
    refused = stand_in(dtype="float32", status=2).errors
    assert "dtype: bfloat16 then, float32 now" in refused and "piqa.json" in refused and len(asked()) == 4
    assert (tmp_path / "out/results.json").read_bytes() == before


def test_a_failed_task_is_a_dash_and_does_not_stop_the_others(stand_in, asked):
    ended = stand_in({"piqa": {"status": 3}}, status=1)
    assert "base on PIQA: the harness ended with status 3: no data set" in ended.errors
    assert "2 results are missing" in ended.errors and "out/base/piqa.log" in ended.errors
    assert "| base | - | 50.00 ± 5.00 | - |" in ended.output
    stand_in()
    assert len(asked()) == 6  # the two that failed were asked again


def test_a_difference_that_may_be_chance_is_marked(stand_in):
    # Of 100 paired questions 3 or 4 differ: 3 ± 1.71 is 1.75 standard errors, 4 ± 1.97 is 2.03.
    answers = {"base": {"right": 50}, "epoch1": {"right": 53}, "epoch2": {"right": 54}}
    lines = stand_in(answers, models=("base", "epoch1", "epoch2"), tasks=["PIQA"]).output.splitlines()
    marked = [line.split("|")[1].strip() for line in lines if line.startswith("|") and MARK in line]
    assert marked == ["epoch1"]


def test_the_eight_benchmarks_have_their_shots_and_the_published_rows_stand_below(stand_in, asked):
    printed = stand_in({"bbh_fewshot": {"metric": "exact_match"}}, models=("base",), tasks=None).output
    assert [words[words.index("--num_fewshot") + 1] for words in asked()] == list("53000000")
    assert [words[1] for words in asked()] == [each.task for each in BENCHMARKS]
    assert "MMLU 5-shot acc, BBH 3-shot exact_match" in printed
    assert "| LLaMA-2-7B SPAG-3, published | - | 34.94 | 55.30 |" in printed and "| 52.58 |" in printed


def score(value, stderr, scores=()):
    return Score(value, stderr, {str(number): float(each) for number, each in enumerate(scores)})


def test_the_geometric_mean_and_its_error_are_those_worked_by_hand():
    mean, stderr, _ = geometric_mean([score(40.0, 1.0), score(90.0, 3.0)])
    assert mean == pytest.approx(60.0)
    assert stderr == pytest.approx(60 / 2 * math.sqrt((1 / 40) ** 2 + (3 / 90) ** 2))
    for unknown, value in ((score(40.0, math.nan), 60.0), (score(0.0, 0.0), 0.0)):
        mean, stderr, _ = geometric_mean([unknown, score(90.0, 3.0)])
        assert mean == pytest.approx(value) and math.isnan(stderr)


def test_the_published_means_are_the_geometric_means_of_their_rows():
    row = PUBLISHED["LLaMA-2-7B base"]
    mean, *_ = geometric_mean([score(float(row[name]), math.nan) for name in row if name != MEAN])
    assert mean == pytest.approx(float(row[MEAN]), abs=0.01)


def test_models_asked_the_same_questions_are_compared_question_by_question():
    ours, theirs = score(75.0, 25.0, [100, 100, 0, 100]), score(50.0, 28.9, [100, 0, 0, 100])
    assert difference([ours], [theirs]) == (25.0, pytest.approx(np.std([0, 100, 0, 0], ddof=1) / 2))  # 25
    assert difference([ours], [ours]) == (0, 0)
    assert difference([score(60.0, 3.0)], [score(50.0, 4.0)]) == (10.0, 5.0)  # without the questions: independent


def test_the_error_of_a_difference_of_means_is_that_of_small_changes():
    rng = np.random.default_rng(0)
    answers = 100.0 * (rng.random((2, 3, 400)) < np.array([0.5, 0.7, 0.3])[None, :, None])
    answers[1, :, :300] = answers[0, :, :300]  # mostly the same, as of two checkpoints of a model
    ours, theirs = ([score(one.mean(), one.std(ddof=1) / 20, one) for one in side] for side in answers)
    draws = []
    for _ in range(2000):
        chosen = rng.integers(400, size=(3, 400))
        drawn = np.take_along_axis(answers, chosen[None], axis=2).mean(axis=2)
        draws.append(np.subtract(*np.exp(np.log(drawn).mean(axis=1))))
    assert difference(ours, theirs)[1] == pytest.approx(np.std(draws), rel=0.1)


def test_scores_whose_mean_is_not_the_value_are_not_compared():
    result = {"metrics": {"acc,none": {"value": 0.5, "stderr": 0.1}}}
    assert not read_score(result | {"scores": {"acc,none": {"t/0": 1.0, "t/1": 0.0, "t/2": 0.0}}}, "acc").by_question
    assert read_score(result | {"scores": {"acc,none": {"t/0": 1.0, "t/1": 0.0, "t/2": 0.5}}}, "acc").by_question
    two = {name: {"value": 0.5, "stderr": None} for name in ("acc,strict", "acc,flexible")}
    with pytest.raises(UserError, match="2 metrics are called 'acc'"):
        read_score(result | {"metrics": two, "scores": {}}, "acc")
