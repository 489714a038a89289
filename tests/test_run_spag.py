"""The loop: its commands, with a stand-in for Python that notes them, its logs, and what signals do."""

import contextlib
import json
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
from tools.controls import Cloning, Sft, Silent
from tools.evaluate_belief import Flags as BeliefFlags
from tools.evaluate_games import Flags as MatchFlags
from tools.flags import parse_flags
from tools.play_llm_game import Flags as PlayFlags

SCRIPT = str(ROOT / "tools" / "run_spag.sh")
STAGES = ["imitation", "epoch1_play", "epoch1_rewards", "epoch1_train", "epoch1_eval", "report"]
FLAGS = {"play_llm_game": PlayFlags, "assign_rewards": RewardFlags, "evaluate_games": MatchFlags}
FLAGS |= {"evaluate_belief": BeliefFlags}

# In the place of Python, but for the loop's own program: notes the command, leaves a checkpoint, does as a test says.
STUB = """#!/bin/sh
case "$1" in */tools/loop/settings.py) exec {python} "$@" ;; esac
{{ printf '%s\\t' "$@"; echo; }} >>{folder}/calls
for word; do [ "$last" != --output_dir ] || mkdir -p "$word/checkpoint-1"; last=$word; done
printf 'games:  45%%|####      | 9/20\\r'
echo "speaks${{RANK:+ as a rank}}" >&2
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
  --baseline none --role_weights paper --sft_data_path {data}/sft.json --chat_template False --thinking False
{launch} {root}/train.py --output_dir {out}/epoch1/model --model_name_or_path {out}/imitation/model
  --ref_model_name_or_path {out}/imitation/model {training} --train_method OfflinePO
  --train_data_path {out}/epoch1/rows/rows.json --lm_kl_coeff 0.2 --lm_sft_coeff 0.5 --clip_range 0.2
  --detach_kl False --learning_rate 2e-6 --seed 43
{launch} {root}/tools/evaluate_games.py --players imitation={out}/imitation/model epoch1={out}/epoch1/model
  --against imitation --words played={data}/words.txt {data}/held_out.txt --seeds 0 --games_per_word 1
  --output_dir {out}/epoch1/eval --game taboo {sampling}
{root}/tools/report.py {out} --game taboo
"""
LAUNCH = """-m torch.distributed.run --nproc_per_node 8 --nnodes 1 --rdzv_backend c10d --rdzv_endpoint localhost:0
  --rdzv_id spag-STAGE --rdzv_conf is_host=1,join_timeout=86400,read_timeout=86400"""
TRAINING = """--num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048
  --padding_side right --truncation_side left --lr_scheduler_type cosine --warmup_ratio 0.03 --weight_decay 0.0
  --logging_steps 1 --eval_strategy no --per_device_eval_batch_size 8 --bf16 True --tf32 True --save_strategy steps
  --save_steps 0.2 --save_total_limit 1 --gradient_checkpointing True"""
SAMPLING = """--task_type sampling --chat_template False --thinking False --max_length 2048 --max_new_tokens 256
  --temperature 1.2 --top_k 50 --dtype bfloat16 --tf32 True --engine auto --tensor_parallel_size 1"""


