"""The loop: its commands, with a stand-in for Python that notes them; and the loop itself, killed and continued."""

import contextlib
import glob
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import ENVIRONMENT, ROOT, descendants, finish, kill_all, start, users_of, wait_for, words_of
from safetensors.torch import load_file

import arguments
from tools.flags import parse_flags
from tools.play_llm_game import Flags as PlayFlags

SCRIPT = str(ROOT / "tools" / "run_spag.sh")
STAGES = ["imitation", "epoch1_play", "epoch1_rewards", "epoch1_train", "epoch1_eval", "report"]

# In the place of Python, but for the loop's own programs: notes the command, leaves a checkpoint, and does as a test
# says.
STUB = """#!/bin/sh
case "$1 $2" in "-m tools.loop."* | -c*) exec {python} "$@" ;; esac
{{ printf '%s\\t' "$@"; echo; }} >>{folder}/calls
for word; do [ "$last" != --output_dir ] || mkdir -p "$word/checkpoint-1"; last=$word; done
printf '\\033[Agames:  45%%|####      | 9/20\\r'
echo speaks >&2
case "$*" in {does} esac
echo last words
"""

# The commands of an epoch under the paper's settings on 8 GPUs.
COMMANDS = """
{launch} {root}/train.py --output_dir {out}/imitation/model --model_name_or_path {model}
  --ref_model_name_or_path {model} {training} --train_method SFTwithKL --train_data_path {data}/imitation.json
  --lm_kl_coeff 0.1 --learning_rate 5e-6 --seed 42
{launch} {root}/tools/play_llm_game.py --seed 43 --attacker_model_name_or_path {out}/imitation/model
  --defender_model_name_or_path {out}/imitation/model --data_path {out}/words.txt --output_dir {out}/epoch1/episodes
  --model_prefix imitation --data_suffix words --game taboo {sampling}
{root}/tools/assign_rewards.py --input_data_path {out}/epoch1/episodes/imitation_sampling_words_results.json
  --output_data_path {out}/epoch1/rows/rows.json --seed 43 --game taboo --decay_weight 0.8 --losers 0.0 --ties 0.0
  --role_weights paper --min_game_rows 128 --sft_data_path {data}/sft.json
{launch} {root}/train.py --output_dir {out}/epoch1/model --model_name_or_path {out}/imitation/model
  --ref_model_name_or_path {out}/imitation/model {training} --train_data_path {out}/epoch1/rows/rows.json --seed 43
  --train_method OfflinePO --lm_kl_coeff 0.2 --lm_sft_coeff 0.5 --clip_range 0.2 --detach_kl False
  --learning_rate 2e-6
{launch} {root}/tools/evaluate_games.py --players imitation={out}/imitation/model epoch1={out}/epoch1/model
  --against imitation --words played={data}/words.txt {data}/held_out.txt --seeds 0 --games_per_word 1
  --output_dir {out}/epoch1/eval --game taboo {sampling}
{root}/tools/report.py {out} --game taboo
"""
LAUNCH = "-m torch.distributed.run --nproc_per_node 8 --standalone"
TRAINING = """--num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048
  --padding_side right --truncation_side left --lr_scheduler_type cosine --warmup_ratio 0.03 --weight_decay 0.0
  --logging_steps 1 --eval_strategy no --per_device_eval_batch_size 8 --bf16 True --save_strategy steps
  --save_steps 0.2 --save_total_limit 1 --gradient_checkpointing True"""
SAMPLING = """--task_type sampling --max_length 2048 --max_new_tokens 256 --temperature 1.2 --top_k 50
  --bf16 True --engine auto --tensor_parallel_size 1"""


