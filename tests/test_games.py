"""What holds for every game, and 20 Questions as the second one."""

import asyncio
import json
import random

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from tools.assign_rewards import assign_rewards
from tools.games import load_game, prompts
from tools.games.game import Game, Outcome, game_problems, game_setting, own_games
from tools.games.twenty_questions import TwentyQuestions
from tools.players.player import ScriptedPlayer
from tools.selfplay.play import play_game

QUESTIONS = TwentyQuestions()


def messages(game, *texts):
    """A history in which the roles take turns."""
    return [{"role": game.roles[index % 2], "content": text} for index, text in enumerate(texts)]


# --- finding a game --------------------------------------------------------------------------------------------------


def test_games_of_this_project_are_found_by_name():
    assert own_games() == ["taboo", "twenty_questions"]
    assert [load_game(name).title for name in own_games()] == ["Adversarial Taboo", "20 Questions"]
    assert load_game().name == "taboo" and load_game("taboo", match="word").match == "word"


OWN = """
from tools.games.twenty_questions import TwentyQuestions
class Mine(TwentyQuestions):
    name = "mine"
    def __init__(self, shout: str = "no"):
        self.shout = shout
"""


def test_a_game_is_also_found_in_a_file_and_in_a_module_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    assert load_game(f"{tmp_path}/mine.py:Mine", shout="yes").shout == "yes"
    monkeypatch.chdir(tmp_path)
    assert load_game("mine:Mine").name == "mine"


def test_an_own_game_with_the_name_of_another_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(OWN.replace('"mine"', '"taboo"'))
    with pytest.raises(ValueError, match="the name 'taboo' is taken; episodes are told apart by it"):
        load_game(f"{tmp_path}/mine.py:Mine")


@pytest.mark.parametrize(
    "name, options, complaint",
    [
        ("chess", {}, "--game chess: there is taboo, twenty_questions; your own is FILE.py:Class"),
        ("../taboo", {}, "there is taboo"),
        ("game", {}, "there is taboo"),
        ("none.py:Mine", {}, "none.py: FileNotFoundError"),
        ("no_module:Mine", {}, "no_module: ModuleNotFoundError: No module named 'no_module'"),
        ("json:JSONDecoder", {}, "json has no subclass of Game called 'JSONDecoder'"),
        ("taboo", {"depth": "3"}, "--game_options depth: Adversarial Taboo has match"),
        ("twenty_questions", {"match": "word"}, "--game_options match: 20 Questions has no options"),
        ("taboo", {"match": "regex"}, "match is 'regex'; it must be one of substring, word"),
    ],
)
def test_an_unknown_game_or_option_is_refused_with_what_there_is(name, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_game(name, **options)


def test_all_that_an_incomplete_game_lacks_is_listed_at_once():
    class Half(Game):
        name, roles = "half", ("one", "two")

    assert game_problems(Half) == [
        *(f"Half.{name} is missing" for name in ("title", "max_turns", "prompt_file", "outcomes")),
        *(f"Half.{name} is missing" for name in ("example_task", "likely_messages")),
        "Half.secrets() is missing",
        "Half.decide() is missing",
    ]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("class Mine(", "mine.py: SyntaxError"),
        ("import no_such_package", "mine.py: ModuleNotFoundError: No module named 'no_such_package'"),
        (OWN.replace(' = "no"', ""), "--game_options of 20 Questions: .*missing 1 required .* 'shout'"),
    ],
)
def test_a_file_that_does_not_work_is_refused_in_one_line(tmp_path, text, complaint):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        load_game(f"{tmp_path}/mine.py:Mine")


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"max_turns": None}, "max_turns is None; it must be a whole number"),
        ({"roles": ("one", "one")}, "roles are"),
        ({"roles": ("history", "two")}, "roles are"),
        ({"roles": ("one two", "three")}, "roles are"),
        ({"outcomes": ()}, "outcomes are called"),
        ({"outcomes": (Outcome("a"), Outcome("a"))}, "outcomes are called"),
        ({"outcomes": (Outcome("a", winner="judge"),)}, "the winner of 'a' is 'judge'"),
        ({"outcomes": (Outcome("a", points=(2.0, 0.0)),)}, "the points of 'a'"),
    ],
)
def test_what_a_game_says_of_itself_is_checked(change, problem):
    kind = type("Odd", (TwentyQuestions,), change)
    assert len(problems := game_problems(kind)) >= 1 and problems[0].startswith(problem)


# --- what follows for every game -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", own_games())
def test_shipped_prompt_files_fit_their_game(name):
    game = load_game(name)
    templates = prompts.load_templates(game.prompt_file, game)
    secret_of = [role for role in game.roles if "zebra" in game.secrets(role, "zebra").values()]
    for length in range(3):
        history = messages(game, *["Hm?"] * length)
        knows = game.next_role(history) in secret_of
        assert ("zebra" in prompts.play_prompt(game, history, "zebra", 4)) is knows
        drawn = prompts.training_prompt(game, history, "zebra", 4, rng=random.Random(length), templates=templates)
        assert ("zebra" in drawn) is knows


