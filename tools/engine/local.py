"""Language models in this process, and the players that speak with them.

Weights are read from .safetensors files only, because pickled weights can run code when they are loaded. Code in a
model folder runs only with --trust_remote_code True.
"""

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

# All models are loaded and run in this one thread. OpenMP keeps helper threads for each thread that computes. If there
# are more of them than cores, they sleep between tasks: on two cores a step of 24 games takes 1.6 times as long.
# Python waits for this thread when it ends. So after Ctrl-C the program ends when the engine's `run` returns: slots
# and vllm at the next end of a reply, generate at the end of its batch.
ENGINE_THREAD = ThreadPoolExecutor(max_workers=1)

UNREADABLE = "\ufffd"
# U+FFFD itself in the tokens of a vocabulary of characters, of byte fallback, and of a byte-level one.
UNREADABLE_TOKENS = (UNREADABLE, "<0xEF><0xBF><0xBD>", "ï¿½")


class Codec:
    """A model's tokenizer, which turns prompts into token ids and token ids into replies.

    With a chat template, prompts come in the tokenizer's own, which adds BOS itself. `vocab_size`: tokens that the
    model has embeddings of, where these are known.
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
        """BOS and the token ids of a prompt, and whether it was cut: a prompt that is too long loses its beginning.

        Its end holds the last messages and the instruction. BOS is lost too, as in a row that training cuts on the
        left (`encode` in dataloaders.py). `max_length` counts the reply, as that of training counts a row's target.
        To lose old messages, and not the rules, leave messages out of the history before it becomes text: for play and
        belief in `Turn.prompt` (tools/players/player.py), for rows in `play_prompt` and `training_prompt`
        (tools/games/prompts.py). The messages that stay must be the same in play and rows.
        UserError for a token that the model has no embedding of.
        """
        ids = [] if self.bos_id is None else [self.bos_id]
        ids += token_ids(self.tokenizer, [prompt])[0]
        limit = self.sampling.max_length - self.sampling.max_new_tokens
        check_token(max(ids, default=0), self.tokenizer, self.vocab_size)
        return ids[-limit:], len(ids) > limit

    def decode(self, ids: list[int], **known) -> Reply:
        """The reply that these token ids are, up to the first end token. Other special tokens are left out.

        `known`: all other fields of Reply that the engine knows, such as `prompt_cut`.
        Only tokens end a reply. A stop text can be cut off here, but engines would compute on behind it. To stop
        there, change `_append` in tools/engine/slots.py, `generation_config` in tools/engine/generate.py, and `start`
        in tools/engine/vllm.py, which asks vLLM for no text. For servers change `_request` (tools/players/server.py).
        """
        end = next((at for at, token in enumerate(ids) if token in self.stop_ids), None)
        tokens = len(ids) if end is None else end + 1
        thinking = self.sampling.thinking
        ids = [token for token in ids[:end] if not thinking or token not in self.unseen_ids]
        text = self._text_of_cut(ids) if end is None else self._text(ids)
        finish_reason = LENGTH if end is None else STOP
        make = Reply.read if thinking else Reply
        return make(text, finish_reason, tokens, **known)

    def _text(self, ids: list[int]) -> str:
        options = {"skip_special_tokens": not self.sampling.thinking, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(ids, **options)

    def _text_of_cut(self, ids: list[int]) -> str:
        """The text of a reply that the limit has cut, without the tokens of a last character that is not whole.

        Such a character would be read as U+FFFD and learned as its bytes. A U+FFFD that the model wrote stays.
        """
        for dropped in range(4):  # a character in UTF-8 lacks at most its last three bytes
            kept = ids[: max(len(ids) - dropped, 0)]
            text = self._text(kept)
            last_tokens = filter(None, self.tokenizer.convert_ids_to_tokens(kept[-3:]))
            if not text.endswith(UNREADABLE) or "".join(last_tokens).endswith(UNREADABLE_TOKENS):
                return text
        return self._text(ids)

    @functools.cached_property
    def unseen_ids(self) -> set[int]:
        """The special tokens but for the tags of thoughts, which are special in some tokenizers."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        return {index for index, token in tokens if token.special and str(token) not in ALL_THOUGHT_TAGS}


class LocalModel:
    """A model on its device, with the codec between texts and tokens, as an engine computes with it."""

    def __init__(self, model, tokenizer, sampling: Sampling):
        vocab_size = len(model.get_input_embeddings().weight)
        self.model = model
        self.codec = Codec(tokenizer, sampling, model.generation_config, vocab_size)
        warn_of_positions(model.config, sampling.max_length)
        # `generate` would take settings that we leave unset, such as a repetition penalty, from the model folder. Of
        # its generation_config.json only the end tokens count, which Codec has. It is the same for vLLM
        # (tools/engine/vllm.py); a server has defaults of its own.
        model.generation_config = GenerationConfig()
        self.computes_in = f"on {model.device} in {str(model.dtype).removeprefix('torch.')}"


def load_local_model(folder: Path, flags: EngineFlags) -> LocalModel:
    """Load a model folder onto this process's device. UserError if weights are missing.

    tools/evaluate_belief.py loads by this function too; vLLM does not. An option of loading, such as a
    `quantization_config`, goes into the call of `load_model`, and its flag into ModelFlags (tools/engine/flags.py).
    Results depend on it, so COMPUTING in tools/players/flags.py must name it, and `settings` and `measure` in
    tools/evaluate_belief.py must take it over.
    """
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread; a new thread begins with the first GPU
    code = {"trust_remote_code": flags.trust_remote_code}
    tokenizer = load_tokenizer(str(folder), **code)
    model = load_model(folder, dtype=flags.dtype or "auto", device_map={"": device}, **code)
    return LocalModel(model, tokenizer, flags)


