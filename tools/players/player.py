"""Who speaks in a game: the base class Player, its input (Turn) and its output (Reply). No torch."""

import inspect
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from tools.common.errors import UserError
from tools.common.flags import FlagGroup, flag
from tools.common.models import model_setting, without
from tools.games import prompts
from tools.games.game import Game, History, load_member, member_setting

STOP = "stop"  # the reply ended with an end token
LENGTH = "length"  # the reply was cut off at max_new_tokens
SCRIPTED = "scripted:"  # begins the name of a player that is a function
SAMPLING = "sampling"  # tokens are drawn at random
TESTING = "testing"  # the likeliest token is taken each time
OPENING_TAGS = tuple(prompts.THOUGHT_TAGS)
CLOSING_TAGS = tuple(prompts.THOUGHT_TAGS.values())


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

    def prompt(self, chat=None) -> str:
        """The prompt of play, or that of a tools.games.chat.ChatTemplate. ReplyUnavailable if it refuses a message."""
        join = chat.join_play_prompt if chat else prompts.join_play_prompt
        try:
            return join(self.history, self.role, self.rules(), self.instruction())
        except UserError as error:
            if not self.history:  # it refuses every game
                raise
            raise ReplyUnavailable(str(error)) from None

    def chat(self) -> list[dict[str, str]]:
        """The game as a chat in which this player is the assistant: messages of `role` and `content`."""
        return prompts.chat_messages(self.history, self.role, self.rules(), self.instruction())

    def rules(self) -> str:
        return prompts.rule_text(self.templates or prompts.default_templates(self.game), self.max_turns)

    def instruction(self) -> str:
        templates = self.templates or prompts.default_templates(self.game)
        return prompts.instruction(templates, self.role, self.secrets, self.max_turns)


