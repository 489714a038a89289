"""Scripted opponents: Taboo's hints from a file of games, the embedded world's players, functions of one's own."""

import asyncio

import pytest
from helpers import ROOT, call, flags_of
from scripted import messages

from tools import evaluate_games
from tools.games.game import game_setting
from tools.games.taboo import ATTACKER, ATTACKER_BREAKS, DEFENDER, HARMLESS, TIED, Taboo
from tools.players.player import ScriptedPlayer, Turn
from tools.selfplay.play import play_game
from tools.tiny.players import load_lexicon
from utils import UserError, file_digest, read_json, read_json_or_jsonl, read_words, write_records

LEXICON = "tools.tiny.players:lexicon"


@pytest.fixture
def hints(tmp_path):
    """Two games about cats, one of them with a breach, and one about cows."""
    games = [
        ("Cat", "It purrs.", "A dog?", "It hunts mice."),
        ("cat", "A catfish.", "Hm."),
        ("cow", "It moos.", "Hm."),
    ]
    told = [{"target_word": word, "max_turns": 3, "history": messages(Taboo(), *said)} for word, *said in games]
    write_records(tmp_path / "hints.jsonl", told)
    return str(tmp_path / "hints.jsonl")


def say(game: Taboo, name: str, role: str, word: str, *said: str, index: int = 0) -> str:
    history = messages(game, *said)
    turn = Turn(game, role, history, 3, index, game.secrets(role, word, history), {})
    return game.scripted(name)(turn)


def test_the_attacker_gives_the_hints_of_the_words_games_in_order_and_then_again(hints):
    game = Taboo(hints=hints)
    assert say(game, "hints", ATTACKER, "cat") == "It purrs."
    assert say(game, "hints", ATTACKER, "cat", "It purrs.", "Hm.") == "It hunts mice."
    assert say(game, "hints", ATTACKER, "cat", "It purrs.", "Hm.", "It hunts mice.", "Hm.") == "It purrs."


def test_the_defender_never_guesses_and_says_no_word_of_the_list(hints):
    game = Taboo(hints=hints)
    said = {say(game, "hints", DEFENDER, "cat", "It purrs.", index=index) for index in range(200)}
    assert said == set(HARMLESS)
    for word in (ROOT / "data/target_words.txt").read_text(encoding="utf-8").split():
        assert not any(word in line.lower() for line in HARMLESS), word


def test_a_word_without_a_game_and_a_missing_file_of_hints_are_refused(hints, tmp_path):
    (tmp_path / "words.txt").write_text("cow\nowl\n", encoding="utf-8")
    with pytest.raises(UserError, match="words.txt:2: .*no game about 'owl'"):
        read_words(tmp_path / "words.txt", Taboo(hints=hints).check_task)
    with pytest.raises(UserError, match="hints=FILE"):
        Taboo().scripted("hints")


def test_other_hints_make_another_game(hints):
    before = game_setting(Taboo(hints=hints))
    with open(hints, "a", encoding="utf-8") as file:
        file.write("{}\n")
    assert game_setting(Taboo(hints=hints))["sha256"] != before["sha256"]


def test_the_players_of_the_embedded_world_play_taboo_the_same_game_for_the_same_index():
    game, words = Taboo(), load_lexicon().words
    players = dict.fromkeys(game.roles, ScriptedPlayer(game.scripted(LEXICON)))

    def play(index: int) -> dict:
        return asyncio.run(play_game(game, words[index % len(words)], players, max_turns=3, index=index))

    games = [play(index) for index in range(400)]
    assert len({each["outcome"] for each in games}) == 4
    assert games[7] == play(7)


def test_a_function_of_ones_own_plays_and_unknown_players_are_refused(tmp_path):
    (tmp_path / "own.py").write_text("def echo(turn):\n    return turn.role\n", encoding="utf-8")
    assert say(Taboo(), f"{tmp_path}/own.py:echo", DEFENDER, "cat", "Hm.") == DEFENDER
    for name in ("stranger", f"{tmp_path}/own.py:stranger"):
        with pytest.raises(UserError, match="no scripted player"):
            Taboo().scripted(name)


def test_a_match_is_played_against_hints_and_against_the_lexicon(hints, tmp_path):
    (tmp_path / "words.txt").write_text("cat\ncow\n", encoding="utf-8")
    flags = {"players": [f"lexicon=scripted:{LEXICON}", "hints=scripted:hints"], "against": "hints"}
    flags |= {"words": tmp_path / "words.txt", "games_per_word": 3, "max_turns": 3, "output_dir": tmp_path / "match"}
    call(evaluate_games.main, *flags_of(flags | {"game_options": f"hints={hints}", "logging_steps": 0}))
    games = read_json_or_jsonl(tmp_path / "match/games_results.json")
    for game in games:
        if game["attacker"] == "hints":
            assert game["history"][0]["content"] in ("It purrs.", "It moos.")
        else:
            assert game["outcome"] in (TIED, ATTACKER_BREAKS)  # this defender neither guesses nor says the word
    settings = read_json(tmp_path / "match/matches.json")["settings"]
    assert settings["player hints"] == "scripted:hints"
    assert settings["player lexicon"]["sha256"] == file_digest([ROOT / "tools/tiny/players.py"])
