"""The benchmark plays with both engines on a tiny Llama."""

import pytest
from helpers import call

from tools import bench


@pytest.fixture(autouse=True)
def short_replies(monkeypatch):
    monkeypatch.setattr(bench, "REPLY_TOKENS", 8)


def test_both_engines_play_replies_of_one_length(tiny_model):
    for engine in ("slots", "generate"):
        _, tokens = bench.measure(str(tiny_model), engine, games=3)
        assert tokens == 3 * 2 * bench.TURNS * bench.REPLY_TOKENS


def test_each_engine_has_a_line_and_one_that_fails_says_why(tiny_model, monkeypatch):
    monkeypatch.setattr(bench, "has_vllm", lambda: True)  # which is not installed here
    slots, generate, vllm = call(bench.main, "play", "--games", 12, "--model", tiny_model).output.splitlines()[-3:]
    assert slots.startswith("| slots | 12 | ") and generate.startswith("| generate | 2 | ")
    assert "vllm==" in vllm


def test_a_model_that_is_not_there_is_status_2():
    errors = call(bench.main, "play", "--model", "no/such-model", status=2).errors
    assert "no/such-model: no such folder" in errors and "Traceback" not in errors
