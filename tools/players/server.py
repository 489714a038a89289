"""Players behind OpenAI-compatible servers: vLLM, SGLang, transformers serve, an API.

Needs the package openai. All requests of a game go to one server, whose prefix cache then knows the game's beginning,
as long as that server answers. Faults that pass (rate limits, 5xx, time-outs, dropped connections, replies that are
none) are sat out. The key comes from the environment and is shown nowhere.
"""

import asyncio
import email.utils
import logging
import math
import os
import random
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx2  # what openai sends its requests with
import openai

from tools.games.game import LONE_SURROGATE
from tools.players.budget import LIKELY_CHARACTERS, TokenBudget
from tools.players.player import LENGTH, STOP, PlayerUnusable, Reply, ReplyUnavailable, Sampling, Turn
from tools.players.server_flags import CHAT, KEY_VARIABLE, ServerFlags, model_of
from utils import warn_on_rank_0

FIRST_WAIT, LONGEST_WAIT = 0.5, 30  # seconds before asking again: doubled each time, drawn from their upper half
LONGEST_RETRY_AFTER = 300  # seconds that a server may ask to be left alone; a longer ban is not sat out
REST = 10  # seconds for which a server that failed is passed over if there are others
CONNECT_TIMEOUT = 10  # seconds
OTHER_FILES = 256  # that this process may have open besides connections
LONGEST_MESSAGE = 300  # characters of what a server says of an error
PASSING = (408, 409, 425, 429)  # besides 5xx
NO_MONEY = "insufficient_quota"  # comes as 429, but does not pass
WRONG_SETUP = (401, 403, 404)  # key or model: no request will ever succeed
MAX_TOKENS, NEW_MAX_TOKENS = "max_tokens", "max_completion_tokens"  # OpenAI's newer models know the second only


class BadReplyError(Exception):
    """A server answered with something that is no reply."""


class Answer(NamedTuple):
    """What a server returned for one request; nothing of it is checked yet."""

    text: Any
    finish_reason: Any
    usage: dict


class Server:
    """One base URL, and whether it answers."""

    def __init__(self, url: str | None, *, timeout: float, connections: int):
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        self.client = openai.AsyncOpenAI(
            api_key=os.environ.get(KEY_VARIABLE) or "none",  # the client insists on one; not all servers do
            base_url=url,
            timeout=openai.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)),
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),  # the client's own is for 1000 connections
            max_retries=0,  # all is retried here: its own retries know neither other servers nor bad replies
        )
        self.name = self.client.base_url.netloc.decode()
        self.resting_until = 0.0

    @property
    def rests(self) -> bool:
        return time.monotonic() < self.resting_until


class Servers:
    """The servers of a process, and the limit on what is asked of them at once; made anew for each event loop.

    `answering` holds the players of whom any request has succeeded, and outlives the event loop.
    """

    def __init__(
        self,
        flags: ServerFlags,
        sampling: Sampling,
        budget: TokenBudget,
        answering: set[str],
        on_batch: Callable[[], None],
    ):
        self.flags, self.sampling, self.budget = flags, sampling, budget
        self.answering, self.on_batch = answering, on_batch
        self.servers = [
            Server(url, timeout=flags.openai_timeout, connections=flags.max_concurrency)
            for url in flags.base_urls() or [None]
        ]
        allow_open_files(flags.max_concurrency * 2 + OTHER_FILES)  # while connections move from server to server
        self.slots = asyncio.Semaphore(flags.max_concurrency)
        self.replies = 0
        self.estimates = False  # whether tokens had to be estimated
        for library in ("openai", "httpx", "httpx2"):
            logging.getLogger(library).setLevel(logging.WARNING)  # otherwise a line for each request

    def for_game(self, game: int) -> Server:
        """The server of a game; the next one that answers if that one does not."""
        count = len(self.servers)
        in_turn = [self.servers[(game + step) % count] for step in range(count)]
        return next((server for server in in_turn if not server.rests), min(in_turn, key=lambda s: s.resting_until))

    def note_reply(self) -> None:
        """So many replies as may be in flight count as a batch."""
        self.replies += 1
        if self.replies % self.flags.max_concurrency == 0:
            self.on_batch()