@pytest.fixture
def inputs(tmp_path, tiny_model) -> dict:
    """Settings of a loop of one epoch over a few words."""
    row = {"query": "Say: ", "target": "I know the word! It is `art`!", "reward": 1.0, "weight": 1.0}
    files = {
        "imitation.json": json.dumps([row | {"role": "defender"}] * 24),
        "sft.json": json.dumps([{"query": "What?", "target": "That."}] * 12),
        "words.txt": "art\nmusic\nbridge\n",
        "held_out.txt": "river\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    paths = {name: tmp_path / f"{name.partition('_')[0]}.json" for name in ("imitation_data", "sft_data")}
    paths |= {"model": tiny_model, "words": tmp_path / "words.txt", "output": tmp_path / "out"}
    paths["eval_words"] = f"played={tmp_path / 'words.txt'} {tmp_path / 'held_out.txt'}"
    settled = {"nproc": 1, "precision": "fp32", "deepspeed": "none", "gradient_checkpointing": "False"}
    return paths | settled | {"epochs": 1, "global_batch": 4}


class Loop:
    """The script with the stand-in for Python."""

    def __init__(self, folder: Path, settings: dict):
        self.folder, self.settings, self.output = folder, settings, settings["output"]
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.environment["PYTHON"] = str(folder / "python")

    def start(self, does: str = "", files: tuple = (), environment=None, cwd=ROOT, stdout=subprocess.PIPE, **changes):
        """Start it with changed settings; `does` are cases of a shell's `case` over the command's words."""
        (self.folder / "calls").write_text("")
        stub = STUB.format(python=sys.executable, folder=shlex.quote(str(self.folder)), does=does)
        (self.folder / "python").write_text(stub)
        (self.folder / "python").chmod(0o755)
        pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen(
            [SCRIPT, *files, *words_of(self.settings | changes)],
            env=self.environment | (environment or {}),
            cwd=cwd,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
            **pipes,
        )

    def run(self, does: str = "", status: int = 0, **how) -> tuple[str, str]:
        """Run it to its end with this status; (output, errors)."""
        process = self.start(does, **how)
        out, err = process.communicate(timeout=300)
        assert process.returncode == status, out + err
        return out, err

    def commands(self, does: str = "", **how) -> dict[str, list[str]]:
        """Run it to its good end; the words of each stage's command (of the last report's)."""
        out, _ = self.run(does, **how)
        return dict(zip(re.findall(r"\] (\w+); its log: ", out), self.calls(), strict=True))

    def calls(self) -> list[list[str]]:
        return [line.split("\t")[:-1] for line in (self.folder / "calls").read_text().splitlines()]

    def stored(self) -> dict[str, str]:
        return json.loads((self.output / "settings.json").read_text())["settings"]


@pytest.fixture
def loop(tmp_path, inputs) -> Loop:
    return Loop(tmp_path, inputs)


# --- the commands ----------------------------------------------------------------------------------------------------


def test_the_commands_of_an_epoch_are_these_and_the_programs_accept_them(loop, tmp_path):
    gpus = {"precision": "bf16", "gradient_checkpointing": "True", "nproc": 8, "global_batch": 128}
    commands = loop.commands(**gpus)
    places = {"root": ROOT, "out": loop.output, "model": loop.settings["model"], "data": tmp_path}
    text = COMMANDS.format(launch=LAUNCH, training=TRAINING, sampling=SAMPLING, **places)
    expected = [line.split() for line in text.replace("\n ", " ").strip().splitlines()]
    assert list(commands.values()) == expected and list(commands) == STAGES
    assert not list(loop.output.glob("*/model/checkpoint-*"))  # deleted after each training
    words = commands["imitation"]
    arguments.parse_arguments([*words[words.index(str(ROOT / "train.py")) + 1 :], "--use_cpu", "True"])
    words = commands["epoch1_play"]
    parse_flags(PlayFlags, words[words.index(str(ROOT / "tools/play_llm_game.py")) + 1 :], description="")


def test_each_epoch_starts_from_the_model_before(loop):
    commands = loop.commands(epochs=3, eval_every=2)
    assert list(commands)[:4] == STAGES[:4] and "epoch2_eval" in commands and "epoch3_eval" not in commands
    for number, stage in ((1, "epoch2"), (2, "epoch3")):
        model, rows = f"{loop.output}/epoch{number}/model", f"{loop.output}/{stage}/rows/rows.json"
        assert commands[f"{stage}_play"].count(model) == 2  # attacker and defender
        assert commands[f"{stage}_train"].count(model) == 2  # start and reference
        episodes = f"{loop.output}/{stage}/episodes/epoch{number}_sampling_words_results.json"
        assert episodes in commands[f"{stage}_rewards"]
        assert rows in commands[f"{stage}_rewards"] and rows in commands[f"{stage}_train"]
        for name in ("play", "rewards", "train"):
            assert f"--seed {43 + number} " in " ".join(commands[f"{stage}_{name}"]) + " "
    match = " ".join(commands["epoch2_eval"])
    assert f"--players imitation={loop.output}/imitation/model epoch2={loop.output}/epoch2/model --against" in match


@pytest.mark.parametrize(
    "changes, stage, there, not_there",
    [
        ({"imitation_data": ""}, "epoch1_play", "--attacker_model_name_or_path {model} ", "imitation/model"),
        ({"imitation_data": "", "eval_imitation": "True"}, "imitation_eval", "--players imitation={model} --ag", "LR"),
        ({"save_steps": "0.0"}, "imitation", "--save_strategy no ", "--save_steps"),
        ({"lora_rank": 4}, "imitation", "--lora_rank 4 --lora_merge True .* --learning_rate 1e-4 ", "5e-6"),
        ({"lora_rank": 4}, "epoch1_train", "{out}/imitation/model/merged .* --learning_rate 1e-4 ", "2e-6"),
        ({"losers": 0.5, "detach_kl": "True"}, "epoch1_rewards", "--losers 0.5 --ties 0.0 --role_weights paper", "XX"),
        ({"role_weights": "none"}, "epoch1_rewards", "--role_weights none ", "paper"),
        ({"max_turns": 4}, "epoch1_eval", "--max_turns 4 ", "--chat_template"),
        ({"game_options": "match=word"}, "report", "--game taboo --game_options match=word ", "--match"),
        ({"eval_args": "--max_words 3 \n --x *", "play_batch": 7}, "epoch1_eval", "7 --max_words 3 --x [*] $", "7 $"),
    ],
)
def test_settings_reach_the_stages(loop, changes, stage, there, not_there):
    (loop.folder / "peft.py").write_text("")
    command = " ".join(loop.commands(environment={"PYTHONPATH": str(loop.folder)}, **changes)[stage]) + " "
    assert re.search(there.format(out=loop.output, model=loop.settings["model"]), command), command
    assert not re.search(not_there, command)


def test_another_game_reaches_all_that_play_or_judge(loop, tmp_path):
    (tmp_path / "words.txt").write_text("dog\n")
    commands = loop.commands(game="twenty_questions", eval_words="", max_turns=9)
    for stage in ("epoch1_play", "epoch1_rewards", "report"):
        assert "--game twenty_questions" in " ".join(commands[stage])
    assert "--max_turns 9 " in " ".join(commands["epoch1_play"])


def test_first_episodes_replace_the_play_of_epoch_1_and_until_ends_the_loop(loop, tmp_path):
    (tmp_path / "games.json").write_text("[]")
    commands = loop.commands(epochs=2, first_episodes=tmp_path / "games.json", until="epoch2_play")
    assert list(commands) == [stage for stage in STAGES if stage != "epoch1_play"] + ["epoch2_play"]
    assert str(tmp_path / "games.json") in commands["epoch1_rewards"]
    commands = loop.commands(epochs=2, first_episodes=tmp_path / "games.json", until="epoch1_play")
    assert list(commands) == ["imitation"]  # there is nothing to play


def test_a_control_takes_model_and_first_games_of_another_run_and_makes_its_own_rows(loop, tmp_path):
    spag = loop.output
    loop.commands(epochs=2)
    first = spag / "epoch1/episodes/imitation_sampling_words_results.json"
    first.write_text("[]")
    for control in ("coin", "coin_by_length", "cloning", "sft", "silent"):
        commands = loop.commands(control=control, epochs=2, like=spag, output=tmp_path / control, sft_coeff=0.25)
        plays = control not in ("sft", "silent")
        assert "imitation" not in commands and "epoch1_play" not in commands
        assert ("epoch2_play" in commands) == plays
        for epoch in (1, 2):
            rewards = " ".join(commands[f"epoch{epoch}_rewards"]) + " "
            assert f" --control {control} " in rewards
            assert (f" --like_rows {spag}/epoch{epoch}/rows/rows.json " in rewards) != plays
            assert (" --sft_coeff 0.25 --rows_at_once 2 " in rewards) == (control == "cloning")
            no_games = "--allow_no_game_rows True" in " ".join(commands[f"epoch{epoch}_train"])
            assert no_games == (control in ("cloning", "sft"))
        assert (str(first) in commands["epoch1_rewards"]) == plays
        assert commands["epoch1_train"].count(f"{spag}/imitation/model") == 2
        assert f"imitation={spag}/imitation/model" in commands["epoch2_eval"]
        stored = json.loads((tmp_path / control / "settings.json").read_text())["settings"]
        assert (stored["CONTROL"], stored["LIKE"]) == (control, str(spag))


def test_benchmarks_are_asked_of_base_imitation_and_every_epoch_at_the_end(loop):
    commands = loop.commands(epochs=2, eval_tasks="MMLU ARC-c:25", reasoning_args="--lm_eval lm --limit 3")
    out, words = loop.output, commands["reasoning"]
    models = [f"base={loop.settings['model']}", f"imitation={out}/imitation/model"]
    models += [f"epoch{number}={out}/epoch{number}/model" for number in (1, 2)]
    expected = ["--models", *models, "--tasks", "MMLU", "ARC-c:25", "--output_dir", f"{out}/reasoning"]
    expected += ["--dtype", "float32"]
    assert words == [str(ROOT / "tools/evaluate_reasoning.py"), *expected, "--lm_eval", "lm", "--limit", "3"]
    assert list(commands)[-1] == "reasoning"


def test_several_machines_share_the_stages_and_the_first_one_does_the_rest(loop):
    several = {"nnodes": 2, "rdzv_endpoint": "localhost:29500"}
    other = loop.commands(node_rank=1, **several)  # it may come first
    assert sorted(path.name for path in loop.output.glob("[!.]*")) == ["epoch1", "imitation", "logs"]
    first = loop.commands(node_rank=0, **several)
    assert list(first) == STAGES and list(other) == ["imitation", "epoch1_play", "epoch1_train", "epoch1_eval"]
    for stage, words in other.items():
        launch = " ".join(first[stage])
        assert f"--nnodes 2 --rdzv_backend c10d --rdzv_endpoint localhost:29500 --rdzv_id spag-{stage} " in launch
        assert "--rdzv_conf is_host=1,join_timeout=1800,read_timeout=1800 " in launch
        assert " ".join(words) == launch.replace("is_host=1", "is_host=0")
        assert (loop.output / "logs" / f"{stage}.node1.log").is_file()


# --- settings ------------------------------------------------------------------------------------------------------


def test_of_files_and_words_the_last_one_wins_and_the_environment_changes_nothing(loop, tmp_path):
    (tmp_path / "my settings.sh").write_text(
        "# a comment\nTEMPERATURE=0.9  # another\nTOP_K=7\n\nMAX_TURNS=3\nSEED=5\n"
        "TRAIN_ARGS='--max_steps 3 --x *'\nKL=0.3\nREWARD_ARGS=\"--training_prompt play\"\n"
    )
    (tmp_path / "more.sh").write_text("TOP_K=8\nPROMPTS=$root/configs/prompts.json\n")
    given = {"files": ("SEED=6", "my settings.sh", "more.sh"), "seed": 7, "reward_args": ""}
    commands = loop.commands(environment={"TEMPERATURE": "8", "EPOCHS": "6"}, cwd=tmp_path, **given)
    names = ("TEMPERATURE", "TOP_K", "MAX_TURNS", "SEED", "KL", "EPOCHS", "REWARD_ARGS", "PROMPTS")
    expected = ["0.9", "8", "3", "7", "0.3", "1", "", f"{ROOT}/configs/prompts.json"]
    assert [loop.stored()[name] for name in names] == expected
    assert commands["epoch1_train"][-4:] == ["--max_steps", "3", "--x", "*"]
    assert "--max_steps" not in commands["imitation"]


def test_values_are_data_not_shell(loop, tmp_path):
    output = tmp_path / "my $(touch results); `x` 'y'"
    commands = loop.commands(output=output, train_args=f"--x $(touch {tmp_path}/made) * 'a \" b'")
    assert commands["epoch1_train"][-5:] == ["--x", "$(touch", f"{tmp_path}/made)", "*", 'a " b']
    assert (output / "logs/epoch1_train.log").is_file() and not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "word, named",
    [
        ("--output", "unknown flag --output"),
        ("none.sh", "none.sh: neither a setting NAME=VALUE nor a file"),
        ("EPOCS=2", "unknown setting EPOCS; did you mean EPOCHS?"),
        ("epochs=2", "unknown setting epochs; did you mean EPOCHS?"),
        ("PATH=/tmp", "unknown setting PATH; did you mean"),
    ],
)
def test_words_that_are_no_settings_are_refused_with_the_nearest_one(loop, word, named):
    _, err = loop.run(files=[word], status=2)
    assert named in err and len(err.splitlines()) == 1 and not loop.output.exists()


