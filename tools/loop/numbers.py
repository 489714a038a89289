"""The few numbers of a stage that has ended, for the terminal. Everything is in the stage's files and in its log.

python -m tools.loop.numbers OUTPUT STAGE
"""

import sys
from pathlib import Path

from utils import read_json, run_program, shown


def play_numbers(folder: Path) -> str:
    (path,) = folder.glob("episodes/*_summary.json")
    summary = read_json(path)
    shares = [f"{name} {number / summary['games']:.0%}" for name, number in summary["outcomes"].items()]
    return f"{summary['games']:,} games, {', '.join(shares)}"


def rewards_numbers(folder: Path) -> str:
    rows = read_json(folder / "rows" / "rows_rewards_settings.json")["rows"]
    return "rows: " + ", ".join(f"{name} {number:,}" for name, number in rows.items() if number)


def train_numbers(folder: Path) -> str:
    state = read_json(folder / "model" / "trainer_state.json")
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    return f"{state['global_step']:,} steps, loss {losses[0]:.3f} at the first and {losses[-1]:.3f} at the last"


def eval_numbers(folder: Path) -> str:
    """The points of the epoch's model over all word lists and both roles."""
    rows = read_json(folder / "eval" / "matches.json")["results"]
    pooled = [row for row in rows if row["player"] == folder.name and row["role"] == "both" and row["seed"] is None]
    row = next((row for row in pooled if row["words"] == "all"), pooled[0])
    low, high = row["points_interval"]
    return f"{row['games']:,} games against imitation, points {row['points']:.3f} [{low:.3f}, {high:.3f}]"


NUMBERS = {"play": play_numbers, "rewards": rewards_numbers, "train": train_numbers, "eval": eval_numbers}


def main() -> None:
    output, stage = Path(sys.argv[1]), sys.argv[2]
    name, _, kind = f"{stage}_train".rpartition("_") if stage == "imitation" else stage.rpartition("_")
    if kind in NUMBERS:
        print(shown(NUMBERS[kind](output / name)))


if __name__ == "__main__":
    run_program(main)