class ServerPlayer:
    """Plays with a model on the servers."""

    def __init__(self, name: str, servers: Servers):
        self.servers, self.flags, self.sampling = servers, servers.flags, servers.sampling
        self.name, self.model = name, model_of(name)
        self.limit_name = MAX_TOKENS

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply, asked for again after faults that pass.

        Raises ReplyUnavailable when --openai_retries are used up, for a request that this server refuses after it
        took others (a prompt too long for it), and for a ban longer than LONGEST_RETRY_AFTER; PlayerUnusable for a
        wrong key or model, a used-up quota, and a first request that is refused.
        """
        async with self.servers.slots:
            reply = await self._insist(turn.prompt(), turn.index)
        self.servers.note_reply()
        return reply

    async def _insist(self, prompt: str, game: int) -> Reply:
        retries = self.flags.openai_retries
        for attempt in range(retries + 1):
            server = self.servers.for_game(game)
            try:
                reply = await self._ask(server, prompt, game)
            except (openai.APIError, BadReplyError) as error:
                fault, wanted = self._judge(error, server)
                instead = self.servers.for_game(game)
                if attempt < retries and (instead is server or instead.rests):
                    await asyncio.sleep(wanted or backoff(attempt))
            else:
                self.servers.answering.add(self.name)
                server.resting_until = 0.0
                return reply
        raise ReplyUnavailable(f"{fault} (asked {retries + 1} times)")

    def _judge(self, error: Exception, server: Server) -> tuple[str, float | None]:
        """What happened and the seconds that the server wants to be left alone; raises if asking again is no use."""
        fault = f"{server.name}: {one_line(error)}"
        if isinstance(error, BadReplyError):
            return fault, None
        if isinstance(error, openai.APIConnectionError):  # time-outs too
            server.resting_until = time.monotonic() + REST
            return fault, None
        status = error.status_code
        if status in WRONG_SETUP or error.code == NO_MONEY:
            raise PlayerUnusable(f"{self.name}: {fault}")
        if status >= 500:
            server.resting_until = time.monotonic() + REST
        elif status not in PASSING:
            known = self.name in self.servers.answering
            raise (ReplyUnavailable if known else PlayerUnusable)(f"{self.name}: {fault}")
        seconds = retry_after(error.response.headers.get("retry-after"))
        if seconds is not None and seconds > LONGEST_RETRY_AFTER:
            raise ReplyUnavailable(f"{fault} (asks to be left alone for {seconds:.0f} s)")
        return fault, seconds

    async def _ask(self, server: Server, prompt: str, game: int) -> Reply:
        """One request, charged to the game whether or not its reply is any good."""
        try:
            response = await self._send(server, prompt)
        except openai.BadRequestError as error:
            if error.param != MAX_TOKENS or self.flags.openai_api != CHAT:
                raise
            self.limit_name = NEW_MAX_TOKENS
            response = await self._send(server, prompt)
        answer = read_answer(response.http_response)
        prompt_tokens = self._tokens(answer.usage.get("prompt_tokens"), prompt)
        tokens = self._tokens(answer.usage.get("completion_tokens"), answer.text)
        self.servers.budget.charge(game, prompt_tokens, tokens)
        check_answer(answer)
        return Reply(answer.text, answer.finish_reason, tokens, prompt_tokens=prompt_tokens)

    def _tokens(self, counted: object, text: object) -> int:
        """As the server counted them, else estimated."""
        if isinstance(counted, int) and counted >= 0:
            return counted
        if not self.servers.estimates:
            self.servers.estimates = True
            warn_on_rank_0("%s: the server does not say how many tokens it takes; they are estimated", self.name)
        return math.ceil(len(str(text)) / LIKELY_CHARACTERS)

    async def _send(self, server: Server, prompt: str):
        client, sampling = server.client, self.sampling
        request = {"model": self.model, self.limit_name: sampling.max_new_tokens, "extra_body": self._extra()}
        if sampling.do_sample:
            request |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        else:
            request["temperature"] = 0
        if self.flags.openai_api == CHAT:
            messages = [{"role": "user", "content": prompt}]
            return await client.chat.completions.with_raw_response.create(messages=messages, **request)
        return await client.completions.with_raw_response.create(prompt=prompt, **request)

    def _extra(self) -> dict | None:
        """What vLLM and SGLang know beyond OpenAI's fields; -1 is their word for all tokens."""
        if not self.flags.openai_extra_sampling:
            return None
        extra = {"min_tokens": self.sampling.min_new_tokens}
        return extra | {"top_k": self.sampling.top_k or -1} if self.sampling.do_sample else extra


def allow_open_files(number: int) -> None:
    """Raise this process's soft limit on open files, often 1024, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < number:
        warn_on_rank_0("only %d files may be open, --max_concurrency may need %d: see ulimit -n", wanted, number)


# --- answers and faults --------------------------------------------------------------------------------------------


def read_answer(response) -> Answer:
    """Take what stands where a reply belongs out of an HTTP response; BadReplyError if there is no such place."""
    try:
        body = response.json()
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        usage = body.get("usage")
        return Answer(text, choice["finish_reason"], usage if isinstance(usage, dict) else {})
    except (ValueError, LookupError, TypeError):  # no JSON, or JSON of another shape
        raise BadReplyError(f"not a reply ({response.text[:80]!r})") from None


def check_answer(answer: Answer) -> None:
    """Raise BadReplyError for what cannot be a message of a game."""
    if not isinstance(answer.text, str) or LONE_SURROGATE.search(answer.text):
        raise BadReplyError(f"not a reply: its text is {answer.text!r:.80}")
    if answer.finish_reason not in (STOP, LENGTH):
        raise BadReplyError(f"the reply was broken off ({answer.finish_reason!r:.80})")


def retry_after(header: str | None) -> float | None:
    """The seconds in a Retry-After header, which holds seconds or a date; None where it says nothing."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return None
    return seconds if seconds > 0 else None


def backoff(attempt: int) -> float:
    """Seconds to wait after so many attempts; drawn, so that games do not come back all at once."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1)


def one_line(error: Exception) -> str:
    """What went wrong, as the server or the client puts it, without the key."""
    said = str(error)
    if isinstance(error, openai.APIStatusError) and error.status_code < 500 and " - " not in said:
        said = f"{said} - {error.response.text}"  # not every server puts its message where OpenAI does
    said = " ".join(said.split())
    if key := os.environ.get(KEY_VARIABLE):
        said = said.replace(key, "***")
    return said if len(said) <= LONGEST_MESSAGE else said[:LONGEST_MESSAGE] + "..."
