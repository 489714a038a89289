import importlib.util
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, build_llama
from forks import python
from test_finished_work import hold

from tools import evaluate_reasoning
from tools.evaluate_reasoning import Flags
from tools.flags import parse_flags
from tools.reasoning import jobs as reasoning_jobs
from tools.reasoning import table as reasoning_table
from tools.reasoning.jobs import BEGINS, HARNESS_VERSION
from tools.reasoning.scores import MEAN, Score, difference, geometric_mean, read_score
from tools.reasoning.table import MARK, PUBLISHED, PUBLISHED_NAMES
from utils import run_program

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
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
GROUP = """group: parity
task: [parity_one, parity_two]
aggregate_metric_list:
  - {metric: acc, weight_by_size: true}
"""
INTERRUPT = "interrupted"


# --- through the real harness --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory):
    """A folder with a group of two tasks of the harness' form, questions included."""
    folder = tmp_path_factory.mktemp("own_tasks")
    for name, number in QUESTIONS.items():
        data = folder / f"{name}.jsonl"
        questions = [{"question": f"Is {i} even?", "choices": ["yes", "no"], "gold": i % 2} for i in range(number)]
        data.write_text("".join(json.dumps(question) + "\n" for question in questions))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data))
    (folder / "parity.yaml").write_text(GROUP)
    return folder


@pytest.fixture(scope="module")
def evaluated(own_tasks, tiny_model, other_model, tmp_path_factory):
    """The flags of an evaluation of two models by the real harness, which has been run, and what it printed."""
    folder = tmp_path_factory.mktemp("evaluated")
    flags = ["--models", f"base={tiny_model}", f"epoch1={other_model}", "--tasks", "parity:2", "--num_processes", "2"]
    flags += ["--include_path", str(own_tasks), "--dtype", "float32", "--output_dir", str(folder / "results")]
    command = [python(), "-m", "tools.evaluate_reasoning", *flags]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return flags, folder / "results", finished.stdout


def test_the_harness_scores_a_local_group_of_tasks_question_by_question(evaluated):
    _, folder, _ = evaluated
    for model in ("base", "epoch1"):
        result = json.loads((folder / model / "parity.json").read_text())
        assert result["questions"] == sum(QUESTIONS.values()) and result["shots"] == 2
        scores = result["scores"]["acc,none"]
        assert len(scores) == result["questions"] and set(scores) <= {0.0, 1.0}
        assert result["metrics"]["acc,none"]["value"] == pytest.approx(np.mean(scores))
        assert result["settings"]["harness"] == HARNESS_VERSION and result["settings"]["task"] == "parity"


def test_results_and_table_say_what_the_harness_counted(evaluated):
    _, folder, printed = evaluated
    results = json.loads((folder / "results.json").read_text())
    rows = {(row["model"], row["benchmark"]): row for row in results["results"]}
    scores = {}
    for model in ("base", "epoch1"):
        result = json.loads((folder / model / "parity.json").read_text())
        scores[model] = np.array(result["scores"]["acc,none"])
        row = rows[model, "parity"]
        assert row["value"] == pytest.approx(100 * scores[model].mean())
        assert row["stderr"] == pytest.approx(100 * result["metrics"]["acc,none"]["stderr"])
        assert (row["shots"], row["metric"], row["questions"]) == (2, "acc,none", 20)
        assert rows[model, MEAN]["value"] == pytest.approx(row["value"])
    gaps = 100 * (scores["epoch1"] - scores["base"])
    away = rows["epoch1", "parity"]["difference"]
    assert away["paired"] and away["from"] == "base" and rows["base", "parity"]["difference"] is None
    assert away["value"] == pytest.approx(gaps.mean())
    assert away["stderr"] == pytest.approx(gaps.std(ddof=1) / math.sqrt(20))
    table, result = printed.rstrip("\n").rsplit("\n\n", 1)
    assert (folder / "table.md").read_text() == table + "\n"
    means = [rows[model, MEAN] for model in ("base", "epoch1")]
    assert re.findall(r"(\w+) (\d+\.\d\d) ±", result) == [(row["model"], f"{row['value']:.2f}") for row in means]
    assert "| parity | parity | 2 | acc,none | 20 |" in printed and HARNESS_VERSION in printed


