"""What the loop checks, chooses and records before its first stage; the GPUs are pretended."""

import json
import re
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch
import transformers
from helpers import ROOT, call, words_of

import utils
from tools.games import load_game
from tools.games.prompts import load_templates, templates_digest
from tools.loop import begin, checks, fit

GIB = 2**30
SETTLED = {"NPROC": "1", "PRECISION": "fp32", "DEEPSPEED": "none", "GRADIENT_CHECKPOINTING": "False"}
AUTO = dict.fromkeys(SETTLED, "auto")


@pytest.fixture
def settings(tmp_path, tiny_model) -> dict[str, str]:
    """Settings of a loop that need no look at the machine."""
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbfart\n\n music\nbridge")
    paths = {"MODEL": tiny_model, "WORDS": str(tmp_path / "words.txt"), "OUTPUT": str(tmp_path / "out")}
    return fit.DEFAULTS | SETTLED | paths


@pytest.fixture
def start(tmp_path, settings):
    """Begin a loop with changed settings: the settings of its record; or what was said, where it is refused."""

    def run(status: int = 0, **changes):
        done = call(begin.main, *words_of(settings | changes), status=status)
        return done.errors if status else json.loads((tmp_path / "out/settings.json").read_text())["settings"]

    return run


@pytest.fixture
def fill(settings):
    """The lines that the shell evaluates, for changed settings: name -> value, and name -> words of an array."""

    def run(**changes) -> dict[str, str | list[str]]:
        lines = call(fit.main, *words_of(settings | changes)).output
        names = re.findall(r"^(\w+)=(\(?)", lines, flags=re.MULTILINE)
        shown = "".join(
            f'for word in "${{{name}[@]}}"; do printf "%s\\0" "$word"; done; printf "\\1"\n' for name, _ in names
        )
        done = subprocess.run(["bash", "-c", lines + shown], capture_output=True, text=True, check=True)
        found = [part.split("\0")[:-1] for part in done.stdout.split("\1")[:-1]]
        return {name: values if array else values[0] for (name, array), values in zip(names, found, strict=True)}

    return run


@pytest.fixture
def pretend_gpus(monkeypatch):
    """Give this machine so many GPUs, and a CPU that may compute in bf16."""

    def pretend(number: int, gib: int = 80, *, bf16: bool = True, tf32: bool = True) -> None:
        properties = types.SimpleNamespace(total_memory=gib * GIB)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
        monkeypatch.setattr(transformers.utils, "is_torch_tf32_available", lambda: tf32 and number > 0)
        monkeypatch.setattr(fit, "cpu_computes_bf16", lambda: bf16)

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


