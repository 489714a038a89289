"""Players whose model runs in a vLLM server of this process."""

from dataclasses import replace

from tools.engine.model import ModelTokens
from tools.engine.vllm import VLLMServer
from tools.players.player import Reply, ReplyUnavailable, Turn
from tools.players.server import ServerFlags, ServerPlayer, ServerUse, connect

DAY = 86400  # seconds


class VLLMPlayer(ServerPlayer):
    """Plays with the model of a vLLM server. It asks for at most `games` replies at once."""

    def __init__(self, vllm: VLLMServer, tokens: ModelTokens, *, games: int, seed: int | str):
        flags = ServerFlags(openai_base_url=vllm.url, openai_retries=2, openai_timeout=DAY, max_concurrency=games)
        super().__init__(vllm.model, connect(flags, vllm.key), flags, tokens.sampling, ServerUse(flags), tokens, seed)
        self.vllm, self.games, self.most_games = vllm, games, games

    async def reply(self, turn: Turn) -> Reply:
        """The model's reply. Raises PlayerUnusable if the server has ended."""
        try:
            reply = await super().reply(turn)
        except ReplyUnavailable:
            self.vllm.check()
            raise
        return replace(reply, prompt_tokens=None)  # stored only for servers that may charge for them
