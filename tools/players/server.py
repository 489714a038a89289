"""Players behind an OpenAI-compatible server: vLLM, SGLang, an API. The client repeats requests that fail."""

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

SERVER = "openai:"  # begins the name of a player behind a server
OPENAI_URL = "https://api.openai.com/v1"
OPENAI_FIELDS = ("temperature", "top_p")  # that all servers take; vLLM and SGLang take those of Sampling.drawing too
LIMIT = "max_tokens"  # of a reply
CHAT_LIMIT = "max_completion_tokens"  # the same where OpenAI's reasoning models chat
WRONG_KEY = (401, 402)  # status: the key or the account
REFUSED = (400, 403, 422)  # status: the request, or what it says (moderation)
MOST_FAILED = 3  # failures before the first reply that end the run; one may be due to its word alone
SERVER_GAMES = 64  # games at once with a model on a server, unless --concurrent_games says otherwise


@dataclass(kw_only=True)
class ServerFlags(Sampling):
    openai_api: str = flag(
        "endpoint of players openai:MODEL",
        default="completions",
        choices=("completions", "chat"),
        compared=False,  # it is part of such a player in records
    )
    openai_base_url: str | None = flag(
        "URL of the server, such as http://host:8000/v1; unset: OPENAI_BASE_URL, else OpenAI's own",
        default=None,
        machine=True,
    )
    openai_retries: int = flag("how many times a failed request is repeated", default=10, at_least=0, machine=True)
    openai_timeout: float = flag("seconds to wait for an answer, in each try", default=600, above=0, machine=True)


