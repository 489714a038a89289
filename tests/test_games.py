"""What holds for every game, the games beside Taboo, and each of them through every program."""

import asyncio
import json
import random
import re
import sys
from typing import NamedTuple

import pytest
from graded_game import TEMPLATES, Divide
from helpers import ROOT, call, flags_of
from scripted import ScriptedPlayer, messages

from tools import assign_rewards, evaluate_games, play_llm_game, report
from tools.games import load_game, prompts
from tools.games.game import CLASSES, Game
from tools.selfplay.play import play_games
from utils import UserError, read_json_or_jsonl, read_words, write_records

QUESTIONS, CITY = load_game("twenty_questions"), load_game("guess_my_city")
OWN_GAMES = [name for name in CLASSES if name != "textarena"]  # which needs a package, and has its own tests
# Messages that decide a game with its example task, and some that do not.
TEXTS = ["Yes", "No.", "Is it `word`?", "word", "I know the word! It is word", "Are you from `Lyon`?", "France", ""]


# --- finding a game --------------------------------------------------------------------------------------------------


MINE = """
from tools.games import Outcome
from tools.games.twenty_questions import TwentyQuestions
class Mine(TwentyQuestions):
    name = "mine"
    def __init__(self, shout: str = "no"):
        self.shout = shout
"""


def test_a_game_is_also_found_in_a_file_and_in_a_module_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    assert load_game(f"{tmp_path}/mine.py:Mine", shout="yes").shout == "yes"
    monkeypatch.chdir(tmp_path)
    assert load_game("mine:Mine").name == "mine"


@pytest.mark.parametrize(
    "name, options, complaint",
    [
        ("chess", {}, "--game chess: there is taboo, twenty_questions, guess_my_city, textarena"),
        ("taboo", {"match": "regex"}, "match is 'regex'; it must be one of substring, word"),
    ],
)
def test_an_unknown_game_or_option_is_refused(name, options, complaint):
    with pytest.raises(UserError, match=complaint):
        load_game(name, **options)
    with pytest.raises(TypeError, match="depth"):
        load_game("taboo", depth="3")


def test_an_episode_never_causes_an_import(tmp_path, monkeypatch):
    """Its game is compared with the one of the flags."""
    (tmp_path / "trap.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(tmp_path)
    episode = {"history": [], "target_word": "apple", "max_turns": 3, "game": "trap:Game"}
    with pytest.raises(ValueError, match="a game of 'trap:Game', not of 'taboo'; pass --game"):
        load_game().check_episode(episode)
    with pytest.raises(ValueError, match="'max_turns' is missing"):
        load_game().check_episode({"history": [], "target_word": "apple"})
    assert "trap" not in sys.modules


# --- what follows for every game -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN_GAMES)
def test_shipped_prompt_files_fit_their_game(name):
    game = load_game(name)
    task = game.example_task.replace("word", "zebra")  # which no rule names
    for length in range(3):
        history = messages(game, *["Hm?"] * length)
        speaker = game.next_role(task, history)
        secrets = [secret for role in game.roles for secret in game.secrets(role, task, history).values()]
        drawn = prompts.training_prompt(game, history, task, 4, rng=random.Random(length))
        for prompt in (prompts.play_prompt(game, history, task, 4), drawn):
            visible = [secret in prompt for secret in secrets]
            assert visible == [secret in game.secrets(speaker, task, history).values() for secret in secrets]


@pytest.mark.parametrize("name", OWN_GAMES)
def test_the_answer_is_a_message_that_finds_the_secret(name):
    game = load_game(name)
    role, answer = game.answer(game.example_task)
    texts = [answer] if role == game.roles[0] else ["Hm?", answer]
    outcome = game.outcome(game.judge(messages(game, *texts), game.example_task, 3).outcome)
    assert game.rewards(game.example_task, messages(game, *texts), outcome.name)[role] == 1.0
    assert Divide().answer("10") is None


def test_points_follow_from_winner_breach_and_outcome():
    taboo = load_game()
    points = {outcome.name: taboo.points("apple", [], outcome.name) for outcome in taboo.outcomes}
    assert points == {
        "attacker wins": (1.0, 0.0),
        "defender wins": (0.0, 1.0),
        "attacker breaks the rules": (0.0, 1.0),
        "tied game": (0.5, 0.5),
    }
    assert taboo.rewards("apple", [], "attacker breaks the rules") == {}


# --- 20 Questions and Guess My City ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts, outcome, length",
    [
        (["Is it alive?", "Yes", "Is it `Apple` ?"], "found", 3),
        (["Is it red?", "Yes, an apple is red"], "answerer says the word", 2),
        (["Is it red?", "Yes, like pineapples"], "not found", 2),  # a whole word is meant
        (["Is it red?", "Perhaps"], "no answer", 2),
        (["Is it red?", "- *No*"], "not found", 2),
        (["Is it red?", "No1"], "no answer", 2),
        (["Is it red?", "Yes, it is _apple_"], "answerer says the word", 2),
        (["Is it `pear`?", "No", "b", "No", "c", "Yes", "Is it `apple`?"], "not found", 6),
    ],
)
def test_twenty_questions_is_judged_by_its_rules(texts, outcome, length):
    assert QUESTIONS.judge(messages(QUESTIONS, *texts), "apple", 3) == (outcome, length)


@pytest.mark.parametrize(
    "texts, outcome, length",
    [
        (["Is it warm?", "Often.", "Are you from `lyon, FRANCE`?"], "found", 3),
        (["Are you from Lyon?", "Yes."], "not found", 2),  # no backticks
        (["Is it Lyon?", "Yes, LYON!"], "answerer names the place", 2),
        (["Which language?", "That of france."], "answerer names the place", 2),
        (["Which language?", "I am no Lyonnais."], "not found", 2),
        (["Are you from `Paris`?", "b", "c", "d", "e", "f", "Are you from `Lyon`?"], "not found", 6),
    ],
)
def test_guess_my_city_is_judged_by_its_rules(texts, outcome, length):
    assert CITY.judge(messages(CITY, *texts), "Lyon, France, Europe", 3) == (outcome, length)