def make(folder: Path, *names: str) -> None:
    """Make files with some content."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("[]")


# --- checks ----------------------------------------------------------------------------------------------------------


def test_all_wrong_settings_are_named_at_once_and_nothing_is_written(start, tmp_path):
    make(tmp_path, "rows.json")
    (tmp_path / "empty.json").write_text("")
    wrong = {"MODEL": "", "EPOCHS": "0", "KL": "much", "TEMPERATURE": "", "DEEPSPEED": "none.json", "SEED": "08"}
    wrong |= {"SFT_DATA": f"{tmp_path}/empty.json", "FIRST_EPISODES": "none.json", "UNTIL": "epoch1_rewards"}
    wrong |= {"IMITATION_DATA": f"{tmp_path}/none.json", "REPORT": "yes", "EVAL_SEEDS": "0,1", "CONTROL": "dice"}
    wrong |= {"GAMES": "few", "NPROC": "all", "TRAIN_BATCH": "1.5", "EVAL_TASKS": "arc-C:25", "EVAL_ARGS": "--seed 'a"}
    wrong |= {"ENGINE": "fast", "TOP_K": "2.5", "MAX_TURNS": "x", "LORA_RANK": "0", "MAX_NEW_TOKENS": "1e2"}
    errors = start(status=2, **wrong, WORDS="")
    for name in wrong:
        assert f"{name}=" in errors, name
    assert "called ARC-c" in errors and not (tmp_path / "out").exists()


@pytest.mark.parametrize("seeds, right", [("0", True), ("3 0", True), ("0 0", False), ("0.5", False), ("", False)])
def test_seeds_of_the_match_are_whole_and_distinct(start, seeds, right):
    errors = start(status=0 if right else 2, EVAL_SEEDS=seeds)
    assert right or f"EVAL_SEEDS={seeds}: must be" in errors


def test_a_package_that_the_settings_need_is_asked_for_at_the_start(start, monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert "need the package vllm" in start(status=2, ENGINE="vllm")
    assert "need the package peft" in start(status=2, LORA_RANK="8")


def test_the_path_of_a_prompt_file_may_hold_blanks(start, tmp_path):
    prompts = tmp_path / "my research" / "prompts.json"
    prompts.parent.mkdir()
    prompts.write_text((ROOT / "configs/prompts.json").read_text())
    start(PROMPTS=str(prompts))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"GAME": "chess"}, "chess"),
        ({"WORDS": "none.txt"}, "none.txt: no such file"),
        ({"GAME_OPTIONS": "speed=2"}, "speed"),
        ({"PROMPTS": "none.json"}, "none.json: no such file"),
        ({"EVAL_WORDS": "held=none.txt"}, "none.txt: no such file"),
        ({"GLOBAL_BATCH": "30", "NPROC": "4"}, "GLOBAL_BATCH=30"),
        ({"NNODES": "2"}, "RDZV_ENDPOINT"),
        ({"TENSOR_PARALLEL_SIZE": "2", "NPROC": "4"}, "ENGINE=vllm"),
        ({"UNTIL": "epoch4_play"}, "UNTIL=epoch4_play"),
        ({"TEMPERATURE": "0.0"}, "TEMPERATURE=0"),
        ({"MAX_LENGTH": "200"}, "MAX_LENGTH=200: must be larger than MAX_NEW_TOKENS=256"),
        ({"PLAY_ARGS": "--chat_template True"}, "CHAT_TEMPLATE=True"),
        ({"CHAT_TEMPLATE": "True"}, "has no chat template"),
        ({"LOSERS": "0.5"}, "DETACH_KL=True"),
        ({"TIES": "0.1"}, "DETACH_KL=True"),
        ({"CONTROL": "sft"}, "--control sft needs"),
        ({"CONTROL": "coin", "GAME": "twenty_questions"}, "20 Questions pays both roles alike"),
        ({"CONTROL": "cloning", "SFT_COEFF": "0"}, "--control cloning needs a --sft_coeff"),
        ({"LIKE": "none"}, "none: no settings.json of a run of the loop"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(start, tmp_path, changes, named):
    assert named in start(status=2, **changes) and not (tmp_path / "out").exists()


def test_losers_and_ties_are_accepted_with_a_detached_kl(start):
    start(LOSERS="1", TIES="0.2", DETACH_KL="True")
    start(LOSERS="1", TRAIN_ARGS="--allow_negative_rewards True")


def test_a_large_model_without_a_gpu_is_refused_before_it_plays(start, monkeypatch):
    monkeypatch.setattr(utils, "MOST_ON_CPU", 1000)
    assert "--use_cpu True" in start(status=2, NPROC="auto")
    start(NPROC="auto", TRAIN_ARGS="--use_cpu True")
    start(NPROC="auto", UNTIL="epoch1_play")


@pytest.mark.parametrize(
    "package, changes",
    [
        ("peft", {"LORA_RANK": "4"}),
        ("deepspeed", {"DEEPSPEED": str(ROOT / "configs/zero2.json")}),
        ("lm_eval", {"EVAL_TASKS": "MMLU"}),
        ("lm_eval", {"EVAL_TASKS": "MMLU", "REASONING_ARGS": "--lm_eval 'accelerate launch -m lm_eval'"}),
    ],
)
def test_a_package_that_a_later_stage_needs_must_be_there(start, monkeypatch, tmp_path, package, changes):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert f"package {package}," in start(status=2, **changes) and not (tmp_path / "out").exists()
    start(EVAL_TASKS="MMLU", REASONING_ARGS="--lm_eval /env/bin/lm_eval")


@pytest.fixture
def imitation_rows(tmp_path):
    """Write a file of rows, and the record that says how it was made; the file's path."""

    def write(prompts: str, chat_template: str | None = None) -> str:
        make(tmp_path, "rows.json")
        settings = {"training_prompt": "random", "tokenizer": {"sha256": chat_template} if chat_template else None}
        settings["prompt_templates"] = {"path": "x", "sha256": prompts}
        utils.write_json(tmp_path / "rows_rewards_settings.json", {"settings": settings})
        return str(tmp_path / "rows.json")

    return write


