"""Reasoning benchmarks: the real harness on our own tasks, a stand-in for failures, statistics."""

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
from scipy import stats

from tools import evaluate_reasoning
from tools.reasoning import jobs
from tools.reasoning.jobs import BENCHMARKS
from tools.reasoning.scores import MEAN, Score, difference, geometric_mean, read_score, stderr_over_parts
from tools.reasoning.table import MARK, PUBLISHED, PUBLISHED_NAMES
from utils import read_json_or_jsonl, write_json

QUESTIONS = {"parity_one": 14, "parity_two": 6}
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
GROUP = """group: parity
task: [parity_one, parity_two]
aggregate_metric_list:
  - {metric: acc, weight_by_size: true}
"""
# Stands in for the command of the harness: `right` questions of 100 are answered, by the name of the model's folder.
# A task whose `check` is told fails with the dummy model.
STAND_IN = """import json, sys
from pathlib import Path

words = sys.argv[2:]
value = lambda name: words[words.index(name) + 1]
task, out = value("--tasks"), Path(value("--output_path"), "model")
dummy = value("--model") == "dummy"
model = "dummy" if dummy else value("--model_args").split(",")[0].rpartition("/")[2]
told = json.loads(Path(__file__).with_name("told.json").read_text())
with open(Path(__file__).with_name("checked.txt" if dummy else "asked.txt"), "a") as file:
    file.write(f"{model} {task} {' '.join(words)}\\n")
told = {**told.get("all", {}), **told.get(model, {}), **told.get(task, {})}
if status := told.get("check" if dummy else "status"):
    sys.exit(print("no data set") or status)
right, metric = told.get("right", 50), told.get("metric", "acc")
out.mkdir(parents=True)
answers = [float(number < right) for number in range(100)]
result = {
    "results": {task: {f"{metric},none": right / 100, f"{metric}_stderr,none": 0.05}},
    "n-samples": {task: {"original": 100, "effective": 100}},
    "n-shot": {task: 0},
    "versions": {task: 1.0},
    "configs": {task: {"dataset_path": told.get("data", "someone/data")}},
    "lm_eval_version": told.get("version", "0.4.13"),
    "transformers_version": "5",
    "total_evaluation_time_seconds": "1.5",
}
if dummy or not told.get("no_results"):
    (out / "results_2026-01-01T00.json").write_text(json.dumps(result))
same = {"filter": "none", "metrics": [metric], "arguments": {}, "resps": [], "target": "0"}
lines = [same | {"doc_id": n, metric: a} for n, a in enumerate(answers)]
lines = lines[: told.get("samples", 100)]
(out / f"samples_{task}_2026-01-01T00.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


# --- the real harness ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory):
    """A folder with a group of two tasks in the harness's form, questions included."""
    folder = tmp_path_factory.mktemp("own_tasks")
    for name, number in QUESTIONS.items():
        data = folder / f"{name}.jsonl"
        questions = [{"question": f"Is {i} even?", "choices": ["yes", "no"], "gold": i % 2} for i in range(number)]
        data.write_text("".join(json.dumps(question) + "\n" for question in questions))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data))
    (folder / "parity.yaml").write_text(GROUP)
    return folder


@pytest.fixture(scope="module")
def index_of_tasks():
    """The harness's index of its own 14,000 task files, which takes it 7 s at each start."""
    return pytest.importorskip("lm_eval.tasks._index", reason="needs lm-eval").TaskIndex.build(
        [Path(sys.modules["lm_eval"].__file__).parent / "tasks"]
    )


@pytest.fixture
def real_harness(index_of_tasks, monkeypatch):
    """Run the harness's command in this process, with the index of its own tasks made once."""
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.tasks._index import TaskIndex

    build = TaskIndex.build
    monkeypatch.setattr(TaskIndex, "build", staticmethod(lambda paths: index_of_tasks | build(paths[1:])))

    def run(words, stdout, **how):
        with as_a_process(), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
            sys.argv = ["lm_eval", *words[words.index("run") :]]
            try:
                status = cli_evaluate() or 0
            except Exception as error:
                status = print(f"{type(error).__name__}: {error}", file=stdout) or 1
        return subprocess.CompletedProcess(words, status)

    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))


