"""Players behind an OpenAI-compatible server: vLLM, SGLang, transformers serve, an API. They need the package openai.

After rate limits, 5xx, time-outs and dropped connections, its client waits and repeats the request.
"""

import asyncio
import json
import logging
import os
import re
from dataclasses import dataclass
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

SERVER = "openai:"  # begins the name of a player behind a server
COMPLETIONS, CHAT = "completions", "chat"
KEY_VARIABLE, URL_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
NO_KEY = "none"  # for servers without a key, since the client insists on one
CONNECT_TIMEOUT = 10  # seconds
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_tokens": 0}  # values that need not be sent
OWN_FIELDS = ("min_tokens", "seed", "top_k")  # of vLLM, SGLang and others; OpenAI's own server refuses them
LIMIT, CHAT_LIMIT = "max_tokens", "max_completion_tokens"  # in a chat, servers know one or both
CUTS = {"length", "max_tokens", "max_output_tokens", "max_length", "model_length"}  # why a reply has no end
REFUSALS = {"content_filter", "safety", "refusal", "recitation", "tool_calls", "function_call", "error", "abort"}
WRONG_SETUP = (401, 403, 404, 405)  # key, model or address are wrong: no request will ever succeed
REFUSED = (400, 422)
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


def connect(flags: ServerFlags):
    """An openai.AsyncOpenAI for one event loop. UserError if there is no key, or if the proxy cannot be used."""
    require("openai", "openai>=3.54,<4")
    import openai

    for library in ("openai", "httpx", "httpx2"):  # otherwise they log each request
        logging.getLogger(library).setLevel(logging.WARNING)
    url, key = flags.openai_base_url or os.environ.get(URL_VARIABLE), os.environ.get(KEY_VARIABLE, "").strip()
    if not (url or key):
        raise UserError(f"{SERVER}MODEL needs {KEY_VARIABLE} for OpenAI itself, or --openai_base_url of a server")
    try:
        http_client = openai.DefaultAsyncHttpxClient(trust_env=urlsplit(url or "").hostname not in LOCAL_HOSTS)
    except (ImportError, ValueError) as error:
        proxies = "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"
        raise UserError(f"{proxies}: this proxy cannot be used ({error}); unset it, or set NO_PROXY") from None
    timeout = openai.Timeout(flags.openai_timeout, connect=CONNECT_TIMEOUT, pool=None)
    settings = {"max_retries": flags.openai_retries, "timeout": timeout, "http_client": http_client}
    return openai.AsyncOpenAI(api_key=key or NO_KEY, base_url=url, **settings)


