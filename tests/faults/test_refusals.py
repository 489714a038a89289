"""Programs refuse wrong flags, inputs and settings in one line that names them, and then write nothing."""

import filelock
import pytest
from programs import programs

# Program, what is changed in a command that works, and what the message must name. "IN/" is the folder of inputs.
WRONG = [
    ("assign_rewards", {"decay": 1}, "--decay"),
    ("assign_rewards", {"input_data_path": "IN/broken.jsonl"}, "broken.jsonl:2"),
    ("assign_rewards", {"sft_data_path": "IN/games.jsonl"}, "games.jsonl"),
    ("assign_rewards", {"game": "twenty_questions", "prompt_templates": None}, "taboo"),
    ("play", {"temperature": 0}, "--task_type testing"),
    ("play", {"max_game": 3}, "--max_game"),
    ("play", {"data_path": "IN/none.txt"}, "none.txt"),
    ("play", {"data_path": "IN/empty.txt"}, "empty.txt: no words"),
    ("play", {"attacker_model_name_or_path": "IN/"}, "config.json"),
    ("play", {"attacker_model_name_or_path": "./missing/model"}, "./missing/model: no such folder"),
    ("matches", {"against": "b"}, "--against b is none of the --players a"),
    ("train", {"train_data_path": "IN/games.jsonl"}, "games.jsonl"),
    ("train", {"train_method": "OfflinePO"}, "ref_model_name_or_path"),
    ("train", {"clip_range": 0.2}, "clip_range"),
    ("train", {"lerning_rate": 1e-5}, "--lerning_rate"),
]

# Program, a changed setting of a finished run, and what the message must name.
OTHER = [
    ("assign_rewards", {"decay_weight": 0.5}, "decay_weight"),
    ("play", {"attacker_model_name_or_path": "IN/other"}, "attacker_model_name_or_path"),
    ("matches", {"players": "a=IN/other"}, "player a: "),
    ("train", {"learning_rate": 1e-4}, "learning_rate"),
]


def placed(changes: dict, inputs) -> dict:
    def place(value):
        return value.replace("IN/", f"{inputs}/") if isinstance(value, str) else value

    return {
        name: list(map(place, value)) if isinstance(value, list) else place(value) for name, value in changes.items()
    }


def contents(folder) -> dict:
    """The contents of a folder's files, without the empty lock files."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


@pytest.mark.parametrize("name, changes, named", WRONG, ids=lambda value: str(value))
def test_wrong_flags_and_inputs_are_named(name, changes, named, inputs, tmp_path):
    before = contents(inputs)
    ended = programs(inputs, tmp_path / "out")[name].run(**placed(changes, inputs))
    assert ended.status == 2 and named in ended.errors.splitlines()[-1], ended.errors
    # A record without results does not count.
    assert all(path.name.endswith("settings.json") for path in contents(tmp_path)) and contents(inputs) == before


@pytest.mark.parametrize("name, changes, named", OTHER, ids=lambda value: str(value))
def test_a_finished_run_is_left_as_it_is_and_other_settings_and_second_starts_are_refused(
    name, changes, named, inputs, tmp_path
):
    program = programs(inputs, tmp_path / "out")[name]
    assert program.run().status == 0
    before = contents(tmp_path)
    assert program.run().status == 0 and contents(tmp_path) == before
    ended = program.run(**placed(changes, inputs))
    assert ended.status == 2 and named in ended.errors and contents(tmp_path) == before, ended.errors
    (lock,) = (tmp_path / "out").glob(".*.lock")
    with filelock.FileLock(lock):  # as another start holds it
        refused = program.run()
    assert refused.status == 2 and "another launch is at work" in refused.errors and contents(tmp_path) == before
