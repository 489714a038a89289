"""What only a GPU can show: python -m pytest tests/gpu. Without a GPU all of it is skipped."""

import importlib.util
import json
import math
import operator
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, build_llama
from helpers import ENVIRONMENT, TORCHRUN, finish, flags_of, start, words_of
from test_engine import answer, conversation, generate, llama, sampling
from test_readme import TOP, blocks

from tools.common.files import read_json, read_json_or_jsonl, read_words, write_records
from tools.engine import vllm
from tools.engine.random_model import train_tokenizer
from tools.engine.scheduler import BLOCK
from tools.engine.slots import SlotEngine
from tools.games import load_game
from tools.games.prompts import default_templates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# CPU=1 shows that a test runs; check.sh does so.
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and os.environ.get("CPU") != "1", reason="there is no GPU")
DEEPSPEED = {"none": None, "zero2": "zero2.json", "zero3": "zero3.json", "offload": "default_offload_opt_param.json"}


@pytest.mark.parametrize("blocks", [999, 30])
def test_greedy_replies_of_the_slot_engine_are_those_of_generate(blocks):
    plain, local = (llama(sampling(max_length=1500, max_new_tokens=40), num_key_value_heads=2) for _ in range(2))
    for each in (plain, local):
        each.model.to(DEVICE)
    engine = SlotEngine(local, 16, blocks * BLOCK)
    for prompts in conversation(games=24, turns=3):
        equal = sum(map(operator.eq, answer(engine, prompts), generate(plain, prompts)))
        # Kernels round differently, and of two tokens that are nearly equal the other may win.
        assert equal > 0.95 * len(prompts)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A model, words that random replies say now and then, and SFT rows.

    The model is saved in bf16, as published ones are: DeepSpeed rounds others to bf16 when it loads them.
    """
    folder = tmp_path_factory.mktemp("gpu")
    texts = read_words(ROOT / "data/target_words.txt") + 20 * default_templates(load_game("taboo"))["rules"]
    tokenizer = train_tokenizer(texts, 8000)
    for part in (
        tokenizer,
        build_llama(0, len(tokenizer), hidden_size=128, dtype=torch.bfloat16),
    ):  # vLLM knows no heads of 16
        part.save_pretrained(folder / "model")
    (folder / "words.txt").write_text("\n".join(first + second for first in "aeiorstln" for second in "aeiorstln"))
    sft = [{"query": f"Question {number}?", "target": "An answer."} for number in range(64)]
    write_records(folder / "sft.jsonl", sft)
    return folder


def test_training_gives_the_same_losses_under_every_deepspeed_file(inputs, tmp_path):
    files = DEEPSPEED if importlib.util.find_spec("deepspeed") else {"none": None}
    losses = {}
    for name, file in files.items():
        values = {"train_method": "SFT", "model_name_or_path": inputs / "model", "output_dir": tmp_path / name}
        values |= {"train_data_path": inputs / "sft.jsonl", "max_steps": 4, "per_device_train_batch_size": 8}
        values |= {"learning_rate": 1e-4, "bf16": True, "gradient_checkpointing": True, "logging_steps": 1}
        values |= {"max_length": 256, "deepspeed": file and ROOT / "configs" / file, "seed": 1}
        finish(start([*TORCHRUN, "--nproc_per_node=1", "train.py", *flags_of(values)]))
        log = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        losses[name] = [step["loss"] for step in log if "loss" in step]
    for each in losses.values():
        assert each == pytest.approx(losses["none"], rel=0.02)


def four_commands(processes: int) -> list[str]:
    """The README's commands of imitation, play, rewards and self-play, with as many processes and short replies."""
    (code,) = [block for block in blocks(TOP, "bash") if "export OMP_NUM_THREADS" in block]
    code = code.replace("python -m", f"{sys.executable} -m").replace("--max_new_tokens 256", "--max_new_tokens 16")
    launch = shlex.join([*TORCHRUN, f"--nproc_per_node={processes}"])
    code = code.replace("torchrun --nproc_per_node=8 --master_port=6000", launch)
    _export, *four = code.split("\n\n")
    return four


def test_the_four_commands_of_the_readme_lead_from_a_word_list_to_a_trained_model(inputs, tmp_path):
    """With the offload file, on all cards. The first command may compile DeepSpeed's optimizer, for two minutes."""
    pytest.importorskip("deepspeed")
    cards = torch.cuda.device_count() or 1
    for name in ("train.py", "tools", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    files = {"all_target_words.txt": inputs / "words.txt"}
    files["released_prompts.json"] = ROOT / "configs/prompts/taboo.json"
    files |= dict.fromkeys(("train_imitation_gpt4.json", "alpaca_train.json"), inputs / "sft.jsonl")
    for name, file in files.items():
        (tmp_path / "data" / name).symlink_to(file)
    models = {"BASE": inputs / "model", "IMITATION": tmp_path / "imitation", "SPAG1": tmp_path / "spag1"}

    for command in four_commands(cards):
        environment = ENVIRONMENT | {name: str(folder) for name, folder in models.items()}
        finish(start(["bash", "-c", command], cwd=tmp_path, env=environment))

    games = tmp_path / "data/self_play_results"
    assert len(read_json_or_jsonl(games / "im_llama2_sampling_all_words_results.json")) == 81
    assert len(list(games.glob("*_rank*.jsonl"))) == cards
    rows = read_json_or_jsonl(tmp_path / "data/train_spag_data_im_llama2.json")
    assert {row.get("type") == "sft" for row in rows} == {False, True}
    for model in (models["IMITATION"], models["SPAG1"]):
        assert list(model.glob("*.safetensors")) and read_json(model / "settings.json")["finished"]
        log = read_json(model / "trainer_state.json")["log_history"]
        assert all(math.isfinite(step["loss"]) for step in log if "loss" in step)


@pytest.mark.parametrize("engine", ["slots", "vllm"])
def test_a_loop_plays_and_trains(engine, inputs, tmp_path):
    if engine == "vllm" and not vllm.has_vllm():
        pytest.skip(vllm.INSTALL)
    settings = {"model": inputs / "model", "words": inputs / "words.txt", "output": tmp_path / "out", "processes": 1}
    settings |= {"epochs": 1, "engine": engine, "max_new_tokens": 16, "global_batch": 8}
    settings["rewards.sft_data_path"] = inputs / "sft.jsonl"
    finish(start([sys.executable, "-m", "tools.run_spag", *words_of(settings)]))
    (episodes,) = (tmp_path / "out/epoch1/episodes").glob("*_results.json")
    assert len(read_json_or_jsonl(episodes)) == 81
    assert list((tmp_path / "out/epoch1/model").glob("*.safetensors"))
