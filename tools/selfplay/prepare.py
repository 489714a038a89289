"""The files that play and training start from, each with a file beside it that tells what it was made of."""

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.flags import flag
from tools.games import prompts
from tools.games.flags import GameChoice
from tools.games.game import game_setting, load_game
from tools.selfplay.rows import RowFlags, make_rows, refuse_overwriting
from utils import (
    BadRecordError,
    alpaca_to_row,
    file_sha256,
    iter_records,
    open_text,
    read_words,
    replacing,
    too_small,
    write_json,
    write_records,
)

WORD_PACKAGES = {"wordfreq": "3.1.1", "stop-words": "2018.7.23"}  # other versions rank and leave out other words
WORD_SOURCE = (
    "wordfreq's list 'large' of English, most frequent first, without the English stop words of stop-words;"
    " wordfreq's data are under CC BY-SA 4.0 (see data/README.md)"
)
# What the released code calls its prompts.
RULES, PLAY_INSTRUCTIONS, INSTRUCTIONS = RELEASED = "GAME_RULE_PROMPTS", "INSTRUCT_PROMPTS", "PLAYER_INSTRUCT_PROMPTS"


@dataclass(kw_only=True)
class OutputFile:
    """The file that a command makes."""

    output: str = flag("file to write; X_source.json beside X.EXT tells what it was made of")

    @property
    def source_path(self) -> Path:
        return Path(self.output).with_name(f"{Path(self.output).stem}_source.json")

    def check(self, *inputs: str, more: Iterable[str] = (), **least: int) -> None:
        """Raise ValueError for flags below their `least` values, and if a file would be written over an input."""
        if problems := too_small(self, **least):
            raise ValueError("; ".join(problems))
        refuse_overwriting(inputs, [self.output, self.source_path, *more])

    def write_source(self, source: str, *inputs: str, settings: dict, counts: dict, **more) -> None:
        """Write down what the output was made of, and print it; the output must be there."""
        record = {
            "made_by": f"tools.prepare_data {type(self).__name__.lower()}",
            "source": source,
            "settings": settings,
            "counts": counts,
            "inputs": [{"file": path, "sha256": file_sha256(path)} for path in inputs],
            "output": {"file": Path(self.output).name, "sha256": file_sha256(self.output)},
            **more,
        }
        write_json(self.source_path, record)
        print(json.dumps(record, ensure_ascii=False))


@dataclass(kw_only=True)
class Words(OutputFile):
    """The most frequent English words, the most frequent first, without stop words; needs wordfreq and stop-words."""

    number: int = flag("of words", default=50_000)
    min_letters: int = flag("of a word", default=3)
    compare: str | None = flag("another word list, to print how many words are in both", default=None)

    def run(self) -> None:
        self.check(*([self.compare] if self.compare else []), number=1, min_letters=1)
        words, counts = frequent_words(*load_word_sources(), number=self.number, min_letters=self.min_letters)
        write_words(self.output, words)
        settings = {"number": self.number, "min_letters": self.min_letters, "packages": WORD_PACKAGES}
        self.write_source(WORD_SOURCE, settings=settings, counts=counts)
        if self.compare:
            theirs = {word.lower() for word in read_words(self.compare)}
            shared = len(theirs.intersection(words))
            print(json.dumps({"compared_with": self.compare, "words_there": len(theirs), "shared": shared}))


def frequent_words(
    ranked: Iterable[str], stop_words: Iterable[str], *, number: int, min_letters: int
) -> tuple[list[str], Counter[str]]:
    """The first `number` words of a ranked list that are letters a to z only, long enough, and no stop words.

    Also counts them, and what was passed over and why. Raises ValueError if the list has fewer such words.
    """
    stop, words, counts = set(stop_words), [], Counter(words=number, not_alphabetic=0, too_short=0, stop_words=0)
    for word in ranked:
        if not re.fullmatch("[a-z]+", word):
            counts["not_alphabetic"] += 1
        elif len(word) < min_letters:
            counts["too_short"] += 1
        elif word in stop:
            counts["stop_words"] += 1
        else:
            words.append(word)
        if len(words) == number:
            return words, counts
    raise ValueError(f"--number {number}: the source has only {len(words)} words of at least {min_letters} letters")


def load_word_sources() -> tuple[Iterable[str], list[str]]:
    """All English words by falling frequency, and the stop words; ValueError where a package is missing or another."""
    install = "pip install " + " ".join(f"{name}=={version}" for name, version in WORD_PACKAGES.items())
    for name, version in WORD_PACKAGES.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise ValueError(f"words needs the package {name}: {install}") from None
        if installed != version:
            raise ValueError(f"words needs {name} {version}, not {installed}, whose words are others: {install}")
    from stop_words import get_stop_words
    from wordfreq import iter_wordlist

    return iter_wordlist("en", wordlist="large"), get_stop_words("en")


def write_words(path: str, words: Iterable[str]) -> None:
    with replacing(path) as file:
        file.writelines(f"{word}\n" for word in words)


