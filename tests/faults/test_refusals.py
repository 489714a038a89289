"""Programs refuse wrong flags, inputs and settings in one line that names them, and then write nothing."""

import filelock
import pytest
from helpers import call, contents, flags_of
from programs import program_flags, write_inputs

import train
from tools import assign_rewards, evaluate_games, play_llm_game

# Program, what is changed in a command that works, and what the message must name. Inputs are in the current folder.
WRONG = [
    ("rewards", {"input_data_path": "broken.jsonl"}, "broken.jsonl:2"),
    ("play", {"data_path": "empty.txt"}, "empty.txt: no words"),
    ("play", {"attacker_model_name_or_path": "."}, "config.json"),
    ("play", {"attacker_model_name_or_path": "./missing/model"}, "./missing/model: no such folder"),
    ("play", {"model_prefix": "Qwen/Qwen3-4B"}, "--model_prefix: 'Qwen/Qwen3-4B' is a path"),
    ("play", {"data_suffix": ".."}, "--data_suffix: '..' is a path"),
    ("training", {"train_data_path": "games.jsonl"}, "games.jsonl"),
    ("training", {"lerning_rate": 1e-5}, "--lerning_rate"),
]

# Program, a changed setting of a finished run, and what the message must name.
OTHER = [
    ("rewards", {"decay_weight": 0.5}, "decay_weight"),
    ("play", {"max_new_tokens": 3}, "max_new_tokens"),
    ("matches", {"games_per_word": 2}, "games_per_word"),
    ("training", {"learning_rate": 1e-4}, "learning_rate"),
]


PROGRAMS = {
    "rewards": (assign_rewards.main, {"output_data_path": "out/rows.json"}),
    "play": (play_llm_game.main, {"output_dir": "out", "max_games": 1}),
    "matches": (evaluate_games.main, {"output_dir": "out", "max_words": 1}),
    "training": (train.main, {"output_dir": "out", "max_steps": 1, "save_strategy": "no"}),
}


@pytest.fixture
def programs(tmp_path, monkeypatch, tiny_model, other_model) -> dict:
    """The programs by name, with flags for small inputs in the current folder, and the folder `out`."""
    monkeypatch.chdir(write_inputs(tmp_path, games=1))
    (tmp_path / "broken.jsonl").write_text((tmp_path / "games.jsonl").read_text() + "{half a li")
    (tmp_path / "empty.txt").write_text("\n \n")
    flags = program_flags(tmp_path, tiny_model, other_model)
    return {name: (main, flags[name] | short) for name, (main, short) in PROGRAMS.items()}


def refused(program: tuple, named: str, **changes) -> bool:
    """Whether a program ends with status 2 and one line of error that names something."""
    main, flags = program
    ended = call(main, *flags_of(flags | changes), status=2)
    (line,) = [line for line in ended.errors.splitlines() if ": error: " in line]
    return named in line


@pytest.mark.parametrize("name, changes, named", WRONG, ids=str)
def test_wrong_flags_and_inputs_are_named_and_nothing_is_written(name, changes, named, programs, tmp_path):
    before = contents(tmp_path)
    assert refused(programs[name], named, **changes)
    assert {path: text for path, text in contents(tmp_path).items() if path.name[-13:] != "settings.json"} == before


@pytest.mark.parametrize("name, changes, named", OTHER, ids=str)
def test_a_finished_run_is_left_and_other_settings_and_second_starts_are_refused(
    name, changes, named, programs, tmp_path
):
    main, flags = program = programs[name]
    call(main, *flags_of(flags))
    before = contents(tmp_path)
    call(main, *flags_of(flags))
    assert refused(program, named, **changes)
    (lock,) = (tmp_path / "out").glob(".*.lock")
    with filelock.FileLock(lock):  # as another start holds it
        assert refused(program, "another launch is running")
    assert contents(tmp_path) == before
