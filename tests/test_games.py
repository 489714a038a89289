"""What holds for every game, and 20 Questions as the second one."""

import asyncio
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedPlayer, messages

from tools.assign_rewards import assign_rewards
from tools.games import load_game, prompts
from tools.games.chat import chat_messages
from tools.games.game import Game, Outcome, game_setting, own_games
from tools.games.twenty_questions import TwentyQuestions
from tools.selfplay.play import play_game
from utils import UserError

QUESTIONS, CITY, BARGAIN = TwentyQuestions(), load_game("guess_my_city"), load_game("bargain")
OWN_GAMES = [name for name in own_games() if name != "textarena"]  # which needs a package, and has its own tests


# Messages that decide a game with its example task, and some that do not.
SAID = ["Yes", "No.", "Is it `word`?", "word", "I know the word! It is word", "Are you from `Lyon`?", "In France."]
SAID += ["[I keep: 1 book]", "[I keep: 9 book]", "[accept]", ""]


# --- finding a game --------------------------------------------------------------------------------------------------


OWN = """
from tools.games import Outcome
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


@pytest.mark.parametrize(
    "name, options, complaint",
    [
        ("nowhere:Chess", {}, "nowhere: No module named 'nowhere'"),
        ("chess", {}, "--game chess: there is bargain, guess_my_city, taboo, textarena, twenty_questions"),
        ("json:JSONDecoder", {}, "json has no subclass of Game called 'JSONDecoder'"),
        ("taboo", {"depth": "3"}, "--game_options of Adversarial Taboo: .*'depth'; it has match"),
        ("twenty_questions", {"match": "word"}, "--game_options of 20 Questions: .*'match'; it has none"),
        ("taboo", {"match": "regex"}, "match is 'regex'; it must be one of substring, word"),
    ],
)
def test_an_unknown_game_or_option_is_refused_with_what_there_is(name, options, complaint):
    with pytest.raises(UserError, match=complaint):
        load_game(name, **options)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ('name = "taboo"', "has a game called 'taboo'"),
        ("def __init__(self): raise ValueError('no shouting')", "20 Questions: no shouting"),
        ('roles = ("one", "one")', "roles are"),
        ('roles = ("history", "two")', "roles are"),
        ('outcomes = (Outcome("a"), Outcome("a"))', "outcomes are called"),
        ('outcomes = (Outcome("a", winner="judge"),)', "the winner of 'a' is 'judge'"),
        ("outcomes = ()", "outcomes are called"),
        ('outcomes = (Outcome("a", points=(1.0,)),)', "the points of 'a' are"),
        ('outcomes = (Outcome("a", points=(1.0, "0")),)', "the points of 'a' are"),
        ('outcomes = (Outcome("a", points=(1.0, -0.5)),)', "the points of 'a' are"),
        ('def next_role(self, task, history): return "Guesser"', "next_role gives 'Guesser'"),
        ("def __init__(self, size): self.size = size", "20 Questions: .*'size'"),
    ],
)
def test_an_own_game_that_would_give_wrong_results_is_refused(tmp_path, text, complaint):
    (tmp_path / "mine.py").write_text(OWN.split("    def")[0] + f"    {text}\n")
    with pytest.raises(UserError, match=complaint):
        load_game(f"{tmp_path}/mine.py:Mine")


def test_all_that_an_incomplete_game_lacks_is_listed_at_once(tmp_path):
    half = "from tools.games import Game\nclass Half(Game):\n    name, roles = 'half', ('one', 'two')\n"
    (tmp_path / "half.py").write_text(half)
    lacking = ("title", "max_turns", "prompt_file", "outcomes", "example_task", "secrets", "decide")
    with pytest.raises(UserError, match=".*".join(f"Half.{name} is missing" for name in lacking)):
        load_game(f"{tmp_path}/half.py:Half")


# --- what follows for every game -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN_GAMES)
def test_shipped_prompt_files_fit_their_game(name):
    game = load_game(name)
    templates = prompts.load_templates(game.prompt_file, game)
    task = game.example_task.replace("word", "zebra")  # which no rule names
    for length in range(3):
        history = messages(game, *["Hm?"] * length)
        speaks = game.next_role(task, history)
        known = [secret for role in game.roles for secret in game.secrets(role, task, history).values()]
        drawn = prompts.training_prompt(game, history, task, 4, rng=random.Random(length), templates=templates)
        for prompt in (prompts.play_prompt(game, history, task, 4), drawn):
            told = [secret in prompt for secret in known]
            assert told == [secret in game.secrets(speaks, task, history).values() for secret in known]


@pytest.mark.parametrize("name", OWN_GAMES)
@given(st.lists(st.sampled_from(SAID)))
def test_a_verdict_is_explained_and_its_points_are_shares(name, texts):
    game = load_game(name)
    history, task = messages(game, *texts), game.example_task
    outcome, length = game.judge(history, task, 3)
    assert length <= min(len(history), 6) and outcome in [each.name for each in game.outcomes]
    assert all(0 <= points <= 1 for points in game.points(task, history[:length], outcome))
    rewards = game.rewards(task, history[:length], outcome)
    assert set(rewards) <= set(game.roles) and all(0 <= reward <= 1 for reward in rewards.values())
    assert game.explain(task, history[:length], outcome)
    for text in texts:
        assert all(0 <= start <= end <= len(text) for _, start, end in game.marks(task, text))


def test_runs_are_compared_by_the_options_of_a_game_and_its_source(tmp_path):
    text = OWN.replace("self.shout = shout", "self.shout, self.cache = shout, {len}")
    (tmp_path / "mine.py").write_text(text)
    quiet, loud = (game_setting(load_game(f"{tmp_path}/mine.py:Mine", shout=shout)) for shout in ("no", "yes"))
    assert quiet["options"] == {"shout": "no"} and quiet["sha256"] != loud["sha256"]
    json.dumps(loud)
    (tmp_path / "mine.py").write_text(text + "# another rule")
    assert game_setting(load_game(f"{tmp_path}/mine.py:Mine"))["sha256"] != quiet["sha256"]


class Counting(Game):
    """Who opens depends on the task, and a secret on the messages: the second role opens an odd task."""

    name, title, max_turns, roles, example_task = "counting", "Counting", 2, ("left", "right"), "1"
    outcomes = (Outcome("left wins", winner="left"), Outcome("open"))
    prompt_file = None

    def secrets(self, role, task, history):
        return {"said": f"{role} of {task} after {len(history)}"}

    def next_role(self, task, history):
        return self.roles[(int(task) + len(history)) % 2]

    def decide(self, task, history):
        return "left wins" if len(history) == 3 else None


@pytest.mark.parametrize("task, order", [("0", ["left", "right", "left"]), ("1", ["right", "left", "right"])])
def test_who_speaks_and_what_he_knows_may_depend_on_the_game_so_far(task, order):
    game, players = Counting(), {role: ScriptedPlayer([["a", "b"]]) for role in Counting.roles}
    templates = {"rules": ["Count.\n"]} | {f"{role}_instruction": "You: {said}." for role in game.roles}
    episode = asyncio.run(play_game(game, task, players, max_turns=2, templates=templates))
    assert [message["role"] for message in episode["history"]] == order
    for index, role in enumerate(order):
        history, known = episode["history"][:index], f"You: {role} of {task} after {index}."
        assert known in prompts.play_prompt(game, history, task, 2, templates)
        system, first, *_ = chat_messages(history, role, "Count.\n", known)
        assert (system["role"], first["role"]) == ("system", "user")
        assert (first["content"] == prompts.NO_HISTORY) == (role == order[0])
        (turn,) = [turn for turn in players[role].asked if len(turn.history) == index]
        assert turn.secrets == {"said": known[5:-1]}
    rows = assign_rewards([episode], game=game, rng=random.Random(0), templates=templates)
    places = [index for index, role in enumerate(order) if role == "left"]  # who wins
    for row, index in zip(rows, places, strict=True):
        assert row["role"] == "left" and re.search(f"You: left of {task} after {index}[.:]", row["query"])


def test_outcomes_and_points_that_a_game_must_not_give_are_errors():
    wrong = {"decide": lambda *_: "fuond", "points": lambda *_: (2.0, 0.0)}
    game = type("Misspelt", (TwentyQuestions,), wrong)()
    with pytest.raises(ValueError, match="has no outcome 'fuond'; it has found, answerer says the word"):
        game.judge(messages(game, "Is it red?"), "apple", 3)
    with pytest.raises(ValueError, match="gives the points .* between 0 and 1"):
        game.checked_points("apple", [], "found")
    greedy = type("Greedy", (TwentyQuestions,), {"points": wrong["points"]})()
    players = dict(zip(greedy.roles, (ScriptedPlayer([["Is it `apple`?"]]), None), strict=True))
    with pytest.raises(ValueError, match="gives the points .* between 0 and 1"):
        asyncio.run(play_game(greedy, "apple", players, max_turns=2))


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


# --- 20 Questions and Guess My City ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts, outcome, length",
    [
        (["Is it alive?", "Yes", "Is it `Apple` ?"], "found", 3),
        (["Is it red?", "Yes, an apple is red"], "answerer says the word", 2),
        (["Is it red?", "Yes, like pineapples"], "not found", 2),  # a whole word is meant
        (["Is it red?", "Perhaps"], "no answer", 2),
        (["Is it red?", "- *No*"], "not found", 2),
        (["Is it red?", "_No_"], "not found", 2),
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
        (["Where?", "I live in _Lyon_"], "answerer names the place", 2),
        (["Which language?", "I am no Lyonnais."], "not found", 2),
        (["Are you from `Paris`?", "b", "c", "d", "e", "f", "Are you from `Lyon`?"], "not found", 6),
    ],
)
def test_guess_my_city_is_judged_by_its_rules(texts, outcome, length):
    assert CITY.judge(messages(CITY, *texts), "Lyon, France, Europe", 3) == (outcome, length)


# --- a bargain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts, outcome, length, points",
    [
        # All is worth 2 * 4 + 1 * 2 = 10 to the first and 2 * 1 + 1 * 8 = 10 to the second.
        (["[I keep: 2 book]", "[accept]"], "deal", 2, (0.8, 0.8)),
        (["[I keep: 2 Book, 1 hat]", "No. [i keep: 1 hat, 1 book]", "Fine: [ACCEPT]"], "deal", 3, (0.4, 0.9)),
        (["[I keep: ]", "[accept]"], "deal", 2, (0.0, 1.0)),
        (["[I keep: 1 hat] or rather [I keep: 2 book]", "[accept]"], "deal", 2, (0.8, 0.8)),  # the last one
        (["[I keep: 2 book]", "Hm.", "[accept]"], "no deal", 3, (0.0, 0.0)),  # nothing to accept
        (["I keep: 2 book", "[accept]"], "no deal", 2, (0.0, 0.0)),
        (["[I keep: 3 book]", "[accept]"], "offer of what is not there", 1, (0.0, 0.0)),
        (["[I keep: everything]"], "offer of what is not there", 1, (0.0, 0.0)),
        (["a", "b", "c", "d", "e", "[I keep: 2 book]", "[accept]"], "no deal", 6, (0.0, 0.0)),
    ],
)
def test_a_bargain_is_judged_and_paid_by_its_rules(texts, outcome, length, points):
    history, task = messages(BARGAIN, *texts), "book:2:4/1 hat:1:2/8"
    assert BARGAIN.judge(history, task, 3) == (outcome, length)
    assert BARGAIN.points(task, history[:length], outcome) == pytest.approx(points)
    assert list(BARGAIN.rewards(task, history[:length], outcome).values()) == pytest.approx(points)
    shares = [f"{share:.0%} " for share in points if outcome == "deal"]
    assert all(share in BARGAIN.explain(task, history[:length], outcome) for share in shares)


@pytest.mark.parametrize(
    "game, tasks",
    [
        (CITY, ["Lyon", "Lyon, France", "Lyon, , Europe", "Lyon, France, Europe, Earth"]),
        (BARGAIN, ["book", "book:2:4", "book:0:1/1", "book:1:1/1 Book:1:1/1", "book:1:0/5"]),
    ],
)
def test_a_line_that_is_not_a_task_is_refused(game, tasks):
    game.check_task(game.example_task)
    for task in tasks:
        with pytest.raises(ValueError, match=re.escape(repr(task))):
            game.check_task(task)


def test_shares_become_rewards_and_only_the_roles_that_get_something_weigh():
    """Rewards of 0.4 and 0.9, and of 1 and nothing: rows are the share by decay times the role's reward."""
    task, played = "book:2:4/1 hat:1:2/8", {"game": "bargain", "max_turns": 6}
    texts = ["[I keep: 2 book, 1 hat]", "[I keep: 1 hat, 1 book]", "[accept]"]
    fair = played | {"target_word": task, "history": messages(BARGAIN, *texts)}
    greedy = played | {"target_word": task, "history": messages(BARGAIN, "[I keep: 2 book, 1 hat]", "[accept]")}
    rows = assign_rewards([fair, greedy], game=BARGAIN, decay_weight=0.5, rng=random.Random(0))
    # N_first = 2, N_second = 1, N = 3: weights 3 / 4 and 3 / 2. The first's shares of a game of two: 1/3 and 2/3.
    assert [row["role"] for row in rows] == ["first_buyer", "second_buyer", "first_buyer", "first_buyer"]
    assert [row["reward"] for row in rows] == pytest.approx([0.4 / 3, 0.9, 0.8 / 3, 1.0])
    assert [row["weight"] for row in rows] == [0.75, 1.5, 0.75, 0.75]


def test_bargains_are_drawn_and_each_is_a_task():
    tasks = BARGAIN.tasks(50, random.Random(1))
    assert len(set(tasks)) == 50 and tasks == BARGAIN.tasks(50, random.Random(1))
    for task in tasks:
        BARGAIN.check_task(task)
