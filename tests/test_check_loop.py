"""What the loop checks and chooses before its first stage; the GPUs are pretended."""

import json
import re
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch
import transformers
from helpers import ROOT, call

import utils
from tools import check_loop
from tools.loop import fit

GIB = 2**30
HELP = subprocess.run([ROOT / "tools/run_spag.sh", "--help"], capture_output=True, text=True, check=True).stdout
DEFAULTS = dict(re.findall(r"^  ([A-Z_]+)=(\S*)", HELP, flags=re.MULTILINE))
DEFAULTS |= {"IMITATION_LR": "5e-6", "LEARNING_RATE": "2e-6"}
SETTLED = {"NPROC": "1", "PRECISION": "fp32", "DEEPSPEED": "none", "GRADIENT_CHECKPOINTING": "False"}


@pytest.fixture
def settings(tmp_path, tiny_model) -> dict[str, str]:
    """Settings of a loop that need no look at the machine."""
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbfart\n\n music\nbridge")
    paths = {"MODEL": tiny_model, "WORDS": str(tmp_path / "words.txt"), "OUTPUT": str(tmp_path / "out")}
    return DEFAULTS | SETTLED | paths


@pytest.fixture
def check(tmp_path, settings):
    """Run the program with changed settings; what was said, its answers, and the stored settings."""

    def run(status: int = 0, **changes):
        words = [f"{name}={value}" for name, value in (settings | changes).items()]
        done = call(check_loop.main, tmp_path / "answers", *words, status=status)
        if status:
            assert not (tmp_path / "answers").exists()
            return done.errors
        stored = json.loads((tmp_path / "out/settings.json").read_text())
        assert stored.keys() == settings.keys()
        answers = (tmp_path / "answers").read_text().splitlines()
        (tmp_path / "answers").unlink()
        return done.output, answers, stored

    return run


@pytest.fixture
def pretend_gpus(monkeypatch):
    """Give this machine so many GPUs."""

    def pretend(number: int, gib: int = 80, *, bf16: bool = True, tf32: bool = True) -> None:
        properties = types.SimpleNamespace(total_memory=gib * GIB)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
        monkeypatch.setattr(transformers.utils, "is_torch_tf32_available", lambda: tf32)

    return pretend


@pytest.fixture
def large_model(tmp_path, tiny_model) -> str:
    """A folder of 6.7 billion parameters: headers without tensors, in two files, and a copy of another name."""
    folder = tmp_path / "large"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").unlink()
    tensor = {"dtype": "F32", "shape": [33500, 100000], "data_offsets": [0, 0]}
    header = json.dumps({"weight": tensor, "__metadata__": {"format": "pt"}}).encode()
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(len(header).to_bytes(8, "little") + header)
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return str(folder)


# --- checks ----------------------------------------------------------------------------------------------------------


