"""Players behind OpenAI-compatible servers: vLLM, SGLang, transformers serve, an API. Needs the package openai.

All requests of a game go to one server, whose prefix cache then knows the game's beginning, as long as it answers.
Faults that pass (rate limits, 5xx, time-outs, dropped connections, replies that are none) are sat out.
"""

import asyncio
import logging
import math
import random
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import httpx2
import openai

from tools.players.budget import LIKELY_CHARACTERS, TokenBudget
from tools.players.connection import Answer, BadReplyError, Choice, Server, Usage, checked
from tools.players.player import PlayerUnusable, Reply, ReplyUnavailable, Sampling, Tokens, Turn, draw_seed
from tools.players.server_flags import CHAT, ServerFlags, model_of
from utils import shown, warn_on_rank_0

FIRST_WAIT, LONGEST_WAIT = 0.5, 30  # seconds before asking again: doubled each time, drawn from their upper half
LONGEST_RETRY_AFTER = 300  # seconds that a server may ask to be left alone; a longer ban is not sat out
FILES = 200  # that a process may need open besides its connections
REST = 10  # seconds for which a server that failed is passed over if there are others
LONGEST_FAULT = 300  # characters of what a server says of an error
PASSING = (408, 409, 425, 429)  # besides 5xx
NO_MONEY = "insufficient_quota"  # comes as 429, but does not pass
WRONG_SETUP = (401, 403, 404)  # key or model: no request will ever succeed
MAX_TOKENS, NEW_MAX_TOKENS = "max_tokens", "max_completion_tokens"  # OpenAI's newer models know the second only
logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """What one reply is asked for with."""

    content: str | list[int]  # text or token ids
    cut: bool
    limit: int  # tokens of the reply at most
    game: int
    seed: int


@dataclass(eq=False)
class Servers:
    """The servers of a process, and the limit on what is asked of them at once; made anew for each event loop."""

    flags: ServerFlags
    sampling: Sampling
    budget: TokenBudget
    answering: set[str]  # players of whom any request has succeeded; outlives the event loop
    on_batch: Callable[[], None]  # called after so many replies as may be in flight
    key: str | None = None  # of a server that this process has started itself

    def __post_init__(self):
        connections, urls = self.flags.max_concurrency, self.flags.base_urls() or [None]
        self.servers = [Server(url, key=self.key, connections=connections) for url in urls]
        self.slots = asyncio.Semaphore(connections)
        self.replies = 0
        self.estimates = False  # whether tokens had to be estimated
        files, (soft, hard) = FILES + 2 * connections, resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < files:  # often 1024
            allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        for library in ("openai", "httpx", "httpx2"):
            logging.getLogger(library).setLevel(logging.WARNING)  # otherwise a line for each request

    def for_game(self, game: int) -> Server:
        """The server of a game; the next one that answers if that one does not."""
        first, now = game % len(self.servers), time.monotonic()
        in_turn = self.servers[first:] + self.servers[:first]
        return min(in_turn, key=lambda server: max(server.resting_until, now))


