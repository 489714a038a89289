"""The connection to an OpenAI-compatible server, and what of its answers can be a message of a game.

Nothing that a server answers is trusted: its length, its shape, its numbers.
"""

import asyncio
import os
import reprlib
import resource
import time
from typing import Any, NamedTuple, TypeGuard

import httpx2  # what openai sends its requests with
import openai

from tools.games.game import LONE_SURROGATE
from tools.players.player import LENGTH, STOP
from tools.players.server_flags import KEY_VARIABLE
from utils import warn_on_rank_0

CONNECT_TIMEOUT = 10  # seconds
KEEP_ALIVE = 3  # seconds of an idle connection: vLLM closes it after 5, perhaps with a request on its way
TOKENIZE_TIMEOUT = 10  # seconds for a question that is no part of the game
BODY_LIMIT = 1 << 22  # bytes of an answer, decompressed
MESSAGE_LIMIT = 100_000  # characters of a reply
MOST_TOKENS = 10**9  # that a call may take; more is absurd


class BadReplyError(Exception):
    """A server answered with something that is no reply."""


class Answer(NamedTuple):
    """What a server returned for one request; nothing of it is checked yet."""

    text: Any
    finish_reason: Any
    usage: dict
    token_ids: Any


class LimitedClient(openai.DefaultAsyncHttpxClient):
    """Reads no more of an answer than BODY_LIMIT."""

    async def send(self, request, **settings):
        """Send a request; BadReplyError for too long an answer."""
        response = await super().send(request, **settings | {"stream": True})
        body = bytearray()
        try:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > BODY_LIMIT:
                    raise BadReplyError(f"not a reply: longer than {BODY_LIMIT:,} bytes")
        finally:
            await response.aclose()
        of_body = ("content-encoding", "content-length", "transfer-encoding")
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in of_body]
        return httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


class Server:
    """One base URL, and whether it answers."""

    def __init__(self, url: str | None, *, key: str | None = None, connections: int):
        self.own = key is not None  # one of this process, on loopback
        self.key = key or os.environ.get(KEY_VARIABLE)
        limits = httpx2.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEP_ALIVE
        )
        self.http = LimitedClient(limits=limits, follow_redirects=False, trust_env=not self.own)
        self.client = openai.AsyncOpenAI(
            api_key=self.key or "none",  # the client insists on one; not all servers do
            base_url=url,
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT),  # the whole request has its deadline
            http_client=self.http,
            max_retries=0,  # all is retried here: its own retries know neither other servers nor bad replies
        )
        self.name = self.client.base_url.netloc.decode()
        self.resting_until = 0.0

    @property
    def rests(self) -> bool:
        return time.monotonic() < self.resting_until

    async def count_tokens(self, model: str, prompt: str) -> int | None:
        """The prompt's tokens without special ones, as the server's tokenizer has them; None where it does not say."""
        url = self.client.base_url.join("/tokenize")  # where vLLM and SGLang have it
        question = {"model": model, "prompt": prompt, "add_special_tokens": False}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            asked = self.http.post(url, json=question, headers=headers, timeout=TOKENIZE_TIMEOUT)
            response = await asyncio.wait_for(asked, TOKENIZE_TIMEOUT)
            return int(response.raise_for_status().json()["count"])
        except (TimeoutError, httpx2.HTTPError, BadReplyError, ValueError, LookupError, TypeError, RecursionError):
            return None


def allow_open_files(number: int) -> None:
    """Raise this process's soft limit on open files, often 1024, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < number:
        warn_on_rank_0("only %d files may be open, --max_concurrency may need %d: see ulimit -n", wanted, number)


# --- answers -------------------------------------------------------------------------------------------------------


def read_answer(response) -> Answer:
    """Take what stands where a reply belongs out of an HTTP response; BadReplyError if there is no such place."""
    try:
        body = response.json()
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        usage = body.get("usage")
        ids = choice.get("token_ids")
        return Answer(text, choice["finish_reason"], usage if isinstance(usage, dict) else {}, ids)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # no JSON, or of another shape
        raise BadReplyError(f"not a reply ({response.text[:80]!r})") from None


def check_answer(answer: Answer) -> None:
    """Raise BadReplyError for what cannot be a message of a game."""
    if not isinstance(answer.text, str) or LONE_SURROGATE.search(answer.text):
        raise BadReplyError(f"not a reply: its text is {reprlib.repr(answer.text)}")
    if len(answer.text) > MESSAGE_LIMIT:
        raise BadReplyError(f"not a reply: its text has {len(answer.text):,} characters")
    if answer.finish_reason not in (STOP, LENGTH):
        raise BadReplyError(f"the reply was broken off ({reprlib.repr(answer.finish_reason)})")
    ids, counts = answer.token_ids, [answer.usage.get(f"{part}_tokens") for part in ("prompt", "completion")]
    if ids is not None and not (isinstance(ids, list) and all(map(is_count, ids))):
        raise BadReplyError(f"not a reply: its token ids are {reprlib.repr(ids)}")
    if not all(count is None or is_count(count) for count in counts):
        raise BadReplyError(f"not a reply: it counts {reprlib.repr(counts)} tokens")


def is_count(value: object) -> TypeGuard[int]:
    """Whether a server's value is a number of tokens or the id of one."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
