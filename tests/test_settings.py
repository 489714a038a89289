"""The settings of the loop: read, filled in, checked and recorded. GPUs are pretended."""

import errno
import fcntl
import json
import random
import re
import subprocess
import types
from pathlib import Path

import pytest
import torch
from conftest import build_tokenizer, load_chat_template
from helpers import ROOT, call, words_of

from tools.games import load_game
from tools.games.chat import ChatTemplate
from tools.games.prompts import load_templates, training_prompt
from tools.loop import settings as loop
from utils import UserError, alpaca_to_row, files_setting, read_json, write_json

SETTLED = {"NPROC": "1", "PRECISION": "fp32", "DEEPSPEED": "none", "GRADIENT_CHECKPOINTING": "False"}


@pytest.fixture
def needed(tmp_path) -> dict[str, str]:
    (tmp_path / "words.txt").write_text("art\nmusic\nbridge\n")
    return SETTLED | {"MODEL": "m", "WORDS": str(tmp_path / "words.txt"), "OUTPUT": str(tmp_path / "out")}


@pytest.fixture
def gpus(monkeypatch):
    """Pretend so many GPUs of this memory; with `bf16` False, PyTorch emulates it on them."""

    def pretend(number: int, gib: int = 0, *, bf16: bool = True):
        card = types.SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)

    return pretend


@pytest.fixture
def start(tmp_path, needed):
    """Begin a loop: the settings of its record; or what is printed, where it is refused."""

    def run(*words, status: int = 0, **changes):
        done = call(loop.main, *words_of(needed | changes), *words, status=status)
        return done.errors if status else json.loads((tmp_path / "out/settings.json").read_text())["settings"]

    return run


def test_of_files_and_words_the_last_one_counts_and_values_are_read_as_by_a_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "ROOT", Path("/My Drive/spag"))
    windows = "\ufeffTOP_K=8\r\nKL=\"0.3\"\r\nEVAL_SEEDS='0 1' # x\r\nSFT_COEFF=\r\nPROMPTS=$root/a\r\n"
    windows += "#EPOCHS=1: isn't read\r\nMODEL=run#3#\r\nWORDS='a #b'#c\r\nIMITATION_DATA='$root/a.json b.json'\r\n"
    (tmp_path / "my.sh").write_bytes(windows.encode())
    read = loop.read_settings(["SEED=6", "TOP_K=7", f"{tmp_path}/my.sh\r", "SEED=7\r"])
    names = ("TOP_K", "SEED", "KL", "EVAL_SEEDS", "SFT_COEFF", "PROMPTS", "EPOCHS", "MODEL", "WORDS")
    assert [read[name] for name in names] == ["8", "7", "0.3", "0 1", "", "/My Drive/spag/a", "3", "run#3#", "a #b#c"]
    assert loop.values(read, "IMITATION_DATA") == ["/My Drive/spag/a.json", "b.json"]


