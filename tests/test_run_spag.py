"""The loop: real programs on a tiny model, killed and continued; and the script's own logic with stub programs."""

import contextlib
import glob
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT
from forks import python
from safetensors.torch import load_file

import arguments
from tools.games import taboo
from tools.loop import support as loop_support

SCRIPT = str(ROOT / "tools" / "run_spag.sh")
STAGES = ("imitation", "epoch1_play", "epoch1_rewards", "epoch1_train", "epoch1_eval")
SETTLED = {"nproc": 1, "precision": "fp32", "deepspeed": "none", "gradient_checkpointing": "False"}

# Stands in for every program of the loop: notes the call, writes what the program would, or does as it is told.
STUB = """
import json, os, random, sys, time
from pathlib import Path

words = sys.argv[1:]
at = next(i for i, word in enumerate(words) if word.endswith(".py"))
flags = {w[2:]: v for w, v in zip(words[at:], [*words[at + 1:], ""]) if w.startswith("--")}
program = Path(words[at]).stem
folder = Path(flags.get("output_dir") or Path(flags.get("output_data_path", words[at + 1])).parent)
folder.mkdir(parents=True, exist_ok=True)
name = {"play_llm_game": "play", "assign_rewards": "rewards", "evaluate_games": "eval"}.get(program, program)
stage = f"{folder.parent.name}_{name}" if program != "report" else program
stage = "imitation" if stage == "imitation_train" else stage
with open(os.environ["STUB_CALLS"], "a") as file:
    file.write(json.dumps([stage, words]) + "\\n")
told = json.loads(os.environ.get("STUB_TOLD", "{}")).get(stage, "")
print("\\x1b[Agames:  45%|####      | 9/20 [00:02<00:03,  4.5game/s]", end="\\r", flush=True)
if told == "fail":
    print("something is wrong here", flush=True)
    sys.exit(3)
if program == "train" and "resume_from_checkpoint" not in flags:
    (folder / "checkpoint-1").mkdir(exist_ok=True)
if told.startswith("sleep"):
    time.sleep(float(told[5:]))
mark = {"mark": random.random()}
stem = "_".join(flags.get(part, "") for part in ("model_prefix", "task_type", "data_suffix"))
if "lora_merge" in flags:
    (folder / "merged").mkdir(exist_ok=True)
made = {
    "train": ["train_results.json", "config.json"],
    "play_llm_game": [f"{stem}_results.json", f"{stem}_summary.json"],
    "assign_rewards": ["rows.json", "rows_rewards_settings.json"],
    "evaluate_games": ["matches.json"],
    "report": ["report.html"],
}
for file in made[program]:
    (folder / file if program != "report" else Path(words[at + 1]) / file).write_text(json.dumps(mark))
"""


def flags_of(settings: dict) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def inputs(tmp_path, tiny_model) -> dict:
    """Settings of a loop of one epoch over a few words."""
    game = {"target": "I know the word! It is `art`!", "reward": 1.0, "weight": 1.0, "role": "defender"}
    files = {
        "imitation.json": json.dumps([{"query": f"Say word {number}: ", **game} for number in range(8)]),
        "sft.json": json.dumps([{"query": "What?", "target": "That."}] * 4),
        "words.txt": "art\nmusic\nbridge\n",
        "held_out.txt": "river\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return SETTLED | {
        "model": tiny_model,
        "words": tmp_path / "words.txt",
        "output": tmp_path / "out",
        "imitation_data": tmp_path / "imitation.json",
        "sft_data": tmp_path / "sft.json",
        "eval_words": f"played={tmp_path / 'words.txt'} {tmp_path / 'held_out.txt'}",
        "epochs": 1,
        "global_batch": 4,
    }


