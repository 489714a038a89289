"""The programs that are killed and refused: small inputs, and flags of quick runs with deterministic results."""

import random
from pathlib import Path

from helpers import write_place
from scripted import messages

from tools.common.files import write_json, write_records
from tools.games import load_game

BATCH = "per_device_train_batch_size"


def write_inputs(folder: Path, games: int) -> Path:
    """Write words, prompts, rows, and so many games; return the folder."""
    rng, rows = random.Random(0), []
    for index in range(192):
        row = {"query": "ask " * rng.randint(2, 12), "target": "say " * rng.randint(1, 6), "weight": 1.0}
        of_game = {"reward": rng.random(), "role": ("attacker", "defender")[index % 2]}
        rows.append(row | (of_game if rng.random() < 0.7 else {"type": "sft"}))
    write_json(folder / "rows.json", rows)
    won = messages(load_game(), "Hm.", "I know the word! It is `art`!")
    write_records(folder / "games.jsonl", [{"target_word": "art", "max_turns": 5, "history": won}] * games)
    return write_place(folder, [f"word{number}" for number in range(24)])


def program_flags(folder: Path, model: str, other: str) -> dict[str, dict]:
    """The flags of each program but for its output. Decoding is greedy."""
    playing = {"max_turns": 2, "max_length": 160, "max_new_tokens": 8, "per_device_eval_batch_size": 2, "top_k": 1}
    playing |= {"logging_steps": 0, "prompt_templates": folder / "prompts.json"}
    play = {"attacker_model_name_or_path": model, "defender_model_name_or_path": model}
    play |= {"data_path": folder / "words.txt", "model_prefix": "m", "data_suffix": "w"}
    match = {"players": [f"a={model}", f"b={other}"], "words": folder / "words.txt", "games_per_word": 1}
    training = {"train_method": "OfflinePO", "model_name_or_path": model, "ref_model_name_or_path": other}
    training |= {"train_data_path": folder / "rows.json", "max_length": 128, "learning_rate": 1e-3}
    training |= {"adam_epsilon": 1e-5, "num_train_epochs": 1, BATCH: 8, "loss_normalization": "step"}
    training |= {"logging_steps": 1, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    training |= {"report_to": "none", "disable_tqdm": True}
    rewards = {"input_data_path": folder / "games.jsonl"}
    return {"play": playing | play, "matches": playing | match, "training": training, "rewards": rewards}