def test_rows_of_imitation_must_have_the_layout_of_play(start, tmp_path, imitation_rows, caplog):
    game = load_game()
    own = templates_digest(load_templates(game.prompt_file, game))
    start(IMITATION_DATA=imitation_rows(own))
    for made in (imitation_rows("0"), imitation_rows(own, chat_template="1")):
        assert "IMITATION_DATA=" in start(status=2, IMITATION_DATA=made)
    make(tmp_path, "foreign.json")
    assert "WARNING" in call(begin.main, *words_of(start(IMITATION_DATA=f"{tmp_path}/foreign.json"))).errors


# --- choices ---------------------------------------------------------------------------------------------------------


def test_automatic_choices_follow_gpus_and_cpu(fill, start, pretend_gpus):
    names = ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING", "DEEPSPEED", "precision_flags", "dtype")

    def chosen():
        return [fill(**AUTO)[name] for name in names]

    pretend_gpus(0, bf16=False)
    assert chosen() == ["1", "fp32", "False", "", [], "float32"]
    pretend_gpus(0)
    assert chosen() == ["1", "bf16", "False", "", ["--bf16", "True"], "bfloat16"]
    pretend_gpus(8)
    assert chosen() == ["8", "bf16", "True", "", ["--bf16", "True", "--tf32", "True"], "bfloat16"]
    pretend_gpus(1, bf16=False, tf32=False)  # a V100 or T4, where PyTorch emulates bf16
    assert chosen()[4:] == [["--fp16", "True"], "float16"]
    pretend_gpus(1, tf32=False)  # AMD
    assert chosen()[4] == ["--bf16", "True"] and start(**AUTO)["PRECISION"] == "bf16"


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
def test_deepspeed_is_chosen_by_what_fits(fill, start, pretend_gpus, large_model, gpus, gib, changes, file):
    pretend_gpus(gpus, gib)
    chosen = fill(**AUTO | {"MODEL": large_model} | changes)["DEEPSPEED"]
    assert chosen == (str(ROOT / "configs" / file) if file else "")
    assert start(**AUTO | {"MODEL": large_model} | changes)["DEEPSPEED"] == (chosen or "none")


def test_a_model_without_safetensors_is_refused(start, pretend_gpus, tmp_path):
    pretend_gpus(1)
    make(tmp_path, "pickled/config.json")
    assert "pickled: no weights as safetensors" in start(status=2, **AUTO, MODEL=str(tmp_path / "pickled"))


def test_a_training_that_was_begun_keeps_its_deepspeed_file(fill, start, pretend_gpus, tmp_path):
    start(DEEPSPEED=str(ROOT / "configs/zero3.json"))
    make(tmp_path / "out", "epoch1/model/checkpoint-3/complete.json")
    pretend_gpus(8)
    assert fill(**AUTO)["DEEPSPEED"] == str(ROOT / "configs/zero3.json")


def test_the_shell_gets_the_words_of_further_flags(fill):
    words = ["--a", 'b "c', "", "$(x)", "*", "d\ne"]
    assert fill(EVAL_ARGS="--a 'b \"c' '' $(x) * 'd\ne'")["EVAL_ARGS"] == words


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
    """Store the record of another run, and its first games; returns its OUTPUT."""

    def record(name: str = "spag", **changes) -> str:
        folder = tmp_path / name
        make(folder, "epoch1/episodes/imitation_sampling_words_results.json")
        utils.write_json(folder / "settings.json", {"settings": settings | {"OUTPUT": str(folder)} | changes})
        return str(folder)

    return record