def test_the_real_harness_is_asked_and_its_answers_are_kept_question_by_question(own_tasks, tiny_model, tmp_path):
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    flags = {"models": f"base={tiny_model}", "tasks": "parity:2", "dtype": "float32"}
    flags |= {"include_path": own_tasks, "output_dir": tmp_path}
    printed = call(evaluate_reasoning.main, *flags_of(flags)).output
    found = json.loads((tmp_path / "base" / "parity.json").read_text())
    answers = found["scores"]["acc,none"]
    assert list(answers) == [f"{part}/{doc}" for part, number in QUESTIONS.items() for doc in range(number)]
    assert found["questions"] == 20 and found["shots"] == 2
    assert stderr_over_parts(answers) == pytest.approx(found["metrics"]["acc,none"]["stderr"])
    row, _ = json.loads((tmp_path / "results.json").read_text())["results"]
    assert row["value"] == pytest.approx(100 * np.mean(list(answers.values())))
    assert row["stderr"] == pytest.approx(100 * found["metrics"]["acc,none"]["stderr"])
    assert (row["shots"], row["metric"], row["questions"]) == (2, "acc,none", 20)
    assert f"{row['value']:.2f}" in printed and found["harness"] in printed
    assert not (tmp_path / "base" / "parity").exists()  # most samples are gone
    kept = read_json_or_jsonl(tmp_path / "base" / "parity.samples.jsonl")
    assert [each["question"] for each in kept] == [f"{part}/{doc}" for part in QUESTIONS for doc in range(3)]
    assert kept[1]["prompts"][0].endswith("Is 1 even? Answer:") and kept[1]["choices"] == [" yes", " no"]
    assert kept[1]["acc"] == answers["parity_one/1"] and len(kept[1]["replies"]) == 2


def test_the_eight_benchmarks_are_scored_as_without_the_harness(real_harness, tmp_path, monkeypatch):
    """Data as local folders; MMLU and BBH cut to two parts, one of BBH's defined by the user.

    The right answers stand at different places, and models with a byte-level tokenizer begin theirs with a blank.
    """
    yaml = pytest.importorskip("yaml")
    right = bigrams.write_data(tmp_path / "data")
    models = {name: bigrams.write_model(tmp_path / name, name) for name in ("yes", "no")}
    shutil.copytree(jobs.OWN_TASKS, tmp_path / "ours")
    ours = yaml.safe_load((tmp_path / "ours/bbh_fewshot.yaml").read_text())
    cut = ours | {"task": [part for part in ours["task"] if part in right]}
    write_json(tmp_path / "ours/bbh_fewshot.yaml", cut)
    aggregate = [{"metric": "acc", "weight_by_size": True}]
    mmlu = {"group": "mmlu", "task": [part for part in right if "mmlu" in part], "aggregate_metric_list": aggregate}
    write_json(tmp_path / "mine/mmlu.yaml", mmlu)
    navigate = {"task": "bbh_fewshot_navigate", "dataset_path": "SaylorTwift/bbh", "dataset_name": "navigate"}
    navigate |= {"test_split": "test", "doc_to_text": "My own: {{input}}\nA:", "doc_to_target": "{{target}}"}
    navigate |= {"metric_list": [{"metric": "exact_match"}], "generation_kwargs": {"until": ["\n\n"]}}
    shots = [{"input": "Is it?", "target": "yes"}] * 3
    navigate |= {"fewshot_config": {"sampler": "first_n", "samples": shots}}
    write_json(tmp_path / "mine/navigate.yaml", navigate)
    monkeypatch.setattr(jobs, "OWN_TASKS", tmp_path / "ours")
    monkeypatch.setattr(jobs, "KEPT", 100)
    monkeypatch.chdir(tmp_path / "data")
    flags = {"models": [f"{name}={folder}" for name, folder in models.items()], "dtype": "float32"}
    call(
        evaluate_reasoning.main, *flags_of(flags | {"include_path": tmp_path / "mine", "output_dir": tmp_path / "out"})
    )
    values = {}
    for name, folder in models.items():
        for benchmark in BENCHMARKS:
            path = jobs.result_path(tmp_path / "out", name, benchmark.task)
            own = {}
            for question in read_json_or_jsonl(path.with_suffix(".samples.jsonl")):
                part, _, number = question["question"].rpartition("/")
                own[question["question"]] = 100.0 * bigrams.is_right(folder, question, right[part][int(number)])
                assert part != "bbh_fewshot_navigate" or "My own:" in question["prompts"][0]
            asked = [
                f"{part}/{n}" for part in right if part.startswith(benchmark.task) for n in range(len(right[part]))
            ]
            assert sorted(own) == sorted(asked)
            assert read_score(json.loads(path.read_text()), benchmark.metric).scores == own
            values[name, benchmark.name] = pytest.approx(float(np.mean(list(own.values()))))
    for benchmark in (
        "BBH",
        "MuTual",
        "ARC-e",
        "ARC-c",
        "LogiQA2",
        "PIQA",
    ):  # of three answers two are `yes`, one `no`
        assert [values[name, benchmark].expected for name in models] == pytest.approx([200 / 3, 100 / 3]), benchmark
    rows = json.loads((tmp_path / "out/results.json").read_text())["results"]
    assert {(row["model"], row["benchmark"]): row["value"] for row in rows if row["benchmark"] != MEAN} == values


