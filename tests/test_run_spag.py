"""The loop: its logic with a stub in the place of all programs, and once with the programs, killed and continued."""

import contextlib
import glob
import json
import os
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
from tools.flags import parse_flags
from tools.games.game import own_games
from tools.loop import fit, support
from tools.play_llm_game import Flags as PlayFlags

SCRIPT = str(ROOT / "tools" / "run_spag.sh")
PLAY_FAILED = "epoch1_play failed (exit 3); its log: "
STAGES = ("imitation", "epoch1_play", "epoch1_rewards", "epoch1_train", "epoch1_eval", "report")
SETTLED = {"nproc": 1, "precision": "fp32", "deepspeed": "none", "gradient_checkpointing": "False"}

# Stands in for every program of the loop: notes the call and its stage, speaks, does as it is told.
STUB = """
import json, os, signal, sys

words = sys.argv[1:]
told = json.loads(os.environ.get("STUB_TOLD", "{}"))
at = next(i for i, word in enumerate(words) if word.endswith(".py") or word == "my.rewards")
flags = {w[2:]: v for w, v in zip(words[at:], [*words[at + 1:], ""]) if w.startswith("--")}
names = {"play_llm_game.py": "play", "evaluate_games.py": "eval", "train.py": "train", "report.py": "report"}
name = names.get(os.path.basename(words[at]), "rewards")
folder = flags.get("output_dir") or os.path.dirname(flags.get("output_data_path", ""))
stage = f"{os.path.basename(os.path.dirname(folder))}_{name}".replace("imitation_train", "imitation").lstrip("_")
with open(os.environ["STUB_CALLS"], "a") as file:
    file.write(json.dumps([stage, words]) + "\\n")
print("\\x1b[Agames:  45%|####      | 9/20", end="\\r", flush=True)
print(f"{stage} speaks", file=sys.stderr)
if name == "train":
    os.makedirs(f"{folder}/checkpoint-1", exist_ok=True)
if told.get(stage) == "fail":
    print("something is wrong here")
    sys.exit(3)
if told.get(stage) == "warn":
    print(f"12:00:00 rank 0 WARNING {stage} saw something\\n" * 2)
if told.get(stage) == "hold on":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if told.get(stage) in ("sleep", "hold on"):
    os.system("sleep 60; true")
print("last words")
"""


