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
from helpers import ENVIRONMENT, ROOT, descendants, finish, start, users_of, wait_for, words_of

import arguments
from tools.assign_rewards import Flags as RewardFlags
from tools.controls import Cloning, Sft
from tools.evaluate_belief import Flags as BeliefFlags
from tools.evaluate_games import Flags as MatchFlags
from tools.flags import parse_flags
from tools.play_llm_game import Flags as PlayFlags

SCRIPT = str(ROOT / "tools" / "run_spag.sh")
STAGES = ["imitation", "epoch1_play", "epoch1_rewards", "epoch1_train", "epoch1_eval", "report"]
FLAGS = {"play_llm_game": PlayFlags, "assign_rewards": RewardFlags, "evaluate_games": MatchFlags}
FLAGS |= {"evaluate_belief": BeliefFlags}

# In the place of Python, but for the loop's own program: notes the command, leaves a checkpoint, and does as a test
# says.
STUB = """#!/bin/sh
case "$1 $2" in "-m tools.loop."*) exec {python} "$@" ;; esac
{{ printf '%s\\t' "$@"; echo; }} >>{folder}/calls
env >{folder}/environment
for word; do [ "$last" != --output_dir ] || mkdir -p "$word/checkpoint-1"; last=$word; done
printf '\\033[Agames:  45%%|####      | 9/20\\r'
echo speaks >&2
case "$*" in {does} esac
echo last words
printf 'games: 100%%|##########| 20/20\\r'
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
  --baseline none --role_weights paper --sft_data_path {data}/sft.json --chat_template False
{launch} {root}/train.py --output_dir {out}/epoch1/model --model_name_or_path {out}/imitation/model
  --ref_model_name_or_path {out}/imitation/model {training} --train_method OfflinePO
  --train_data_path {out}/epoch1/rows/rows.json --lm_kl_coeff 0.2 --lm_sft_coeff 0.5 --clip_range 0.2
  --detach_kl False --learning_rate 2e-6 --seed 43
{launch} {root}/tools/evaluate_games.py --players imitation={out}/imitation/model epoch1={out}/epoch1/model
  --against imitation --words played={data}/words.txt {data}/held_out.txt --seeds 0 --games_per_word 1
  --output_dir {out}/epoch1/eval --game taboo {sampling}
{root}/tools/report.py {out} --game taboo
"""
LAUNCH = "-m torch.distributed.run --nproc_per_node 8 --standalone"
TRAINING = """--num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048
  --padding_side right --truncation_side left --lr_scheduler_type cosine --warmup_ratio 0.03 --weight_decay 0.0
  --logging_steps 1 --eval_strategy no --per_device_eval_batch_size 8 --bf16 True --tf32 True --save_strategy steps
  --save_steps 0.2 --save_total_limit 1 --gradient_checkpointing True"""