def test_each_line_of_the_list_of_cities_is_a_task_and_others_are_refused():
    cities = read_words(ROOT / "data" / "cities.txt", CITY.check_task)
    assert len(set(cities)) == len(cities) == 1000
    for task in ("Lyon", "Lyon, France", "Lyon, , Europe", "Lyon, France, Europe, Earth"):
        with pytest.raises(ValueError, match=re.escape(repr(task))):
            CITY.check_task(task)


# --- graded rewards --------------------------------------------------------------------------------------------------


def test_shares_become_rewards_and_only_the_roles_that_get_something_weigh():
    """Rewards of 0.4 and 0.6, and of 1 and nothing: rows are the share by decay times the role's reward."""
    game = Divide()
    fair = {"history": messages(game, "[keep 9]", "[refuse]", "[keep 4]", "[accept]")}
    greedy = {"history": messages(game, "[keep 10]", "[accept]")}
    for episode in (fair, greedy):
        episode |= {"game": "divide", "target_word": "10", "max_turns": 3}
    rows = assign_rewards.assign_rewards(
        [fair, greedy], game=game, decay_weight=0.5, rng=random.Random(0), templates=TEMPLATES
    )
    # Games that pay: N_divider = 2, N_taker = 1, N = 3: weights 3/4 and 3/2. Shares of two messages: 1/3 and 2/3.
    assert [row["role"] for row in rows] == ["divider", "taker", "divider", "taker", "divider"]
    assert [row["reward"] for row in rows] == pytest.approx([0.4 / 3, 0.6 / 3, 0.8 / 3, 1.2 / 3, 1.0])
    assert [row["weight"] for row in rows] == [0.75, 1.5, 0.75, 1.5, 0.75]


# --- each game through every program ---------------------------------------------------------------------------------


class Case(NamedTuple):
    """A game, two of its tasks, what the roles say in a game of each, and how these games end."""

    game: Game
    tasks: list[str]
    messages: tuple[list[list[str]], list[list[str]]]
    outcomes: list[str]
    rewards: list[float]  # of the rows, all of the first game


CASES = [
    Case(
        QUESTIONS,
        ["apple", "lamp"],
        ([["Is it round?", "Is it `apple`?"], ["Is it red?", "Is it `sun`?", "Is it big?"]], [["Yes."], ["No."] * 3]),
        ["found", "not found"],
        [0.8 / 1.8, 1.0, 1 / 1.8],
    ),
    Case(
        CITY,
        ["Lyon, France, Europe", "Cusco, Peru, South America"],
        (
            [["What is it known for?", "Are you from `Lyon`?"], ["Is it high up?"] * 3],
            [["Silk, and two rivers."], ["Yes.", "Above the clouds.", "It is."]],
        ),
        ["found", "not found"],
        [0.8 / 1.8, 1.0, 1 / 1.8],
    ),
]
SHORT = {"max_turns": 2, "max_length": 1600, "max_new_tokens": 4, "logging_steps": 0}


@pytest.fixture(params=CASES, ids=lambda case: case.game.name)
def case(request):
    return request.param


def test_models_play_a_game_and_meet_in_it_and_the_report_shows_it(case, tiny_model, other_model, tmp_path):
    words, game = tmp_path / "words.txt", {"game": case.game.name}
    words.write_text("".join(f"{task}\n" for task in case.tasks))
    flags = dict.fromkeys(("attacker_model_name_or_path", "defender_model_name_or_path"), tiny_model)
    flags |= {"data_path": words, "output_dir": tmp_path, "model_prefix": "m", "data_suffix": "w"}
    call(play_llm_game.main, *flags_of(game | flags | SHORT))
    games = read_json_or_jsonl(tmp_path / "m_sampling_w_results.json")
    assert [episode["target_word"] for episode in games] == case.tasks
    assert {episode["game"] for episode in games} == {case.game.name}
    assert {message["role"] for episode in games for message in episode["history"]} == set(case.game.roles)
    call(report.main, tmp_path, *flags_of(game))
    assert case.game.title in (tmp_path / "report.html").read_text()
    flags = {"players": [f"a={tiny_model}", f"b={other_model}"], "games_per_word": 1, "words": words}
    call(evaluate_games.main, *flags_of(game | flags | {"output_dir": tmp_path / "match"} | SHORT))
    rows = json.loads((tmp_path / "match" / "matches.json").read_text())["results"]
    both = {row["player"]: row for row in rows if row["role"] == "both"}
    assert both["a"]["points"] == both["b"]["points"]  # they win together


def test_games_that_pay_become_rows(case, tmp_path):
    players = {role: ScriptedPlayer(texts) for role, texts in zip(case.game.roles, case.messages, strict=True)}
    episodes, tasks = [], enumerate(case.tasks)
    asyncio.run(play_games(case.game, tasks, players, max_turns=3, concurrent_games=1, on_episode=episodes.append))
    assert [episode["outcome"] for episode in episodes] == case.outcomes
    write_records(tmp_path / "games.json", episodes)
    flags = {"input_data_path": tmp_path / "games.json", "output_data_path": tmp_path / "rows.json"}
    call(assign_rewards.main, *flags_of({"game": case.game.name} | flags))
    rows = read_json_or_jsonl(tmp_path / "rows.json")
    assert [row["role"] for row in rows] == [message["role"] for message in episodes[0]["history"]]
    assert [row["reward"] for row in rows] == pytest.approx(case.rewards)