@pytest.mark.parametrize(
    "line, named",
    [
        ("EPOCS=2", "wrong.sh: unknown setting EPOCS; did you mean EPOCHS?"),
        ("epochs: 2", "wrong.sh:2: expected NAME=VALUE"),
        ("rm -r x", "wrong.sh:2: expected NAME=VALUE"),
        ("EVAL_SEEDS=0 true", "wrong.sh:2: expected NAME=VALUE, a value with blanks in quotes"),
        ("PLAY_ARGS='--a' b", "wrong.sh:2: expected NAME=VALUE"),
    ],
)
def test_a_wrong_line_of_a_settings_file_is_refused(loop, tmp_path, line, named):
    (tmp_path / "wrong.sh").write_text(f"KL=0.2\n{line}\n")
    _, err = loop.run(files=[tmp_path / "wrong.sh"], status=2)
    assert named in err and loop.calls() == [] and not loop.output.exists()


CONFIGS = sorted(path.stem for path in ROOT.glob("configs/*.sh") if path.stem not in ("defaults", "slurm_4x8"))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_settings_files_are_accepted_and_reach_the_commands(loop, name):
    (loop.folder / "peft.py").write_text("")
    del loop.settings["global_batch"], loop.settings["gradient_checkpointing"]
    (loop.folder / "model").symlink_to(loop.settings["model"])
    Path(loop.settings["model"], "chat_template.jinja").touch()
    changes = {"reasoning_args": "--lm_eval harness", "gradient_checkpointing": "False"}
    if not (ROOT / f"data/{name}/prompts.json").is_file():
        changes["prompts"] = ""
    commands = loop.commands(
        files=[ROOT / f"configs/{name}.sh"], environment={"PYTHONPATH": str(loop.folder)}, **changes
    )
    Path(loop.settings["model"], "chat_template.jinja").unlink()
    assert ("reasoning" in commands) == ("EVAL_TASKS" in (ROOT / f"configs/{name}.sh").read_text())
    assert (f"{ROOT}/data/{name}/prompts.json" in commands["epoch1_play"]) == ("prompts" not in changes)
    for stage in ("epoch1_play", "epoch1_rewards", "epoch1_eval"):
        assert ("--chat_template" in commands[stage]) == (name in ("qwen3_4b", "english"))


