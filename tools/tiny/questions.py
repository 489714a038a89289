"""Reasoning outside the game: questions of multiple choice about what the facts of the embedded world imply. No torch.

They are asked by log-probability, in forms that no row of facts or games has. `python -m tools.tiny_world questions`
writes them as tasks of lm-evaluation-harness; data/tiny/reasoning/ holds those of the shipped lexicon.
"""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag
from tools.tiny.players import CHAT, FACT_QUERY, HINT, LEXICON, NAME, NOT, ROOT, Lexicon, Skill, load_lexicon
from utils import file_digest, plain_environment, write_records

TASKS = LEXICON.with_name("reasoning")
BEFORE_A_WORD, _ = NAME.split(" {}")
CHOICES, MOST = 4, 3  # choices of a question; questions of a kind about each word, where the lexicon has so many
TASK, METRIC = "tiny_{}", "acc,none"  # as the harness calls a kind, and the share of right answers
BASE, IMITATION = "base", "imitation"
REASONING, RESULTS = "reasoning", "results.json"  # folder of the answers of models; what is written last there
# The context of a question, its choices, the right one first, and of each choice which of the things asked for are
# true of it; all are true of the right one only.
Asked = tuple[str, Sequence[str], Sequence[Sequence[bool]]]
Ask = Callable[[Lexicon, str, random.Random], Iterator[Asked]]


def question(asked: Asked, word: str, held_out: bool, rng: random.Random) -> dict:
    """A question about a word as it is stored, its choices shuffled."""
    context, choices, fits = asked
    order = rng.sample(range(len(choices)), len(choices))
    return {
        "word": word,
        "context": context,
        "choices": [f" {choices[place]}" for place in order],
        "answer": order.index(0),
        "fits": [list(fits[place]) for place in order],
        "held_out": held_out,
    }


def inference(lexicon: Lexicon, word: str, rng: random.Random) -> Iterator[Asked]:
    """Which word do these clues mean: one, two, and three clues; the others fit as many of them as can be had."""
    for number in (1, 2, 3):
        clues = rng.sample(lexicon.clues(word), number)
        while len(fitting := [other for other in lexicon.words if set(clues) <= set(lexicon.clues(other))]) > 1:
            clues = rng.sample(lexicon.clues(word), number)
        others = rng.sample([other for other in lexicon.words if other not in fitting], len(lexicon.words) - 1)
        others.sort(key=lambda other: -len(set(clues) & set(lexicon.clues(other))))
        choices = [word, *others[: CHOICES - 1]]
        thoughts = "".join(f" {CHAT.format(clue)}" for clue in clues)
        fits = [[clue in lexicon.clues(choice) for clue in clues] for choice in choices]
        yield f"{FACT_QUERY}{thoughts} {BEFORE_A_WORD}", choices, fits


def recall(lexicon: Lexicon, word: str, rng: random.Random) -> Iterator[Asked]:
    """Which clue belongs to this word; the others belong to words that share a clue with it."""
    others = sorted({clue for kin in lexicon.kin(word) for clue in lexicon.clues(kin)} - set(lexicon.clues(word)))
    for clue in rng.sample(lexicon.clues(word), MOST):
        choices = [clue, *rng.sample(others, CHOICES - 1)]
        context = f"{FACT_QUERY} {NAME.format(word)} {CHAT.partition(' {}')[0]}"
        yield context, choices, [[choice == clue] for choice in choices]


def shared(lexicon: Lexicon, word: str, rng: random.Random) -> Iterator[Asked]:
    """Which of these words shares this clue with the word; the others share another one with it."""
    for clue in lexicon.shared[word]:
        fitting = [other for other in lexicon.sharing(clue) if other != word]
        others = [other for other in lexicon.kin(word) if other not in (word, *fitting)]
        if fitting and len(others) >= CHOICES - 1:
            choices = [rng.choice(fitting), *rng.sample(others, CHOICES - 1)]
            yield f"{FACT_QUERY} {clue} {word} {clue}", choices, [[choice in fitting] for choice in choices]


