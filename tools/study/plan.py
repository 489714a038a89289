"""A file of arms: what a study runs and what it compares. README.md has an example. No torch.

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

In all words {seed} is the number of the seed and {folder} its folder.
"""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from utils import UserError, open_text

BASE, IMITATION = "base", "imitation"  # models that all arms of a seed share
LAST, EVERY = "last", "every"


@dataclass
class Plan:
    """A file of arms. `arms` and `titles` are in the order of the file."""

    arms: dict[str, dict[str, str]] = field(default_factory=dict)  # the settings in which each differs
    titles: dict[str, str] = field(default_factory=dict)  # what each is; earlier arms too
    all: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    gate: tuple[str, float] | None = None
    matches: list[list[str]] = field(default_factory=list)
    minus: list[tuple[str, str, str | None]] = field(default_factory=list)  # measure, arm, other arm
    primaries: list[tuple[str, str, str | None]] = field(default_factory=list)

    @property
    def first(self) -> str:
        """The arm that makes the imitation model."""
        return next(iter(self.arms))


def read_plan(path: str | Path) -> Plan:
    """Read a file of arms. Raises UserError naming the line that is wrong."""
    plan = Plan()
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                _read_line(plan, shlex.split(line, comments=True), line.partition(" # ")[2].strip())
            except ValueError as error:
                raise UserError(f"{path}:{number}: {error}") from None
    if not plan.arms:
        raise UserError(f"{path}: no arms")
    for measure, *arms in plan.minus + plan.primaries:
        if unknown := {*arms} - {*plan.titles, BASE, IMITATION, None}:
            raise UserError(f"{path}: {measure} is compared of {unknown.pop()}, which is no arm of this file")
    return plan


def _read_line(plan: Plan, words: list[str], title: str) -> None:
    """Add a line to the plan. Raises ValueError for a line that is none."""
    match words:
        case []:
            pass
        case ["all:" | "before:" | "after:", *rest]:
            setattr(plan, words[0].removesuffix(":"), rest)
        case ["gate:", outcome, share]:
            plan.gate = outcome, float(share)
        case ["match:", _, _, *_]:
            plan.matches.append(words[1:])
        case ["minus:", measure, arm, *others] if others:
            plan.minus += [(measure, arm, other) for other in others]
        case ["primary:", measure, arm, *other] if len(other) < 2:
            plan.primaries.append((measure, arm, other[0] if other else None))
        case ["earlier:", arm]:
            plan.titles[arm] = title
        case [arm, *settings] if not arm.endswith(":"):
            _add_arm(plan, arm, settings, title)
        case _:
            raise ValueError(f"{shlex.join(words)} is no line of a file of arms (tools/study/plan.py lists them)")


def _add_arm(plan: Plan, arm: str, settings: list[str], title: str) -> None:
    if arm in (*plan.titles, BASE, IMITATION, LAST, EVERY):
        raise ValueError(f"an arm cannot be called {arm}, which has another meaning or is an arm already")
    if wrong := [word for word in settings if "=" not in word]:
        raise ValueError(f"{wrong[0]!r}: expected NAME=VALUE")
    plan.arms[arm] = dict(word.split("=", 1) for word in settings)
    plan.titles[arm] = title
