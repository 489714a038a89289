"""Language models in this process, and the players that use them."""

import asyncio
import functools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import torch
from transformers import GenerationConfig

from tools.common.models import (
    check_token,
    load_model,
    load_tokenizer,
    special_texts,
    token_ids,
    warn_of_positions,
)
from tools.common.ranks import check_gpus, warn_of_idle_gpu
from tools.engine.flags import EngineFlags
from tools.engine.state import TorchState
from tools.games.chat import ChatTemplate
from tools.games.prompts import ALL_THOUGHT_TAGS
from tools.players.player import LENGTH, STOP, ModelPlayer, Reply, Sampling, Turn, draw_seed

# All models are loaded and run in this one thread. OpenMP keeps helper threads for every thread that computes; when
# they outnumber the cores they sleep between tasks, and on two cores a step of 24 games takes 1.6 times as long.
# Python joins this thread at exit, so after Ctrl-C the program ends when `Engine.run` returns: when a reply ends
# (slots, vllm) or when the batch ends (generate).
ENGINE_THREAD = ThreadPoolExecutor(max_workers=1)

REPLACEMENT = "\ufffd"
# U+FFFD as a single token, in byte fallback, and in byte-level vocabularies.
REPLACEMENT_TOKENS = (REPLACEMENT, "<0xEF><0xBF><0xBD>", "ï¿½")


