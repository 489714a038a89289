"""The base class Player, its input (Turn) and its output (Reply). No torch."""

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
SCRIPTED = "scripted:"  # prefix of players that are functions
SAMPLING = "sampling"  # tokens are drawn at random
TESTING = "testing"  # greedy decoding
OPENING_TAGS = tuple(prompts.THOUGHT_TAGS)
CLOSING_TAGS = tuple(prompts.THOUGHT_TAGS.values())


@dataclass(frozen=True)
class Turn:
    """Everything that the player who speaks next may know."""

    game: Game
    role: str
    history: History  # messages so far
    max_turns: int
    index: int  # of the game in its word list, from 0
    secrets: Mapping[str, str]  # what only this role may know
    templates: prompts.Templates | None = None  # None: the game's own

    def prompt(self, chat=None) -> str:
        """Play's prompt, plain or in a `ChatTemplate`. ReplyUnavailable if the template rejects a message."""
        join = chat.join_play_prompt if chat else prompts.join_play_prompt
        try:
            return join(self.history, self.role, self.rules(), self.instruction())
        except UserError as error:
            if not self.history:  # it would reject every game
                raise
            raise ReplyUnavailable(str(error)) from None

    def chat(self) -> list[dict[str, str]]:
        """The game as chat messages (`role` and `content`) in which this player is the assistant."""
        return prompts.chat_messages(self.history, self.role, self.rules(), self.instruction())

    def rules(self) -> str:
        return prompts.rule_text(self.templates or prompts.default_templates(self.game), self.max_turns)

    def instruction(self) -> str:
        templates = self.templates or prompts.default_templates(self.game)
        return prompts.instruction(templates, self.role, self.secrets, self.max_turns)