@pytest.fixture
def inputs(tmp_path, tiny_model) -> dict:
    """Settings of a loop of one epoch over a few words."""
    row = {"query": "Say: ", "target": "I know the word! It is `art`!", "reward": 1.0, "weight": 1.0}
    files = {"imitation.json": json.dumps([row | {"role": "defender"}] * 24), "held_out.txt": "river\n"}
    files |= {
        "sft.json": json.dumps([{"query": "What?", "target": "That."}] * 12),
        "words.txt": "art\nmusic\nbridge\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    settings = {"model": tiny_model, "words": tmp_path / "words.txt", "output": tmp_path / "out", "epochs": 1}
    settings |= {"imitation_data": tmp_path / "imitation.json", "sft_data": tmp_path / "sft.json", "global_batch": 4}
    settings |= {"eval_words": f"played={tmp_path / 'words.txt'} {tmp_path / 'held_out.txt'}", "nproc": 1}
    return settings | {"precision": "fp32", "deepspeed": "none", "gradient_checkpointing": "False"}


class Loop:
    """The script with the stand-in for Python."""

    def __init__(self, folder: Path, settings: dict):
        self.folder, self.settings, self.output = folder, settings, settings["output"]

    def start(self, does: str = "", files: tuple = (), **changes) -> subprocess.Popen:
        """Start it with changed settings; `does` are cases of a shell's `case` over the command's words."""
        (self.folder / "calls").write_text("")
        stub = STUB.format(python=sys.executable, folder=shlex.quote(str(self.folder)), does=does)
        (self.folder / "python").write_text(stub)
        (self.folder / "python").chmod(0o755)
        environment = ENVIRONMENT | {"PYTHON": str(self.folder / "python")}
        environment |= {"RANK": "1", "WORLD_SIZE": "2", "TEMPERATURE": "8"}  # must change nothing
        return start([SCRIPT, *files, *words_of(self.settings | changes)], env=environment)

    def commands(self, does: str = "", **changes) -> dict[str, list[str]]:
        """Run it to its good end; the words of each stage's command (of the last report's)."""
        printed = finish(self.start(does, **changes))
        return dict(zip(re.findall(r"\] (\w+); its log: ", printed), self.calls(), strict=True))

    def calls(self) -> list[list[str]]:
        calls = [line.split("\t")[:-1] for line in (self.folder / "calls").read_text().splitlines()]
        return [words for words in calls if words[0] != "-c"]  # which looks for packages


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
        parse_flags({"sft": Sft, "cloning": Cloning, "silent": Silent}[flags[0]], flags[1:], description="")
    elif program in FLAGS:
        parse_flags(FLAGS[program], flags, description="")


# The commands.


def test_the_commands_of_an_epoch_are_these_and_the_programs_accept_them(loop, tmp_path):
    gpus = {"precision": "bf16", "gradient_checkpointing": "True", "nproc": 8, "global_batch": 128}
    commands = loop.commands(**gpus)
    places = {"root": ROOT, "out": loop.output, "model": loop.settings["model"], "data": tmp_path}
    text = COMMANDS.format(launch=LAUNCH, training=TRAINING, sampling=SAMPLING, **places)
    lines = text.replace("\n ", " ").strip().splitlines()
    expected = {stage: line.replace("STAGE", stage).split() for stage, line in zip(STAGES, lines, strict=True)}
    assert list(commands.items()) == list(expected.items())
    assert not list(loop.output.glob("*/model/checkpoint-*"))  # deleted after each training
    for words in commands.values():
        check_flags(words)


def test_each_epoch_starts_from_the_model_before_and_all_are_measured(loop):
    changes = {"belief_games": loop.settings["sft_data"], "belief_args": "--split held_out"}
    changes |= {"eval_tasks": "MMLU ARC-c:25", "reasoning_args": "--limit 3"}
    commands = loop.commands(epochs=3, eval_every=2, **changes)
    lines = {stage: " ".join(words) + " " for stage, words in commands.items()}
    out, models = loop.output, f"base={loop.settings['model']} imitation={loop.output}/imitation/model"
    for number in (1, 2, 3):
        model, stage = "imitation" if number == 1 else f"epoch{number - 1}", f"epoch{number}"
        assert commands[f"{stage}_play"].count(f"{out}/{model}/model") == 2  # attacker and defender
        assert commands[f"{stage}_train"].count(f"{out}/{model}/model") == 2  # start and reference
        assert f"{out}/{stage}/episodes/{model}_sampling_words_results.json " in lines[f"{stage}_rewards"]
        assert f"{out}/{stage}/rows/rows.json " in lines[f"{stage}_rewards"]
        assert f"--train_data_path {out}/{stage}/rows/rows.json " in lines[f"{stage}_train"]
        assert all(f"--seed {42 + number} " in lines[f"{stage}_{name}"] for name in ("play", "rewards", "train"))
        assert (f"{stage}_eval" in commands) == (number == 2)
        models += f" {stage}={out}/{stage}/model"
    assert f"--players imitation={out}/imitation/model epoch2={out}/epoch2/model " in lines["epoch2_eval"]
    assert f"--models {models.partition(' epoch2')[0]} --games" in lines["epoch1_belief"]
    assert f"--models epoch2={out}/epoch2/model --games" in lines["epoch2_belief"]
    assert f"--models {models} --tasks MMLU ARC-c:25 " in lines["reasoning"]
    check_flags(commands["epoch1_belief"])


def test_settings_reach_the_stages(loop):
    settings = {"imitation_data": "", "save_steps": "0.0", "game_options": "match=word", "play_batch": 7}
    prompts = ROOT / "configs/prompts/thinking.json"
    settings["prompts"] = prompts
    settings |= {"losers": 0.5, "ties": 0.2, "baseline": "role", "role_weights": "none", "detach_kl": "True"}
    settings |= {"chat_template": "True", "thinking": "True", "lora_rank": 4}
    settings["eval_args"] = "--max_words 3 \n --openai_base_url *"
    words = loop.folder / "two words.txt"
    words.write_text("river\n")
    settings["eval_words"] = f"'{words}' own={words.with_name('words.txt')}"
    commands, model = loop.commands(**settings), loop.settings["model"]
    for stage, flags in {
        "epoch1_play": f"--attacker_model_name_or_path {model} .*--game_options match=word "
        f"--prompt_templates {prompts} .*--chat_template True --thinking True .*--per_device_eval_batch_size 7 ",
        "epoch1_rewards": "--losers 0.5 --ties 0.2 --baseline role --role_weights none .*--chat_template True "
        f"--thinking True --tokenizer {model} --training_prompt play ",
        "epoch1_train": "--save_strategy no .*--lora_rank 4 --lora_merge True .*--learning_rate 1e-4 ",
        "epoch1_eval": f"epoch1={loop.output}/epoch1/model/merged .*--max_words 3 --openai_base_url [*] ",
        "report": "--game taboo --game_options match=word $",  # no prompt is on its page
    }.items():
        assert re.search(flags, " ".join(commands[stage]) + " "), commands[stage]
    assert "imitation" not in commands and str(words) in commands["epoch1_eval"]


@pytest.mark.parametrize("control", ["coin_by_length", "cloning", "sft", "silent"])
def test_a_control_takes_model_and_first_games_of_another_run_and_makes_its_own_rows(loop, tmp_path, control):
    spag, own = loop.output, tmp_path / "own"
    loop.commands('*SFTwithKL*) echo \'{"finished": true}\' >"$3/settings.json" ;;', epochs=2)
    games = spag / "epoch1/episodes/imitation_sampling_words_results.json"
    games.write_text("[]")
    commands = loop.commands(control=control, like=spag, output=own, epochs=2, lora_rank=4)
    plays = control in ("coin_by_length", "cloning")
    assert "imitation" not in commands and "epoch1_play" not in commands and ("epoch2_play" in commands) == plays
    assert not plays or str(games) in commands["epoch1_rewards"]
    assert commands["epoch1_train"].count(f"{spag}/imitation/model") == 2
    assert "--learning_rate 1e-4" in " ".join(commands["epoch1_train"])  # that of LORA_RANK, not the other run's
    assert f"imitation={spag}/imitation/model" in commands["epoch2_eval"]
    assert f"{own}/epoch2/rows/rows.json" in commands["epoch2_train"]
    check_flags(commands["epoch2_train"])
    assert ("--allow_no_game_rows" in commands["epoch2_train"]) == (control in ("cloning", "sft"))
    if control == "coin_by_length":
        assert "--permute_outcomes True" in " ".join(commands["epoch2_rewards"])
        return
    words = commands[f"epoch2_{control}"]
    source = f"{own}/epoch2/rows/winners.json" if plays else f"{spag}/epoch2/rows/rows.json"
    assert words[1:6] == [control, "--rows", source, "--output", f"{own}/epoch2/rows/rows.json"]
    check_flags(words)


def test_several_machines_share_the_stages_and_the_first_one_does_the_rest(loop):
    several = {"nnodes": 2, "rdzv_endpoint": "localhost:29500"}
    other = loop.commands(node_rank=1, **several)  # it may come first
    assert sorted(path.name for path in loop.output.iterdir()) == ["epoch1", "imitation", "logs"]
    first = loop.commands(node_rank=0, **several)
    assert list(first) == STAGES and list(other) == ["imitation", "epoch1_play", "epoch1_train", "epoch1_eval"]
    for stage, words in other.items():
        launch = " ".join(first[stage])
        assert f"--nnodes 2 --rdzv_backend c10d --rdzv_endpoint localhost:29500 --rdzv_id spag-{stage} " in launch
        assert " ".join(words) == launch.replace("is_host=1", "is_host=0")
        assert (loop.output / "logs" / f"{stage}.node1.log").is_file()


# Failures, logs, signals.


def test_a_failing_stage_stops_the_loop_and_names_its_log(loop):
    printed = finish(loop.start("*train.py*epoch1/*) echo broken; exit 3 ;;"), status=1)
    log = loop.output / "logs" / "epoch1_train.log"
    assert len(loop.calls()) == STAGES.index("epoch1_train") + 1
    assert "broken" in printed and "broken" in log.read_text() and str(log) in printed.splitlines()[-1]
    assert (loop.output / "epoch1/model/checkpoint-1").is_dir()  # to go on from


def test_the_terminal_shows_warnings_and_the_last_line_of_each_stage_and_logs_hold_all(loop):
    bar = "'games:  50%|###   | 1/2 [00:01<00:01, 1.0game/s]'"
    warns = f"for rank in 0 1; do echo {bar}12:00:0$rank rank $rank WARNING saw something; done"
    printed = finish(loop.start(f"*imitation/model*SFT*) {warns} ;;"))
    assert printed.count("WARNING: saw something") == 1 and printed.count("\nlast words\n") == len(STAGES)
    logs = [(loop.output / "logs" / f"{stage}.log").read_text() for stage in STAGES]
    assert "speaks" not in printed and all("speaks\n" in log and "last words\n" in log for log in logs)


def wait_for_sleep(process: subprocess.Popen) -> psutil.Process:
    """The program `sleep` that a stage has started."""
    assert wait_for(sleeping := lambda: descendants(process.pid, "sleep"), process)
    return sleeping()[0]


@pytest.mark.parametrize(
    "number, status, does",
    [("SIGINT", 130, "sleep 60; true"), ("SIGUSR1", 143, "trap '' TERM; sleep 60; true")],
)
def test_a_signal_ends_the_loop_and_what_it_has_started(loop, number, status, does):
    process = loop.start(f"*play_llm*) {does} ;;")
    sleep = wait_for_sleep(process)
    process.send_signal(signal.Signals[number])
    assert "stopped in epoch1_play; the same command continues" in finish(process, status)
    left = psutil.wait_procs([*users_of(loop.output), sleep], timeout=10)[1]  # SIGKILL takes a moment
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_stage_that_is_suspended_for_a_while_goes_on(loop):
    process = loop.start("*play_llm*) sleep 3; true ;;", until="epoch1_play")
    stage = wait_for_sleep(process).parent()
    stage.suspend()  # as Slurm suspends a job
    time.sleep(2)
    ended = process.poll()
    stage.resume()
    assert ended is None
    finish(process)


# With the real programs.


def test_another_start_is_refused_until_the_loop_and_after_a_sigkill_its_stage_have_ended(inputs):
    def start_loop(**changes) -> subprocess.Popen:
        words = words_of(inputs | {"until": "imitation"} | changes)
        return start([SCRIPT, *words], env=ENVIRONMENT | {"PYTHON": sys.executable})

    def has_lock(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return f"{output}/imitation/model/.settings.lock" in [file.path for file in process.open_files()]
        return False

    def check_refused(**changes) -> None:
        assert f"{output}: another loop is at work here" in finish(start_loop(**changes), status=2)

    output, process = inputs["output"], start_loop()
    assert wait_for((output / "words.txt").exists, process)
    before = [(output / name).read_text() for name in ("settings.json", "words.txt")]
    check_refused(kl=0.3, games=1)
    assert wait_for(at_work := lambda: [each for each in users_of(output) if has_lock(each)], process)
    training = min(at_work(), key=psutil.Process.create_time)  # not a child of its own that is about to begin
    process.kill()
    process.wait()
    training.suspend()  # so that it is at work long enough
    check_refused()
    assert [(output / name).read_text() for name in ("settings.json", "words.txt")] == before
    training.resume()
    psutil.wait_procs(users_of(output))  # the training runs to its end
    state = json.loads((output / "imitation/model/trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 6
    finish(start_loop())


def test_shellcheck_finds_nothing():
    scripts = [ROOT / ".ci/run", *(path for folder in ("tools", "configs") for path in (ROOT / folder).rglob("*.sh"))]
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "-x", *scripts], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()
