"""The table of reasoning outside the game: accuracy by kind of question, with intervals over words. No torch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.matches.stats import estimate, mean_difference
from tools.matches.text import with_interval
from tools.tiny.questions import CHOICES, KINDS, TASK, TASKS, ceiling
from utils import file_digest, flag, iter_records, plain_environment

ROOT = Path(__file__).resolve().parents[2]
REASONING, RESULTS = "reasoning", "results.json"  # folder of the answers of models; what is written last there
METRIC = "acc,none"
BATCH = 128
Cells = list[str]


class Reasoning:
    """The scores of models on the questions, over the worlds of several seeds."""

    def __init__(self, folders: Sequence[Path], questions: Path = TASKS):
        self.folders = folders
        self.digest = file_digest(sorted(path for path in questions.rglob("*") if path.is_file()))
        self.asked = {kind: [each for _, each in iter_records(questions / f"{kind}.jsonl")] for kind in KINDS}

    def by_word(self, model: str, kinds: tuple[str, ...], held_out: bool | None = None) -> Mapping[str, list[float]]:
        """Number of questions and of right answers for each word, over all seeds; ValueError for other results."""
        words: dict[str, list[float]] = {}
        for folder in self.folders:
            for kind in kinds:
                path = folder / model / f"{TASK.format(kind)}.json"
                answers = json.loads(path.read_text(encoding="utf-8"))
                if answers["settings"]["own_tasks"] != self.digest:
                    raise ValueError(f"{path}: answers to other questions; delete {folder}, and ask again")
                for each, score in zip(self.asked[kind], answers["scores"][METRIC], strict=True):
                    if held_out in (None, each["held_out"]):
                        word = words.setdefault(each["word"], [0, 0.0])
                        word[0] += 1
                        word[1] += score
        return words

    def accuracy(self, model: str, kinds: Iterable[str] = KINDS, held_out: bool | None = None) -> str:
        """The share of right answers and its 95% interval."""
        sizes, totals = zip(*self.by_word(model, tuple(kinds), held_out).values(), strict=True)
        return with_interval(*estimate(sizes, totals))

    def difference(self, model: str, other: str) -> str:
        """By how much more of all questions a model answers right than another, and the interval."""
        ours, theirs = (self.by_word(name, tuple(KINDS)) for name in (model, other))
        sizes = [size for size, _ in ours.values()]
        totals = [total - theirs[word][1] for word, (_, total) in ours.items()]
        return with_interval(*mean_difference(sizes, totals), "+.3f")

    def line(self, title: str, model: str, others: Sequence[str | None]) -> Cells:
        """A model's line, with its differences from others."""
        return [
            title,
            *(self.accuracy(model, [kind]) for kind in KINDS),
            *(self.accuracy(model, held_out=held_out) for held_out in (None, False, True)),
            *(self.difference(model, other) if other else "" for other in others),
        ]

    def yardsticks(self, others: int) -> list[Cells]:
        """What drawing an answer gives, and what a scripted player with all facts gets who forgets as in the games."""
        ceilings = {kind: [ceiling(each) for each in asked] for kind, asked in self.asked.items()}
        every = [[each for own in ceilings.values() for each in own], *[[]] * 2]
        return [
            ["chance", *[f"{1 / CHOICES:.3f}"] * (len(KINDS) + 1), *[""] * (2 + others)],
            ["scripted player", *map(_mean, ceilings.values()), *map(_mean, every), *[""] * others],
        ]

    def head(self, others: Sequence[str]) -> Cells:
        """The names of the columns."""
        return ["model", *KINDS, "all", "played words", "held-out words", *(f"minus {other}" for other in others)]


def reasoning(models: Mapping[str, str | Path]) -> list:
    """The command that asks models, by name, all questions; further flags can follow."""
    program = (sys.executable, "-m", "tools.evaluate_reasoning", "--dtype", "float32", "--batch_size", BATCH)
    tasks = ("--include_path", TASKS, "--tasks", *map(TASK.format, KINDS))
    return [*program, *tasks, "--models", *(f"{name}={path}" for name, path in models.items())]


@dataclass(kw_only=True)
class Reason:
    """Ask all models of a loop the questions outside the game, and write its report anew with the answers."""

    output_dir: str = flag("OUTPUT of tools/run_spag.sh")

    def run(self) -> None:
        """Ask them; OSError if a program fails."""
        folder = Path(self.output_dir)
        epochs = sorted(folder.glob("epoch*/model"), key=lambda path: int(path.parent.name.removeprefix("epoch")))
        models = {"base": folder / "base", "imitation": folder / "imitation" / "model"}
        models |= {path.parent.name: path for path in epochs}
        models = {name: path / "merged" if (path / "merged").is_dir() else path for name, path in models.items()}
        at_once = min(len(models), os.cpu_count() or 1)
        asked = [*reasoning(models), "--output_dir", folder / REASONING, "--num_processes", at_once]
        asked += ["--overwrite", True]  # answers of models or to questions that have changed
        environment = plain_environment() | {"OMP_NUM_THREADS": "1"}
        for command in (asked, [sys.executable, ROOT / "tools" / "report.py", folder]):
            done = subprocess.run(list(map(str, command)), env=environment, stdout=subprocess.DEVNULL)
            if done.returncode:
                raise OSError(f"{command[1]} ended with status {done.returncode}")


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else ""
