"""From the players' names on the command line to players. Models that play are loaded here."""

import gc
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.engine import model as models
from tools.engine.generate import BatchEngine
from tools.engine.local_player import ENGINE_THREAD, Batcher, Engine, LocalPlayer
from tools.engine.memory import batch_size_for_memory, slots_for_memory
from tools.engine.slots import SlotEngine, can_hold
from tools.engine.vllm import VLLM
from tools.games import prompts
from tools.games.game import Game
from tools.players.player import Player, Turn
from tools.players.server import ServerUse
from tools.selfplay.flags import GENERATE, SLOTS, PlayFlags, kind_of
from utils import UserError, model_folder, rank, world_size

VLLM_GAMES = 256  # games at once with vLLM, unless a flag says otherwise
logger = logging.getLogger(__name__)


def make_player(name: str, lineup: "Lineup", seed: int | str) -> Player:
    """The player of this name. `seed` is that of the draws of servers and vLLM; our engines use torch's generator."""
    return kind_of(name).make(name, lineup, seed)


class Lineup:
    """The players of this process. Only the models that play at the moment are in memory, each of them once."""

    def __init__(self, flags: PlayFlags, game: Game):
        self.flags, self.game, self.sampling = flags, game, flags.sampling()
        self.use = ServerUse(flags)
        self.batch_size = flags.per_device_eval_batch_size or (VLLM_GAMES if flags.engine == VLLM else None)
        self.batcher = Batcher()
        self.engine: type[SlotEngine] | type[BatchEngine] = SlotEngine
        self.loaded: dict[Path, models.LocalModel] = {}
        self.engines: dict[Path, Engine] = {}  # of the models that play
        self.tokens: dict[str, models.ModelTokens] = {}  # by name, loaded without their models
        torch.set_float32_matmul_precision("high" if flags.tf32 else "highest")

    def build_players(
        self, names: Sequence[str], *, seed: int | str, games_left: int
    ) -> tuple[dict[str, Player], int]:
        """Players by role, and how many games to play at once. Models that no longer play leave memory.

        `names` are those of roles[0] and roles[1]. Torch is seeded for this rank. The number of games that are left is
        a part of its seed, so that a resumed run draws anew.
        """
        limit = 1 if any(kind_of(name).at_terminal for name in names) else self.flags.concurrent_games
        folders = {model_folder(name).resolve() for name in names if kind_of(name) is LocalPlayer}
        self.batcher = Batcher()
        start = self._start_vllms if self.flags.engine == VLLM else self._start_engines
        ENGINE_THREAD.submit(start, folders, limit).result()
        players = {name: make_player(name, self, seed) for name in dict.fromkeys(names)}
        busy, most = sum(each.games for each in players.values()), min(each.most_games for each in players.values())
        at_once = limit or max(1, min(busy, most))
        torch.manual_seed(random.Random(f"{seed}/{rank()}/{world_size()}/{games_left}").getrandbits(63))
        return {role: players[name] for role, name in zip(self.game.roles, names, strict=True)}, at_once

    def local_player(self, name: str, seed: int | str) -> Player:
        """A player with a model that plays."""
        engine, tokens = self.engines[model_folder(name).resolve()], self.tokens_of(name)
        player = LocalPlayer(engine, self.batcher, tokens.chat, seed)
        player.games = self.batch_size
        if not isinstance(engine, BatchEngine):
            player.most_games = player.games  # every game has its place, in each engine
        return player

    def tokens_of(self, name: str) -> models.ModelTokens | None:
        """The tokenizer of a player, loaded without its model; None if it is not known."""
        found = kind_of(name).tokenizer(name, self.flags)
        if found and found not in self.tokens:
            tokens = models.load_tokens(found, self.sampling, trust_remote_code=self.flags.trust_remote_code)
            if self.flags.chat_template:
                tokens.use_chat_template(found)
            self.tokens[found] = tokens
        return self.tokens[found] if found else None

    def check_opening(self, names: Sequence[str], task: str, templates: prompts.Templates) -> None:
        """Raise UserError if the opening prompt loses rules to --max_length, unless --allow_cuts.

        A player without a known tokenizer is not checked.
        """
        role = self.game.next_role(task, ())
        secrets = self.game.secrets(role, task, ())
        turn = Turn(self.game, role, (), self.flags.turns(self.game), 0, secrets, templates)
        tokens = self.tokens_of(names[self.game.roles.index(role)])
        if tokens and tokens.encode_turn(turn)[1] and not self.flags.allow_cuts:
            raise UserError(
                f"the opening prompt for {task!r} is longer than --max_length - --max_new_tokens, so it loses the "
                "beginning of the rules; use a larger --max_length, or --allow_cuts True"
            )

    def end(self) -> None:
        """Free the memory of the models in vLLM."""
        if self.flags.engine == VLLM:
            ENGINE_THREAD.submit(self._end_vllms).result()

    def _start_vllms(self, folders: set[Path], limit: int | None) -> None:
        """vLLM engines for these models, without requests of earlier games."""
        flags = self.flags
        if folders != set(self.engines):
            self._end_vllms()
            for folder in sorted(folders):
                self.engines[folder] = flags.load_vllm(
                    folder,
                    self.tokens_of(str(folder)),
                    dtype=flags.dtype(),
                    sequences=self.batch_size,
                    models=len(folders),
                    trust_remote_code=flags.trust_remote_code,
                )
        for engine in self.engines.values():
            engine.drop_requests()

    def _end_vllms(self) -> None:
        """End all of them at once: a vLLM engine that ends takes down what others in its process share with it."""
        while self.engines:
            self.engines.popitem()[1].end()

    def _start_engines(self, folders: set[Path], limit: int | None) -> None:
        """New engines for these models, for at most `limit` games at once."""
        self.engines = {}
        if folders != set(self.loaded):
            self._load(folders)
        for folder, local in self.loaded.items():
            self.engines[folder] = self.engine(local, min(self.batch_size, limit or self.batch_size))

    def _load(self, folders: set[Path]) -> None:
        """Load these models in the place of those in memory; choose their engine and, unless set, the batch size."""
        flags = self.flags
        self.loaded = {folder: local for folder, local in self.loaded.items() if folder in folders}
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no GPU
        for folder in sorted(folders - set(self.loaded)):
            local = self.loaded[folder] = models.load_local_model(
                folder,
                self.sampling,
                dtype=flags.dtype(),
                device_map=flags.device_map,
                trust_remote_code=flags.trust_remote_code,
            )
            if flags.chat_template:
                local.use_chat_template(str(folder))
        able = all(can_hold(local.model, flags.max_length) for local in self.loaded.values())
        if flags.engine == SLOTS and not able:
            raise UserError(f"--engine {SLOTS} does not know this model's attention; leave --engine out")
        self.engine = SlotEngine if able and flags.engine != GENERATE else BatchEngine
        self._set_batch_size()

    def _set_batch_size(self) -> None:
        """Set the size of the caches and, unless a flag does, of batches by the free memory."""
        sizes = []
        for local in self.loaded.values():
            if self.engine is SlotEngine:
                size, local.cache_tokens = slots_for_memory(local.model, engines=len(self.loaded))
                sizes.append(size)
            elif self.flags.per_device_eval_batch_size is None:
                sizes.append(batch_size_for_memory(local.model, self.flags.max_length))
        if sizes and self.flags.per_device_eval_batch_size is None:
            self.batch_size = min(sizes)
            logger.info("--per_device_eval_batch_size %d, from the free memory", self.batch_size)
