"""What holds for every game, the games beside Taboo, and each of them through every program."""

import json
import os
import random
import sys

import pytest
from graded_game import TEMPLATES, Divide
from helpers import call, flags_of, play_flags
from scripted import messages

from tools import evaluate_games, play_llm_game, report
from tools.assign_rewards import assign_rewards
from tools.common.errors import UserError
from tools.common.files import read_json_or_jsonl
from tools.games import load_game, prompts
from tools.games.game import CLASSES
from tools.selfplay.flags import PlayFlags

QUESTIONS = load_game("twenty_questions")

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


def test_an_edited_file_of_the_same_size_and_second_is_the_new_game(tmp_path):
    path, flags, digests = tmp_path / "mine.py", PlayFlags(game=f"{tmp_path}/mine.py:Mine"), set()
    for name in ("mine", "ours"):
        path.write_text(MINE.replace('"mine"', f'"{name}"'))
        os.utime(path, (1e9, 1e9))
        game = flags.load_game()
        assert game.name == name
        digests.add(flags.settings(game)["game_file"]["sha256"])
    assert len(digests) == 2
    assert "game_file" not in PlayFlags().settings(load_game())


def test_a_file_runs_once_and_can_import_the_modules_beside_it(tmp_path, monkeypatch):
    (tmp_path / "rules_beside.py").write_text('TITLE = "Beside"')
    (tmp_path / "mine.py").write_text(f"{MINE}    from rules_beside import TITLE as title\nprint('runs')\n")
    ran = []
    monkeypatch.setattr("builtins.print", ran.append)
    game = load_game(f"{tmp_path}/mine.py:Mine")
    monkeypatch.chdir(tmp_path)
    assert game.title == "Beside" and type(load_game("mine.py:Mine")) is type(game)
    assert PlayFlags(game="mine.py:Mine").settings(game)["game_file"]["path"] == "mine.py"
    assert ran == ["runs"]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("chess", {}, "taboo"),
        ("taboo", {"match": "regex"}, "must be one of substring, word"),
        ("taboo", {"matches": "word"}, "--game taboo.*unexpected keyword argument 'matches'"),
    ],
)
def test_an_unknown_game_or_option_is_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        load_game(name, **options)


