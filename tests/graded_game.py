"""A game whose rewards are shares: one player divides coins, and the other takes the offer or not. And a picky one."""

import re

from tools.games.game import Game, Outcome
from tools.games.taboo import Taboo

TEMPLATES = {
    "rules": ["Divide the coins in {max_turns} turns.\n"],
    "divider_instruction": "Divide {coins} coins. Write [keep N].",
    "taker_instruction": "Write [accept] or [refuse].",
}


class Divide(Game):
    """A task is the number of coins. `[accept]` pays the last `[keep N]`: N coins to the divider, the rest to him."""

    name, title, max_turns, example_task = "divide", "Divide", 3, "10"
    prompt_file, roles = None, ("divider", "taker")
    outcomes = (Outcome("deal"), Outcome("no deal", points=(0.0, 0.0)))

    def secrets(self, role, task, history):
        return {"coins": task} if role == "divider" else {}

    def decide(self, task, history):
        return "deal" if "[accept]" in history[-1]["content"] and self._share(task, history) is not None else None

    def rewards(self, task, history, outcome):
        return dict(zip(self.roles, self.points(task, history, outcome), strict=True))

    def points(self, task, history, outcome):
        share = self._share(task, history) if outcome == "deal" else None
        return (0.0, 0.0) if share is None else (share, 1.0 - share)

    def _share(self, task, history):
        offers = [re.search(r"\[keep (\d+)\]", message["content"]) for message in history]
        return next((min(1.0, int(offer[1]) / int(task)) for offer in reversed(offers) if offer), None)


class Picky(Taboo):
    def check_task(self, task):
        raise ValueError("no word is good enough")