def test_what_is_finished_is_not_run_again(evaluated, call, monkeypatch):
    flags, folder, printed = evaluated
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/parity.*")}
    monkeypatch.setattr(reasoning_jobs, "run_portion", lambda jobs, device: pytest.fail("runs again"))
    assert call(*flags) == printed
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/parity.*")} == before and len(before) == 4


@pytest.mark.parametrize(
    "changes, named",
    [
        (["--tasks", "parity:3"], "shots"),
        (["--dtype", "bfloat16"], "dtype"),
        (["--limit", "5"], "limit"),
    ],
)
def test_results_of_other_settings_are_refused(evaluated, call, capsys, changes, named):
    flags, folder, _ = evaluated
    with pytest.raises(SystemExit):
        call(*flags, *changes)
    error = capsys.readouterr().err.splitlines()[-1]
    assert str(folder / "base" / "parity.json") in error and f"other settings ({named}: " in error


def test_another_model_or_another_task_file_under_the_same_name_is_refused(evaluated, tmp_path, call, capsys):
    flags, _, _ = evaluated
    swapped = [
        flag.replace("base=", "epoch1=") if "base=" in flag else flag for flag in flags if "epoch1=" not in flag
    ]
    with pytest.raises(SystemExit):
        call(*swapped)
    assert "other settings (model: " in capsys.readouterr().err
    (tmp_path / "parity.yaml").write_text(GROUP + "metadata: {version: 2}\n")
    with pytest.raises(SystemExit):
        call(*flags, "--include_path", str(tmp_path))
    assert "other settings (own_tasks: " in capsys.readouterr().err


@pytest.mark.skipif(
    not os.environ.get("VLLM") or importlib.util.find_spec("tenacity") is None,
    reason="needs VLLM=/path/to/vllm and pip install 'lm-eval[api]'",
)
def test_a_real_vllm_gives_the_scores_of_the_harness_own_process(own_tasks, tokenizer, tmp_path):
    model = tmp_path / "model"  # vLLM knows no heads as small as the tiny models'
    build_llama(0, len(tokenizer), hidden_size=128, intermediate_size=256).save_pretrained(model)
    tokenizer.save_pretrained(model)
    scores = []
    for engine in ("hf", "vllm"):
        flags = ["--models", f"base={model}", "--tasks", "parity:2", "--include_path", str(own_tasks)]
        flags += ["--dtype", "float32", "--engine", engine, "--output_dir", str(tmp_path / engine)]
        done = subprocess.run([python(), "-m", "tools.evaluate_reasoning", *flags], cwd=ROOT, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        scores.append(json.loads((tmp_path / engine / "base" / "parity.json").read_text())["scores"])
    assert scores[0] == scores[1]


# --- around it -----------------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the program in this process; returns what it printed."""

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["evaluate_reasoning.py", *flags])
        capsys.readouterr()
        run_program(evaluate_reasoning.main)
        return capsys.readouterr().out

    return run


@pytest.fixture
def logged(caplog):
    """What the program logs, although it sets logging up anew."""
    logger = logging.getLogger("tools")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def fake_harness(monkeypatch):
    """Instead of the harness: results of 100 questions. Gives the jobs that were run, and what each is to come to."""
    ran, right = [], {}

    def run(jobs, device):
        problems = []
        for job in jobs:
            ran.append(job.name)
            good = right.get(job.name, 50)
            if good == INTERRUPT:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.5)  # the main thread is told while this job runs
                break
            if isinstance(good, str):
                problems.append(good)
            else:
                write_result(job, good)
        return problems

    monkeypatch.setattr(reasoning_jobs, "run_portion", run)
    return ran, right


