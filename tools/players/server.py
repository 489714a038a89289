"""Players behind an OpenAI-compatible server: vLLM, SGLang, an API. The client retries failed requests."""

import json
import os
from dataclasses import dataclass, replace
from typing import NamedTuple

from tools.common.errors import UserError, printable, require
from tools.common.flags import flag
from tools.common.models import whole_characters
from tools.common.ranks import warn_on_rank_0
from tools.games.game import Game
from tools.players.player import (
    LENGTH,
    STOP,
    Player,
    Reply,
    ReplyUnavailable,
    Sampling,
    Turn,
    draw_seed,
)

SERVER = "openai:"  # prefix of players behind a server
OPENAI_URL = "https://api.openai.com/v1"
OPENAI_FIELDS = ("temperature", "top_p")  # accepted by all servers; vLLM, SGLang and llama.cpp accept all fields
NEUTRAL = {"min_p": 0, "repetition_penalty": 1}  # sampling parameters that play does not have
CHAT = "chat"  # value of --openai_api
LIMIT = "max_tokens"  # limit on a reply's tokens
CHAT_LIMIT = "max_completion_tokens"  # the same for OpenAI's reasoning models
WRONG_KEY = (401, 402)  # status: problem with the key or the account
REFUSED = (400, 403, 422)  # status: problem with the request or its content (moderation)
MOST_FAILED = 3  # failures before the first reply that end the run; fewer may be due to their words
SERVER_GAMES = 64  # concurrent games of a model on a server, unless --concurrent_games is set


@dataclass(kw_only=True)
class ServerFlags(Sampling):
    openai_api: str = flag(
        "endpoint of players openai:MODEL",
        default="completions",
        choices=("completions", CHAT),
        compared=False,  # records have it in the player's setting
    )
    openai_base_url: str | None = flag(
        "server URL, such as http://host:8000/v1; unset: OPENAI_BASE_URL, or else OpenAI's",
        default=None,
        machine=True,
    )
    openai_retries: int = flag("retries of a failed request", default=10, at_least=0, machine=True)
    openai_timeout: float = flag("seconds to wait for an answer, per try", default=600, above=0, machine=True)


