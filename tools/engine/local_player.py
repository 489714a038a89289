"""Players with a model in this process. The prompts of all games are collected and computed together."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from tools.players.player import Player, Reply, Turn, draw_seed
from utils import model_folder, model_setting

if TYPE_CHECKING:
    from tools.games.chat import ChatTemplate  # brings transformers

# All models are loaded and run in this one thread. OpenMP keeps helper threads for each thread that computes. If there
# are more of them than cores, they sleep between tasks: on two cores a step of 24 games takes 1.6 times as long.
ENGINE_THREAD = ThreadPoolExecutor(max_workers=1)


class Engine(Protocol):
    """Computes the replies of one model to the requests of many games."""

    def start(self, request: int, prompt: str, *, game: int, limit: int | None = None, seed: int = 0) -> None:
        """Queue a request of game number `game`. `limit`: most tokens of the reply (None: --max_new_tokens)."""

    def run(self) -> list[tuple[int, Reply]]:
        """Compute until at least one reply has ended. Returns the (request, reply) pairs of the replies that ended."""


class Batcher:
    """Collects the requests of all games and runs the engines of a process in turn.

    An engine runs when every live game waits for a reply, never on a timer. Therefore the same games with the same
    seed get the same replies. Of two engines, the one with more open requests runs first.
    """

    def __init__(self):
        self.open: dict[Engine, dict[int, asyncio.Future]] = {}
        self.requests = 0
        self.runner: asyncio.Task | None = None

    async def submit(
        self, engine: Engine, prompt: str, *, game: int, limit: int | None = None, seed: int = 0
    ) -> Reply:
        """The engine's reply, of at most `limit` tokens, to a prompt of game number `game`.

        `seed` is for engines that draw each reply by itself. Our own draw from torch's global generator.
        """
        self.requests += 1
        future = asyncio.get_running_loop().create_future()
        self.open.setdefault(engine, {})[self.requests] = future
        engine.start(self.requests, prompt, game=game, limit=limit, seed=seed)
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
        """Let the games go on until all of them wait for a reply. Returns the number of open requests."""
        before = None
        while (now := sum(map(len, self.open.values()))) != before:
            before = now
            await asyncio.sleep(0)  # lets all other tasks run that can
        return now

    async def _answer(self, engine: Engine) -> None:
        futures = self.open[engine]
        try:
            finished = await asyncio.get_running_loop().run_in_executor(ENGINE_THREAD, engine.run)
        except Exception as error:  # raised in each game that waits for this engine
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)
            futures.clear()
            return
        for request, reply in finished:
            future = futures.pop(request)
            if not future.done():
                future.set_result(reply)


class LocalPlayer(Player):
    """Plays with a model in this process. All local players of a process share one batcher."""

    def __init__(self, engine: Engine, batcher: Batcher, chat: "ChatTemplate | None" = None, seed: int | str = 0):
        self.engine, self.batcher, self.chat, self.seed = engine, batcher, chat, seed

    @classmethod
    def make(cls, name: str, lineup, seed: int | str) -> Player:
        """A player with the model of this folder or hub name, which `lineup` has loaded."""
        return lineup.local_player(name, seed)

    @classmethod
    def setting(cls, name: str, flags) -> dict:
        """The model's name, its fingerprint and, from the hub, its commit."""
        return model_setting(name)

    @classmethod
    def tokenizer(cls, name: str, flags) -> str:
        """That of the model's folder."""
        return str(model_folder(name).resolve())

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply."""
        prompt, seed = turn.prompt(self.chat), draw_seed(self.seed, turn)
        return await self.batcher.submit(self.engine, prompt, game=turn.index, limit=self.limit(turn), seed=seed)

    def limit(self, turn: Turn) -> int | None:
        """The most tokens of a reply; None: --max_new_tokens. (The benchmark replaces this.)"""
        return None
