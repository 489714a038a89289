"""Adversarial Taboo (arXiv 2404.10642): the attacker knows a word and makes the defender say it or guess wrongly."""

import importlib.util
import random
import re
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tools.games.game import GUESS, ROOT, SECRET, Game, History, Outcome
from utils import UserError, read_json_or_jsonl

ATTACKER, DEFENDER = "attacker", "defender"
ATTACKER_WINS, DEFENDER_WINS = "attacker wins", "defender wins"
ATTACKER_BREAKS, TIED = "attacker breaks the rules", "tied game"
SUBSTRING, WHOLE_WORD = "substring", "word"
MATCHES = (SUBSTRING, WHOLE_WORD)

PREDICTION = re.compile(r"i know the word! it(?=.)")  # in lower-cased text
SENTENCE = re.compile(PREDICTION.pattern + r"[^\n]*?(?:[.!?](?=\s|$)|$)", re.IGNORECASE | re.MULTILINE)
MAX_GAP = 8  # largest number of characters between the prediction's "it" and the word
PREDICTION_BEGINNING = "i know the word"  # when the defender says this, play stops, whether the guess is right or not
HINTS = "hints"  # the scripted player, and the option that names its file
HARMLESS = ("Hm.", "Oh?", "Ah, ok.", "Is it so?", "Hm, so it is.", "Oh, go on.")  # no part of a longer target word


class Taboo(Game):
    """`match` "substring" finds "art" in "start", as the paper's games were judged; "word" does not.

    `hints` is a file of games (episodes, as in data/README.md), of which the player `scripted:hints` gives the
    attacker's messages in their order. As defender it never guesses and says nothing of the word.
    """

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

    def __init__(self, match: str = SUBSTRING, hints: str | None = None):
        if match not in MATCHES:
            raise ValueError(f"match is {match!r}; it must be one of {', '.join(MATCHES)}")
        self.match, self.hints = match, hints

    def check_task(self, task: str) -> None:
        if self.hints and task.strip().lower() not in self._told:
            raise ValueError(f"{self.hints} has no game about {task!r}, whose hints scripted:{HINTS} would give")

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

    def scripted(self, name: str) -> Callable[[Any], str]:
        if name != HINTS:
            return super().scripted(name)
        if not self.hints:
            raise UserError(f"scripted:{HINTS} needs --game_options {HINTS}=FILE, a file of games")
        return self._hint_or_nothing

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

    @cached_property
    def _told(self) -> dict[str, list[str]]:
        """The hints for each word: what the attackers of its games say, without messages that break the rules."""
        told = defaultdict(list)
        for game in read_json_or_jsonl(self.hints):
            word = game["target_word"].strip().lower()
            own = [message for message in game["history"] if message["role"] == ATTACKER]
            told[word] += [message["content"] for message in own if self.decide(word, [message]) is None]
        return {word: hints for word, hints in told.items() if hints}

    def _hint_or_nothing(self, turn) -> str:
        """The message of scripted:hints. After the last hint, the attacker begins again."""
        if turn.role == ATTACKER:
            hints = self._told[turn.secrets["target_word"].strip().lower()]
            return hints[len(turn.history) // 2 % len(hints)]
        return random.Random(f"{turn.index}/{len(turn.history)}").choice(HARMLESS)

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
