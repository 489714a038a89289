"""The flags that all programs that play games share. No torch."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from tools.engine.vllm import AUTO, VLLM, VLLMFlags
from tools.flags import GameFlags, flag
from tools.games.game import Game
from tools.players.player import Sampling
from tools.players.server import ServerFlags
from utils import warn_on_rank_0

SLOTS, GENERATE = "slots", "generate"  # values of --engine, beside AUTO and VLLM
ROOM_FOR_THOUGHTS = 1024  # tokens of a reply below which many thoughts are cut


@dataclass(kw_only=True)
class PlayFlags(GameFlags, Sampling, ServerFlags, VLLMFlags):
    """Beside sampling, first the flags that games depend on, then how this machine plays them."""

    max_turns: int | None = flag(
        "turns of a game, each of one message per player; unset: the game's default",
        default=None,
        names=["taboo_max_turns"],
        at_least=1,
    )
    chat_template: bool = flag("True: prompts in the chat templates of the tokenizers", default=False)
    thinking: bool = flag("True: replies begin with a thought, which the other player does not read", default=False)
    bf16: bool = flag("True: bfloat16 instead of the type in the model's config", default=False)
    fp16: bool = flag("True: float16 instead of the type in the model's config", default=False)

    engine: str = flag(
        "slots: continuous batching with kept keys and values; generate: batches of transformers' generate; vllm: "
        "vLLM in this process; auto: vllm if there are a GPU and the package vllm, else slots if the "
        "engine can compute the model's attention, else generate",
        default=AUTO,
        choices=(AUTO, VLLM, SLOTS, GENERATE),
    )
    per_device_eval_batch_size: int | None = flag(
        "prompts at once; unset: by memory (generate: 32)", default=None, at_least=1
    )
    concurrent_games: int | None = flag(
        "games played at once; unset: one batch for each model", default=None, at_least=1
    )
    tf32: bool = flag("True: compute float32 products in TF32 on GPUs that can", default=False)
    trust_remote_code: bool = flag("True: run Python code that comes with a model", default=False)
    logging_steps: int = flag("show a game after every so many batches of messages; 0: none", default=10)

    def turns(self, game: Game) -> int:
        return game.max_turns if self.max_turns is None else self.max_turns

    def dtype(self) -> str | None:
        """The type of models on this machine, by torch's name; None: the one in each model's config."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else None

    def warn(self) -> None:
        """Log what is likely to spoil the games."""
        if self.thinking and self.max_new_tokens < ROOM_FOR_THOUGHTS:
            warn_on_rank_0("--max_new_tokens below %d: many thoughts will be cut", ROOM_FOR_THOUGHTS)

    def settings(self, game: Game) -> dict:
        """The settings that games depend on besides players, words and seed."""
        names = [field.name for field in dataclasses.fields(Sampling)]
        names += ["bf16", "fp16", "tf32", "chat_template", "thinking", "vllm_args"]
        values = {name: getattr(self, name) for name in names}
        return {**self.game_settings(game), "max_turns": self.turns(game), **values}


def words_setting(path: str, words: Sequence[str]) -> dict[str, str]:
    return {"path": path, "sha256": hashlib.sha256("\n".join(words).encode()).hexdigest()}