@pytest.mark.parametrize(
    "made, first",
    [
        ({"IMITATION_DATA": "rows.json"}, "{run}/imitation/model"),
        ({"IMITATION_DATA": "rows.json", "LORA_RANK": "4"}, "{run}/imitation/model/merged"),
        ({}, "{model}"),
    ],
)
def test_like_gives_the_start_and_the_first_games_of_another_run(fill, start, other_run, settings, made, first):
    run = other_run(**made)
    games = f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
    expected = (settings["MODEL"], games, first.format(run=run, model=settings["MODEL"]))
    filled = fill(LIKE=run, MODEL="")
    assert (filled["MODEL"], filled["FIRST_EPISODES"], filled["like_model"]) == expected
    stored = start(LIKE=run, MODEL="")
    assert (stored["MODEL"], stored["FIRST_EPISODES"]) == expected[:2] and "like_model" not in stored
    again = other_run("again", LIKE=run, FIRST_EPISODES=games, **made)  # a run that itself was like the first
    filled = fill(LIKE=again)
    assert (filled["FIRST_EPISODES"], filled["like_model"]) == expected[1:]


def test_like_gives_game_options_prompts_and_turns(fill, other_run):
    prompts = str(ROOT / "configs/prompts.json")
    filled = fill(LIKE=other_run(MAX_TURNS="4", GAME_OPTIONS="match=word", PROMPTS=prompts))
    assert [filled[name] for name in ("GAME_OPTIONS", "PROMPTS", "MAX_TURNS")] == ["match=word", prompts, "4"]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"MODEL": "other"}, "MODEL=other"),
        ({"IMITATION_DATA": "mine.json"}, "IMITATION_DATA=mine.json"),
        ({"GAME": "bargain"}, "GAME=bargain"),
        ({"GAME_OPTIONS": "match=word"}, "GAME_OPTIONS=match=word"),
        ({"MAX_TURNS": "3"}, "MAX_TURNS=3"),
        ({"OUTPUT": "{run}"}, "LIKE="),
    ],
)
def test_a_start_that_is_not_that_of_like_is_refused(start, other_run, changes, named):
    run = other_run(IMITATION_DATA="rows.json", MAX_TURNS="4")
    changes = {name: value.format(run=run) for name, value in changes.items()}
    assert named in start(status=2, LIKE=run, **changes)


def test_like_needs_the_first_games_to_be_there(start, other_run):
    Path(run := other_run(), "epoch1/episodes/imitation_sampling_words_results.json").unlink()
    assert "imitation_sampling_words_results.json: no such file" in start(status=2, LIKE=run)


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "art\nmusic\nbridge\n"),
        ({"GAMES": "2"}, "art\nmusic\n"),
        ({"GAMES": "9", "GAMES_PER_WORD": "2"}, 2 * "art\nmusic\nbridge\n"),
    ],
)
def test_play_gets_the_first_words_so_many_times(start, tmp_path, changes, words):
    assert start(**changes)["MAX_TURNS"] == "5" and (tmp_path / "out/words.txt").read_text() == words


def test_other_words_of_a_loop_are_refused(start, tmp_path):
    before = start()
    assert f"{tmp_path}/out/words.txt" in start(status=2, GAMES="1", TEMPERATURE="0.7")
    assert (tmp_path / "out/words.txt").read_text() == "art\nmusic\nbridge\n"
    assert start() == before


# Results, and settings that may differ once they are there, or may not.
GAMES = "epoch1/episodes/imitation_sampling_words_rank0.jsonl"
ROWS, MODEL = "epoch1/rows/rows.json", "epoch1/model/train_results.json"