def odd(lexicon: Lexicon, word: str, rng: random.Random) -> Iterator[Asked]:
    """Which of four words does not belong: the choices are what is left without it, three that share the clue."""
    kin = lexicon.kin(word)
    strange = [other for other in lexicon.words if other not in kin]
    for clue in lexicon.shared[word]:
        fitting = [other for other in lexicon.sharing(clue) if other != word]
        if len(fitting) >= CHOICES - 2:
            belong = rng.sample([word, *rng.sample(fitting, CHOICES - 2)], CHOICES - 1)
            four = rng.sample([*belong, alien := rng.choice(strange)], CHOICES)
            left = sorted(four, key=lambda other: other != alien)
            choices = [" ".join(other for other in four if other != out) for out in left]
            yield f"{FACT_QUERY} {clue}", choices, [[out == alien] for out in left]


def elimination(lexicon: Lexicon, word: str, rng: random.Random) -> Iterator[Asked]:
    """Which word fits the first clue but not the second; of the others one fits both, one the second, one neither."""
    for clue in rng.sample(lexicon.shared[word], len(lexicon.shared[word])):
        fitting = [other for other in lexicon.sharing(clue) if other != word]
        seconds = [each for other in fitting for each in lexicon.shared[other] if each not in lexicon.shared[word]]
        for second in rng.sample(seconds, len(seconds)):
            both = [other for other in fitting if second in lexicon.shared[other]]
            only = [other for other in lexicon.sharing(second) if other not in fitting]
            neither = [other for other in lexicon.words if not {clue, second} & set(lexicon.shared[other])]
            if both and only:
                choices = [word, *map(rng.choice, (both, only, neither))]
                fits = [[clue in lexicon.shared[each], second not in lexicon.shared[each]] for each in choices]
                hint = NOT.format(HINT.format(clue).rstrip("."), second)
                yield f"{FACT_QUERY} {hint}. {BEFORE_A_WORD}", choices, fits
                break


KINDS: dict[str, Ask] = {each.__name__: each for each in (inference, recall, shared, odd, elimination)}


def ceiling(asked: dict, forget: float = Skill.forget) -> float:
    """The chance that a scripted player is right, who draws one of the choices that fit best.

    With the chance `forget` each thing asked for does not count.
    """
    things, right = len(asked["fits"][0]), 0.0
    for kept in itertools.product((False, True), repeat=things):
        fitting = [sum(true for true, heard in zip(fits, kept, strict=True) if heard) for fits in asked["fits"]]
        best = [place for place, number in enumerate(fitting) if number == max(fitting)]
        chance = forget ** kept.count(False) * (1 - forget) ** kept.count(True)
        right += chance * (asked["answer"] in best) / len(best)
    return right


@dataclass(kw_only=True)
class Questions:
    """Write the questions about a lexicon, a file for each kind."""

    output_dir: str = flag("folder to write to")
    lexicon: str = flag("file of what the world knows", default=str(LEXICON))
    seed: int = flag("of their draws", default=0)

    def run(self) -> None:
        for name, asked in make_questions(load_lexicon(Path(self.lexicon)), self.seed).items():
            path = Path(self.output_dir, f"{name}.jsonl")
            write_records(path, asked)
            print(f"{path}: {len(asked)} questions")


def make_questions(lexicon: Lexicon, seed: int) -> dict[str, list[dict]]:
    """All questions by kind, in the order of the words."""
    held_out = set(lexicon.held_out())
    made: dict[str, list[dict]] = {}
    for name, ask in KINDS.items():
        rng = random.Random(f"{seed} {name}")
        for word in lexicon.words:
            asked = itertools.islice(ask(lexicon, word, rng), MOST)
            made.setdefault(name, []).extend(question(each, word, word in held_out, rng) for each in asked)
    return made


# Asking them.


def tasks_digest(folder: Path = TASKS) -> str:
    """What the harness is told to ask, as the answers note it."""
    return file_digest(sorted(path for path in folder.rglob("*") if path.is_file()))


def reasoning(models: Mapping[str, str | Path]) -> list:
    """The command that asks models, by name, all questions; further flags can follow."""
    program = (sys.executable, "-m", "tools.evaluate_reasoning", "--dtype", "float32", "--batch_size", 128)
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
        models = {BASE: folder / "base", IMITATION: folder / "imitation" / "model"}
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
