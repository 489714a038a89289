"""tools.bench.epoch: its sizes against known ones, and how its hours follow from the flags."""

import pytest

from tools.bench import epoch
from tools.bench.common import SHAPES
from tools.bench.epoch import GPU, GPUS, MODELS, Settings, games_at_once, slots_hours, train_hours, vllm_hours


@pytest.mark.parametrize(
    ("name", "parameters", "cache"),
    [("7b", 6.738e9, 524288), ("13b", 13.016e9, 819200), ("70b", 68.977e9, 327680), ("1b", 1.1e9, 22528)],
)
def test_the_models_have_the_sizes_of_the_llamas(name, parameters, cache):
    assert SHAPES[name].parameters == pytest.approx(parameters, rel=0.001)
    assert 2 * SHAPES[name].cache_numbers == cache  # bytes, in bf16


def test_hours_of_play_are_those_worked_by_hand():
    """1,000 games of one message of 100 tokens, by a 7B model on a card with room for 20 of them."""
    args = Settings(games=1000, messages=1, reply_tokens=100, gpus=1)
    held = 52.5 + 45 + 50  # half a message of 105 tokens, on average, the instruction, half of the reply
    memory = 2 * 6.738e9 + 20.5 * held * 524_288 / 0.7  # weights, and caches in 0.7 of the rest
    card = GPU(memory / 2**30, 1e12, 1e18)
    assert games_at_once(args, SHAPES["7b"], card, 1) == 20
    steps = 100_000 / 20
    read = steps * (2 * 6.738e9 + 330 * 524_288) + 100_000 * (52.5 + 45) * 524_288  # weights and rules, and the rest
    expected = read / (0.5 * 1e12) + 100_000 * 10e-6  # and Python
    assert slots_hours(args, SHAPES["7b"], card, 1) == pytest.approx(expected / 3600, rel=1e-3)
    endless = GPU(memory / 2**30, 1e18, 1e20)  # a step still takes its launches
    expected = steps * 32 * 62 * 6e-6 + 100_000 * 10e-6
    assert slots_hours(args, SHAPES["7b"], endless, 1) == pytest.approx(expected / 3600, rel=1e-3)


def test_hours_at_a_published_rate():
    args = Settings(games=1000, messages=6, reply_tokens=60, gpus=8)
    assert vllm_hours(args, "7b", "H100") == pytest.approx(360_000 / 12_500 / 8 / 3600)
    assert vllm_hours(args, "70b", "A100-80") == pytest.approx(360_000 / 756 / 2 / 3600)  # on pairs of 4 GPUs
    assert vllm_hours(Settings(gpus=1), "70b", "A100-80") is None
    assert vllm_hours(args, "1b", "H200") is None


def test_hours_of_training_are_those_worked_by_hand():
    """Without SFT rows and padding to speak of: 2 rows of 1,000 tokens a micro-batch."""
    args = Settings(games=100, rows=1, sft_rows=1e-9, rule_tokens=700, instruction_tokens=45, padding=1e-9, gpus=8)
    assert args.rule_tokens + args.seen + args.reply_tokens == 1000
    model, card = SHAPES["7b"], GPUS["H100"]
    rate, micro_batches = 0.5 * 989e12, 100 / 2 / 8
    computing = 8 * model.parameters * 2000 / rate
    reference = 2 * model.parameters * 100 * 1000 / 8 / rate
    assert train_hours(args, model, card, "none", False) == pytest.approx(
        (micro_batches * computing + reference) / 3600, rel=1e-3
    )
    moving = 4 * 2 * model.parameters / 8 / 25e9  # 8 bytes a parameter over PCIe, each GPU its eighth
    assert moving > computing and moving > 4 * 2 * model.parameters * 7 / 8 / 200e9
    adam = 100 / 128 * 28 * model.parameters / 200e9
    assert train_hours(args, model, card, "offload", False) == pytest.approx(
        (micro_batches * moving + reference + adam) / 3600, rel=1e-3
    )


def test_more_gpus_take_less_time_and_cost_follows_the_games():
    eight, thirty_two, twice = Settings(), Settings(gpus=32), Settings(games=2 * 47591)
    model, card = SHAPES["7b"], GPUS["A100-80"]
    assert slots_hours(eight, model, card, 1) == pytest.approx(4 * slots_hours(thirty_two, model, card, 1))
    assert slots_hours(twice, model, card, 1) == pytest.approx(2 * slots_hours(eight, model, card, 1))
    assert train_hours(eight, model, card, "none", False) == pytest.approx(
        4 * train_hours(thirty_two, model, card, "none", False)
    )
    assert train_hours(eight, model, card, "none", True) < train_hours(eight, model, card, "none", False)
    assert train_hours(Settings(padding=0.03), model, card, "none", False) < train_hours(
        eight, model, card, "none", False
    )


@pytest.mark.parametrize("gpus, ways", [(8, 1), (1, 2)])
def test_every_model_and_card_has_a_row_and_one_gpu_has_lora_too(gpus, ways, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["epoch", "--gpus", str(gpus)])
    epoch.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(MODELS) * len(GPUS) * ways
    assert sum("LoRA" in row for row in rows) == (16 if gpus == 1 else 0)
