"""Adversarial Taboo (arXiv 2404.10642): the attacker knows a word and makes the defender say it or guess wrongly."""

import importlib.util
import re
from functools import lru_cache
from pathlib import Path

from tools.common.errors import UserError, require
from tools.common.files import ROOT
from tools.games.game import GUESS, SECRET, Game, History, Outcome

ATTACKER = "attacker"
DEFENDER = "defender"
ATTACKER_WINS = "attacker wins"
DEFENDER_WINS = "defender wins"
ATTACKER_BREAKS = "attacker breaks the rules"
TIED = "tied game"
SUBSTRING = "substring"
WHOLE_WORD = "word"
MATCHES = (SUBSTRING, WHOLE_WORD)
LOSS = "loss"
TIE = "tie"
WRONG_GUESSES = (LOSS, TIE)

# For lower-cased text. As released, a form of the word must begin 1 to 8 characters after "it", which leaves room for
# " is `" and the like. The lookahead consumes nothing, so a second guess that begins among them is found, too.
GUESS_START = re.compile(r"i know the word! it(?=(.{1,8}))")
# The whole sentence, for the report's highlights only.
GUESS_SENTENCE = re.compile(r"i know the word! it.[^\n]*?(?:[.!?](?=\s|$)|$)", re.IGNORECASE | re.MULTILINE)
# As released, this ends play if the defender says it. Without "! it" it is not a guess, so the game is tied unless the
# same message says the word.
HALF_A_GUESS = "i know the word"


class Taboo(Game):
    """`match` "substring" finds "art" in "start", as the paper's games were judged; "word" does not.

    A wrong guess ends the game: with `wrong_guess` "loss", as released, the attacker wins; with "tie" nobody does, so
    that vague hints which provoke wrong guesses do not pay.
    """

    name = "taboo"
    title = "Adversarial Taboo"
    max_turns = 5
    prompt_file = ROOT / "configs" / "prompts" / "taboo.json"
    roles = (ATTACKER, DEFENDER)
    outcomes = (
        Outcome(ATTACKER_WINS, winner=ATTACKER),
        Outcome(DEFENDER_WINS, winner=DEFENDER),
        Outcome(ATTACKER_BREAKS, winner=DEFENDER, breach=True),
        Outcome(TIED),
    )
    example_task = "word"

    def __init__(self, match: str = SUBSTRING, wrong_guess: str = LOSS):
        if match not in MATCHES:
            raise UserError(f"match is {match!r}; it must be one of {', '.join(MATCHES)}")
        if wrong_guess not in WRONG_GUESSES:
            raise UserError(f"wrong_guess is {wrong_guess!r}; it must be one of {', '.join(WRONG_GUESSES)}")
        self.match = match
        self.wrong_guess = wrong_guess

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        return {"target_word": task} if role == ATTACKER else {}

    def decide(self, task: str, history: History) -> str | None:
        """A defender's guess decides, whatever else the message says; otherwise a form of the word does.

        The guess is checked first, because a right guess says the word, which would otherwise lose the game. If a
        message has several guesses, one right guess is enough.
        """
        role = history[-1]["role"]
        text = history[-1]["content"].lower()
        guesses = GUESS_START.search(text) is not None
        if role == DEFENDER and guesses:
            if self._guesses_right(text, task):
                return DEFENDER_WINS
            return TIED if self.wrong_guess == TIE else ATTACKER_WINS
        if guesses or self._says(text, _forms(task)):
            return ATTACKER_WINS if role == DEFENDER else ATTACKER_BREAKS
        return None

    def stops(self, task: str, history: History) -> bool:
        return history[-1]["role"] == DEFENDER and HALF_A_GUESS in history[-1]["content"].lower()

    def answer(self, task: str) -> tuple[str, str]:
        return DEFENDER, f"I know the word! It is `{task}`!"

    def hint(self, role: str) -> str:
        return "" if role == ATTACKER else "A guess reads: I know the word! It is `word`!"

    def marks(self, task: str, text: str) -> list[tuple[str, int, int]]:
        forms = sorted(_forms(task), key=len, reverse=True)
        secrets = re.finditer("|".join(map(self._pattern, forms)), text, re.IGNORECASE)
        marks = [(SECRET, *match.span()) for match in secrets]
        return marks + [(GUESS, *match.span()) for match in GUESS_SENTENCE.finditer(text)]

    def _guesses_right(self, text: str, task: str) -> bool:
        """Whether a guess names the word: a derivative begins 1 to 8 characters after "it", on the same line."""
        said = [form for form in derivatives(task) if form in text]
        for guess in GUESS_START.finditer(text):
            positions = range(guess.end() + 1, guess.end(1) + 1)
            if any(self._is_at(position, text, form) for position in positions for form in said):
                return True
        return False

    def _is_at(self, position: int, text: str, form: str) -> bool:
        if self.match == SUBSTRING:
            return text.startswith(form, position)  # compiling a pattern per word would take most of the judge's time
        return re.compile(self._pattern(form)).match(text, position) is not None

    def _says(self, text: str, forms: list[str]) -> bool:
        said = [form for form in forms if form in text]
        if self.match == SUBSTRING:
            return bool(said)
        return any(re.search(self._pattern(form), text) for form in said)

    def _pattern(self, form: str) -> str:
        """A pattern for the form. For a whole word, no letter or digit may touch its edges."""
        whole = self.match == WHOLE_WORD
        before = r"(?<![^\W_])" if whole and form[0].isalnum() else ""
        after = r"(?![^\W_])" if whole and form[-1].isalnum() else ""
        return before + re.escape(form) + after


def derivatives(word: str) -> list[str]:
    """The 16 lower-case strings that count as `word`: itself, -ing, -ed and plural, bare and in three kinds of quotes.

    The plural is what TextBlob makes of it, right or wrong. Quotes matter only in a guess, where a form may begin with
    its quote at the last allowed position.
    """
    return [f"{quote}{form}{quote}" for quote in ("", '"', "'", "`") for form in _forms(word)]


@lru_cache(maxsize=1 << 16)  # room for all of data/target_words.txt
def _forms(word: str) -> list[str]:
    """The forms that count as the word. As released, endings are fixed: "makeed" is one of "make", "making" is not."""
    word = word.strip().lower()
    return [word, word + "ing", word + "ed", _inflect().pluralize(word).lower()]


@lru_cache(maxsize=1)
def _inflect():
    """TextBlob's inflection module, loaded alone because the package imports NLTK, which takes seconds."""
    require("textblob", "textblob")
    (folder,) = importlib.util.find_spec("textblob").submodule_search_locations
    spec = importlib.util.spec_from_file_location("textblob_inflect", Path(folder, "en", "inflect.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