def test_help_is_the_file_of_all_settings(loop):
    shown = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    loop.commands()
    assert shown == (ROOT / "configs/defaults.sh").read_text()
    assert re.findall(r"^([A-Z_]+)=.* # \w", shown, flags=re.MULTILINE) == list(loop.stored())


# --- failures, logs, signals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, program", [("imitation", "train.py"), ("epoch1_train", "train.py*epoch1/")])
def test_a_failing_stage_stops_the_loop_and_names_its_log(loop, stage, program):
    _, err = loop.run(f"*{program}*) echo broken; exit 3 ;;", status=1)
    log = loop.output / "logs" / f"{stage}.log"
    assert len(loop.calls()) == STAGES.index(stage) + 1
    assert "broken" in err and "broken" in log.read_text() and str(log) in err.splitlines()[-1]
    assert len(list(loop.output.glob("*/model/checkpoint-1"))) == 1  # to go on from


def test_a_failing_report_does_not_stop_the_loop(loop):
    commands = loop.commands("*report.py*) exit 3 ;;", epochs=2)
    assert list(commands)[-1] == "epoch2_eval" and sum("report.py" in words[0] for words in loop.calls()) == 2


def test_logs_hold_the_command_and_all_output_of_each_start_and_warnings_are_repeated(loop):
    warns = "*train.py*) echo 12:00:00 rank 0 WARNING saw something; echo 12:00:01 rank 1 WARNING saw something ;;"
    _, err = loop.run(warns)
    assert err.splitlines()[-3:] == ["Warnings:", "  imitation: saw something", "  epoch1_train: saw something"]
    out, err = loop.run(verbose=True)
    assert "Warnings:" not in err  # those of this start
    assert out.count("speaks") == out.count("last words") == len(STAGES)
    for stage in STAGES:
        starts = (loop.output / "logs" / f"{stage}.log").read_text().split("\n=== ")[1:]
        assert len(starts) == 2 and all("speaks\n" in text and "last words\n" in text for text in starts)
        assert all(str(loop.output) in text.splitlines()[0] for text in starts)


