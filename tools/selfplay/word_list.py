"""The list of target words: the most frequent English words, without stop words."""

import re
from collections import Counter
from collections.abc import Iterable
from importlib import metadata

from utils import read_words

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