@pytest.mark.parametrize(
    "bug, error",
    [
        ("import nosuchmodule", ModuleNotFoundError),
        ("def decide(:", SyntaxError),
        ("    def __init__(self):\n        self.shout.no", AttributeError),
        ("    def __init__(self):\n        len(5)", TypeError),
        ("    def check_task(self, task):\n        self.shout.no", AttributeError),
        ("    def decide(self, task, history):\n        return history[5]", IndexError),
    ],
)
@pytest.mark.parametrize("place", ["buggy.py", "buggy"])
def test_a_bug_in_a_game_of_ones_own_keeps_its_traceback(bug, error, place, tmp_path, monkeypatch):
    (tmp_path / "buggy.py").write_text(f"{MINE}{bug}\n" if bug[0] == " " else f"{bug}\n{MINE}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "buggy", raising=False)
    episode = {"history": [{"role": "guesser", "content": "?"}], "target_word": "a", "max_turns": 3, "game": "mine"}
    with pytest.raises(error):
        assign_rewards([episode], game=load_game(f"{place}:Mine"), rng=random.Random(0))


def test_an_episode_never_causes_an_import(tmp_path, monkeypatch):
    """Its game is compared with the one of the flags."""
    (tmp_path / "trap.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(tmp_path)
    episode = {"history": [], "target_word": "apple", "max_turns": 3, "game": "trap:Game"}
    with pytest.raises(ValueError, match="an episode of 'trap:Game', not of 'taboo'; set --game"):
        load_game().check_episode(episode)
    assert "trap" not in sys.modules


@pytest.mark.parametrize("name", CLASSES)
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


@pytest.mark.parametrize("name", [name for name in CLASSES if load_game(name).answer(load_game(name).example_task)])
def test_the_answer_is_a_message_that_finds_the_secret(name, tmp_path):
    game = load_game(name)
    role, answer = game.answer(game.example_task)
    texts = [answer] if role == game.roles[0] else ["Hm?", answer]
    outcome = game.outcome(game.judge(messages(game, *texts), game.example_task, 3).outcome)
    assert game.rewards(game.example_task, messages(game, *texts), outcome.name)[role] > 0
    own = prompts.default_templates(game) | {"answer": answer.replace(game.example_task, "{target_word}")}
    (tmp_path / "prompts.json").write_text(json.dumps(own))
    assert prompts.load_templates(tmp_path / "prompts.json", game) == own


@pytest.mark.parametrize(
    "texts, outcome, length",
    [
        (["Is it alive?", "Yes", "Is it `Apple` ?"], "found", 3),
        (["Is it `fig`? Or is it `apple`?"], "found", 1),  # one of its guesses is right
        (["Is it red?", "Yes, an apple is red"], "answerer says the word", 2),
        (["Is it red?", "Yes, like pineapples"], "not found", 2),  # a whole word is meant
        (["Is it red?", "Perhaps"], "no answer", 2),
        (["Is it red?", "- *No*"], "not found", 2),
        (["Is it red?", "No1"], "no answer", 2),
        (["Is it red?", "Yes, it is _apple_"], "answerer says the word", 2),
        (["Is it `pear`?", "No", "b", "No", "c", "Yes", "Is it `apple`?"], "not found", 6),
    ],
)
def test_questions_are_judged_by_their_rules(texts, outcome, length):
    assert QUESTIONS.judge(messages(QUESTIONS, *texts), "apple", 3) == (outcome, length)


def test_shares_become_rewards_and_only_the_roles_that_get_something_weigh():
    """Rewards of 0.4 and 0.6, and of 1 and nothing: rows are the share by decay times the role's reward."""
    game = Divide()
    fair = {"history": messages(game, "[keep 9]", "[refuse]", "[keep 4]", "[accept]")}
    greedy = {"history": messages(game, "[keep 10]", "[accept]")}
    for episode in (fair, greedy):
        episode |= {"game": "divide", "target_word": "10", "max_turns": 3}
    rows = assign_rewards([fair, greedy], game=game, decay_weight=0.5, rng=random.Random(0), templates=TEMPLATES)
    # Games that pay: N_divider = 2, N_taker = 1, N = 3: weights 3/4 and 3/2. Shares of two messages: 1/3 and 2/3.
    assert [row["role"] for row in rows] == ["divider", "taker", "divider", "taker", "divider"]
    assert [row["reward"] for row in rows] == pytest.approx([0.4 / 3, 0.6 / 3, 0.8 / 3, 1.2 / 3, 1.0])
    assert [row["weight"] for row in rows] == [0.75, 1.5, 0.75, 1.5, 0.75]


SHORT = {"max_turns": 2, "max_length": 1600, "max_new_tokens": 4, "logging_steps": 0}


@pytest.mark.parametrize("name", CLASSES)
def test_models_play_a_game_and_meet_in_it_and_the_report_shows_it(name, tiny_model, other_model, tmp_path):
    words, game, played = tmp_path / "words.txt", {"game": name}, load_game(name)
    words.write_text(f"{played.example_task}\n" * 2)
    how = game | SHORT | {"model_prefix": "m", "prompt_templates": None}
    call(play_llm_game.main, *play_flags(tmp_path, tiny_model, tmp_path, **how))
    games = read_json_or_jsonl(tmp_path / "m_sampling_words_results.json")
    assert [episode["target_word"] for episode in games] == [played.example_task] * 2
    assert [episode.get("game", "taboo") for episode in games] == [name] * 2
    for episode in games:
        history = episode["history"]
        turns = [played.next_role(played.example_task, history[:index]) for index in range(len(history))]
        assert [message["role"] for message in history] == turns != []
    call(report.main, tmp_path, *flags_of(game))
    assert played.title in (tmp_path / "report.html").read_text()
    flags = {"players": [f"a={tiny_model}", f"b={other_model}"], "games_per_word": 1, "words": words}
    call(evaluate_games.main, *flags_of(game | flags | {"output_dir": tmp_path / "match"} | SHORT))
    rows = json.loads((tmp_path / "match" / "matches.json").read_text())["results"]
    points = {row["player"]: row["points"] for row in rows if row["role"] == "both"}
    win_together = any(outcome.points for outcome in played.outcomes)
    assert points["a"] == pytest.approx(points["b"] if win_together else 1 - points["b"])


def test_a_game_that_both_win_gives_rows_of_both():
    shared = {"game": "twenty_questions", "target_word": "apple", "max_turns": 3}
    found = shared | {"history": messages(QUESTIONS, "Is it round?", "Yes.", "Is it `apple`?")}
    episodes = [found, shared | {"history": messages(QUESTIONS, "Is it red?", "No.")}]
    rows = assign_rewards(episodes, game=QUESTIONS, rng=random.Random(0))
    assert [row["role"] for row in rows] == ["guesser", "answerer", "guesser"]
    assert [row["reward"] for row in rows] == pytest.approx([0.8 / 1.8, 1.0, 1 / 1.8])


def test_a_tie_costs_both_roles_unless_the_game_pays_or_one_of_them_broke_its_rules():
    shared = {"game": "twenty_questions", "target_word": "apple", "max_turns": 3}
    found = ("Is it round?", "Yes.", "Is it `apple`?")
    broken = ("Is it red?", "Perhaps.")
    tied = ("Is it red?", "No.")
    episodes = [shared | {"history": messages(QUESTIONS, *texts)} for texts in (found, broken, tied)]
    rows = assign_rewards(episodes, game=QUESTIONS, decay_weight=1.0, ties=0.25, rng=random.Random(0))
    assert [row["reward"] for row in rows] == [0.5, 1.0, 0.5, -0.25, -0.25]
