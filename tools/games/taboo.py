"""Adversarial Taboo (arXiv 2404.10642): the attacker knows a word and makes the defender say it or guess wrongly."""

import importlib.util
import re
from functools import lru_cache
from pathlib import Path

from tools.games.game import GUESS, ROOT, SECRET, Game, History, Outcome

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
        Outcome(DEFENDER_WINS, winner=DEFENDER, why="the guess was right"),
        Outcome(ATTACKER_BREAKS, winner=DEFENDER, breach=True),
        Outcome(TIED, why="nobody said the word or guessed it in time"),
    )
    example_task = "word"

    def __init__(self, match: str = SUBSTRING):
        if match not in MATCHES:
            raise ValueError(f"match is {match!r}; it must be one of {', '.join(MATCHES)}")
        self.match = match

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        return {"target_word": task} if role == ATTACKER else {}

    def decide(self, task: str, history: History) -> str | None:
        role, text, word = history[-1]["role"], history[-1]["content"].lower(), task.strip().lower()
        predicts = _predicts(text)
        if role == DEFENDER and predicts:
            return DEFENDER_WINS if self._predicts_right(text, word) else ATTACKER_WINS
        if predicts or self._contains(text, word):
            return ATTACKER_WINS if role == DEFENDER else ATTACKER_BREAKS
        return None

    def stops(self, task: str, history: History) -> bool:
        return history[-1]["role"] == DEFENDER and PREDICTION_BEGINNING in history[-1]["content"].lower()

    def hint(self, role: str) -> str:
        return "" if role == ATTACKER else "A guess reads: I know the word! It is `word`!"

    def explain(self, task: str, history: History, outcome: str) -> str:
        predicts = bool(history) and _predicts(history[-1]["content"])
        if outcome == ATTACKER_BREAKS:
            return "the attacker may not " + ("guess" if predicts else "say the target word or a form of it")
        if outcome == ATTACKER_WINS:
            return "the guess was wrong" if predicts else "the defender said the target word or a form of it"
        return super().explain(task, history, outcome)

    def marks(self, task: str, text: str) -> list[tuple[str, int, int]]:
        said = [
            (SECRET, *match.span())
            for match in _any_form(task).finditer(text)
            if self.match == SUBSTRING or _stands_alone(text, match.start(), match[0])
        ]
        return said + [(GUESS, *match.span()) for match in SENTENCE.finditer(text)]

    def facts(self, task: str, history: History, outcome: str) -> dict[str, bool]:
        guessed = bool(history) and history[-1]["role"] == DEFENDER and _predicts(history[-1]["content"])
        return {"right_guesses": outcome == DEFENDER_WINS, "first_turn_guesses": guessed and len(history) == 2}

    def _predicts_right(self, text: str, word: str) -> bool:
        """Whether a derivative follows a prediction's "it" on the same line, after one to MAX_GAP characters."""
        forms = derivatives(word)
        for prediction in PREDICTION.finditer(text):
            end = prediction.end()
            gap = text[end : end + MAX_GAP].partition("\n")[0]
            for start in range(end + 1, end + 1 + len(gap)):
                found = (form for form in forms if text.startswith(form, start))
                if any(self.match == SUBSTRING or _stands_alone(text, start, form) for form in found):
                    return True
        return False

    def _contains(self, text: str, word: str) -> bool:
        """Whether any derivative is in the text."""
        if self.match == SUBSTRING:  # all derivatives but the plural contain the word itself
            return word in text or _plural(word) in text
        for form in derivatives(word)[:4]:  # the others are these in quotes, where they stand alone too
            places = re.finditer(f"(?={re.escape(form)})", text)
            if any(_stands_alone(text, place.start(), form) for place in places):
                return True
        return False


def derivatives(word: str) -> list[str]:
    """The 16 lower-cased texts that count as `word`: itself, -ing, -ed and plural, bare and in three kinds of quotes.

    The plural is what TextBlob makes of the whole text, right or wrong. Raises ValueError for a blank word.
    """
    word = word.strip().lower()
    if not word:
        raise ValueError("the target word is blank")
    forms = [word, word + "ing", word + "ed", _plural(word)]
    return [f"{quote}{form}{quote}" for quote in ("", '"', "'", "`") for form in forms]


@lru_cache(maxsize=1 << 12)
def _any_form(word: str) -> re.Pattern:
    """A pattern that finds any derivative, the longest first. The four without quotes are enough."""
    forms = sorted(derivatives(word)[:4], key=len, reverse=True)
    return re.compile("|".join(map(re.escape, forms)), re.IGNORECASE)


def _predicts(text: str) -> bool:
    """Whether a message predicts the word, as the defender must to guess it."""
    return PREDICTION.search(text.lower()) is not None


def _stands_alone(text: str, start: int, form: str) -> bool:
    """Whether the form, found at `start`, is not part of a longer word: no two letters or digits meet at its edges."""
    end = start + len(form)
    joined_before = start > 0 and text[start - 1].isalnum() and form[0].isalnum()
    joined_after = end < len(text) and text[end].isalnum() and form[-1].isalnum()
    return not joined_before and not joined_after


@lru_cache(maxsize=1 << 16)
def _plural(word: str) -> str:
    return _inflect().pluralize(word).lower()


@lru_cache(maxsize=1)
def _inflect():
    """TextBlob's module of inflection rules. Importing the whole package would import NLTK, which takes seconds."""
    if not (package := importlib.util.find_spec("textblob")):
        raise ModuleNotFoundError("No module named 'textblob'", name="textblob")
    (folder,) = package.submodule_search_locations
    spec = importlib.util.spec_from_file_location("textblob_inflect", Path(folder, "en", "inflect.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