@dataclass(kw_only=True)
class Sampling(FlagGroup):
    """How prompts are written and replies sampled. Prompts are cut to max_length - max_new_tokens.

    A flag with a `neutral` value is a parameter with which tokens are drawn, named as in transformers'
    GenerationConfig, vLLM's SamplingParams and the servers' JSON. The defaults of max_length, max_new_tokens,
    temperature and top_k are those of the paper's released code.
    """

    task_type: str = flag("sample tokens, or take the likeliest", default=SAMPLING, choices=(SAMPLING, TESTING))
    max_length: int = flag(
        "tokens of prompt and reply together; longer prompts lose their beginning", default=2048, at_least=2
    )
    max_new_tokens: int = flag("largest number of tokens of a reply", default=256, at_least=1)
    min_new_tokens: int = flag("smallest number of tokens of a reply", default=0, at_least=0)
    temperature: float = flag("sampling temperature", default=1.2, above=0, neutral=1.0)
    top_k: int = flag("sample from the k likeliest tokens; 0: from all", default=50, at_least=0, neutral=0)
    top_p: float = flag(
        "sample from the likeliest tokens that have this total probability",
        default=1.0,
        above=0,
        at_most=1,
        neutral=1.0,
    )
    chat_template: bool = flag("True: prompts in the chat templates of the tokenizers", default=False, shared=True)
    thinking: bool = flag(
        "True: replies begin with a thought, which the other player does not read; it needs --max_new_tokens 1024",
        default=False,
        shared=True,
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.min_new_tokens <= self.max_new_tokens < self.max_length:
            raise UserError("--max_length must be above --max_new_tokens, and --min_new_tokens at most that")

    @property
    def do_sample(self) -> bool:
        return self.task_type == SAMPLING

    def drawing(self, *, with_neutral: bool = True) -> dict[str, float]:
        """The parameters with which tokens are drawn, by name; if asked, without those whose value changes nothing."""
        parameters = {}
        for each in fields(Sampling):
            value = getattr(self, each.name)
            neutral = each.metadata["neutral"]
            if neutral is not None and (with_neutral or value != neutral):
                parameters[each.name] = value
        return parameters


@dataclass(frozen=True)
class Reply:
    """One message of a player. With --thinking True, `thought` and `text` together are exactly what it wrote.

    A field that is None is not stored. There are no log-probabilities of the sampled tokens: the loss needs those at
    temperature 1 over all tokens, but play draws with temperature and top_k.
    """

    text: str  # the message, with blanks around it
    finish_reason: str  # STOP or LENGTH
    tokens: int | None  # sampled tokens, with the end token; None if a server does not count them
    # Whether the prompt was too long and lost its beginning. A server does not say so: of its replies this is False.
    prompt_cut: bool = False
    thought: str | None = None  # up to and including its closing tag; the other player never reads it

    @classmethod
    def read(
        cls, written: str, finish_reason: str, tokens: int | None, *, needs_tag: bool = False, **known
    ) -> "Reply":
        """The reply of a player that thinks, from all that it wrote. `needs_tag` as in `split_thought`."""
        thought, text = split_thought(written, needs_tag=needs_tag)
        return cls(text, finish_reason, tokens, thought=thought or None, **known)

    def stored(self) -> dict:
        """The reply as episodes hold it. Without a thought, its text is the message in the history."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if self.thought is None:
            del fields["text"]
        return fields


def split_thought(text: str, *, needs_tag: bool = False) -> tuple[str, str]:
    """The thought that begins a text, up to and including the last closing tag, and the message after it ("" if none).

    With `needs_tag`, a text without any tag is a message; otherwise its thought has begun in the prompt. The last
    closing tag counts, so that nothing of a second thought reaches the other player.
    """
    if needs_tag and not any(tag in text for tag in prompts.ALL_THOUGHT_TAGS):
        return "", text
    ends = [text.rfind(tag) + len(tag) for tag in CLOSING_TAGS if tag in text]
    end = max(ends, default=len(text))
    if any(tag in text[end:] for tag in OPENING_TAGS):  # a further thought, which has no end
        end = len(text)
    return text[:end], text[end:]


def thought_is_open(stored: Mapping) -> bool:
    """Whether a stored reply is a thought without its closing tag, so that its message is empty."""
    return "thought" in stored and not stored["thought"].endswith(CLOSING_TAGS)


def reply_without(special: frozenset[str], stored: dict) -> dict:
    """A stored reply whose thought and text hold none of these texts.

    The tags of the thought stay: in some tokenizers they are special tokens.
    """
    if "thought" not in stored:
        return stored
    thought = without(special - prompts.ALL_THOUGHT_TAGS, stored["thought"])
    return {**stored, "thought": thought, "text": without(special, stored["text"])}


def draw_seed(seed: int | str, turn: Turn) -> int:
    """The seed of one reply, 63 bits. It depends on the game and the message, not on the order of requests."""
    return random.Random(f"{seed}/{turn.index}/{len(turn.history)}").getrandbits(63)


class ReplyUnavailable(Exception):
    """There will be no reply. Its game is left unfinished, and the other games go on."""


class Player:
    """Anything that can speak in games, in many at a time."""

    at_terminal: ClassVar[bool] = False  # reads from this terminal: one game at a time, one process, no progress bar
    answers_at_once: int = 0  # the messages that it works on at the same time; 0: it answers at once
    max_concurrent_games: float = math.inf  # more games at once would slow it down
    special_texts: frozenset[str] = frozenset()  # what the player's tokenizer reads as special tokens, as far as known

    async def reply(self, turn: Turn) -> Reply:
        """The next message of `turn.role`. ReplyUnavailable gives up this game; other exceptions end the run."""
        raise NotImplementedError

    def game_over(self, episode: Mapping) -> None:
        """Called with each finished game in which the player has spoken."""

    # Of the kinds of players that the command line can name. `name` is what follows the kind's prefix there, and
    # `flags` are those of play, of which each kind reads its own.

    @classmethod
    def named(cls, name: str, game: Game, flags: Any, seed: str) -> "Player":
        raise NotImplementedError

    @classmethod
    def setting(cls, name: str, flags: Any) -> dict | str:
        """The player as a setting of a stage: all of it that games depend on."""
        raise NotImplementedError


class ModelPlayer(Player):
    """A model in this process. All models of a match are loaded together, so none is made by `named`."""

    @classmethod
    def setting(cls, name: str, flags: Sampling) -> dict:
        return model_setting(name)  # by content: a model that was trained again at the same path is another one


Choose = Callable[[Turn], str | Awaitable[str]]


class ScriptedPlayer(Player):
    """A function, plain or async, chooses the messages. With `thinking`, one may begin with a thought in tags."""

    def __init__(self, choose: Choose, thinking: bool = False):
        self.choose = choose
        self.thinking = thinking

    @classmethod
    def named(cls, name: str, game: Game, flags: Sampling, seed: str) -> "ScriptedPlayer":
        return cls(load_member(name), flags.thinking)

    @classmethod
    def setting(cls, name: str, flags: Sampling) -> dict:
        return member_setting(name)

    async def reply(self, turn: Turn) -> Reply:
        chosen = self.choose(turn)
        text = await chosen if inspect.isawaitable(chosen) else chosen
        return Reply.read(text, STOP, 0, needs_tag=True) if self.thinking else Reply(text, STOP, 0)
