"""What the finished loops of a seed show, as one small JSON file. No torch.

    python -m tools.study.collect --folder outputs/tiny_study/seed0      writes outputs/tiny_study/seed0.json

    {"seed": 0, "arms": {ARM: {
        "settings"  those of tools/run_spag.sh; {folder} stands for the folder of the seed
        "made"      package versions and this project's commit
        "asked"     how benchmarks were asked
        "epochs"    {"1": {TABLE: {COLUMN: value}}, ...}: the numbers of the model of each epoch, as they are shown.
                    A score on a benchmark is [percent, standard error]
    }}}

The arms "base" and "imitation" are the models that all arms of a seed share; their epoch is "0".
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag, parse_flags
from tools.matches.stats import ALL, BOTH, pooled_rows
from utils import ROOT, read_json, run_program, write_json

BASE, IMITATION = "base", "imitation"
# Tables. "Points against" is followed by the opponent's name.
POINTS, SELF_PLAY, BELIEF, QUESTIONS = "Points against", "Self-play", "Belief on recorded games", "Questions"
REASONING, TRAINING = "Reasoning benchmarks", "Training"
TRAINED = ("steps", "rows")  # columns: optimizer steps and rows up to and including an epoch


@dataclass(kw_only=True)
class Flags:
    """The flags of this program."""

    folder: str = flag("folder of a seed, as tools/study/run_study.sh leaves it: OUTPUT_DIR/seedN")


def collect_seed(folder: Path) -> dict:
    """The numbers of the arms of a seed that have ended: run_study.sh has left ARM.finished."""
    arms: dict[str, dict] = {}
    for mark in sorted(folder.glob("*.finished"), key=lambda path: path.stat().st_mtime):
        add_loop(arms, read_loop(mark.stem, folder / mark.stem, folder)["arms"])
    return {"seed": int(folder.name.removeprefix("seed")), "arms": arms}


def add_loop(arms: dict[str, dict], loop: Mapping[str, dict]) -> None:
    """Add what `read_loop` returns. A model that is there already gets the tables that it has not."""
    for name, arm in loop.items():
        epochs = arms.setdefault(name, arm)["epochs"]
        for epoch, tables in arm["epochs"].items():
            epochs[epoch] = tables | epochs.get(epoch, {})


def read_loop(arm: str, loop: Path, home: Path) -> dict:
    """The numbers of a loop in the form of a seed. In its settings {folder} stands for `home`."""
    record, benchmarks = read_json(loop / "settings.json"), read_if_there(loop / "reasoning" / "results.json")
    settings, asked = record["settings"], ("harness", "dtype", "limit", "benchmarks") if benchmarks else ()
    for folder, name in ((home.resolve(), "{folder}"), (home, "{folder}"), (f"{ROOT}/", "")):
        settings = {key: value.replace(str(folder), name) for key, value in settings.items()}
    by_model: dict[str, dict[str, dict]] = {}
    for model, table, columns in read_tables(loop):
        by_model.setdefault(model, {}).setdefault(table, {}).update(columns)
    arms = {name: {"epochs": {"0": by_model.pop(name)}} for name in (BASE, IMITATION) if name in by_model}
    arms[arm] = {
        "settings": settings,
        "made": record["made_by"],
        "asked": {name: benchmarks["settings"][name] for name in asked},
        "epochs": {model.removeprefix("epoch"): tables for model, tables in by_model.items()},
    }
    return {"seed": int(settings["SEED"]), "arms": arms}


def read_tables(loop: Path) -> Iterator[tuple[str, str, dict]]:
    """Model, table and {column: value} of all that a loop has left."""
    player, trained = IMITATION, dict.fromkeys(TRAINED, 0)
    for epoch in sorted(loop.glob("epoch*[0-9]"), key=lambda path: int(path.name.removeprefix("epoch"))):
        for path in epoch.glob("episodes/*_summary.json"):  # an epoch begins with games of the model before
            games = read_json(path)
            yield player, SELF_PLAY, {name: number / games["games"] for name, number in games["outcomes"].items()}
            yield player, SELF_PLAY, {"empty replies": games["empty_replies"] / games["messages"]}
            yield player, SELF_PLAY, {"messages": games["mean_length"]}
        player = epoch.name
        if state := read_if_there(epoch / "model" / "trainer_state.json"):
            rows = read_json(epoch / "model" / "settings.json")["rows"]
            trained = {"steps": trained["steps"] + state["global_step"], "rows": trained["rows"] + rows}
            yield player, TRAINING, trained
        if match := read_if_there(epoch / "eval" / "matches.json"):
            opponent = match["settings"]["against"]
            yield player, f"{POINTS} {opponent}", points(match["results"], player, opponent)
    for row in itertools.chain.from_iterable(read_json(path)["table"] for path in loop.rglob("belief.json")):
        if row["outcome"] == "all" and row["hints"] == "last":
            yield row["model"], BELIEF, {"knowledge": row["knowledge"]}
        elif row["outcome"] == "all":
            yield row["model"], BELIEF, {f"{name} after {row['hints']}": row[name] for name in ("knowledge", "belief")}
    for model, shares in read_if_there(loop / "questions.json").get("shares", {}).items():
        yield model, QUESTIONS, shares
    for row in read_if_there(loop / "reasoning" / "results.json").get("results", ()):
        yield row["model"], REASONING, {row["benchmark"]: [row["value"], row["stderr"]]}


def read_if_there(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def points(results: Sequence[Mapping], player: str, opponent: str) -> dict[str, float]:
    """Points of a player of a match by role and word list, and how its games ended."""
    rows = pooled_rows(results, player, opponent)
    lists, roles = [words for words in rows if words != ALL], [role for role in rows[ALL] if role != BOTH]
    both = rows[ALL][BOTH]
    columns = {"points": both["points"]} | {name: both["rates"][name]["share"] for name in ("win", "tie", "loss")}
    columns |= {f"as {role}": rows[ALL][role]["points"] for role in roles}
    columns |= {f"{words} words": rows[words][BOTH]["points"] for words in lists if len(lists) > 1}
    breaches = {role: rows[ALL][role]["breach_losses"] / rows[ALL][role]["games"] for role in roles}
    return columns | {f"own breaches as {role}": share for role, share in breaches.items()}


def main() -> None:
    folder = Path(parse_flags(Flags, description=__doc__).folder)
    write_json(folder.with_suffix(".json"), collect_seed(folder))


if __name__ == "__main__":
    run_program(main)