def test_our_bbh_has_the_parts_of_the_harness():
    yaml = pytest.importorskip("yaml")
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")
    theirs = Path(lm_eval.__file__).parent / "tasks/bbh/fewshot/_bbh_fewshot.yaml"
    groups = [yaml.safe_load(path.read_text()) for path in (theirs, jobs.OWN_TASKS / "bbh_fewshot.yaml")]
    assert groups[0]["task"] == groups[1]["task"]


# --- a stand-in for the harness ------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path, tiny_model):
    """Evaluate models with a stand-in for the harness; `told` says how it answers, by model, task, or "all"."""
    (tmp_path / "harness.py").write_text(STAND_IN)

    class StandIn:
        folder = tmp_path / "out"

        def __call__(self, told=None, models=("base", "epoch1"), status=0, **changes):
            (tmp_path / "told.json").write_text(json.dumps(told or {}))
            for model in models:
                if not (tmp_path / model).exists():
                    shutil.copytree(tiny_model, tmp_path / model)
            flags = {"models": [f"{name}={tmp_path / name}" for name in models], "output_dir": self.folder}
            flags |= {"tasks": ["PIQA", "ARC-e"], "lm_eval": f"{sys.executable} {tmp_path / 'harness.py'}"} | changes
            return call(evaluate_reasoning.main, *flags_of(flags), status=status)

        @property
        def asked(self):
            path = tmp_path / "asked.txt"
            return path.read_text().splitlines() if path.exists() else []

    return StandIn()


def test_finished_results_are_not_asked_again_and_new_ones_join(stand_in):
    first = stand_in()
    assert len(stand_in.asked) == 4
    assert stand_in().output == first.output and len(stand_in.asked) == 4
    stand_in(models=("base", "epoch1", "epoch2"))
    assert len(stand_in.asked) == 6


@pytest.mark.parametrize(
    "change", [{"tasks": ["PIQA:3", "ARC-e"]}, {"dtype": "float32"}, {"limit": 5}, {"batch_size": 3}]
)
def test_results_of_other_settings_are_refused_by_the_file_to_delete(stand_in, change):
    stand_in()
    refused = stand_in(**change, status=2).errors
    assert str(stand_in.folder / "base" / "piqa.json") in refused and len(stand_in.asked) == 4


@pytest.mark.parametrize(
    "fault, named",
    [({"status": 3}, "no data set"), ({"no_results": 1}, "results_*.json"), ({"samples": 7}, "7 of 100")],
)
def test_a_failed_task_is_a_dash_with_its_reason_and_does_not_stop_the_others(stand_in, fault, named):
    ended = stand_in({"piqa": fault}, status=1)
    assert "2 of 4 results are missing" in ended.errors
    assert json.loads((stand_in.folder / "base" / "piqa.json").read_text())["finished"] is False
    (line,) = [line for line in ended.output.splitlines() if line.startswith("| base")]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["-", "50.00 ± 5.00", "-"]
    missing = json.loads((stand_in.folder / "results.json").read_text())["missing"]
    assert [(each["model"], each["benchmark"]) for each in missing] == [("base", "PIQA"), ("epoch1", "PIQA")]
    for each in missing:
        assert named in each["reason"] and f"No result of {each['model']} on PIQA: {each['reason']}" in ended.output
    stand_in()
    assert len(stand_in.asked) == 6  # the two that failed were asked again