def test_a_terminal_shows_the_bar_of_the_stage_at_work(loop):
    terminal, end = os.openpty()
    process = loop.start("*play_llm*) sleep 4 ;;", stdout=end, until="epoch1_play")
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # at the end Linux raises EIO
        while part := os.read(terminal, 10_000):
            shown += part
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert b"\r\x1b[Kgames:  45%|####      | 9/20" in shown and b"\x1b[A" not in shown
    assert b"speaks" not in shown and b"epoch1_play took" in shown


@pytest.mark.parametrize(
    "number, status, does",
    [
        ("SIGINT", 130, "sleep 60; true"),
        ("SIGTERM", 143, "sleep 60; true"),
        ("SIGHUP", 143, "sleep 60; true"),
        ("SIGUSR1", 143, "sleep 60; true"),
        ("SIGTERM", 143, "trap '' TERM; sleep 60; true"),
    ],
)
def test_a_signal_ends_the_loop_and_what_it_has_started(loop, number, status, does):
    process = loop.start(f"*play_llm*) {does} ;;")
    assert wait_for(lambda: len(loop.calls()) == 2, process)
    assert wait_for(sleeping := lambda: descendants(process.pid, "sleep"), process)
    (sleep,) = sleeping()
    process.send_signal(signal.Signals[number])
    _, err = process.communicate(timeout=30)
    assert process.returncode == status and "stopped in epoch1_play; the same command continues" in err
    left = psutil.wait_procs([*users_of(loop.output), sleep], timeout=10)[1]  # SIGKILL takes a moment
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    assert list(loop.commands()) == STAGES  # the next start asks all programs again


