"""Convert results of seeds, in place: those of the first study (data/tiny/results until 2026-11) and of tag study1."""

import json
import sys
from collections import defaultdict
from pathlib import Path

from tools.matches.stats import ALL, BOTH
from tools.reasoning.scores import MEAN
from tools.study.loops import BENCHMARKS, IN_TRAINING, POINTS, QUESTIONS, SELF_PLAY, TRAINING
from tools.study.plan import BASE, IMITATION


def from_first_study(stored: dict) -> dict:
    """A seed of the first study. Its arms had three epochs unless points say fewer; steps and rows are not known."""
    arms: dict[str, dict] = {name: {"epochs": defaultdict(dict)} for name in (BASE, IMITATION)}
    unknown = dict.fromkeys(IN_TRAINING)
    for name, by_epoch in stored["points"].items():
        arms[name] = {"epochs": defaultdict(dict), "games": stored["games"].get(name, [])}
        for epoch, points in by_epoch.items():
            tie = points["tie"]
            columns = {"points": points["points"], "win": points["points"] - tie / 2, "tie": tie}
            columns |= {"loss": 1 - points["points"] - tie / 2}
            columns |= {f"as {role}": points[role] for role in ("attacker", "defender")}
            columns |= {f"{words} words": points[words] for words in ("played", "held_out")}
            columns |= {"clean games": points["clean"], "own breaches as attacker": points["breach"]}
            columns |= {"own breaches as defender": None}
            arms[name]["epochs"][epoch][f"{POINTS} {IMITATION}"] = columns | unknown
    for name, by_epoch in stored["self_play"].items():
        for epoch, numbers in by_epoch.items():
            numbers = {key.replace("about ", "word_dependence "): value for key, value in numbers.items()}
            if any(numbers[f"word_dependence {role}"] for role in ("attacker", "defender")):  # else a single game
                arms[IMITATION if epoch == "0" else name]["epochs"][epoch][SELF_PLAY] = numbers
    for model, shares in stored["questions"].items():
        last = "0" if model in (BASE, IMITATION) else max(stored["points"][model], key=int, default="3")
        arms[model]["epochs"][last][QUESTIONS] = shares
    if "meeting" in stored:
        columns = {"points": stored["meeting"], **dict.fromkeys(("win", "tie", "loss", "clean games")), **unknown}
        arms["losers"]["epochs"]["3"][f"{POINTS} released"] = columns
    return {"seed": stored["seed"], "arms": arms}


def from_study1(stored: dict) -> dict:
    """A seed that the programs of tag study1 have kept."""
    for arm in stored["arms"].values():
        arm.pop("seed", None)
        trained = dict.fromkeys(IN_TRAINING, 0)
        for epoch in sorted(arm["epochs"], key=int):
            found, made = arm["epochs"][epoch], {}
            effort = dict.fromkeys(IN_TRAINING)
            if "training" in found and int(epoch) > 0:
                effort = made[TRAINING] = trained = {key: trained[key] + found["training"][key] for key in IN_TRAINING}
            for opponent, rows in found.get("matches", {}).items():
                both, lists = rows[ALL][BOTH], [words for words in rows if words != ALL]
                by_role = {role: row for role, row in rows[ALL].items() if role != BOTH}
                columns = {name: both[name] for name in ("points", "win", "tie", "loss")}
                columns |= {f"as {role}": row["points"] for role, row in by_role.items()}
                columns |= {f"{words} words": rows[words][BOTH]["points"] for words in lists if len(lists) > 1}
                columns["clean games"] = both["clean"]
                columns |= {f"own breaches as {role}": row["breach"] for role, row in by_role.items()}
                made[f"{POINTS} {opponent}"] = columns | effort
            made |= {SELF_PLAY: found["self_play"]} if "self_play" in found else {}
            if "benchmarks" in found:
                arm["asked"] = found["benchmarks"]["asked"]
                minus = found["benchmarks"]["minus"]
                made[BENCHMARKS] = found["benchmarks"]["scores"] | {
                    f"{MEAN} minus {other}": minus.get(other) for other in (BASE, IMITATION)
                }
            made |= {QUESTIONS: found["questions"]} if "questions" in found else {}
            arm["epochs"][epoch] = made
    return stored


for path in map(Path, sys.argv[1:]):
    stored = json.loads(path.read_text(encoding="utf-8"))
    found = from_study1(stored) if "arms" in stored else from_first_study(stored)
    path.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
