"""Players with a model in this process: the prompts of many games gathered for one device."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tools.games.chat import ChatTemplate
from tools.players.player import Reply, Turn

# Where engines run, always the same thread: OpenMP keeps helpers for each thread that computes; where they outnumber
# the cores, they sleep whenever they have nothing to do, which made play a quarter slower on a CPU.
ENGINE_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")


class Engine(Protocol):
    """A model of this process that works on many requests at once (tools/engine/model.py, tools/engine/slots.py)."""

    def start(self, request: int, prompt: str, *, game: int) -> None:
        """Note a request, for the next `run`; cheap, and safe while `run` is at work in another thread."""

    def run(self) -> list[tuple[int, Reply]]:
        """Work on all requests until at least one has its reply; those that have."""


class Batcher:
    """Lets the engines of a process work in turn, while all games that can go on do so.

    An engine runs when no live game can move without a reply of one; never on a timer, so that the same games with the
    same seed give the same draws. Of two engines, the one with more open requests goes first.
    """

    def __init__(self, batch_size: int, on_batch: Callable[[], None] = lambda: None):
        self.batch_size, self.on_batch = batch_size, on_batch  # on_batch is called every so many replies
        self.open: dict[Engine, dict[int, asyncio.Future]] = {}
        self.requests = self.replies = 0
        self.runner: asyncio.Task | None = None

    async def submit(self, engine: Engine, prompt: str, *, game: int) -> Reply:
        """The engine's reply. `game` is a number by which the prompts of one game are known."""
        self.requests += 1
        future = asyncio.get_running_loop().create_future()
        self.open.setdefault(engine, {})[self.requests] = future
        engine.start(self.requests, prompt, game=game)
        if self.runner is None:
            self.runner = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while await self._gather():
                engine = max(self.open, key=lambda engine: len(self.open[engine]))
                await self._answer(engine)
        finally:
            self.runner = None

    async def _gather(self) -> int:
        """Let the games move until none can; the number of open requests then."""
        before = None
        while (now := sum(map(len, self.open.values()))) != before:
            before = now
            await asyncio.sleep(0)  # every other task that can run does so before this one goes on
        return now

    async def _answer(self, engine: Engine) -> None:
        futures = self.open[engine]
        try:
            finished = await asyncio.get_running_loop().run_in_executor(ENGINE_THREAD, engine.run)
        except Exception as error:  # raised again in each game that waits for this engine
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)
            futures.clear()
            return
        for request, reply in finished:
            future = futures.pop(request)
            if not future.done():
                future.set_result(reply)
        batches, self.replies = self.replies // self.batch_size, self.replies + len(finished)
        for _ in range(self.replies // self.batch_size - batches):
            self.on_batch()


class LocalPlayer:
    """Plays with a model in this process; all such players share one batcher, and with it the device."""

    def __init__(self, engine: Engine, batcher: Batcher, chat: ChatTemplate | None = None):
        self.engine, self.batcher, self.chat = engine, batcher, chat

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply."""
        return await self.batcher.submit(self.engine, turn.prompt(self.chat), game=turn.index)
