"""Who speaks in a game: the Player protocol, and a scripted player for tests. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

STOP = "stop"  # the reply ended with an end token
LENGTH = "length"  # the reply was cut off at max_new_tokens
SAMPLING, TESTING = "sampling", "testing"  # how replies are drawn: at random, or the likeliest token each time


@dataclass(frozen=True)
class GameView:
    """What the player who is to speak may know besides the prompt."""

    role: str
    history: tuple[Mapping[str, str], ...]  # messages so far
    max_turns: int
    game: int  # number of the game in its word list, from 0
    target_word: str | None  # None for the defender


@dataclass(frozen=True)
class Reply:
    """One message as its player gave it."""

    text: str
    finish_reason: str  # STOP or LENGTH
    tokens: int  # sampled, the end token included
    prompt_cut: bool = False  # whether the prompt was too long and lost its beginning
    prompt_tokens: int | None = None  # as a server counted them; None for what costs nothing


class ReplyUnavailable(Exception):
    """A reply cannot be had: its game is left unfinished, the others go on."""


class PlayerUnusable(Exception):
    """A player can never answer: the run ends with this message. Finished games are safe."""


class Player(Protocol):
    """Anything that can answer a prompt; it is asked for many games at a time and may answer in any order."""

    async def reply(self, prompt: str, *, view: GameView) -> Reply:
        """The next message of `view.role`.

        ReplyUnavailable gives up this game; any other exception ends the whole run, and finished games are safe.
        """


class ScriptedPlayer:
    """Says what it was told to, for tests: `lines[game][k]` is its k-th message in a game. Remembers what it saw."""

    def __init__(self, lines: Mapping[int, Sequence[str]] | Sequence[Sequence[str]]):
        self.lines = lines
        self.asked: list[tuple[str, GameView]] = []

    async def reply(self, prompt: str, *, view: GameView) -> Reply:
        """The next line of the script."""
        self.asked.append((prompt, view))
        spoken = sum(message["role"] == view.role for message in view.history)
        text = self.lines[view.game][spoken]
        return Reply(text, STOP, len(text.split()))