def test_names_data_and_metrics_of_all_tasks_are_checked_before_any_model_is_asked(stand_in):
    told = {"all": {"metric": "acc"}, "piqa": {"check": 1}}
    refused = stand_in(told, tasks=["ARC-e", "PIQA", "ARC-c:f1"], status=2).errors
    assert "no data set" in refused and "no metric 'f1'" in refused and not stand_in.asked
    stand_in(tasks=["ARC-e"])
    later = stand_in(told, tasks=["ARC-e", "PIQA"], status=1)
    assert len(stand_in.asked) == 2 and "No result of base on PIQA: status 1: no data set" in later.output


def test_ctrl_c_ends_with_one_line_that_says_what_starts_again(stand_in, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "run_harness", stop)
    errors = stand_in(status=130).errors
    assert errors.splitlines()[-1].endswith("the stopped task from its first question") and "Traceback" not in errors


def test_results_of_two_versions_of_the_harness_are_not_compared(stand_in):
    assert "0.4.13, 0.5.0" in stand_in({"arc_easy": {"version": "0.5.0"}}, status=2).errors


def test_a_difference_that_may_be_chance_is_marked(stand_in):
    # Of 100 paired questions 3 or 4 differ: 3 ± 1.71 is 1.75 standard errors, 4 ± 1.97 is 2.03.
    told = {"base": {"right": 50}, "epoch1": {"right": 53}, "epoch2": {"right": 54}}
    lines = stand_in(told, models=("base", "epoch1", "epoch2"), tasks=["PIQA"]).output.splitlines()
    marked = [line.split("|")[1].strip() for line in lines if line.startswith("|") and MARK in line]
    assert marked == ["epoch1"]


def test_the_column_that_makes_a_mean_zero_is_named(stand_in):
    printed = stand_in({"piqa": {"right": 0}}, models=("base",)).output
    assert f"The {MEAN} of base is 0 because its PIQA is 0." in printed
    assert "is 0 because" not in stand_in({}, models=("epoch1",), output_dir=stand_in.folder / "other").output


def test_the_eight_benchmarks_have_their_shots_and_the_published_rows_stand_below(stand_in):
    told = {"all": {"metric": "acc"}, "bbh_fewshot": {"metric": "exact_match"}}
    printed = stand_in(told, models=("base",), tasks=None).output
    shots = [re.search(r"--num_fewshot (\d)", line)[1] for line in stand_in.asked]
    assert shots == list("53000000")
    assert [line.split()[1] for line in stand_in.asked] == [each.task for each in BENCHMARKS]
    assert "| LLaMA-2-7B SPAG-3, published | - | 34.94 | 55.30 |" in printed


def test_tasks_of_a_users_folder_join_without_asking_others_again(stand_in, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "any.yaml").write_text("task: mine\n")
    stand_in({"all": {"metric": "acc"}}, models=("base",), tasks=["MuTual", "PIQA"])
    tasks = ["MuTual", "PIQA", "mine"]
    stand_in({"all": {"metric": "acc"}}, models=("base",), tasks=tasks, include_path=tmp_path / "mine")
    *_, asked = stand_in.asked
    assert len(stand_in.asked) == 3 and " mine " in asked
    folder = Path(re.search(r"--include_path (\S+)", asked)[1])
    included = [json.loads(path.read_text())["include"] for path in sorted(folder.iterdir())]
    assert included[0] == str(tmp_path / "mine/any.yaml")  # the user's come first
    assert included[1:] == [str(path) for path in sorted(jobs.OWN_TASKS.glob("*.yaml"))]


