"""Players behind an OpenAI-compatible server: vLLM, SGLang, transformers serve, an API. Needs the package openai.

After rate limits, 5xx, time-outs and dropped connections, the openai client waits and repeats the request. It honours
Retry-After.
"""

import logging
import math
import os

import httpx2  # the HTTP client of openai
import openai
from pydantic import AliasChoices, AliasPath, BaseModel, Field, NonNegativeInt, ValidationError  # openai needs it too

from tools.players import player
from tools.players.player import PlayerUnusable, Reply, ReplyUnavailable, Sampling, Tokens, Turn
from tools.players.server_flags import CHAT, KEY_VARIABLE, ServerFlags, ServerUse
from utils import shown

CONNECT_TIMEOUT = 10  # seconds
LONGEST_FAULT = 300  # characters of a server's error message that are shown
WRONG_SETUP = (401, 403, 404)  # the key or the model is wrong: no request will ever succeed
PASSING = (408, 409, 425, 429)  # like 5xx: another request may succeed
NO_MONEY = "insufficient_quota"  # the code of an error of status 429 that waiting does not end
NO_KEY = "none"  # for servers without a key, since the client insists on one


class Usage(BaseModel):
    """The tokens of a request, counted by the server."""

    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt


class Choice(BaseModel):
    """A reply from the endpoint completions or chat/completions."""

    text: str | None = Field(None, validation_alias=AliasChoices(AliasPath("message", "content"), "text"))
    finish_reason: str | None = None
    token_ids: list[NonNegativeInt] | None = None  # only from vLLM and SGLang


class Answer(BaseModel):
    """A server's answer to a request."""

    choices: list[Choice] = Field(min_length=1)
    usage: Usage | None = None


def connect(flags: ServerFlags) -> openai.AsyncOpenAI:
    """A client for one event loop."""
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


class ServerPlayer:
    """Plays with a model behind a server.

    With `tokens`, prompts are sent as token ids, and replies are decoded from token ids where the server returns them.
    Requests then have a seed, so that a draw depends only on `seed`, the game and the message.
    """

    def __init__(
        self,
        model: str,
        client: openai.AsyncOpenAI,
        flags: ServerFlags,
        sampling: Sampling,
        use: ServerUse,
        tokens: Tokens | None = None,
        seed: int | str = 0,
    ):
        self.model, self.client, self.flags, self.sampling = model, client, flags, sampling
        self.use, self.tokens, self.seed = use, tokens, seed

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply.

        Raises ReplyUnavailable if the request failed after all retries, if the answer is empty, broken off or
        malformed, and if the server refuses a single request. Raises PlayerUnusable for a wrong key or model, for a
        used-up quota, and if the first request is refused.
        """
        content, cut = self.tokens.encode_turn(turn) if self.tokens else (turn.prompt(), False)
        path = "/chat/completions" if self.flags.openai_api == CHAT else "/completions"
        try:
            body = await self.client.post(path, cast_to=bytes, body=self._request(content, turn))
            answer = Answer.model_validate_json(body)
        except openai.APIError as error:
            raise self._failure(error) from None
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            raise self._lost(f"not a reply: {' '.join(map(str, fault['loc']))} {fault['msg']}") from None
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
        choice, usage = answer.choices[0], answer.usage
        if usage is None and self.use.limit < math.inf:
            raise PlayerUnusable(f"{self.model}: its server counts no tokens, which --max_total_tokens needs")
        prompt_tokens, tokens = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        self.use.tokens += prompt_tokens + tokens
        text = after_thinking(choice.text) if choice.text and self.flags.openai_api == CHAT else choice.text
        if choice.finish_reason not in (player.STOP, player.LENGTH):
            raise self._lost(f"the reply was broken off ({choice.finish_reason!r:.40})")
        # A chat model's text is empty if thinking took all tokens, or if a filter held the text back. A base model may
        # end its reply at once, as in local play.
        if text is None or (self.flags.openai_api == CHAT and not text.strip()):
            cut = choice.finish_reason == player.LENGTH
            raise self._lost(f"the reply is empty{'; thinking may have taken all --max_new_tokens' if cut else ''}")
        if self.tokens and choice.token_ids is not None:
            text, tokens = self.tokens.decode(choice.token_ids, cut).text, len(choice.token_ids)
        return Reply(text, choice.finish_reason, tokens, cut, prompt_tokens)

    def _failure(self, error: openai.APIError) -> Exception:
        """The exception for a failed request: PlayerUnusable ends the run, ReplyUnavailable one game."""
        if not isinstance(error, openai.APIStatusError):
            return self._lost(f"{error.message} {error.__cause__ or ''}")
        status = error.status_code
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
