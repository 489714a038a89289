"""What players behind a server cost: an estimate before the first call, and a meter that stops at a limit.

Tokens are counted by the servers; the estimate has no tokenizer.
"""

import argparse
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tools.games import taboo
from tools.players.server_flags import is_server

# What the estimate takes for likely: games won by GPT-4 had 2.9 messages of the winner (public counts of the paper's
# imitation games), so 6 in all; English text has about 4 characters a token. For the bound, 3.
LIKELY_MESSAGES, LIKELY_REPLY = 6, 60
LIKELY_CHARACTERS, FEWEST_CHARACTERS = 4, 3
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

    def describe(self, args: argparse.Namespace) -> str:
        """In words, with the price if the flags give prices."""
        text = f"{self.calls:,.0f} calls, {self.prompt:,.0f} prompt and {self.completion:,.0f} completion tokens"
        if args.price_in is None:
            return text
        price = (self.prompt * args.price_in + self.completion * args.price_out) / MILLION
        return f"{text}, price {price:,.2f}"


class Meter:
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
        for index, word in games:
            if not self._has_room():
                self.exhausted = True
                return
            self.in_flight[index] = 0
            yield index, word

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


def game_cost(
    names: Sequence[str], word: str, templates: taboo.Templates, *, turns: int, messages: int, reply: int, characters
) -> Cost:
    """Of one game of so many messages of `reply` tokens, between players of these names: attacker, defender."""
    cost = Cost()
    for place in range(min(messages, taboo.message_limit(turns))):
        if is_server(names[place % 2]):
            history = [{"role": taboo.ROLES[number % 2], "content": ""} for number in range(place)]
            text = taboo.play_prompt(history, word, turns, templates)
            cost.add(Cost(1, math.ceil(len(text) / characters) + place * reply, reply))
    return cost


def likely_game(args: argparse.Namespace, names: Sequence[str], templates: taboo.Templates, word="word") -> Cost:
    """What a game of these players is likely to cost."""
    reply = min(LIKELY_REPLY, args.max_new_tokens)
    how = {"messages": LIKELY_MESSAGES, "reply": reply, "characters": LIKELY_CHARACTERS}
    return game_cost(names, word, templates, turns=args.taboo_max_turns, **how)


def dearest_game(args: argparse.Namespace, names: Sequence[str], templates: taboo.Templates, word: str) -> Cost:
    """What a game of these players costs at most, if prompts have no fewer characters a token than is assumed."""
    how = {"messages": taboo.message_limit(args.taboo_max_turns), "reply": args.max_new_tokens}
    return game_cost(names, word, templates, turns=args.taboo_max_turns, characters=FEWEST_CHARACTERS, **how)


def estimate(
    args: argparse.Namespace, matches: Iterable[tuple[Sequence[str], Sequence[str]]], templates: taboo.Templates
) -> str:
    """What games will cost, in words: of each match the names of attacker and defender, and the words to be played."""
    games, likely, most = 0, Cost(), Cost()
    for names, words in matches:
        games += len(words)
        for length, same in itertools.groupby(sorted(words, key=len), key=len):  # the words' letters do not matter
            times, word = len(list(same)), "x" * length
            likely.add(likely_game(args, names, templates, word), times)
            most.add(dearest_game(args, names, templates, word), times)
    reply = min(LIKELY_REPLY, args.max_new_tokens)
    messages = taboo.message_limit(args.taboo_max_turns)
    return "\n".join(
        [
            f"{games:,} games to play",
            f"likely:  {likely.describe(args)}",
            f"at most: {most.describe(args)}",
            f"assumed: {min(LIKELY_MESSAGES, messages)} messages of {reply} tokens a game (at most {messages} of "
            f"{args.max_new_tokens}), prompts of {args.prompt_templates} at {LIKELY_CHARACTERS} characters a token "
            f"(at most: {FEWEST_CHARACTERS}); calls that are repeated after faults are not counted",
        ]
    )
