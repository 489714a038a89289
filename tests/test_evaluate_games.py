"""Evaluation by match: the games that are played, and the files.

faults/ kills the program, and refuses its flags and other settings.
"""

import json
import re
import shutil
from collections import Counter

import pytest
from helpers import call, flags_of, run_ranks, write_place

from tools import evaluate_games
from tools.common.files import read_json_or_jsonl, write_words
from tools.measure.matches import pairs

PLAYED, HELD_OUT = ["one", "two", "three", "four", "one"], ["café", "five", "six"]  # "one" stands there twice


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two word lists and short prompts, which make games on a tiny model quick."""
    folder = write_place(tmp_path_factory.mktemp("evaluate"), PLAYED)
    write_words(folder / "more.txt", HELD_OUT)
    return folder


@pytest.fixture(scope="module")
def third_model(tmp_path_factory, other_model) -> str:
    """A copy of `other_model` in another folder: a player of its own with the same weights."""
    return str(shutil.copytree(other_model, tmp_path_factory.mktemp("third") / "model"))


def flags(place, named, output, **changes):
    """A command line with short games."""
    values = {
        "players": [f"{name}={folder}" for name, folder in named.items()],
        "words": [place / "words.txt", f"held_out={place / 'more.txt'}"],
        "output_dir": output,
        "seeds": [0, 1],
        "games_per_word": 2,
        "max_turns": 2,
        "max_length": 256,
        "max_new_tokens": 4,
        "per_device_eval_batch_size": 8,
        "logging_steps": 0,
        "prompt_templates": place / "prompts.json",
    }
    return flags_of(values | changes)


def games_of(folder):
    return read_json_or_jsonl(folder / "games_results.json")


def test_a_player_has_the_role_that_its_games_say(place, tmp_path):
    (tmp_path / "own.py").write_text("def a(turn):\n    return 'a'\n\n\ndef b(turn):\n    return 'b'\n")
    players = {name: f"scripted:{tmp_path}/own.py:{name}" for name in "ab"}
    call(evaluate_games.main, *flags(place, players, tmp_path / "out"))
    for game in games_of(tmp_path / "out"):
        assert all(message["content"] == game[message["role"]] for message in game["history"])


def assert_complete(folder, pairs):
    """Every game was played once."""
    games = games_of(folder)
    keys = ("attacker", "defender", "words", "seed", "target_word")
    assert Counter(tuple(game[key] for key in keys) for game in games) == Counter(
        (*pair, name, seed, word)
        for pair in pairs
        for name, words in (("words", PLAYED), ("held_out", HELD_OUT))
        for seed in (0, 1)
        for word in words * 2
    )
    assert [game["index"] for game in games] == list(range(len(games)))


def test_three_players_meet_and_the_files_agree(place, tiny_model, other_model, third_model, tmp_path):
    players = {"imitation": tiny_model, "epoch1": other_model, "epoch2": third_model}
    printed = call(evaluate_games.main, *flags(place, players, tmp_path)).output
    assert_complete(tmp_path, pairs(list(players)))
    results = json.loads((tmp_path / "matches.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert len(results["results"]) == 6 * 3 * 3 * 3  # players in each order; lists, roles and seeds, also pooled
    assert results["settings"]["players"] == list(players)
    assert results["settings"]["player epoch2"]["sha256"] == results["settings"]["player epoch1"]["sha256"]
    assert printed.endswith((tmp_path / "matches.txt").read_text())
    assert json.loads((tmp_path / "games_settings.json").read_text())["engines"] == [["slots"]]  # one start


def test_a_match_does_not_depend_on_those_before_it(place, tiny_model, other_model, third_model, tmp_path):
    players = {"a": tiny_model, "b": other_model, "c": third_model}
    call(evaluate_games.main, *flags(place, players, tmp_path / "all", games_per_word=1))
    call(evaluate_games.main, *flags(place, players, tmp_path / "c", games_per_word=1, against="c"))

    def of_c(folder):
        games = [game | {"index": None} for game in games_of(folder) if "c" in (game["attacker"], game["defender"])]
        return sorted(games, key=json.dumps)

    assert of_c(tmp_path / "all") == of_c(tmp_path / "c") and len(of_c(tmp_path / "c")) == 4 * 2 * 8

    def said(attacker, seed):
        games = games_of(tmp_path / "all")
        return [game["history"] for game in games if (game["attacker"], game["seed"]) == (attacker, seed)][:8]

    # b and c are the same model. With equal draws, their games would be the same.
    assert said("b", 0) != said("c", 0) and said("b", 0) != said("b", 1)


def test_a_list_whose_values_must_differ_is_refused_with_two_of_the_same(place, tmp_path):
    for name, values in (("seeds", [0, 1, 0]), ("players", ["a=x", "a=y"]), ("words", ["a=x", "b=x", "a=z"])):
        refused = call(evaluate_games.main, *flags(place, {"a": "x"}, tmp_path, **{name: values}), status=2)
        assert re.search(f"error: {name}: duplicate in", refused.errors)


def test_two_processes_share_the_games(place, tiny_model, other_model, tmp_path):
    arguments = flags(place, {"a": tiny_model, "b": other_model}, tmp_path)
    printed = run_ranks(["-m", "tools.evaluate_games", *arguments])
    assert_complete(tmp_path, pairs(["a", "b"]))
    assert (tmp_path / "matches.txt").read_text() in printed
