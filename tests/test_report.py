"""The report: its numbers and its games, from whole and from partial folders, and the page in a real browser."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT

from tools import report, report_games, taboo
from tools.report_games import GameTally, marked
from utils import write_json, write_records

# --- a folder as the loop leaves it --------------------------------------------------------------------------------

CLUES = {
    "violin": ["It has four strings.", "An orchestra has many of them.", "A bow goes over it."],
    "harbour": ["Ships come home to it.", "It smells of fish and tar.", "A lighthouse shows the way."],
    "start": ["It comes before the rest.", "Runners wait for it.", "Every journey has one."],
    "lemon": ["It is yellow and sour.", "Sailors ate it against scurvy.", "Its juice goes on fish."],
}
QUESTIONS = ["Is it something you hold?", "Do I have one at home?", "Could a child use it?", "Is it old?"]


def make_game(index: int, rng: random.Random, skill: float, max_turns: int = 5) -> dict:
    """A game with clues and questions that ends in one of all ways; more `skill`, fewer breaches and empty replies."""
    word = rng.choice(sorted(CLUES))
    history, ending = [], rng.choices(taboo.OUTCOMES, weights=[0.3, 0.3 + 0.2 * skill, 0.25 * (1 - skill), 0.15])[0]
    last = 2 * max_turns if ending == taboo.TIED else 2 * rng.randint(1, max_turns)
    last -= ending == taboo.ATTACKER_BREAKS
    for place in range(last):
        role = taboo.ROLES[place % 2]
        text = rng.choice(CLUES[word] if role == taboo.ATTACKER else QUESTIONS)
        history.append({"role": role, "content": "" if rng.random() < 0.08 * (1 - skill) else text})
    other = rng.choice(sorted(set(CLUES) - {word}))
    endings = {
        taboo.ATTACKER_WINS: rng.choice([f"I know the word! It is `{other}`!", f"Do you mean a {word.upper()}?"]),
        taboo.DEFENDER_WINS: f"I know the word! It is `{word}`! That was easy.",
        taboo.ATTACKER_BREAKS: f"People love {word}s.",
    }
    if ending != taboo.TIED:
        history[-1]["content"] = endings[ending]
    outcome, length = taboo.judge(history, word, max_turns)
    replies = [{"finish_reason": rng.choice(["stop"] * 19 + ["length"]), "tokens": 9, "prompt_cut": False}] * last
    game = {"index": index, "target_word": word, "max_turns": max_turns, "history": history, "outcome": outcome}
    return game | {"length": length, "replies": replies}


def make_log(method: str, steps: int, rng: random.Random) -> dict:
    """A trainer_state.json with curves that fall."""
    entries = []
    for step in range(1, steps + 1):
        value = math.exp(-step / steps) + rng.gauss(0, 0.04)
        entry = {"step": step, "loss": value, "sft_loss": 1.2 * value, "log_ratio": 0.02 * step / steps}
        if method == "OfflinePO":
            entry |= {"policy_loss": -0.2 + 0.1 * value, "ratio": 1 + 0.02 * value, "clip_fraction": 0.01 * value}
            entry |= {"reward_attacker": 0.25 + rng.gauss(0, 0.02), "reward_defender": 0.3 + rng.gauss(0, 0.02)}
        else:
            entry["kl"] = 0.01 * value
        entries.append(entry)
    return {"log_history": [*entries, {"step": steps, "train_loss": 0.5}]}


def match_row(player: str, role: str, words: str, points: float, games: int = 480) -> dict:
    """A row of matches.json."""
    wins, ties = round((points - 0.05) * games), round(0.1 * games)
    losses = games - wins - ties
    counts = {"win": wins, "loss": losses, "tie": ties, "breach": games // 20}
    rates = {
        name: {"share": n / games, "interval": [n / games - 0.04, n / games + 0.04]} for name, n in counts.items()
    }
    row = {"player": player, "opponent": "imitation", "words": words, "role": role, "seed": None, "games": games}
    row |= {"wins": wins, "losses": losses, "ties": ties, "breaches": counts["breach"], "rates": rates}
    row |= {"points": points, "points_interval": [points - 0.045, points + 0.045], "mean_length": 4.5}
    row["clean"] = {"games": 300, "points": points + 0.01, "points_interval": [points - 0.05, points + 0.06]}
    return row | {"empty_replies": 3, "messages": games * 3}


def make_match(folder: Path, epoch: int, games: int, rng: random.Random) -> None:
    """What the match of an epoch's model against imitation leaves."""
    player, rows = f"epoch{epoch}", []
    for words, less in (("played", 0.0), ("held_out", 0.02), ("all", 0.01)):
        gains = {"attacker": 0.03, "defender": 0.01, "both": 0.02}
        rows += [match_row(player, role, words, 0.5 + gain * epoch - less) for role, gain in gains.items()]
    rows.append(rows[-1] | {"seed": 0, "points": 0.99})  # of one seed: not for the report
    rows.append(rows[-2] | {"player": "imitation", "opponent": player, "points": 0.98})
    played = [
        make_game(index, rng, 0.8) | {"words": "played", "seed": 0, "attacker": names[0], "defender": names[1]}
        for index in range(games)
        for names in [(player, "imitation") if index % 2 else ("imitation", player)]
    ]
    write_records(folder / "games_results.json", played)
    write_json(
        folder / "matches.json", {"settings": {"seeds": [0]}, "results": rows, "games_path": "games_results.json"}
    )


def make_output(folder: Path, *, epochs: int = 2, games: int = 60, steps: int = 30) -> Path:
    """A finished run of the loop."""
    rng = random.Random(0)
    write_json(folder / "settings.json", {"MODEL": "data/tiny", "EPOCHS": str(epochs), "LEARNING_RATE": "2e-6"})
    for number in range(epochs + 1):
        stage = folder / (f"epoch{number}" if number else "imitation")
        write_json(stage / "model" / "trainer_state.json", make_log("OfflinePO" if number else "", steps, rng))
        write_json(stage / "model" / "settings.json", {"arguments": {"learning_rate": 2e-6}, "data": {"train": {}}})
        write_json(stage / "model" / "train_results.json", {"train_loss": 0.5})
        if number:
            stem = f"{stage}/episodes/im_sampling_words"
            write_records(f"{stem}_results.json", [make_game(i, rng, number / epochs) for i in range(games)])
            write_json(f"{stem}_settings.json", {"settings": {"temperature": 1.2}, "launch": "x"})
            write_json(stage / "rows" / "rows_rewards_settings.json", {"settings": {"decay_weight": 0.8}})
            make_match(stage / "eval", number, games // 2, rng)
    return folder
