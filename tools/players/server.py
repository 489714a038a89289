"""Players behind an OpenAI-compatible server: vLLM, SGLang, transformers serve, an API. They need the package openai.

After rate limits, 5xx, time-outs and dropped connections, the openai client waits and repeats the request. It honours
Retry-After.
"""

import asyncio
import json
import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tools.flags import flag
from tools.players.player import (
    LENGTH,
    STOP,
    Player,
    Reply,
    ReplyUnavailable,
    Sampling,
    Turn,
    draw_seed,
    split_thought,
)
from utils import UserError, printable, require, warn_on_rank_0, whole_characters

if TYPE_CHECKING:
    import openai  # whose import takes a second

SERVER = "openai:"  # begins the name of a player behind a server
COMPLETIONS, CHAT = "completions", "chat"
KEY_VARIABLE, URL_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
NO_KEY = "none"  # for servers without a key, since the client insists on one
CONNECT_TIMEOUT = 10  # seconds
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_tokens": 0}  # values that need not be sent
OWN_FIELDS = {"top_k", "min_tokens", "seed"}  # of vLLM, SGLang and others; OpenAI's own server refuses them
CHAT_LIMIT, LIMIT = "max_completion_tokens", "max_tokens"  # the first is of chat alone; servers know one or both
CUTS = {"length", "max_tokens", "max_output_tokens", "max_length", "model_length"}  # why a reply has no end
REFUSALS = {"content_filter", "safety", "refusal", "recitation", "tool_calls", "function_call", "error", "abort"}
WRONG_SETUP = (401, 403, 404)  # the key or the model is wrong: no request will ever succeed
PASSING = (408, 409, 425, 429)  # like 5xx: another request may succeed
LONGEST_FAULT = 300  # characters of a server's error message that are shown


@dataclass(kw_only=True)
class ServerFlags:
    """The flags of players openai:MODEL."""

    openai_api: str = flag("endpoint of players openai:MODEL", default=COMPLETIONS, choices=(COMPLETIONS, CHAT))
    openai_base_url: str | None = flag(
        f"the server, such as http://host:8000/v1; unset: {URL_VARIABLE}, else OpenAI's own",
        default=None,
        metavar="URL",
    )
    openai_retries: int = flag("how many times a failed request is repeated", default=10)
    openai_timeout: float = flag("seconds without an answer after which a request has failed", default=600)
    max_concurrency: int = flag("requests of each process to a model on the server at once", default=64)


def connect(flags: ServerFlags) -> "openai.AsyncOpenAI":
    """A client for one event loop. UserError if the key is missing, or if the environment's proxy cannot be used."""
    require("openai", "openai>=3.54,<4")
    import openai

    for library in ("openai", "httpx", "httpx2"):  # otherwise they log each request
        logging.getLogger(library).setLevel(logging.WARNING)
    url = flags.openai_base_url or os.environ.get(URL_VARIABLE)
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (url or key):
        raise UserError(f"{SERVER}MODEL needs {KEY_VARIABLE} for OpenAI itself, or --openai_base_url of a server")
    proxies = urlsplit(url or "").hostname not in LOCAL_HOSTS
    try:
        http_client = openai.DefaultAsyncHttpxClient(follow_redirects=False, trust_env=proxies)
    except (ImportError, ValueError) as error:
        names = [name for name in os.environ if name.upper() in PROXY_VARIABLES]
        raise UserError(f"{' '.join(names)}: this proxy cannot be used ({error}); unset it, or set NO_PROXY") from None
    return openai.AsyncOpenAI(
        api_key=key or NO_KEY,
        base_url=url,
        max_retries=flags.openai_retries,
        timeout=openai.Timeout(flags.openai_timeout, connect=CONNECT_TIMEOUT, pool=None),
        http_client=http_client,
    )


