"""TicTacToe in the embedded world: what the model imitates, and the table beside best play."""

import re
import sys

import pytest
from helpers import call

from tools import evaluate_games, tiny_world
from tools.tiny import tictactoe
from utils import read_json, read_json_or_jsonl

pytest.importorskip("textarena", reason="needs textarena 0.7.4")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Few games. Matches are played for real, with scripted players in place of models: epoch 1 is best play."""
    for name, number in (("IMITATED", 12), ("SELF_PLAYED", 6), ("MATCHED", 6)):
        monkeypatch.setattr(tictactoe, name, number)
    asked = []

    def program(learner, log, command):
        asked.append((log.stem, list(map(str, command))))
        if log.stem.startswith("match_"):
            assert command[:3] == [sys.executable, "-m", "tools.evaluate_games"]
            words = [str(word).replace("loop/imitation/model", "scripted:random") for word in command[3:]]
            monkeypatch.chdir(learner.folder)
            words = [word.replace("loop/epoch1/model", "scripted:minimax") for word in words]
            monkeypatch.setattr(sys, "argv", ["evaluate_games", *words])
            evaluate_games.main()

    monkeypatch.setattr(tictactoe.Learner, "program", program)
    return asked


def test_a_model_imitates_random_legal_moves_and_its_epochs_stand_beside_best_play(small, tmp_path):
    flags = ("tictactoe", "--seeds", 0, 1, "--epochs", 1, "--workers", 1, "--output_dir", tmp_path)
    printed = call(tiny_world.main, *flags).output
    rows = read_json_or_jsonl(tmp_path / "seed1/imitation.json")
    assert len(rows) > 60
    for row in rows:
        assert row["query"].count("Current Board") == 1
        listed = re.findall(r"'\[(\d)\]'", row["query"].rpartition("Available Moves:")[2])
        assert re.fullmatch(r"\[\d\]", row["target"]) and row["target"][1] in listed
    first, second = ((tmp_path / f"seed{seed}/games.json").read_text() for seed in (0, 1))
    assert first != second
    results = read_json(tmp_path / "results.json")["0"]
    assert results["epoch1"]["minimax"] == 0.5 and results["epoch1"]["random"] > 0.8
    assert {result["illegal"] for result in results.values()} == {0.0}
    for game in read_json_or_jsonl(tmp_path / "seed0/matches/epoch1/games_results.json"):  # best play never loses
        winner = game.get(game["outcome"].removesuffix(" wins"))
        assert winner is None or winner.endswith(("epoch1", "minimax"))
    lines = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[1:]] == ["| random", "| imitation", "| epoch1"]
    assert lines[3][4].startswith("0.500 [0.500, 0.500]") and lines[1][2] == "-"
    loop = dict(small)["loop"]
    assert loop[loop.index("--imitation_data") + 1] == "imitation.json"
    small.clear()
    assert call(tiny_world.main, *flags).output.strip() in printed and not small
