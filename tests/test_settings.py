"""The settings of the loop: read, filled in, checked and recorded. GPUs are pretended."""

import json
import re
import subprocess
import types
from pathlib import Path

import pytest
import torch
from helpers import ROOT, call, words_of

from tools.games import load_game
from tools.loop import settings as loop
from utils import UserError, files_setting, write_json

GIB = 2**30
SETTLED = {"NPROC": "1", "PRECISION": "fp32", "DEEPSPEED": "none", "GRADIENT_CHECKPOINTING": "False"}
TRAINED = "imitation/model/train_results.json"


@pytest.fixture
def needed(tmp_path) -> dict[str, str]:
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbfart\n\n music\nbridge")
    return SETTLED | {"MODEL": "m", "WORDS": str(tmp_path / "words.txt"), "OUTPUT": str(tmp_path / "out")}


@pytest.fixture
def start(tmp_path, needed):
    """Begin a loop: the settings of its record; or what is printed, where it is refused."""

    def run(*files, status: int = 0, **changes):
        done = call(loop.main, *files, *words_of(needed | changes), status=status)
        return done.errors if status else json.loads((tmp_path / "out/settings.json").read_text())["settings"]

    return run


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("[]")


# Reading.


def test_of_files_and_words_the_last_one_counts(tmp_path):
    windows = "\ufeffTOP_K=8\r\nKL=\"0.3\"\r\nEVAL_SEEDS='0 1' # x\r\nSFT_COEFF=\r\nPROMPTS=$root/a#b\r\n"
    (tmp_path / "my settings.sh").write_bytes(windows.encode())
    read = loop.read_settings(["SEED=6", "TOP_K=7", f"{tmp_path}/my settings.sh\r", "SEED=7\r"])
    names = ("TOP_K", "SEED", "KL", "EVAL_SEEDS", "SFT_COEFF", "PROMPTS", "EPOCHS")
    assert [read[name] for name in names] == ["8", "7", "0.3", "0 1", "", f"{ROOT}/a#b", "3"]


@pytest.mark.parametrize(
    "word, error",
    [
        ("--output", "--output: neither a setting NAME=VALUE nor a file"),
        ("epocs=2", "unknown setting epocs; did you mean EPOCHS?"),
        ("EVAL_SEEDS=0 true", "wrong.sh:2: expected NAME=VALUE, a value with blanks in quotes"),
    ],
)
def test_what_is_no_setting_is_refused_with_the_nearest_name(start, tmp_path, word, error):
    (tmp_path / "wrong.sh").write_text(f"KL=0.2\n{word}\n")
    errors = start(tmp_path / "wrong.sh" if "wrong.sh" in error else word, status=2)
    assert error in errors and len(errors.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"MODEL": ""}, "MODEL=... is missing"),
        ({"EPOCHS": "08"}, "EPOCHS=08: expected "),
        ({"CONTROL": "coin"}, "CONTROL=coin: expected"),
        ({"UNTIL": "epoch1_rewards"}, "UNTIL=epoch1_rewards: expected"),
        ({"SFT_DATA": "none.json"}, "SFT_DATA=none.json: no such file"),
        ({"IMITATION_DATA": "{words} none.json"}, "IMITATION_DATA=none.json: no such file"),
        ({"EVAL_WORDS": "held=none.txt"}, "EVAL_WORDS=none.txt: no such file"),
        ({"GLOBAL_BATCH": "30", "NPROC": "4"}, "GLOBAL_BATCH is no multiple of the 8 rows"),
        ({"LOSERS": "0.5"}, "DETACH_KL=True"),
        ({"BASELINE": "role"}, "DETACH_KL=True"),
        ({"GAME": "guess_my_city"}, "words.txt:1: "),
    ],
)
def test_what_would_fail_hours_later_or_be_wrong_is_refused(start, tmp_path, changes, error):
    changes = {name: value.replace("{words}", f"{tmp_path}/words.txt") for name, value in changes.items()}
    assert error in start(status=2, **changes) and not (tmp_path / "out").exists()


def test_values_reach_the_shell_as_they_are(needed):
    needed |= {"OUTPUT": f"{needed['OUTPUT']} $(touch x) 'y'", "EVAL_ARGS": "--a 'b \"c' '' $(x) * 'd\ne'"}
    lines = call(loop.main, *words_of(needed)).output
    script = 'printf "%s\\0" "$OUTPUT" "${EVAL_ARGS[@]}"'
    shown = subprocess.run(["bash", "-c", f"{lines}\n{script}"], capture_output=True, text=True, check=True).stdout
    assert shown.split("\0")[:-1] == [needed["OUTPUT"], "--a", 'b "c', "", "$(x)", "*", "d\ne"]


# Filling in.


