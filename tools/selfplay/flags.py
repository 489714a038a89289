"""The flags that all programs that play games share, and the kinds of players that their names may mean. No torch."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tools.engine.local_player import LocalPlayer
from tools.engine.vllm import AUTO, VLLM, VLLMFlags, choose_engine
from tools.flags import flag
from tools.games import prompts
from tools.games.flags import GameFlags
from tools.games.game import Game
from tools.players.human import HUMAN, HumanPlayer
from tools.players.player import SAMPLING, SCRIPTED, TESTING, Player, Sampling, ScriptedPlayer
from tools.players.server import SERVER, ServerFlags, ServerPlayer
from utils import from_rank_0, tokenizer_fingerprint, too_small

# Players that are no models on this machine, by their name or by its beginning up to a colon.
KINDS: dict[str, type[Player]] = {HUMAN: HumanPlayer, SCRIPTED: ScriptedPlayer, SERVER: ServerPlayer}
SLOTS, GENERATE = "slots", "generate"
# Flags that are also fields of Sampling.
DRAWS = ("max_length", "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p")
Own = TypeVar("Own", bound="PlayFlags")


def kind_of(name: str) -> type[Player]:
    """The class of the player with this name: one of KINDS, else a model on this machine."""
    beginning, colon, _ = name.partition(":")
    return KINDS.get(beginning + colon, LocalPlayer)


@dataclass(kw_only=True)
class PlayFlags(GameFlags, ServerFlags, VLLMFlags):
    """First the flags that games depend on besides players, words and seed, then how this machine plays them."""

    task_type: str = flag("sample tokens, or take the likeliest", default=SAMPLING, choices=(SAMPLING, TESTING))
    max_turns: int | None = flag(
        "turns of a game, each of one message per player; unset: the game's default",
        default=None,
        names=["taboo_max_turns"],
    )
    chat_template: bool = flag("True: prompts in the chat templates of the tokenizers", default=False)
    max_length: int = flag("tokens of prompt and reply together; longer prompts lose their beginning", default=2048)
    max_new_tokens: int = flag("largest number of tokens of a reply", default=256)
    min_new_tokens: int = flag("smallest number of tokens of a reply", default=0)
    temperature: float = flag("sampling temperature", default=1.2)
    top_k: int = flag("sample from the k likeliest tokens; 0: from all", default=50)
    top_p: float = flag("sample from the likeliest tokens that have this total probability", default=1.0)
    bf16: bool = flag("True: bfloat16 instead of the type in the model's config", default=False)
    fp16: bool = flag("True: float16 instead of the type in the model's config", default=False)

    engine: str = flag(
        "slots: continuous batching with kept keys and values; generate: batches of transformers' generate; vllm: "
        "vLLM in this process; auto: vllm if there are a GPU and the package vllm, else slots if the "
        "engine can compute the model's attention, else generate",
        default=AUTO,
        choices=(AUTO, VLLM, SLOTS, GENERATE),
    )
    per_device_eval_batch_size: int | None = flag("prompts answered at once; unset: as memory allows", default=None)
    concurrent_games: int | None = flag("games played at once; unset: one batch for each model", default=None)
    tf32: bool = flag("True: compute float32 products in TF32 on GPUs that can", default=False)
    device_map: str | None = flag("auto: spread each model over all GPUs; one process per machine", default=None)
    trust_remote_code: bool = flag("True: run Python code that comes with a model", default=False)
    logging_steps: int = flag("show a game after every so many batches of messages; 0: none", default=10)
    allow_cuts: bool = flag("True: play although --max_length cuts the rules off the first prompt", default=False)

    def turns(self, game: Game) -> int:
        """Turns of a game."""
        return game.max_turns if self.max_turns is None else self.max_turns

    def problems(self, names: Sequence[str]) -> list[str]:
        """What is wrong with these flags for these players, one phrase for each problem."""
        problems = too_small(self, max_turns=1, max_new_tokens=1, min_new_tokens=0, top_k=0, logging_steps=0)
        problems += too_small(self, per_device_eval_batch_size=1, concurrent_games=1)
        if self.max_length <= self.max_new_tokens:
            problems.append(
                f"--max_length {self.max_length} leaves no room for a prompt: it must be larger than "
                f"--max_new_tokens {self.max_new_tokens}"
            )
        if self.min_new_tokens > self.max_new_tokens:
            problems.append(f"--min_new_tokens {self.min_new_tokens} is above --max_new_tokens {self.max_new_tokens}")
        if not 0 < self.temperature < math.inf:
            problems.append(f"--temperature is {self.temperature}; it must be above 0 ({TESTING} is greedy)")
        if not 0 < self.top_p <= 1:
            problems.append(f"--top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.bf16 and self.fp16:
            problems.append("--bf16 and --fp16 exclude each other")
        if self.engine == VLLM and self.device_map:
            problems.append(f"--device_map is not for --engine {VLLM}, which has --tensor_parallel_size")
        problems += self.vllm_problems(self.engine)
        for kind in dict.fromkeys(map(kind_of, names)):
            problems += kind.problems(self)
        return problems

    def with_engine(self: Own, names: Sequence[str], begun: Mapping) -> Own:
        """These flags with the meaning of `--engine auto`: vLLM, or still auto for our own engines.

        `begun` are the settings of the games that are there already: a run keeps the engine that it began with. All
        ranks of the launch must call this.
        """
        if self.engine != AUTO or all(kind_of(name) is not LocalPlayer for name in names):
            return self

        def choose() -> str:
            if begun:
                return VLLM if begun.get("engine") == VLLM else AUTO
            return AUTO if self.device_map else choose_engine()

        return replace(self, engine=from_rank_0(choose))

    def sampling(self) -> Sampling:
        """How replies are drawn."""
        return Sampling(**{name: getattr(self, name) for name in DRAWS}, do_sample=self.task_type == SAMPLING)

    def dtype(self) -> str | None:
        """The type of models on this machine, by torch's name; None: the one in each model's config."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else None

    def settings(self, game: Game, templates: prompts.Templates) -> dict:
        """The settings that games depend on besides players, words and seed."""
        names = ("task_type", *DRAWS, "bf16", "fp16", "tf32", "engine", "chat_template", "vllm_args")
        own = {name: getattr(self, name) for name in names}
        return self.game_settings(game, templates) | {"max_turns": self.turns(game)} | own

    def player_setting(self, name: str) -> dict | str:
        """A player's entry among the settings."""
        return kind_of(name).setting(name, self)

    def tokenizer_fingerprints(self, players: Mapping[str, str]) -> dict[str, str]:
        """`utils.tokenizer_fingerprint` of the tokenizers that are known. `players`: names on the command line."""
        tokenizers = {label: kind_of(name).tokenizer(name, self) for label, name in players.items()}
        return {label: tokenizer_fingerprint(found) for label, found in tokenizers.items() if found}


def words_setting(path: str, words: list[str]) -> dict[str, str]:
    """A word list's entry among the settings."""
    return {"path": path, "sha256": hashlib.sha256("\n".join(words).encode()).hexdigest()}