@dataclass(eq=False)
class ServerPlayer:
    """Plays with a model on the servers."""

    name: str
    servers: Servers
    model: str | None = None  # None: the one in the name
    tokens: Tokens | None = None  # then prompts are token ids, and replies too where the server gives them
    seed: int | str = 0  # with `tokens`, draws depend on it, the game and the message alone
    limit_name: str = MAX_TOKENS

    def __post_init__(self):
        self.model = self.model or model_of(self.name)

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply, asked for again after faults that pass.

        Raises ReplyUnavailable when --openai_retries are used up, for a request that this server refuses after it
        took others (a prompt too long for it), and for a ban longer than LONGEST_RETRY_AFTER; PlayerUnusable for a
        wrong key or model, a used-up quota, and a first request that is refused.
        """
        content, cut = self.tokens.encode_turn(turn) if self.tokens else (turn.prompt(), False)
        limit, servers = turn.max_new_tokens or self.servers.sampling.max_new_tokens, self.servers
        async with servers.slots:
            reply = await self._insist(Prompt(content, cut, limit, turn.index, draw_seed(self.seed, turn)))
        servers.replies += 1
        if servers.replies % servers.flags.max_concurrency == 0:
            servers.on_batch()
        return reply

    async def _insist(self, prompt: Prompt) -> Reply:
        tries = self.servers.flags.openai_retries + 1
        for attempt in range(tries):
            server = self.servers.for_game(prompt.game)
            try:
                reply = await self._ask(server, prompt)
            except (openai.APIError, asyncio.TimeoutError, BadReplyError) as error:
                fault, wanted = self._judge(error, server)
                instead = self.servers.for_game(prompt.game)
                no_other = instead is server or instead.resting_until > time.monotonic()
                if no_other and attempt + 1 < tries:
                    # Drawn, so that games do not come back all at once.
                    await asyncio.sleep(wanted or min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1))
            else:
                server.resting_until = 0.0
                if self.name not in self.servers.answering:
                    self.servers.answering.add(self.name)
                    await self._tell_tokens(server, prompt, reply.prompt_tokens)
                return reply
        raise ReplyUnavailable(f"{fault} (asked {tries} times)")

    async def _tell_tokens(self, server: Server, prompt: Prompt, counted: int) -> None:
        """Say once whether the server sees the tokens of local play, by its /tokenize and the tokens it counts."""
        if not isinstance(prompt.content, str):
            if counted != len(prompt.content):
                warn_on_rank_0("%s counts %d prompt tokens, %d were sent", self.name, counted, len(prompt.content))
            return
        known = self.servers.flags.openai_api != CHAT and not self.servers.estimates
        plain = await server.count_tokens(self.model, prompt.content) if known else None
        what = "it cannot be known whether the server's prompt tokens are those of local play"
        if plain is not None:
            first = counted - plain or "no"
            what = f"the server puts {first} special tokens before prompts, local play BOS if there is one"
        logger.info("%s: %s; --openai_tokenizer MODEL sends the same", self.name, what)

    def _judge(self, error: Exception, server: Server) -> tuple[str, float]:
        """What happened and the seconds that the server wants to be left alone; raises if asking again is no use."""
        fault = f"{server.name}: {self._one_line(error, server.key)}"
        if isinstance(error, BadReplyError):
            return fault, 0
        if not isinstance(error, openai.APIStatusError):  # no answer
            server.resting_until = time.monotonic() + REST
            return fault, 0
        if error.status_code in WRONG_SETUP or error.code == NO_MONEY:
            raise PlayerUnusable(f"{self.name}: {fault}")
        if error.status_code >= 500:
            server.resting_until = time.monotonic() + REST
        elif error.status_code not in PASSING:
            known = self.name in self.servers.answering
            raise (ReplyUnavailable if known else PlayerUnusable)(f"{self.name}: {fault}")
        seconds = retry_after(error.response.headers.get("retry-after"))
        if seconds > LONGEST_RETRY_AFTER:
            raise ReplyUnavailable(f"{fault} (asks to be left alone for {seconds:.0f} s)")
        return fault, seconds

    async def _ask(self, server: Server, prompt: Prompt) -> Reply:
        """One request, charged to the game whether or not its reply is any good."""
        limit_name = self.limit_name
        request = {"model": self.model, limit_name: prompt.limit, **self._sampling(prompt)}
        if self.servers.flags.openai_api == CHAT:
            path, request["messages"] = "/chat/completions", [{"role": "user", "content": prompt.content}]
        else:
            path, request["prompt"] = "/completions", prompt.content
        sent = server.client.post(path, cast_to=httpx2.Response, body=request)
        try:
            response = await asyncio.wait_for(sent, self.servers.flags.openai_timeout)
        except openai.BadRequestError as error:
            if error.param != MAX_TOKENS or limit_name != MAX_TOKENS or self.servers.flags.openai_api != CHAT:
                raise
            self.limit_name = NEW_MAX_TOKENS
            return await self._ask(server, prompt)
        answer, text = checked(Answer, response.content), ""
        try:
            choice = checked(Choice, answer.choices[0])
            text = choice.text
        finally:
            prompt_tokens, tokens = self._charge(prompt, answer.usage or Usage(), text)
        if self.tokens and choice.token_ids is not None:
            text, tokens = self.tokens.decode(choice.token_ids, prompt.cut).text, len(choice.token_ids)
        return Reply(text, choice.finish_reason, tokens, prompt.cut, prompt_tokens)

    def _charge(self, prompt: Prompt, usage: Usage, text: str) -> list[int]:
        """Charge the game the tokens of prompt and reply, as the server counted them, else estimated."""
        tokens = []
        for counted, content in ((usage.prompt_tokens, prompt.content), (usage.completion_tokens, text)):
            if counted is None:
                if not self.servers.estimates:
                    self.servers.estimates = True
                    warn_on_rank_0("%s: it does not say how many tokens it takes; they are estimated", self.name)
                counted = len(content) if isinstance(content, list) else math.ceil(len(content) / LIKELY_CHARACTERS)
            tokens.append(counted)
        self.servers.budget.charge(prompt.game, *tokens)
        return tokens

    def _sampling(self, prompt: Prompt) -> dict:
        """How the reply is drawn; beyond OpenAI's fields what vLLM and SGLang know, whose -1 are all tokens."""
        sampling = self.servers.sampling
        request: dict[str, object] = {"temperature": 0}
        if sampling.do_sample:
            request = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if self.tokens or self.servers.flags.openai_extra_sampling:
            request["min_tokens"] = min(sampling.min_new_tokens, prompt.limit)
            if sampling.do_sample:
                request["top_k"] = sampling.top_k or -1
        if self.tokens:
            request |= {"stop_token_ids": self.tokens.stop_ids, "return_token_ids": True, "seed": prompt.seed}
        return request

    def _one_line(self, error: Exception, key: str | None) -> str:
        """What went wrong, as the server or the client puts it, without the key."""
        said = str(error)
        if isinstance(error, asyncio.TimeoutError):
            said = f"no reply within {self.servers.flags.openai_timeout:g} s"
        elif isinstance(error, openai.APIStatusError):
            if error.status_code < 400:
                said = f"it redirects to {error.response.headers.get('location')}; requests go to the base URL only"
            elif " - " not in said:
                said = f"{said} - {error.response.text}"  # not every server puts its message where OpenAI does
        said = re.sub(rf"(?<!\w){re.escape(key)}(?!\w)", "***", said) if key else said
        return shown(" ".join(said.split())[:LONGEST_FAULT])


def retry_after(header: str | None) -> float:
    """The seconds in a Retry-After header; 0 where it says none, or is a date."""
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0
