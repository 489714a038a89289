"""Players behind an OpenAI-compatible server: vLLM, SGLang, transformers serve, an API. They need the package openai.

After rate limits, 5xx, time-outs and dropped connections, the openai client waits and repeats the request. It honours
Retry-After. The client is imported when the first player is made, since importing it takes a second.
"""

import importlib.util
import json
import logging
import math
import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tools.flags import flag
from tools.games.game import LONE_SURROGATE
from tools.players import player
from tools.players.player import Player, PlayerUnusable, Reply, ReplyUnavailable, Sampling, Tokens, Turn
from utils import shown, too_small

if TYPE_CHECKING:
    import openai

SERVER = "openai:"  # begins the name of a player behind a server
COMPLETIONS, CHAT = "completions", "chat"
KEY_VARIABLE, URL_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
INSTALL = 'pip install "openai>=3.54,<4"'
CONNECT_TIMEOUT = 10  # seconds
LONGEST_FAULT = 300  # characters of a server's error message that are shown
WRONG_SETUP = (401, 403, 404)  # the key or the model is wrong: no request will ever succeed
PASSING = (408, 409, 425, 429)  # like 5xx: another request may succeed
NO_MONEY = "insufficient_quota"  # the code of an error of status 429 that waiting does not end
NO_KEY = "none"  # for servers without a key, since the client insists on one


@dataclass(kw_only=True)
class ServerFlags:
    """The flags of players openai:MODEL."""

    openai_api: str = flag("endpoint of players openai:MODEL", default=COMPLETIONS, choices=(COMPLETIONS, CHAT))
    openai_base_url: str | None = flag(
        f"the server, such as http://host:8000/v1; unset: {URL_VARIABLE}, else OpenAI's own",
        default=None,
        metavar="URL",
    )
    openai_extra_sampling: bool = flag(
        "True: send --top_k and --min_new_tokens too; vLLM and SGLang know them, OpenAI refuses them", default=False
    )
    openai_tokenizer: str | None = flag(
        "for vLLM and SGLang: send prompts as token ids of this model's tokenizer, cut and ended as in local play",
        default=None,
        metavar="MODEL",
    )
    openai_retries: int = flag("how many times a failed request is repeated", default=10)
    openai_timeout: float = flag("seconds without an answer after which a request has failed", default=600)
    max_concurrency: int = flag("requests of each process to the server at once", default=64)
    max_total_tokens: int | None = flag("begin no game once the server has counted this many tokens", default=None)

    def server_problems(self, *, chat_template: bool, min_new_tokens: int) -> list[str]:
        """What is wrong with these flags for players behind servers, one phrase for each problem."""
        problems = too_small(self, openai_retries=0, max_concurrency=1, max_total_tokens=1)
        url = self.openai_base_url or os.environ.get(URL_VARIABLE, "")
        ids, key = self.openai_tokenizer, os.environ.get(KEY_VARIABLE, "")
        if importlib.util.find_spec("openai") is None:
            problems.append(f"{SERVER}MODEL needs a package: {INSTALL}")
        if ids and self.openai_api == CHAT:
            problems.append(f"--openai_tokenizer sends token ids, which --openai_api {CHAT} does not take")
        if chat_template and not ids:
            problems.append(f"--chat_template True needs --openai_tokenizer; or use --openai_api {CHAT}")
        if min_new_tokens and not (ids or self.openai_extra_sampling):
            problems.append("--min_new_tokens needs a server that knows min_tokens, and --openai_extra_sampling True")
        if url and not re.fullmatch(r"https?://[^\s@/]+(/\S*)?", url):  # not shown: it may hold a password
            problems.append("--openai_base_url must look like http://host:8000/v1, without user and password")
        if not re.fullmatch("[!-~]*", key):
            problems.append(f"{KEY_VARIABLE} holds a blank, a line end or a character that is not ASCII: set it again")
        if not (url or key):
            problems.append(f"{SERVER}MODEL needs {KEY_VARIABLE} for OpenAI itself, or --openai_base_url of a server")
        return problems


