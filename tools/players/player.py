"""Who speaks in a game: the Player protocol, what a player is told and what it gives back. No torch."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tools.games import prompts
from tools.games.game import Game, History

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate  # brings transformers

STOP = "stop"  # the reply ended with an end token
LENGTH = "length"  # the reply was cut off at max_new_tokens
SCRIPTED = "scripted:"  # begins the name of a player that the game itself provides
SAMPLING, TESTING = "sampling", "testing"  # how replies are drawn: at random, or the likeliest token each time


@dataclass(frozen=True)
class Turn:
    """All that the player who is to speak may know."""

    game: Game
    role: str
    history: History  # messages so far
    max_turns: int
    index: int  # of the game in its word list, from 0
    secrets: Mapping[str, str]  # what the game tells this role alone
    templates: prompts.Templates | None = None  # None: the game's own

    def prompt(self, chat: "ChatTemplate | None" = None) -> str:
        """The prompt of play, in the layout of a chat template where there is one."""
        if chat:
            return chat.join_play_prompt(self.history, self.role, self.rules(), self.instruction())
        return prompts.join_play_prompt(self.rules(), self.history, self.instruction())

    def rules(self) -> str:
        """The rule text, ending in a newline."""
        return prompts.rule_text(self.templates or prompts.default_templates(self.game), self.max_turns)

    def instruction(self) -> str:
        """What the player is told to do."""
        templates = self.templates or prompts.default_templates(self.game)
        return prompts.instruction(templates, self.role, self.secrets, self.max_turns)


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn; lengths in tokens."""

    max_length: int = 2048  # of prompt and reply together: prompts are cut to max_length - max_new_tokens
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    do_sample: bool = True  # False: the likeliest token each time; the three below are then unused
    temperature: float = 1.2
    top_k: int = 50  # 0: of all tokens
    top_p: float = 1.0


@dataclass(frozen=True)
class Reply:
    """One message as its player gave it."""

    text: str
    finish_reason: str  # STOP or LENGTH
    tokens: int  # sampled, the end token included
    prompt_cut: bool = False  # whether the prompt was too long and lost its beginning
    prompt_tokens: int | None = None  # as a server counted them; None for what costs nothing


class Tokens(Protocol):
    """The tokenizer of a model as local play uses it."""

    stop_ids: list[int]  # each ends a reply

    def encode_turn(self, turn: Turn) -> tuple[list[int], bool]:
        """The ids of the prompt of play, and whether it was too long and lost its beginning."""

    def decode(self, ids: list[int], prompt_cut: bool) -> Reply:
        """The reply of these ids, up to the first end token."""


def draw_seed(seed: int | str, turn: Turn) -> int:
    """The seed of one reply, the same whatever the order in which replies are asked for; 63 bits."""
    return random.Random(f"{seed}/{turn.index}/{len(turn.history)}").getrandbits(63)


class ReplyUnavailable(Exception):
    """A reply cannot be had: its game is left unfinished, the others go on."""


class PlayerUnusable(Exception):
    """A player can never answer: the run ends with this message. Finished games are safe."""


class Player(Protocol):
    """Anything that can speak in a game; it is asked for many games at a time and may answer in any order."""

    async def reply(self, turn: Turn) -> Reply:
        """The next message of `turn.role`.

        ReplyUnavailable gives up this game; any other exception ends the whole run, and finished games are safe.
        """


class ScriptedPlayer:
    """A player `scripted:NAME`, whose messages a function of the game chooses."""

    def __init__(self, choose: Callable[[Turn], str]):
        self.choose = choose

    async def reply(self, turn: Turn) -> Reply:
        """The chosen message, which counts no tokens."""
        return Reply(self.choose(turn), STOP, 0)
