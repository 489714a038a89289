"""Who can sit at a game: the Player protocol, players with a model in this process, a scripted one for tests.

Imported by tools/play_llm_game.py, which calls `reply` for every message of every game; hundreds of games wait for
their replies at the same time. How waiting prompts are gathered into batches is this file's business alone. No torch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

STOP = "stop"  # the reply ended with an end token
LENGTH = "length"  # the reply was cut off at max_new_tokens


@dataclass(frozen=True)
class GameView:
    """What the player who is to speak may know besides the prompt."""

    role: str
    history: tuple[Mapping[str, str], ...]  # messages so far
    max_turns: int
    game: int  # number of the game in its word list, from 0
    target_word: str | None  # None for the defender


@dataclass(frozen=True)
class Reply:
    """One message as its player gave it."""

    text: str
    finish_reason: str  # STOP or LENGTH
    tokens: int  # sampled, the end token included
    prompt_cut: bool = False  # whether the prompt was too long and lost its beginning
    prompt_tokens: int | None = None  # as a server counted them; None for what costs nothing


class ReplyUnavailable(Exception):
    """A reply cannot be had: its game is left unfinished, the others go on."""


class PlayerUnusable(Exception):
    """A player can never answer: the run ends with this message. Finished games are safe."""


class Player(Protocol):
    """Anything that can answer a prompt; it is asked for many games at a time and may answer in any order."""

    async def reply(self, prompt: str, *, view: GameView) -> Reply:
        """The next message of `view.role`.

        ReplyUnavailable gives up this game; any other exception ends the whole run, and finished games are safe.
        """


class ScriptedPlayer:
    """Says what it was told to, for tests: `lines[game][k]` is its k-th message in a game. Remembers what it saw."""

    def __init__(self, lines: Mapping[int, Sequence[str]] | Sequence[Sequence[str]]):
        self.lines = lines
        self.asked: list[tuple[str, GameView]] = []

    async def reply(self, prompt: str, *, view: GameView) -> Reply:
        """The next line of the script."""
        self.asked.append((prompt, view))
        spoken = sum(message["role"] == view.role for message in view.history)
        text = self.lines[view.game][spoken]
        return Reply(text, STOP, len(text.split()))


class BatchModel(Protocol):
    """A language model that answers many prompts at once."""

    def generate(self, prompts: Sequence[str]) -> list[Reply]:
        """One reply per prompt."""


class Batcher:
    """Gathers the prompts of all waiting games and has them answered batch by batch, one batch at a time.

    A batch starts when every live game waits for a reply, or when it is full; never on a timer, so that the same
    games with the same seed make the same batches. With two models, that with more waiting prompts goes first.
    """

    def __init__(self, batch_size: int, on_batch: Callable[[], None] = lambda: None):
        self.batch_size, self.on_batch = batch_size, on_batch  # on_batch is called after each batch
        self.waiting: dict[BatchModel, list[tuple[str, asyncio.Future]]] = {}
        self.runner: asyncio.Task | None = None

    async def submit(self, model: BatchModel, prompt: str) -> Reply:
        """The model's reply, once the prompt's batch has run."""
        future = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(model, []).append((prompt, future))
        if self.runner is None:
            self.runner = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while await self._gather():
                model = max(self.waiting, key=lambda model: len(self.waiting[model]))
                batch = self.waiting[model][: self.batch_size]
                del self.waiting[model][: self.batch_size]
                await self._answer(model, batch)
                self.on_batch()
        finally:
            self.runner = None

    async def _gather(self) -> int:
        """Let the games move until none can, or a batch is full; the number of prompts that wait then."""
        before = None
        while (now := self._num_waiting()) != before and not self._any_full():
            before = now
            await asyncio.sleep(0)  # every other task that can run does so before this one goes on
        return now

    def _num_waiting(self) -> int:
        return sum(len(prompts) for prompts in self.waiting.values())

    def _any_full(self) -> bool:
        return any(len(prompts) >= self.batch_size for prompts in self.waiting.values())

    @staticmethod
    async def _answer(model: BatchModel, batch: list[tuple[str, asyncio.Future]]) -> None:
        try:
            replies = await asyncio.to_thread(model.generate, [prompt for prompt, _ in batch])
        except Exception as error:  # raised again in each game of the batch
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), reply in zip(batch, replies, strict=True):
            if not future.done():
                future.set_result(reply)


class LocalPlayer:
    """Plays with a model in this process; all such players share one batcher, and with it the device."""

    def __init__(self, model: BatchModel, batcher: Batcher):
        self.model, self.batcher = model, batcher

    async def reply(self, prompt: str, *, view: GameView) -> Reply:
        """The model's reply, from whatever batch the prompt ends up in."""
        return await self.batcher.submit(self.model, prompt)
