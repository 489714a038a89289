"""The loop: its commands, what runs, its logs, and what signals do."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import build_tokenizer, load_chat_template
from helpers import ENVIRONMENT, ROOT, Fork, call, copy_model, descendants, finish, start, users_of, wait_for, words_of

import arguments
from tools import run_spag
from tools.assign_rewards import Flags as RewardFlags
from tools.common.files import read_words, write_json
from tools.common.flags import parse_flags
from tools.controls import CONTROLS
from tools.evaluate_belief import Flags as BeliefFlags
from tools.evaluate_games import Flags as MatchFlags
from tools.evaluate_reasoning import Flags as ReasoningFlags
from tools.loop import check
from tools.loop.settings import read_loop, write_record
from tools.loop.stages import StageFailed, Stages, hold_lock
from tools.play_llm_game import Flags as PlayFlags

BECAME = {"processes": 1, "precision": "fp32", "deepspeed": "none", "gradient_checkpointing": False}
STAGES = ["imitation", "epoch1_play", "epoch1_rewards", "epoch1_train", "epoch1_eval", "report"]
FLAGS = {"play_llm_game": PlayFlags, "assign_rewards": RewardFlags, "evaluate_games": MatchFlags}
FLAGS |= {"evaluate_belief": BeliefFlags, "evaluate_reasoning": ReasoningFlags}

# The flags of the commands of an epoch under the paper's settings on 8 GPUs.
TRAINING = """--num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048
  --padding_side right --truncation_side left --lr_scheduler_type cosine --warmup_ratio 0.03 --weight_decay 0.0
  --logging_steps 1 --per_device_eval_batch_size 8 --bf16 True --tf32 True --save_strategy steps --save_steps 0.2
  --save_total_limit 1 --gradient_checkpointing True"""
SAMPLING = """--task_type sampling --max_length 2048 --max_new_tokens 256 --temperature 1.2 --top_k 50 --dtype bfloat16
  --tf32 True"""
COMMANDS = f"""
train.py --output_dir OUT/imitation/model --model_name_or_path MODEL --ref_model_name_or_path MODEL {TRAINING}
  --train_method SFTwithKL --train_data_path DATA/imitation.json --lm_kl_coeff 0.1 --learning_rate 5e-6 --seed 42
tools/play_llm_game.py --seed 43 --attacker_model_name_or_path OUT/imitation/model
  --defender_model_name_or_path OUT/imitation/model --data_path OUT/words.txt --output_dir OUT/epoch1/episodes
  --model_prefix imitation --data_suffix words {SAMPLING}
tools/assign_rewards.py --input_data_path OUT/epoch1/episodes/imitation_sampling_words_results.json
  --output_data_path OUT/epoch1/rows/rows.json --seed 43 --decay_weight 0.8 --losers 0.0 --ties 0.0
  --sft_data_path DATA/sft.json
train.py --output_dir OUT/epoch1/model --model_name_or_path OUT/imitation/model
  --ref_model_name_or_path OUT/imitation/model {TRAINING} --train_method OfflinePO
  --train_data_path OUT/epoch1/rows/rows.json --lm_kl_coeff 0.2 --lm_sft_coeff 0.5 --clip_range 0.2
  --detach_kl False --learning_rate 2e-6 --seed 43
tools/evaluate_games.py --players imitation=OUT/imitation/model epoch1=OUT/epoch1/model --against imitation
  --words played=DATA/words.txt DATA/held_out.txt --output_dir OUT/epoch1/eval {SAMPLING}