@dataclass(kw_only=True)
class Split(OutputFile):
    """The words of a list without those that are drawn at random to be held out, for evaluation."""

    input: str = flag("word list, one a line")
    held_out: str = flag("file to write for the held-out words")
    number: int = flag("of held-out words", default=500)
    seed: int = flag("of the draw", default=0)

    def run(self) -> None:
        """Write both lists, in the order of the input; a word that is repeated counts once."""
        self.check(self.input, more=[self.held_out])
        words = list(dict.fromkeys(read_words(self.input)))
        if not 0 < self.number < len(words):
            raise ValueError(
                f"--number {self.number}: must be between 1 and {len(words) - 1}, the list's words less one"
            )
        drawn = set(random.Random(self.seed).sample(words, self.number))
        write_words(self.held_out, [word for word in words if word in drawn])
        write_words(self.output, [word for word in words if word not in drawn])
        self.write_source(
            "a word list without the words drawn to be held out",
            self.input,
            settings={"number": self.number, "seed": self.seed},
            counts={"words": len(words) - self.number, "held_out": self.number},
            held_out={"file": Path(self.held_out).name, "sha256": file_sha256(self.held_out)},
        )


@dataclass(kw_only=True)
class Tasks(GameChoice, OutputFile):
    """The word list of a game that can make one itself."""

    number: int = flag("of tasks at most", default=1000)
    seed: int = flag("of what is drawn", default=0)

    def run(self) -> None:
        self.check(number=1)
        game = self.load_game()
        tasks = game.tasks(self.number, random.Random(self.seed))
        for task in tasks:
            game.check_task(task)
        write_words(self.output, tasks)
        settings = {"game": game_setting(game), "number": self.number, "seed": self.seed}
        self.write_source(f"tasks of {game.title}", settings=settings, counts={"tasks": len(tasks)})


@dataclass(kw_only=True)
class Alpaca(OutputFile):
    """SFT rows of raw Alpaca records (instruction, perhaps input, output)."""

    input: str = flag("raw Alpaca records, JSON or JSONL")

    def run(self) -> None:
        self.check(self.input)
        counts = Counter(dict.fromkeys(("rows", "with_input", "empty_targets"), 0))
        write_records(self.output, self.rows(counts))
        self.write_source("raw Alpaca records, through utils.alpaca_to_row", self.input, settings={}, counts=counts)

    def rows(self, counts: Counter) -> Iterator[dict]:
        """The rows, counted; BadRecordError names the file and line of what is no Alpaca record."""
        for where, record in iter_records(self.input):
            try:
                row = alpaca_to_row(record)
            except ValueError as error:
                raise BadRecordError(f"{where}: {error}") from None
            counts["rows"] += 1
            counts["with_input"] += bool(record.get("input"))
            counts["empty_targets"] += not row["target"].strip()
            yield row


@dataclass(kw_only=True)
class Imitation(RowFlags, OutputFile):
    """Rows for --train_method SFTwithKL out of a stronger model's games: those of tools.assign_rewards."""

    episodes: list[str] = flag("files of episodes, as play writes them or the released ones")

    def run(self) -> None:
        inputs = [*self.episodes, str(self.prompt_templates or self.load_game().prompt_file)]
        self.check(*inputs)
        counts = make_rows(self, self.episodes, self.output)
        settings = {name: value for name, value in asdict(self).items() if name not in ("episodes", "output")}
        self.write_source("episodes, through tools.assign_rewards", *inputs, settings=settings, counts=counts)


@dataclass(kw_only=True)
class Prompts(OutputFile):
    """The prompt file of the released code, which is read and never run."""

    from_release: str = flag("utils.py of the released code")

    def run(self) -> None:
        self.check(self.from_release)
        templates = release_templates(self.from_release)
        write_json(self.output, templates)
        settings = {"templates_sha256": prompts.templates_digest(templates)}
        counts = {"rules": len(templates["rules"]), "instructions": len(templates) - 1}
        self.write_source("utils.py of the released code", self.from_release, settings=settings, counts=counts)


def release_templates(path: str) -> prompts.Templates:
    """The released prompts, three literals of a Python file that is parsed, never run, as a prompt file.

    Raises FileNotFoundError; ValueError for a file without them, and where they do not fit: play and training must
    word a player's instruction alike.
    """
    game, values = load_game(), dict[str, Any]()
    try:
        with open_text(path) as file:
            statements = ast.parse(file.read()).body
        for statement in statements:
            match statement:
                case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value) if name in RELEASED:
                    values[name] = ast.literal_eval(value)
        played, trained, rules = values[PLAY_INSTRUCTIONS], values[INSTRUCTIONS], values[RULES]
        templates = {"rules": list(rules) if isinstance(rules, tuple) else rules}
        templates |= {f"{role}_instruction": trained[role] for role in game.roles}
        alike = all(played[role] == prompts.play_request(trained[role]) for role in game.roles)
    except (SyntaxError, ValueError, TypeError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not the utils.py of the released code ({problem})") from None
    problems = prompts.template_problems(templates, game)
    if not alike:
        problems.append(f"{PLAY_INSTRUCTIONS} and {INSTRUCTIONS} tell a player different things; there is one text")
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return templates