@pytest.mark.parametrize("name", own_games())
@given(st.lists(st.sampled_from(["Yes", "No.", "Is it `apple`?", "apple", "I know the word! It is apple", ""])))
def test_a_verdict_is_explained_and_its_points_are_shares(name, texts):
    game = load_game(name)
    history = messages(game, *texts)
    outcome, length = game.judge(history, "apple", 3)
    assert length <= min(len(history), 6) and outcome in [each.name for each in game.outcomes]
    assert all(0 <= points <= 1 for points in game.points("apple", history[:length], outcome))
    assert set(game.rewards("apple", history[:length], outcome)) <= set(game.roles)
    assert game.explain("apple", history[:length], outcome)
    for text in texts:
        assert all(0 <= start <= end <= len(text) for _, start, end in game.marks("apple", text))


def test_an_outcome_that_the_game_does_not_have_is_an_error_at_once():
    game = type("Misspelt", (TwentyQuestions,), {"decide": lambda self, task, history: "fuond"})()
    with pytest.raises(ValueError, match="has no outcome 'fuond'; it has found, answerer says the word"):
        game.judge(messages(game, "Is it red?"), "apple", 3)


def test_points_that_are_no_shares_are_an_error():
    game = type("Generous", (TwentyQuestions,), {"points": lambda self, task, history, outcome: (2.0, 0.0)})()
    with pytest.raises(ValueError, match="gives the points .* between 0 and 1"):
        game.checked_points("apple", [], "found")


def test_runs_are_compared_by_the_options_of_a_game_and_its_source(tmp_path):
    text = OWN.replace("self.shout = shout", "self.shout, self.cache = shout, {len}")
    (tmp_path / "mine.py").write_text(text)
    quiet, loud = (game_setting(load_game(f"{tmp_path}/mine.py:Mine", shout=shout)) for shout in ("no", "yes"))
    assert quiet["options"] == {"shout": "no"} and quiet["sha256"] != loud["sha256"]
    json.dumps(loud)
    (tmp_path / "mine.py").write_text(text + "# another rule")
    assert game_setting(load_game(f"{tmp_path}/mine.py:Mine"))["sha256"] != quiet["sha256"]


def test_what_is_marked_as_the_secret_is_what_the_judge_counts():
    assert load_game("taboo").marks("art", "We start.") == [("secret", 5, 8)]
    assert load_game("taboo", match="word").marks("art", "We start art.") == [("secret", 9, 12)]
    assert QUESTIONS.marks("apple", "No pineapple, apple") == [("secret", 14, 19)]


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
    with pytest.raises(ValueError, match="has no outcome 'draw'"):
        taboo.points("apple", [], "draw")


def test_a_stored_game_of_another_kind_is_refused_by_name():
    stored = {"history": [], "target_word": "apple", "max_turns": 3}
    load_game().check_episode(stored)
    load_game().check_episode(stored | {"game": "taboo"})
    with pytest.raises(ValueError, match="a game of 'twenty_questions', not of 'taboo'; --game names"):
        load_game().check_episode(stored | {"game": "twenty_questions"})


# --- 20 Questions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts, outcome, length",
    [
        (["Is it alive?", "Yes", "Is it `apple`?"], "found", 3),
        (["Is it `Apple` ?"], "found", 1),
        (["Is it `pear`?", "No, it is not"], "not found", 2),
        (["Is it red?", "Yes, an apple is red"], "answerer says the word", 2),
        (["Is it red?", "Yes, like pineapples"], "not found", 2),
        (["Is it red?", "Perhaps"], "no answer", 2),
        (["Is it red?", "- *No*"], "not found", 2),
        (["a", "Yes", "b", "No", "c", "Yes", "Is it `apple`?"], "not found", 6),
    ],
)
def test_twenty_questions_is_judged_by_its_rules(texts, outcome, length):
    assert QUESTIONS.judge(messages(QUESTIONS, *texts), "apple", 3) == (outcome, length)


def test_both_players_of_a_found_word_are_paid_and_weigh_the_same():
    played = {"game": QUESTIONS.name, "target_word": "apple", "max_turns": 5}
    found = played | {"history": messages(QUESTIONS, "Alive?", "No", "Is it `apple`?")}
    lost = played | {"history": messages(QUESTIONS, "Alive?", "Apple")}
    rows = assign_rewards([found, lost], game=QUESTIONS, decay_weight=0.5, rng=random.Random(0))
    # The guesser's two messages share 1 as 1/3 and 2/3; N = 2, N_role = 1 each: weights 2 / (2 * 1).
    expected = [("guesser", "Alive?", 1 / 3), ("answerer", "No", 1.0), ("guesser", "Is it `apple`?", 2 / 3)]
    assert [(row["role"], row["target"], row["reward"]) for row in rows] == expected
    assert {row["weight"] for row in rows} == {1.0}


def test_a_game_names_itself_in_its_episode():
    players = {"guesser": ScriptedPlayer([["Big?", "Is it `apple`?"]]), "answerer": ScriptedPlayer([["No"]])}
    episode = asyncio.run(play_game(QUESTIONS, "apple", players, max_turns=20))
    assert (episode["game"], episode["outcome"], episode["length"]) == ("twenty_questions", "found", 3)
    assert players["guesser"].asked[0].secrets == {}
    assert players["answerer"].asked[0].secrets == {"target_word": "apple"}


def test_nothing_outside_its_file_knows_of_twenty_questions():
    sources = [*ROOT.glob("*.py"), *ROOT.glob("tools/**/*.py"), *ROOT.glob("tools/**/*.sh")]
    named = [path.name for path in sources if "twenty" in path.read_text(encoding="utf-8").lower()]
    assert named == ["twenty_questions.py"]