def test_a_users_part_of_a_benchmark_is_a_setting_of_that_benchmark_alone(tmp_path):
    before = {task: jobs.task_digest(task, None) for task in ("bbh_fewshot", "mutual", "piqa")}
    (tmp_path / "any.yaml").write_text("task: bbh_fewshot_navigate\n")
    after = {task: jobs.task_digest(task, tmp_path) for task in before}
    assert before["piqa"] is None and {task for task in before if before[task] != after[task]} == {"bbh_fewshot"}


@pytest.mark.parametrize("place", ["refs/main", "snapshots/abc123/data.parquet"])
def test_the_commit_of_each_data_set_is_read_from_the_cache(stand_in, tmp_path, monkeypatch, place):
    path = tmp_path / "hub" / "datasets--someone--data" / place
    path.parent.mkdir(parents=True)
    path.write_text("abc123")
    monkeypatch.setattr(jobs, "HF_HUB_CACHE", str(tmp_path / "hub"))
    stand_in()
    assert json.loads((stand_in.folder / "results.json").read_text())["settings"]["data_revisions"] == {
        "someone/data": "abc123"
    }


def test_local_data_that_were_swapped_are_noticed(stand_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "someone/data/test.parquet"
    data.parent.mkdir(parents=True)
    data.write_text("one")
    stand_in(models=("base",))
    data.write_text("two")
    refused = stand_in(status=2).errors
    assert "piqa.json: asked with other data of someone/data; delete" in refused and len(stand_in.asked) == 2
    shutil.rmtree(tmp_path / "someone")  # unknown data are not other data
    stand_in(models=("base",))


def test_the_data_of_a_task_are_its_files_or_its_data_set_with_the_revision():
    assert jobs.data_names({"dataset_path": "a/b"}) == ["a/b"]
    assert jobs.data_names({"dataset_path": "a/b", "dataset_kwargs": {"revision": "refs/pr/6"}}) == ["a/b @ refs/pr/6"]
    files = {"data_files": {"test": "t.jsonl", "train": ["x.jsonl", "y.jsonl"]}}
    assert jobs.data_names({"dataset_path": "json", "dataset_kwargs": files}) == ["t.jsonl", "x.jsonl", "y.jsonl"]


@pytest.mark.parametrize(
    "flags, named",
    [
        ({"models": ["base=M", "base=N"]}, "base"),
        ({"models": "a/b=M"}, "a/b"),
        ({"tasks": ["MMLU", "MMLU:0"]}, "mmlu"),
        ({"tasks": "MMLU:"}, "MMLU:"),
        ({"limit": 0}, "--limit"),
        ({"models": "base=nowhere"}, "nowhere"),
        ({"include_path": "nowhere"}, "nowhere"),
    ],
)
def test_wrong_flags_are_refused_by_name(tiny_model, tmp_path, flags, named):
    flags = {"models": f"base={tiny_model}", "output_dir": tmp_path / "out"} | flags
    assert named in call(evaluate_reasoning.main, *flags_of(flags), status=2).errors
    assert not list(Path(tmp_path).glob("out/*/*.json"))


# --- numbers -------------------------------------------------------------------------------------------------------


def score(value, stderr, scores=None):
    stderr = math.nan if stderr is None else stderr
    by_question = None if scores is None else {str(number): float(each) for number, each in enumerate(scores)}
    return Score(value, stderr, 100, 0, "acc,none", by_question)


def test_the_geometric_mean_and_its_error_are_those_worked_by_hand():
    mean, stderr, _ = geometric_mean([score(40.0, 1.0), score(90.0, 3.0)])
    assert mean == pytest.approx(60.0)
    assert stderr == pytest.approx(60 / 2 * math.sqrt((1 / 40) ** 2 + (3 / 90) ** 2))
    for unknown, value in ((score(40.0, None), 60.0), (score(0.0, 0.0), 0.0)):
        mean, stderr, _ = geometric_mean([unknown, score(90.0, 3.0)])
        assert mean == pytest.approx(value) and math.isnan(stderr)


def test_the_published_means_are_the_geometric_means_of_their_rows():
    row = PUBLISHED["LLaMA-2-7B base"]
    mean, *_ = geometric_mean([score(float(row[name]), None) for name in PUBLISHED_NAMES])
    assert mean == pytest.approx(float(row[MEAN]), abs=0.01)


def test_models_asked_the_same_questions_are_compared_question_by_question():
    own, other = [100.0, 100.0, 0.0, 100.0], [100.0, 0.0, 0.0, 100.0]
    found = difference([score(75.0, 25.0, own)], [score(50.0, 28.9, other)])
    assert found["value"] == 25.0 and found["paired"]
    assert found["stderr"] == pytest.approx(np.std([0, 100, 0, 0], ddof=1) / 2)  # 25
    assert found["unclear"] is True
    assert difference([score(75.0, 25.0, own)], [score(75.0, 25.0, own)])["stderr"] == 0


def test_the_error_of_a_group_is_that_of_draws_within_its_parts():
    values = {"one/0": 1.0, "one/1": 1.0, "one/2": 0.0, "two/0": 9.0, "two/1": 7.0}
    # Squares within the parts: 2/3 and 2, with 5 - 2 degrees of freedom.
    assert stderr_over_parts(values) == pytest.approx(math.sqrt((2 / 3 + 2) / 3 / 5))
    one = {key: value for key, value in values.items() if key.startswith("one")}
    assert stderr_over_parts(one) == pytest.approx(stats.sem(list(one.values())))
    assert math.isnan(stderr_over_parts({"one/0": 1.0, "two/0": 0.0}))
    own, other = (score(0, 0)._replace(scores=scores) for scores in (values, dict.fromkeys(values, 0.0)))
    assert difference([own], [other])["stderr"] == stderr_over_parts(values)


def test_without_the_questions_errors_add_as_of_independent_ones():
    found = difference([score(60.0, 3.0)], [score(50.0, 4.0)])
    assert found == {"value": 10.0, "stderr": 5.0, "paired": False, "unclear": False}
    assert difference([score(60.0, None)], [score(50.0, 4.0)])["unclear"] is None
    assert difference([score(0.0, 0.0)], [score(50.0, 4.0)])["stderr"] == 4.0


def test_the_error_of_a_difference_of_means_is_that_of_small_changes():
    rng = np.random.default_rng(0)
    answers = 100.0 * (rng.random((2, 3, 400)) < np.array([0.5, 0.7, 0.3])[None, :, None])
    answers[1, :, :300] = answers[0, :, :300]  # mostly the same, as of two checkpoints of a model

    def scores(side):
        return [score(one.mean(), one.std(ddof=1) / 20, one) for one in side]

    found = difference(scores(answers[0]), scores(answers[1]))
    draws = []
    for _ in range(2000):
        chosen = rng.integers(400, size=(3, 400))
        drawn = np.take_along_axis(answers, chosen[None], axis=2).mean(axis=2)
        draws.append(np.subtract(*np.exp(np.log(drawn).mean(axis=1))))
    assert found["paired"] and found["stderr"] == pytest.approx(np.std(draws), rel=0.1)


def test_scores_whose_mean_is_not_the_value_are_not_compared():
    result = {"questions": 3, "shots": 0, "metrics": {"acc,none": {"value": 0.5, "stderr": 0.1}}}
    assert read_score(result | {"scores": {"acc,none": {"t/0": 1.0, "t/1": 0.0, "t/2": 0.0}}}, "acc").scores is None
    assert read_score(result | {"scores": {"acc,none": {"t/0": 1.0, "t/1": 0.0, "t/2": 0.5}}}, "acc").scores


@pytest.mark.parametrize(
    "metrics, metric, complaint",
    [
        ({"acc,none": 0.5}, "f1", "no metric 'f1'; there are: acc,none"),
        ({"acc,strict": 0.5, "acc,flexible": 0.6}, "acc", "more than one metric 'acc'"),
        ({"perplexity,none": 7.0}, "perplexity", "perplexity,none is 7.0, not between 0 and 1"),
    ],
)
def test_a_metric_that_cannot_be_shown_names_those_that_there_are(metrics, metric, complaint):
    found = {key: {"value": value, "stderr": None} for key, value in metrics.items()}
    with pytest.raises(ValueError, match=re.escape(complaint)):
        read_score({"questions": 3, "shots": 0, "metrics": found, "scores": {}}, metric)
