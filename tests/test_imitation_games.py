"""Imitation games of our own: data/imitation_games.jsonl, and plainer ones for small models in data/english."""

import re
from collections import Counter

from helpers import ROOT

from tools.games import load_game
from utils import read_json_or_jsonl

GUESS = re.compile(r"I know the word! It is `[^`]+`!")
GAMES = read_json_or_jsonl(ROOT / "data" / "imitation_games.jsonl")
PLAIN = read_json_or_jsonl(ROOT / "data" / "english" / "plain_games.jsonl")
TEXTS = [message["content"] for game in (*GAMES, *PLAIN) for message in game["history"]]


def words_of(split: str) -> set[str]:
    return {game["target_word"] for game in GAMES if game["split"] == split}


def test_each_word_belongs_to_one_split():
    played, tuning, held_out = map(words_of, ("played", "tuning", "held_out"))
    for game in PLAIN:
        split = (
            "tuning" if game["target_word"] in tuning else "held_out" if game["target_word"] in held_out else "played"
        )
        assert game["split"] == split
    assert len(tuning) == 100 and len(held_out) == 200
    assert not played & tuning and not played & held_out and not tuning & held_out


def test_the_judge_agrees_with_the_stored_outcomes():
    taboo = load_game("taboo")
    for game in (*GAMES, *PLAIN):
        verdict = taboo.judge(game["history"], game["target_word"], game["max_turns"])
        assert verdict == (game["outcome"], game["length"]), game
        assert len(game["history"]) == game["length"], game


def test_players_speak_in_turn_in_messages_of_5_to_30_words():
    for game in (*GAMES, *PLAIN):
        assert [message["role"] for message in game["history"]] == (["attacker", "defender"] * 5)[: game["length"]]
        assert 3 <= game["length"] <= 2 * game["max_turns"] == 10
        assert all(5 <= len(message["content"].split()) <= 30 for message in game["history"])


def test_no_two_messages_are_equal_but_guesses():
    said = Counter(text.lower() for text in TEXTS if not GUESS.fullmatch(text))
    assert said.most_common(1)[0][1] == 1