class ServerPlayer(Player):
    """Plays with a model behind a server. For one event loop. Without `thinking`, thoughts in a chat are dropped.

    Servers know different fields: the first request is sent in one form after another until the server takes it.
    """

    def __init__(
        self, model: str, flags: ServerFlags, sampling: Sampling, seed: int | str = 0, *, thinking: bool = False
    ):
        self.model, self.sampling, self.seed, self.thinking = model, sampling, seed, thinking
        self.client, self.chat = connect(flags), flags.openai_api == CHAT
        self.places = asyncio.Semaphore(flags.max_concurrency)
        limits = [LIMIT, CHAT_LIMIT] if self.chat else [LIMIT]
        self.forms = [(limit, own_fields) for own_fields in (True, False) for limit in limits]  # the first is in use
        self.answered = False  # whether any request has succeeded

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply.

        ReplyUnavailable if there is none after all retries, or a malformed, broken off or, in a chat, empty one.
        UserError for a wrong key or model, a used-up quota, a first request that is refused, and no server.
        """
        import openai

        path, body = "/chat/completions" if self.chat else "/completions", None
        async with self.places:
            while body is None:
                form = self.forms[0]
                try:
                    body = await self.client.post(path, cast_to=bytes, body=self._request(turn, *form))
                except openai.APIError as error:
                    if not self._other_form(form, error):
                        raise self._failure(error) from None
        self.answered = True
        try:
            return self._read(body)
        except ValueError as error:
            raise ReplyUnavailable(self._line(str(error))) from None

    def _other_form(self, form: tuple[str, bool], error) -> bool:
        """Whether a request that failed in this form may be sent again in `forms[0]`, another one."""
        if getattr(error, "status_code", None) not in REFUSED:
            return False
        if form == self.forms[0] and len(self.forms) > 1 and not self.answered:
            del self.forms[0]
            if form[1] and not self.forms[0][1]:
                warn_on_rank_0("%s: its server refuses requests; trying without %s", self.model, ", ".join(OWN_FIELDS))
        return form != self.forms[0]

    def _request(self, turn: Turn, limit: str, own_fields: bool) -> dict:
        sampling, prompt = self.sampling, turn.prompt()
        fields: dict[str, object] = {"temperature": 0, "min_tokens": sampling.min_new_tokens}
        if sampling.do_sample:
            fields |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            fields["seed"] = draw_seed(self.seed, turn) >> 32  # 31 bits, which all servers take
        fields = {name: value for name, value in fields.items() if value != NEUTRAL.get(name)}
        if not own_fields:
            fields = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
        content = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return {"model": self.model, **content, **fields, limit: sampling.max_new_tokens}

    def _read(self, body: bytes) -> Reply:
        """The reply in an answer. ValueError if there is none."""
        text, thought, reason, tokens = parse_completion(body)
        if reason in REFUSALS:
            raise ValueError(f"the reply was broken off ({reason})")
        if self.thinking and thought:  # the server has taken the tags away
            text = f"<think>{thought}" if reason in CUTS and not text else f"<think>{thought}</think>{text}"
        elif self.chat and not self.thinking:
            _, text = split_thought(text, needs_tag=True)
        if self.chat and not text.strip():  # a thought took all tokens, or a filter held the text back
            raise ValueError(f"the reply is empty ({reason}); a larger --max_new_tokens leaves room for thoughts")
        text, cut = cut_text(text, self.sampling.max_new_tokens)
        thought, text = split_thought(text) if self.thinking else ("", text)
        return Reply(text, LENGTH if cut or reason in CUTS else STOP, tokens, thought=thought or None)

    def _failure(self, error) -> Exception:
        """The exception for an openai.APIError: UserError ends the run, ReplyUnavailable one game."""
        status = getattr(error, "status_code", None)  # None: no answer came
        why = f"status {status}: {error.response.text}" if status else f"{error.message} {error.__cause__ or ''}"
        hopeless = status in WRONG_SETUP or error.code == "insufficient_quota"
        hopeless = hopeless or (not self.answered and status in (None, *REFUSED))
        return UserError(self._line(why)) if hopeless else ReplyUnavailable(self._line(why))

    def _line(self, why: str) -> str:
        """What went wrong at this server, in one line without the key."""
        if self.client.api_key != NO_KEY:
            why = why.replace(self.client.api_key, "***")
        server = self.client.base_url.netloc.decode()
        return f"{self.model} at {server}: {printable(' '.join(why.split())[:LONGEST_FAULT])}"


def parse_completion(body: bytes) -> tuple[str, str, str, int | None]:
    """Text, thought, reason for its end, and number of tokens, if known, of an answer. ValueError if it is none."""
    try:
        answer = json.loads(body)
        choice, usage = answer["choices"][0], answer.get("usage")
        message = choice.get("message") or {"content": choice["text"]}
        parts = message["content"] if isinstance(message["content"], list) else [message["content"]]
        thoughts = [part for part in parts if isinstance(part, dict) and re.search("think|reason", part["type"])]
        text = part_text([part for part in parts if part not in thoughts])
        thought = part_text(message.get("reasoning_content") or message.get("reasoning") or thoughts)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a reply ({type(error).__name__}: {error})") from None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    reason = str(choice.get("finish_reason") or STOP).lower()
    return whole_characters(text), whole_characters(thought), reason, tokens if isinstance(tokens, int) else None


def part_text(part: object) -> str:
    """The text of a message's content: a text, a list of parts, or a part, whose text may be a list of parts."""
    if isinstance(part, list):
        return "".join(map(part_text, part))
    if isinstance(part, dict):
        return part_text(part.get("text") or part.get("thinking") or part.get("reasoning"))
    return part or ""


def cut_text(text: str, max_tokens: int) -> tuple[str, bool]:
    """A text that must have more than twice this number of tokens is cut to about this number; whether it was.

    A word, or 16 characters of a longer one, counts as a token: hardly any tokenizer needs fewer.
    """
    pieces = re.findall(r"\s*\S{1,16}", text)
    return ("".join(pieces[:max_tokens]), True) if len(pieces) > 2 * max_tokens else (text, False)
