"""Guess My City, 20 Questions with places: the guesser asks, the answerer describes his city.

--game tools/examples/guess_my_city.py:GuessMyCity, with the tasks in tools/examples/cities.txt.

It shows a task of several parts. `check_task` refuses other lines of the list, `secrets` gives the parts to a role by
the names of slots in the prompt file, and `decide` judges by some of them. The report and a person at the terminal see
the whole line. So does a text `answer` of a prompt file, which the judge would then refuse: leave it out.
"""

import re
from pathlib import Path

from tools.games.game import History, Outcome, whole_word
from tools.games.twenty_questions import ANSWERER, FOUND, GUESSER, NOT_FOUND, TwentyQuestions

NAMED = "answerer names the place"


class GuessMyCity(TwentyQuestions):
    """A task is `City, Country, Region`; a guess may name the city alone or with the country."""

    name = "guess_my_city"
    title = "Guess My City"
    prompt_file = Path(__file__).with_suffix(".json")
    outcomes = (
        Outcome(FOUND, points=(1.0, 1.0)),
        Outcome(NAMED, breach=True, points=(0.0, 0.0)),
        Outcome(NOT_FOUND, points=(0.0, 0.0)),
    )
    example_task = "Lyon, France, Europe"
    guess = re.compile(r"\bare you from `([^`]*)`\s*\?", re.IGNORECASE)

    def check_task(self, task: str) -> None:
        if len(_parts(task)) != 3 or not all(_parts(task)):
            raise ValueError(f"{task!r} is not a city; expected City, Country, Region")

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        return dict(zip(("city", "country", "region"), _parts(task), strict=True)) if role == ANSWERER else {}

    def decide(self, task: str, history: History) -> str | None:
        role = history[-1]["role"]
        text = history[-1]["content"]
        city, country = self.forbidden(task)
        if role == ANSWERER:
            return NAMED if any(whole_word(place).search(text) for place in (city, country)) else None
        right = {city.lower(), f"{city}, {country}".lower()}
        return FOUND if any(guess.strip().lower() in right for guess in self.guess.findall(text)) else None

    def answer(self, task: str) -> tuple[str, str]:
        return GUESSER, f"Are you from `{_parts(task)[0]}`?"

    def hint(self, role: str) -> str:
        return "A guess reads: Are you from `city`?" if role == GUESSER else "Never name the city or its country."

    def forbidden(self, task: str) -> list[str]:
        return _parts(task)[:2]


def _parts(task: str) -> list[str]:
    return [part.strip() for part in task.split(",")]
