"""Guess My City, which both win or lose together: the guesser asks, the answerer describes his city."""

import re

from tools.games.game import GUESS, SECRET, Game, History, Outcome, whole_word
from utils import ROOT

GUESSER, ANSWERER = "guesser", "answerer"
FOUND, NAMED, NOT_FOUND = "found", "answerer names the place", "not found"
QUESTION = re.compile(r"\bare you from `([^`]*)`\s*\?", re.IGNORECASE)


class GuessMyCity(Game):
    """A task is `City, Country, Region`; a guess may name the city alone or with the country."""

    name, title, max_turns = "guess_my_city", "Guess My City", 20
    prompt_file = ROOT / "configs" / "prompts" / "guess_my_city.json"
    roles = (GUESSER, ANSWERER)
    outcomes = (
        Outcome(FOUND, points=(1.0, 1.0)),
        Outcome(NAMED, breach=True, points=(0.0, 0.0)),
        Outcome(NOT_FOUND, points=(0.0, 0.0)),
    )
    example_task = "Lyon, France, Europe"

    def check_task(self, task: str) -> None:
        if len(_parts(task)) != 3 or not all(_parts(task)):
            raise ValueError(f"{task!r} is not a city; expected City, Country, Region")

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        return dict(zip(("city", "country", "region"), _parts(task), strict=True)) if role == ANSWERER else {}

    def decide(self, task: str, history: History) -> str | None:
        role, text = history[-1]["role"], history[-1]["content"]
        city, country, _ = _parts(task)
        if role == ANSWERER:
            return NAMED if any(whole_word(place).search(text) for place in (city, country)) else None
        right = {city.lower(), f"{city}, {country}".lower()}
        return FOUND if any(guess.strip().lower() in right for guess in QUESTION.findall(text)) else None

    def rewards(self, task: str, history: History, outcome: str) -> dict[str, float]:
        return dict.fromkeys(self.roles, 1.0) if outcome == FOUND else {}

    def answer(self, task: str) -> tuple[str, str]:
        return GUESSER, f"Are you from `{_parts(task)[0]}`?"

    def hint(self, role: str) -> str:
        return "A guess reads: Are you from `city`?" if role == GUESSER else "Never name the city or its country."

    def marks(self, task: str, text: str) -> list[tuple[str, int, int]]:
        city, country, _ = _parts(task)
        named = [match for place in (city, country) for match in whole_word(place).finditer(text)]
        return [(SECRET, *match.span()) for match in named] + [(GUESS, *m.span()) for m in QUESTION.finditer(text)]


def _parts(task: str) -> list[str]:
    return [part.strip() for part in task.split(",")]
