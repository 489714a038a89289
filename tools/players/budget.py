"""What players behind a server cost: an estimate before the first call, and a budget that stops at a limit.

Tokens are counted by the servers; the estimate has no tokenizer.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
        """Add another cost, so many times."""
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
        self.ended, self.ended_tokens = 0, 0.0

    def set_limit(self, tokens: float, likely_game: float) -> None:
        """Stop dealing out games at so many tokens; one game costs about `likely_game` as far as is known yet."""
        self.limit = tokens
        self.ended, self.ended_tokens = PRIOR_GAMES, PRIOR_GAMES * likely_game

    def charge(self, game: int, prompt: int, completion: int) -> None:
        """Note what a call cost."""
        self.spent.add(Cost(1, prompt, completion))
        self.in_flight[game] = self.in_flight.get(game, 0) + prompt + completion

    def deal(self, games: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """The games, until there is no room for another one beside those that are being played."""
        for index, task in games:
            if not self._has_room():
                self.exhausted = True
                return
            self.in_flight[index] = 0
            yield index, task

    def end(self, game: int) -> None:
        """Note that a game has ended or was given up."""
        self.ended += 1
        self.ended_tokens += self.in_flight.pop(game, 0)

    def _has_room(self) -> bool:
        if self.limit == math.inf:
            return True
        mean = self.ended_tokens / self.ended
        still_to_come = sum(max(0, mean - so_far) for so_far in self.in_flight.values())
        return self.spent.tokens + still_to_come + mean <= self.limit


# --- the estimate --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimator:
    """What games cost, from the lengths of their prompts."""

    game: Game
    templates: prompts.Templates
    max_turns: int
    max_new_tokens: int

    @property
    def likely_reply(self) -> int:
        return min(LIKELY_REPLY, self.max_new_tokens)

    @property
    def likely_messages(self) -> float:
        return min(self.game.likely_messages, self.game.message_limit(self.max_turns))

    def likely_cost(self, names: Sequence[str], task: str) -> Cost:
        """What a game of these players, of roles[0] and roles[1], is likely to cost."""
        return self._cost(names, task, round(self.likely_messages), self.likely_reply, LIKELY_CHARACTERS)

    def cost_upper_bound(self, names: Sequence[str], task: str) -> Cost:
        """What a game costs at most, if prompts have no fewer characters a token than is assumed."""
        return self._cost(names, task, self.game.message_limit(self.max_turns), self.max_new_tokens, FEWEST_CHARACTERS)

    def _cost(self, names: Sequence[str], task: str, messages: int, reply: int, characters: int) -> Cost:
        cost = Cost()
        for place in range(messages):
            if is_server(names[place % 2]):
                history = [{"role": self.game.roles[number % 2], "content": ""} for number in range(place)]
                text = prompts.play_prompt(self.game, history, task, self.max_turns, self.templates)
                cost.add(Cost(1, math.ceil(len(text) / characters) + place * reply, reply))
        return cost

    def describe(
        self,
        matches: Iterable[tuple[Sequence[str], Sequence[str]]],
        *,
        price_in: float | None = None,
        price_out: float | None = None,
    ) -> str:
        """What games will cost, in words: of each match the names of its players, and the tasks to be played."""
        games, likely, most = 0, Cost(), Cost()
        for names, tasks in matches:
            games += len(tasks)
            for _, same in itertools.groupby(sorted(tasks, key=len), key=len):  # letters do not matter
                alike = list(same)
                likely.add(self.likely_cost(names, alike[0]), len(alike))
                most.add(self.cost_upper_bound(names, alike[0]), len(alike))
        messages = self.game.message_limit(self.max_turns)
        return "\n".join(
            [
                f"{games:,} games to play",
                f"likely:  {likely.describe(price_in, price_out)}",
                f"at most: {most.describe(price_in, price_out)}",
                f"assumed: {self.likely_messages:g} messages of {self.likely_reply} tokens a game (at most {messages} "
                f"of {self.max_new_tokens}), prompts at {LIKELY_CHARACTERS} characters a token (at most: "
                f"{FEWEST_CHARACTERS}); calls that are repeated after faults are not counted",
            ]
        )
