"""Imitation games of our own: data/imitation_games.jsonl, and plainer ones for small models in data/english."""

from helpers import ROOT

from tools.common.files import read_json_or_jsonl
from tools.games import load_game

GAMES = read_json_or_jsonl(ROOT / "data" / "imitation_games.jsonl")
PLAIN = read_json_or_jsonl(ROOT / "data" / "english" / "plain_games.jsonl")


def words_of(split: str) -> set[str]:
    return {game["target_word"] for game in GAMES if game["split"] == split}


def test_each_word_belongs_to_one_split():
    played, tuning, held_out = map(words_of, ("played", "tuning", "held_out"))
    for game in PLAIN:
        assert (game["split"] == "tuning", game["split"] == "held_out") == (
            game["target_word"] in tuning,
            game["target_word"] in held_out,
        )
    assert len(tuning) == 100 and len(held_out) == 200
    assert not played & tuning and not played & held_out and not tuning & held_out


def test_the_judge_agrees_with_the_stored_outcomes():
    taboo = load_game("taboo")
    for game in (*GAMES, *PLAIN):
        verdict = taboo.judge(game["history"], game["target_word"], game["max_turns"])
        assert verdict == (game["outcome"], game["length"]), game
        assert len(game["history"]) == game["length"], game
