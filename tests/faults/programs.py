"""The programs in this process, on small files of every kind that they read."""

import contextlib
import io
import json
import random
import shutil
import signal
import sys
from pathlib import Path

from test_report import make_output

import utils
from tools import assign_rewards, evaluate_games, play_llm_game, prepare_data, report, tiny_world
from tools.games import load_game
from utils import run_program

GAME = load_game()
WORDS = [f"word{number}" for number in range(8)]
SECONDS = 60  # of a program


def episode(index: int, rng: random.Random) -> dict:
    history = [{"role": role, "content": rng.choice(["Hm.", "Nö \u2028", "word"])} for role in GAME.roles]
    replies = [{"finish_reason": "stop", "tokens": 3, "prompt_cut": False}] * 2
    shown = {"index": index, "target_word": WORDS[index], "max_turns": 2, "history": history}
    return shown | {"outcome": "tied game", "length": 2, "replies": replies}


def release() -> None:
    """Give up all locks of this process, as its end would."""
    for path in list(utils._locks):
        utils.unlock(path)


def call(main, *words, left: int = 0) -> tuple[int, str]:
    """Run a program in this process; its status, which may be `left` too, and errors. Else only one line is taken."""
    errors, argv = io.StringIO(), sys.argv
    sys.argv = [main.__module__, *map(str, words)]
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            run_program(main)
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    finally:
        signal.alarm(0)
        sys.argv = argv
        release()
    said = [line for line in errors.getvalue().splitlines() if ": error: " in line]
    assert "Traceback" not in errors.getvalue()
    assert status in (0, left) or (status == 2 and len(said) == 1), (status, errors.getvalue()[-2000:])
    return status, errors.getvalue()


def hang(*_):
    raise TimeoutError(f"the program did not end within {SECONDS} s")


class Inputs:
    """Files that programs read, in a folder of their own, and the programs that read each of them."""

    def __init__(self, folder: Path, model: str, other_model: str):
        self.folder = folder
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
        files = {"games.json": games, "rows.json": rows, "alpaca.json": alpaca, "prompts.json": rules}
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1))
        (folder / "games.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))
        (folder / "words.txt").write_text("\n".join(WORDS))
        make_output(folder / "loop", epochs=2, games=24, steps=5)
        shutil.copytree(model, folder / "model")
        deepspeed = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
        (folder / "deepspeed.json").write_text(json.dumps(deepspeed))

    def programs(self, output: Path) -> dict[str, tuple]:
        """By name: the program's main, the files that it reads, its flags."""
        folder = self.folder
        words, model = folder / "words.txt", folder / "model"
        play = {"data_path": words, "output_dir": output, "prompt_templates": folder / "prompts.json"}
        play |= {
            "max_games": 1,
            "max_turns": 1,
            "max_new_tokens": 2,
            "max_length": 128,
            "per_device_eval_batch_size": 1,
        }
        models = {f"{role}_model_name_or_path": model for role in ("attacker", "defender")}
        names = {"model_prefix": "m", "data_suffix": "w"}
        match = {name: value for name, value in play.items() if name not in ("data_path", "max_games")}
        match |= {
            "players": f"a={folder / 'model'}",
            "words": folder / "words.txt",
            "max_words": 1,
            "games_per_word": 1,
        }
        rows = {"input_data_path": folder / "games.jsonl", "output_data_path": output / "rows.json"}
        rows |= {"prompt_templates": folder / "prompts.json", "sft_data_path": folder / "alpaca.json"}
        imitation = {"episodes": folder / "games.json", "output": output / "rows.json"}
        alpaca = {"input": folder / "alpaca.json", "output": output / "rows.json"}
        split = {"input": words, "output": output / "a.txt", "held_out": output / "b.txt", "number": 2}
        page = {"episodes": [folder / "games.json", folder / "games.jsonl"], "output": output / "report.html"}
        train = {"model_name_or_path": model, "train_data_path": folder / "rows.json", "output_dir": output}
        train |= {"train_method": "SFT", "max_length": 64, "max_steps": 1, "per_device_train_batch_size": 8}
        train |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "cache_dir": output / "cache"}
        parts = ["model/config.json", "model/tokenizer.json", "model/tokenizer_config.json", "model/model.safetensors"]
        texts = ["words.txt", "prompts.json"]
        loop = [str(path.relative_to(folder)) for path in sorted((folder / "loop").rglob("*.json*"))]
        return {
            "assign_rewards": (assign_rewards.main, ["games.jsonl", "alpaca.json", "prompts.json"], [], rows),
            "imitation": (prepare_data.main, ["games.json"], ["imitation"], imitation),
            "alpaca": (prepare_data.main, ["alpaca.json"], ["alpaca"], alpaca),
            "split": (prepare_data.main, ["words.txt"], ["split"], split),
            "report": (report.main, ["games.json", "games.jsonl"], [], page),
            "report of a loop": (report.main, loop, [folder / "loop"], {"output": output / "report.html"}),
            "show": (tiny_world.main, loop, ["show"], {"output_dir": folder / "loop"}),
            "play_llm_game": (play_llm_game.main, [*texts, *parts], [], play | models | names),
            "evaluate_games": (evaluate_games.main, [*texts, *parts], [], match),
            "train": (train_main, ["rows.json", *parts], [], train),
        }


def train_main() -> None:
    import train

    if trainer := train.set_up(sys.argv[1:]):
        train.run(trainer)
