"""Every game but Taboo through every program: play, the report, a match, rewards, training, a person."""

import asyncio
import json
from typing import NamedTuple

import pytest
from helpers import call, flags_of
from scripted import ScriptedPlayer

import train
from arguments import parse_arguments
from tools import assign_rewards, evaluate_games, play_llm_game, report
from tools.games import load_game
from tools.games.game import Game
from tools.players.human import HumanPlayer
from tools.selfplay.play import play_games
from utils import read_json_or_jsonl, write_records


class Case(NamedTuple):
    """A game, two of its tasks, what the roles say in a game of each, and how these games end."""

    game: Game
    tasks: list[str]
    messages: tuple[list[list[str]], list[list[str]]]
    outcomes: list[str]
    rewards: list[float]  # of the rows, all of the first game


CASES = [
    Case(
        load_game("twenty_questions"),
        ["apple", "lamp"],
        ([["Is it round?", "Is it `apple`?"], ["Is it red?", "Is it `sun`?", "Is it big?"]], [["Yes."], ["No."] * 3]),
        ["found", "not found"],
        [0.8 / 1.8, 1.0, 1 / 1.8],
    ),
    Case(
        load_game("guess_my_city"),
        ["Lyon, France, Europe", "Cusco, Peru, South America"],
        (
            [["What is it known for?", "Are you from `Lyon`?"], ["Is it high up?"] * 3],
            [["Silk, and two rivers."], ["Yes.", "Above the clouds.", "It is."]],
        ),
        ["found", "not found"],
        [0.8 / 1.8, 1.0, 1 / 1.8],
    ),
    Case(
        load_game("bargain"),
        ["book:2:4/1 hat:1:2/8", "ball:1:1/1"],
        (
            [["[I keep: 2 book, 1 hat]", "[I keep: 2 book]"], ["[I keep: 1 ball]"] * 3],
            [["[I keep: 1 hat, 1 book]", "Well, [accept]"], ["No.", "No.", "No!"]],
        ),
        ["deal", "no deal"],  # the first gets 8 of 10, the second 8 of 10
        [0.8 * 0.8 / 1.8, 0.8 * 0.8 / 1.8, 0.8 / 1.8, 0.8 / 1.8],
    ),
]


@pytest.fixture(params=CASES, ids=lambda case: case.game.name)
def case(request):
    return request.param


@pytest.fixture
def run(case):
    """Call a program's main with the game and these flags."""
    return lambda program, **flags: call(program.main, *flags_of({"game": case.game.name} | flags))


@pytest.fixture
def words(tmp_path, case):
    path = tmp_path / "words.txt"
    path.write_text("".join(f"{task}\n" for task in case.tasks))
    return path


SHORT = {"max_turns": 2, "max_length": 1600, "max_new_tokens": 4, "logging_steps": 0}


def play(game, tasks, players):
    """The episodes of these players."""
    episodes = []
    games = play_games(game, enumerate(tasks), players, max_turns=3, concurrent_games=1, on_episode=episodes.append)
    asyncio.run(games)
    return episodes


def test_a_model_plays_and_its_games_are_judged_and_reported(run, case, words, tiny_model, tmp_path):
    models = dict.fromkeys(("attacker_model_name_or_path", "defender_model_name_or_path"), tiny_model)
    place = {"data_path": words, "output_dir": tmp_path, "model_prefix": "m", "data_suffix": "w"}
    run(play_llm_game, **models, **place, **SHORT)
    games = read_json_or_jsonl(tmp_path / "m_sampling_w_results.json")
    assert [(game["game"], game["target_word"]) for game in games] == [(case.game.name, task) for task in case.tasks]
    assert {message["role"] for game in games for message in game["history"]} == set(case.game.roles)
    summary = json.loads((tmp_path / "m_sampling_w_summary.json").read_text())
    assert list(summary["outcomes"]) == [outcome.name for outcome in case.game.outcomes]
    call(report.main, tmp_path, "--game", case.game.name)
    assert case.game.title in (tmp_path / "report.html").read_text()


def test_two_models_meet_and_graded_points_are_their_mean(run, case, words, tiny_model, other_model, tmp_path):
    players = [f"a={tiny_model}", f"b={other_model}"]
    run(evaluate_games, players=players, games_per_word=1, words=words, output_dir=tmp_path / "match", **SHORT)
    rows = json.loads((tmp_path / "match" / "matches.json").read_text())["results"]
    pooled = {(row["player"], row["role"]): row for row in rows if row["seed"] is None}
    assert {role for _, role in pooled} == {*case.game.roles, "both"}
    assert pooled["a", "both"]["games"] == 4 and pooled["a", "both"]["points"] == pooled["b", "both"]["points"]


def test_games_that_pay_become_rows_and_a_step_learns_from_them(run, case, tiny_model, other_model, tmp_path):
    players = {role: ScriptedPlayer(said) for role, said in zip(case.game.roles, case.messages, strict=True)}
    episodes = play(case.game, case.tasks, players)
    assert [episode["outcome"] for episode in episodes] == case.outcomes
    write_records(tmp_path / "games.json", episodes)
    run(assign_rewards, input_data_path=tmp_path / "games.json", output_data_path=tmp_path / "rows.json")
    rows = read_json_or_jsonl(tmp_path / "rows.json")
    assert [row["role"] for row in rows] == [message["role"] for message in episodes[0]["history"]]
    assert [row["reward"] for row in rows] == pytest.approx(case.rewards)
    settings = {"train_method": "OfflinePO", "model_name_or_path": tiny_model, "ref_model_name_or_path": other_model}
    settings |= {"train_data_path": tmp_path / "rows.json", "output_dir": tmp_path / "out", "max_steps": 1}
    settings |= {"per_device_train_batch_size": len(rows), "logging_steps": 1, "save_strategy": "no"}
    trainer = train.set_up(parse_arguments(flags_of(settings)))
    train.run(trainer)
    (step,) = [entry for entry in trainer.state.log_history if "policy_loss" in entry]
    assert "reward_attacker" not in step
    for role in case.game.roles:
        rewards = [row["reward"] for row in rows if row["role"] == role]
        assert step[f"reward_{role}"] == pytest.approx(sum(rewards) / len(rewards))


def test_a_person_is_told_the_secret_and_why_the_game_has_ended(case, monkeypatch, capsys):
    first, second = case.game.roles
    person, lines = HumanPlayer(case.game), iter(case.messages[1][0])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    (episode,) = play(case.game, case.tasks[:1], {first: ScriptedPlayer(case.messages[0]), second: person})
    person.game_over(episode)
    shown = capsys.readouterr().out
    why = case.game.explain(episode["target_word"], episode["history"], episode["outcome"])
    for text in (f"you are the {second}", case.game.hint(second), f"--- {case.outcomes[0]} (", why):
        assert text in shown
    assert all(secret in shown for secret in case.game.secrets(second, case.tasks[0], ()).values())
