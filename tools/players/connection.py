"""The connection to an OpenAI-compatible server, and what of its answers can be a message of a game.

Nothing that a server answers is trusted: its length, its shape, its numbers.
"""

import asyncio
import os
import reprlib
from typing import Annotated, Any, Literal, TypeVar

import httpx2  # what openai sends its requests with
import openai
from pydantic import AliasChoices, AliasPath, BaseModel, Field, ValidationError  # openai needs it too

from tools.players.server_flags import KEY_VARIABLE

CONNECT_TIMEOUT = TOKENIZE_TIMEOUT = 10  # seconds; the latter for a question that is no part of the game
KEEP_ALIVE = 3  # seconds of an idle connection: vLLM closes it after 5, perhaps with a request on its way
BODY_LIMIT = 1 << 22  # bytes of an answer, decompressed
MESSAGE_LIMIT = 100_000  # characters of a reply
KEPT_HEADERS = ("content-type", "location", "retry-after")

Part = TypeVar("Part", bound=BaseModel)
Count = Annotated[int, Field(strict=True, ge=0, le=10**9)]  # of tokens, or the id of one; more is absurd


class BadReplyError(Exception):
    """A server answered with something that is no reply."""


class Usage(BaseModel):
    """The tokens of a call, as far as the server counts them."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Answer(BaseModel):
    """What a call has cost, and replies, of which nothing is checked yet."""

    usage: Usage | None = None
    choices: list[Any] = Field(min_length=1)


class Choice(BaseModel):
    """A reply of either endpoint that can be a message of a game; other finish reasons broke it off."""

    text: str = Field(max_length=MESSAGE_LIMIT, validation_alias=AliasChoices(AliasPath("message", "content"), "text"))
    finish_reason: Literal["stop", "length"]
    token_ids: Annotated[list[Count], Field(fail_fast=True)] | None = None  # one fault will do


class TokenCount(BaseModel):
    """An answer of /tokenize."""

    count: Count


def checked(kind: type[Part], value: object) -> Part:
    """A part of an answer, from JSON or what was read from it; BadReplyError, naming a fault, if it is none."""
    try:
        return kind.model_validate_json(value) if isinstance(value, bytes) else kind.model_validate(value)
    except ValidationError as error:
        fault = error.errors()[0]
        said = " ".join(map(str, [*fault["loc"], fault["msg"]]))
        raise BadReplyError(f"not a reply: {said}, got {reprlib.repr(fault['input'])}") from None


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
        headers = {name: value for name, value in response.headers.items() if name in KEPT_HEADERS}
        return httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=request)


class Server:
    """One base URL; `key` is that of a server which this process has started itself, on loopback."""

    def __init__(self, url: str | None, *, key: str | None, connections: int):
        self.key = key or os.environ.get(KEY_VARIABLE)
        limits = httpx2.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEP_ALIVE
        )
        self.client = openai.AsyncOpenAI(
            api_key=self.key or "none",  # the client insists on one; not all servers do
            base_url=url,
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT),  # the whole request has its deadline
            http_client=LimitedClient(limits=limits, follow_redirects=False, trust_env=key is None),
            max_retries=0,  # all is retried here: its own retries know neither other servers nor bad replies
        )
        self.name = self.client.base_url.netloc.decode()
        self.resting_until = 0.0  # by time.monotonic(): passed over if there are others

    async def count_tokens(self, model: str, prompt: str) -> int | None:
        """The prompt's tokens without special ones, as the server's tokenizer has them; None where it does not say."""
        url = str(self.client.base_url.join("/tokenize"))  # where vLLM and SGLang have it
        question = {"model": model, "prompt": prompt, "add_special_tokens": False}
        try:
            asked = self.client.post(url, cast_to=httpx2.Response, body=question)
            response = await asyncio.wait_for(asked, TOKENIZE_TIMEOUT)
            return checked(TokenCount, response.content).count
        except (openai.APIError, BadReplyError, asyncio.TimeoutError):
            return None