def write_result(job, good, questions=100):
    scores = [1.0] * good + [0.0] * (questions - good)
    metric = job.benchmark.metric.partition(",")[0]
    stderr = float(np.std(scores, ddof=1) / math.sqrt(questions))
    job.path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "settings": job.request["settings"],
        "questions": questions,
        "shots": job.benchmark.shots,
        "metrics": {
            f"{metric},none": {"value": good / questions, "stderr": stderr},
            "other,none": {"value": 0.25, "stderr": None},
        },
        "scores": {f"{metric},none": scores},
    }
    job.path.write_text(json.dumps(result))


def flags_for(folder, **models):
    return ["--models", *(f"{name}={path}" for name, path in models.items()), "--output_dir", str(folder)]


def test_the_eight_benchmarks_are_the_default_with_their_shots_and_metrics():
    flags = parse_flags(Flags, ["--models", "base=M", "--output_dir", "D"], description="")
    assert tuple(flags.tasks) == reasoning_table.BENCHMARKS
    assert PUBLISHED_NAMES == ("MMLU", "BBH", "MuTual", "ARC-e", "ARC-c", "LogiQA2", "WinoGrande", "PIQA")


def test_shots_and_metrics_can_be_changed():
    flags = ["--tasks", "ARC-c:25:acc_norm", "PIQA", "own:1:f1,none", "ARC-e:acc_norm"]
    parsed = parse_flags(Flags, ["--models", "base=M", "--output_dir", "D", *flags], description="")
    assert [tuple(task) for task in parsed.tasks] == [
        ("ARC-c", "arc_challenge", 25, "acc_norm"),
        ("PIQA", "piqa", 0, "acc"),
        ("own", "own", 1, "f1,none"),
        ("ARC-e", "arc_easy", 0, "acc_norm"),
    ]


def test_a_run_that_is_stopped_between_tasks_goes_on_with_the_next_one(
    fake_harness, call, logged, tmp_path, tiny_model
):
    ran, right = fake_harness
    flags = [*flags_for(tmp_path, base=tiny_model), "--tasks", "PIQA", "ARC-e", "ARC-c"]
    call(*flags, "--tasks", "PIQA")
    right["base on ARC-e"] = INTERRUPT
    with pytest.raises(KeyboardInterrupt):
        call(*flags)
    assert ran == ["base on PIQA", "base on ARC-e"] and not (tmp_path / "results.json").exists()
    del right["base on ARC-e"]
    call(*flags)
    assert ran[2:] == ["base on ARC-e", "base on ARC-c"] and (tmp_path / "results.json").exists()
    assert "1 of 3 results are there; base on ARC-e comes next" in logged.text


def test_a_task_that_fails_does_not_stop_the_others_and_is_named(fake_harness, call, capsys, tmp_path, tiny_model):
    ran, right = fake_harness
    right["base on PIQA"] = "base on PIQA ended with status 1: no data set"
    with pytest.raises(SystemExit) as exit_info:
        call(*flags_for(tmp_path, base=tiny_model), "--tasks", "PIQA", "ARC-e")
    assert exit_info.value.code == 2 and ran == ["base on PIQA", "base on ARC-e"]
    assert "base on PIQA ended with status 1: no data set" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "base" / "arc_easy.json").exists() and not (tmp_path / "results.json").exists()


def test_overwrite_runs_again_only_what_other_settings_made(fake_harness, call, tmp_path, tiny_model):
    ran, _ = fake_harness
    flags = flags_for(tmp_path, base=tiny_model)
    call(*flags, "--tasks", "PIQA", "ARC-e")
    call(*flags, "--tasks", "PIQA", "ARC-e:5", "--overwrite", "True")
    assert ran == ["base on PIQA", "base on ARC-e", "base on ARC-e"]


def test_a_second_launch_into_one_folder_is_refused(fake_harness, call, capsys, tmp_path, tiny_model):
    ran, _ = fake_harness
    owner = hold(tmp_path / evaluate_reasoning.LOCK)
    assert owner.stdout.readline() == "locked\n"
    with pytest.raises(SystemExit):
        call(*flags_for(tmp_path, base=tiny_model), "--tasks", "PIQA")
    owner.kill()
    owner.communicate()
    assert "another process is writing to this run; end that one first" in capsys.readouterr().err
    assert ran == [] and [path.name for path in tmp_path.iterdir()] == [evaluate_reasoning.LOCK]


