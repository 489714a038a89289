"""The programs, with small inputs for each, to be run in this process."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from helpers import Called, call, flags_of

import train
from tools import assign_rewards, evaluate_games, play_llm_game


class Program(NamedTuple):
    """A program with its flags for one output folder."""

    main: Callable[[], object]
    flags: dict

    def run(self, **changes) -> Called:
        """Run it with some flags changed. It must end with success, or with status 2 and one line of error."""
        called = call(self.main, *flags_of(self.flags | changes), status=None)
        errors = [line for line in called.errors.splitlines() if ": error: " in line]
        assert called.status == 0 or called.status == 2 and len(errors) == 1, (called.status, called.errors[-2000:])
        return called


def write_inputs(folder: Path, model: str, other_model: str) -> Path:
    """Write what the programs read into a folder, and return it."""
    folder.mkdir(parents=True)
    won = [
        {"role": "attacker", "content": "Hm. \u2028"},
        {"role": "defender", "content": "I know the word! It is `word1`!"},
    ]
    games = [{"target_word": "word1", "max_turns": 2, "history": won}] * 3
    rows = [{"query": "q", "target": f"t{n}", "reward": 0.5, "weight": 1.0, "role": "attacker"} for n in range(8)]
    alpaca = [{"instruction": "Name a bird.", "input": "", "output": "The heron."}] * 2
    rules = {"rules": ["One.\n", "{max_turns} turns.\n"]}
    rules |= {"attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."}
    for name, content in {"rows": rows, "alpaca": alpaca, "prompts": rules}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    (folder / "games.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))
    (folder / "broken.jsonl").write_text(json.dumps(games[0]) + "\n{half a li")
    (folder / "words.txt").write_text("\n".join(f"word{number}" for number in range(8)))
    (folder / "empty.txt").write_text("\n \n")
    shutil.copytree(model, folder / "model")
    shutil.copytree(other_model, folder / "other")
    return folder


def programs(inputs: Path, output: Path) -> dict[str, Program]:
    """The programs by name, for these inputs and an output folder."""
    model = inputs / "model"
    play = {"prompt_templates": inputs / "prompts.json", "output_dir": output, "max_turns": 1, "max_new_tokens": 2}
    play |= {"max_length": 128, "per_device_eval_batch_size": 1, "top_k": 1, "logging_steps": 0}
    self_play = {"attacker_model_name_or_path": model, "defender_model_name_or_path": model, "max_games": 1}
    self_play |= {"data_path": inputs / "words.txt", "model_prefix": "m", "data_suffix": "w"}
    match = {"players": f"a={model}", "words": inputs / "words.txt", "max_words": 1, "games_per_word": 1}
    rows = {"input_data_path": inputs / "games.jsonl", "output_data_path": output / "rows.json"}
    rows |= {"prompt_templates": inputs / "prompts.json", "sft_data_path": inputs / "alpaca.json"}
    training = {"model_name_or_path": model, "train_data_path": inputs / "rows.json", "output_dir": output}
    training |= {"train_method": "SFT", "max_length": 64, "max_steps": 1, "per_device_train_batch_size": 8}
    training |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return {
        "assign_rewards": Program(assign_rewards.main, rows),
        "play": Program(play_llm_game.main, play | self_play),
        "matches": Program(evaluate_games.main, play | match),
        "train": Program(train.main, training),
    }