class ServerUse:
    """What all players behind servers share in this process: the client, and the count of tokens."""

    def __init__(self, flags: ServerFlags):
        self.flags = flags
        self.tokens = 0  # used since this process started
        self.limit = math.inf  # no game begins once so many tokens are used
        self.answered = False  # whether any request has succeeded
        self._client: openai.AsyncOpenAI | None = None

    @property
    def used_up(self) -> bool:
        """Whether no other game may begin."""
        return self.tokens >= self.limit

    def client(self) -> "openai.AsyncOpenAI":
        """The client of all these players, so that --max_concurrency holds for them together. For one event loop."""
        if self._client is None:
            self._client = connect(self.flags)
        return self._client


@dataclass(frozen=True)
class Answer:
    """A server's answer to a request of the endpoint completions or chat/completions."""

    text: str | None
    finish_reason: str | None
    token_ids: list[int] | None  # only from vLLM and SGLang
    prompt_tokens: int | None  # these two are counted by the server, if it counts
    tokens: int | None


def read_answer(body: bytes) -> Answer:
    """Read the JSON of an answer. Raises ValueError for anything else."""
    try:
        answer = json.loads(body)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        text = choice["message"]["content"] if "message" in choice else choice.get("text")
        ids, counted = choice.get("token_ids"), [usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")]
        if not isinstance(text, str | None) or text and LONE_SURROGATE.search(text):
            raise ValueError("its text is no text")
        check_numbers(counted if usage else [])
        check_numbers([] if ids is None else ids)
        return Answer(text, choice.get("finish_reason"), ids, *counted)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a reply ({type(error).__name__}: {error})") from None


def check_numbers(values: list) -> None:
    """Raise ValueError unless these are whole numbers of at least 0."""
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"tokens are {values!r:.40}")


def connect(flags: ServerFlags) -> "openai.AsyncOpenAI":
    """A client for one event loop."""
    import httpx2  # the HTTP client of openai
    import openai

    for library in ("openai", "httpx", "httpx2"):  # otherwise they log each request
        logging.getLogger(library).setLevel(logging.WARNING)
    limits = httpx2.Limits(max_connections=flags.max_concurrency, max_keepalive_connections=flags.max_concurrency)
    return openai.AsyncOpenAI(
        api_key=os.environ.get(KEY_VARIABLE) or NO_KEY,
        base_url=flags.openai_base_url,
        max_retries=flags.openai_retries,
        timeout=openai.Timeout(flags.openai_timeout, connect=CONNECT_TIMEOUT, pool=None),  # no limit in the queue
        http_client=openai.DefaultAsyncHttpxClient(limits=limits, follow_redirects=False),
    )