def test_own_tasks_leave_the_results_of_the_eight_as_they_are(fake_harness, call, own_tasks, tmp_path, tiny_model):
    ran, _ = fake_harness
    flags = flags_for(tmp_path, base=tiny_model)
    call(*flags, "--tasks", "PIQA")
    call(*flags, "--tasks", "PIQA", "parity:0", "--include_path", str(own_tasks))
    assert ran == ["base on PIQA", "base on parity"]


def test_the_table_stands_beside_the_published_rows_and_marks_small_differences(
    fake_harness, call, tmp_path, tiny_model, other_model
):
    _, right = fake_harness
    right.update({"epoch1 on MMLU": 51, "epoch1 on BBH": 60})
    text = call(*flags_for(tmp_path, base=tiny_model, epoch1=other_model))
    lines = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in text.splitlines()}
    assert lines["LLaMA-2-7B SPAG-1, published"][1:3] == ["-", "34.4"]
    assert lines["LLaMA-2-7B SPAG-3, published"][1:] == "- 34.94 55.30 78.54 47.53 30.98 69.93 79.38 52.58".split()
    assert (
        lines["LLaMA-2-7B base, published"][1] == "45.80" and lines["Baichuan-2-13B SPAG-3, published"][-1] == "56.75"
    )
    # One question of 100 more: both the difference and its error are 1. Ten more: 10 against 3.02.
    assert lines["epoch1"][1:4] == [f"51.00 ± 5.02 {MARK}", "60.00 ± 4.92", f"50.00 ± 5.03 {MARK}"]
    assert lines["base"][1:3] == ["50.00 ± 5.03", "50.00 ± 5.03"] and lines["base"][-1] == "50.00 ± 1.78"
    assert f"{MARK}: the difference from base" in text and "question by question" in text
    assert "| BBH | bbh_fewshot | 3 | exact_match,none | 100 |" in text


def test_the_published_mean_stands_only_beside_the_same_eight_benchmarks(fake_harness, call, tmp_path, tiny_model):
    text = call(*flags_for(tmp_path, base=tiny_model), "--tasks", "PIQA", "ARC-e")
    assert "| LLaMA-2-7B base, published | 78.07 | 76.30 | - |" in text and "Baichuan" not in text


def test_differences_are_from_the_first_model(fake_harness, call, tmp_path, tiny_model, other_model):
    call(*flags_for(tmp_path, base=tiny_model, imitation=other_model), "--tasks", "PIQA")
    rows = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(row["model"], row["difference"] and row["difference"]["from"]) for row in rows] == [
        ("base", None),
        ("base", None),
        ("imitation", "base"),
        ("imitation", "base"),
    ]


def test_another_metric_needs_no_new_run(fake_harness, call, tmp_path, tiny_model):
    ran, _ = fake_harness
    flags = [*flags_for(tmp_path, base=tiny_model), "--tasks", "PIQA"]
    call(*flags)
    text = call(*flags, "--tasks", "PIQA:other")
    assert len(ran) == 1 and "| base | 25.00 | 25.00 |" in text


def test_the_radar_plot_has_every_model_and_benchmark(fake_harness, call, tmp_path, tiny_model, other_model):
    pytest.importorskip("matplotlib")
    _, right = fake_harness
    right["epoch1 on PIQA"] = 80
    call(*flags_for(tmp_path, base=tiny_model, epoch1=other_model))
    drawn = (tmp_path / "radar.svg").read_text()
    texts = re.findall(r"<text[^>]*>(.*?)</text>", drawn) + re.findall(r"<tspan[^>]*>(.*?)</tspan>", drawn)
    assert {*PUBLISHED_NAMES, "base", "epoch1", "80.0", "50.0"} <= set(texts)