class Loop:
    """The script with the stub in the place of all programs but its own helper."""

    def __init__(self, folder: Path, settings: dict):
        self.settings, self.output, self.calls_path = settings, settings["output"], folder / "calls"
        (folder / "stub.py").write_text(STUB)
        python = folder / "python"
        python.write_text(
            '#!/bin/sh\ncase "$1 $2" in *"loop/support.py gpus") echo "${STUB_GPUS:-0}"; exit ;; esac\n'
            f'case "$1" in *loop/support.py) exec "{sys.executable}" "$@" ;; esac\n'
            f'exec "{sys.executable}" "{folder}/stub.py" "$@"\n'
        )
        python.chmod(0o755)
        unset = ("PYTHONPATH", "NODE_RANK")
        self.environment = {name: value for name, value in os.environ.items() if name not in unset}
        self.environment |= {"PYTHON": str(python), "STUB_CALLS": str(self.calls_path)}

    def start(self, told: dict | None = None, stderr=subprocess.PIPE, environment: dict | None = None, **changes):
        self.calls_path.write_text("")
        return subprocess.Popen(
            [SCRIPT, *flags_of(self.settings | changes)],
            env=self.environment | {"STUB_TOLD": json.dumps(told or {})} | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def run(self, *args, **kwargs):
        """Run it to its end; (exit status, output, errors)."""
        process = self.start(*args, **kwargs)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> dict[str, list[str]]:
        """The stages that were run, in their order, and the words of their commands."""
        return dict(json.loads(line) for line in self.calls_path.read_text().splitlines())


@pytest.fixture
def loop(tmp_path, inputs) -> Loop:
    return Loop(tmp_path, inputs)


def wait_until(condition, process: subprocess.Popen, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def any_filled(pattern: str) -> bool:
    """Whether a file of these names has content; checkpoints come and go."""
    with contextlib.suppress(FileNotFoundError):
        return any(map(os.path.getsize, glob.glob(pattern)))
    return False


def kill_group(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def users_of(folder: Path) -> list[str]:
    """Command lines of the processes that name this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                found.append(" ".join(process.cmdline()))
    return found


# --- with the real programs ----------------------------------------------------------------------------------------


def test_a_loop_killed_in_every_stage_ends_with_the_results_of_one_that_was_not(inputs):
    output = inputs["output"]
    settings = inputs | {"max_turns": 1, "max_length": 1100, "max_new_tokens": 4, "games_per_word": 6, "save_steps": 1}
    settings |= {"play_batch": 1, "report": "False", "global_batch": 2, "imitation_lr": "1e-3"}
    for name in ("imitation_data", "sft_data"):  # more steps to be killed in
        rows = json.loads(settings[name].read_text())
        settings[name].write_text(json.dumps(3 * rows))
    environment = os.environ | {"PYTHON": python(), "OMP_NUM_THREADS": "1"}
    played, matched = "epoch1/episodes/imitation_sampling_words_rank0.jsonl", "epoch1/eval/games_rank0.jsonl"
    signs = ("imitation/model/checkpoint-*/complete.json", played, "logs/epoch1_rewards.log")
    for sign in (*signs, "epoch1/model/checkpoint-*/complete.json", matched, None):
        process = subprocess.Popen(
            [SCRIPT, *flags_of(settings)],
            env=environment,
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if sign:
            wait_until(lambda: any_filled(f"{output}/{sign}"), process)  # noqa: B023
            kill_group(process)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed

    starts = {stage: (output / "logs" / f"{stage}.log").read_text().split("\n=== ")[1:] for stage in STAGES}
    assert {stage: len(texts) for stage, texts in starts.items()} == dict.fromkeys(STAGES, 2)
    assert all("--resume_from_checkpoint True" in starts[stage][1] for stage in ("imitation", "epoch1_train"))
    for name in ("imitation", "epoch1"):
        state = json.loads((output / name / "model" / "trainer_state.json").read_text())
        assert "loss" in state["log_history"][1] and state["global_step"] == state["max_steps"]
        assert not list((output / name / "model").glob("checkpoint-*"))
    games = [json.loads(line) for line in (output / played).read_text().splitlines()]
    assert sorted(game["index"] for game in games) == list(range(18))  # none played twice
    games = [json.loads(line) for line in (output / matched).read_text().splitlines()]
    assert len(games) == len({game["index"] for game in games}) == 2 * 4  # both roles on four words
    assert (output / "epoch1/episodes/imitation_sampling_words_results.json").is_file()
    counts = json.loads((output / "epoch1/rows/rows_rewards_settings.json").read_text())
    assert counts["games"]["episodes"] == 18 and counts["rows"]["sft"] == 12
    results = json.loads((output / "epoch1/eval/matches.json").read_text())["results"]
    assert {result["words"] for result in results} >= {"played", "held_out"}
    assert json.loads((output / "settings.json").read_text())["GAMES_PER_WORD"] == "6"

    # Imitation again in one go, by the command of its first start: play draws its games in another order after a kill.
    command = starts["imitation"][0].splitlines()[0].split(f"{python()} ")[1]
    command = command.replace(f"{output}/imitation", f"{output}/uninterrupted")
    subprocess.run([python(), *command.split()], env=environment, check=True, capture_output=True)
    weights = [load_file(output / name / "model/model.safetensors") for name in ("imitation", "uninterrupted")]
    start = load_file(Path(settings["model"], "model.safetensors"))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert not any(torch.equal(tensor, start[name]) for name, tensor in weights[0].items())


# --- the stages ----------------------------------------------------------------------------------------------------


def test_stages_run_in_order_and_each_epoch_starts_from_the_model_before(loop):
    status, out, err = loop.run(epochs=2)
    assert status == 0, err
    second = ("epoch2_play", "epoch2_rewards", "epoch2_train", "epoch2_eval")
    calls = loop.calls()
    assert [stage for stage in calls if stage != "report"] == [*STAGES, *second]
    output = str(loop.output)
    for stage, model in (("epoch1_play", "imitation"), ("epoch2_play", "epoch1")):
        assert calls[stage].count(f"{output}/{model}/model") == 2
    for stage, model in (("epoch1_train", "imitation"), ("epoch2_train", "epoch1")):
        assert calls[stage].count(f"{output}/{model}/model") == 2
    assert f"epoch2={output}/epoch2/model" in calls["epoch2_eval"]
    assert f"held_out={loop.settings['eval_words'].split()[1]}" in calls["epoch2_eval"]
    assert (loop.output / "report.html").is_file()
    assert re.search(r"epoch 1 took 0:00:0\d \(play .*, rewards .*, train .*, eval .*\)", out)
    assert "epochs left: 1, about 0:00:0" in out


def test_the_papers_settings_reach_the_programs_and_are_accepted(loop, tmp_path):
    gpu = {"precision": "bf16", "gradient_checkpointing": "True", "nproc": 8, "global_batch": 128}
    assert loop.run(**gpu, deepspeed=ROOT / "configs/zero2.json")[0] == 0
    calls = loop.calls()
    for stage, wanted in {
        "imitation": "--train_method SFTwithKL --lm_kl_coeff 0.1 --learning_rate 5e-6 --num_train_epochs 1",
        "epoch1_train": "--train_method OfflinePO --lm_kl_coeff 0.2 --lm_sft_coeff 0.5 --learning_rate 2e-6 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048 --bf16 True --tf32 True",
        "epoch1_play": "--taboo_max_turns 5 --max_new_tokens 256 --temperature 1.2 --top_k 50 --bf16 True",
        "epoch1_rewards": f"--decay_weight 0.8 --sft_data_path {tmp_path / 'sft.json'}",
    }.items():
        given = " ".join(calls[stage])
        assert all(f"--{pair}" in given for pair in wanted.removeprefix("--").split(" --")), (stage, given)
    for stage in ("imitation", "epoch1_play", "epoch1_train", "epoch1_eval"):
        assert calls[stage][:5] == ["-m", "torch.distributed.run", "--nproc_per_node", "8", "--standalone"]
    flags = calls["imitation"][calls["imitation"].index(str(ROOT / "train.py")) + 1 :]
    parsed = arguments.parse_arguments([*flags, "--use_cpu", "True"])
    assert parsed.save_steps == 0.2 and parsed.save_total_limit == 1 and parsed.deepspeed


def test_a_finished_loop_is_not_run_again_and_its_time_not_told(loop):
    assert loop.run()[0] == 0
    status, out, _ = loop.run()
    assert status == 0 and loop.calls_path.read_text().count("\n") == 1 and list(loop.calls()) == ["report"]
    assert out.count("whole already") == len(STAGES) and "took" not in out


def test_another_machines_numbers_do_not_make_it_another_loop(loop):
    assert loop.run()[0] == 0
    status, _, err = loop.run(nproc=2, train_batch=1, play_batch=7, save_steps=0)
    assert status == 0, err


def test_another_number_of_rows_a_step_makes_it_another_loop(loop):
    assert loop.run()[0] == 0
    status, _, err = loop.run(global_batch=8)
    assert status == 1 and loop.calls() == {}
    assert "imitation has results of another command" in err
    assert "< --global_batch 4" in err and "> --global_batch 8" in err
    commands = {path.stem: path.read_text() for path in (loop.output / "logs").glob("*.command")}
    assert [stage for stage, text in commands.items() if "--global_batch" in text] != []
    assert {stage for stage, text in commands.items() if "--global_batch" in text} == {"imitation", "epoch1_train"}


@pytest.mark.parametrize("data, stage", [({}, "imitation"), ({"imitation_data": ""}, "epoch1_play")])
def test_other_weights_of_the_base_model_stop_the_loop(loop, tmp_path, tiny_model, other_model, data, stage):
    shutil.copytree(tiny_model, tmp_path / "base")
    data = data | {"model": tmp_path / "base"}
    assert loop.run(**data)[0] == 0
    assert loop.run(**data)[0] == 0
    shutil.copy(Path(other_model, "model.safetensors"), tmp_path / "base")
    status, _, err = loop.run(**data)
    assert status == 1 and loop.calls() == {}
    assert f"{stage} has results of another command" in err and f"> read {tmp_path}/base " in err


def test_lora_plays_on_with_the_merged_model(loop):
    assert loop.run(lora_rank=4, epochs=2)[0] == 0
    calls = loop.calls()
    for stage in ("imitation", "epoch1_train", "epoch2_train"):
        given = " ".join(calls[stage])
        assert "--lora_rank 4 --lora_merge True" in given and "--ref_model_name_or_path" not in given
    assert calls["epoch2_play"].count(f"{loop.output}/epoch1/model/merged") == 2
    assert f"imitation={loop.output}/imitation/model/merged" in calls["epoch2_eval"]
    assert (loop.output / "epoch2/episodes/epoch1_sampling_words_results.json").is_file()


def test_a_loop_goes_on_for_more_epochs(loop):
    assert loop.run(report="False")[0] == 0
    assert loop.run(epochs=2, report="False")[0] == 0
    assert list(loop.calls()) == ["epoch2_play", "epoch2_rewards", "epoch2_train", "epoch2_eval"]


def test_a_result_of_other_settings_stops_the_loop_and_shows_the_difference(loop):
    assert loop.run()[0] == 0
    status, _, err = loop.run(temperature=0.7)
    assert status == 1 and loop.calls() == {}
    assert "epoch1_play has results of another command" in err
    assert "< --temperature 1.2" in err and "> --temperature 0.7" in err
    assert f"delete {loop.output}/epoch1/episodes" in err


@pytest.mark.parametrize("changed, stage", [("imitation.json", "imitation"), ("sft.json", "epoch1_rewards")])
def test_a_file_that_has_changed_stops_the_loop(loop, tmp_path, changed, stage):
    assert loop.run()[0] == 0
    with open(tmp_path / changed, "a") as file:
        file.write(" ")
    status, _, err = loop.run()
    assert status == 1 and f"{stage} has results of another command" in err


def test_what_was_made_with_a_model_that_was_made_anew_is_not_taken(loop):
    assert loop.run(epochs=2)[0] == 0
    shutil.rmtree(loop.output / "epoch1" / "model")
    status, _, err = loop.run(epochs=2)
    assert status == 1 and list(loop.calls()) == ["epoch1_train"]
    assert "epoch1_eval has results of another command" in err and "read OUTPUT/epoch1/model/train_results.json" in err


def test_a_training_that_was_begun_is_resumed_but_not_with_other_settings(loop):
    assert loop.run({"epoch1_train": "fail"})[0] == 1  # failed before it had a checkpoint: settings may change
    assert loop.run({"epoch1_train": "fail"}, clip_range=0.1)[0] == 1
    (loop.output / "epoch1" / "model" / "checkpoint-1").mkdir()
    status, _, err = loop.run()
    assert status == 1 and "> --clip_range 0.2" in err and loop.calls() == {}
    status, _, err = loop.run(clip_range=0.1)
    assert status == 0, err
    assert "--resume_from_checkpoint" in loop.calls()["epoch1_train"]
    assert not (loop.output / "epoch1" / "model" / "checkpoint-1").exists()


def test_without_imitation_data_the_model_plays_as_it_is(loop):
    assert loop.run(imitation_data="", eval_imitation="True")[0] == 0
    calls = loop.calls()
    assert "imitation" not in calls and calls["epoch1_play"].count(loop.settings["model"]) == 2
    assert (loop.output / "epoch1/episodes/imitation_sampling_words_results.json").is_file()
    assert calls["imitation_eval"][2] == f"imitation={loop.settings['model']}"
    assert f"imitation={loop.settings['model']}" in calls["epoch1_eval"]


# --- failures, kills, locks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_failing_stage_stops_the_loop_and_names_its_log(loop, stage):
    status, _, err = loop.run({stage: "fail"})
    assert status == 1
    assert list(loop.calls())[-1] == stage
    assert "something is wrong here" in err
    assert err.splitlines()[-1] == f"run_spag.sh: {stage} failed (exit 3); its log: {loop.output}/logs/{stage}.log"


def test_a_failing_report_does_not_stop_the_loop_and_is_told_again_at_its_end(loop):
    status, out, err = loop.run({"report": "fail"}, epochs=2)
    assert status == 0 and "finished; everything is in" in out
    assert list(loop.calls())[-2:] == ["epoch2_train", "epoch2_eval"]
    assert err == 3 * f"run_spag.sh: report failed; its log: {loop.output}/logs/report.log\n"


def test_a_report_is_made_for_an_epoch_that_ran_and_at_the_end(loop):
    def reports() -> int:
        return loop.calls_path.read_text().count('["report"')

    assert loop.run(epochs=3)[0] == 0 and reports() == 3
    shutil.rmtree(loop.output / "epoch2" / "eval")
    assert loop.run(epochs=3)[0] == 0 and reports() == 2


def test_the_end_of_a_log_is_shown_where_tr_refuses_half_a_character(loop, tmp_path):
    """As on macOS, in every locale but C."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tr").write_text(
        f'#!/bin/sh\ncase "$1$LC_ALL" in "\\r") echo "tr: Illegal byte sequence" >&2; exit 1 ;; esac\n'
        f'exec {shutil.which("tr")} "$@"\n'
    )
    (tmp_path / "bin" / "tr").chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LC_ALL": ""}
    status, _, err = loop.run({"imitation": "fail"}, environment=environment)
    assert status == 1 and "something is wrong here" in err and "Illegal" not in err
    assert err.splitlines()[-1].endswith("imitation.log")


@pytest.mark.parametrize("stage", STAGES)
def test_a_loop_killed_in_any_stage_goes_on_with_it(loop, stage):
    process = loop.start({stage: "sleep60"}, stderr=subprocess.DEVNULL)
    wait_until(lambda: stage in loop.calls(), process)
    kill_group(process)
    status, _, err = loop.run(report="False")
    assert status == 0, err
    assert tuple(loop.calls()) == STAGES[STAGES.index(stage) :]
    assert ("--resume_from_checkpoint" in loop.calls()[stage]) == ("--train_method" in loop.calls()[stage])


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_loop_ends_the_programs_that_it_started(loop, number, status):
    process = loop.start({"epoch1_play": "sleep60"})
    wait_until(lambda: "epoch1_play" in loop.calls(), process)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == status and "stopped in epoch1_play; the same command continues" in err
    assert users_of(loop.output) == []


def test_two_loops_do_not_work_in_one_folder(loop):
    process = loop.start({"epoch1_play": "sleep60"})
    wait_until(lambda: "epoch1_play" in loop.calls(), process)
    status, _, err = loop.run()
    assert status == 1 and "another loop, or a stage that it left behind, is at work here" in err
    os.kill(process.pid, signal.SIGKILL)  # the script alone: its stage is still at work
    assert loop.run()[0] == 1
    kill_group(process)
    assert loop.run()[0] == 0


def test_other_machines_wait_for_what_the_first_one_does_alone(loop):
    several = {"nnodes": 2, "rdzv_endpoint": "localhost:29500", "report": "False"}
    calls = loop.run(node_rank=0, **several), loop.calls()
    assert calls[0][0] == 0
    launch = " ".join(calls[1]["imitation"])
    assert "--nnodes 2 --rdzv_backend c10d --rdzv_endpoint localhost:29500 --rdzv_id spag-imitation" in launch
    assert "is_host=True" in launch and calls[1]["epoch1_rewards"][0].endswith("assign_rewards.py")
    shutil.rmtree(loop.output / "epoch1" / "rows")
    status, out, err = loop.run(node_rank=1, node_timeout=1, **several)
    assert status == 1 and "epoch1_rewards: waits for machine 0" in out and loop.calls() == {}
    assert "after 1 seconds. Is" in err and "that all machines share" in err


def test_a_terminal_shows_the_stages_last_progress_bar(loop):
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [SCRIPT, *flags_of(loop.settings)],
        env=loop.environment | {"STUB_TOLD": json.dumps({"epoch1_play": "sleep2.5"})},
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # of the terminal's end
        while chunk := os.read(controller, 1000):
            shown += chunk
    assert process.wait() == 0
    assert re.search(rb"\repoch1_play 0:00:0\d games:  45%\|####      \| 9/20", shown)


# --- settings ------------------------------------------------------------------------------------------------------


def test_every_problem_of_the_settings_is_told_before_any_work(loop, tmp_path):
    wrong = {"model": tmp_path / "none", "words": "none.txt", "epochs": 0, "kl": "much", "match": "fuzzy"}
    wrong |= {"global_batch": 30, "nproc": 4, "backend": "cloud", "eval_words": "held=none.txt"}
    wrong |= {"node_rank": 2, "train_args": "--lora_rank 16"}
    status, _, err = loop.run(**wrong)
    assert status == 2 and loop.calls() == {} and not loop.output.exists()
    for message in (
        f"--model {tmp_path}/none: no model folder (it has no config.json)",
        "--words none.txt: no such file",
        "--eval_words none.txt: no such file",
        "--epochs is '0'; it must be a whole number of at least 1",
        "--kl is 'much'; it must be a number of at least 0",
        f"--match is 'fuzzy'; it is one of {', '.join(taboo.MATCHES)}",
        "--backend is 'cloud'; it is one of auto, slots, generate",
        "--node_rank is 2; with --nnodes 1 it is at most 0",
        "--train_args has --lora_rank; make it a setting of the loop, which plays on with the merged model",
        "--global_batch 30 is no multiple of 4 processes x 1 machines x --train_batch 2 = 8 rows; change one of them",
    ):
        assert f"run_spag.sh: {message}" in err.splitlines()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--epocs", "2"], "unknown flag --epocs; --help lists them"),
        (["--model"], "--model needs a value"),
        (["a", "b"], "'a' belongs to no flag; several values of one flag go in quotes"),
    ],
)
def test_words_that_are_no_settings_are_refused(loop, words, message):
    done = subprocess.run([SCRIPT, *words], env=loop.environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"run_spag.sh: error: {message}\n")


