"""What finished loops show: for each seed one small JSON object of numbers by arm and epoch, and some games. No torch.

    {"seed": 0, "arms": {ARM: {
        "words"       the settings in which the arm differs, if a file of arms says so
        "settings"    those of tools/run_spag.sh; {folder} stands for the folder of the seed
        "made"        by which versions, at which commit, on which CPU, at which precision; hours by kind of work
        "epochs"      {"1": {"matches": {OPPONENT: {WORD LIST: {ROLE: row of a match}}}, "self_play": {...},
                      "training": {"steps", "rows"}, "questions": {...}, "benchmarks": {...}}, ...}
        "games"       some games of the last model, as text
    }}}

The arms "base" and "imitation" are the models that all arms of a seed share; their epoch is "0". What is missing is
left out. `read_seed` also reads the results that the embedded world's first study kept in another form.
"""

import platform
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.games.game import ROOT
from tools.matches.stats import ALL, BOTH, pooled_rows
from tools.reasoning.jobs import result_path
from tools.reasoning.scores import MEAN, Score, difference, geometric_mean, known, read_score
from tools.study.arms import BASE, IMITATION, Plan
from utils import UserError, iter_records, read_json

WAY_OF_ASKING = ("harness", "dtype", "limit", "benchmarks", "data_revisions")
COUNTS = ("games", "wins", "ties", "losses", "breach_losses", "messages", "empty_replies")
GAMES_KEPT = 5
FACTS = ("right_guesses", "first_turn_guesses")  # of summaries of play
DEPENDENCE, MESSAGES, EMPTY = "word_dependence", "messages", "empty replies"


def read_loop(folder: Path, home: Path) -> dict:
    """What a loop left in its folder, as an arm; epoch "0" is the imitation model. UserError if it is no loop's."""
    settings, made = loop_record(folder)
    epochs: dict[int, dict] = defaultdict(dict)
    for epoch, path in stages(folder, "eval/matches.json", "against_*/matches.json"):
        found = read_json(path)
        opponent = found["settings"]["against"]
        for player in (name for name in found["settings"]["players"] if name != opponent):
            rows = pooled_rows(found["results"], player, opponent)
            epochs[epoch].setdefault("matches", {})[opponent] = {
                words: {role: match_numbers(row) for role, row in by_role.items()} for words, by_role in rows.items()
            }
    for epoch, path in stages(folder, "episodes/*_summary.json"):
        epochs[epoch - 1]["self_play"] = self_play(path)  # an epoch begins with games of the model before
    for epoch, path in stages(folder, "model/trainer_state.json"):
        state = read_json(path)
        rows = next((entry["rows"] for entry in state["log_history"] if "rows" in entry), None)
        epochs[epoch]["training"] = {"steps": state["global_step"], "rows": rows}
    for model, scores in benchmark_numbers(folder / "reasoning").items():
        epochs[stage_number(model)]["benchmarks"] = scores
    return {
        "seed": int(settings["SEED"]),
        "settings": {name: without(value, home) for name, value in settings.items()},
        "made": made | {"cpu": cpu(), "precision": settings.get("PRECISION")} | hours(folder),
        "epochs": {str(epoch): dict(epochs[epoch]) for epoch in sorted(epochs)},
        "games": example_games(folder),
    }


def loop_record(folder: Path) -> tuple[dict, dict]:
    """The settings of a loop, by name, and what made it. UserError if the folder has none."""
    path = folder / "settings.json"
    record = read_json(path) if path.is_file() else {}
    settings = record.get("settings", record)
    if not settings.keys() >= {"SEED", "EPOCHS", "MODEL"}:
        raise UserError(f"{folder}: no settings.json of a loop; give OUTPUT folders of tools/run_spag.sh")
    return settings, record.get("made_by", {})


def stages(folder: Path, *patterns: str) -> Iterator[tuple[int, Path]]:
    """The files of a loop's models that match a pattern, with the epoch of each in order; imitation is epoch 0."""
    found = [
        path for pattern in patterns for stage in (IMITATION, "epoch*") for path in folder.glob(f"{stage}/{pattern}")
    ]
    return iter(sorted((stage_number(path.relative_to(folder).parts[0]), path) for path in found))


