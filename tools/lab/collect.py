"""The numbers of the finished loops of a seed, as one small JSON file.

    python -m tools.lab.collect outputs/tiny_study/seed0      writes outputs/tiny_study/seed0.json

    {"seed": 0, "arms": {ARM: {"settings": {...}, "made": {...}, "epochs": {"1": {TABLE: {COLUMN: value}}, ...}}}}

"settings" are those of tools/run_spag.py, in which {folder} stands for the folder of the seed; "made" has package
versions and this project's commit. A score on a benchmark is [percent, standard error]. The arms "base" and
"imitation" are the models that all arms of a seed share; their epoch is "0".
"""

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.measure.matches import BOTH
from utils import ROOT, UserError, read_json, run_program, write_json

BASE, IMITATION = "base", "imitation"
# Tables. "Points against" is followed by the opponent's name.
POINTS, SELF_PLAY = "Points against", "Self-play"
QUESTIONS = "Questions"  # only in finished studies
GUESSES, GUESSES_BY_HINTS = "Guesses after recorded hints", "Guesses by number of recorded hints"
BELIEF = "Belief on recorded games"  # only in finished studies: a measure that was given up
REASONING, TRAINING = "Reasoning benchmarks", "Training"
TABLES = (SELF_PLAY, GUESSES, GUESSES_BY_HINTS, BELIEF, QUESTIONS, REASONING)  # without opponents, in order
TRAINED = ("steps", "rows")  # columns: optimizer steps and rows up to and including an epoch


def read_loop(arm: str, loop: Path) -> dict:
    """The numbers of a loop in the form of a seed. In its settings {folder} stands for the folder that it is in."""
    record = read_json(loop / "settings.json")
    settings = record.get("settings", {})
    seed = settings.get("seed", settings.get("SEED"))  # of loops before the one in Python
    if seed is None:
        raise UserError(f"{loop}: its settings.json is not that of a loop")
    by_model: dict[str, dict[str, dict]] = {}
    for model, table, columns in read_tables(loop):
        by_model.setdefault(model, {}).setdefault(table, {}).update(columns)
    arms = {name: {"epochs": {"0": by_model.pop(name)}} for name in (BASE, IMITATION) if name in by_model}
    epochs = {model.removeprefix("epoch"): tables for model, tables in by_model.items()}
    placed = {name: without_place(value, loop) for name, value in settings.items()}
    arms[arm] = {"settings": placed, "made": record["made_by"], "epochs": epochs}
    return {"seed": int(seed), "arms": arms}


def without_place(value, loop: Path):
    """A value of a setting in which paths do not tell where the folder of the seed is, or this project."""
    if isinstance(value, list):
        return [without_place(each, loop) for each in value]
    if isinstance(value, str):
        for folder, name in ((loop.resolve().parent, "{folder}/"), (loop.parent, "{folder}/"), (ROOT, "")):
            value = re.sub(rf"(?<![^\s=]){re.escape(str(folder))}/", name, value)  # where a word or a path begins
    return value


def read_tables(loop: Path) -> Iterator[tuple[str, str, dict]]:
    """Model, table and {column: value} of all that a loop has left."""
    player, trained = IMITATION, dict.fromkeys(TRAINED, 0)
    for epoch in sorted(loop.glob("epoch*[0-9]"), key=lambda path: int(path.name.removeprefix("epoch"))):
        for path in epoch.glob("episodes/*_summary.json"):  # an epoch begins with games of the model before
            games = read_json(path)
            shares = {name: number / games["games"] for name, number in games["outcomes"].items()}
            shares |= {"empty replies": games["empty_replies"] / games["messages"], "messages": games["mean_length"]}
            yield player, SELF_PLAY, shares
        player = epoch.name
        if state := read_if_there(epoch / "model" / "trainer_state.json"):
            rows = read_json(epoch / "model" / "settings.json")["rows"]
            trained = {"steps": trained["steps"] + state["global_step"], "rows": trained["rows"] + rows}
            yield player, TRAINING, trained
        if match := read_if_there(epoch / "eval" / "matches.json"):
            opponent = match["settings"]["against"]
            yield player, f"{POINTS} {opponent}", points(match["results"], player, opponent)
    for row in itertools.chain.from_iterable(read_json(path)["table"] for path in loop.rglob("belief.json")):
        if "share" in row:  # older versions measured something else
            yield row["model"], *guesses(row)
    for row in read_if_there(loop / "reasoning" / "results.json").get("results", ()):
        yield row["model"], REASONING, {row["benchmark"]: [row["value"], row["stderr"]]}


def guesses(row: Mapping) -> tuple[str, dict[str, float]]:
    """The table that a row of tools/evaluate_belief.py belongs to, and its columns, which name the candidates."""
    among = f"among {row['candidates']}"
    columns = {f"share {among}": row["share"], f"rank 1 {among}": row["rank_1"]}
    if row["hints"] == "last":
        return GUESSES, columns | {f"tempered share {among}": row["tempered"]}
    columns[f"games {among}"] = row["games"]
    return GUESSES_BY_HINTS, {f"{name}, {row['hints']} hints": value for name, value in columns.items()}


def read_if_there(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def points(results: Sequence[Mapping], player: str, opponent: str) -> dict[str, float]:
    """Points of a player of a match by role and word list, and how its games ended."""
    rows = [row for row in results if (row["player"], row["opponent"], row["seed"]) == (player, opponent, None)]
    pooled = rows[-1]["words"]  # all lists, or the only one
    roles = {row["role"]: row for row in rows if row["words"] == pooled}
    both = roles.pop(BOTH)
    columns = {"points": both["points"]} | {name: both["rates"][name]["share"] for name in ("win", "tie", "loss")}
    columns |= {f"as {role}": row["points"] for role, row in roles.items()}
    lists = [row for row in rows if row["role"] == BOTH and row["words"] != pooled]
    columns |= {f"{row['words']} words": row["points"] for row in lists}
    return columns | {f"own breaches as {role}": row["breach_losses"] / row["games"] for role, row in roles.items()}


def collect(folder: Path) -> None:
    """Write the numbers of the finished loops in the folder of a seed to FOLDER.json."""
    arms: dict[str, dict] = {}
    for mark in sorted(folder.glob("*.finished"), key=lambda path: path.stat().st_mtime):
        for name, arm in read_loop(mark.stem, folder / mark.stem)["arms"].items():
            epochs = arms.setdefault(name, arm)["epochs"]
            for epoch, tables in arm["epochs"].items():  # of base and imitation several loops have tables
                epochs[epoch] = tables | epochs.get(epoch, {})
    write_json(folder.with_suffix(".json"), {"seed": int(folder.name.removeprefix("seed")), "arms": arms})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of a seed, as tools/lab/study.py leaves it")
    collect(parser.parse_args().folder)


if __name__ == "__main__":
    run_program(main)