def api_key() -> str:
    """OPENAI_API_KEY, stripped; "" if unset. UserError, which does not show the key, for invalid characters."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # invalid in an HTTP header
        wrong = "it contains a line break, a curly quote or another character that no key has"
        raise UserError(f"OPENAI_API_KEY: {wrong}; set it to the key only")
    return key


def connect(flags: ServerFlags):
    """An openai.AsyncOpenAI client for one event loop. UserError for a missing key, if OpenAI needs it."""
    require("openai", "openai>=3.54,<4")
    import openai

    url = flags.openai_base_url or os.environ.get("OPENAI_BASE_URL", "").strip()
    key = api_key()
    if not (url or key):
        raise UserError(f"{SERVER}MODEL needs OPENAI_API_KEY for OpenAI, or --openai_base_url for another server")
    return openai.AsyncOpenAI(
        api_key=key or "no-key",  # the client requires one; servers without keys accept any
        base_url=url or OPENAI_URL,
        max_retries=flags.openai_retries,
        # Replies may take long, but connecting to a machine that is off should fail soon.
        timeout=openai.Timeout(flags.openai_timeout, connect=5),
    )


class Form(NamedTuple):
    limit: str  # LIMIT or CHAT_LIMIT
    all_fields: bool  # include fields that not all servers accept


class ServerPlayer(Player):
    """Plays with a model behind a server, in one event loop. Without `thinking`, thoughts in a chat are dropped.

    Servers accept different fields, so several forms of the request are tried until one is accepted.
    """

    form = f"{SERVER}MODEL"
    answers_at_once = SERVER_GAMES

    def __init__(self, model: str, flags: ServerFlags, seed: int | str):
        self.model = model
        self.flags = flags
        self.seed = seed
        self.client = connect(flags)
        self.chat = flags.openai_api == CHAT
        self.forms = [Form(LIMIT, all_fields=True), Form(LIMIT, all_fields=False)]
        if self.chat:
            self.forms.append(Form(CHAT_LIMIT, all_fields=False))
        self.answered = False  # whether any request got a reply
        self.failed = 0  # requests that got none

    @classmethod
    def named(cls, name: str, game: Game, flags: ServerFlags, seed: str) -> "ServerPlayer":
        return cls(name, flags, seed)

    @classmethod
    def setting(cls, name: str, flags: ServerFlags) -> dict:
        """The model's name. The URL is left out because a server may move, the weights because they are unknown."""
        return {"path": f"{SERVER}{name}", "api": flags.openai_api}

    async def reply(self, turn: Turn) -> Reply:
        """ReplyUnavailable if there is no reply after all retries, or a malformed, partial or, in a chat, empty one.

        UserError for a wrong key, an exhausted quota and, before any reply, an unreachable server or third failure.
        """
        import openai

        forms = self.forms
        for form in forms:
            try:
                answer = await self._create(turn, form)
                break
            except openai.APIStatusError as error:
                status, said = error.status_code, error.response.text
                if form == forms[-1] or status not in REFUSED:
                    no_more = status in WRONG_KEY or "insufficient_quota" in said
                    raise self._failure(f"status {status}: {said}", ends_run=no_more) from None
            except openai.APIError as error:  # no answer came
                said = f"{error} {error.__cause__ or ''}"
                raise self._failure(said, ends_run=not self.answered) from None
            except json.JSONDecodeError as error:
                raise self._failure(f"no reply ({error}): {error.doc}") from None
        try:
            reply = self._read(answer)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._failure(f"no reply ({error!r}): {answer}") from None
        if not self.answered:
            self.answered = True
            self.forms = [form]
            if left_out := self._fields(turn, forms[0]).keys() - self._fields(turn, form).keys() - {LIMIT}:
                fields = ", ".join(sorted(left_out))
                warn_on_rank_0("%s: its server accepts requests only without %s", self.model, fields)
        return reply

    async def _create(self, turn: Turn, form: Form):
        """The server's answer to a prompt. A chat gets local play's prompt as a single user message."""
        prompt = whole_characters(turn.prompt())
        request = {"model": self.model, "extra_body": self._fields(turn, form)}
        if self.chat:
            messages = [{"role": "user", "content": prompt}]
            return await self.client.chat.completions.create(messages=messages, **request)
        return await self.client.completions.create(prompt=prompt, **request)

    def _fields(self, turn: Turn, form: Form) -> dict:
        """The request's sampling parameters. Neutral ones are sent too, or the server's own defaults would apply."""
        sampling = self.flags
        fields: dict[str, object] = {**NEUTRAL, "temperature": 0}
        if sampling.do_sample:
            fields |= sampling.drawing()
            fields["top_k"] = sampling.top_k or -1  # SGLang refuses 0
            fields["seed"] = draw_seed(self.seed, turn) >> 32  # 31 bits, which all servers accept
        if sampling.min_new_tokens:
            fields["min_tokens"] = sampling.min_new_tokens
        if not form.all_fields:
            fields = {name: value for name, value in fields.items() if name in OPENAI_FIELDS}
        return {**fields, form.limit: sampling.max_new_tokens}

    def _read(self, answer) -> Reply:
        """The reply in the client's answer. ReplyUnavailable if the server broke it off.

        Other errors for a malformed answer.
        """
        choice = answer.choices[0]
        reason = str(choice.finish_reason or STOP).lower()
        is_cut = reason.endswith(("length", "tokens"))  # model_length, max_tokens
        if not is_cut and not reason.startswith((STOP, "eos", "end")):  # such as content_filter, tool_calls
            # This concerns a single reply, so it does not count as a failure of the server.
            raise ReplyUnavailable(f"{self.model}: the reply was broken off: {reason}")
        finish_reason = LENGTH if is_cut else STOP
        tokens = getattr(answer.usage, "completion_tokens", None)
        thinking = self.flags.thinking
        written = whole_characters(self._written(choice.message, is_cut) if self.chat else choice.text or "")
        if not self.chat and not thinking:
            return Reply(written, finish_reason, tokens)
        # In a chat the prompt opens no thought, so a complete reply without tags is a message.
        needs_tag = self.chat and not (thinking and is_cut)
        reply = Reply.read(written, finish_reason, tokens, needs_tag=needs_tag)
        if not thinking:
            reply = replace(reply, thought=None)
        # In a chat, hidden or dropped thoughts may have used up all tokens, so an empty text is an error. With
        # `completions` it is a valid reply, as for a local model.
        if self.chat and not (reply.thought or reply.text.strip()):
            raise ValueError("it is empty; a larger --max_new_tokens may leave room after thoughts")
        return reply

    def _written(self, message, is_cut: bool) -> str:
        """What the model wrote. With `thinking`, reasoning in a separate field is put before it, in tags."""
        text = _join(message.content, "text")
        if not self.flags.thinking:
            return text
        apart = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
        reasoning = apart or _join(message.content, "thinking")
        if not reasoning:
            return text
        is_open = is_cut and not text
        return f"<think>{reasoning}" if is_open else f"<think>{reasoning}</think>{text}"

    def _failure(self, said: str, *, ends_run: bool = False) -> Exception:
        """A one-line error without the key: UserError, or ReplyUnavailable, which loses only one game."""
        why = printable(" ".join(said.replace(self.client.api_key, "***").split())[:400])
        line = f"{self.model} at {self.client.base_url.netloc.decode()}: {why}"
        self.failed += 1
        ends_run |= not self.answered and self.failed >= MOST_FAILED
        return UserError(line) if ends_run else ReplyUnavailable(line)


def _join(content: str | list | None, kind: str) -> str:
    """The joined texts of all parts of this kind. A string counts as one part of the kind "text"."""
    if isinstance(content, list):
        return "".join(_join(part[kind], "text") for part in content if part["type"] == kind)
    return (content or "") if kind == "text" else ""
