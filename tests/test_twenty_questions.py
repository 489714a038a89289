"""20 Questions through every program: play, rewards, training, a match, the report, a person. A game is one file."""

import asyncio
import json
import sys

import pytest

import train
from tools import assign_rewards, evaluate_games, play_llm_game, report
from tools.games import load_game
from tools.players.human import HumanPlayer
from tools.players.player import ScriptedPlayer
from tools.selfplay.play import play_games
from utils import read_json_or_jsonl, write_records

GAME = load_game("twenty_questions")


@pytest.fixture
def run(monkeypatch):
    """Call a program's main with these flags, `--game twenty_questions` among them."""

    def call(program, *words):
        monkeypatch.setattr(sys, "argv", [program.__name__, "--game", GAME.name, *map(str, words)])
        program.main()

    return call


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("apple\nlamp\n")
    return path


SHORT = ["--max_turns", "2", "--max_length", "1600", "--max_new_tokens", "4", "--logging_steps", "0"]


def test_a_model_plays_and_its_games_are_judged_and_reported(run, words, tiny_model, tmp_path):
    models = [text for side in ("attacker", "defender") for text in (f"--{side}_model_name_or_path", tiny_model)]
    place = ["--data_path", words, "--output_dir", tmp_path, "--model_prefix", "m", "--data_suffix", "w"]
    run(play_llm_game, *models, *place, *SHORT)
    games = read_json_or_jsonl(tmp_path / "m_sampling_w_results.json")
    assert [(game["game"], game["target_word"]) for game in games] == [(GAME.name, "apple"), (GAME.name, "lamp")]
    assert {message["role"] for game in games for message in game["history"]} == set(GAME.roles)
    summary = json.loads((tmp_path / "m_sampling_w_summary.json").read_text())
    assert list(summary["outcomes"]) == [outcome.name for outcome in GAME.outcomes]
    run(report, "--episodes", tmp_path / "m_sampling_w_results.json", "--output", tmp_path / "report.html")
    assert "20 Questions" in (tmp_path / "report.html").read_text()


def test_two_models_meet_and_graded_points_are_their_mean(run, words, tiny_model, other_model, tmp_path):
    players = ["--players", f"a={tiny_model}", f"b={other_model}", "--games_per_word", "1"]
    run(evaluate_games, *players, "--words", words, "--output_dir", tmp_path / "match", *SHORT)
    rows = json.loads((tmp_path / "match" / "matches.json").read_text())["results"]
    pooled = {(row["player"], row["role"]): row for row in rows if row["seed"] is None}
    assert {role for _, role in pooled} == {*GAME.roles, "both"}
    assert pooled["a", "both"]["games"] == 4 and pooled["a", "both"]["points"] == pooled["b", "both"]["points"]


def test_found_words_pay_both_players_and_two_steps_learn_from_them(run, tiny_model, other_model, tmp_path):
    players = {
        "guesser": ScriptedPlayer([["Is it round?", "Is it `apple`?"], ["Is it big?", "Is it `sun`?", "Is it red?"]]),
        "answerer": ScriptedPlayer([["Yes."], ["No.", "No, it is not.", "No."]]),
    }
    episodes = []
    games = play_games(
        GAME, enumerate(["apple", "lamp"]), players, max_turns=3, concurrent_games=1, on_episode=episodes.append
    )
    asyncio.run(games)
    assert [episode["outcome"] for episode in episodes] == ["found", "not found"]
    write_records(tmp_path / "games.json", episodes)
    run(assign_rewards, "--input_data_path", tmp_path / "games.json", "--output_data_path", tmp_path / "rows.json")
    rows = read_json_or_jsonl(tmp_path / "rows.json")
    assert [row["role"] for row in rows] == ["guesser", "answerer", "guesser"]
    settings = {"train_method": "OfflinePO", "model_name_or_path": tiny_model, "ref_model_name_or_path": other_model}
    settings |= {"train_data_path": tmp_path / "rows.json", "output_dir": tmp_path / "out", "max_steps": 2}
    settings |= {"per_device_train_batch_size": 3, "max_length": 2048, "logging_steps": 1, "save_strategy": "no"}
    settings |= {"cache_dir": tmp_path / "cache", "learning_rate": 1e-3}
    trainer = train.set_up([str(text) for name, value in settings.items() for text in (f"--{name}", value)])
    train.run(trainer)
    steps = [entry for entry in trainer.state.log_history if "policy_loss" in entry]
    assert len(steps) == 2 and steps[0]["reward_answerer"] == 1.0
    assert steps[0]["reward_guesser"] == pytest.approx(0.5)  # 0.8 / 1.8 and 1 / 1.8
    assert "reward_attacker" not in steps[0]


def test_a_person_is_told_the_secret_and_why_both_have_won(monkeypatch, capsys):
    person, episodes = HumanPlayer(GAME), []
    monkeypatch.setattr("builtins.input", lambda prompt: "Yes, it is.")
    players = {"guesser": ScriptedPlayer([["Is it round?", "Is it `apple`?"]]), "answerer": person}
    games = play_games(GAME, [(0, "apple")], players, max_turns=3, concurrent_games=1, on_episode=episodes.append)
    asyncio.run(games)
    person.end(episodes[0])
    shown = capsys.readouterr().out
    assert "you are the answerer" in shown and "The target word: apple" in shown
    assert "Begin each answer with Yes or No." in shown
    assert "--- found - both win, after 3 messages (the guesser named the word, and both win)" in shown
