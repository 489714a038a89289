"""The programs, with small inputs for each: run in this process, or as commands for a new one."""

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from helpers import Called, call, flags_of

import train
from tools import assign_rewards, evaluate_games, play_llm_game, prepare_data, report, tiny_world
from tools.games import load_game

GAME = load_game()
WORDS = [f"word{number}" for number in range(8)]
SECONDS = 60  # that a program of a test may take


class Program(NamedTuple):
    """A program with its flags for one output folder."""

    main: Callable[[], object]
    reads: list[str]  # its input files, below the folder of inputs
    result: str  # the file that is there when it has ended, below the output folder
    flags: dict
    command: tuple = ()  # words before the flags

    def words(self, **changes) -> list[str]:
        """Its command line, with some flags changed."""
        return [*map(str, self.command), *flags_of(self.flags | changes)]

    def run(self, **changes) -> Called:
        """Run it in this process. It must end with success, or with status 2 and one line that starts with "error"."""
        signal.signal(signal.SIGALRM, _hang)
        signal.alarm(SECONDS)
        try:
            called = call(self.main, *self.words(**changes), status=None)
        finally:
            signal.alarm(0)
        errors = [line for line in called.errors.splitlines() if ": error: " in line]
        assert called.status == 0 or called.status == 2 and len(errors) == 1, (called.status, called.errors[-2000:])
        return called


def _hang(*_):
    raise TimeoutError(f"the program did not end within {SECONDS} s")


def episode(index: int, rng: random.Random) -> dict:
    """A tied game of two messages."""
    history = [{"role": role, "content": rng.choice(["Hm.", "Nö \u2028", "word"])} for role in GAME.roles]
    replies = [{"finish_reason": "stop", "tokens": 3, "prompt_cut": False}] * 2
    shown = {"index": index, "target_word": WORDS[index], "max_turns": 2, "history": history}
    return shown | {"outcome": "tied game", "length": 2, "replies": replies}


def write_inputs(folder: Path, model: str, other_model: str) -> Path:
    """Write what the programs read into a folder, and return it."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    won = [
        {"role": "attacker", "content": "Hm."},
        {"role": "defender", "content": "I know the word! It is `word1`!"},
    ]
    games = [episode(index, rng) for index in range(6)] + [episode(1, rng) | {"history": won}]
    rows = [{"query": "q", "target": f"t{n}", "reward": 0.5, "weight": 1.0, "role": "attacker"} for n in range(8)]
    alpaca = [{"instruction": "Name a bird.", "input": "", "output": "The heron."}] * 2
    rules = {"rules": ["One.\n", "{max_turns} turns.\n"]}
    rules |= {"attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."}
    for name, content in {"games": games, "rows": rows, "alpaca": alpaca, "prompts": rules}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    (folder / "games.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))
    (folder / "words.txt").write_text("\n".join(WORDS))
    (folder / "held_out.txt").write_text("\n".join(WORDS[:2]))
    shutil.copytree(model, folder / "model")
    shutil.copytree(other_model, folder / "other")
    return folder


MODEL = [f"model/{name}" for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")]
EPOCH = "loop/epoch1"
LOOP = [f"{EPOCH}/eval/{name}" for name in ("games_results.json", "matches.json")]


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
    split = {"input": inputs / "words.txt", "output": output / "a.txt", "held_out": output / "b.txt", "number": 2}
    page = {"output": output / "report.html"}
    games = [LOOP[0], f"{EPOCH}/episodes/m_sampling_w_results.json"]
    training = {"model_name_or_path": model, "train_data_path": inputs / "rows.json", "output_dir": output}
    training |= {"train_method": "SFT", "max_length": 64, "max_steps": 1, "per_device_train_batch_size": 8}
    training |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    texts = ["words.txt", "prompts.json"]
    read = ["games.jsonl", "alpaca.json", "prompts.json"]
    stem = "m_sampling_w_results.json"
    return {
        "assign_rewards": Program(assign_rewards.main, read, "rows.json", rows),
        "split": Program(prepare_data.main, ["words.txt"], "a.txt", split, ("split",)),
        "report": Program(report.main, games, "report.html", page, (inputs / "loop",)),
        "play": Program(play_llm_game.main, [*texts, *MODEL], stem, play | self_play),
        "matches": Program(evaluate_games.main, [*texts, *MODEL], "games_results.json", play | match),
        "train": Program(train.main, ["rows.json", *MODEL], "model.safetensors", training),
        "show": Program(tiny_world.main, LOOP, "", {"output_dir": inputs / "loop"}, ("show",)),
    }


def build_loop(inputs: Path) -> None:
    """Write what an epoch of the loop leaves, by the programs that the loop runs."""
    epoch = inputs / EPOCH
    assert programs(inputs, epoch / "episodes")["play"].run(max_games=8).status == 0
    assert programs(inputs, epoch / "model")["train"].run(logging_steps=1).status == 0
    words = [f"played={inputs / 'words.txt'}", f"held_out={inputs / 'held_out.txt'}"]
    players = [f"epoch1={inputs / 'model'}", f"imitation={inputs / 'other'}"]
    match = {"players": players, "words": words, "max_words": 2, "against": "imitation"}
    assert programs(inputs, epoch / "eval")["matches"].run(**match).status == 0
    (inputs / "loop" / "settings.json").write_text(json.dumps({"EPOCHS": "1"}))
