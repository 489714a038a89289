"""Both benchmarks run in all their modes on a tiny Llama."""

import pytest

from tools import bench
from tools.bench import Play, Train


def test_every_mode_of_play_plays_its_games_to_the_same_lengths():
    settings = Play(preset="tiny", lengths=["drawn"], games=6)
    lines = {line["mode"]: line for line in settings.lines()}
    assert {mode: line["games"] for mode, line in lines.items()} == {"release": 1, "batched": 1, "default": 6}
    for mode, line in lines.items():
        messages = [(game, message) for game in range(line["games"]) for message in range(2 * bench.TURNS)]
        assert sorted(line["reply_tokens"]) == sorted(settings.reply_tokens("drawn", *each) for each in messages), mode
    assert lines["release"]["at once"] == 1 and lines["release"]["ratio"] == 1
    assert settings.reply_tokens("forced", 0, 0) == 32


def test_every_mode_of_training_has_the_losses_of_the_usual_recipe():
    settings = Train(preset="tiny", steps=1, batch_size=2, accumulation=2)
    plain, default, rebalanced = settings.lines()
    assert [line["mode"] for line in (plain, default, rebalanced)] == ["plain", "default", "rebalanced"]
    assert len(plain["losses"]) == 2 and default["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert rebalanced["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-4)  # the same rows, dealt otherwise


def test_a_line_is_printed_when_its_mode_has_ended(capsys, monkeypatch):
    def lines(settings):
        for mode in ("first", "second"):
            yield dict.fromkeys(settings.columns, 1) | {"mode": mode}
            assert capsys.readouterr().out.splitlines()[-1].startswith(f"| {mode} | 1.0 |")

    monkeypatch.setattr(Train, "lines", lines)
    Train(preset="tiny").run()
