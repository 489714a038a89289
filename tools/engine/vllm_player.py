"""Players whose model a vLLM server of this process holds; asked as players behind any server, but nothing is paid."""

import math
from collections.abc import Callable
from dataclasses import replace

from tools.engine.model import ModelTokens
from tools.engine.vllm import VLLMServer
from tools.players.budget import TokenBudget
from tools.players.player import Reply, Turn
from tools.players.server import Server, ServerPlayer, Servers
from tools.players.server_flags import ServerFlags


class VLLMPlayer(ServerPlayer):
    """Plays with the model of a server of this process, at most `games` replies at once."""

    def __init__(
        self, vllm: VLLMServer, tokens: ModelTokens, *, games: int, seed: int | str, on_batch: Callable[[], None]
    ):
        flags = ServerFlags(openai_base_url=[vllm.url], max_concurrency=games, openai_timeout=math.inf)
        servers = Servers(flags, tokens.sampling, TokenBudget(), set(), on_batch, key=vllm.key)
        super().__init__(str(vllm.folder), servers, model=vllm.model, tokens=tokens, seed=seed)
        self.vllm = vllm

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply; PlayerUnusable when the server has ended."""
        return replace(await super().reply(turn), prompt_tokens=None)  # which says what is paid

    def _judge(self, error: Exception, server: Server) -> tuple[str, float | None]:
        self.vllm.check()
        return super()._judge(error, server)
