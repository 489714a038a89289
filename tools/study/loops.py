"""What finished loops show: for each seed one small JSON object of numbers by arm and epoch, and some games. No torch.

    {"seed": 0, "arms": {ARM: {
        "words"     the settings in which the arm differs, if a file of arms says so
        "settings"  those of tools/run_spag.sh; {folder} stands for the folder of the seed
        "made"      by which versions, at which commit, on which CPU, at which precision; hours by kind of work
        "asked"     how benchmarks were asked
        "epochs"    {"1": {TABLE: {COLUMN: value}}, ...}: the numbers of the model of each epoch, as they are shown.
                    Scores on benchmarks are [percent, standard error]
        "games"     some games of the last model, as text
    }}}

The arms "base" and "imitation" are the models that all arms of a seed share; their epoch is "0". What is missing is
left out, or null.
"""

import random
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tools.matches.stats import ALL, BOTH, pooled_rows
from tools.reasoning.jobs import result_path
from tools.reasoning.scores import MEAN, Score, read_score, result_rows
from tools.study.plan import BASE, IMITATION, Plan
from utils import ROOT, UserError, iter_records, read_json

POINTS, SELF_PLAY, QUESTIONS, BENCHMARKS = "Points against", "Self-play", "Questions", "Reasoning benchmarks"  # tables
TRAINING, IN_TRAINING = "Training", ("steps", "rows")  # until an epoch
MESSAGES = "messages"
WAY_OF_ASKING = ("harness", "dtype", "limit", "benchmarks", "data_revisions")
FACTS = ("right_guesses", "first_turn_guesses")  # of summaries of play
GAMES_KEPT = 10


def seed_results(folder: Path, plan: Plan, arms: list[str]) -> dict[str, dict]:
    """What the loops of these arms in a seed's folder show, by arm; shared models are those of the first loop.

    questions.json and reasoning/ of the folder are about the last models, under the names of their arms.
    """
    found: dict[str, dict] = {}
    for name in arms:
        for model, numbers in read_loop(name, folder / name, folder).items():
            found.setdefault(model, numbers)
        found[name]["words"] = plan.arms[name]
    path = folder / "questions.json"
    for model, shares in (read_json(path)["shares"] if path.is_file() else {}).items():
        last_epoch(found, model)[QUESTIONS] = shares
    asked, scores = benchmarks(folder / "reasoning")
    for model, columns in scores.items():
        last_epoch(found, model)[BENCHMARKS] = columns
        found[model]["asked"] = asked
    return found


def last_epoch(found: dict[str, dict], model: str) -> dict[str, dict]:
    """The tables of the last epoch of an arm, base or imitation; new ones if it has none."""
    epochs = found.setdefault(model, {"epochs": {}})["epochs"]
    return epochs.setdefault(max(epochs, key=int, default="0"), {})


def read_loop(name: str, folder: Path, home: Path) -> dict[str, dict]:
    """What a loop shows, as an arm of this name, and as base and imitation. UserError if the folder is no loop's.

    {folder} stands for `home` in the settings.
    """
    settings, made_by = loop_record(folder)
    asked, scores = benchmarks(folder / "reasoning")
    models = [folder / BASE, folder / IMITATION, *epoch_folders(folder)]
    shown: dict[str, dict[str, dict]] = {}
    trained = dict.fromkeys(IN_TRAINING, 0)
    for model in models:
        tables = shown[model.name] = {}
        if model.name.startswith("epoch") and (state := model / "model/trainer_state.json").is_file():
            trained = tables[TRAINING] = add_training(trained, read_json(state))
        for path in sorted([*model.glob("eval/matches.json"), *model.glob("against_*/matches.json")]):
            tables |= matches(read_json(path), tables.get(TRAINING, dict.fromkeys(IN_TRAINING)))
        if model.name in scores:
            tables[BENCHMARKS] = scores[model.name]
    for model, following in pairwise(models):  # an epoch begins with games of the model before
        for path in following.glob("episodes/*_summary.json"):
            shown[model.name][SELF_PLAY] = self_play(read_json(path))
    shown = {model: tables for model, tables in shown.items() if tables}
    arm = {
        "settings": {key: without_folders(value, home) for key, value in settings.items()},
        "made": {"cpu": None} | made_by | {"precision": settings.get("PRECISION"), "hours": hours(folder)},
        "asked": asked,
        "epochs": {model.removeprefix("epoch"): shown[model] for model in shown if model.startswith("epoch")},
        "games": example_games(models),
    }
    return {model: {"epochs": {"0": shown[model]}} for model in (BASE, IMITATION) if model in shown} | {name: arm}


def loop_record(folder: Path) -> tuple[dict, dict]:
    """The settings of a loop, by name, and what made it. UserError if the folder has none."""
    path = folder / "settings.json"
    record = read_json(path) if path.is_file() else {}
    settings = record.get("settings", record)
    if not settings.keys() >= {"SEED", "EPOCHS", "MODEL"}:
        raise UserError(f"{folder}: no settings.json of a loop; give OUTPUT folders of tools/run_spag.sh")
    return settings, record.get("made_by", {})


def epoch_folders(loop: Path) -> list[Path]:
    """The folders of a loop's epochs, in order."""
    folders = (path for path in loop.glob("epoch*") if re.fullmatch("epoch[0-9]+", path.name))
    return sorted(folders, key=lambda path: int(path.name.removeprefix("epoch")))