SAMPLING = """--task_type sampling --chat_template False --thinking False --max_length 2048 --max_new_tokens 256
  --temperature 1.2 --top_k 50 --bf16 True --tf32 True --engine auto --tensor_parallel_size 1"""


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

    def start(self, does: str = "", files: tuple = (), environment=None, stdout=subprocess.PIPE, **changes):
        """Start it with changed settings; `does` are cases of a shell's `case` over the command's words."""
        (self.folder / "calls").write_text("")
        stub = STUB.format(python=sys.executable, folder=shlex.quote(str(self.folder)), does=does)
        (self.folder / "python").write_text(stub)
        (self.folder / "python").chmod(0o755)
        return subprocess.Popen(
            [SCRIPT, *map(str, files), *words_of(self.settings | changes)],
            env=self.environment | (environment or {}),
            cwd=ROOT,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
        )

    def run(self, does: str = "", status: int = 0, **changes) -> tuple[str, str]:
        """Run it to its end with this status; (output, errors)."""
        process = self.start(does, **changes)
        out, err = process.communicate(timeout=300)
        assert process.returncode == status, out + err
        return out, err

    def commands(self, does: str = "", **changes) -> dict[str, list[str]]:
        """Run it to its good end; the words of each stage's command (of the last report's)."""
        out, _ = self.run(does, **changes)
        return dict(zip(re.findall(r"\] (\w+); its log: ", out), self.calls(), strict=True))

    def calls(self) -> list[list[str]]:
        return [line.split("\t")[:-1] for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def loop(tmp_path, inputs) -> Loop:
    return Loop(tmp_path, inputs)


def check_flags(words: list[str]) -> None:
    """The program accepts the flags of this command."""
    place = next(number for number, word in enumerate(words) if word.endswith(".py"))
    program, flags = Path(words[place]).stem, words[place + 1 :]
    if program == "train":
        arguments.parse_arguments([*flags, "--use_cpu", "True"])
    elif program == "controls":
        parse_flags({"sft": Sft, "cloning": Cloning}[flags[0]], flags[1:], description="")
    elif program in FLAGS:
        parse_flags(FLAGS[program], flags, description="")


# The commands.


def test_the_commands_of_an_epoch_are_these_and_the_programs_accept_them(loop, tmp_path):
    gpus = {"precision": "bf16", "gradient_checkpointing": "True", "nproc": 8, "global_batch": 128}
    commands = loop.commands(**gpus)
    places = {"root": ROOT, "out": loop.output, "model": loop.settings["model"], "data": tmp_path}
    text = COMMANDS.format(launch=LAUNCH, training=TRAINING, sampling=SAMPLING, **places)
    expected = [line.split() for line in text.replace("\n ", " ").strip().splitlines()]
    assert list(commands.values()) == expected and list(commands) == STAGES
    assert not list(loop.output.glob("*/model/checkpoint-*"))  # deleted after each training
    for words in commands.values():
        check_flags(words)


def test_each_epoch_starts_from_the_model_before_and_all_are_measured(loop):
    changes = {"belief_games": loop.settings["sft_data"], "belief_args": "--split held_out"}
    changes |= {"eval_tasks": "MMLU ARC-c:25", "reasoning_args": "--limit 3"}
    commands = loop.commands(epochs=3, eval_every=2, **changes)
    out = loop.output
    assert "epoch2_eval" in commands and "epoch3_eval" not in commands
    for number, stage in ((1, "epoch2"), (2, "epoch3")):
        model, rows = f"{out}/epoch{number}/model", f"{out}/{stage}/rows/rows.json"
        assert commands[f"{stage}_play"].count(model) == 2  # attacker and defender
        assert commands[f"{stage}_train"].count(model) == 2  # start and reference
        episodes = f"{out}/{stage}/episodes/epoch{number}_sampling_words_results.json"
        assert episodes in commands[f"{stage}_rewards"]
        assert rows in commands[f"{stage}_rewards"] and rows in commands[f"{stage}_train"]
        for name in ("play", "rewards", "train"):
            assert f"--seed {43 + number} " in " ".join(commands[f"{stage}_{name}"]) + " "
    assert f"--players imitation={out}/imitation/model epoch2={out}/epoch2/model" in " ".join(commands["epoch2_eval"])
    first, second, asked = (" ".join(commands[stage]) for stage in ("epoch1_belief", "epoch2_belief", "reasoning"))
    models = f"base={loop.settings['model']} imitation={out}/imitation/model epoch1={out}/epoch1/model"
    assert f"--models {models} --games" in first and f"--models epoch2={out}/epoch2/model --games" in second
    assert f"--models {models} epoch2={out}/epoch2/model epoch3={out}/epoch3/model --tasks MMLU ARC-c:25 " in asked
    check_flags(commands["epoch1_belief"])


@pytest.mark.parametrize(
    "changes, stage, there, not_there",
    [
        ({"imitation_data": ""}, "epoch1_play", "--attacker_model_name_or_path {model} ", "imitation/model"),
        ({"save_steps": "0.0"}, "imitation", "--save_strategy no ", "--save_steps"),
        ({"lora_rank": 4}, "imitation", "--lora_rank 4 --lora_merge True .* --learning_rate 1e-4 ", "5e-6"),
        ({"lora_rank": 4}, "epoch1_train", "{out}/imitation/model/merged .* --learning_rate 1e-4 ", "2e-6"),
        ({"losers": 0.5, "detach_kl": "True"}, "epoch1_rewards", "--losers 0.5 --ties 0.0 ", "XX"),
        ({"baseline": "role", "detach_kl": "True"}, "epoch1_rewards", "--baseline role ", "none"),
        ({"role_weights": "none"}, "epoch1_rewards", "--role_weights none ", "paper"),
        ({"chat_template": "True"}, "epoch1_rewards", "--chat_template True --tokenizer {model} ", "False"),
        ({"thinking": "True"}, "epoch1_rewards", "--thinking True --training_prompt play ", "XX"),
        ({"game_options": "match=word"}, "report", "--game taboo --game_options match=word ", "XX"),
        ({"eval_args": "--max_words 3 \n --x *", "play_batch": 7}, "epoch1_eval", "7 --max_words 3 --x [*] $", "7 $"),
    ],
)
def test_settings_reach_the_stages(loop, changes, stage, there, not_there):
    command = " ".join(loop.commands(**changes)[stage]) + " "
    assert re.search(there.format(out=loop.output, model=loop.settings["model"]), command), command
    assert not re.search(not_there, command)


@pytest.mark.parametrize("control", ["coin_by_length", "cloning", "sft", "silent"])
def test_a_control_takes_model_and_first_games_of_another_run_and_makes_its_own_rows(loop, tmp_path, control):
    spag = loop.output
    loop.commands("*SFTwithKL*) echo '{\"finished\": true}' >\"$3/settings.json\" ;;", epochs=2)
    first = spag / "epoch1/episodes/imitation_sampling_words_results.json"
    first.write_text("[]")
    own = {"control": control, "like": spag, "output": tmp_path / "own", "sft_coeff": 0.25}
    commands = loop.commands(**own, epochs=2)
    plays = control in ("coin_by_length", "cloning")
    assert "imitation" not in commands and "epoch1_play" not in commands and ("epoch2_play" in commands) == plays
    for epoch in (1, 2):
        rows, trained = tmp_path / f"own/epoch{epoch}/rows", commands[f"epoch{epoch}_train"]
        assert trained[trained.index("--train_data_path") + 1] == f"{rows}/rows.json"
        assert ("--allow_no_game_rows" in trained) == (control in ("cloning", "sft"))
        if control == "coin_by_length":
            assert "--permute_outcomes True" in " ".join(commands[f"epoch{epoch}_rewards"])
            continue
        made = commands[f"epoch{epoch}_{control}"]
        source = f"{rows}/winners.json" if plays else f"{spag}/epoch{epoch}/rows/rows.json"
        assert made[1:6] == [control, "--rows", source, "--output", f"{rows}/rows.json"]
        if control != "silent":
            check_flags(made)
    if plays:
        assert str(first) in commands["epoch1_rewards"]
    assert commands["epoch1_train"].count(f"{spag}/imitation/model") == 2
    assert f"imitation={spag}/imitation/model" in commands["epoch2_eval"]


def test_several_machines_share_the_stages_and_the_first_one_does_the_rest(loop):
    several = {"nnodes": 2, "rdzv_endpoint": "localhost:29500"}
    other = loop.commands(node_rank=1, **several)  # it may come first
    assert sorted(path.name for path in loop.output.iterdir()) == ["epoch1", "imitation", "logs"]
    first = loop.commands(node_rank=0, **several)
    assert list(first) == STAGES and list(other) == ["imitation", "epoch1_play", "epoch1_train", "epoch1_eval"]
    for stage, words in other.items():
        launch = " ".join(first[stage])
        assert f"--nnodes 2 --rdzv_backend c10d --rdzv_endpoint localhost:29500 --rdzv_id spag-{stage} " in launch
        assert "--rdzv_conf is_host=1,join_timeout=1800,read_timeout=1800 " in launch
        assert " ".join(words) == launch.replace("is_host=1", "is_host=0")
        assert (loop.output / "logs" / f"{stage}.node1.log").is_file()


def test_variables_of_a_platform_that_launches_do_not_reach_the_stages(loop):
    platform = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2"}
    platform |= {"PET_NNODES": "2", "OMPI_COMM_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "TEMPERATURE": "8"}
    commands = loop.commands(environment=platform)
    names = {line.partition("=")[0] for line in (loop.folder / "environment").read_text().splitlines()}
    assert not names & (platform.keys() - {"TEMPERATURE"})
    assert "--temperature 1.2 " in " ".join(commands["epoch1_play"])  # the environment changes no setting


CONFIGS = sorted(path.stem for path in ROOT.glob("configs/*.sh") if path.stem not in ("defaults", "slurm_4x8"))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_settings_files_reach_the_commands(loop, name):
    del loop.settings["global_batch"]
    commands = loop.commands(files=[ROOT / f"configs/{name}.sh"], lora_rank="", reasoning_args="--lm_eval harness")
    for stage in ("epoch1_play", "epoch1_rewards", "epoch1_eval"):
        assert ("--chat_template True" in " ".join(commands[stage])) == (name in ("qwen3_4b", "english"))


def test_help_is_the_file_of_all_settings():
    environment = os.environ | {"PYTHON": sys.executable}
    shown = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True, env=environment).stdout
    assert shown == (ROOT / "configs/defaults.sh").read_text()


# Failures, logs, signals.


@pytest.mark.parametrize("stage, program", [("imitation", "train.py"), ("epoch1_train", "train.py*epoch1/")])
def test_a_failing_stage_stops_the_loop_and_names_its_log(loop, stage, program):
    _, err = loop.run(f"*{program}*) echo broken; exit 3 ;;", status=1)
    log = loop.output / "logs" / f"{stage}.log"
    assert len(loop.calls()) == STAGES.index(stage) + 1
    assert "broken" in err and "broken" in log.read_text() and str(log) in err.splitlines()[-1]
    assert len(list(loop.output.glob("*/model/checkpoint-1"))) == 1  # to go on from


def test_the_terminal_shows_warnings_and_the_last_line_of_each_stage_and_logs_hold_all(loop):
    warns = "*imitation/model*SFT*) for rank in 0 1; do echo 12:00:0$rank rank $rank WARNING saw something; done ;;"
    out, _ = loop.run(warns)
    assert out.count("WARNING: saw something") == 1 and out.count("\nlast words\n") == len(STAGES)
    logs = [(loop.output / "logs" / f"{stage}.log").read_text() for stage in STAGES]
    assert "speaks" not in out and all("speaks\n" in log and "last words\n" in log for log in logs)


@pytest.mark.parametrize(
    "number, status, does",
    [
        ("SIGINT", 130, "sleep 60; true"),
        ("SIGTERM", 143, "sleep 60; true"),
        ("SIGUSR1", 143, "trap '' TERM; sleep 60; true"),
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
    process = loop.start("*play_llm*) sleep 4; true ;;", until="epoch1_play")
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
    assert process.returncode == 0


# With the real programs.


def test_after_a_sigkill_the_stage_at_work_keeps_another_start_out_and_ends(inputs):
    def start_loop() -> subprocess.Popen:
        words = words_of(inputs | {"until": "imitation"})
        return start([SCRIPT, *words], env=ENVIRONMENT | {"PYTHON": sys.executable})

    def has_lock(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return f"{output}/imitation/model/.settings.lock" in [file.path for file in process.open_files()]
        return False

    output, process = inputs["output"], start_loop()
    assert wait_for(at_work := lambda: [each for each in users_of(output) if has_lock(each)], process)
    (training,) = at_work()
    process.kill()
    process.wait()
    training.suspend()  # so that it is at work long enough
    printed = finish(start_loop(), status=1)
    assert "train.py: error: " in printed and "another launch is at work here" in printed
    training.resume()
    psutil.wait_procs(users_of(output))  # the training runs to its end
    state = json.loads((output / "imitation/model/trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 6


# The scripts.

SCRIPTS = ("run_spag.sh", "quickstart.sh", "test.sh", "loop/common.sh", "loop/environment.sh")


def test_shellcheck_finds_nothing():
    scripts = [*(f"tools/{script}" for script in SCRIPTS), *glob.glob(f"{ROOT}/configs/*.sh"), ".ci/run"]
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