class Codec:
    """Turns prompts into token ids and token ids into replies.

    `vocab_size` is the number of the model's embeddings, if known. A chat template itself writes BOS.
    """

    def __init__(
        self,
        tokenizer,
        sampling: Sampling,
        generation: GenerationConfig | None = None,
        vocab_size: float = math.inf,
    ):
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.vocab_size = vocab_size
        ends = generation.eos_token_id if generation else None
        ends = ends if isinstance(ends, list) else [ends]
        self.stop_ids: list[int] = sorted({tokenizer.eos_token_id, *ends} - {None})  # each ends a reply
        self.bos_id: int | None = tokenizer.bos_token_id
        self.chat: ChatTemplate | None = None
        if sampling.chat_template:
            self.chat = ChatTemplate(tokenizer, tokenizer.name_or_path, sampling.thinking)
            self.bos_id = None
            self.stop_ids = sorted({*self.stop_ids, self.chat.end_id})

    def encode(self, prompt: str) -> tuple[list[int], bool]:
        """Token ids of BOS and a prompt, and whether it was truncated.

        A prompt longer than max_length - max_new_tokens is truncated on the left (BOS too), as rows are in training,
        because its end holds the last messages and the instruction. UserError for a token without an embedding.
        """
        ids = [] if self.bos_id is None else [self.bos_id]
        ids += token_ids(self.tokenizer, [prompt])[0]
        limit = self.sampling.max_length - self.sampling.max_new_tokens
        check_token(max(ids, default=0), self.tokenizer, self.vocab_size)
        return ids[-limit:], len(ids) > limit

    def decode(self, ids: list[int], *, prompt_cut: bool = False) -> Reply:
        """The reply up to the first end token, without other special tokens."""
        end = next((at for at, token in enumerate(ids) if token in self.stop_ids), None)
        tokens = len(ids) if end is None else end + 1
        thinking = self.sampling.thinking
        ids = [token for token in ids[:end] if not thinking or token not in self.unseen_ids]
        text = self._text_of_cut(ids) if end is None else self._text(ids)
        finish_reason = LENGTH if end is None else STOP
        make = Reply.read if thinking else Reply
        return make(text, finish_reason, tokens, prompt_cut=prompt_cut)

    def _text(self, ids: list[int]) -> str:
        options = {"skip_special_tokens": not self.sampling.thinking, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(ids, **options)

    def _text_of_cut(self, ids: list[int]) -> str:
        """The text of a reply cut by the length limit, without an incomplete last character.

        It would decode to U+FFFD, which the training row would then teach. A U+FFFD that the model wrote stays.
        """
        for dropped in range(4):  # an incomplete UTF-8 character has at most three bytes
            kept = ids[: max(len(ids) - dropped, 0)]
            text = self._text(kept)
            last_tokens = filter(None, self.tokenizer.convert_ids_to_tokens(kept[-3:]))
            if not text.endswith(REPLACEMENT) or "".join(last_tokens).endswith(REPLACEMENT_TOKENS):
                return text
        return self._text(ids)

    @functools.cached_property
    def unseen_ids(self) -> set[int]:
        """Special tokens except thought tags, which some tokenizers declare as special."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        return {index for index, token in tokens if token.special and str(token) not in ALL_THOUGHT_TAGS}


class LocalModel:
    def __init__(self, model, tokenizer, sampling: Sampling):
        vocab_size = len(model.get_input_embeddings().weight)
        self.model = model
        self.codec = Codec(tokenizer, sampling, model.generation_config, vocab_size)
        warn_of_positions(model.config, sampling.max_length)
        # Otherwise `generate` would take unset settings, such as a repetition penalty, from the folder's
        # generation_config.json, of which we use only the end tokens (in Codec).
        model.generation_config = GenerationConfig()
        self.computes_in = f"on {model.device} in {str(model.dtype).removeprefix('torch.')}"


def load_local_model(folder: Path, flags: EngineFlags) -> LocalModel:
    """Load a model folder onto this process's device. UserError if weights are missing."""
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # per thread; a new thread starts on the first GPU
    code = {"trust_remote_code": flags.trust_remote_code}
    tokenizer = load_tokenizer(str(folder), **code)
    model = load_model(folder, dtype=flags.dtype or "auto", device_map={"": device}, **code)
    return LocalModel(model, tokenizer, flags)


def own_device() -> torch.device:
    """This process's GPU, or the CPU. UserError if there are fewer GPUs than processes.

    All models of a process share one GPU, because its engines take turns and a second GPU would be idle.
    """
    if not torch.cuda.is_available():
        warn_of_idle_gpu()
        return torch.device("cpu")
    check_gpus(torch.cuda.device_count())
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


class Prompt(NamedTuple):
    text: str
    game_index: int
    seed: int = 0  # for vLLM; our own engines draw from the Batcher's generator


class Engine(Protocol):
    """Computes one model's replies to the requests of many games.

    Prompts, truncation, ends of replies and sampling are the same in all engines: Codec and `Sampling.drawing`.
    """

    name: ClassVar[str]  # as in --engine
    codec: Codec
    size: int  # requests computed at once
    computes_in: str  # device and dtype, for the log
    # True if a game's keys and values are kept between its messages, so that more than `size` concurrent games would
    # evict each other's. Plain generate keeps none, and needs batch x models games to keep one batch full.
    size_limits_games: ClassVar[bool]

    @classmethod
    def loaded(cls, folder: Path, flags: EngineFlags, models: int) -> AbstractContextManager["StartEngine"]:
        """Load one of `models` models that share the memory. Its memory is freed when the block ends."""

    def start(self, request: int, prompt: Prompt) -> None:
        """Queue a prompt under the number `request`."""

    def run(self) -> list[tuple[int, Reply]]:
        """Compute until at least one reply has ended. Returns (request, reply) pairs."""


StartEngine = Callable[[float], Engine]  # takes the most games at once, returns an engine over the loaded model


class OwnEngine(Engine):
    """An engine over a transformers model. The model stays loaded; each run of games gets a new engine."""

    def __init__(self, local: LocalModel, size: int):
        self.codec = local.codec
        self.model = local.model
        self.size = size
        self.computes_in = local.computes_in

    @classmethod
    @contextmanager
    def loaded(cls, folder: Path, flags: EngineFlags, models: int) -> Iterator[StartEngine]:
        yield functools.partial(cls.over, load_local_model(folder, flags), flags, models)

    @classmethod
    def over(cls, local: LocalModel, flags: EngineFlags, models: int, limit: float) -> Engine:
        """An engine for at most `limit` games at once, with one of `models` models that share the memory."""
        raise NotImplementedError


class Batcher:
    """Collects the requests of all games and runs a process's engines in turn, in the given state of torch.

    An engine runs when every live game waits for a reply, never on a timer, so that the same games with the same seed
    get the same replies (unless the other player is a server, whose timing varies). Of two engines, the one with more
    open requests runs first, because its batch is fuller.
    """

    def __init__(self, state: TorchState):
        self.state = state
        self.open: dict[Engine, dict[int, asyncio.Future]] = {}
        self.requests = 0
        self.runner: asyncio.Task | None = None

    async def submit(self, engine: Engine, prompt: Prompt) -> Reply:
        self.requests += 1
        future = asyncio.get_running_loop().create_future()
        self.open.setdefault(engine, {})[self.requests] = future
        engine.start(self.requests, prompt)
        if self.runner is None:
            self.runner = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while await self._gather():
                engine = max(self.open, key=lambda engine: len(self.open[engine]))
                finished = await asyncio.get_running_loop().run_in_executor(ENGINE_THREAD, self._compute, engine)
                for request, reply in finished:
                    future = self.open[engine].pop(request)
                    if not future.done():
                        future.set_result(reply)
        except Exception as error:  # raised in every game that waits
            for future in [future for futures in self.open.values() for future in futures.values()]:
                if not future.done():
                    future.set_exception(error)
            self.open.clear()
        finally:
            self.runner = None

    def _compute(self, engine: Engine) -> list[tuple[int, Reply]]:
        with self.state.in_use():
            return engine.run()

    async def _gather(self) -> int:
        """Let the games run until all wait for a reply. Returns the number of open requests."""
        before = None
        while (now := sum(map(len, self.open.values()))) != before:
            before = now
            await asyncio.sleep(0)  # lets all other runnable tasks run
        return now


class LocalPlayer(ModelPlayer):
    """Plays with a model in this process, over a batcher that all players of the process share."""

    def __init__(self, engine: Engine, batcher: Batcher, seed: int | str):
        self.engine = engine
        self.engine_name = engine.name
        self.batcher = batcher
        self.seed = seed
        self.special_texts = special_texts(engine.codec.tokenizer)
        self.answers_at_once = engine.size
        self.max_concurrent_games = engine.size if engine.size_limits_games else math.inf

    async def reply(self, turn: Turn) -> Reply:
        text = turn.prompt(self.engine.codec.chat)
        seed = draw_seed(self.seed, turn)
        return await self.batcher.submit(self.engine, Prompt(text, turn.index, seed=seed))
