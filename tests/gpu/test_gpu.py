"""What only a GPU can show, in under ten minutes on one: bash tools/test.sh tests/gpu -n 0

Prints the table for tools/bench/README.md. Without a GPU all of it is skipped.
"""

import importlib.util
import json
import operator
import os
import random
import subprocess

import pytest
import torch
from conftest import ROOT, build_llama, build_tokenizer
from test_engine import answer

from tools.bench import play as bench_play
from tools.bench import train as bench_train
from tools.bench.common import print_table
from tools.engine.generate import BatchEngine
from tools.engine.model import LocalModel, Sampling
from tools.engine.slots import SlotEngine
from tools.engine.vllm import VLLMFlags
from utils import read_json_or_jsonl, write_records

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
WAYS = {"none": None, "zero2": "zero2.json", "zero3": "zero3.json", "offload": "default_offload_opt_param.json"}
NO_VLLM = VLLMFlags().vllm_missing()


def local_model(dtype=torch.float32, **changes) -> LocalModel:
    """A small Llama on the GPU."""
    tokenizer = build_tokenizer()
    model = build_llama(0, len(tokenizer), num_attention_heads=4, num_key_value_heads=2, **changes)
    sampling = Sampling(max_length=1500, max_new_tokens=40, do_sample=False)
    return LocalModel(model.eval().to("cuda", dtype), tokenizer, sampling)


def conversation(games: int, turns: int) -> list[list[tuple[int, str]]]:
    """(game, prompt) pairs for each turn; histories grow."""
    rng, history, asked = random.Random(0), ["The rules of the game. "] * games, []
    for _ in range(turns):
        history = [text + "".join(rng.choices("abcdef ", k=rng.randint(1, 60))) for text in history]
        asked.append([(game, f"{text} Now:") for game, text in enumerate(history)])
    return asked


def share_equal(replies: list, expected: list) -> float:
    """Not 1 for certain: other kernels round otherwise, and of two tokens that are nearly equal the other may win."""
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
    """The allocator may hold what 200 games take after a few messages, and some more: later ones do not fit."""
    shape = {"hidden_size": 512, "num_hidden_layers": 8}  # 16 KiB a token
    plain, engine = local_model(**shape), SlotEngine(local_model(**shape), 200)
    rounds = conversation(games=200, turns=8)
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        for number, prompts in enumerate(rounds):
            if number == 3:
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(1.1 * torch.cuda.memory_allocated() / total)
            replies = answer(engine, prompts)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory with" in caplog.text
    expected = BatchEngine(plain, 50)
    assert share_equal(replies, answer(expected, rounds[-1])) > 0.95


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict]]:
    """The training benchmark's lines by way of sharding."""
    settings = {"preset": "1b", "bf16": True, "gradient_checkpointing": True, "steps": 2, "warmup_steps": 1}
    ways = WAYS if importlib.util.find_spec("deepspeed") else {"none": None}
    return {
        way: bench_train.compare(
            bench_train.Settings(**settings, deepspeed=str(ROOT / "configs" / name) if name else None)
        )
        for way, name in ways.items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_training_step_gives_the_same_losses_under_every_deepspeed_file(way, trained):
    if way not in trained:
        pytest.skip("DeepSpeed is not installed")
    plain = trained["none"][0]["ranks"][0]["losses"]
    for line in trained[way]:
        assert line["ranks"][0]["losses"] == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize(
    "engine", ["slots", pytest.param("vllm", marks=pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM or ""))]
)
def test_a_loop_with_a_model_of_100_million_parameters(engine, tmp_path):
    """Play, rewards and training; words are pairs of letters, which random replies say now and then."""
    bench_play.make_inputs(tmp_path, bench_play.Settings(preset="100m", bf16=True))
    words = [first + second for first in "aeiorstln" for second in "aeiorstln"]
    (tmp_path / "words.txt").write_text("\n".join(words))
    sft = [{"query": f"Question {number}?", "target": "An answer."} for number in range(64)]
    write_records(tmp_path / "sft.jsonl", sft)
    flags = {"model": tmp_path / "model", "words": tmp_path / "words.txt", "sft_data": tmp_path / "sft.jsonl"}
    flags |= {"output": tmp_path / "out", "epochs": 1, "engine": engine, "max_new_tokens": 16, "global_batch": 8}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    ended = subprocess.run(
        [ROOT / "tools/run_spag.sh", *words], env=os.environ | {"NPROC": "1"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (episodes,) = (tmp_path / "out/epoch1/episodes").glob("*_results.json")
    assert len(read_json_or_jsonl(episodes)) == 81
    state = json.loads((tmp_path / "out/epoch1/model/trainer_state.json").read_text())
    assert state["log_history"]
    assert list((tmp_path / "out/epoch1/model").glob("*.safetensors"))


def test_the_table_of_speed_and_memory(trained, capsys):
    """Not judged: shown, for tools/bench/README.md."""
    modes = [*([] if NO_VLLM else ["vllm"]), "default", "batched"]
    settings = {"preset": "1b", "bf16": True, "turns": 3, "games": 512, "lengths": ["drawn"], "modes": modes}
    played = bench_play.compare(bench_play.Settings(**settings))
    with capsys.disabled():
        print(f"\n\n{torch.cuda.get_device_name()}\n\nPlay, 1b, bf16, 3 turns\n")
        print_table(bench_play.COLUMNS, played)
        for way, lines in trained.items():
            print(f"\nTraining, 1b, bf16, gradient checkpointing, DeepSpeed: {way}\n")
            print_table(bench_train.COLUMNS, lines)