@pytest.mark.parametrize(
    "word, error",
    [
        ("epocs=2", "unknown settings: epocs; "),
        ("EVAL_SEEDS=0 true", "wrong.sh: 'true' is not NAME=VALUE; a value with blanks needs quotes"),
        ("MODEL=", "MODEL=... is missing"),
        ("SEED=4294967293", "SEED=4294967293: "),  # 3 epochs
        ("EPOCHS=two", "EPOCHS=two: expected "),
        ("CONTROL=coin", "CONTROL=coin: expected"),
        ("CONTROL=silent", "CONTROL=silent needs LIKE"),
        ("CONTROL=sft", "CONTROL=sft needs SFT_DATA"),
        ("UNTIL=epoch1_rewards", "UNTIL=epoch1_rewards: expected"),
        ("PROMPTS=../data/released_prompts.json", "no such file, made by python -m tools.prepare_data prompts"),
        ("EVAL_WORDS=held=/dev/null", "/dev/null: no words"),
        ("GAME_OPTIONS=match", "match is ''"),
        ("GLOBAL_BATCH=31", "GLOBAL_BATCH must be a multiple of NPROC x NNODES x TRAIN_BATCH, 2"),
        ("MAX_NEW_TOKENS=2048", "--max_length must be above --max_new_tokens"),
        *((word, f"{word}: expected") for word in ("GAMES=0", "NPROC=two", "THINKING=true", "KL=o.2", "KL=")),
        ("LEARNING_RATE=1e", "LEARNING_RATE=1e: expected"),
        ("EVAL_GAMES_PER_WORD=0", "games_per_word is 0; it must be at least 1"),
        ("ENGINE=vlm", "--engine: invalid choice: 'vlm'"),
        ("BASELINE=Role", "--baseline: invalid choice: 'Role'"),
        ("DECAY_WEIGHT=1.5", "decay_weight is 1.5"),
        ("TEMPERATURE=0", "temperature is 0.0; it must be above 0"),
        ("EVAL_SEEDS=0 x", "--seeds: invalid int value: 'x'"),
        ("EVAL_WORDS=all=/dev/null", "--words all=..."),
        ("EVAL_TASKS=ARC-c,PIQA", "'ARC-c,PIQA' is a list or a pattern"),
        *((f"{stage}_ARGS=--typo 1", "arguments: --typo") for stage in (*loop.STAGES, "TRAIN")),
        ("TRAIN_ARGS=--push_to_hub True --hub_token hf_mine", "TRAIN_ARGS: --hub_token would stand in records"),
        ("IMITATION_ARGS=--hub-token=hf_mine", "--hub-token would stand in records and logs; export HF_TOKEN=..."),
        ("PROMPTS=/dev/null", "/dev/null: not JSON"),
        ("LOSERS=0.5", "DETACH_KL=True"),
        ("BASELINE=role", "DETACH_KL=True"),
        ("GAME=guess_my_city", "words.txt:1: "),
    ],
)
def test_what_would_fail_hours_later_or_be_wrong_is_refused(start, tmp_path, monkeypatch, word, error):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "wrong.sh").write_text(f"KL=0.2\n{word}\n")
    errors = start(tmp_path / "wrong.sh" if "wrong.sh" in error else word, status=2)
    assert error in errors and len(errors.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_tokenizer_with_code_of_its_own_is_allowed_for_rows_as_for_play(start):
    code = "--trust_remote_code True"
    errors = start(f"PLAY_ARGS={code}", "CHAT_TEMPLATE=True", status=2)
    assert f'REWARD_ARGS="{code}"' in errors and len(errors.splitlines()) == 1
    assert start(f"PLAY_ARGS={code}", f"REWARD_ARGS={code}", "CHAT_TEMPLATE=True")["CHAT_TEMPLATE"] == "True"


def test_values_reach_the_shell_as_they_are(needed):
    needed |= {"OUTPUT": f"{needed['OUTPUT']} $(touch x) 'y'"}
    needed["REWARD_ARGS"] = "--input_data_path 'b \"c' '' $(x) * 'd\ne'"
    lines = call(loop.main, *words_of(needed)).output
    script = 'printf "%s\\0" "$OUTPUT" "${REWARD_ARGS[@]}"'
    shown = subprocess.run(["bash", "-c", f"{lines}\n{script}"], capture_output=True, text=True, check=True).stdout
    assert shown.split("\0")[:-1] == [needed["OUTPUT"], "--input_data_path", 'b "c', "", "$(x)", "*", "d\ne"]


@pytest.fixture
def large_model(tmp_path) -> Path:
    """A folder of 6.7 billion parameters in bfloat16, all holes, and a copy that does not count."""
    write_json(tmp_path / "large/config.json", {"dtype": "bfloat16"})
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        with open(tmp_path / "large" / name, "wb") as file:
            file.truncate(6_700_000_000)
    return tmp_path / "large"


@pytest.mark.parametrize(
    "number, gib, bf16, lora, expected",
    [
        (0, 0, False, "", ["1", "fp32", "False", "none"]),
        (1, 80, False, "", ["1", "fp16", "True", "default_offload_opt_param.json"]),  # where PyTorch emulates bf16
        (1, 24, True, "4", ["1", "bf16", "True", "none"]),
        (1, 141, True, "", ["1", "bf16", "True", "none"]),
        (8, 80, True, "", ["8", "bf16", "True", "zero2.json"]),
        (8, 24, True, "", ["8", "bf16", "True", "zero3.json"]),
    ],
)
def test_automatic_settings_follow_the_gpus_and_what_fits(gpus, large_model, number, gib, bf16, lora, expected):
    gpus(number, gib, bf16=bf16)
    settings = loop.read_settings([f"MODEL={large_model}", f"LORA_RANK={lora}"])
    loop.fill(settings)
    settings["DEEPSPEED"] = Path(settings["DEEPSPEED"]).name
    assert [settings[name] for name in ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING", "DEEPSPEED")] == expected


def test_more_processes_than_gpus_and_a_match_that_does_not_fit_are_refused(start, gpus, large_model, tmp_path):
    changes = {"MODEL": str(large_model), "EVAL_WORDS": str(tmp_path / "words.txt"), "NPROC": "4", "PRECISION": "bf16"}
    gpus(2, 80)
    assert "4 processes on this machine need 4 GPUs; it has 2" in start(**changes, status=2)
    gpus(4, 27)  # two models of 12.5 GiB, and 24.3 GiB for them
    assert "EVAL_WORDS= leaves" in start(**changes, status=2)
    start(**changes | {"EVAL_WORDS": ""})
    start(**changes | {"TENSOR_PARALLEL_SIZE": "2"})
    gpus(4, 28)
    start(**changes)
    assert "EVAL_WORDS= leaves" in start(**changes | {"PRECISION": "fp32"}, status=2)
    gpus(0)
    start(**changes)


def test_unusable_gpus_and_messages_without_a_template_are_refused(start, tiny_model, tmp_path, monkeypatch):
    write_json(tmp_path / "sft.json", [{"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}])
    assert "has none" in start(MODEL=tiny_model, SFT_DATA=str(tmp_path / "sft.json"), status=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as the driver counts them, even one that is too old
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "PyTorch cannot use the GPUs" in start(NPROC="auto", status=2)


def test_like_takes_settings_and_first_games_of_another_run_and_its_imitation_that_has_ended(needed, tmp_path):
    run, record = tmp_path / "spag", tmp_path / "spag/imitation/model/settings.json"
    stored = loop.read_file(loop.DEFAULTS_FILE) | {"IMITATION_DATA": "rows.json", "LORA_RANK": "4"}
    stored |= needed | {"UNTIL": "epoch1_play", "CONTROL": "sft", "TEMPERATURE": "0.5", "KL": "0.3"}
    stored |= {"ENGINE": "vllm", "PLAY_BATCH": "7", "TRAIN_BATCH": "4", "X=1;touch INJECTED;Y": "1"}
    write_json(run / "settings.json", {"settings": stored})
    write_json(record, {"finished": True})
    settings = loop.read_settings(["KL=0.4", f"LIKE={run}", "OUTPUT=mine"])
    names = ("IMITATION_MODEL", "FIRST_EPISODES", "TEMPERATURE", "KL", "UNTIL", "CONTROL", "OUTPUT")
    games = f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
    model = f"{run}/imitation/model/merged"
    assert [settings[name] for name in names] == [model, games, "0.5", "0.4", "", "", "mine"]
    machine = ("NPROC", "DEEPSPEED", "GRADIENT_CHECKPOINTING", "ENGINE", "PLAY_BATCH", "PRECISION", "TRAIN_BATCH")
    assert [settings[name] for name in machine] == ["auto", "auto", "auto", "auto", "", "fp32", "4"]
    assert settings.keys() == loop.read_file(loop.DEFAULTS_FILE).keys()  # the shell evaluates no other name
    anew = {"TEMPERATURE=0.8": [model, ""], "MAX_LENGTH=900": [model, ""], "IMITATION_LR=1": ["", ""]}
    kept = ("SEED=1", "PRECISION=bf16", "LORA_RANK=4", "GLOBAL_BATCH=64", "TRAIN_BATCH=1")
    for change, expected in (anew | dict.fromkeys(kept, [model, games])).items():
        settings = loop.read_settings([change, f"LIKE={run}"])
        assert [settings[name] for name in names[:2]] == expected
    write_json(record, {"finished": False})
    with pytest.raises(UserError, match="its imitation has not ended"):
        loop.read_settings([f"LIKE={run}"])
    # A model of imitation that the other run was given stays only where it is not to be trained, now or there.
    for data, change, model in (("rows.json", "IMITATION_DATA=", ""), ("", "IMITATION_LR=1", "given")):
        given = stored | {"IMITATION_DATA": data, "IMITATION_MODEL": "given"}
        write_json(run / "settings.json", {"settings": given})
        assert loop.read_settings([change, f"LIKE={run}"])["IMITATION_MODEL"] == model


def test_rows_of_imitation_must_have_the_layout_of_play(start, tmp_path):
    def rows(prompts: str, chat_template: str | None = None) -> str:
        layout = {"chat_template": chat_template, "prompt_templates": {"path": "x", "sha256": prompts}}
        write_json(tmp_path / "rows_rewards_settings.json", {"settings": layout})
        return str(tmp_path / "rows.json")

    write_json(tmp_path / "rows.json", [{"query": "Say: ", "target": "Hi"}])
    own = files_setting(load_game().prompt_file)["sha256"]
    start(IMITATION_DATA=rows(own))
    assert "are not those of play" in start(status=2, IMITATION_DATA=rows("0"))
    assert "are not those of play" in start(status=2, IMITATION_DATA=rows(own, "1"))
    assert "are not those of play" in start(status=2, IMITATION_DATA=rows(own), THINKING="True")
    tokenizer = build_tokenizer("<|im_start|>", "<|im_end|>", chat_template=load_chat_template("chatml"))
    tokenizer.save_pretrained(tmp_path / "model")
    write_json(tmp_path / "model/config.json", {"model_type": "llama"})
    in_chat = {"MODEL": str(tmp_path / "model"), "CHAT_TEMPLATE": "True"}
    start(IMITATION_DATA=rows(own, ChatTemplate(tokenizer, "model").sha256), **in_chat)
    assert "are not those of play" in start(status=2, IMITATION_DATA=rows(own, "of another model"), **in_chat)
    write_json(tmp_path / "rows_rewards_settings.json", {"settings": {}})  # of tools/controls.py
    start(IMITATION_DATA=str(tmp_path / "rows.json"))


@pytest.fixture
def foreign(tmp_path):
    """Files of rows without a record: begins of games by our rules, the same by others' rules, and SFT rows."""
    game = load_game()
    templates, rng = load_templates(game.prompt_file, game), random.Random(0)
    begins = [training_prompt(game, [], "art", 5, rng=rng, templates=templates) for _ in range(20)]
    others = [begin.replace("defender", "guesser") for begin in begins]
    question = alpaca_to_row({"instruction": "Write a number.", "output": "1"})
    files = {
        "sft": [question],
        "ours": [{"query": begin.strip().replace("\n", ""), "target": "Hi"} for begin in begins],  # in a template
        "others": [{"prompt": begin, "answer": "Hi"} for begin in others],
        "messages": [{"messages": [{"role": "user", "content": begin}]} for begin in others],
        "mixture": [question] * 52_000 + [{"instruction": begin, "output": "Hi"} for begin in others],
    }
    for name, rows in files.items():
        write_json(tmp_path / f"{name}.json", rows)
    return lambda *names: " ".join(str(tmp_path / f"{name}.json") for name in names)


@pytest.mark.parametrize("names", [["others"], ["messages"], ["sft", "others"], ["mixture"]])
def test_games_without_a_rule_of_play_are_no_rows_of_imitation(start, foreign, names):
    errors = start(status=2, IMITATION_DATA=foreign(*names))
    assert "PROMPTS=data/released_prompts.json" in errors and "tools/assign_rewards.py" in errors


def test_other_rows_of_imitation_pass_and_those_that_are_trained_on_already(start, foreign, tmp_path):
    for names in (["sft"], ["sft", "ours"], ["others", "ours"]):
        start(IMITATION_DATA=foreign(*names))
    start(IMITATION_DATA=foreign("others"), IMITATION_MODEL="m")  # as LIKE sets it
    start(IMITATION_DATA=foreign("sft"))
    (tmp_path / "others.json").rename(tmp_path / "sft.json")
    record = tmp_path / "out/imitation/model/settings.json"
    write_json(record, {"finished": False})
    assert "none of play's rules" in start(status=2, IMITATION_DATA=foreign("sft"))
    write_json(record, {"finished": True})
    start(IMITATION_DATA=foreign("sft"))


def test_play_gets_the_first_words_so_many_times(start, tmp_path):
    start(GAMES="2", GAMES_PER_WORD="2")
    assert (tmp_path / "out/words.txt").read_text().split() == ["art", "music"] * 2
    (tmp_path / "out/words.txt").rename(tmp_path / "all.txt")  # no name for a list of a match, but there is none
    start(WORDS=f"{tmp_path}/all.txt")


def test_once_there_are_results_settings_that_change_them_are_refused(start, tmp_path):
    start(SEED="9", IMITATION_LR="5E-06", KL=".5")
    before = start()  # nothing is there yet
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    assert "made with other settings (KL: 0.2 then, 0.3 now)" in start(status=2, KL="0.3")
    assert json.loads((tmp_path / "out/settings.json").read_text())["settings"] == before
    free = {"NPROC": "2", "SAVE_STEPS": "0", "EPOCHS": "5", "EVAL_SEEDS": "0 1"}
    assert start(**free) == before | free


def test_the_first_machine_has_an_output_to_lock_and_a_warning_where_there_are_no_locks(needed, tmp_path, monkeypatch):
    def has_no_locks(number, how):
        raise OSError(errno.ENOTSUP, "not supported")

    assert call(loop.main, "--output", *words_of(needed)).output == f"{tmp_path}/out\n"
    assert call(loop.main, "--output", *words_of(needed), "NODE_RANK=1").output == "\n"
    monkeypatch.setattr(fcntl, "flock", has_no_locks)
    assert "no file locks here" in call(loop.main, "--lock", *words_of(needed)).errors


def test_an_output_that_was_moved_with_model_and_data_inside_goes_on(start, tmp_path, needed):
    def inside(name: str, rows: str) -> dict[str, str]:
        output = tmp_path / name
        files = f"'{output}/a.json' {output}/{rows}"
        return {"OUTPUT": f"{output}", "MODEL": f"{output}/base", "IMITATION_DATA": files}

    for name in ("a.json", "b.json", "c.json"):
        write_json(tmp_path / "out" / name, [{"query": "Say: ", "target": "Hi"}])
    before = start(**inside("out", "b.json"))
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    (tmp_path / "out").rename(tmp_path / "moved")
    call(loop.main, *words_of(needed | inside("moved", "b.json")))
    assert read_json(tmp_path / "moved/settings.json")["settings"] == before | inside("moved", "b.json")
    errors = call(loop.main, *words_of(needed | inside("moved", "c.json")), status=2).errors
    assert "made with other settings (IMITATION_DATA: " in errors


def test_all_files_and_packages_that_are_missing_are_named_at_once(start, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names = ("SFT_DATA", "WORDS", "PROMPTS", "FIRST_EPISODES", "BELIEF_GAMES")
    missing = {name: f"{name}.json" for name in names} | {"EVAL_WORDS": "e=E1 E2", "IMITATION_DATA": "I1 I2"}
    errors = start(status=2, LORA_RANK="4", EVAL_TASKS="PIQA", **missing)
    wanted = [f"{name}.json" for name in names] + ["E1", "E2", "I1", "I2", "peft", "lm_eval"]
    assert len(errors.splitlines()) == 1 and [name for name in wanted if f"{name}: no" not in errors] == wanted[-2:]
    assert "peft is missing: pip install" in errors and "lm_eval is missing: pip install lm-eval" in errors


@pytest.mark.parametrize("name", ["llama2_7b", "qwen3_4b", "tiny", "english"])
def test_the_files_of_settings_are_read(name):
    assert loop.read_settings([f"{ROOT}/configs/{name}.sh"]).keys() == loop.read_file(loop.DEFAULTS_FILE).keys()


def test_every_setting_has_its_meaning_in_the_file_of_defaults():
    text = loop.DEFAULTS_FILE.read_text()
    settings = loop.read_file(loop.DEFAULTS_FILE)
    assert re.findall(r"^([A-Z_]+)=.* # \w", text, flags=re.MULTILINE) == list(settings)


def test_a_section_says_what_a_change_of_its_settings_means():
    text = """
        imitation: MODEL IMITATION_DATA IMITATION_LR IMITATION_KL IMITATION_ARGS
        play: IMITATION_MODEL WORDS GAME GAME_OPTIONS PROMPTS CHAT_TEMPLATE THINKING MAX_TURNS GAMES GAMES_PER_WORD
            MAX_LENGTH MAX_NEW_TOKENS TEMPERATURE TOP_K FIRST_EPISODES PLAY_ARGS
        training: SEED PRECISION SFT_DATA DECAY_WEIGHT LOSERS TIES BASELINE ROLE_WEIGHTS REWARD_ARGS GLOBAL_BATCH
            LEARNING_RATE KL SFT_COEFF CLIP_RANGE DETACH_KL LORA_RANK TRAIN_ARGS
        run: LIKE CONTROL
        scope: EPOCHS TRAIN_BATCH SAVE_STEPS EVAL_WORDS EVAL_SEEDS EVAL_GAMES_PER_WORD EVAL_EVERY EVAL_ARGS EVAL_TASKS
            REASONING_ARGS BELIEF_GAMES BELIEF_ARGS REPORT
        machine: OUTPUT UNTIL NPROC NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID TENSOR_PARALLEL_SIZE PLAY_BATCH ENGINE
            DEEPSPEED GRADIENT_CHECKPOINTING
    """
    sections = dict(re.findall(r"(\w+):([A-Z_\s]+)", text))
    for name, settings in sections.items():
        assert loop.section(name) == set(settings.split())
    assert loop.section(*sections) == loop.read_file(loop.DEFAULTS_FILE).keys()
