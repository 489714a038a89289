"""A bargain: two buyers divide goods that are worth different amounts to them. Each is paid his share of the worth."""

import random
import re

from tools.games.game import GUESS, ROOT, Game, History, Outcome

FIRST, SECOND = "first_buyer", "second_buyer"
DEAL, UNFIT, NO_DEAL = "deal", "offer of what is not there", "no deal"
OFFER = re.compile(r"\[I keep:([^\]]*)\]", re.IGNORECASE)
ACCEPT = re.compile(r"\[accept\]", re.IGNORECASE)
GOODS = re.compile(r"(\w+):([1-9]\d?):(\d{1,3})/(\d{1,3})", re.ASCII)
KINDS = ("book", "hat", "ball", "lamp", "knife", "coat", "drum", "vase")
KEPT = re.compile(r"(\d{1,3}) (\w+)", re.ASCII)


class Bargain(Game):
    """A task is a list of goods: `book:2:5/1 hat:1:0/9` has two books, each worth 5 to the first, 1 to the second."""

    name, title, max_turns = "bargain", "A bargain", 6
    prompt_file = ROOT / "configs" / "prompts" / "bargain.json"
    roles = (FIRST, SECOND)
    outcomes = (
        Outcome(DEAL),
        Outcome(UNFIT, breach=True, points=(0.0, 0.0), why="an offer named goods that are not there"),
        Outcome(NO_DEAL, points=(0.0, 0.0), why="no offer was accepted in time"),
    )
    example_task = "book:2:4/1 hat:1:2/8"

    def check_task(self, task: str) -> None:
        goods = [GOODS.fullmatch(item) for item in task.split()]
        if not all(goods) or len({item[1].lower() for item in goods}) < len(goods):
            raise ValueError(f"{task!r} is not a list of goods; expected NAME:NUMBER:VALUE/VALUE, each name once")
        if not all(_worth(task, role, _stock(task)) for role in (0, 1)):
            raise ValueError(f"{task!r}: the goods are worth nothing to one of the buyers")

    def secrets(self, role: str, task: str, history: History) -> dict[str, str]:
        values = 3 + self.roles.index(role)
        return {"goods": ", ".join(f"{item[2]} {item[1]} (worth {item[values]} each)" for item in _goods(task))}

    def decide(self, task: str, history: History) -> str | None:
        text = history[-1]["content"]
        if ACCEPT.search(text) and len(history) > 1 and OFFER.search(history[-2]["content"]):
            return DEAL
        return UNFIT if OFFER.search(text) and _kept(task, text) is None else None

    def points(self, task: str, history: History, outcome: str) -> tuple[float, float]:
        if outcome != DEAL:
            return 0.0, 0.0
        offer, stock = history[-2], _stock(task)
        kept = _kept(task, offer["content"])
        rest = {name: number - kept.get(name, 0) for name, number in stock.items()}
        shares = (kept, rest) if offer["role"] == FIRST else (rest, kept)
        first, second = (_worth(task, role, share) / _worth(task, role, stock) for role, share in enumerate(shares))
        return first, second

    def rewards(self, task: str, history: History, outcome: str) -> dict[str, float]:
        return dict(zip(self.roles, self.points(task, history, outcome), strict=True))

    def hint(self, role: str) -> str:
        return "An offer reads: [I keep: 1 book, 2 hat]. You take the other's offer by [accept]."

    def explain(self, task: str, history: History, outcome: str) -> str:
        if outcome != DEAL:
            return super().explain(task, history, outcome)
        first, second = self.points(task, history, outcome)
        return f"{first:.0%} of the worth for the {FIRST}, {second:.0%} for the {SECOND}"

    def marks(self, task: str, text: str) -> list[tuple[str, int, int]]:
        return [(GUESS, *match.span()) for match in OFFER.finditer(text)]

    def tasks(self, number: int, rng: random.Random) -> list[str]:
        """Bargains over 3 kinds of goods, 1 to 4 pieces of each; a piece is worth 1 to 10 to either buyer."""

        def drawn(kind: str) -> str:
            return f"{kind}:{rng.randint(1, 4)}:{rng.randint(1, 10)}/{rng.randint(1, 10)}"

        return [" ".join(map(drawn, rng.sample(KINDS, 3))) for _ in range(number)]


def _goods(task: str) -> list[re.Match]:
    return list(GOODS.finditer(task))


def _stock(task: str) -> dict[str, int]:
    return {item[1].lower(): int(item[2]) for item in _goods(task)}


def _kept(task: str, text: str) -> dict[str, int] | None:
    """How many of each kind the last offer of a message keeps; None if there are not so many."""
    items = [part.strip() for part in OFFER.findall(text)[-1].split(",") if part.strip()]
    kept = {match[2].lower(): int(match[1]) for match in map(KEPT.fullmatch, items) if match}
    stock = _stock(task)
    fits = len(kept) == len(items) and all(number <= stock.get(name, -1) for name, number in kept.items())
    return kept if fits else None


def _worth(task: str, role: int, share: dict[str, int]) -> int:
    return sum(int(item[3 + role]) * share.get(item[1].lower(), 0) for item in _goods(task))