@pytest.mark.parametrize(
    "gpus, bf16, expected",
    [
        (0, False, ["1", "fp32", "False", "none"]),
        (8, True, ["8", "bf16", "True", "zero2.json"]),
        (1, False, ["1", "fp16", "True", "default_offload_opt_param.json"]),  # a V100, where PyTorch emulates bf16
    ],
)
def test_automatic_settings_follow_gpus_and_cpu(monkeypatch, large_model, gpus, bf16, expected):
    properties = types.SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
    monkeypatch.setattr(loop, "cpu_computes_bf16", lambda: bf16)
    settings = loop.read_settings([f"MODEL={large_model}"])
    loop.fill(settings)
    settings["DEEPSPEED"] = Path(settings["DEEPSPEED"]).name
    assert [settings[name] for name in ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING", "DEEPSPEED")] == expected


@pytest.fixture
def large_model(tmp_path) -> Path:
    """A folder of 6.7 billion parameters in bfloat16, all holes, and a copy that does not count."""
    folder = tmp_path / "large"
    folder.mkdir()
    write_json(folder / "config.json", {"dtype": "bfloat16"})
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        with open(folder / name, "wb") as file:
            file.truncate(6_700_000_000)
    return folder


@pytest.mark.parametrize(
    "gpus, gib, lora, file",
    [
        (8, 80, "", "zero2.json"),
        (8, 24, "", "zero3.json"),
        (4, 24, "", "default_offload_opt_param.json"),
        (1, 141, "", "none"),
        (1, 80, "", "default_offload_opt_param.json"),
    ],
)
def test_deepspeed_is_chosen_by_what_fits(large_model, gpus, gib, lora, file):
    settings = {"MODEL": str(large_model), "LORA_RANK": lora}
    assert Path(loop.deepspeed_file(settings, gpus, gib * GIB)).name == file


# Another run.


def test_like_takes_settings_and_first_games_of_another_run_and_its_imitation_that_has_ended(needed, tmp_path):
    run, record = tmp_path / "spag", tmp_path / "spag/imitation/model/settings.json"
    stored = loop.read_file(loop.DEFAULTS_FILE) | needed | {"UNTIL": "epoch1_play", "TEMPERATURE": "0.5", "KL": "0.3"}
    stored |= {"IMITATION_DATA": needed["WORDS"], "LORA_RANK": "4"}
    write_json(run / "settings.json", {"settings": stored})
    write_json(record, {"finished": True})
    settings = loop.read_settings(["KL=0.4", f"LIKE={run}", "OUTPUT=mine"])
    names = ("IMITATION_MODEL", "FIRST_EPISODES", "TEMPERATURE", "KL", "UNTIL", "OUTPUT")
    games = f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
    assert [settings[name] for name in names] == [f"{run}/imitation/model/merged", games, "0.5", "0.4", "", "mine"]
    write_json(record, {"finished": False})
    with pytest.raises(UserError, match="its imitation has not ended"):
        loop.read_settings([f"LIKE={run}"])


def test_rows_of_imitation_must_have_the_layout_of_play(start, tmp_path):
    def rows(prompts: str, chat_template: str | None = None) -> str:
        make(tmp_path, "rows.json")
        layout = {"chat_template": chat_template, "prompt_templates": {"path": "x", "sha256": prompts}}
        write_json(tmp_path / "rows_rewards_settings.json", {"settings": layout})
        return str(tmp_path / "rows.json")

    own = files_setting(load_game().prompt_file)["sha256"]
    start(IMITATION_DATA=rows(own))
    assert "made with other prompts" in start(status=2, IMITATION_DATA=rows("0"))
    assert "rows with a chat template" in start(status=2, IMITATION_DATA=rows(own, "1"))
    make(tmp_path, "foreign.json")
    start(IMITATION_DATA=f"{tmp_path}/foreign.json")  # rows of others have no record: a warning


# The record.


def test_play_gets_the_first_words_so_many_times(start, tmp_path):
    start(GAMES="2", GAMES_PER_WORD="2")
    assert (tmp_path / "out/words.txt").read_text().split() == ["art", "music"] * 2


def test_once_there_are_results_settings_that_change_them_are_refused(start, tmp_path):
    start(SEED="9")
    before = start()  # nothing is there yet
    make(tmp_path / "out", TRAINED)
    errors = start(status=2, KL="0.3")
    assert "made with other settings (KL: 0.2 then, 0.3 now)" in errors
    assert json.loads((tmp_path / "out/settings.json").read_text())["settings"] == before
    free = {"NPROC": "2", "SAVE_STEPS": "0", "EPOCHS": "5", "EVAL_SEEDS": "0 1"}
    assert start(**free) == before | free


def test_every_setting_has_its_meaning_in_the_file_of_defaults():
    text = loop.DEFAULTS_FILE.read_text()
    settings = loop.read_file(loop.DEFAULTS_FILE)
    assert re.findall(r"^([A-Z_]+)=.* # \w", text, flags=re.MULTILINE) == list(settings)
    assert loop.MAY_DIFFER | {*loop.FILES, *loop.PATTERNS} <= settings.keys()
