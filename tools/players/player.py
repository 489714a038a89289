"""Who speaks in a game: the base class Player, its input (Turn) and its output (Reply). No torch."""

import inspect
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from tools.games import prompts
from tools.games.game import Game, History
from utils import file_digest

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate  # brings transformers

STOP = "stop"  # the reply ended with an end token
LENGTH = "length"  # the reply was cut off at max_new_tokens
SCRIPTED = "scripted:"  # begins the name of a player that the game itself provides
SAMPLING, TESTING = "sampling", "testing"  # tokens are drawn at random, or the likeliest token is taken each time


@dataclass(frozen=True)
class Turn:
    """All that the player who speaks next may know."""

    game: Game
    role: str
    history: History  # messages so far
    max_turns: int
    index: int  # of the game in its word list, from 0
    secrets: Mapping[str, str]  # what only this role may know
    templates: prompts.Templates | None = None  # None: the game's own

    def prompt(self, chat: "ChatTemplate | None" = None) -> str:
        """The prompt of play, in the layout of `chat` if given."""
        if chat:
            return chat.join_play_prompt(self.history, self.role, self.rules(), self.instruction())
        return prompts.join_play_prompt(self.rules(), self.history, self.instruction())

    def rules(self) -> str:
        """The rule text, ending in a newline."""
        return prompts.rule_text(self.templates or prompts.default_templates(self.game), self.max_turns)

    def instruction(self) -> str:
        """The text that tells the player what to do."""
        templates = self.templates or prompts.default_templates(self.game)
        return prompts.instruction(templates, self.role, self.secrets, self.max_turns)


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled. Lengths are in tokens."""

    max_length: int = 2048  # prompt and reply together: prompts are cut to max_length - max_new_tokens
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    do_sample: bool = True  # False: the likeliest token each time, without the three settings below
    temperature: float = 1.2
    top_k: int = 50  # 0: all tokens
    top_p: float = 1.0


@dataclass(frozen=True)
class Reply:
    """One message of a player."""

    text: str
    finish_reason: str  # STOP or LENGTH
    tokens: int  # sampled tokens, with the end token
    prompt_cut: bool = False  # whether the prompt was too long and lost its beginning
    prompt_tokens: int | None = None  # counted by a server that may charge for them; None for all other players
    token_ids: list[int] | None = None  # the sampled tokens without the end token; None if they are not known
    retokenized: bool | None = None  # True if the tokenizer turns the stripped text into other ids; else None


class Tokens(Protocol):
    """A model's tokenizer, which turns prompts into token ids and token ids into replies."""

    stop_ids: list[int]  # each ends a reply

    def encode_turn(self, turn: Turn) -> tuple[list[int], bool]:
        """The token ids of the prompt of play, and whether it was too long and lost its beginning."""

    def decode(self, ids: list[int], prompt_cut: bool) -> Reply:
        """The reply that these token ids stand for, up to the first end token."""


def draw_seed(seed: int | str, turn: Turn) -> int:
    """The seed of one reply, 63 bits. It depends on the game and the message, not on the order of requests."""
    return random.Random(f"{seed}/{turn.index}/{len(turn.history)}").getrandbits(63)


class ReplyUnavailable(Exception):
    """There will be no reply. Its game is left unfinished, and the other games go on."""


class PlayerUnusable(Exception):
    """A player can never answer. The run ends with this message, and finished games are safe."""


class Player:
    """Anything that can speak in a game: the base class of all kinds of players.

    A player gets requests of many games at a time, and may answer them in any order. A new kind of player is a
    subclass and a line in KINDS of tools/selfplay/flags.py, which finds the class for a name on the command line. The
    class methods say what a name needs before any player is made; `flags` are a PlayFlags.
    """

    at_terminal: ClassVar[bool] = False  # reads from this terminal: one game at a time, one process, no progress bar
    games: int = 0  # so many games at once keep the player busy
    most_games: float = math.inf  # so many games can be played with it at once

    async def reply(self, turn: Turn) -> Reply:
        """The next message of `turn.role`.

        ReplyUnavailable gives up this game. Any other exception ends the run, and finished games are safe.
        """
        raise NotImplementedError

    def game_over(self, episode: Mapping) -> None:
        """Called with each finished game in which the player has spoken."""

    @classmethod
    def make(cls, name: str, lineup, seed: int | str) -> "Player":
        """The player of this name in `lineup`, a tools.selfplay.lineup.Lineup. `seed` is that of its draws."""
        raise NotImplementedError

    @classmethod
    def problems(cls, flags) -> list[str]:
        """What is wrong with the flags for such players, one phrase for each problem."""
        return []

    @classmethod
    def setting(cls, name: str, flags) -> dict | str:
        """The player's entry among the settings of a run: all of it that games depend on."""
        return name

    @classmethod
    def tokenizer(cls, name: str, flags) -> str | None:
        """The folder or hub name of the tokenizer that turns the player's prompts into token ids, if it is known."""
        return None


class ScriptedPlayer(Player):
    """A player `scripted:NAME`. A function of the game chooses its messages."""

    def __init__(self, choose: Callable[[Turn], str]):
        self.choose = choose

    @classmethod
    def make(cls, name: str, lineup, seed: int | str) -> "ScriptedPlayer":
        """The game's own player. Raises UserError if the game has none of this name."""
        return cls(lineup.game.scripted(name.removeprefix(SCRIPTED)))

    @classmethod
    def setting(cls, name: str, flags) -> dict | str:
        """A player of the game is a part of the game's entry. A function of one's own has the digest of its file."""
        if ":" not in name.removeprefix(SCRIPTED):
            return name
        choose = flags.load_game().scripted(name.removeprefix(SCRIPTED))
        return {"path": name, "sha256": file_digest([inspect.getfile(choose)])}

    async def reply(self, turn: Turn) -> Reply:
        """The chosen message, with 0 tokens."""
        return Reply(self.choose(turn), STOP, 0)