def test_flags_win_over_the_environment_and_both_over_the_settings_file(loop, tmp_path):
    (tmp_path / "tiny.yaml").write_text(
        "# a comment\n\ntemperature: 0.9  # another\nTOP_K = 7\nmax_turns: '3'\nseed: 5\ntrain_args: --max_steps 3\n"
        "kl: 0.3\r\nprompts: configs/prompts.json # and a third"
    )
    given = {"environment": {"TOP_K": "8", "SEED": "6"}, "settings": tmp_path / "tiny.yaml", "seed": 7}
    status, _, err = loop.run(**given, prompts=ROOT / "configs/prompts.json")
    assert status == 0, err
    settings = json.loads((loop.output / "settings.json").read_text())
    names = ("TEMPERATURE", "TOP_K", "MAX_TURNS", "SEED", "TRAIN_ARGS", "KL", "EPOCHS")
    assert [settings[name] for name in names] == ["0.9", "8", "3", "7", "--max_steps 3", "0.3", "1"]
    given = loop.calls()["epoch1_train"]
    assert given[given.index("--max_steps") + 1] == "3" and "--max_steps" not in loop.calls()["imitation"]


def test_a_blank_in_the_output_folder_is_refused(loop, tmp_path):
    status, _, err = loop.run(output=tmp_path / "my results")
    assert (status, len(err.splitlines())) == (2, 1)
    assert f"--output '{tmp_path}/my results' holds a blank" in err and not (tmp_path / "my results").exists()