def add_training(trained: Mapping[str, int], state: Mapping) -> dict[str, int]:
    """Optimizer steps and rows with those of one more training, from its trainer_state.json."""
    rows = next(entry["rows"] for entry in state["log_history"] if "rows" in entry)
    return {"steps": trained["steps"] + state["global_step"], "rows": trained["rows"] + rows}


def matches(found: Mapping, trained: Mapping[str, int | None]) -> dict[str, dict[str, float | None]]:
    """A table for each player of matches.json: points by role and word list, how games ended, and its training."""
    opponent = found["settings"]["against"]
    tables = {}
    for player in (player for player in found["settings"]["players"] if player != opponent):
        rows = pooled_rows(found["results"], player, opponent)
        lists, roles = [words for words in rows if words != ALL], [role for role in rows[ALL] if role != BOTH]
        both = rows[ALL][BOTH]
        columns = {"points": both["points"]} | {name: both["rates"][name]["share"] for name in ("win", "tie", "loss")}
        columns |= {f"as {role}": rows[ALL][role]["points"] for role in roles}
        columns |= {f"{words} words": rows[words][BOTH]["points"] for words in lists if len(lists) > 1}
        columns["clean games"] = both["clean"]["points"]
        for role in roles:  # of all games in this role
            row = rows[ALL][role]
            columns[f"own breaches as {role}"] = row["breach_losses"] / row["games"]
            columns[f"their breaches, as {role}"] = row["breach_wins"] / row["games"]
            columns[f"wins without breach as {role}"] = (row["wins"] - row["breach_wins"]) / row["games"]
        tables[f"{POINTS} {opponent}"] = columns | trained
    return tables


def self_play(summary: Mapping) -> dict[str, float]:
    """How games of a model against itself ended: shares by outcome, of guesses, of empty replies, and so on."""
    columns = {outcome: number / summary["games"] for outcome, number in summary["outcomes"].items()}
    columns |= {fact.replace("_", " "): summary[fact] for fact in FACTS if fact in summary}
    dependence = summary.get("word_dependence", summary.get("about"))  # its name in older files
    columns |= {f"word_dependence {role}": value for role, value in dependence.items() if value is not None}
    columns["empty replies"] = summary["empty_replies"] / summary["messages"]
    return columns | {MESSAGES: summary["mean_length"]}


def benchmarks(folder: Path) -> tuple[dict, dict[str, dict]]:
    """How a loop's models were asked benchmarks, and the columns of each: scores, and differences of its geometric
    mean from base's and imitation's, as [value, standard error over questions]."""
    path = folder / "results.json"
    if not path.is_file():
        return {}, {}
    asked = read_json(path)["settings"]
    scores: dict[str, dict[str, Score]] = {model: {} for model in asked["models"]}
    for model, found in scores.items():
        for benchmark in asked["benchmarks"]:
            result = result_path(folder, model, benchmark["task"])
            if result.is_file() and "scores" in (record := read_json(result)):  # finished
                found[benchmark["name"]] = read_score(record, benchmark["metric"])
    columns: dict[str, dict] = {model: {} for model, found in scores.items() if found}
    for other in (BASE, IMITATION):
        for row in result_rows(scores, other, [benchmark["name"] for benchmark in asked["benchmarks"]]):
            columns[row["model"]][row["benchmark"]] = [row["value"], row["stderr"]]
            if row["benchmark"] == MEAN:
                minus = row["difference"]
                columns[row["model"]][f"{MEAN} minus {other}"] = minus and [minus["value"], minus["stderr"]]
    return {name: asked.get(name) for name in WAY_OF_ASKING}, columns


def hours(folder: Path) -> dict[str, float]:
    """Hours by kind of work. Of a stage that was stopped and continued, training tells those of its last start."""
    trained = [read_json(path) for path in folder.glob("*/model/train_results.json")]
    played = [read_json(path) for path in folder.glob("*/episodes/*_summary.json")]
    seconds = {
        "training": sum(each["train_runtime"] for each in trained),
        "play": sum(each["new_tokens"] / each["tokens_per_second"] for each in played if each["tokens_per_second"]),
    }
    return {kind: round(number / 3600, 2) for kind, number in seconds.items()}


def example_games(models: Sequence[Path]) -> list[str]:
    """Some games of the last model against imitation, drawn at random, each on one line."""
    played = [model for model in models if (model / "eval/games_results.json").is_file()]
    games = [episode for _, episode in iter_records(played[-1] / "eval/games_results.json")] if played else []
    drawn = random.Random(0).sample(games, min(GAMES_KEPT, len(games)))
    return [game_text(episode, played[-1].name) for episode in drawn]


def game_text(episode: Mapping, player: str) -> str:
    said = " / ".join(" ".join(message["content"].split()) for message in episode["history"][: episode["length"]])
    own = next(key for key, value in episode.items() if value == player)  # players are stored under their roles
    return f"{episode['target_word']}, it is the {own}: {said} ({episode['outcome']})"


def without_folders(value: str, home: Path) -> str:
    """A setting with {folder} in the place of the seed's folder, and without this project's."""
    return value.replace(str(home.resolve()), "{folder}").replace(str(home), "{folder}").replace(f"{ROOT}/", "")