class ServerPlayer(Player):
    """Plays with a model behind a server. For one event loop. Without `thinking`, thoughts in a chat are dropped."""

    def __init__(
        self, model: str, flags: ServerFlags, sampling: Sampling, seed: int | str = 0, *, thinking: bool = False
    ):
        self.model, self.flags, self.sampling, self.seed, self.thinking = model, flags, sampling, seed, thinking
        self.client = connect(flags)
        self.places = asyncio.Semaphore(flags.max_concurrency)
        own_server = flags.openai_base_url or os.environ.get(URL_VARIABLE)
        self.unsent = set() if own_server else set(OWN_FIELDS)  # fields that the server does not know
        self.answered = False  # whether any request has succeeded

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply.

        ReplyUnavailable if the request failed after all retries, if the reply is malformed or held back, and for an
        empty reply of a chat model. UserError for a wrong key or model, a used-up quota, and, while no request was
        answered, if one is refused or no server is there.
        """
        import openai

        async with self.places:
            try:
                body = await self._ask(turn)
            except openai.APIError as error:
                raise self._failure(error) from None
        self.answered = True
        try:
            return self._read(body)
        except ValueError as error:
            raise ReplyUnavailable(self._line(str(error))) from None

    async def _ask(self, turn: Turn) -> bytes:
        """The body of the answer. A field that the server does not know is left out from then on."""
        import openai

        path = "/chat/completions" if self.flags.openai_api == CHAT else "/completions"
        while True:
            request = self._request(turn)
            try:
                return await self.client.post(path, cast_to=bytes, body=request)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                unknown = {name for name in request if name in error.response.text} & {*OWN_FIELDS, CHAT_LIMIT}
                unknown = unknown or {CHAT_LIMIT}.intersection(request)
                if not unknown or (self.answered and not unknown <= self.unsent):
                    raise
                if fields := (unknown - self.unsent) & OWN_FIELDS:
                    warn_on_rank_0("%s: its server does not know %s; playing without", self.model, ", ".join(fields))
                self.unsent |= unknown

    def _request(self, turn: Turn) -> dict:
        sampling, chat = self.sampling, self.flags.openai_api == CHAT
        fields: dict[str, object] = {"temperature": 0, "min_tokens": sampling.min_new_tokens}
        if sampling.do_sample:
            fields |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            fields["seed"] = draw_seed(self.seed, turn) >> 32  # 31 bits, which all servers take
        fields = {name: value for name, value in fields.items() if value != NEUTRAL.get(name)}
        fields = {name: value for name, value in fields.items() if name not in self.unsent}
        fields[CHAT_LIMIT if chat and CHAT_LIMIT not in self.unsent else LIMIT] = sampling.max_new_tokens
        prompt = turn.prompt()
        content = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        return {"model": self.model, **content, **fields}

    def _read(self, body: bytes) -> Reply:
        """The reply in an answer. ValueError if there is none."""
        text, thought, reason, tokens = parse_completion(body)
        if reason in REFUSALS:
            raise ValueError(f"the reply was broken off ({reason})")
        chat = self.flags.openai_api == CHAT
        if self.thinking and thought:  # the server has taken the tags away
            text = f"<think>{thought}" if reason in CUTS and not text else f"<think>{thought}</think>{text}"
        elif chat and not self.thinking:
            _, text = split_thought(text, needs_tag=True)
        if chat and not text.strip():  # a thought took all tokens, or a filter held the text back
            raise ValueError(f"the reply is empty ({reason}); a larger --max_new_tokens leaves room for thoughts")
        text, cut = cut_text(text, self.sampling.max_new_tokens)
        if cut:
            self.unsent.add(CHAT_LIMIT)  # the server does not heed it
        thought, text = split_thought(text) if self.thinking else ("", text)
        return Reply(text, LENGTH if cut or reason in CUTS else STOP, tokens, thought=thought or None)

    def _failure(self, error: "openai.APIError") -> Exception:
        """The exception for a failed request: UserError ends the run, ReplyUnavailable one game."""
        status = getattr(error, "status_code", None)
        if status is None:  # no answer came
            line = self._line(f"{error.message} {error.__cause__ or ''}")
            return ReplyUnavailable(line) if self.answered else UserError(line)
        line = self._line(f"status {status}: {error.response.text}")
        refused = status < 500 and status not in PASSING
        if status in WRONG_SETUP or error.code == "insufficient_quota" or (refused and not self.answered):
            return UserError(line)
        return ReplyUnavailable(line)

    def _line(self, why: str) -> str:
        """What went wrong at this server, in one line without the key."""
        if self.client.api_key != NO_KEY:
            why = why.replace(self.client.api_key, "***")
        server = self.client.base_url.netloc.decode()
        return f"{self.model} at {server}: {printable(' '.join(why.split())[:LONGEST_FAULT])}"


def parse_completion(body: bytes) -> tuple[str, str, str, int | None]:
    """Text, thought, reason for its end in lower case, and number of tokens, if known, of either endpoint's answer.

    ValueError for anything else.
    """
    try:
        answer = json.loads(body)
        choice = answer["choices"][0]
        message = choice.get("message") or {"content": choice["text"]}
        parts = message["content"] if isinstance(message["content"], list) else [message["content"]]
        thoughts = [part for part in parts if isinstance(part, dict) and re.search("think|reason", part["type"])]
        text = part_text([part for part in parts if part not in thoughts])
        thought = part_text(message.get("reasoning_content") or message.get("reasoning") or thoughts)
        tokens = usage.get("completion_tokens") if isinstance(usage := answer.get("usage"), dict) else None
        reason = str(choice.get("finish_reason") or STOP).lower()
        return whole_characters(text), whole_characters(thought), reason, tokens if type(tokens) is int else None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a reply ({type(error).__name__}: {error})") from None


def part_text(part: object) -> str:
    """The text of a message's content: a text, a list of parts, or a part, whose text may be a list of parts."""
    if isinstance(part, list):
        return "".join(map(part_text, part))
    if isinstance(part, dict):
        return part_text(part.get("text") or part.get("thinking") or part.get("reasoning"))
    return part if isinstance(part, str) else ""


def cut_text(text: str, max_tokens: int) -> tuple[str, bool]:
    """A text that must have more than twice this number of tokens is cut to about this number; whether it was.

    A word, or 16 characters of a longer one, counts as a token: hardly any tokenizer needs fewer.
    """
    pieces = re.findall(r"\s*\S{1,16}", text)
    return ("".join(pieces[:max_tokens]), True) if len(pieces) > 2 * max_tokens else (text, False)