def flags_of(settings: dict) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def inputs(tmp_path, tiny_model) -> dict:
    """Settings of a loop of one epoch over a few words."""
    row = {"query": "Say: ", "target": "I know the word! It is `art`!", "reward": 1.0, "weight": 1.0}
    files = {
        "imitation.json": json.dumps([row | {"role": "defender"}] * 8),
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
    """The script with the stub in the place of all programs but its own helpers."""

    def __init__(self, folder: Path, settings: dict):
        self.settings, self.output, self.calls_path = settings, settings["output"], folder / "calls"
        (folder / "stub.py").write_text(STUB)
        gpus = "import os, sys; from tools.loop import support; gpus = int(os.environ['GPUS']); "
        gpus += "support.gpu_memory = lambda: gpus * [int(os.environ.get('GPU_GIB', 80)) << 30]"
        wrapper = folder / "python"
        wrapper.write_text(
            f'#!/bin/sh\npython="{python()}"\ncase "$1$GPUS" in\n'
            f'  */tools/loop/support.py[0-9]*) shift; exec "$python" -c "{gpus}; support.main(sys.argv[1:])" "$@" ;;\n'
            f'  */tools/loop/*.py*) exec "$python" "$@" ;;\nesac\nexec {sys.executable} -IS "{folder}/stub.py" "$@"\n'
        )
        wrapper.chmod(0o755)
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.environment |= {"PYTHON": str(wrapper), "STUB_CALLS": str(self.calls_path)}

    def start(self, told: dict | None = None, environment: dict | None = None, cwd: Path = ROOT, **changes):
        self.calls_path.write_text("")
        return subprocess.Popen(
            [SCRIPT, *flags_of(self.settings | changes)],
            env=self.environment | {"STUB_TOLD": json.dumps(told or {})} | (environment or {}),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *args, **kwargs) -> tuple[int, str, str]:
        """Run it to its end; (exit status, output, errors)."""
        process = self.start(*args, **kwargs)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def finish(self, **changes) -> dict[str, list[str]]:
        """Run it to its good end; the calls."""
        status, _, err = self.run(**changes)
        assert status == 0, err
        return self.calls()

    def calls(self) -> dict[str, list[str]]:
        """The stages that were run, in their order, and the words of their commands."""
        return dict(json.loads(line) for line in self.calls_path.read_text().splitlines())

    def stored(self) -> dict[str, str]:
        return json.loads((self.output / "settings.json").read_text())


@pytest.fixture
def loop(tmp_path, inputs) -> Loop:
    return Loop(tmp_path, inputs)


def value_of(flag: str, words: list[str]) -> str:
    return words[words.index(f"--{flag}") + 1]


def wait_until(condition, process: subprocess.Popen, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def kill_all(process: subprocess.Popen) -> None:
    """Kill the loop and what it has started, as the end of a job does."""
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()


def users_of(folder: Path) -> list[str]:
    """Command lines of the processes that name this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                found.append(" ".join(process.cmdline()))
    return found


# --- the stages ----------------------------------------------------------------------------------------------------


def test_stages_run_in_order_and_each_epoch_starts_from_the_model_before(loop):
    calls = loop.finish(epochs=2)
    second = ("epoch2_play", "epoch2_rewards", "epoch2_train", "epoch2_eval")
    stages = [json.loads(line)[0] for line in loop.calls_path.read_text().splitlines()]
    assert stages == [*STAGES, *second, "report"]
    output = str(loop.output)
    for number, before in ((1, "imitation"), (2, "epoch1")):
        model = f"{output}/{before}/model"
        play, train = calls[f"epoch{number}_play"], calls[f"epoch{number}_train"]
        assert value_of("attacker_model_name_or_path", play) == value_of("defender_model_name_or_path", play) == model
        assert value_of("model_name_or_path", train) == value_of("ref_model_name_or_path", train) == model
        assert value_of("output_dir", train) == f"{output}/epoch{number}/model"
        episodes = f"{output}/epoch{number}/episodes/{before}_sampling_words_results.json"
        stem = [value_of(flag, play) for flag in ("output_dir", "model_prefix", "task_type", "data_suffix")]
        assert f"{stem[0]}/{'_'.join(stem[1:])}_results.json" == episodes
        assert value_of("input_data_path", calls[f"epoch{number}_rewards"]) == episodes
        rows = value_of("output_data_path", calls[f"epoch{number}_rewards"])
        assert value_of("train_data_path", train) == rows == f"{output}/epoch{number}/rows/rows.json"
        assert {value_of("seed", calls[f"epoch{number}_{name}"]) for name in ("play", "rewards", "train")} == {
            str(42 + number)
        }
    players = calls["epoch2_eval"][calls["epoch2_eval"].index("--players") + 1 :][:2]
    assert players == [f"imitation={output}/imitation/model", f"epoch2={output}/epoch2/model"]
    words = calls["epoch2_eval"][calls["epoch2_eval"].index("--words") + 1 :][:2]
    assert words == loop.settings["eval_words"].split()
    assert not list(loop.output.glob("*/model/checkpoint-*"))  # deleted when the training had ended


def test_the_papers_settings_reach_the_programs_and_are_accepted(loop, tmp_path):
    gpu = {"precision": "bf16", "gradient_checkpointing": "True", "nproc": 8, "global_batch": 128}
    calls = loop.finish(**gpu)
    for stage, wanted in {
        "imitation": "--train_method SFTwithKL --lm_kl_coeff 0.1 --learning_rate 5e-6 --num_train_epochs 1",
        "epoch1_train": "--train_method OfflinePO --lm_kl_coeff 0.2 --lm_sft_coeff 0.5 --learning_rate 2e-6 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048 --bf16 True --tf32 True",
        "epoch1_play": "--game taboo --max_turns 5 --max_new_tokens 256 --temperature 1.2 --top_k 50 --bf16 True",
        "epoch1_rewards": "--game taboo --decay_weight 0.8 --min_game_rows 128 "
        f"--sft_data_path {tmp_path / 'sft.json'}",
    }.items():
        given = " ".join(calls[stage])
        assert all(f"--{pair}" in given for pair in wanted.removeprefix("--").split(" --")), (stage, given)
    for stage in ("imitation", "epoch1_play", "epoch1_train", "epoch1_eval"):
        assert calls[stage][:5] == ["-m", "torch.distributed.run", "--nproc_per_node", "8", "--standalone"]
    flags = calls["imitation"][calls["imitation"].index(str(ROOT / "train.py")) + 1 :]
    parsed = arguments.parse_arguments([*flags, "--use_cpu", "True"])
    assert parsed.save_steps == 0.2 and parsed.save_total_limit == 1
    play = calls["epoch1_play"]
    parsed = parse_flags(PlayFlags, play[play.index(str(ROOT / "tools/play_llm_game.py")) + 1 :], description="")
    assert (parsed.max_turns, parsed.seed, parsed.engine, parsed.bf16) == (5, 43, "auto", True)


def test_lora_plays_on_with_the_merged_model(loop, packages):
    calls = loop.finish(lora_rank=4, epochs=2, environment=packages)
    for stage in ("imitation", "epoch1_train", "epoch2_train"):
        assert "--lora_rank 4 --lora_merge True" in " ".join(calls[stage])
    assert calls["epoch2_play"].count(f"{loop.output}/epoch1/model/merged") == 2
    assert f"imitation={loop.output}/imitation/model/merged" in calls["epoch2_eval"]
    assert value_of("model_prefix", calls["epoch2_play"]) == "epoch1"


def test_without_imitation_data_the_model_plays_as_it_is(loop):
    calls = loop.finish(imitation_data="", eval_imitation="True")
    assert list(calls) == ["imitation_eval", *STAGES[1:]]
    assert calls["epoch1_play"].count(loop.settings["model"]) == 2
    assert value_of("model_prefix", calls["epoch1_play"]) == "imitation"
    assert calls["imitation_eval"][2:4] == [f"imitation={loop.settings['model']}", "--against"]
    assert f"imitation={loop.settings['model']}" in calls["epoch1_eval"]


def test_a_match_is_played_after_every_so_many_epochs_or_never(loop):
    matches = [stage for stage in loop.finish(epochs=5, eval_every=2) if "eval" in stage]
    assert matches == ["epoch2_eval", "epoch4_eval"]
    assert not any("eval" in stage for stage in loop.finish(eval_words="", eval_imitation="True"))


def test_first_episodes_stand_in_for_the_play_of_epoch_1(loop, tmp_path):
    (tmp_path / "games.json").write_text("[]")
    calls = loop.finish(epochs=2, first_episodes=tmp_path / "games.json")
    assert "epoch1_play" not in calls and "epoch2_play" in calls
    assert value_of("input_data_path", calls["epoch1_rewards"]) == str(tmp_path / "games.json")


def test_rows_are_made_by_the_program_that_rewards_names(loop, tmp_path):
    assert loop.finish(cwd=tmp_path)["epoch1_rewards"][0] == str(ROOT / "tools/assign_rewards.py")
    words = loop.finish(rewards="-m my.rewards coin --x 1")["epoch1_rewards"]
    assert words[:5] == ["-m", "my.rewards", "coin", "--x", "1"] and "--decay_weight" in words


def test_the_loop_ends_after_the_stage_that_until_names(loop):
    assert list(loop.finish(epochs=2, until="epoch1_train")) == list(STAGES[:4])
    for until, changes in (("epoch3_play", {}), ("epoch1_rewards", {}), ("imitation", {"imitation_data": ""})):
        status, _, err = loop.run(epochs=2, until=until, **changes)
        assert status == 2 and f"--until {until}: imitation, epochK_play or epochK_train, one of this" in err


def test_another_game_reaches_all_that_play_or_judge(loop, tmp_path):
    (tmp_path / "words.txt").write_text("dog\n")
    calls = loop.finish(game="twenty_questions", eval_words=tmp_path / "words.txt")
    for stage in ("epoch1_play", "epoch1_rewards", "epoch1_eval", "report"):
        assert value_of("game", calls[stage]) == "twenty_questions"
    assert value_of("max_turns", calls["epoch1_play"]) == "20"
    calls = loop.finish(output=tmp_path / "other", game_options="match=word", max_turns=3)
    assert value_of("game_options", calls["epoch1_rewards"]) == "match=word"
    assert value_of("max_turns", calls["epoch1_play"]) == "3"


def test_play_gets_the_first_words_so_many_times(loop, tmp_path):
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbfart\n\n music\nbridge")
    for number, (settings, words) in enumerate(
        [
            ({}, "art\nmusic\nbridge\n"),
            ({"games": 2}, "art\nmusic\n"),
            ({"games": 9, "games_per_word": 2}, 2 * "art\nmusic\nbridge\n"),
        ]
    ):
        output = tmp_path / f"out{number}"
        calls = loop.finish(**settings, output=output)
        assert value_of("data_path", calls["epoch1_play"]) == f"{output}/words.txt"
        assert (output / "words.txt").read_text() == words


# --- failures, signals, several machines ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_failing_stage_stops_the_loop_and_names_its_log(loop, stage):
    status, out, err = loop.run({stage: "fail"})
    assert status == 1 and list(loop.calls())[-1] == stage
    log = loop.output / "logs" / f"{stage}.log"
    assert "something is wrong here" in out and "something is wrong here" in log.read_text()
    assert err.splitlines()[-1] == f"run_spag.sh: {stage} failed (exit 3); its log: {log}"
    if stage == "epoch1_train":
        assert (loop.output / "epoch1/model/checkpoint-1").is_dir()  # to go on from


def test_a_failing_report_does_not_stop_the_loop(loop):
    status, out, err = loop.run({"report": "fail"}, epochs=2)
    assert status == 0 and "finished; everything is in" in out
    assert list(loop.calls())[-2:] == ["epoch2_train", "epoch2_eval"]
    failed = f"run_spag.sh: report failed (exit 3); its log: {loop.output}/logs/report.log"
    assert err.splitlines().count(failed) == 2


def test_logs_hold_the_command_and_all_output_of_each_start_and_the_terminal_shows_it(loop):
    _, out, _ = loop.run()
    loop.finish()
    for stage in STAGES:
        starts = (loop.output / "logs" / f"{stage}.log").read_text().split("\n=== ")[1:]
        assert len(starts) == 2 and all(f"{stage} speaks\n" in text and "last words\n" in text for text in starts)
        assert all(str(loop.output) in text.splitlines()[0] for text in starts)
        assert f"{stage} speaks\n" in out and f"{stage}; its log: {loop.output}/logs/{stage}.log\n" in out
    assert "games:  45%|####      | 9/20\n" in out  # a progress bar's carriage return, read as text


def test_warnings_of_the_stages_are_repeated_at_the_end(loop):
    told = {"imitation": "warn", "epoch1_train": "warn"}
    both = ["Warnings:", "  imitation: imitation saw something", "  epoch1_train: epoch1_train saw something"]
    assert loop.run(told)[2].splitlines()[-3:] == both
    assert "Warnings:" not in loop.run()[2]  # those of this start
    _, _, err = loop.run({"imitation": "warn", "epoch1_play": "fail"})
    assert err.splitlines()[-3:-1] == [f"run_spag.sh: {PLAY_FAILED}{loop.output}/logs/epoch1_play.log", both[0]]


def test_the_end_of_a_program_that_fails_is_shown_before_the_loop_speaks(loop):
    process = subprocess.run(
        [SCRIPT, *flags_of(loop.settings)],
        env=loop.environment | {"STUB_TOLD": '{"imitation": "fail"}'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert [line for line in process.stdout.splitlines() if line][-2] == "something is wrong here"


@pytest.mark.parametrize("stage", ["imitation", "epoch1_rewards"])
def test_a_loop_that_was_killed_asks_all_programs_again(loop, stage):
    process = loop.start({stage: "sleep"})
    wait_until(lambda: stage in loop.calls(), process)
    kill_all(process)
    assert tuple(loop.finish()) == STAGES


@pytest.mark.parametrize(
    "number, status, does",
    [
        ("SIGINT", 130, "sleep"),
        ("SIGTERM", 143, "sleep"),
        ("SIGHUP", 143, "sleep"),
        ("SIGUSR1", 143, "sleep"),
        ("SIGTERM", 143, "hold on"),  # against SIGTERM
    ],
)
def test_an_interrupted_loop_ends_the_programs_that_it_started(loop, number, status, does):
    process = loop.start({"epoch1_play": does})
    wait_until(lambda: "epoch1_play" in loop.calls(), process)
    children = psutil.Process(process.pid).children
    (sleep,) = wait_until(lambda: [child for child in children(True) if child.name() == "sleep"], process)
    process.send_signal(signal.Signals[number])
    started = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 10
    assert process.returncode == status and "run_spag.sh: stopped in epoch1_play; the same command continues" in err
    assert users_of(loop.output) == []
    assert not sleep.is_running() or sleep.status() == psutil.STATUS_ZOMBIE  # whom nobody has asked for yet


PROGRAM = "import os, time, utils; utils.end_with_launcher(); print('pid', os.getpid(), flush=True); time.sleep(60)"


def test_a_program_ends_with_the_script_when_that_alone_is_killed(tmp_path):
    (tmp_path / "logs").mkdir()
    script = f'root={ROOT}; . tools/loop/run.sh; run stage "{sys.executable}" -c "{PROGRAM}"'
    environment = os.environ | {"OUTPUT": str(tmp_path), "NODE_RANK": "0"}
    process = subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    program = psutil.Process(int(next(line for line in process.stdout if line.startswith("pid ")).split()[1]))
    assert program.parent().pid != process.pid
    process.kill()
    process.wait()
    program.wait(timeout=10)
    process.communicate()  # all have closed their output


def test_other_machines_leave_rewards_and_report_to_the_first_one(loop):
    several = {"nnodes": 2, "rdzv_endpoint": "localhost:29500", "node_timeout": 77}
    other = loop.finish(node_rank=1, **several)  # it may come first
    assert sorted(path.name for path in loop.output.iterdir()) == ["epoch1", "imitation", "logs"]
    first = loop.finish(node_rank=0, **several)
    assert tuple(first) == STAGES
    assert tuple(other) == ("imitation", "epoch1_play", "epoch1_train", "epoch1_eval")
    for stage, words in other.items():
        launch = " ".join(first[stage])
        assert f"--nnodes 2 --rdzv_backend c10d --rdzv_endpoint localhost:29500 --rdzv_id spag-{stage} " in launch
        assert "--rdzv_conf is_host=1,join_timeout=77,read_timeout=77 " in launch
        assert " ".join(words) == launch.replace("is_host=1", "is_host=0")
        assert (loop.output / "logs" / f"{stage}.node1.log").is_file()
    assert not (loop.output / "imitation/model/checkpoint-1").exists()  # that of the other machine: the first deletes


# --- settings ------------------------------------------------------------------------------------------------------


def test_every_problem_of_the_settings_is_told_before_any_work(loop, tmp_path):
    (tmp_path / "empty.json").write_text("")
    wrong = {"words": "none.txt", "epochs": 0, "kl": "much", "temperature": 0, "deepspeed": "none.json"}
    wrong |= {"global_batch": 30, "nproc": 4, "engine": "cloud", "eval_words": "held=none.txt", "epocs": 2}
    wrong |= {"sft_data": tmp_path / "empty.json"}
    wrong |= {"first_episodes": "none.json", "until": "epoch7_play", "max_turns": "-1", "report": "yes"}
    status, _, err = loop.run(**wrong)
    assert status == 2 and loop.calls() == {} and not loop.output.exists()
    for message in (
        "--words none.txt: no such file",
        "--eval_words none.txt: no such file",
        "--first_episodes none.json: no such file",
        f"--sft_data {tmp_path}/empty.json: the file is empty",
        "--epochs is '0'; it must be a whole number of at least 1",
        "--max_turns is '-1'; it must be a whole number of at least 1, or empty",
        "--kl is 'much'; it must be a number of at least 0",
        "--temperature is '0'; it must be a number above 0",
        "--deepspeed none.json: no such file",
        "--engine is 'cloud'; it must be auto, vllm, slots or generate",
        "--report is 'yes'; it must be True or False",
        "--until epoch7_play: imitation, epochK_play or epochK_train, one of this loop's stages",
        "--global_batch 30 is no multiple of 4 processes x 1 machines x --train_batch 2 = 8 rows; change one of them",
        "unknown flag --epocs; did you mean --epochs? (--help lists them)",
    ):
        assert f"run_spag.sh: {message}" in err.splitlines()
    assert "a" not in {line[:1] for line in err.splitlines()}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"game": "chess"}, f"--game chess: there is {', '.join(own_games())}; your own is FILE.py:Class"),
        ({"game_options": "speed=2"}, "--game_options speed: Adversarial Taboo has match"),
        ({"prompts": "none.json"}, "none.json: no such file"),
        ({"match": "fuzzy"}, "match is 'fuzzy'; it must be one of substring, word"),
        ({"decay_weight": 1.5}, "--decay_weight is '1.5'; it must be a number above 0 and at most 1"),
        ({"kl": "inf"}, "--kl is 'inf'; it must be a number of at least 0"),
        ({"max_length": 9}, "--max_length 9 leaves no room for a prompt: it must be larger than --max_new_tokens 256"),
        ({"eval_seeds": "0,1"}, "--eval_seeds is '0,1'; it must be whole numbers, separated by blanks"),
        ({"nnodes": 2}, "--rdzv_endpoint is missing: with several machines it is host:port of machine 0"),
    ],
)
def test_what_is_wrong_with_the_game_or_the_machines_is_told_before_any_work(loop, settings, message):
    status, _, err = loop.run(**settings)
    assert status == 2 and loop.calls() == {} and f"run_spag.sh: {message}" in err.splitlines()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--output"], "--output needs a value"),
        (["a", "b"], "'a' belongs to no flag; several values of one flag go in quotes"),
        (["--path", "x"], "unknown flag --path; did you mean --until? (--help lists them)"),
    ],
)
def test_words_that_are_no_settings_are_refused(loop, words, message):
    environment = loop.environment | {"GPUS": "0"}
    done = subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[0].startswith(f"run_spag.sh: {message.split(';')[0]}")


def test_flags_win_over_the_environment_and_both_over_the_settings_file(loop, tmp_path):
    (tmp_path / "my settings.sh").write_text(
        '# a comment\n: "${TEMPERATURE:=0.9}"  # another\n: "${TOP_K:=7}"\n: "${MAX_TURNS:=3}"\n: "${SEED:=5}"\n'
        ': "${TRAIN_ARGS:=--max_steps 3\n  --x *}"\n: "${KL:=0.3}"\n: "${REWARD_ARGS:=--training_prompt play}"\n'
    )
    given = {"settings": tmp_path / "my settings.sh", "seed": 7, "reward_args": ""}
    calls = loop.finish(environment={"TOP_K": "8", "SEED": "6", "ENGINE": "slots"}, **given)
    names = ("TEMPERATURE", "TOP_K", "MAX_TURNS", "SEED", "KL", "EPOCHS", "REWARD_ARGS", "ENGINE")
    assert [loop.stored()[name] for name in names] == ["0.9", "8", "3", "7", "0.3", "1", "", "slots"]
    assert calls["epoch1_train"][-4:] == ["--max_steps", "3", "--x", "*"] and "--max_steps" not in calls["imitation"]


def test_numbers_are_read_in_base_10_and_once(loop):
    calls = loop.finish(global_batch="0100", train_batch="010", seed="08", epochs="01", nproc="02", save_steps="0.0")
    train = calls["epoch1_train"]
    assert value_of("gradient_accumulation_steps", train) == "5" and value_of("save_strategy", train) == "no"
    assert value_of("per_device_train_batch_size", train) == value_of("per_device_eval_batch_size", train) == "10"
    assert value_of("seed", train) == "9" and value_of("nproc_per_node", train) == "2"
    assert [loop.stored()[name] for name in ("GLOBAL_BATCH", "SEED", "EPOCHS")] == ["100", "8", "1"]


def test_values_are_data_not_shell(loop, tmp_path):
    output = tmp_path / "my $(touch results); `x` 'y'"
    calls = loop.finish(output=output, train_args=f"--x $(touch {tmp_path}/made) * \"'", play_args="--y ?")
    assert calls["epoch1_train"][-5:] == ["--x", "$(touch", f"{tmp_path}/made)", "*", "\"'"]
    assert calls["epoch1_play"][-2:] == ["--y", "?"]
    assert (output / "logs/epoch1_train.log").is_file() and not (tmp_path / "made").exists()


@pytest.mark.parametrize("gpus", ["0", "2", "8"])
def test_the_embedded_worlds_settings_fit_any_number_of_gpus(loop, gpus):
    own = {name: loop.settings[name] for name in ("model", "words", "output", "imitation_data", "sft_data")}
    loop.settings = own | {"settings": ROOT / "configs/tiny.sh", "epochs": 1}
    loop.finish(environment={"GPUS": gpus})
    assert loop.stored()["NPROC"] == "1" and loop.stored()["PROMPTS"] == f"{ROOT}/data/tiny/prompts.json"


@pytest.mark.parametrize(
    "gpus, choices", [("0", ["1", "fp32", "none", "False"]), ("1", ["1", "bf16", "none", "True"])]
)
def test_automatic_choices_follow_the_gpus(loop, gpus, choices):
    for name in SETTLED:
        del loop.settings[name]
    calls = loop.finish(environment={"GPUS": gpus}, global_batch=128)
    names = ("NPROC", "PRECISION", "DEEPSPEED", "GRADIENT_CHECKPOINTING")
    assert [loop.stored()[name] for name in names] == choices
    assert ("--bf16" in calls["epoch1_play"]) == (gpus == "1")


# --- what fits on the GPUs, and what that needs ----------------------------------------------------------------------


def test_gpus_that_pytorch_cannot_use_are_told(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert support.gpu_memory() == [] and "WARNING there are GPUs, but the PyTorch of" in capsys.readouterr().err


@pytest.fixture
def large_model(tmp_path, tiny_model) -> str:
    """A folder whose weights are a header without tensors: 6.7 billion parameters."""
    folder = tmp_path / "large"
    shutil.copytree(tiny_model, folder)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [67000, 100000], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(folder)


@pytest.fixture
def packages(tmp_path) -> dict[str, str]:
    """Environment with stand-ins of DeepSpeed and peft, in the folder `packages`."""
    for name in ("deepspeed", "deepspeed/ops"):
        (tmp_path / "packages" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "packages" / name / "__init__.py").write_text("")
    builder = "class CPUAdamBuilder:\n    def load(self):\n        print('compiled')\n"
    (tmp_path / "packages/deepspeed/ops/op_builder.py").write_text(builder)
    (tmp_path / "packages/peft.py").write_text("")
    return {"PYTHONPATH": str(tmp_path / "packages"), "GPUS": "8"}


@pytest.mark.parametrize(
    "gpus, gib, file", [(8, 80, "zero2.json"), (8, 24, "zero3.json"), (4, 24, "default_offload_opt_param.json")]
)
def test_deepspeed_is_chosen_by_what_fits_the_gpus(loop, large_model, packages, gpus, gib, file):
    environment = packages | {"GPUS": str(gpus), "GPU_GIB": str(gib)}
    wanted = {"model": large_model, "check_disk": "False", "global_batch": 128, "nproc": "auto"}
    status, _, err = loop.run(environment=environment, **wanted, deepspeed="auto", gradient_checkpointing="True")
    assert status == 0 and loop.stored()["DEEPSPEED"] == str(ROOT / "configs" / file)
    assert value_of("deepspeed", loop.calls()["epoch1_train"]) == str(ROOT / "configs" / file)
    assert f"; computed for {gpus} GPUs of {gib} GiB: none 1" in err and "zero3 " in err
    chosen_by_hand = loop.finish(environment=environment, **wanted, deepspeed=ROOT / "configs/zero3.json")
    assert value_of("deepspeed", chosen_by_hand["epoch1_train"]) == str(ROOT / "configs/zero3.json")


def test_an_automatic_choice_is_kept_until_its_training_ends(loop, large_model, packages):
    begun = {"arguments": {"deepspeed": "configs/zero3.json"}}
    (loop.output / "epoch1/model/checkpoint-3").mkdir(parents=True)
    (loop.output / "epoch1/model/settings.json").write_text(json.dumps(begun))
    wanted = {"model": large_model, "check_disk": "False", "deepspeed": "auto", "global_batch": 128, "nproc": 8}
    status, _, err = loop.run({"epoch1_train": "fail"}, environment=packages, **wanted)
    assert status == 1 and f"DeepSpeed: configs/zero3.json, as in {loop.output}/epoch1/model/settings.json" in err
    assert value_of("deepspeed", loop.calls()["epoch1_train"]) == "configs/zero3.json"
    loop.finish(environment=packages, **wanted)  # whose training ends
    assert value_of("deepspeed", loop.finish(environment=packages, **wanted)["epoch1_train"]).endswith("zero2.json")


def test_what_fits_is_what_the_table_of_the_readme_says():
    assert "\n".join(fit.table()) in (ROOT / "tools/loop/README.md").read_text(encoding="utf-8")
    ways = [fit.choose(6.7e9, gpus, 80 << 30)[0] for gpus in (1, 8, 32)]
    assert ways == ["offload", "zero2", "zero2"]
    needed = fit.choose(6.7e9, 8, 80 << 30)[1]
    assert 14 << 30 < needed["zero3"] < 21 << 30 and 36 << 30 < needed["zero2"] < 42 << 30
    for changes in ({"rows": 4}, {"length": 4096}, {"checkpointing": False}):
        assert fit.gpu_bytes("zero3", 6.7e9, 8, **changes) > needed["zero3"]
    assert fit.choose(6.7e9, 1, 24 << 30, lora=True)[0] == "none"


@pytest.mark.parametrize(
    "place, text, message",
    [
        (
            "deepspeed/__init__.py",
            "raise RuntimeError('no CUDA_HOME')",
            "deepspeed cannot be imported: RuntimeError",
        ),
        (
            "deepspeed/ops/op_builder.py",
            "raise OSError('no g++')",
            "compile its CPU Adam: OSError: no g++. It",
        ),
        (
            "peft.py",
            "import nowhere",
            "peft cannot be imported: ModuleNotFoundError: No module",
        ),
    ],
)
def test_what_cannot_be_imported_or_compiled_is_told_before_any_work(loop, tmp_path, packages, place, text, message):
    (tmp_path / "packages" / place).write_text(text)
    settings = {"deepspeed": ROOT / "configs/default_offload_opt_param.json", "lora_rank": 4 * ("peft" in place) or ""}
    status, _, err = loop.run(environment=packages, **settings)
    assert status == 2 and loop.calls() == {} and not loop.output.exists()
    assert err.splitlines()[-1].startswith("run_spag.sh: ") and message in err.splitlines()[-1]


def test_a_signal_while_it_checks_ends_the_loop(loop, tmp_path, packages):
    slow = f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(60)"
    (tmp_path / "packages/peft.py").write_text(slow)
    process = loop.start(environment=packages, lora_rank=4)
    wait_until((tmp_path / "begun").exists, process)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "run_spag.sh: stopped; the same" in err and time.monotonic() - started < 10
    assert users_of(loop.output) == [] and loop.calls() == {}


def test_vllm_is_looked_for_before_any_work_and_handed_on(loop, tmp_path):
    status, _, err = loop.run(engine="vllm", environment={"VLLM": "/nowhere/vllm"})
    assert status == 2 and loop.calls() == {} and "--engine vllm: there is no '/nowhere/vllm' to run" in err
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    calls = loop.finish(engine="vllm", environment={"VLLM": str(tmp_path / "vllm")})
    assert value_of("engine", calls["epoch1_play"]) == value_of("engine", calls["epoch1_eval"]) == "vllm"
    loop.finish(engine="vllm", environment={"PATH": "/usr/bin:/bin", "VLLM": str(tmp_path / "vllm")})


def test_what_is_not_installed_is_told_in_one_line(inputs, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: without what pip has installed
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for changes in ({"nproc": "auto"}, {"lora_rank": 4, "deepspeed": ROOT / "configs/zero2.json"}):
        command = [SCRIPT, *flags_of(inputs | changes)]
        done = subprocess.run(command, env=environment | {"PYTHON": str(python)}, capture_output=True, text=True)
        lines = done.stderr.splitlines()
        assert done.returncode == 2 and "torch is not installed; " in lines[0] and "another one's PYTHON" in lines[0]
        assert [line.split()[1] for line in lines] == ["torch", "transformers"]


@pytest.mark.parametrize(
    "active, taken",
    [({}, ".venv"), ({"VIRTUAL_ENV": "/mine"}, "path"), ({"CONDA_DEFAULT_ENV": "mine"}, "path")],
)
def test_the_environment_of_the_checkout_is_taken_unless_another_is_active(tmp_path, active, taken):
    for name in ("run_spag.sh", "loop/run.sh"):
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
    [(': "${EPOCS:=2}"', ":2: unknown setting EPOCS; --help lists them"), ("epochs: 2", "epochs:: command not found")],
)
def test_a_line_of_the_settings_file_that_is_no_setting_is_refused(loop, tmp_path, line, message):
    (tmp_path / "wrong.sh").write_text(f': "${{KL:=0.2}}"\n{line}\n: "${{KL:=0.2}}"\n')
    status, _, err = loop.run(settings=tmp_path / "wrong.sh")
    assert status in (2, 127) and loop.calls() == {} and not loop.output.exists()
    assert message in err and f"{tmp_path / 'wrong.sh'}:" in err


def test_a_settings_file_that_is_not_there_is_refused(loop):
    status, _, err = loop.run(settings="none.sh")
    assert status == 1 and "none.sh: No such file" in err and not loop.output.exists()


def test_help_shows_every_setting_and_every_file_of_the_loop_is_documented(loop):
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True)
    shown = set(re.findall(r"^  --(\w+) ", done.stdout, flags=re.MULTILINE))
    loop.finish()
    assert shown == {name.lower() for name in loop.stored()} and len(shown) > 50
    assert re.search(r"--learning_rate +learning rate of self-play \(default: 2e-6\)\n", done.stdout)
    documented = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    written = {path.relative_to(loop.output) for path in loop.output.rglob("*") if path.is_file()}
    assert {str(path) for path in written if len(path.parts) == 1} == {"settings.json", "words.txt"}
    for path in ("settings.json", "words.txt", "report.html", "logs/STAGE.log", "imitation/model/", "epochK/eval/"):
        assert f"`{path}`" in documented


# --- what is there already -----------------------------------------------------------------------------------------


def test_a_refused_start_leaves_settings_and_words_of_the_loop_as_they_are(loop):
    loop.finish(report="False")
    before = loop.stored()
    assert loop.run({"epoch1_play": "fail"}, temperature=0.7)[0] == 1  # as the program does
    assert loop.stored() == before
    status, _, err = loop.run(games=1, temperature=0.7)
    assert status == 2 and loop.calls() == {} and loop.stored() == before
    assert f"{loop.output}/words.txt: not the words that --words, --games and --games_per_word say" in err
    assert (loop.output / "words.txt").read_text() == "art\nmusic\nbridge\n"


def test_a_loop_goes_on_for_more_epochs_and_then_says_so(loop):
    loop.finish()
    assert list(loop.finish(epochs=2))[-4:] == ["epoch2_play", "epoch2_rewards", "epoch2_train", "epoch2_eval"]
    assert loop.stored()["EPOCHS"] == "2"


def test_the_disk_space_is_reckoned_from_the_models_parameters(tiny_model, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    parameters = fit.count_parameters(tiny_model)
    assert parameters == sum(each.numel() for each in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    assert fit.count_parameters("meta-llama/Llama-2-7b-hf") is None  # offline
    config = AutoConfig.from_pretrained(tiny_model)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **_: config)
    assert fit.count_parameters("meta-llama/Llama-2-7b-hf") == parameters
    settings = {"EPOCHS": "3", "IMITATION_DATA": "rows.json", "PRECISION": "bf16", "DEEPSPEED": "z.json"}
    settings["SAVE_STEPS"] = "0.2"
    assert fit.disk_needed(settings, 7 * 10**9) == (4 * 14 + 2 * 98) * 10**9
    assert fit.disk_needed(settings | {"DEEPSPEED": "none", "SAVE_STEPS": "0"}, 10**9) == 4 * 4 * 10**9


def test_a_loop_that_does_not_fit_on_the_disk_is_not_started(loop, tmp_path, tiny_model):
    """A model whose weights are a file of zeros that takes no space, but counts 10^13 parameters."""
    folder = tmp_path / "huge"
    shutil.copytree(tiny_model, folder)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [10**7, 10**6], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    status, _, err = loop.run(model=folder)
    assert status == 2 and loop.calls() == {} and not loop.output.exists()
    assert "of 10,000,000,000,000 parameters take 320000.0 GB at most, of which 320000.0 GB are" in err
    assert f"{loop.output}: the disk space does not suffice; --save_steps 0 keeps no checkpoints, --check_disk" in err
    assert loop.finish(model=folder, check_disk="False")


# --- with the real programs ----------------------------------------------------------------------------------------


def any_filled(pattern: str) -> bool:
    """Whether a file of these names has content; checkpoints come and go."""
    with contextlib.suppress(FileNotFoundError):
        return any(map(os.path.getsize, glob.glob(pattern)))
    return False


@pytest.mark.kills
def test_a_loop_killed_in_every_stage_ends_with_the_results_of_one_that_was_not(inputs):
    output = inputs["output"]
    settings = inputs | {"max_turns": 1, "max_length": 1600, "max_new_tokens": 4, "games_per_word": 6, "save_steps": 1}
    settings |= {"play_batch": 1, "report": "False", "global_batch": 2, "imitation_lr": "1e-3"}
    settings |= {"reward_args": "--min_game_rows 0", "train_args": "--allow_no_game_rows True"}  # all games are ties
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
            kill_all(process)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed

    stages = STAGES[:-1]
    starts = {stage: (output / "logs" / f"{stage}.log").read_text().split("\n=== ")[1:] for stage in stages}
    assert [len(starts[stage]) for stage in stages] == [6, 5, 4, 3, 2]
    assert all("all is there" in text for text in starts["imitation"][2:])
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

    # Other settings, which play refuses: the loop ends there, and what is there stays.
    command = [SCRIPT, *flags_of(settings | {"temperature": 0.7})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "temperature: 1.2 then, 0.7 now" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("run_spag.sh: epoch1_play failed (exit 2); its log: ")
    assert json.loads((output / "settings.json").read_text())["TEMPERATURE"] == "1.2"


def start_real(settings: dict, **environment) -> subprocess.Popen:
    return subprocess.Popen(
        [SCRIPT, *flags_of(settings)],
        env=os.environ | {"PYTHON": python(), "OMP_NUM_THREADS": "1"} | environment,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_loop_that_is_preempted_under_torchrun_leaves_no_process_and_continues(inputs, number):
    output, complete = inputs["output"], "imitation/model/checkpoint-*/complete.json"
    settings = inputs | {"nproc": 2, "until": "imitation", "save_steps": 1, "global_batch": 4}
    settings["imitation_data"].write_text(json.dumps(5 * json.loads(settings["imitation_data"].read_text())))
    process = start_real(settings)
    wait_until(lambda: any_filled(f"{output}/{complete}"), process)
    process.send_signal(number)
    started = time.monotonic()
    printed, _ = process.communicate(timeout=30)
    assert time.monotonic() - started < 10 and process.returncode == 143, printed
    assert "run_spag.sh: stopped in imitation; the same command continues" in printed and users_of(output) == []
    printed, _ = (process := start_real(settings)).communicate(timeout=200)
    assert process.returncode == 0, printed
    state = json.loads((output / "imitation/model/trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 10
    assert (output / "logs/imitation.log").read_text().count("\n=== ") == 2


# --- the scripts ---------------------------------------------------------------------------------------------------

SCRIPTS = ("run_spag.sh", "quickstart.sh", "test.sh", "loop/run.sh", "loop/environment.sh")


def test_shellcheck_finds_nothing():
    scripts = [f"tools/{script}" for script in SCRIPTS]
    done = subprocess.run(["shellcheck", "-x", *scripts, *glob.glob("configs/*.sh")], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_use_nothing_that_bash_3_lacks(script):
    text = (ROOT / "tools" / script).read_text()
    assert not re.search(r"declare -A|local -A|mapfile|readarray|\$\{\w+(,,|\^\^|@)|wait -n|\|&|&>>|coproc", text)


def test_the_loop_is_short():
    assert len((ROOT / "tools" / "run_spag.sh").read_text().splitlines()) < 150