def test_a_stage_that_is_suspended_for_a_while_goes_on(loop):
    process = loop.start("*play_llm*) sleep 4; true ;;")
    assert wait_for(lambda: len(loop.calls()) == 2, process)
    assert wait_for(sleeping := lambda: descendants(process.pid, "sleep"), process)
    (stage,) = {each.parent() for each in sleeping()}
    stage.suspend()  # as Slurm suspends a job
    try:
        time.sleep(2)
        assert process.poll() is None
    finally:
        stage.resume()
    process.communicate(timeout=60)
    assert process.returncode == 0 and json.loads((loop.output / "settings.json").read_text())["finished"]


def test_a_signal_while_it_checks_ends_the_loop(loop, tmp_path):
    (tmp_path / "slow.py").write_text(
        f"import time\nopen({str(tmp_path / 'begun')!r}, 'w').close()\ntime.sleep(60)\nclass Slow: pass\n"
    )
    process = loop.start(game=f"{tmp_path}/slow.py:Slow")
    assert wait_for((tmp_path / "begun").exists, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "run_spag.sh: stopped; the same" in err
    assert users_of(loop.output) == [] and loop.calls() == []


def test_after_a_sigkill_of_the_script_the_stage_at_work_keeps_other_starts_out(loop):
    process = loop.start("*play_llm*) sleep 60; true ;;")
    assert wait_for(lambda: len(loop.calls()) == 2, process)
    at_work = [each for each in psutil.Process(process.pid).children() if "play_llm" in " ".join(each.cmdline())]
    process.kill()
    process.wait()
    (stage,) = at_work
    record = (loop.output / "settings.json").read_bytes()
    _, err = loop.run(status=2, seed=7)
    assert f"another process is at work in this folder: pid {stage.pid} (" in err and loop.calls() == []
    assert (loop.output / "settings.json").read_bytes() == record
    for each in [*stage.children(), stage]:
        each.kill()
    process.communicate()  # all have closed their output
    assert list(loop.commands()) == STAGES


def test_a_second_start_beside_a_loop_is_refused(loop):
    process = loop.start("*play_llm*) sleep 60; true ;;")
    assert wait_for(lambda: len(loop.calls()) == 2, process)
    second = subprocess.run([SCRIPT, *words_of(loop.settings)], env=loop.environment, capture_output=True, text=True)
    assert second.returncode == 2 and f"pid {process.pid} (" in second.stderr
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)


