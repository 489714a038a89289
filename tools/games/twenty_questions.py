"""20 Questions, a cooperative game: the guesser asks, the answerer knows the thing."""

import re
from typing import ClassVar

from tools.common.files import ROOT
from tools.games.game import GUESS, SECRET, Game, History, Outcome, whole_word

GUESSER = "guesser"
ANSWERER = "answerer"
FOUND = "found"
SAID = "answerer says the word"
NO_ANSWER = "no answer"
NOT_FOUND = "not found"
ANSWER = re.compile(r"[\W_]*(yes|no)(?![^\W_])", re.IGNORECASE)


class TwentyQuestions(Game):
    name = "twenty_questions"
    title = "20 Questions"
    max_turns = 20
    prompt_file = ROOT / "configs" / "prompts" / "twenty_questions.json"
    roles = (GUESSER, ANSWERER)
    # Both roles win or lose together, so no outcome has a winner. --ties charges both roles for NOT_FOUND, but not for
    # a breach, which is only the answerer's fault.
    outcomes: ClassVar[tuple[Outcome, ...]] = (
        Outcome(FOUND, points=(1.0, 1.0)),
        Outcome(SAID, breach=True, points=(0.0, 0.0)),
        Outcome(NO_ANSWER, breach=True, points=(0.0, 0.0)),
        Outcome(NOT_FOUND, points=(0.0, 0.0)),
    )
    example_task = "word"
    guess = re.compile(r"\bis it `([^`]*)`\s*\?", re.IGNORECASE)

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        return {"target_word": task} if role == ANSWERER else {}

    def decide(self, task: str, history: History) -> str | None:
        role = history[-1]["role"]
        text = history[-1]["content"]
        if role == GUESSER:
            guesses = [guess.strip().lower() for guess in self.guess.findall(text)]
            return FOUND if task.strip().lower() in guesses else None
        # Only the whole word counts, so "apples" may be said about "apple"; Taboo's looser match is the release's.
        if whole_word(task).search(text):
            return SAID
        return None if ANSWER.match(text) else NO_ANSWER

    def rewards(self, task: str, history: History, outcome: str) -> dict[str, float]:
        """Pays both, whereas the base class pays only a winner."""
        return dict.fromkeys(self.roles, 1.0) if outcome == FOUND else {}

    def answer(self, task: str) -> tuple[str, str]:
        return GUESSER, f"Is it `{task}`?"

    def hint(self, role: str) -> str:
        return "A guess reads: Is it `word`?" if role == GUESSER else "Begin each answer with Yes or No."

    def marks(self, task: str, text: str) -> list[tuple[str, int, int]]:
        secrets = [(SECRET, *match.span()) for match in whole_word(task).finditer(text)]
        return secrets + [(GUESS, *match.span()) for match in self.guess.finditer(text)]
