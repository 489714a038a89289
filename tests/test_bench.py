"""The benchmark plays with both engines on a tiny Llama."""

import pytest
from helpers import call

from tools import bench


@pytest.fixture
def tiny(monkeypatch):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    monkeypatch.setattr(bench, "SHAPE", bench.SHAPE | shape)
    monkeypatch.setattr(bench, "VOCABULARY", 400)


@pytest.mark.parametrize("engine", bench.FEWER)
def test_both_engines_play_their_games_to_the_same_lengths(tiny, tmp_path, engine):
    bench.write_model(str(tmp_path), seed=1)
    _, tokens = bench.measure(str(tmp_path), engine, games=3, seed=1)
    messages = [(game, message) for game in range(3) for message in range(2 * bench.TURNS)]
    assert sorted(tokens) == sorted(bench.reply_tokens(*each) for each in messages)
    assert len(set(tokens)) > 6


def test_a_table_is_printed(tiny):
    lines = call(bench.main, "play", "--games", 2).output.splitlines()
    assert [line.split(" | ")[:2] for line in lines[-2:]] == [["| slots", "2"], ["| generate", "1"]]
