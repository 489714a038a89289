"""Lists of target words: the most frequent English words, without stop words; words held out of a list."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tools.selfplay.sidecar import OutputFile
from utils import file_sha256, flag, read_words, replacing, too_small

WORD_PACKAGES = {"wordfreq": "3.1.1", "stop-words": "2018.7.23"}  # other versions rank and leave out other words
WORD_SOURCE = (
    "wordfreq's list 'large' of English, most frequent first, without the English stop words of stop-words;"
    " wordfreq's data are under CC BY-SA 4.0 (see data/README.md)"
)


def frequent_words(
    ranked: Iterable[str], stop_words: Iterable[str], *, number: int, min_letters: int, counts: Counter
) -> list[str]:
    """The first `number` words of a ranked list that are letters a to z only, long enough, and no stop words.

    Adds to `counts` what was passed over and why. Raises ValueError if the list has fewer such words.
    """
    stop, words = set(stop_words), []
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
            return words
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
    # Optional packages, needed here only.
    from stop_words import get_stop_words
    from wordfreq import iter_wordlist

    return iter_wordlist("en", wordlist="large"), get_stop_words("en")


def write_words(path: str, words: Iterable[str]) -> None:
    """Write a word list, one a line."""
    with replacing(path) as file:
        file.writelines(f"{word}\n" for word in words)


def overlap(words: Iterable[str], path: str) -> dict:
    """How many different words these share with the list in a file, and the share of either list that this is."""
    ours, theirs = set(words), {word.lower() for word in read_words(path)}
    shared = len(ours & theirs)
    return {
        "compared_with": path,
        "words": len(ours),
        "words_there": len(theirs),
        "shared": shared,
        "share_of_words": shared / len(ours),
        "share_of_words_there": shared / len(theirs),
    }


@dataclass(kw_only=True)
class Words(OutputFile):
    """The most frequent English words, the most frequent first, without stop words; needs wordfreq and stop-words."""

    number: int = flag("of words", default=50_000)
    min_letters: int = flag("of a word", default=3)
    compare: str | None = flag("another word list, to print how many words are in both", default=None)

    def run(self) -> None:
        """Write the list."""
        if problems := too_small(self, number=1, min_letters=1):
            raise ValueError("; ".join(problems))
        self.check(*([self.compare] if self.compare else []))
        counts = Counter(dict.fromkeys(("words", "not_alphabetic", "too_short", "stop_words"), 0))
        ranked, stop_words = load_word_sources()
        words = frequent_words(ranked, stop_words, number=self.number, min_letters=self.min_letters, counts=counts)
        counts["words"] = len(words)
        write_words(self.output, words)
        settings = {"number": self.number, "min_letters": self.min_letters, "packages": WORD_PACKAGES}
        self.write_source(WORD_SOURCE, settings=settings, counts=counts)
        if self.compare:
            print(json.dumps(overlap(words, self.compare), ensure_ascii=False))


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
