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

SETTLED = {"NPROC": "1", "PRECISION": "fp32", "DEEPSPEED": "none", "GRADIENT_CHECKPOINTING": "False"}


@pytest.fixture
def needed(tmp_path) -> dict[str, str]:
    (tmp_path / "words.txt").write_text("art\nmusic\nbridge\n")
    return SETTLED | {"MODEL": "m", "WORDS": str(tmp_path / "words.txt"), "OUTPUT": str(tmp_path / "out")}


@pytest.fixture
def start(tmp_path, needed):
    """Begin a loop: the settings of its record; or what is printed, where it is refused."""

    def run(*words, status: int = 0, **changes):
        done = call(loop.main, *words_of(needed | changes), *words, status=status)
        return done.errors if status else json.loads((tmp_path / "out/settings.json").read_text())["settings"]

    return run


def test_of_files_and_words_the_last_one_counts_and_values_are_read_as_by_a_shell(tmp_path):
    windows = "\ufeffTOP_K=8\r\nKL=\"0.3\"\r\nEVAL_SEEDS='0 1' # x\r\nSFT_COEFF=\r\nPROMPTS=$root/a\r\n"
    (tmp_path / "my.sh").write_bytes(windows.encode())
    read = loop.read_settings(["SEED=6", "TOP_K=7", f"{tmp_path}/my.sh\r", "SEED=7\r"])
    names = ("TOP_K", "SEED", "KL", "EVAL_SEEDS", "SFT_COEFF", "PROMPTS", "EPOCHS")
    assert [read[name] for name in names] == ["8", "7", "0.3", "0 1", "", f"{ROOT}/a", "3"]