@dataclass(kw_only=True)
class Sampling(FlagGroup):
    """How prompts are written and replies sampled. Prompts are truncated to max_length - max_new_tokens.

    Flags with a `neutral` value are sampling parameters, named as in transformers' GenerationConfig, vLLM's
    SamplingParams and servers' JSON. The defaults of max_length, max_new_tokens, temperature and top_k are those of
    the released code.
    """

    task_type: str = flag("sample tokens, or decode greedily", default=SAMPLING, choices=(SAMPLING, TESTING))
    max_length: int = flag(
        "maximum tokens of prompt plus reply; longer prompts lose their beginning", default=2048, at_least=2
    )
    max_new_tokens: int = flag("maximum tokens of a reply", default=256, at_least=1)
    min_new_tokens: int = flag("minimum tokens of a reply", default=0, at_least=0)
    temperature: float = flag("sampling temperature", default=1.2, above=0, neutral=1.0)
    top_k: int = flag("sample from the k most likely tokens; 0: from all", default=50, at_least=0, neutral=0)
    top_p: float = flag(
        "sample from the most likely tokens with this total probability",
        default=1.0,
        above=0,
        at_most=1,
        neutral=1.0,
    )
    chat_template: bool = flag("write prompts in the tokenizers' chat templates", default=False, shared=True)
    thinking: bool = flag(
        "replies begin with a thought that the other player does not see; use about --max_new_tokens 1024",
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

    def drawing(self) -> dict[str, float]:
        """Sampling parameters by name."""
        names = [each.name for each in fields(Sampling) if each.metadata["neutral"] is not None]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Reply:
    """A player's message. With --thinking True, `thought` and `text` together are exactly what it wrote.

    Fields that are None are not stored. There are no log-probabilities of the sampled tokens, because the loss needs
    those at temperature 1 over all tokens, but play samples with temperature and top_k.
    """

    text: str  # the message, not yet stripped
    finish_reason: str  # STOP or LENGTH
    tokens: int | None  # sampled tokens, including the end token; None if a server does not count them
    prompt_cut: bool = False  # the prompt lost its beginning; always False for servers, which do not report it
    thought: str | None = None  # up to and including its closing tag; the other player never sees it

    @classmethod
    def read(
        cls, written: str, finish_reason: str, tokens: int | None, *, needs_tag: bool = False, **known
    ) -> "Reply":
        """Split all that a thinking player wrote into thought and text. `needs_tag` as in `split_thought`."""
        thought, text = split_thought(written, needs_tag=needs_tag)
        return cls(text, finish_reason, tokens, thought=thought or None, **known)

    def stored(self) -> dict:
        """The reply as stored in episodes; without a thought, its text is only in the history."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if self.thought is None:
            del fields["text"]
        return fields


def split_thought(text: str, *, needs_tag: bool = False) -> tuple[str, str]:
    """Split a text into its thought, up to and including the last closing tag, and the message after it ("" if none).

    A text without any tag is a message with `needs_tag`, and otherwise a thought that the prompt has opened. The last
    closing tag counts, so that no part of a second thought reaches the other player.
    """
    if needs_tag and not any(tag in text for tag in prompts.ALL_THOUGHT_TAGS):
        return "", text
    ends = [text.rfind(tag) + len(tag) for tag in CLOSING_TAGS if tag in text]
    end = max(ends, default=len(text))
    if any(tag in text[end:] for tag in OPENING_TAGS):  # another thought, which is not closed
        end = len(text)
    return text[:end], text[end:]


def thought_is_open(stored: Mapping) -> bool:
    """Whether a stored reply is a thought without its closing tag, so that its message is empty."""
    return "thought" in stored and not stored["thought"].endswith(CLOSING_TAGS)


def reply_without(special: frozenset[str], stored: dict) -> dict:
    """A stored reply with these strings removed from thought and text.

    Thought tags stay, although they are special tokens in some tokenizers.
    """
    if "thought" not in stored:
        return stored
    thought = without(special - prompts.ALL_THOUGHT_TAGS, stored["thought"])
    return {**stored, "thought": thought, "text": without(special, stored["text"])}


def draw_seed(seed: int | str, turn: Turn) -> int:
    """A 63-bit seed for one reply, which depends on game and message but not on the order of requests."""
    return random.Random(f"{seed}/{turn.index}/{len(turn.history)}").getrandbits(63)


class ReplyUnavailable(Exception):
    """There will be no reply, so this game stays unfinished while the others go on."""


class Player:
    """Anything that can speak in games, in many at a time."""

    at_terminal: ClassVar[bool] = False  # reads from this terminal: one game at a time, one process, no progress bar
    answers_at_once: int = 0  # messages that it works on concurrently; 0: it answers immediately
    engine_name: str | None = None  # of a model in this process
    max_concurrent_games: float = math.inf  # more games at once would slow it down
    special_texts: frozenset[str] = frozenset()  # special tokens of the player's tokenizer, as far as known

    async def reply(self, turn: Turn) -> Reply:
        """The next message of `turn.role`. ReplyUnavailable gives up this game; other exceptions end the run."""
        raise NotImplementedError

    def game_over(self, episode: Mapping) -> None:
        """Called with each finished game in which the player has spoken."""

    # For players named on the command line. `name` is without the kind's prefix, and `flags` are play's.

    form: ClassVar[str]  # what to write there, as in `openai:MODEL`

    @classmethod
    def named(cls, name: str, game: Game, flags: Any, seed: str) -> "Player":
        raise NotImplementedError

    @classmethod
    def setting(cls, name: str, flags: Any) -> dict | str:
        """The player as a setting of a stage: everything about it that games depend on.

        If it is a dict with "sha256", starts are compared by that alone.
        """
        raise NotImplementedError


class ModelPlayer(Player):
    """A model in this process. All models of a match are loaded together, not by `named`."""

    form = "model folder, hub name"

    @classmethod
    def setting(cls, name: str, flags: Sampling) -> dict:
        return model_setting(name)  # by content, because a model may have been retrained at the same path


Choose = Callable[[Turn], str | Awaitable[str]]


class ScriptedPlayer(Player):
    """A sync or async function writes the messages. With `thinking`, they may begin with a thought in tags."""

    form = f"{SCRIPTED}FILE.py:FUNCTION"

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
