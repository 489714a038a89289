"""Both benchmarks run in all their modes on a tiny Llama."""

import pytest

from tools.bench import Play, Train

PLAY = {"preset": "tiny", "turns": 2, "games": 6, "slow_games": 3, "release_games": 2, "forced_tokens": 4}


def test_every_mode_of_play_plays_its_games_to_the_same_lengths():
    settings = Play(**PLAY, lengths=["drawn"], mean_tokens=6, most_tokens=20)
    lines = {line["mode"]: line for line in settings.lines()}
    assert {mode: line["games"] for mode, line in lines.items()} == {"release": 2, "batched": 3, "default": 6}
    for mode, line in lines.items():
        games = range(settings.num_games(mode))
        expected = [settings.reply_tokens("drawn", game, message) for game in games for message in range(4)]
        assert sorted(line["reply_tokens"]) == sorted(expected), mode
    assert lines["release"]["at once"] == 1 and lines["release"]["ratio"] == 1
    assert settings.reply_tokens("forced", 0, 0) == 4


def test_every_mode_of_training_has_the_losses_of_the_usual_recipe():
    settings = Train(preset="tiny", steps=2, warmup_steps=1, batch_size=2, accumulation=2)
    default, rebalanced, plain = settings.lines()
    assert [line["mode"] for line in (default, rebalanced, plain)] == ["default", "rebalanced", "plain"]
    assert default["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert rebalanced["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-4)  # the same rows, dealt otherwise
    assert rebalanced["padding"] <= default["padding"] == plain["padding"]