tools/report.py OUT
"""
LAUNCH = """-m torch.distributed.run --nproc_per_node 8 --nnodes 1 --rdzv_backend c10d --rdzv_endpoint localhost:0
  --rdzv_id spag-STAGE --rdzv_conf is_host=1,join_timeout=86400,read_timeout=86400"""


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
    settings |= {"imitation.train_data_path": tmp_path / "imitation.json", "global_batch": 4, "processes": 1}
    settings |= {"rewards.sft_data_path": tmp_path / "sft.json", "precision": "fp32", "deepspeed": "none"}
    settings |= {"match.words": json.dumps([f"played={tmp_path / 'words.txt'}", str(tmp_path / "held_out.txt")])}
    return settings | {"gradient_checkpointing": "false"}


@pytest.fixture
def commands(inputs, monkeypatch):
    """The words of each stage's command (of the last report's), as `check=true` prints them."""
    monkeypatch.setattr(run_spag, "ask", lambda loop, steps: check.answer(loop))

    def commands(changes: dict, **more) -> dict[str, list[str]]:
        printed = call(run_spag.main, *words_of(inputs | changes | more), "check=true").output
        by_stage = dict(line.split(": ", 1) for line in printed.splitlines() if not line.startswith("["))
        return {stage: shlex.split(line)[1:] for stage, line in by_stage.items()}

    return commands


def flags_in(words: list[str]) -> dict[str, list[str]]:
    """The values of each flag of a command line."""
    flags: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
        flags.setdefault(name, []).extend([] if word == name else [word])
    return flags


def check_flags(words: list[str]) -> None:
    """The program accepts the flags of this command."""
    place = next(number for number, word in enumerate(words) if word.endswith(".py"))
    program, flags = Path(words[place]).stem, words[place + 1 :]
    if program == "train":
        arguments.parse_arguments([*flags, "--use_cpu", "True"])
    elif program == "controls":
        parse_flags(CONTROLS[flags[0]], flags[1:], description="")
    elif program in FLAGS:
        parse_flags(FLAGS[program], flags, description="")


# The commands.


def test_the_commands_of_an_epoch_are_these_and_the_programs_accept_them(commands, inputs, tmp_path):
    gpus = {"precision": "bf16", "gradient_checkpointing": "true", "processes": 8, "global_batch": 128}
    made = commands(gpus)
    text = COMMANDS.replace("OUT", str(inputs["output"])).replace("DATA", str(tmp_path))
    text = text.replace("MODEL", str(inputs["model"]))
    expected = [line.split() for line in text.replace("\n ", " ").strip().splitlines()]
    assert list(made) == STAGES
    for stage, words, line in zip(STAGES, made.values(), expected, strict=True):
        launch = LAUNCH.replace("STAGE", stage).split() if stage not in ("epoch1_rewards", "report") else []
        assert words[: len(launch) + 1] == [*launch, str(ROOT / line[0])]
        assert flags_in(words[len(launch) + 1 :]) == flags_in(line[1:]), stage
        check_flags(words)
    assert not inputs["output"].exists()


def test_each_epoch_starts_from_the_model_before_and_all_are_measured(commands, inputs):
    changes = {"belief.games": inputs["rewards.sft_data_path"], "belief.split": "held_out", "match_every": 2}
    changes |= {"reasoning.tasks": '["MMLU", "ARC-c:25"]', "reasoning.limit": "3", "epochs": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.loop.check.require", lambda *_: None)
        made = commands(changes)
    lines = {stage: " ".join(words) + " " for stage, words in made.items()}
    out, models = inputs["output"], f"base={inputs['model']} imitation={inputs['output']}/imitation/model"
    for number in (1, 2, 3):
        model, stage = "imitation" if number == 1 else f"epoch{number - 1}", f"epoch{number}"
        assert made[f"{stage}_play"].count(f"{out}/{model}/model") == 2  # attacker and defender
        assert made[f"{stage}_train"].count(f"{out}/{model}/model") == 2  # start and reference
        assert f"{out}/{stage}/episodes/{model}_sampling_words_results.json " in lines[f"{stage}_rewards"]
        assert f"{out}/{stage}/rows/rows.json " in lines[f"{stage}_rewards"]
        assert f"--train_data_path {out}/{stage}/rows/rows.json " in lines[f"{stage}_train"]
        assert all(f"--seed {42 + number} " in lines[f"{stage}_{name}"] for name in ("play", "rewards", "train"))
        assert (f"{stage}_eval" in made) == (number == 2)
        models += f" {stage}={out}/{stage}/model"
    assert f"--players imitation={out}/imitation/model epoch2={out}/epoch2/model " in lines["epoch2_eval"]
    assert f"--models {models.partition(' epoch2')[0]} " in lines["epoch1_belief"]
    assert f"--models epoch2={out}/epoch2/model " in lines["epoch2_belief"]
    assert f"--max_length {2048 - 256} " in lines["epoch2_belief"]  # of a prompt
    assert f"--models {models} " in lines["reasoning"] and "--tasks MMLU ARC-c:25 " in lines["reasoning"]
    check_flags(made["epoch1_belief"])
    check_flags(made["reasoning"])


def test_the_last_report_comes_after_the_benchmarks_which_it_shows(inputs):
    loop = read_loop(words_of(inputs | {"reasoning.tasks": "MMLU", "epochs": 1}))
    assert [step.name for step in run_spag.steps(loop)][-4:] == ["epoch1_eval", "report", "reasoning", "report"]


def test_settings_reach_the_stages(commands, inputs, tmp_path):
    prompts, words = ROOT / "configs/prompts/thinking.json", tmp_path / "two words.txt"
    words.write_text("river\n")
    settings = {"imitation.train_data_path": "", "save_strategy": "no", "game_options": "match=word"}
    settings |= {"prompt_templates": prompts, "rewards.losers": 0.5, "rewards.ties": 0.2, "training.detach_kl": "true"}
    settings |= {"chat_template": "True", "thinking": "True", "lora_rank": 4, "play.per_device_eval_batch_size": 7}
    tokenizer = build_tokenizer("<|im_start|>", "<|im_end|>", chat_template=load_chat_template("chatml"))
    settings["model"] = copy_model(inputs["model"], tmp_path / "model")
    tokenizer.save_pretrained(settings["model"])
    settings |= {"match.max_words": 3, "match.openai_base_url": "*", "play.vllm_args": "--enforce-eager --x '1 2'"}
    settings |= {
        "match.words": json.dumps([str(words), f"own={words.with_name('words.txt')}"]),
        "training.max_grad_norm": "",
    }
    made, model = commands(settings), str(settings["model"])
    expected = {
        "epoch1_play": {
            "--attacker_model_name_or_path": [model],
            "--game_options": ["match=word"],
            "--prompt_templates": [str(prompts)],
            "--chat_template": ["True"],
            "--thinking": ["True"],
            "--per_device_eval_batch_size": ["7"],
            "--vllm_args=--enforce-eager --x '1 2'": [],
        },
        "epoch1_rewards": {
            "--losers": ["0.5"],
            "--chat_template": ["True"],
            "--thinking": ["True"],
            "--tokenizer": [model],
            "--training_prompt": ["play"],
        },
        "epoch1_train": {
            "--save_strategy": ["no"],
            "--lora_rank": ["4"],
            "--lora_merge": ["True"],
            "--learning_rate": ["1e-4"],
            "--detach_kl": ["true"],
        },
        "epoch1_eval": {
            "--players": [f"imitation={model}", f"epoch1={inputs['output']}/epoch1/model/merged"],
            "--words": [str(words), f"own={tmp_path}/words.txt"],
            "--max_words": ["3"],
            "--openai_base_url": ["*"],
        },
        "report": {"--game_options": ["match=word"]},  # no prompt is on its page
    }
    for stage, flags in expected.items():
        assert flags.items() <= flags_in(made[stage]).items(), made[stage]
    assert "imitation" not in made and "--max_grad_norm" not in made["epoch1_train"]


def test_play_and_match_have_fewer_processes_where_a_model_takes_several_gpus(commands):
    made = commands({"processes": 4, "global_batch": 8, "tensor_parallel_size": 2})
    numbers = {stage: flags_in(words).get("--nproc_per_node") for stage, words in made.items()}
    assert numbers["imitation"] == numbers["epoch1_train"] == ["4"]
    assert numbers["epoch1_play"] == numbers["epoch1_eval"] == ["2"]


def test_a_training_without_a_reference_gets_none(commands):
    made = commands({"imitation.train_method": "SFT", "imitation.lm_kl_coeff": ""})
    assert "--ref_model_name_or_path" not in made["imitation"]
    check_flags(made["imitation"])


def finished_run(inputs: dict, epochs: int, folder: Path, **changes) -> Path:
    """What a loop leaves that another one needs to begin like it."""
    loop = read_loop(words_of(inputs | {"output": folder, "epochs": epochs} | changes))
    write_record(loop, BECAME, read_words(loop.words))
    copy_model(inputs["model"], folder / "imitation/model")
    write_json(folder / "imitation/model/settings.json", {"finished": True})
    for epoch in range(1, epochs + 1):
        write_json(folder / f"epoch{epoch}/rows/rows.json", [])
    write_json(folder / "epoch1/episodes/imitation_sampling_words_results.json", [])
    return folder


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_takes_model_and_first_games_of_another_run_and_makes_its_own_rows(
    commands, inputs, tmp_path, control
):
    spag, own = finished_run(inputs, 2, tmp_path / "spag"), tmp_path / "own"
    made = commands({"like": spag, "control": control, "output": own, "epochs": 2, "training.lora_rank": 4})
    plays = CONTROLS[control].plays_games
    assert "imitation" not in made and "epoch1_play" not in made and ("epoch2_play" in made) == plays
    games = spag / "epoch1/episodes/imitation_sampling_words_results.json"
    assert not plays or str(games) in made["epoch1_winners"]
    assert made["epoch1_train"].count(f"{spag}/imitation/model") == 2
    assert "--learning_rate 1e-4" in " ".join(made["epoch1_train"])  # that of LoRA, not the other run's
    assert f"imitation={spag}/imitation/model" in made["epoch2_eval"]
    assert f"{own}/epoch2/rows/rows.json" in made["epoch2_train"]
    check_flags(made["epoch2_train"])
    assert ("--allow_no_game_rows" in made["epoch2_train"]) == (not CONTROLS[control].makes_game_rows)
    words = made["epoch2_rewards"]
    source = f"{own}/epoch2/rows/winners.json" if plays else f"{spag}/epoch2/rows/rows.json"
    assert words[1:6] == [control, "--rows", source, "--output", f"{own}/epoch2/rows/rows.json"]
    check_flags(words)


def test_cloning_averages_over_the_rows_that_the_loss_averages_over(commands):
    assert flags_in(commands({"control": "cloning"})["epoch1_rewards"])["--rows_at_once"] == ["2"]
    by_step = commands({"control": "cloning", "training.loss_normalization": "step", "training.lm_sft_coeff": 0.7})
    flags = flags_in(by_step["epoch1_rewards"])
    assert flags["--rows_at_once"] == ["4"] and flags["--sft_coeff"] == ["0.7"]


# What runs, with stages that only note it.


class Noted:
    """In the place of Stages: notes what runs; fails where a test says."""

    def __init__(self, fails: str = ""):
        self.fails, self.ran = fails, []

    def run(self, name: str, words: list[str], **variables: str) -> None:
        self.ran.append((name, words, variables))
        if name == self.fails:
            raise StageFailed(f"{name} failed; its log: x")

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.ran]


@pytest.fixture
def run(inputs):
    """Run the steps of a loop as Noted does."""

    def run(fails: str = "", **changes) -> Noted:
        loop = read_loop(words_of(inputs | changes))
        noted = Noted(fails)
        run_spag.run(loop, run_spag.planned_steps(loop), noted)
        return noted

    return run


@pytest.mark.parametrize(
    "until, number",
    [
        ("imitation", 1),
        ("epoch1_play", 2),
        ("epoch1_rewards", 3),
        ("epoch1_train", 4),
        ("epoch1_eval", 5),
        ("epoch2_play", 7),
        (None, 11),
    ],
)
def test_the_loop_stops_where_until_says(run, capsys, until, number):
    changes = {"until": until} if until else {}
    second = [stage.replace("1", "2") for stage in STAGES[1:]]
    assert run(epochs=2, **changes).names == [*STAGES, *second][:number]
    assert (f"stopped after {until}" if until else "finished in") in capsys.readouterr().out.splitlines()[-1]


def test_check_prints_the_commands_of_the_stages_that_would_run(commands, inputs):
    assert list(commands(inputs, until="epoch1_play")) == ["imitation", "epoch1_play"]


def test_until_stops_before_the_stage_after_it_where_its_own_stage_does_not_run(run, inputs):
    assert run(until="epoch1_play", first_episodes=inputs["rewards.sft_data_path"]).names == ["imitation"]


def test_several_machines_share_the_stages_and_the_first_one_does_the_rest(run):
    several = {"machines": 2, "rendezvous": "localhost:29500"}
    first, other = run(machine=0, **several), run(machine=1, **several)
    assert first.names == STAGES and other.names == ["imitation", "epoch1_play", "epoch1_train", "epoch1_eval"]
    commands = {name: " ".join(words) for name, words, _ in first.ran}
    for name, words, _ in other.ran:
        place = f"--nnodes 2 --rdzv_backend c10d --rdzv_endpoint localhost:29500 --rdzv_id spag-{name} "
        assert place in commands[name] and " ".join(words) == commands[name].replace("is_host=1", "is_host=0")


def test_processes_share_the_cores_of_a_machine(run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 33)
    variables = {name: variables for name, _, variables in run(processes=2, global_batch=8).ran}
    assert variables["imitation"] == {"OMP_NUM_THREADS": "16"} and variables["epoch1_rewards"] == {}
    assert all(variables == {} for _, _, variables in run().ran)


def test_a_failing_stage_ends_the_loop_and_a_failing_report_does_not(run, capsys, inputs):
    for stage in ("imitation", "epoch1_train"):
        (inputs["output"] / stage.replace("_train", "") / "model/checkpoint-1").mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        run(fails="epoch1_train")
    assert ended.value.code == 1 and "epoch1_train failed" in capsys.readouterr().err
    assert [path.parts[-3] for path in inputs["output"].glob("*/model/checkpoint-1")] == ["epoch1"]  # to go on from
    run(fails="report", epochs=2)
    assert "finished in" in capsys.readouterr().out and not list(inputs["output"].glob("*/model/checkpoint-*"))


# How a stage runs: logs and signals.


def start_stage(folder: Path, script: str, **how) -> subprocess.Popen:
    """Run a shell script as a stage, in a process of its own."""
    code = "import sys; from tools.loop import stages; from tools.common.programs import run_program\n"
    code += "stages.GRACE, (folder, script) = 1, sys.argv[1:]\n"
    code += "run_program(lambda: stages.Stages(folder).run('epoch1_play', ['sh', '-c', script, folder]))"
    return start([*how.pop("launch", []), sys.executable, "-c", code, folder, script], **how)


def log_of(folder: Path) -> str:
    return (folder / "logs/epoch1_play.log").read_text()


def test_the_terminal_shows_warnings_and_the_last_line_of_a_stage_and_its_log_holds_all(tmp_path):
    bar = "games:  50%|###   | 1/2 [00:01<00:01, 1.0game/s]"
    script = f"for rank in 0 1; do echo '{bar}'12:00:0$rank rank $rank WARNING saw something; done"
    script += "; echo speaks${RANK:+ as a rank} $PYTORCH_CUDA_ALLOC_CONF >&2"
    script += f"; echo last words; printf '%s\\r' '{bar}'"
    environment = ENVIRONMENT | {"RANK": "1", "WORLD_SIZE": "2"}  # of whoever launched the loop
    for number in (1, 2):  # of a second start the lines of the first are not told again
        printed = finish(start_stage(tmp_path, script.replace("last words", f"last {number}"), env=environment))
        _, warning, took, last = printed.splitlines()
        assert (warning, last) == ("WARNING: saw something", f"last {number}") and "epoch1_play took" in took
    assert log_of(tmp_path).count("speaks expandable_segments:True\n") == 2 and "last 1" in log_of(tmp_path)


def test_a_machine_but_the_first_one_has_logs_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own handlers
    Stages(str(tmp_path), machine=1).run("epoch1_play", ["echo", "hello"])
    assert "hello" in (tmp_path / "logs/epoch1_play.node1.log").read_text()


def test_a_failing_stage_shows_its_own_error_and_names_its_log(tmp_path):
    bar_and_error = "printf '\\r50%%|##| 1/2 [00:01]'; echo 'train.py: error: no such rows'"
    script = f"for n in 1 2; do {bar_and_error}; done; seq 50; exit 3"
    first, error, last = finish(start_stage(tmp_path, script), status=2).splitlines()
    assert error == "train.py: error: no such rows" and "50\n" in log_of(tmp_path)
    assert str(tmp_path / "logs/epoch1_play.log") in last
    lines = finish(start_stage(tmp_path, "seq 50; exit 1"), status=2).splitlines()
    assert lines[1:-1] == [str(number) for number in range(31, 51)]


def test_a_stage_that_is_killed_says_so(tmp_path):
    printed = finish(start_stage(tmp_path, "kill -9 $$"), status=2)
    assert "epoch1_play was killed by SIGKILL (often out of memory)" in printed


def wait_for_sleep(process: subprocess.Popen) -> psutil.Process:
    """The program `sleep` that a stage has started."""

    def sleeping() -> list[psutil.Process]:
        return [each for each in descendants(process.pid, "sleep") if each.name() == "sleep"]

    assert wait_for(lambda: bool(sleeping()), process)
    return sleeping()[0]


@pytest.mark.parametrize(
    "number, status, script",
    [
        ("SIGINT", 130, "sleep 60; true"),
        ("SIGUSR1", 143, "trap '' TERM; sleep 60; true"),  # as Slurm sends it
        ("SIGTERM", 143, "setsid -w sleep 60; true"),  # as torchrun starts its workers
    ],
)
def test_a_signal_ends_the_loop_and_what_it_has_started(tmp_path, number, status, script):
    process = start_stage(tmp_path, script)
    sleep = wait_for_sleep(process)
    process.send_signal(signal.Signals[number])
    assert "stopped in epoch1_play; rerun the same command to continue" in finish(process, status)
    left = psutil.wait_procs([*users_of(tmp_path), sleep], timeout=10)[1]  # SIGKILL takes a moment
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_terminal_that_is_gone_ends_the_stage_too(tmp_path):
    main_end, terminal = os.openpty()
    process = start_stage(tmp_path, "while sleep 0.1; do printf 'games: 45%%|##| 1/2\\r'; done", stdout=terminal)
    os.close(terminal)
    while b"45%" not in os.read(main_end, 1000):  # before its bar the stage does not write to the terminal
        pass
    os.close(main_end)
    process.wait(timeout=30)
    assert not psutil.wait_procs(users_of(tmp_path), timeout=10)[1]


def test_a_stage_that_is_suspended_for_a_while_goes_on_and_so_does_the_loop(tmp_path):
    process = start_stage(tmp_path, "sleep 1; true")
    stage, itself = wait_for_sleep(process).parent(), psutil.Process(process.pid)
    for each in (stage, itself):  # as Slurm suspends a job
        each.suspend()
    time.sleep(1)
    itself.resume()
    time.sleep(1)
    ended = process.poll()
    stage.resume()
    assert ended is None
    finish(process)


def test_nohup_keeps_the_loop_from_ending_with_its_terminal(tmp_path):
    process = start_stage(tmp_path, "sleep 1; true", launch=["nohup"])
    wait_for_sleep(process)
    process.send_signal(signal.SIGHUP)
    finish(process)


# With the real programs.


def test_another_start_is_refused_until_the_loop_and_after_a_sigkill_its_stage_have_ended(inputs):
    def start_loop(**changes) -> Fork:
        return Fork(["-m", "tools.run_spag", *words_of(inputs | {"until": "imitation"} | changes)])

    def has_lock(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return f"{output}/imitation/model/.settings.lock" in [file.path for file in process.open_files()]
        return False

    def check_refused(**changes) -> None:
        assert f"{output}: another loop is running here" in finish(start_loop(**changes), status=2)

    output, process = inputs["output"], start_loop()
    assert wait_for((output / "words.txt").exists, process)
    before = [(output / name).read_text() for name in ("settings.json", "words.txt")]
    assert wait_for(at_work := lambda: [each for each in users_of(output) if has_lock(each)], process)
    training = min(at_work(), key=psutil.Process.create_time)  # not a child of its own that is about to begin
    training.suspend()  # so that it is at work long enough
    check_refused(max_words=1, **{"training.lm_kl_coeff": 0.3})
    process.kill()
    process.wait()
    check_refused()
    assert [(output / name).read_text() for name in ("settings.json", "words.txt")] == before
    training.resume()
    psutil.wait_procs(users_of(output))  # the training runs to its end
    state = json.loads((output / "imitation/model/trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 6
    os.close(hold_lock(str(output)))  # as the next start will


def test_shellcheck_finds_nothing():
    scripts = [ROOT / ".ci/run", *(path for folder in ("tools", "configs") for path in (ROOT / folder).rglob("*.sh"))]
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "-x", *scripts], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()