def api_key() -> str:
    """OPENAI_API_KEY without blanks around it; "" if unset. UserError, without the key, if no header can hold it."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # no HTTP header can hold it
        wrong = "it holds a line end, a curly quote or another character that no key has"
        raise UserError(f"OPENAI_API_KEY: {wrong}; set it to the key alone")
    return key


def connect(flags: ServerFlags):
    """An openai.AsyncOpenAI for one event loop. UserError without a key for OpenAI itself, or if none can be used."""
    require("openai", "openai>=3.54,<4")
    import openai

    url = flags.openai_base_url or os.environ.get("OPENAI_BASE_URL", "").strip()
    key = api_key()
    if not (url or key):
        raise UserError(f"{SERVER}MODEL needs OPENAI_API_KEY for OpenAI itself, or --openai_base_url of a server")
    return openai.AsyncOpenAI(
        api_key=key or "no-key",  # a server without keys takes any key, and the client insists on one
        base_url=url or OPENAI_URL,
        max_retries=flags.openai_retries,
        # A long reply may take all its time, but a try at a machine that is off ends after 5 s.
        timeout=openai.Timeout(flags.openai_timeout, connect=5),
    )


class Form(NamedTuple):
    limit: str  # the name of the limit of a reply
    all_fields: bool  # also those that not all servers know


class ServerPlayer(Player):
    """Plays with a model behind a server, in one event loop. Without `thinking`, thoughts in a chat are dropped.

    Servers know different fields: requests are sent in one form after another until the server has taken one.
    """

    answers_at_once = SERVER_GAMES

    def __init__(self, model: str, flags: ServerFlags, seed: int | str):
        self.model = model
        self.flags = flags
        self.seed = seed
        self.client = connect(flags)
        self.chat = flags.openai_api == "chat"
        self.forms = [Form(LIMIT, all_fields=True), Form(LIMIT, all_fields=False)]
        if self.chat:
            self.forms.append(Form(CHAT_LIMIT, all_fields=False))
        self.answered = False  # whether there was a reply
        self.failed = 0  # requests without a reply

    @classmethod
    def named(cls, name: str, game: Game, flags: ServerFlags, seed: str) -> "ServerPlayer":
        return cls(name, flags, seed)

    @classmethod
    def setting(cls, name: str, flags: ServerFlags) -> dict:
        """The model's name; neither the URL, because a server may move, nor the weights, which are not known here."""
        return {"path": f"{SERVER}{name}", "api": flags.openai_api}

    async def reply(self, turn: Turn) -> Reply:
        """ReplyUnavailable if there is none after all retries, or a malformed, broken off or, in a chat, empty one.

        UserError for a wrong key, a used-up quota, and before the first reply for no server and the third failure.
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
                warn_on_rank_0("%s: its server takes requests only without %s", self.model, fields)
        return reply

    async def _create(self, turn: Turn, form: Form):
        """The answer to a prompt. A chat gets the prompt of local play as one user message."""
        prompt = whole_characters(turn.prompt())
        request = {"model": self.model, "extra_body": self._fields(turn, form)}
        if self.chat:
            messages = [{"role": "user", "content": prompt}]
            return await self.client.chat.completions.create(messages=messages, **request)
        return await self.client.completions.create(prompt=prompt, **request)

    def _fields(self, turn: Turn, form: Form) -> dict:
        sampling = self.flags
        fields: dict[str, object] = {"temperature": 0}
        if sampling.do_sample:
            fields = {**sampling.drawing(with_neutral=False)}
            fields["seed"] = draw_seed(self.seed, turn) >> 32  # 31 bits, which all servers take
        if sampling.min_new_tokens:
            fields["min_tokens"] = sampling.min_new_tokens
        if not form.all_fields:
            fields = {name: value for name, value in fields.items() if name in OPENAI_FIELDS}
        return {**fields, form.limit: sampling.max_new_tokens}

    def _read(self, answer) -> Reply:
        """The reply in the client's answer. ReplyUnavailable for one that the server broke off.

        If the answer is no reply, the error of what is missing in it.
        """
        choice = answer.choices[0]
        reason = str(choice.finish_reason or STOP).lower()
        is_cut = reason.endswith(("length", "tokens"))  # model_length, max_tokens
        if not is_cut and not reason.startswith((STOP, "eos", "end")):  # such as content_filter, tool_calls
            # A verdict on this one reply: it does not count as a server that gives none.
            raise ReplyUnavailable(f"{self.model}: the reply was broken off: {reason}")
        finish_reason = LENGTH if is_cut else STOP
        tokens = getattr(answer.usage, "completion_tokens", None)
        thinking = self.flags.thinking
        written = whole_characters(self._written(choice.message, is_cut) if self.chat else choice.text or "")
        if not self.chat and not thinking:
            return Reply(written, finish_reason, tokens)
        # In a chat the prompt opens no thought: a whole reply without tags is a message without one.
        needs_tag = self.chat and not (thinking and is_cut)
        reply = Reply.read(written, finish_reason, tokens, needs_tag=needs_tag)
        if not thinking:
            reply = replace(reply, thought=None)
        # In a chat, thoughts that are hidden or dropped may have taken all tokens, so an empty text is an error here.
        # At `completions` it is a reply, as it is for a local model.
        if self.chat and not (reply.thought or reply.text.strip()):
            raise ValueError("it is empty; a larger --max_new_tokens leaves room for thoughts")
        return reply

    def _written(self, message, is_cut: bool) -> str:
        """What the model wrote. With `thinking`, reasoning that the server holds apart stands in tags before it."""
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
        """What a server said, in one line without the key: UserError, or ReplyUnavailable, which loses one game."""
        why = printable(" ".join(said.replace(self.client.api_key, "***").split())[:400])
        line = f"{self.model} at {self.client.base_url.netloc.decode()}: {why}"
        self.failed += 1
        ends_run |= not self.answered and self.failed >= MOST_FAILED
        return UserError(line) if ends_run else ReplyUnavailable(line)


def _join(content: str | list | None, kind: str) -> str:
    """The texts of all parts of this kind, joined. A content that is a text counts as one part of the kind "text"."""
    if isinstance(content, list):
        return "".join(_join(part[kind], "text") for part in content if part["type"] == kind)
    return (content or "") if kind == "text" else ""