# --- the record of the loop ------------------------------------------------------------------------------------------

TRAINED = "*train.py*epoch1/*) mkdir -p {out}/epoch1/model; echo '{{}}' >{out}/epoch1/model/train_results.json ;;"


def test_the_record_is_finished_when_the_loop_has_ended(loop):
    def finished() -> bool:
        return json.loads((loop.output / "settings.json").read_text())["finished"]

    trained = TRAINED.format(out=loop.output)
    loop.run(trained, until="epoch1_train")
    assert not finished()
    loop.run(trained)
    assert finished()
    record = (loop.output / "settings.json").read_bytes()
    assert list(loop.commands(trained)) == STAGES and (loop.output / "settings.json").read_bytes() == record
    loop.run("*epoch2*) exit 3 ;;", epochs=2, status=1)
    assert not finished() and loop.stored()["EPOCHS"] == "2"


@pytest.mark.parametrize("changes", [{"model": "{other}"}, {"train_args": "--max_steps 3"}, {"seed": 7}])
def test_a_loop_with_results_refuses_other_settings_and_writes_nothing(loop, other_model, changes):
    loop.run(TRAINED.format(out=loop.output))
    before = {path: path.read_bytes() for path in loop.output.rglob("*") if path.is_file()}
    changes = {name: str(value).format(other=other_model) for name, value in changes.items()}
    _, err = loop.run(status=2, **changes)
    (name,) = changes
    assert f"made with other settings ({name.upper()}: " in err and loop.calls() == []
    assert {path: path.read_bytes() for path in loop.output.rglob("*") if path.is_file()} == before


def test_the_machine_may_change_and_so_may_what_is_only_added(loop):
    loop.run(TRAINED.format(out=loop.output), eval_words="")
    added = {"epochs": 2, "eval_words": loop.settings["words"], "eval_tasks": "MMLU", "report": "False"}
    added["reasoning_args"] = "--lm_eval harness"
    commands = loop.commands(
        nproc=2, play_batch=3, save_steps=0, train_batch=2, gradient_checkpointing="True", **added
    )
    assert "epoch2_eval" in commands and "reasoning" in commands and loop.stored()["NPROC"] == "2"


