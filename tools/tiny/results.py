"""What the study keeps of a seed: all numbers of its tables, and some games, as one JSON object.

    seed         the seed
    points       by arm and epoch: the model's match points against the imitation model (`match_points`)
    meeting      match points of the last model of MEETING[0] against that of MEETING[1]
    self_play    by arm and epoch (0: the imitation model): how the model's games against itself ended (`self_play`)
    questions    by model: shares of right answers to the questions outside the game, by column
    practice     forms minus silent on held-out words: the mean and its interval over words
    games        by arm: some games of the last model against the imitation model, as text

What an arm has not made yet is absent.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.games.taboo import Taboo
from tools.matches.stats import ALL, BOTH, mean_difference
from tools.tiny.arms import IMITATION, MEETING, Arm
from tools.tiny.questions import COLUMNS, PRIMARY_HELD_OUT, by_word
from utils import iter_records, read_json

SUMMARY = "*_summary.json"  # of play
EMPTY, LENGTH = "empty replies", "messages"
MEETING_FOLDER = "_against_".join(MEETING)  # in the folder of a seed
# Columns of match points: the word lists and roles that they count.
COUNTED = {"points": (ALL, BOTH)} | {role: (ALL, role) for role in Taboo.roles}
COUNTED |= {words: (words, BOTH) for words in ("played", "held_out")}


def seed_results(folder: Path, seed: int, arms: Iterable[Arm], answers: Mapping[str, Sequence[int]]) -> dict:
    """The results of a seed from its folder; `answers` says which questions each model answered right (1 or 0)."""
    points, played, games = {}, {}, {}
    for arm in arms:
        evals, summaries = (by_epoch(folder / arm.name, part) for part in ("eval/matches.json", f"episodes/{SUMMARY}"))
        points[arm.name] = {str(epoch): match_points(path, f"epoch{epoch}") for epoch, path in evals}
        played[arm.name] = {str(epoch - 1): self_play(path) for epoch, path in summaries}
        if evals:
            games[arm.name] = example_games(evals[-1][1].with_name("games_results.json"))
    results = {"seed": seed, "points": points, "self_play": played, "games": games}
    meeting = folder / MEETING_FOLDER / "matches.json"
    if meeting.is_file():
        results["meeting"] = match_points(meeting, MEETING[0])["points"]
    results["questions"] = {
        model: {column: share_right(right, column) for column in COLUMNS} for model, right in answers.items()
    }
    if {"forms", "silent"} <= set(answers):
        gains = [one - other for one, other in zip(answers["forms"], answers["silent"], strict=True)]
        results["practice"] = mean_difference(*by_word(gains, PRIMARY_HELD_OUT))
    return results


def by_epoch(loop: Path, name: str) -> list[tuple[int, Path]]:
    """A loop's files epochK/NAME that are there, with K."""
    return sorted((int(path.parts[-3].removeprefix("epoch")), path) for path in loop.glob(f"epoch*/{name}"))


def match_points(path: Path, player: str) -> dict[str, float]:
    """A player's points in a match of two: of all games, by role, by word list; of clean games; breaches and ties."""
    rows = read_json(path)["results"]
    found = {(row["words"], row["role"]): row for row in rows if row["player"] == player and row["seed"] is None}
    whole = found[ALL, BOTH]
    return {name: found[counted]["points"] for name, counted in COUNTED.items()} | {
        "clean": whole["clean"]["points"],
        "breach": found[ALL, Taboo.roles[0]]["rates"]["breach"]["share"],
        "tie": whole["rates"]["tie"]["share"],
    }


def self_play(path: Path) -> dict[str, float]:
    """How games of a model against itself ended: shares by outcome and of empty replies, `about ROLE`, messages."""
    summary = read_json(path)
    shares = {outcome: number / summary["games"] for outcome, number in summary["outcomes"].items()}
    dependence = summary.get("word_dependence", summary.get("about"))  # its name in older files
    shares |= {f"about {role}": value or 0.0 for role, value in dependence.items()}
    return shares | {EMPTY: summary["empty_replies"] / summary["messages"], LENGTH: summary["mean_length"]}


def share_right(right: Sequence[int], column: str) -> float:
    """The share of right answers among a column's questions."""
    sizes, totals = by_word(right, column)
    return sum(totals) / sum(sizes)


def example_games(path: Path, number: int = 5) -> list[str]:
    """Games against the imitation model, drawn at random."""
    games = [episode for _, episode in iter_records(path)]
    return [describe(episode) for episode in random.Random(0).sample(games, min(number, len(games)))]


def describe(episode: dict) -> str:
    """A game on one line."""
    said = " / ".join(" ".join(message["content"].split()) for message in episode["history"][: episode["length"]])
    own = next(role for role in Taboo.roles if episode[role] != IMITATION)
    return f"{episode['target_word']}, it is the {own}: {said} ({episode['outcome']})"
