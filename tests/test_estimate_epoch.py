"""estimate_epoch: its sizes against known ones, and how its hours follow from the flags."""

import pytest

from tools.bench import epoch as estimate_epoch
from tools.bench.common import SHAPES
from tools.bench.epoch import GPUS, MODELS, Settings, games_at_once, play_hours, train_gib, train_hours


@pytest.mark.parametrize(
    ("name", "parameters", "cache"),
    [("7b", 6.738e9, 524288), ("13b", 13.016e9, 819200), ("70b", 68.977e9, 327680), ("1b", 1.1e9, 22528)],
)
def test_the_models_have_the_sizes_of_the_llamas(name, parameters, cache):
    assert SHAPES[name].parameters == pytest.approx(parameters, rel=0.001)
    assert 2 * SHAPES[name].cache_numbers == cache  # bytes, in bf16


def test_hours_of_play_are_those_worked_by_hand():
    """1,000 games of one message of 100 tokens, by a 7B model on a card with room for 20 of them."""
    args = Settings(games=1000, messages=1, reply_tokens=100, gpus=1, play_share=1)
    card = estimate_epoch.GPU(12.55 + 14.4, 1e12, 1e18)  # 12.55 GiB of weights; 0.5 GiB a game of 1,024 tokens
    assert games_at_once(SHAPES["7b"], card, 1) == 20
    steps = 100_000 / 20
    by_step = 2 * 6.738e9 + 330 * 524_288  # weights and rules
    by_token = (52.5 + 45) * 524_288  # half a message of 105 tokens, on average, and the instruction
    assert play_hours(args, SHAPES["7b"], card, 1) == pytest.approx(
        (steps * by_step + 100_000 * by_token) / 1e12 / 3600, rel=1e-3
    )


def test_more_gpus_take_less_time_and_memory_and_cost_follows_the_games():
    eight, thirty_two, twice = Settings(), Settings(gpus=32), Settings(games=2 * 47591)
    model, card = SHAPES["7b"], GPUS["A100-80"]
    assert play_hours(eight, model, card, 1) == pytest.approx(4 * play_hours(thirty_two, model, card, 1))
    assert play_hours(twice, model, card, 1) == pytest.approx(2 * play_hours(eight, model, card, 1))
    assert train_hours(eight, model, card) == pytest.approx(4 * train_hours(thirty_two, model, card))
    saved = train_gib(eight, model, offload=False) - train_gib(thirty_two, model, offload=False)
    assert saved * 2**30 == pytest.approx(16 * model.parameters * (1 / 8 - 1 / 32))
    assert train_gib(eight, model, offload=True) < train_gib(thirty_two, model, offload=False)


def test_every_model_and_card_has_a_row_and_bad_flags_are_named(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["estimate_epoch", "--gpus", "8"])
    estimate_epoch.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(MODELS) * len(GPUS)
    monkeypatch.setattr("sys.argv", ["estimate_epoch", "--gpus", "0"])
    with pytest.raises(ValueError, match="--gpus must be above 0, got 0"):
        estimate_epoch.main()