@pytest.mark.parametrize(
    "results, changes, refused",
    [
        ([], {"TEMPERATURE": "0.5", "SEED": "1"}, False),
        (["imitation/model/train_results.json"], {"SEED": "1"}, True),
        (["imitation/model/train_results.json"], {"IMITATION_ARGS": "--x 1"}, True),
        (["imitation/model/checkpoint-3/complete.json"], {"IMITATION_LR": "1"}, True),
        (["imitation/model/train_results.json"], {"KL": "0.3", "PLAY_ARGS": "--x 1", "TIES": "0.0"}, False),
        (["imitation/model/train_results.json"], {"ENGINE": "slots", "TEMPERATURE": "0.9"}, False),
        (["imitation/model/train_results.json"], {"MAX_LENGTH": "512"}, True),
        ([GAMES], {"PLAY_ARGS": "--x 1", "ENGINE": "slots"}, True),
        ([GAMES], {"CHAT_TEMPLATE": "True"}, True),
        ([GAMES], {"KL": "0.3", "REWARD_ARGS": "--x 1", "DECAY_WEIGHT": "0.7"}, False),
        ([ROWS], {"REWARD_ARGS": "--x 1"}, True),
        ([ROWS], {"KL": "0.3", "TRAIN_ARGS": "--x 1"}, False),
        ([MODEL], {"KL": "0.3"}, True),
        ([MODEL], {"TRAIN_ARGS": "--x 1"}, True),
        ([MODEL], {"KL": "0.20", "NPROC": "2", "SAVE_STEPS": "0", "EPOCHS": "5", "VERBOSE": "True"}, False),
        ([MODEL], {"EVAL_WORDS": "held={words}", "EVAL_SEEDS": "0 1"}, False),
        (["epoch1/eval/games_results.json"], {"EVAL_SEEDS": "0 1"}, True),
        ([MODEL], {"TRAIN_BATCH": "4"}, True),
    ],
)
def test_a_setting_binds_once_a_stage_that_uses_it_has_results(start, tmp_path, tiny_model, results, changes, refused):
    shutil.copytree(tiny_model, tmp_path / "model")  # with a chat template
    (tmp_path / "model/chat_template.jinja").touch()
    before = start(MODEL=str(tmp_path / "model"))
    make(tmp_path / "out", *results)
    changes = {name: value.format(words=tmp_path / "words.txt") for name, value in changes.items()}
    found = start(status=2 * refused, MODEL=str(tmp_path / "model"), **changes)
    if refused:
        assert all(f"{name}: " in found for name in changes) and "made with other settings" in found
        assert json.loads((tmp_path / "out/settings.json").read_text())["settings"] == before
    else:
        assert found == before | {name: value for name, value in changes.items() if name != "KL" or value != "0.20"}


def test_a_setting_that_is_newer_than_the_record_has_its_default_there(start, tmp_path):
    start()
    make(tmp_path / "out", MODEL)
    record = json.loads((tmp_path / "out/settings.json").read_text())
    del record["settings"]["CLIP_RANGE"]
    (tmp_path / "out/settings.json").write_text(json.dumps(record))
    assert start() == record["settings"]
    assert "CLIP_RANGE: None then, 0.3 now" in start(status=2, CLIP_RANGE="0.3")


def test_rows_of_a_micro_batch_may_change_where_a_step_is_averaged(start, tmp_path):
    step = {"TRAIN_ARGS": "--loss_normalization step"}
    start(**step)
    make(tmp_path / "out", MODEL)
    assert start(TRAIN_BATCH="4", **step)["TRAIN_BATCH"] == "4"


@pytest.mark.parametrize("record", ["", "[]", '{"MODEL": "x"}'])
def test_results_without_a_record_of_the_loop_are_refused(start, tmp_path, record):
    make(tmp_path / "out", MODEL)
    (tmp_path / "out/settings.json").write_text(record)
    assert "does not say how" in start(status=2)


def test_the_end_marks_the_record_as_finished(start, tmp_path):
    def finished():
        return json.loads((tmp_path / "out/settings.json").read_text())["finished"]

    start()
    make(tmp_path / "out", MODEL)
    start()
    assert not finished()
    call(begin.main, "--end", tmp_path / "out")
    assert finished()
    start()
    assert finished()
    start(EPOCHS="5")
    assert not finished()


def test_other_machines_write_nothing(tmp_path, settings):
    call(begin.main, *words_of(settings | {"NODE_RANK": "1"}))
    assert not (tmp_path / "out").exists()
