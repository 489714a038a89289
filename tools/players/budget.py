"""What players behind a server cost: an estimate before the first call, and a budget that stops at a limit.

Tokens are counted by the servers; the estimate has no tokenizer.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.games import prompts
from tools.games.game import Game
from tools.players.server_flags import is_server

LIKELY_REPLY = 60  # tokens of a message
LIKELY_CHARACTERS, FEWEST_CHARACTERS = 4, 3  # a token, of English text; the latter for the upper bound
PRIOR_GAMES = 4  # so many games' worth the estimate weighs against what games turn out to cost
MILLION = 1_000_000


@dataclass
class Cost:
    """Calls and tokens."""

    calls: float = 0
    prompt: float = 0
    completion: float = 0

    def add(self, other: "Cost", times: int = 1) -> None:
        self.calls += times * other.calls
        self.prompt += times * other.prompt
        self.completion += times * other.completion

    @property
    def tokens(self) -> float:
        return self.prompt + self.completion

    def describe(self, price_in: float | None, price_out: float | None) -> str:
        """In words, with the price if the prices of a million tokens are given."""
        text = f"{self.calls:,.0f} calls, {self.prompt:,.0f} prompt and {self.completion:,.0f} completion tokens"
        if price_in is None:
            return text
        return f"{text}, price {(self.prompt * price_in + self.completion * price_out) / MILLION:,.2f}"


class TokenBudget:
    """Counts the servers' tokens as they are spent, by game, and lets games begin while a limit leaves room."""

    def __init__(self):
        self.spent = Cost()
        self.in_flight: dict[int, float] = {}  # tokens so far of each game that is being played
        self.limit, self.exhausted = math.inf, False
        self.ended, self.ended_tokens = PRIOR_GAMES, 0.0

    def set_limit(self, tokens: float, likely_game: float) -> None:
        """Stop dealing out games at so many tokens; one game costs about `likely_game` as far as is known yet."""
        self.limit, self.ended_tokens = tokens, PRIOR_GAMES * likely_game

    def charge(self, game: int, prompt: int, completion: int) -> None:
        self.spent.add(Cost(1, prompt, completion))
        self.in_flight[game] = self.in_flight.get(game, 0) + prompt + completion

    def deal(self, games: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """The games, until there is no room for another one beside those that are being played."""
        for index, task in games:
            if self.limit < math.inf:
                mean = self.ended_tokens / self.ended
                to_come = mean + sum(max(0, mean - so_far) for so_far in self.in_flight.values())
                self.exhausted = self.spent.tokens + to_come > self.limit
            if self.exhausted:
                return
            self.in_flight[index] = 0
            yield index, task

    def end(self, game: int) -> None:
        self.ended += 1
        self.ended_tokens += self.in_flight.pop(game, 0)


class Assumed(NamedTuple):
    """What an estimate takes for granted."""

    messages: int  # of a game
    reply: int  # tokens of a message
    characters: int  # of a prompt's token

    def __str__(self) -> str:
        size = f"{self.messages} messages of {self.reply} tokens a game"
        return f"{size}, prompts at {self.characters} characters a token"


class Estimator:
    """What games cost, from the lengths of their prompts."""

    def __init__(self, game: Game, templates: prompts.Templates, max_turns: int, max_new_tokens: int):
        self.game, self.templates, self.max_turns = game, templates, max_turns
        limit = game.message_limit(max_turns)
        reply = min(LIKELY_REPLY, max_new_tokens)
        self.likely = Assumed(round(min(game.likely_messages, limit)), reply, LIKELY_CHARACTERS)
        self.most = Assumed(limit, max_new_tokens, FEWEST_CHARACTERS)

    def cost(self, names: Sequence[str], task: str, assumed: Assumed) -> Cost:
        """What a game of these players, of roles[0] and roles[1], costs."""
        cost = Cost()
        for place in range(assumed.messages):
            if is_server(names[place % 2]):
                history = [{"role": self.game.roles[number % 2], "content": ""} for number in range(place)]
                text = prompts.play_prompt(self.game, history, task, self.max_turns, self.templates)
                prompt = math.ceil(len(text) / assumed.characters) + place * assumed.reply
                cost.add(Cost(1, prompt, assumed.reply))
        return cost

    def describe(
        self, matches: Iterable[tuple[Sequence[str], Sequence[str]]], price_in: float | None, price_out: float | None
    ) -> str:
        """What games will cost, in words: of each match the names of its players, and the tasks to be played."""
        games, likely, most = 0, Cost(), Cost()
        for names, tasks in matches:
            games += len(tasks)
            for _, same in itertools.groupby(sorted(tasks, key=len), key=len):  # letters do not matter
                alike = list(same)
                for total, assumed in ((likely, self.likely), (most, self.most)):
                    total.add(self.cost(names, alike[0], assumed), len(alike))
        return (
            f"{games:,} games to play\n"
            f"likely:  {likely.describe(price_in, price_out)}\n"
            f"at most: {most.describe(price_in, price_out)}\n"
            f"assumed: {self.likely}; at most {self.most}; calls that are repeated after faults are not counted"
        )
