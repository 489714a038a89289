"""Programs refuse wrong flags, inputs and settings in one line that names them, before they write anything."""

import shutil

import pytest
from programs import programs

# Program, what is changed in a command that works, and what the message must name. "IN/" is the folder of inputs.
WRONG = [
    ("assign_rewards", {"decay_weight": 0}, "decay_weight"),
    ("assign_rewards", {"decay": 1}, "--decay_weight"),
    ("assign_rewards", {"input_data_path": "IN/none.json"}, "none.json"),
    ("assign_rewards", {"input_data_path": "IN/words.txt"}, "words.txt:1"),
    ("assign_rewards", {"output_data_path": "IN/games.jsonl"}, "games.jsonl"),
    ("assign_rewards", {"sft_data_path": "IN/prompts.json"}, "prompts.json"),
    ("assign_rewards", {"prompt_templates": "IN/games.json"}, "games.json"),
    ("assign_rewards", {"min_game_rows": 100}, "--min_game_rows"),
    ("assign_rewards", {"game": "chess"}, "chess"),
    ("assign_rewards", {"game": "twenty_questions", "prompt_templates": None}, "taboo"),
    ("split", {"number": 0}, "--number"),
    ("split", {"number": 8}, "--number 8: must be between 1 and 7"),
    ("split", {"output": "IN/words.txt"}, "words.txt: would be written over"),
    ("split", {"output": "IN/b.txt", "held_out": "IN/b.txt"}, "b.txt: would be written over"),
    ("split", {"output": "IN/words.txt"}, "words.txt"),
    ("report", {"game": "chess"}, "chess"),
    ("report", {"game": "twenty_questions"}, "taboo"),
    ("play", {"max_turns": 0}, "--max_turns"),
    ("play", {"max_length": 2}, "--max_length"),
    ("play", {"temperature": 0, "top_p": 1.5}, "--temperature is 0.0; "),
    ("play", {"temperature": 0, "top_p": 1.5}, "; --top_p is 1.5"),  # all at once
    ("play", {"max_games": 0, "concurrent_games": 0}, "--max_games is 0; "),
    ("play", {"min_new_tokens": 5}, "--min_new_tokens 5 is above --max_new_tokens 2"),
    ("play", {"bf16": True, "fp16": True}, "--bf16 and --fp16 exclude each other"),
    ("play", {"bf16": "perhaps"}, "expected True or False, got 'perhaps'"),
    ("play", {"max_game": 3}, "unknown flag --max_game; did you mean --max_games?"),
    ("play", {"data_path": "IN/none.txt"}, "none.txt"),
    ("play", {"attacker_model_name_or_path": "IN/"}, "config.json"),
    ("play", {"attacker_model_name_or_path": "./missing/model"}, "./missing/model: no such folder"),
    ("play", {"prompt_templates": "IN/rows.json"}, "rows.json"),
    ("play", {"model_prefix": "a/b"}, "--model_prefix"),
    ("play", {"game": "nim.py:Nim"}, "nim.py"),
    ("play", {"game_options": "match=letter"}, "letter"),
    ("play", {"engine": "slots", "tensor_parallel_size": 2, "vllm_args": "x"}, "--tensor_parallel_size, --vllm_args"),
    ("play", {"engine": "vllm", "tensor_parallel_size": 0}, "--tensor_parallel_size is 0"),
    ("play", {"engine": "vllm", "vllm_args": "a 'b"}, "--vllm_args"),
    ("play", {"engine": "vllm", "device_map": "auto"}, "--device_map"),
    ("matches", {"players": "IN/model"}, "NAME=MODEL"),
    ("matches", {"players": ["a=IN/model", "a=IN/other"]}, "--players"),
    ("matches", {"players": "a=./missing"}, "./missing: no such folder"),
    ("matches", {"against": "b"}, "--against"),
    ("matches", {"words": "IN/none.txt"}, "none.txt"),
    ("matches", {"words": "all=words.txt"}, "--words names a list 'all'"),
    ("matches", {"words": ["a.txt", "b/a.txt"]}, "--words names a twice"),
    ("matches", {"seeds": [1, 1]}, "--seeds names 1 twice"),
    ("matches", {"seeds": [0, 1], "task_type": "testing"}, "--task_type testing"),
    ("matches", {"games_per_word": 0}, "--games_per_word"),
    ("train", {"model_name_or_path": "IN/none"}, "none"),
    ("train", {"train_data_path": "IN/games.jsonl"}, "games.jsonl"),
    ("train", {"train_method": "PPO"}, "PPO"),
    ("train", {"train_method": "OfflinePO"}, "ref_model_name_or_path"),
    ("train", {"clip_range": 0.2}, "clip_range"),
    ("train", {"lerning_rate": 1e-5}, "learning_rate"),
]

# Program, a changed setting of a finished run, and what the message must name.
OTHER = [
    ("assign_rewards", {"decay_weight": 0.5}, "decay_weight"),
    ("assign_rewards", {"input_data_path": "IN/games.json"}, "games.json"),
    ("play", {"seed": 7}, "seed"),
    ("play", {"attacker_model_name_or_path": "IN/other"}, "attacker_model_name_or_path"),
    ("play", {"prompt_templates": None}, "prompt_templates"),
    ("matches", {"max_new_tokens": 3}, "max_new_tokens"),
    ("matches", {"players": "b=IN/model"}, "players"),
    ("matches", {"players": "a=IN/other"}, "player a: "),
    ("train", {"learning_rate": 1e-4}, "learning_rate"),
    ("train", {"train_method": "SFTwithKL", "ref_model_name_or_path": "IN/other"}, "train_method"),
    ("train", {"model_name_or_path": "IN/other"}, "model_name_or_path"),
]


def placed(changes: dict, inputs) -> dict:
    def place(value):
        return value.replace("IN/", f"{inputs}/") if isinstance(value, str) else value

    return {
        name: list(map(place, value)) if isinstance(value, list) else place(value) for name, value in changes.items()
    }


def contents(folder) -> dict:
    """Return the contents of a folder's files, without the empty lock files."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


@pytest.mark.parametrize("name, changes, named", WRONG, ids=lambda value: str(value))
def test_wrong_flags_and_inputs_are_named(name, changes, named, inputs, tmp_path):
    before = contents(inputs)
    ended = programs(inputs, tmp_path / "out")[name].run(**placed(changes, inputs))
    assert ended.status == 2 and named in ended.errors.splitlines()[-1], ended.errors
    # A record without results does not count.
    assert all(path.name.endswith("settings.json") for path in contents(tmp_path)) and contents(inputs) == before


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """The output of a finished run of each program."""
    folder = tmp_path_factory.mktemp("finished")
    for name in {name for name, *_ in OTHER}:
        assert programs(inputs, folder / name)[name].run().status == 0
    return folder


@pytest.mark.parametrize("name, changes, named", OTHER, ids=lambda value: str(value))
def test_other_settings_are_named_and_nothing_is_written(name, changes, named, finished, inputs, tmp_path):
    output = tmp_path / name
    shutil.copytree(finished / name, output)
    before = contents(output)
    ended = programs(inputs, output)[name].run(**placed(changes, inputs))
    assert ended.status == 2 and named in ended.errors and contents(output) == before, ended.errors


@pytest.mark.parametrize("name", sorted({name for name, *_ in OTHER}))
def test_the_same_command_leaves_a_finished_run_as_it_is(name, finished, inputs, tmp_path):
    output = tmp_path / name
    shutil.copytree(finished / name, output)
    before = contents(output)
    assert programs(inputs, output)[name].run().status == 0 and contents(output) == before
