"""TicTacToe in the embedded world: the data from which a tiny model learns it."""

import re

import pytest
from helpers import call

from tools import tiny_world
from utils import read_json_or_jsonl

pytest.importorskip("textarena", reason="needs textarena 0.7.4")


def test_a_model_imitates_random_legal_moves_and_seeds_have_other_games(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sizes = ("--imitated", 12, "--self_played", 6, "--matched", 4)
    for seed in (0, 1):
        call(tiny_world.main, "tictactoe", "--output_dir", tmp_path / f"seed{seed}", "--seed", seed, *sizes)
    rows = read_json_or_jsonl(tmp_path / "seed1/imitation.json")
    assert len(rows) > 60
    for row in rows:
        assert row["query"].count("Current Board") == 1
        listed = re.findall(r"'\[(\d)\]'", row["query"].rpartition("Available Moves:")[2])
        assert re.fullmatch(r"\[\d\]", row["target"]) and row["target"][1] in listed
    first, second = ((tmp_path / f"seed{seed}/imitation_games.json").read_text() for seed in (0, 1))
    assert first != second
    assert (tmp_path / "seed1/words.txt").read_text().split() == [str(task) for task in range(12, 18)]
    assert len((tmp_path / "seed1/match_words.txt").read_text().split()) == 4
    vocabulary = len(AutoTokenizer.from_pretrained(tmp_path / "seed1/random"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "seed1/random").config.vocab_size == vocabulary
    refused = call(tiny_world.main, "tictactoe", "--output_dir", tmp_path / "seed1", "--seed", 2, *sizes, status=2)
    assert "seed: 1 then, 2 now" in refused.errors