def test_fewer_than_three_benchmarks_make_no_plot(fake_harness, call, tmp_path, tiny_model):
    call(*flags_for(tmp_path, base=tiny_model), "--tasks", "PIQA", "ARC-e", "ARC-c")
    assert (tmp_path / "radar.svg").exists()
    call(*flags_for(tmp_path, base=tiny_model), "--tasks", "PIQA", "ARC-e")
    assert not (tmp_path / "radar.svg").exists() and (tmp_path / "table.md").exists()


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--models", "base=M", "base=N"], "--models names base twice"),
        (["--models", "a/b=M"], "--models a/b: it names a folder too"),
        (["--tasks", "MMLU", "MMLU:0"], "--tasks names mmlu twice"),
        (["--tasks", "MMLU:"], "expected NAME, NAME:SHOTS, NAME:METRIC or NAME:SHOTS:METRIC, got 'MMLU:'"),
        (["--limit", "0"], "--limit is 0; it must be at least 1"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(call, capsys, tmp_path, flags, complaint):
    with pytest.raises(SystemExit) as exit_info:
        call("--models", "base=M", "--output_dir", str(tmp_path), *flags)
    lines = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and len(lines) == 1 and complaint in lines[0]


@pytest.mark.parametrize("installed, found", [(None, "it is not there"), ("0.4.1", "there is 0.4.1, and results")])
def test_another_harness_or_none_names_the_install_command(call, capsys, monkeypatch, tmp_path, installed, found):
    monkeypatch.setattr(evaluate_reasoning, "find_spec", lambda name: installed)
    monkeypatch.setattr(evaluate_reasoning.metadata, "version", lambda name: installed)
    with pytest.raises(SystemExit):
        call("--models", "base=M", "--output_dir", str(tmp_path))
    (line,) = capsys.readouterr().err.splitlines()
    assert found in line and line.endswith(f"pip install lm-eval=={HARNESS_VERSION}")


def test_vllm_needs_the_harness_client_of_servers(call, capsys, monkeypatch, tmp_path):
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setattr(evaluate_reasoning, "find_spec", lambda name: None if name == "tenacity" else 1)
    with pytest.raises(SystemExit):
        call("--models", "base=M", "--output_dir", str(tmp_path), "--engine", "vllm", "--vllm", str(tmp_path / "vllm"))
    assert f"--engine vllm needs more: pip install 'lm-eval[api]=={HARNESS_VERSION}'" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_told_once_and_not_waited_for(
    fake_harness, call, logged, monkeypatch, tmp_path, tiny_model
):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(reasoning_jobs, "ENDPOINT", "http://127.0.0.1:9")
    call(*flags_for(tmp_path, base=tiny_model), "--tasks", "PIQA", "ARC-e")
    assert logged.text.count("http://127.0.0.1:9 cannot be reached") == 1 and os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_server_gets_the_models_tokens_by_the_harness_own_client(monkeypatch, tiny_model):
    from tools.reasoning import harness

    class Server:
        url, key, model = "http://127.0.0.1:7/v1", "secret", "spag-x"

        def __init__(self, flags, folder, **how):
            self.asked = (flags.vllm, folder, how)
            servers.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.ended = True

    servers: list[Server] = []
    monkeypatch.setattr(harness.VLLMFlags, "vllm_server", lambda *values, **how: Server(*values, **how))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    command = ["--models", f"base={tiny_model}", "--output_dir", "D", "--dtype", "float32", "--engine", "vllm"]
    flags = parse_flags(Flags, [*command, "--vllm", "/v"], description="")
    job = flags.jobs()[0]
    assert job.request["settings"]["engine"] == "vllm"
    with harness.model_of(job.request) as (kind, arguments):
        assert kind == "local-completions" and os.environ.pop("OPENAI_API_KEY") == "secret"
        assert (arguments["base_url"], arguments["model"]) == ("http://127.0.0.1:7/v1/completions", "spag-x")
        assert arguments["tokenizer"] == tiny_model and arguments["max_length"] == 2048
    how = {"max_length": 2048, "dtype": "float32", "trust_remote_code": False}
    assert servers[0].asked == ("/v", Path(tiny_model), how) and servers[0].ended
    hf = parse_flags(Flags, command[:-2], description="").jobs()[0].request
    assert "engine" not in hf["settings"]  # results of before there was a choice stay
    with harness.model_of(hf) as (kind, arguments):
        assert kind == "hf" and arguments["pretrained"] == tiny_model


def test_it_is_not_started_under_torchrun(call, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        call("--models", "base=M", "--output_dir", str(tmp_path))
    assert "without torchrun" in capsys.readouterr().err


def jobs_of(models: int, tasks: int, folder: Path) -> list[reasoning_jobs.Job]:
    return [
        reasoning_jobs.Job(str(model), reasoning_table.BENCHMARKS[task], {}, folder / f"{model}/{task}.json")
        for model in range(models)
        for task in range(tasks)
    ]


def test_models_are_dealt_to_the_devices_that_are_free(tmp_path, monkeypatch):
    both, seen = threading.Barrier(2, timeout=10), []

    def run(jobs, device):
        seen.append((jobs[0].model, device))
        both.wait()  # passes only where two run at a time
        return []

    monkeypatch.setattr(reasoning_jobs, "run_portion", run)
    reasoning_jobs.run_jobs(jobs_of(6, 2, tmp_path), ["4", "5"])
    assert sorted(name for name, _ in seen) == [str(n) for n in range(6)]
    assert {device for _, device in seen} == {"4", "5"}


@pytest.mark.parametrize("models, devices, sizes", [(2, 1, [3, 3]), (1, 2, [1, 2]), (2, 8, [1] * 6)])
def test_a_models_tasks_stay_together_unless_devices_would_idle(tmp_path, monkeypatch, models, devices, sizes):
    jobs, dealt = jobs_of(models, 3, tmp_path), []
    monkeypatch.setattr(reasoning_jobs, "run_portion", lambda portion, device: dealt.append(portion) or [])
    reasoning_jobs.run_jobs(jobs, [None] * devices)
    assert sorted(map(len, dealt)) == sizes and all(len({job.model for job in portion}) == 1 for portion in dealt)
    assert sorted(job.path for portion in dealt for job in portion) == sorted(job.path for job in jobs)


def test_a_process_that_ends_badly_is_named_with_what_is_missing_and_its_last_line(tmp_path, monkeypatch):
    def process(command, stdout, **how):
        asked = json.loads(command[-1])
        Path(asked[0][1]).write_text("{}")
        stdout.write(b"Traceback\nno data set\n")
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(reasoning_jobs.subprocess, "run", process)
    problems = reasoning_jobs.run_portion(jobs_of(1, 3, tmp_path), None)
    missing = "0 on BBH, 0 on MuTual ended with status 1: no data set"
    assert problems == [f"{missing} ({tmp_path / '0' / '0.log'})"]


def test_a_process_that_is_killed_is_followed_by_one_for_the_tasks_that_it_had_not_begun(tmp_path, monkeypatch):
    """The first task has a result, the second one has raised, the third one is killed."""
    asked = []

    def process(command, stdout, **how):
        asked.append([Path(path).stem for _, path in json.loads(command[-1])])
        for _, path in json.loads(command[-1])[:1]:
            Path(path).write_text("{}")
        stdout.write(f"{BEGINS}\n{BEGINS}\nno data set\n\n{BEGINS}\n".encode())
        return subprocess.CompletedProcess(command, -9 if len(asked) == 1 else 0)

    monkeypatch.setattr(reasoning_jobs.subprocess, "run", process)
    jobs = jobs_of(1, 5, tmp_path)
    (problem,) = reasoning_jobs.run_portion(jobs, None)
    assert asked == [list("01234"), list("34")]
    assert problem.startswith("0 on BBH, 0 on MuTual ended with status -9")


def test_a_process_that_is_killed_before_its_first_task_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(
        reasoning_jobs.subprocess, "run", lambda command, **how: subprocess.CompletedProcess(command, -9)
    )
    (problem,) = reasoning_jobs.run_portion(jobs_of(1, 2, tmp_path), None)
    assert problem.startswith("0 on MMLU, 0 on BBH ended with status -9: no message")


def test_an_unknown_task_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch, tiny_model):
    from tools.reasoning import harness

    flags = ["--models", f"base={tiny_model}", "--output_dir", str(tmp_path), "--tasks", "PIQA", "nothing"]
    jobs = parse_flags(Flags, flags, description="").jobs()
    told = json.dumps([[job.request, str(job.path)] for job in jobs])
    monkeypatch.setattr(sys, "argv", ["harness.py", told])
    monkeypatch.setattr(harness, "index_of", lambda **_: SimpleNamespace(all_tasks=["piqa"], all_tags=[]))
    monkeypatch.setattr(harness, "get_model", lambda kind: pytest.fail("loads it"))
    monkeypatch.setattr(harness, "end_with_parent", lambda: None)
    with pytest.raises(ValueError, match="^nothing: no task of the harness"):
        harness.main()


def test_after_a_task_that_fails_the_harness_goes_on_with_the_others(tmp_path, monkeypatch, tiny_model):
    from tools.reasoning import harness

    def evaluate(job, model):
        if job["settings"]["task"] == "arc_easy":
            raise OSError("no data set\nof this name")
        return {"settings": job["settings"]}

    flags = ["--models", f"base={tiny_model}", "--output_dir", str(tmp_path), "--tasks", "PIQA", "ARC-e", "ARC-c"]
    jobs = parse_flags(Flags, flags, description="").jobs()
    told = json.dumps([[job.request, str(job.path)] for job in jobs])
    monkeypatch.setattr(sys, "argv", ["harness.py", told])
    monkeypatch.setattr(harness, "evaluate", evaluate)
    monkeypatch.setattr(harness, "find_task", lambda task, include_path: None)
    monkeypatch.setattr(harness, "end_with_parent", lambda: None)
    with pytest.raises(ValueError, match="^arc_easy: no data set of this name$"):
        harness.main()
    assert [job.path.is_file() for job in jobs] == [True, False, True]


# --- numbers -------------------------------------------------------------------------------------------------------


def score(value, stderr, scores=None):
    stderr = math.nan if stderr is None else stderr
    return Score(value, stderr, 100, 0, "acc,none", None if scores is None else np.array(scores))


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
    assert found["within_stderr"] is True
    assert difference([score(75.0, 25.0, own)], [score(75.0, 25.0, own)])["stderr"] == 0


def test_without_the_questions_errors_add_as_of_independent_ones():
    found = difference([score(60.0, 3.0)], [score(50.0, 4.0)])
    assert found == {"value": 10.0, "stderr": 5.0, "paired": False, "within_stderr": False}
    assert difference([score(60.0, None)], [score(50.0, 4.0)])["within_stderr"] is None
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
    assert read_score(result | {"scores": {"acc,none": [1.0, 0.0, 0.0]}}, "acc").scores is None
    assert read_score(result | {"scores": {"acc,none": [1.0, 0.0, 0.5]}}, "acc").scores is not None


def test_an_error_that_is_no_number_is_no_result():
    result = {"questions": 3, "shots": 0, "metrics": {"acc,none": {"value": 0.5, "stderr": "big"}}, "scores": {}}
    with pytest.raises(ValueError, match="could not convert string to float: 'big'"):
        read_score(result, "acc")


@pytest.mark.parametrize(
    "metrics, metric, complaint",
    [
        ({"acc,none": 0.5}, "f1", "no metric 'f1'; there are: acc,none"),
        ({"acc,strict": 0.5, "acc,flexible": 0.6}, "acc", "more than one metric 'acc'"),
        ({"perplexity,none": 7.0}, "perplexity", "perplexity,none is 7.0, no share"),
    ],
)
def test_a_metric_that_cannot_be_shown_names_those_that_there_are(metrics, metric, complaint):
    found = {key: {"value": value, "stderr": None} for key, value in metrics.items()}
    with pytest.raises(ValueError, match=re.escape(complaint)):
        read_score({"questions": 3, "shots": 0, "metrics": found, "scores": {}}, metric)