def stage_number(name: str) -> int:
    """The epoch of the model with this name: 0 for imitation, -1 for base."""
    return {BASE: -1, IMITATION: 0}.get(name) if name in (BASE, IMITATION) else int(name.removeprefix("epoch"))


def match_numbers(row: Mapping) -> dict:
    """What is kept of a row of matches.json."""
    shares = {name: row["rates"][name]["share"] for name in ("win", "tie", "loss")}
    points = {"points": row["points"], "interval": row["points_interval"], "clean": row["clean"]["points"]}
    return points | shares | {"breach": row["breach_losses"] / row["games"]} | {name: row[name] for name in COUNTS}


def self_play(path: Path) -> dict[str, float]:
    """How games of a model against itself ended: shares by outcome, of guesses, of empty replies, and so on."""
    summary = read_json(path)
    numbers = {outcome: number / summary["games"] for outcome, number in summary["outcomes"].items()}
    numbers |= {fact.replace("_", " "): summary[fact] for fact in FACTS if fact in summary}
    dependence = summary.get(DEPENDENCE, summary.get("about"))  # its name in older files
    numbers |= {f"{DEPENDENCE} {role}": value for role, value in dependence.items() if value is not None}
    return numbers | {EMPTY: summary["empty_replies"] / summary["messages"], MESSAGES: summary["mean_length"]}


def benchmark_numbers(folder: Path) -> dict[str, dict]:
    """Scores of a loop's models on its benchmarks, and differences of each model's geometric mean from base's and
    imitation's, with standard errors over questions."""
    path = folder / "results.json"
    if not path.is_file():
        return {}
    asked = read_json(path)["settings"]
    scores: dict[str, dict[str, Score]] = defaultdict(dict)
    for model in asked["models"]:
        for benchmark in asked["benchmarks"]:
            if (result := result_path(folder, model, benchmark["task"])).is_file():
                scores[model][benchmark["name"]] = read_score(read_json(result), benchmark["metric"])
    whole = {model: list(found.values()) for model, found in scores.items() if len(found) == len(asked["benchmarks"])}
    way = {name: asked.get(name) for name in WAY_OF_ASKING}
    numbers = {}
    for model, found in scores.items():
        values = {name: [score.value, known(score.stderr)] for name, score in found.items()}
        if model in whole:
            mean, stderr, _ = geometric_mean(whole[model])
            values[MEAN] = [mean, known(stderr)]
        away = {
            other: difference(whole[model], whole[other]) for other in (BASE, IMITATION) if {model, other} <= {*whole}
        }
        minus = {other: [each["value"], each["stderr"]] for other, each in away.items() if other != model}
        numbers[model] = {"scores": values, "minus": minus, "asked": way}
    return numbers


def hours(folder: Path) -> dict[str, dict[str, float]]:
    """Hours by kind of work. Of a stage that was stopped and continued, training tells those of its last start."""
    played = [read_json(path) for _, path in stages(folder, "episodes/*_summary.json")]
    seconds = {
        "training": sum(read_json(path)["train_runtime"] for _, path in stages(folder, "model/train_results.json")),
        "play": sum(
            each["new_tokens"] / each["tokens_per_second"] for each in played if each.get("tokens_per_second")
        ),
        "benchmarks": sum(read_json(path).get("seconds", 0) for path in folder.glob("reasoning/*/*.json")),
    }
    return {"hours": {kind: round(number / 3600, 2) for kind, number in seconds.items()}}


def example_games(folder: Path) -> list[str]:
    """Some games of the last model against imitation, drawn at random, each on one line."""
    paths = [path for _, path in stages(folder, "eval/games_results.json")]
    games = [episode for _, episode in iter_records(paths[-1])] if paths else []
    drawn = random.Random(0).sample(games, min(GAMES_KEPT, len(games)))
    return [game_text(episode, paths[-1].parts[-3]) for episode in drawn]