def test_all_wrong_settings_are_named_and_nothing_is_written(check, tmp_path):
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "wrong.sh").write_text(': "${KL:=0.2}"\n: "${EPOCS:=2}" # a slip\n')
    wrong = {"WORDS": "none.txt", "EPOCHS": "0", "KL": "much", "TEMPERATURE": "0", "DEEPSPEED": "none.json"}
    wrong |= {"ENGINE": "cloud", "SFT_DATA": f"{tmp_path}/empty.json", "FIRST_EPISODES": "none.json", "SEED": "08"}
    wrong |= {"UNTIL": "epoch1_rewards", "MAX_TURNS": "-1", "REPORT": "yes", "CLIP_RANGE": "inf", "DECAY_WEIGHT": "2"}
    wrong |= {"EVAL_SEEDS": "0,1", "SETTINGS": str(tmp_path / "wrong.sh"), "MODEL": ""}
    errors = check(status=2, **wrong)
    for name in wrong.keys() - {"WORDS", "SETTINGS"}:
        assert f"--{name.lower()} " in errors, name
    assert "none.txt: no such file" in errors and f"{tmp_path}/wrong.sh:2: unknown setting EPOCS" in errors
    assert len(errors.splitlines()) == len(wrong) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"GAME": "chess"}, "--game chess"),
        ({"GAME_OPTIONS": "speed=2"}, "speed"),
        ({"CONTROL": "dice"}, "--control is 'dice'"),
        ({"CONTROL": "coin", "REWARDS": "-m mine"}, "--control and --rewards"),
        ({"CONTROL": "coin", "GAME": "twenty_questions"}, "20 Questions pays both roles alike"),
        ({"CONTROL": "sft"}, "--control sft needs --like"),
        ({"CONTROL": "cloning", "SFT_COEFF": "0"}, "--control cloning needs a --sft_coeff"),
        ({"LIKE": "none"}, "--like none"),
        ({"PROMPTS": "none.json"}, "none.json: no such file"),
        ({"EVAL_WORDS": "held=none.txt"}, "none.txt: no such file"),
        ({"GLOBAL_BATCH": "30", "NPROC": "4"}, "--global_batch 30"),
        ({"NNODES": "2"}, "--rdzv_endpoint"),
        ({"TENSOR_PARALLEL_SIZE": "2", "NPROC": "4"}, "--engine vllm"),
        ({"UNTIL": "epoch4_play"}, "--until epoch4_play"),
        ({"PLAY_ARGS": "--chat_template True"}, "--reward_args"),
        ({"EVAL_ARGS": "--seed 'a"}, "--eval_args"),
        ({"LOSERS": "0.5"}, "--detach_kl True"),
        ({"TIES": "0.1"}, "--detach_kl True"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(check, tmp_path, changes, named):
    assert named in check(status=2, **changes) and not (tmp_path / "out").exists()


def test_losers_and_ties_are_accepted_with_a_detached_kl(check):
    check(LOSERS="1", TIES="0.2", DETACH_KL="True")
    check(LOSERS="1", TRAIN_ARGS="--allow_negative_rewards True")


def test_a_large_model_without_a_gpu_is_refused_before_it_plays(check, monkeypatch):
    monkeypatch.setattr(utils, "MOST_ON_CPU", 1000)
    assert "--use_cpu True" in check(status=2, NPROC="auto")
    check(NPROC="auto", TRAIN_ARGS="--use_cpu True")
    check(NPROC="auto", UNTIL="epoch1_play")


def test_the_shell_gets_the_words_of_further_flags(check):
    assert check(EVAL_ARGS="--a 'b \"c' ''")[1][10:] == ["EVAL_ARGS=--a", 'EVAL_ARGS=b "c', "EVAL_ARGS="]
    assert "--eval_args" in check(status=2, EVAL_ARGS="--a 'b\nc'")


@pytest.mark.parametrize(
    "package, changes",
    [
        ("peft", {"LORA_RANK": "4"}),
        ("deepspeed", {"DEEPSPEED": str(ROOT / "configs/zero2.json")}),
        ("lm_eval", {"EVAL_TASKS": "MMLU"}),
    ],
)
def test_a_package_that_a_later_stage_needs_must_be_there(check, monkeypatch, tmp_path, package, changes):
    monkeypatch.setattr(check_loop, "find_spec", lambda name: None)
    assert f"no package {package}" in check(status=2, **changes) and not (tmp_path / "out").exists()
    check(EVAL_TASKS="MMLU", REASONING_ARGS="--lm_eval /env/bin/lm_eval")


# --- choices ---------------------------------------------------------------------------------------------------------

AUTO = dict.fromkeys(SETTLED, "auto")


def test_automatic_choices_follow_the_gpus(check, pretend_gpus):
    pretend_gpus(0)
    assert check(**AUTO)[1][:7] == ["1", "", "False", "", "", "5", ""]
    pretend_gpus(8)
    assert check(**AUTO)[1][:7] == ["8", "--bf16 True --tf32 True", "True", "", "", "5", ""]
    pretend_gpus(1, bf16=False, tf32=False)  # a V100 or T4, where PyTorch emulates bf16
    assert check(**AUTO)[1][1] == "--fp16 True"
    pretend_gpus(1, tf32=False)  # AMD
    _, answers, stored = check(**AUTO)
    assert answers[1] == "--bf16 True" and stored["PRECISION"] == "bf16"


@pytest.mark.parametrize(
    "gpus, gib, changes, file",
    [
        (8, 80, {}, "zero2.json"),
        (8, 24, {}, "zero3.json"),
        (4, 24, {}, "default_offload_opt_param.json"),
        (1, 141, {}, ""),
        (1, 80, {}, "default_offload_opt_param.json"),
        (1, 24, {"LORA_RANK": "4"}, ""),
        (8, 40, {"TRAIN_BATCH": "16"}, "default_offload_opt_param.json"),
    ],
)
def test_deepspeed_is_chosen_by_what_fits(check, pretend_gpus, large_model, gpus, gib, changes, file):
    pretend_gpus(gpus, gib)
    _, answers, stored = check(**AUTO | {"MODEL": large_model} | changes)
    assert answers[6] == (str(ROOT / "configs" / file) if file else "")
    assert stored["DEEPSPEED"] == (answers[6] or "none")


def test_a_model_without_safetensors_is_refused(check, pretend_gpus, tmp_path):
    pretend_gpus(1)
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/config.json").write_text("{}")
    assert "pickled: no weights as safetensors" in check(status=2, **AUTO, MODEL=str(tmp_path / "pickled"))


def test_a_training_that_was_begun_keeps_its_deepspeed_file(check, pretend_gpus, tmp_path):
    (tmp_path / "out/epoch1/model/checkpoint-3").mkdir(parents=True)
    (tmp_path / "out/epoch1/model/derived").mkdir()
    begun = {"deepspeed": str(ROOT / "configs/zero3.json")}
    (tmp_path / "out/epoch1/model/derived/record.json").write_text(json.dumps(begun))
    pretend_gpus(8)
    assert check(**AUTO)[1][6] == str(ROOT / "configs/zero3.json")


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_files_that_transformers_loads(tiny_model, large_model):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    assert fit.count_parameters(Path(tiny_model)) == sum(each.numel() for each in model.parameters())
    assert fit.count_parameters(Path(large_model)) == 6_700_000_000  # consolidated.safetensors is a copy


@pytest.mark.parametrize(
    "way, changes, gib",
    [
        ("none", {}, 115),
        ("zero2", {"NPROC": "8"}, 40),
        ("zero3", {"NPROC": "8"}, 20),
        ("none", {"LORA_RANK": "16"}, 16),
        ("zero3", {"NPROC": "8", "TRAIN_BATCH": "4"}, 23),
    ],
)
def test_the_memory_that_training_takes_of_a_gpu(settings, way, changes, gib):
    """6.7 billion parameters, with gradient checkpointing: tools/loop/README.md names the first four."""
    settings |= {"GRADIENT_CHECKPOINTING": "True"} | changes
    assert round(fit.gpu_bytes(way, settings, 6.7e9) / GIB) == gib


# --- like another run -----------------------------------------------------------------------------------------------


@pytest.fixture
def other_run(tmp_path, settings):
    """Store the settings of another run, and its first games; returns its OUTPUT."""

    def make(name: str = "spag", **changes) -> str:
        folder = tmp_path / name
        (folder / "epoch1/episodes").mkdir(parents=True)
        (folder / "epoch1/episodes/imitation_sampling_words_results.json").write_text("[]")
        (folder / "settings.json").write_text(json.dumps(settings | {"OUTPUT": str(folder)} | changes))
        return str(folder)

    return make


@pytest.mark.parametrize(
    "made, start",
    [
        ({"IMITATION_DATA": "rows.json"}, "{run}/imitation/model"),
        ({"IMITATION_DATA": "rows.json", "LORA_RANK": "4"}, "{run}/imitation/model/merged"),
        ({}, "{model}"),
    ],
)
def test_like_gives_the_start_and_the_first_games_of_another_run(check, other_run, settings, made, start):
    run = other_run(**made)
    games = f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
    start = start.format(run=run, model=settings["MODEL"])
    _, answers, stored = check(LIKE=run, MODEL="")
    assert answers[7:] == [settings["MODEL"], games, start]
    assert (stored["MODEL"], stored["FIRST_EPISODES"]) == (settings["MODEL"], games)
    prompts = str(ROOT / "configs/prompts.json")
    like = other_run("others", MAX_TURNS="4", GAME_OPTIONS="match=word", PROMPTS=prompts)
    assert check(LIKE=like)[1][3:6] == ["match=word", prompts, "4"]
    again = other_run("again", LIKE=run, FIRST_EPISODES=games, **made)  # a run that itself was like the first
    assert check(LIKE=again)[1][7:] == [settings["MODEL"], games, start]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"MODEL": "other"}, "--model other"),
        ({"IMITATION_DATA": "mine.json"}, "--imitation_data mine.json"),
        ({"GAME": "bargain"}, "--game bargain"),
        ({"GAME_OPTIONS": "match=word"}, "--game_options match=word"),
        ({"MAX_TURNS": "3"}, "--max_turns 3"),
        ({"OUTPUT": "{run}"}, "--like"),
    ],
)
def test_a_start_that_is_not_that_of_like_is_refused(check, other_run, changes, named):
    run = other_run(IMITATION_DATA="rows.json", MAX_TURNS="4")
    changes = {name: value.format(run=run) for name, value in changes.items()}
    assert named in check(status=2, LIKE=run, **changes)


