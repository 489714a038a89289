"""A file of arms says what a study runs and what it compares. No torch.

A line begins with the name of an arm. Then come the settings of tools/run_spag.sh in which it differs, NAME=VALUE, in
quotes where they hold blanks. Text behind # says what the arm is. The first arm makes the imitation model and the
games of epoch 1. Lines that begin with a word and a colon are about the whole study:

    all: NAME=VALUE ...           settings of every arm
    before: WORDS, after: WORDS   flags of Python, run for each seed before its first arm and after its last one
    gate: OUTCOME SHARE           least share of this outcome in the imitation model's games against itself
    match: MODELS OPPONENT ...    a match of the models against an arm's last model, or against NAME=PLAYER. MODELS is
                                  an arm, `last` (imitation and the last model of each arm) or `every` (each epoch's).
                                  Further words are flags of tools/evaluate_games.py
    minus: MEASURE ARM OTHER ...  differences of an arm from others that are shown, paired by seed
    primary: MEASURE ARM OTHER    a primary comparison; without OTHER from 0.5
    earlier: ARM # what it is     an arm that stored results have and that is no longer run

In all words {seed} is the number of the seed and {folder} its folder. `python -m tools.study.arms FILE` lists arms.
"""

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from utils import UserError, open_text, run_program

BASE, IMITATION = "base", "imitation"  # models that all arms of a seed share
LAST, EVERY = "last", "every"


@dataclass(frozen=True)
class Plan:
    """A file of arms. `words` and `titles` are by arm, in the order of the file."""

    words: dict[str, dict[str, str]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)  # those of earlier results too
    gate: tuple[str, float] | None = None
    matches: list[list[str]] = field(default_factory=list)
    minus: list[tuple[str, str, str]] = field(default_factory=list)  # measure, arm, other arm
    primaries: list[tuple[str, str, str | None]] = field(default_factory=list)

    @property
    def first(self) -> str:
        """The arm that makes the imitation model."""
        return next(iter(self.words))


def read_plan(path: str | Path) -> Plan:
    """Read a file of arms. Raises UserError naming the line that is wrong."""
    words, titles, found = {}, {}, {"gate": None, "matches": [], "minus": [], "primaries": []}
    with open_text(path) as file:
        lines = [(f"{path}:{number}", line.strip()) for number, line in enumerate(file, start=1)]
    for where, line in lines:
        first, *rest = _split(where, line) or ["all:"]
        if first == "earlier:" and len(rest) == 1:
            titles[rest[0]] = line.partition(" # ")[2].strip()
        elif first.endswith(":"):
            _add_line(found, where, first, rest)
        elif first in (*words, BASE, IMITATION, LAST, EVERY):
            raise UserError(
                f"{where}: an arm cannot be called {first}, which has another meaning or is an arm already"
            )
        else:
            words[first] = _settings(where, rest)
            titles[first] = line.partition(" # ")[2].strip()
    if not words:
        raise UserError(f"{path}: no arms")
    for measure, *arms in found["minus"] + found["primaries"]:
        if unknown := {*arms} - {*titles, BASE, IMITATION, None}:
            raise UserError(f"{path}: {measure} is compared of {unknown.pop()}, which is no arm of this file")
    return Plan(words=words, titles=titles, **found)


def _add_line(found: dict, where: str, first: str, rest: list[str]) -> None:
    """Add what a line about the whole study says. Lines that tools/study/run.sh alone reads are passed over."""
    if first == "gate:" and len(rest) == 2:
        found["gate"] = (rest[0], float(rest[1]))
    elif first == "match:" and len(rest) >= 2:
        found["matches"].append(rest)
    elif first == "minus:" and len(rest) >= 3:
        found["minus"] += [(*rest[:2], other) for other in rest[2:]]
    elif first == "primary:" and len(rest) in (2, 3):
        found["primaries"].append((rest[0], rest[1], rest[2] if len(rest) == 3 else None))
    elif first not in ("all:", "before:", "after:"):
        raise UserError(f"{where}: {' '.join([first, *rest])} is no line of a file of arms (tools/study/README.md)")


def _split(where: str, line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _settings(where: str, words: list[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise UserError(f"{where}: {word!r}: expected NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("expected one file of arms")
    plan = read_plan(sys.argv[1])
    for name, words in plan.words.items():
        print(f"{name:20} {plan.titles[name] or shlex.join(f'{key}={value}' for key, value in words.items())}")


if __name__ == "__main__":
    run_program(main)