@pytest.mark.parametrize(
    "word, error",
    [
        ("epocs=2", "unknown setting epocs; did you mean EPOCHS?"),
        ("EVAL_SEEDS=0 true", "wrong.sh: 'true' is not NAME=VALUE; a value with blanks needs quotes"),
        ("MODEL=", "MODEL=... is missing"),
        ("EPOCHS=two", "EPOCHS=two: expected "),
        ("CONTROL=coin", "CONTROL=coin: expected"),
        ("CONTROL=sft", "CONTROL=sft needs LIKE"),
        ("UNTIL=epoch1_rewards", "UNTIL=epoch1_rewards: expected"),
        ("SFT_DATA=none.json", "none.json: no such file"),
        ("EVAL_WORDS=held=none.txt", "none.txt"),
        ("EVAL_WORDS=held=/dev/null", "/dev/null: no words"),
        ("GAME_OPTIONS=match", "match is ''"),
        ("GLOBAL_BATCH=31", "GLOBAL_BATCH must be a multiple of NPROC x NNODES x TRAIN_BATCH, 2"),
        ("MAX_NEW_TOKENS=2048", "MAX_LENGTH must be above MAX_NEW_TOKENS"),
        ("GAMES=0", "GAMES=0: expected"),
        ("LOSERS=0.5", "DETACH_KL=True"),
        ("BASELINE=role", "DETACH_KL=True"),
        ("GAME=guess_my_city", "words.txt:1: "),
        ("EVAL_TASKS=PIQA", "lm_eval is missing: pip install lm-eval"),
        ("LORA_RANK=8", "peft is missing: pip install"),
    ],
)
def test_what_would_fail_hours_later_or_be_wrong_is_refused(start, tmp_path, monkeypatch, word, error):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "wrong.sh").write_text(f"KL=0.2\n{word}\n")
    errors = start(tmp_path / "wrong.sh" if "wrong.sh" in error else word, status=2)
    assert error in errors and len(errors.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_values_reach_the_shell_as_they_are(needed):
    needed |= {"OUTPUT": f"{needed['OUTPUT']} $(touch x) 'y'", "EVAL_ARGS": "--a 'b \"c' '' $(x) * 'd\ne'"}
    lines = call(loop.main, *words_of(needed)).output
    script = 'printf "%s\\0" "$OUTPUT" "${EVAL_ARGS[@]}"'
    shown = subprocess.run(["bash", "-c", f"{lines}\n{script}"], capture_output=True, text=True, check=True).stdout
    assert shown.split("\0")[:-1] == [needed["OUTPUT"], "--a", 'b "c', "", "$(x)", "*", "d\ne"]


@pytest.fixture
def large_model(tmp_path) -> Path:
    """A folder of 6.7 billion parameters in bfloat16, all holes, and a copy that does not count."""
    write_json(tmp_path / "large/config.json", {"dtype": "bfloat16"})
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        with open(tmp_path / "large" / name, "wb") as file:
            file.truncate(6_700_000_000)
    return tmp_path / "large"


@pytest.mark.parametrize(
    "gpus, gib, bf16, lora, expected",
    [
        (0, 0, False, "", ["1", "fp32", "False", "none"]),
        (1, 80, False, "", ["1", "fp16", "True", "default_offload_opt_param.json"]),  # where PyTorch emulates bf16
        (1, 24, True, "4", ["1", "bf16", "True", "none"]),
        (1, 141, True, "", ["1", "bf16", "True", "none"]),
        (8, 80, True, "", ["8", "bf16", "True", "zero2.json"]),
        (8, 24, True, "", ["8", "bf16", "True", "zero3.json"]),
    ],
)
def test_automatic_settings_follow_the_gpus_and_what_fits(monkeypatch, large_model, gpus, gib, bf16, lora, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=gib * 2**30))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    settings = loop.read_settings([f"MODEL={large_model}", f"LORA_RANK={lora}"])
    loop.fill(settings)
    settings["DEEPSPEED"] = Path(settings["DEEPSPEED"]).name
    assert [settings[name] for name in ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING", "DEEPSPEED")] == expected


def test_unusable_gpus_and_messages_without_a_template_are_refused(start, tiny_model, tmp_path, monkeypatch):
    write_json(tmp_path / "sft.json", [{"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}])
    assert "has none" in start(MODEL=tiny_model, SFT_DATA=str(tmp_path / "sft.json"), status=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as the driver counts them, even one that is too old
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "PyTorch cannot use the GPUs" in start(NPROC="auto", status=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(loop.shutil, "which", lambda program: program)
    assert "built for CPUs" in start(NPROC="auto", status=2)


def test_like_takes_settings_and_first_games_of_another_run_and_its_imitation_that_has_ended(needed, tmp_path):
    run, record = tmp_path / "spag", tmp_path / "spag/imitation/model/settings.json"
    stored = loop.read_file(loop.DEFAULTS_FILE) | {"IMITATION_DATA": "rows.json", "LORA_RANK": "4"}
    stored |= needed | {"UNTIL": "epoch1_play", "CONTROL": "sft", "TEMPERATURE": "0.5", "KL": "0.3"}
    write_json(run / "settings.json", {"settings": stored})
    write_json(record, {"finished": True})
    settings = loop.read_settings(["KL=0.4", f"LIKE={run}", "OUTPUT=mine"])
    names = ("IMITATION_MODEL", "FIRST_EPISODES", "TEMPERATURE", "KL", "UNTIL", "CONTROL", "OUTPUT")
    games = f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
    model = f"{run}/imitation/model/merged"
    assert [settings[name] for name in names] == [model, games, "0.5", "0.4", "", "", "mine"]
    for change, expected in (("TEMPERATURE=0.8", [model, ""]), ("IMITATION_LR=1", ["", ""])):
        settings = loop.read_settings([change, f"LIKE={run}"])
        assert [settings[name] for name in names[:2]] == expected
    write_json(record, {"finished": False})
    with pytest.raises(UserError, match="its imitation has not ended"):
        loop.read_settings([f"LIKE={run}"])


def test_rows_of_imitation_must_have_the_layout_of_play(start, tmp_path):
    def rows(prompts: str, chat_template: str | None = None) -> str:
        layout = {"chat_template": chat_template, "prompt_templates": {"path": "x", "sha256": prompts}}
        write_json(tmp_path / "rows_rewards_settings.json", {"settings": layout})
        return str(tmp_path / "rows.json")

    own = files_setting(load_game().prompt_file)["sha256"]
    start(IMITATION_DATA=rows(own))
    assert "are not those of play" in start(status=2, IMITATION_DATA=rows("0"))
    assert "are not those of play" in start(status=2, IMITATION_DATA=rows(own, "1"))
    assert "are not those of play" in start(status=2, IMITATION_DATA=rows(own), THINKING="True")
    start(IMITATION_DATA="foreign.json")  # rows of others have no record: a warning
    write_json(tmp_path / "rows_rewards_settings.json", {"settings": {}})  # of tools/controls.py
    start(IMITATION_DATA=str(tmp_path / "rows.json"))


def test_play_gets_the_first_words_so_many_times(start, tmp_path):
    start(GAMES="2", GAMES_PER_WORD="2")
    assert (tmp_path / "out/words.txt").read_text().split() == ["art", "music"] * 2


def test_once_there_are_results_settings_that_change_them_are_refused(start, tmp_path):
    start(SEED="9")
    before = start()  # nothing is there yet
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    assert "made with other settings (KL: 0.2 then, 0.3 now)" in start(status=2, KL="0.3")
    assert json.loads((tmp_path / "out/settings.json").read_text())["settings"] == before
    free = {"NPROC": "2", "SAVE_STEPS": "0", "EPOCHS": "5", "EVAL_SEEDS": "0 1"}
    assert start(**free) == before | free


@pytest.mark.parametrize("name", ["llama2_7b", "qwen3_4b", "tiny", "english"])
def test_the_files_of_settings_are_read(name):
    assert loop.read_settings([f"{ROOT}/configs/{name}.sh"]).keys() == loop.read_file(loop.DEFAULTS_FILE).keys()


def test_every_setting_has_its_meaning_in_the_file_of_defaults():
    text = loop.DEFAULTS_FILE.read_text()
    settings = loop.read_file(loop.DEFAULTS_FILE)
    assert re.findall(r"^([A-Z_]+)=.* # \w", text, flags=re.MULTILINE) == list(settings)
    assert loop.MAY_DIFFER | {*loop.FILES, *loop.PATTERNS} <= settings.keys()