def game_text(episode: Mapping, player: str) -> str:
    said = " / ".join(" ".join(message["content"].split()) for message in episode["history"][: episode["length"]])
    own = next(key for key, value in episode.items() if value == player)  # players are stored under their roles
    return f"{episode['target_word']}, it is the {own}: {said} ({episode['outcome']})"


def cpu() -> str:
    """The name of this machine's processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def without(value: str, home: Path) -> str:
    """A setting with {folder} in the place of the seed's folder, and without this project's."""
    return value.replace(str(home.resolve()), "{folder}").replace(str(home), "{folder}").replace(f"{ROOT}/", "")


# A seed.


def seed_results(folder: Path, seed: int, plan: Plan) -> dict:
    """What the loops of a seed show, for the arms that have begun. `folder` holds a loop for each arm."""
    arms = {
        name: read_loop(folder / name, folder) for name in plan.words if (folder / name / "settings.json").is_file()
    }
    for name, arm in arms.items():
        arm["words"] = plan.words[name]
    results = {"seed": seed, "arms": share_models(arms)}
    path = folder / "questions.json"
    for model, shares in (read_json(path)["shares"] if path.is_file() else {}).items():
        epochs = results["arms"].setdefault(model, {"epochs": {}})["epochs"]
        epochs.setdefault(max(epochs, key=int, default="0"), {})["questions"] = shares
    return results


def share_models(arms: dict[str, dict]) -> dict[str, dict]:
    """These arms, with the models that they share taken out of the first arm that has them."""
    shared = {}
    for arm in arms.values():
        for name, epoch in ((BASE, "-1"), (IMITATION, "0")):
            numbers = arm["epochs"].pop(epoch, None)
            if numbers and name not in shared:
                shared[name] = {"epochs": {"0": numbers}}
    return shared | arms


def read_seed(path: Path) -> dict:
    """A stored seed. Results of the first study have another form, in which `word_dependence` is called `about`."""
    stored = read_json(path)
    if "arms" in stored:
        return stored
    if "self_play" not in stored:
        raise UserError(f"{path}: not the results of a seed of a study")
    return from_first_study(stored)


def from_first_study(stored: Mapping) -> dict:
    """The results of a seed of the first study in today's form. Its arms had three epochs unless points say fewer."""
    arms: dict[str, dict] = {name: {"epochs": defaultdict(dict)} for name in (BASE, IMITATION)}
    for name, by_epoch in stored["points"].items():
        arms[name] = {"epochs": defaultdict(dict), "games": stored["games"].get(name, [])}
        for epoch, points in by_epoch.items():
            tie = points["tie"]
            both = {name: points[name] for name in ("points", "clean", "tie")}
            both |= {"win": points["points"] - tie / 2, "loss": 1 - points["points"] - tie / 2}
            attacker = {"points": points["attacker"], "breach": points["breach"]}
            rows = {ALL: {BOTH: both, "attacker": attacker, "defender": {"points": points["defender"]}}}
            rows |= {words: {BOTH: {"points": points[words]}} for words in ("played", "held_out")}
            arms[name]["epochs"][epoch]["matches"] = {IMITATION: rows}
    for name, by_epoch in stored["self_play"].items():
        for epoch, numbers in by_epoch.items():
            numbers = {key.replace("about ", f"{DEPENDENCE} "): value for key, value in numbers.items()}
            if any(numbers[f"{DEPENDENCE} {role}"] for role in ("attacker", "defender")):  # else a single game
                arms[IMITATION if epoch == "0" else name]["epochs"][epoch]["self_play"] = numbers
    for model, shares in stored["questions"].items():
        last = "0" if model in (BASE, IMITATION) else max(stored["points"][model], key=int, default="3")
        arms[model]["epochs"][last]["questions"] = shares
    if "meeting" in stored:
        arms["losers"]["epochs"]["3"]["matches"]["released"] = {ALL: {BOTH: {"points": stored["meeting"]}}}
    return {"seed": stored["seed"], "arms": arms}
