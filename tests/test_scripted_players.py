"""Scripted opponents: the embedded world's players, and functions of one's own."""

import asyncio

import pytest
from helpers import call, flags_of
from scripted import messages

from tools import evaluate_games
from tools.games.taboo import DEFENDER, Taboo
from tools.players.player import ScriptedPlayer, Turn
from tools.selfplay.play import play_game
from tools.tiny.players import load_lexicon
from utils import UserError, read_json, read_json_or_jsonl

LEXICON = "tools.tiny.players:lexicon"
OWN = "def echo(turn):\n    return turn.role\n"


def test_the_players_of_the_embedded_world_play_taboo_the_same_game_for_the_same_index():
    game, words = Taboo(), load_lexicon().words
    players = dict.fromkeys(game.roles, ScriptedPlayer(game.scripted(LEXICON)))

    def play(index: int) -> dict:
        return asyncio.run(play_game(game, words[index % len(words)], players, max_turns=3, index=index))

    games = [play(index) for index in range(400)]
    assert len({episode["outcome"] for episode in games}) == 4
    assert games[7] == play(7)


def test_a_function_of_ones_own_plays_and_unknown_players_are_refused(tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    turn = Turn(Taboo(), DEFENDER, messages(Taboo(), "Hm."), 3, 0, {}, {})
    assert Taboo().scripted(f"{tmp_path}/own.py:echo")(turn) == DEFENDER
    with pytest.raises(UserError, match="no scripted player 'stranger'; name your own FILE.py:FUNCTION"):
        Taboo().scripted("stranger")


def test_a_match_is_played_between_functions(tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    word = load_lexicon().words[0]
    (tmp_path / "words.txt").write_text(f"{word}\n", encoding="utf-8")
    flags = {"players": [f"lexicon=scripted:{LEXICON}", f"echo=scripted:{tmp_path}/own.py:echo"], "against": "echo"}
    flags |= {"words": tmp_path / "words.txt", "games_per_word": 3, "max_turns": 3, "output_dir": tmp_path / "match"}
    call(evaluate_games.main, *flags_of(flags | {"logging_steps": 0}))
    for game in read_json_or_jsonl(tmp_path / "match/games_results.json"):
        own = [message for message in game["history"] if game[message["role"]] == "echo"]
        assert own and all(message["content"] == message["role"] for message in own)
    settings = read_json(tmp_path / "match/matches.json")["settings"]
    assert len({settings[f"player {name}"]["sha256"] for name in ("lexicon", "echo")}) == 2