def test_like_needs_the_first_games_to_be_there(check, other_run):
    Path(run := other_run(), "epoch1/episodes/imitation_sampling_words_results.json").unlink()
    assert "imitation_sampling_words_results.json: no such file" in check(status=2, LIKE=run)


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "art\nmusic\nbridge\n"),
        ({"GAMES": "2"}, "art\nmusic\n"),
        ({"GAMES": "9", "GAMES_PER_WORD": "2"}, 2 * "art\nmusic\nbridge\n"),
    ],
)
def test_play_gets_the_first_words_so_many_times(check, tmp_path, changes, words):
    _, answers, stored = check(**changes)
    assert (tmp_path / "out/words.txt").read_text() == words
    assert answers[:7] == ["1", "", "False", "", "", "5", ""] and stored["MAX_TURNS"] == "5"


def test_other_words_of_a_loop_are_refused(check, tmp_path):
    *_, before = check()
    assert f"{tmp_path}/out/words.txt" in check(status=2, GAMES="1", TEMPERATURE="0.7")
    assert (tmp_path / "out/words.txt").read_text() == "art\nmusic\nbridge\n"
    assert json.loads((tmp_path / "out/settings.json").read_text()) == before
    *_, after = check(EPOCHS="5")
    assert after == before | {"EPOCHS": "5"}


def test_other_settings_of_a_loop_with_results_are_refused_and_the_old_ones_stay(check, tmp_path):
    check()
    *_, before = check(KL="0.3")  # nothing was made yet
    (tmp_path / "out/epoch1/model").mkdir(parents=True)
    (tmp_path / "out/epoch1/model/train_results.json").write_text("{}")
    assert "KL: 0.3 then, 0.2 now" in check(status=2)
    assert json.loads((tmp_path / "out/settings.json").read_text()) == before
    assert check(KL="0.3", NPROC="1", SAVE_STEPS="0")[2]["SAVE_STEPS"] == "0"


def test_other_machines_write_no_results(tmp_path, settings):
    words = [f"{name}={value}" for name, value in (settings | {"NODE_RANK": "1"}).items()]
    call(check_loop.main, tmp_path / "answers", *words)
    assert (tmp_path / "answers").read_text() and not (tmp_path / "out").exists()