class ServerPlayer(Player):
    """Plays with a model behind a server.

    With `tokens`, prompts are sent as token ids, and replies are decoded from token ids where the server returns them.
    Requests then have a seed, so that a draw depends only on `seed`, the game and the message.
    """

    def __init__(
        self,
        model: str,
        client: "openai.AsyncOpenAI",
        flags: ServerFlags,
        sampling: Sampling,
        use: ServerUse,
        tokens: Tokens | None = None,
        seed: int | str = 0,
    ):
        self.model, self.client, self.flags, self.sampling = model, client, flags, sampling
        self.use, self.tokens, self.seed = use, tokens, seed
        self.games = flags.max_concurrency

    @classmethod
    def make(cls, name: str, lineup, seed: int | str) -> "ServerPlayer":
        """A player with the model that the name gives after the colon."""
        flags, use = lineup.flags, lineup.use
        return cls(
            name.removeprefix(SERVER), use.client(), flags, lineup.sampling, use, lineup.tokens_of(name), seed=seed
        )

    @classmethod
    def problems(cls, flags) -> list[str]:
        """What is wrong with the flags of servers."""
        return flags.server_problems(chat_template=flags.chat_template, min_new_tokens=flags.min_new_tokens)

    @classmethod
    def setting(cls, name: str, flags) -> dict:
        """The model and how it is asked. The server's URL is not part of it, so it may change."""
        setting = {"path": name, "api": flags.openai_api, "extra_sampling": flags.openai_extra_sampling}
        return setting | ({"tokenizer": flags.openai_tokenizer} if flags.openai_tokenizer else {})

    @classmethod
    def tokenizer(cls, name: str, flags) -> str | None:
        """That of --openai_tokenizer."""
        return flags.openai_tokenizer

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply.

        Raises ReplyUnavailable if the request failed after all retries, if the answer is empty, broken off or
        malformed, and if the server refuses a single request. Raises PlayerUnusable for a wrong key or model, for a
        used-up quota, and if the first request is refused.
        """
        import openai

        content, cut = self.tokens.encode_turn(turn) if self.tokens else (turn.prompt(), False)
        path = "/chat/completions" if self.flags.openai_api == CHAT else "/completions"
        try:
            body = await self.client.post(path, cast_to=bytes, body=self._request(content, turn))
            answer = read_answer(body)
        except openai.APIError as error:
            raise self._failure(error) from None
        except ValueError as error:
            raise self._lost(str(error)) from None
        self.use.answered = True
        return self._read(answer, cut)

    def limit(self, turn: Turn) -> int:
        """The most tokens of a reply. (The benchmark replaces this.)"""
        return self.sampling.max_new_tokens

    def _request(self, content: str | list[int], turn: Turn) -> dict:
        """The body of a request. Only vLLM and SGLang know `min_tokens`, `top_k` and the fields for `tokens`."""
        sampling, limit = self.sampling, self.limit(turn)
        request: dict[str, object] = {"model": self.model, "temperature": 0}
        if self.flags.openai_api == CHAT:
            request |= {"messages": [{"role": "user", "content": content}], "max_completion_tokens": limit}
        else:
            request |= {"prompt": content, "max_tokens": limit}
        if sampling.do_sample:
            request |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if self.tokens or self.flags.openai_extra_sampling:
            request["min_tokens"] = min(sampling.min_new_tokens, limit)
            if sampling.do_sample:
                request["top_k"] = sampling.top_k or -1  # -1: all tokens
        if self.tokens:
            request |= {"stop_token_ids": self.tokens.stop_ids, "return_token_ids": True}
            request["seed"] = player.draw_seed(self.seed, turn)
        return request

    def _read(self, answer: Answer, cut: bool) -> Reply:
        if answer.tokens is None and self.use.limit < math.inf:
            raise PlayerUnusable(f"{self.model}: its server counts no tokens, which --max_total_tokens needs")
        prompt_tokens, tokens = answer.prompt_tokens or 0, answer.tokens or 0
        self.use.tokens += prompt_tokens + tokens
        text = after_thinking(answer.text) if answer.text and self.flags.openai_api == CHAT else answer.text
        if answer.finish_reason not in (player.STOP, player.LENGTH):
            raise self._lost(f"the reply was broken off ({answer.finish_reason!r:.40})")
        # A chat model's text is empty if thinking took all tokens, or if a filter held the text back. A base model may
        # end its reply at once, as in local play.
        if text is None or (self.flags.openai_api == CHAT and not text.strip()):
            full = answer.finish_reason == player.LENGTH
            raise self._lost(f"the reply is empty{'; thinking may have taken all --max_new_tokens' if full else ''}")
        reply = Reply(text, answer.finish_reason, tokens, cut, prompt_tokens)
        if self.tokens and answer.token_ids is not None:
            decoded = self.tokens.decode(answer.token_ids, cut)
            reply = replace(
                decoded, finish_reason=reply.finish_reason, tokens=len(answer.token_ids), prompt_tokens=prompt_tokens
            )
        return reply

    def _failure(self, error: "openai.APIError") -> Exception:
        """The exception for a failed request: PlayerUnusable ends the run, ReplyUnavailable one game."""
        status = getattr(error, "status_code", None)
        if status is None:  # no answer came
            return self._lost(f"{error.message} {error.__cause__ or ''}")
        lost = self._lost(f"status {status}: {error.response.text}")
        refused = status < 500 and status not in PASSING
        if status in WRONG_SETUP or error.code == NO_MONEY or (refused and not self.use.answered):
            return PlayerUnusable(str(lost))
        return lost

    def _lost(self, why: str) -> ReplyUnavailable:
        """The exception that loses a game. Its message is one line and does not contain the key."""
        server = self.client.base_url.netloc.decode()
        if self.client.api_key != NO_KEY:
            why = why.replace(self.client.api_key, "***")
        return ReplyUnavailable(f"{self.model} at {server}: {shown(' '.join(why.split())[:LONGEST_FAULT])}")


def after_thinking(text: str) -> str:
    """The text after the last </think>; "" if the thinking has no end."""
    message = text.rpartition("</think>")[2]
    return "" if "<think>" in message else message