# --- with the real programs ------------------------------------------------------------------------------------------


def any_filled(pattern: str) -> bool:
    """Whether a file of these names has content; checkpoints come and go."""
    with contextlib.suppress(FileNotFoundError):
        return any(map(os.path.getsize, glob.glob(pattern)))
    return False


def start_loop(settings: dict) -> subprocess.Popen:
    return start([SCRIPT, *words_of(settings)], env=ENVIRONMENT | {"PYTHON": sys.executable})


@pytest.mark.kills
def test_a_loop_killed_in_play_and_in_training_ends_with_the_results_of_one_that_was_not(inputs):
    output = inputs["output"]
    settings = inputs | {"max_turns": 1, "max_length": 1600, "max_new_tokens": 4, "games_per_word": 6, "save_steps": 1}
    settings |= {"play_batch": 1, "report": "False", "global_batch": 2, "learning_rate": "1e-3", "eval_words": ""}
    settings |= {"reward_args": "--min_game_rows 0", "train_args": "--allow_no_game_rows True"}  # all games are ties
    settings["imitation_data"] = ""  # fewer programs to start; imitation is interrupted below
    played = "epoch1/episodes/imitation_sampling_words_rank0.jsonl"
    for sign in (played, "epoch1/model/checkpoint-*/complete.json"):
        process = start_loop(settings)
        assert wait_for(lambda: any_filled(f"{output}/{sign}"), process)  # noqa: B023
        kill_all(process, output)
    finish(start_loop(settings))

    starts = {stage: (output / f"logs/{stage}.log").read_text().split("\n=== ")[1:] for stage in STAGES[1:4]}
    assert [len(starts[stage]) for stage in starts] == [3, 2, 2]
    assert not list((output / "epoch1/model").glob("checkpoint-*"))
    games = [json.loads(line) for line in (output / played).read_text().splitlines()]
    assert sorted(game["index"] for game in games) == list(range(18))  # none played twice
    counts = json.loads((output / "epoch1/rows/rows_rewards_settings.json").read_text())
    assert counts["games"]["episodes"] == 18 and counts["rows"]["sft"] == 12

    # The training again in one go, by the command of its first start.
    command = starts["epoch1_train"][0].splitlines()[0].partition(f"{sys.executable} ")[2]
    finish(start([sys.executable, *command.replace(f"{output}/epoch1/model", f"{output}/undisturbed").split()]))
    weights = [load_file(output / name / "model.safetensors") for name in ("epoch1/model", "undisturbed")]
    before = load_file(Path(settings["model"], "model.safetensors"))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in weights[0].items())


def test_a_loop_that_is_preempted_under_torchrun_leaves_no_process_and_continues(inputs):
    output = inputs["output"]
    settings = inputs | {"nproc": 2, "until": "imitation", "save_steps": 1}
    process = start_loop(settings)
    assert wait_for(lambda: any_filled(f"{output}/imitation/model/checkpoint-*/complete.json"), process)
    process.send_signal(signal.SIGTERM)
    finish(process, status=143)
    assert users_of(output) == []
    finish(start_loop(settings))
    state = json.loads((output / "imitation/model/trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 6
    assert (output / "logs/imitation.log").read_text().count("\n=== ") == 2


# --- the scripts -----------------------------------------------------------------------------------------------------

SCRIPTS = ("run_spag.sh", "quickstart.sh", "test.sh", "loop/run.sh", "loop/settings.sh", "loop/environment.sh")


def test_shellcheck_finds_nothing():
    scripts, shellcheck = [f"tools/{script}" for script in SCRIPTS], Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "-x", *scripts, *glob.glob("configs/*.sh")], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_use_nothing_that_bash_3_lacks(script):
    text = (ROOT / "tools" / script).read_text()
    assert not re.search(r"declare -A|local -A|mapfile|readarray|\$\{\w+(,,|\^\^|@)|wait -n|\|&|&>>|coproc", text)