@pytest.mark.parametrize("gpus", ["0", "2", "8"])
def test_the_embedded_worlds_settings_fit_any_number_of_gpus(loop, gpus):
    own = {name: loop.settings[name] for name in ("model", "words", "output", "imitation_data", "sft_data")}
    loop.settings = own | {"settings": "configs/tiny.yaml", "epochs": 1}
    status, _, err = loop.run(environment={"STUB_GPUS": gpus})
    assert status == 0, err


def test_a_missing_torch_is_told_in_one_line(inputs, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: without what pip has installed
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for nproc in (1, "auto"):
        command = [SCRIPT, *flags_of(inputs | {"nproc": nproc})]
        done = subprocess.run(command, env=environment | {"PYTHON": str(python)}, capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "torch is not installed for" in done.stderr.splitlines()[0] and "name its PYTHON" in done.stderr


@pytest.mark.parametrize(
    "active, taken",
    [({}, ".venv"), ({"VIRTUAL_ENV": "/mine"}, "path"), ({"CONDA_DEFAULT_ENV": "mine"}, "path")],
)
def test_the_environment_of_the_checkout_is_taken_unless_another_is_active(tmp_path, active, taken):
    for name in ("run_spag.sh", "loop/stages.sh"):
        (tmp_path / "tools/loop").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    for folder in ("path", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "python").write_text(f"#!/bin/sh\necho {folder.split('/')[0]} >&2\nexit 9\n")
        (tmp_path / folder / "python").chmod(0o755)
    unset = ("PYTHON", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | active
    environment["PATH"] = f"{tmp_path}/path:{environment['PATH']}"
    done = subprocess.run([tmp_path / "tools/run_spag.sh"], env=environment, capture_output=True, text=True)
    assert done.stderr.splitlines()[0] == taken


@pytest.mark.parametrize(
    "line, message",
    [
        ("epocs: 2", "unknown setting epocs; --help lists them"),
        ("two words", "expected 'name: value', got: two words"),
    ],
)
def test_a_line_of_the_settings_file_that_is_no_setting_is_refused(loop, tmp_path, line, message):
    (tmp_path / "wrong.yaml").write_text(f"kl: 0.2\n{line}\n")
    status, _, err = loop.run(settings=tmp_path / "wrong.yaml")
    assert (status, err) == (2, f"run_spag.sh: error: {tmp_path / 'wrong.yaml'}:2: {message}\n")


def test_help_shows_every_setting_and_the_documentation_every_file():
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True)
    shown = set(re.findall(r"^  --(\w+) ", done.stdout, flags=re.MULTILINE))
    table = re.search(r'SETTINGS_TABLE="\\\n(.*?)"\n', Path(SCRIPT).read_text(), flags=re.DOTALL)[1]
    assert shown == {line.split("|")[0].lower() for line in table.splitlines()} and len(shown) > 40
    assert done.returncode == 0 and "default: 2e-6" in done.stdout
    documented = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    layout = re.findall(r"^  ([\w./]+) {2,}", done.stdout.split("OUTPUT holds")[1], flags=re.MULTILINE)
    assert len(layout) > 8 and [path for path in layout if f"`{path}`" not in documented] == []


# --- games, disk, devices ------------------------------------------------------------------------------------------


def test_the_first_words_are_repeated_for_several_games_each(tmp_path):
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbfart\n\n music\nbridge")
    for first, words in (("", "art\nmusic\nbridge\n"), ("2", "art\nmusic\n"), ("9", "art\nmusic\nbridge\n")):
        loop_support.word_list(str(tmp_path / "words.txt"), first, "2", str(tmp_path / "out.txt"))
        assert (tmp_path / "out.txt").read_text(encoding="utf-8") == 2 * words


def test_play_gets_the_first_words_so_many_times(loop):
    assert loop.run(games=2, games_per_word=3)[0] == 0
    given = loop.calls()["epoch1_play"]
    assert given[given.index("--data_path") + 1] == f"{loop.output}/words.txt" and "--max_games" not in given
    assert (loop.output / "words.txt").read_text() == 3 * "art\nmusic\n"
    shutil.rmtree(loop.output)
    assert loop.run(games=2)[0] == 0 and (loop.output / "words.txt").read_text() == "art\nmusic\n"


def test_the_disk_space_is_reckoned_from_the_models_parameters(tmp_path, tiny_model, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    parameters = loop_support.count_parameters(tiny_model)
    assert parameters == sum(each.numel() for each in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    assert loop_support.count_parameters("meta-llama/Llama-2-7b-hf") is None  # offline
    config = AutoConfig.from_pretrained(tiny_model)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **_: config)
    assert loop_support.count_parameters("meta-llama/Llama-2-7b-hf") == parameters
    (tmp_path / "words.txt").write_text("art\n\nmusic\nbridge\n")
    settings = {"EPOCHS": "3", "IMITATION_DATA": "rows.json", "PRECISION": "bf16", "DEEPSPEED": "z.json"}
    settings |= {"SAVE_STEPS": "0.2", "WORDS": str(tmp_path / "words.txt"), "GAMES": "2", "GAMES_PER_WORD": "10"}
    settings |= {"MAX_TURNS": "5", "MAX_NEW_TOKENS": "256", "MAX_LENGTH": "2048"}
    assert loop_support.disk_needed(settings, 7 * 10**9) == {
        "models": 4 * 14 * 10**9,
        "checkpoints": 2 * 98 * 10**9,
        "games and rows": 3 * 20 * (2 * 10 * 256 + 5 * 2048) * 4,
    }
    without = settings | {"DEEPSPEED": "none", "SAVE_STEPS": "0"}
    assert list(loop_support.disk_needed(without, 10**9).values())[:2] == [4 * 4 * 10**9, 0]


def test_a_loop_that_does_not_fit_on_the_disk_is_not_started(loop, tmp_path, tiny_model):
    """A model whose weights are a file of zeros that takes no space, but counts 10^13 parameters."""
    folder = tmp_path / "huge"
    shutil.copytree(tiny_model, folder)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [10**7, 10**6], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    status, _, err = loop.run(model=folder)
    assert status == 1 and loop.calls() == {}
    assert re.search(r"the disk space does not suffice: 320000\.0 GB at most .*--check_disk False starts all", err)
    assert loop.run(model=folder, check_disk="False")[0] == 0


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
@pytest.mark.parametrize("script", ["run_spag.sh", "quickstart.sh", "test.sh"])
def test_shellcheck_finds_nothing(script):
    done = subprocess.run(["shellcheck", "-x", f"tools/{script}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "script", ["run_spag.sh", "loop/stages.sh", "quickstart.sh", "loop/environment.sh", "test.sh"]
)
def test_scripts_use_nothing_that_bash_3_lacks(script):
    text = (ROOT / "tools" / script).read_text()
    assert not re.search(r"declare -A|local -A|mapfile|readarray|\$\{\w+(,,|\^\^|@)|wait -n|\|&|&>>|coproc", text)
