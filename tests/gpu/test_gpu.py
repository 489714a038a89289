"""What only a GPU can show: bash tools/test.sh tests/gpu -n 0

Prints the tables of the benchmark. Without a GPU all of it is skipped. Nobody has run it on a GPU yet.
"""

import importlib.util
import json
import operator
import sys

import pytest
import torch
from conftest import ROOT, build_llama, build_tokenizer
from helpers import finish, flags_of, start, words_of
from test_engine import answer, conversation

from tools.engine import vllm
from tools.engine.generate import BatchEngine
from tools.engine.model import LocalModel, Sampling
from tools.engine.slots import SlotEngine
from tools.games import load_game
from tools.games.prompts import default_templates
from tools.tiny.models import train_tokenizer
from utils import read_json_or_jsonl, read_words, write_records

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
WAYS = {"none": None, "zero2": "zero2.json", "zero3": "zero3.json", "offload": "default_offload_opt_param.json"}
NO_VLLM = "" if vllm.has_vllm() else vllm.INSTALL


def local_model(**changes) -> LocalModel:
    """A small Llama on the GPU."""
    tokenizer = build_tokenizer()
    model = build_llama(0, len(tokenizer), num_attention_heads=4, num_key_value_heads=2, **changes)
    return LocalModel(
        model.eval().to("cuda"), tokenizer, Sampling(max_length=1500, max_new_tokens=40, do_sample=False)
    )


def share_equal(replies: list, expected: list) -> float:
    """Not 1 for certain: kernels round differently, and of two tokens that are nearly equal the other may win."""
    return sum(map(operator.eq, replies, expected)) / len(expected)


@pytest.mark.parametrize("blocks", [None, 30])
def test_greedy_replies_of_the_slot_engine_are_those_of_generate(blocks):
    plain, local = local_model(), local_model()
    local.cache_tokens = blocks and 32 * blocks
    engine = SlotEngine(local, 16)
    for prompts in conversation(games=24, turns=3):
        expected = BatchEngine(plain, 24).generate([prompt for _, prompt in prompts])
        assert share_equal(answer(engine, prompts), expected) > 0.95


def test_when_the_gpu_runs_out_of_memory_no_reply_is_lost(caplog):
    """The allocator may hold a little more than what 200 games take after a few messages: later ones do not fit."""
    shape = {"hidden_size": 512, "num_hidden_layers": 8}  # 16 KiB a token
    plain, engine = local_model(**shape), SlotEngine(local_model(**shape), 200)
    rounds = conversation(games=200, turns=16)
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        for number, prompts in enumerate(rounds):
            if number == 5:
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(1.1 * torch.cuda.memory_allocated() / total)
            replies = answer(engine, prompts)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory with" in caplog.text
    assert share_equal(replies, answer(BatchEngine(plain, 50), rounds[-1])) > 0.95


def bench(*words) -> list[dict[str, str]]:
    """The benchmark's table, which is printed too: a dict for each line."""
    printed = finish(start([sys.executable, "-m", "tools.bench", *words]))
    table = [line.strip("| ").split("|") for line in printed.splitlines() if line.startswith("|")]
    header, _, *lines = [[cell.strip() for cell in line] for line in table]
    sys.stdout.write(f"\n{torch.cuda.get_device_name()}: {' '.join(words)}\n{printed}\n")
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_a_training_step_gives_the_same_losses_under_every_deepspeed_file(capsys):
    ways = WAYS if importlib.util.find_spec("deepspeed") else {"none": None}
    shared = ["train", "--preset", "1b", "--bf16", "True", "--gradient_checkpointing", "True", "--steps", "2"]
    with capsys.disabled():
        tables = {
            way: bench(*shared, *flags_of({"deepspeed": name and ROOT / "configs" / name}))
            for way, name in ways.items()
        }
    first = float(tables["none"][0]["last loss"])
    for lines in tables.values():
        assert [float(line["last loss"]) for line in lines] == pytest.approx([first] * len(lines), rel=0.02)


def test_the_speed_of_play(capsys):
    """Not judged: shown."""
    modes = [*([] if NO_VLLM else ["vllm"]), "default", "batched"]
    flags = {"preset": "1b", "bf16": True, "games": 512, "lengths": "drawn", "modes": modes}
    with capsys.disabled():
        assert len(bench("play", *flags_of(flags))) == len(modes)


@pytest.mark.parametrize(
    "engine", ["slots", pytest.param("vllm", marks=pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM))]
)
def test_a_loop_with_a_model_of_100_million_parameters(engine, tmp_path):
    """Play, rewards and training; words are pairs of letters, which random replies say now and then."""
    texts = read_words(ROOT / "data/target_words.txt") + 20 * default_templates(load_game())["rules"]
    tokenizer = train_tokenizer(texts, 8000)
    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
    for part in (tokenizer, build_llama(0, len(tokenizer), **shape)):
        part.save_pretrained(tmp_path / "model")
    words = [first + second for first in "aeiorstln" for second in "aeiorstln"]
    (tmp_path / "words.txt").write_text("\n".join(words))
    sft = [{"query": f"Question {number}?", "target": "An answer."} for number in range(64)]
    write_records(tmp_path / "sft.jsonl", sft)
    settings = {"model": tmp_path / "model", "words": tmp_path / "words.txt", "sft_data": tmp_path / "sft.jsonl"}
    settings |= {"output": tmp_path / "out", "epochs": 1, "engine": engine, "max_new_tokens": 16, "global_batch": 8}
    finish(start([ROOT / "tools/run_spag.sh", *words_of(settings | {"nproc": 1})]))
    (episodes,) = (tmp_path / "out/epoch1/episodes").glob("*_results.json")
    assert len(read_json_or_jsonl(episodes)) == 81
    assert json.loads((tmp_path / "out/epoch1/model/trainer_state.json").read_text())["log_history"]
    assert list((tmp_path / "out/epoch1/model").glob("*.safetensors"))
