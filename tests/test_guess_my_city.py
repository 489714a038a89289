"""Guess My City, an example game outside the house: its rules, its list of cities, and a game through programs."""

import random
import re

import pytest
from helpers import ROOT, call, flags_of, play_flags
from scripted import messages

from tools import play_llm_game, report
from tools.assign_rewards import assign_rewards
from tools.common.files import read_json, read_words
from tools.games import load_game
from tools.games.prompts import play_prompt

FOLDER = ROOT / "tools" / "examples"
CITY_FILE = f"{FOLDER}/guess_my_city.py:GuessMyCity"
GAME, LYON = load_game(CITY_FILE), "Lyon, France, Europe"


@pytest.mark.parametrize(
    "texts, outcome, length",
    [
        (["Is it warm?", "Often.", "Are you from `lyon, FRANCE`?"], "found", 3),
        (["Are you from `Nice`? Are you from `Lyon`?"], "found", 1),
        (["Are you from Lyon?", "Yes."], "not found", 2),  # no backticks
        (["Is it Lyon?", "Yes, LYON!"], "answerer names the place", 2),
        (["Which language?", "That of france."], "answerer names the place", 2),
        (["Which language?", "I am no Lyonnais."], "not found", 2),
        (["Are you from `Paris`?", "b", "c", "d", "e", "f", "Are you from `Lyon`?"], "not found", 6),
    ],
)
def test_cities_are_judged_by_their_rules(texts, outcome, length):
    assert GAME.judge(messages(GAME, *texts), LYON, 3) == (outcome, length)


def test_each_line_of_the_list_of_cities_is_a_task_and_others_are_refused():
    assert len(set(read_words(FOLDER / "cities.txt", GAME.check_task))) == 1000
    for task in ("Lyon", "Lyon, , Europe", "Lyon, France, Europe, Earth"):
        with pytest.raises(ValueError, match=re.escape(repr(task))):
            GAME.check_task(task)


def test_only_the_answerer_sees_the_city_and_both_get_rows_when_the_answer_finds_it():
    asked = messages(GAME, "Is it warm?")
    assert "Lyon" not in play_prompt(GAME, [], LYON, 4)
    assert all(part in play_prompt(GAME, asked, LYON, 4) for part in ("Lyon", "France", "Europe"))
    role, answer = GAME.answer(LYON)
    history = messages(GAME, "Is it warm?", "Often.", answer)
    assert history[-1]["role"] == role
    found = {"game": "guess_my_city", "history": history, "target_word": LYON, "max_turns": 3}
    rows = assign_rewards([found], game=GAME, rng=random.Random(0))
    assert [row["role"] for row in rows] == ["guesser", "answerer", "guesser"]


def test_models_play_it_by_its_path_and_the_report_shows_it(tiny_model, tmp_path):
    (tmp_path / "words.txt").write_text(f"{LYON}\n" * 2)
    how = {"game": CITY_FILE, "model_prefix": "m", "prompt_templates": None, "max_length": 1600, "max_new_tokens": 4}
    call(play_llm_game.main, *play_flags(tmp_path, tiny_model, tmp_path, **how))
    games = read_json(tmp_path / "m_sampling_words_results.json")
    assert [(game["game"], game["target_word"]) for game in games] == [("guess_my_city", LYON)] * 2
    call(report.main, tmp_path, *flags_of({"game": CITY_FILE}))
    assert "Guess My City" in (tmp_path / "report.html").read_text()
