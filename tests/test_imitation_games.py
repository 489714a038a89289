"""Imitation games of our own: data/imitation_games.jsonl, and plainer ones for small models in data/english."""

import re
from collections import Counter, defaultdict

import pytest
from helpers import ROOT

from tools.games import load_game
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED
from utils import read_json_or_jsonl, read_words

GUESS = re.compile(r"I know the word! It is `[^`]+`!")
GAMES = read_json_or_jsonl(ROOT / "data" / "imitation_games.jsonl")
PLAIN = read_json_or_jsonl(ROOT / "data" / "english" / "plain_games.jsonl")
TEXTS = [message["content"] for game in (*GAMES, *PLAIN) for message in game["history"]]


def words_of(split: str) -> set[str]:
    return {game["target_word"] for game in GAMES if game["split"] == split}


def test_there_are_enough_games_about_words_of_the_word_list():
    words = {game["target_word"] for game in GAMES}
    assert len(GAMES) >= 1200 and len(words) >= 1000
    assert words <= set(read_words(ROOT / "data" / "target_words.txt"))


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


@pytest.mark.parametrize(
    "outcome, least, most",
    [(DEFENDER_WINS, 0.40, 0.55), (ATTACKER_WINS, 0.30, 0.40), (TIED, 0.10, 0.20), (ATTACKER_BREAKS, 0.01, 0.05)],
)
def test_outcomes_are_those_of_good_players(outcome, least, most):
    assert least <= sum(game["outcome"] == outcome for game in GAMES) / len(GAMES) <= most


def test_players_speak_in_turn_in_messages_of_5_to_30_words():
    for game in (*GAMES, *PLAIN):
        assert [message["role"] for message in game["history"]] == (["attacker", "defender"] * 5)[: game["length"]]
        assert 3 <= game["length"] <= 2 * game["max_turns"] == 10
        assert all(5 <= len(message["content"].split()) <= 30 for message in game["history"])


def test_no_two_messages_are_equal_but_guesses():
    said = Counter(text.lower() for text in TEXTS if not GUESS.fullmatch(text))
    assert said.most_common(1)[0][1] == 1


def test_no_five_words_in_a_row_stand_in_more_than_five_games():
    games_with = defaultdict(set)
    for number, game in enumerate((*GAMES, *PLAIN)):
        for message in game["history"]:
            words = re.findall(r"[a-z0-9']+", GUESS.sub("", message["content"]).lower())
            for start in range(len(words) - 4):
                games_with[tuple(words[start : start + 5])].add(number)
    assert max(map(len, games_with.values())) <= 5


def test_a_guess_is_made_in_the_fixed_phrase():
    assert all(GUESS.fullmatch(text) for text in TEXTS if "i know the word" in text.lower())
