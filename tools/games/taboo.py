"""Adversarial Taboo (arXiv 2404.10642): the attacker knows a word and makes the defender say it or guess wrongly."""

import importlib.util
import re
from functools import lru_cache
from pathlib import Path

from tools.games.game import GUESS, SECRET, Game, History, Outcome
from utils import ROOT, UserError, require

ATTACKER, DEFENDER = "attacker", "defender"
ATTACKER_WINS, DEFENDER_WINS = "attacker wins", "defender wins"
ATTACKER_BREAKS, TIED = "attacker breaks the rules", "tied game"
SUBSTRING, WHOLE_WORD = "substring", "word"
MATCHES = (SUBSTRING, WHOLE_WORD)

PREDICTION = re.compile(r"i know the word! it(?=.)")  # in lower-cased text
SENTENCE = re.compile(PREDICTION.pattern + r"[^\n]*?(?:[.!?](?=\s|$)|$)", re.IGNORECASE | re.MULTILINE)
MAX_GAP = 8  # largest number of characters between the prediction's "it" and the word
PREDICTION_BEGINNING = "i know the word"  # when the defender says this, play stops, whether the guess is right or not


class Taboo(Game):
    """`match` "substring" finds "art" in "start", as the paper's games were judged; "word" does not."""

    name, title, max_turns = "taboo", "Adversarial Taboo", 5
    prompt_file = ROOT / "configs" / "prompts.json"
    roles = (ATTACKER, DEFENDER)
    outcomes = (
        Outcome(ATTACKER_WINS, winner=ATTACKER),
        Outcome(DEFENDER_WINS, winner=DEFENDER),
        Outcome(ATTACKER_BREAKS, winner=DEFENDER, breach=True),
        Outcome(TIED),
    )
    example_task = "word"

    def __init__(self, match: str = SUBSTRING):
        if match not in MATCHES:
            raise UserError(f"match is {match!r}; it must be one of {', '.join(MATCHES)}")
        self.match = match

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        return {"target_word": task} if role == ATTACKER else {}

    def decide(self, task: str, history: History) -> str | None:
        role, text, word = history[-1]["role"], history[-1]["content"].lower(), task.strip().lower()
        predicts = PREDICTION.search(text) is not None
        if role == DEFENDER and predicts:
            return DEFENDER_WINS if self._predicts_right(text, word) else ATTACKER_WINS
        if predicts or self._contains(text, word):
            return ATTACKER_WINS if role == DEFENDER else ATTACKER_BREAKS
        return None

    def stops(self, task: str, history: History) -> bool:
        return history[-1]["role"] == DEFENDER and PREDICTION_BEGINNING in history[-1]["content"].lower()

    def answer(self, task: str) -> tuple[str, str]:
        return DEFENDER, f"I know the word! It is `{task}`!"

    def hint(self, role: str) -> str:
        return "" if role == ATTACKER else "A guess reads: I know the word! It is `word`!"

    def marks(self, task: str, text: str) -> list[tuple[str, int, int]]:
        forms = sorted(_forms(task), key=len, reverse=True)
        matches = re.finditer("|".join(map(re.escape, forms)), text, re.IGNORECASE)
        secrets = [(SECRET, *match.span()) for match in matches if self._counts(text, match.start(), match[0])]
        return secrets + [(GUESS, *match.span()) for match in SENTENCE.finditer(text)]

    def _predicts_right(self, text: str, word: str) -> bool:
        """Whether a derivative follows a prediction's "it" on the same line, after one to MAX_GAP characters."""
        forms = derivatives(word)
        for prediction in PREDICTION.finditer(text):
            end = prediction.end()
            gap = text[end : end + MAX_GAP].partition("\n")[0]
            for start in range(end + 1, end + 1 + len(gap)):
                if any(text.startswith(form, start) and self._counts(text, start, form) for form in forms):
                    return True
        return False

    def _contains(self, text: str, word: str) -> bool:
        """Whether any derivative is in the text. The four without quotes are enough."""
        for form in _forms(word):
            starts = (match.start() for match in re.finditer(f"(?={re.escape(form)})", text))
            if form in text and any(self._counts(text, start, form) for start in starts):
                return True
        return False

    def _counts(self, text: str, start: int, form: str) -> bool:
        """Whether the form at `start` counts. As a whole word, no two letters or digits may meet at its edges."""
        end = start + len(form)
        joined_before = start > 0 and text[start - 1].isalnum() and form[0].isalnum()
        joined_after = end < len(text) and text[end].isalnum() and form[-1].isalnum()
        return self.match == SUBSTRING or not (joined_before or joined_after)


def derivatives(word: str) -> list[str]:
    """The 16 lower-cased texts that count as `word`: itself, -ing, -ed and plural, bare and in three kinds of quotes.

    The plural is what TextBlob makes of the whole text, right or wrong. Raises ValueError for a blank word.
    """
    return [f"{quote}{form}{quote}" for quote in ("", '"', "'", "`") for form in _forms(word)]


@lru_cache(maxsize=1 << 16)
def _forms(word: str) -> list[str]:
    word = word.strip().lower()
    if not word:
        raise ValueError("the target word is blank")
    return [word, word + "ing", word + "ed", _inflect().pluralize(word).lower()]


@lru_cache(maxsize=1)
def _inflect():
    """TextBlob's module of inflection rules. Importing the whole package would import NLTK, which takes seconds."""
    require("textblob", "textblob")
    (folder,) = importlib.util.find_spec("textblob").submodule_search_locations
    spec = importlib.util.spec_from_file_location("textblob_inflect", Path(folder, "en", "inflect.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