def own_device() -> torch.device:
    """The GPU of this process, or the CPU: Apple's GPUs are not tested. UserError if others have all GPUs.

    All models of a process are on this one GPU. Engines run in turn in ENGINE_THREAD, so of two GPUs one would always
    wait. A model that one GPU cannot hold can play in this process by vLLM alone, with --tensor_parallel_size.
    For Apple's GPUs, `draw` (tools/engine/slots.py) must do without float64, and `_generators` (tools/engine/state.py)
    must return their generator, which holds the seed.
    """
    if not torch.cuda.is_available():
        warn_of_idle_gpu()
        return torch.device("cpu")
    check_gpus(torch.cuda.device_count())
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


# Players.


class Prompt(NamedTuple):
    """A prompt, with the game that it is of.

    A sampling parameter of each role is a further field, which `LocalPlayer.reply` fills from its Turn. Its flags
    stand in Sampling (tools/players/player.py) without `neutral`: `drawing` gives all games the same values. These
    must apply it to each request: `sample` in tools/engine/slots.py, by a field of Request
    (tools/engine/scheduler.py); `run` in tools/engine/generate.py; `start` in tools/engine/vllm.py; `_request` in
    tools/players/server.py.
    """

    text: str
    game_index: int
    seed: int = 0  # for vLLM; our own engines draw from the Batcher's state of torch


class Engine(Protocol):
    """Computes the replies of one model to the requests of many games. ENGINES in flags.py lists the classes.

    A further engine is such a class and a line of ENGINES. It uses Codec, so that prompts, cuts and the ends of
    replies are the same for all engines, and draws with `Sampling.drawing`. `choose_engine` (tools/players/make.py) or
    AutoEngine (tools/engine/slots.py) choose it for `auto`, and `main` in tools/bench.py measures it. A package that
    it needs stands in requirements.txt as a comment, and in RECORDED_PACKAGES (utils.py), so that records hold its
    version.
    """

    name: ClassVar[str]  # as in --engine
    codec: Codec
    size: int  # requests that it computes at a time
    computes_in: str  # device and type of numbers, for the log
    # Whether there are at most `size` games. True where keys and values of a game are kept between its messages: those
    # of more games could displace each other. Plain generate keeps none, so two models can both have a full batch.
    size_limits_games: ClassVar[bool]

    @classmethod
    def loaded(cls, folder: Path, flags: EngineFlags, models: int) -> AbstractContextManager["StartEngine"]:
        """Load one of the `models` models of a match, and free its memory when the block ends."""

    def start(self, request: int, prompt: Prompt) -> None:
        """Queue a request, which has this number."""

    def run(self) -> list[tuple[int, Reply]]:
        """Compute until at least one reply has ended. Returns the (request, reply) pairs of the replies that ended."""


StartEngine = Callable[[float], Engine]  # starts an engine of a loaded model, for at most so many games at once


class OwnEngine(Engine):
    """An engine over a model of transformers. The model stays loaded; each run of games has a new engine."""

    @classmethod
    @contextmanager
    def loaded(cls, folder: Path, flags: EngineFlags, models: int) -> Iterator[StartEngine]:
        yield functools.partial(cls.over, load_local_model(folder, flags), flags, models)

    @classmethod
    def over(cls, local: LocalModel, flags: EngineFlags, models: int, limit: float) -> Engine:
        """An engine of this model, one of `models`, for at most `limit` games at once."""
        raise NotImplementedError


class Batcher:
    """Collects the requests of all games and runs the engines of a process in turn.

    An engine runs when every live game waits for a reply, never on a timer. Therefore the same games with the same
    seed get the same replies, unless the other player is a server, which answers at its own time. Of two engines, the
    one with more open requests runs first: its batch is fuller. They run with this state of torch, from which our own
    engines draw.
    """

    def __init__(self, state: TorchState):
        self.state = state
        self.open: dict[Engine, dict[int, asyncio.Future]] = {}
        self.requests = 0
        self.runner: asyncio.Task | None = None

    async def submit(self, engine: Engine, prompt: Prompt) -> Reply:
        """The engine's reply to a prompt."""
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
        """Let the games go on until all of them wait for a reply. Returns the number of open requests."""
        before = None
        while (now := sum(map(len, self.open.values()))) != before:
            before = now
            await asyncio.sleep(0)  # lets all other tasks run that can
        return now


class LocalPlayer(ModelPlayer):
    """Plays with a model in this process. All local players of a process share one batcher."""

    def __init__(self, engine: Engine, batcher: Batcher, seed: int | str):
        self.engine = engine
        self.batcher = batcher
        self.seed = seed
        self.special_texts = special_texts(engine.codec.tokenizer)
        self.answers_at_once = engine.size
        # Such an engine keeps the keys and values of a game between its messages; those of more games than its size
        # would displace each other. Plain generate keeps none, so with two models the sum keeps both batches full.
        self.most_games = engine.size if engine.size_limits_games else math.inf

    async def reply(self, turn: Turn) -> Reply:
        text = turn.prompt(self.engine.codec.chat)
        seed = draw_seed(self.seed, turn)
        return await self.batcher.submit(self.engine, Prompt(text, turn.index, seed=seed))
