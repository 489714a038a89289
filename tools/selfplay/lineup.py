"""From the players' names on the command line to players, and to their entries in the settings file."""

import gc
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.engine import model as models
from tools.engine.generate import BatchEngine
from tools.engine.local_player import ENGINE_THREAD, Batcher, LocalPlayer
from tools.engine.memory import batch_size_for_memory, slots_for_memory
from tools.engine.slots import SlotEngine, can_hold
from tools.engine.vllm import VLLM, VLLMEngine
from tools.games import prompts
from tools.games.game import Game
from tools.players.human import HUMAN, HumanPlayer
from tools.players.player import SCRIPTED, Player, ScriptedPlayer, Turn
from tools.players.server_flags import SERVER, ServerUse, is_server
from tools.selfplay.options import GENERATE, SLOTS, PlayFlags
from utils import UserError, model_fingerprint, model_folder

VLLM_GAMES = 256  # games at once with vLLM, unless a flag says otherwise
logger = logging.getLogger(__name__)


class Lineup:
    """The players of this process. Only the models that play at the moment are in memory, each of them once."""

    def __init__(self, flags: PlayFlags, game: Game):
        self.flags, self.game, self.sampling = flags, game, flags.sampling()
        self.loaded: dict[Path, models.LocalModel] = {}
        self.vllms: dict[Path, VLLMEngine] = {}  # by model folder
        self.tokens: dict[str, models.ModelTokens] = {}  # loaded without their models
        self.slots = True  # whether models in this process play with SlotEngine; else with BatchEngine
        self.batch_size = flags.per_device_eval_batch_size
        self.use = ServerUse()

    def build_players(self, names: Sequence[str], *, seed: int | str = 0) -> tuple[dict[str, Player], int]:
        """Players by role, and how many games to play at once. Models that no longer play leave memory.

        `names` are those of roles[0] and roles[1]. `seed` seeds the draws of servers and vLLM; our own engines draw
        from torch's generator.
        """
        folders = {name: model_folder(name).resolve() for name in names if is_local(name)}
        if self.flags.engine == VLLM:
            of_folder = ENGINE_THREAD.submit(self._vllm_players, set(folders.values()), seed).result()
        else:
            of_folder = ENGINE_THREAD.submit(self._local_players, set(folders.values()), names).result()
        players: dict[str, Player] = {name: of_folder[folder] for name, folder in folders.items()}
        if servers := set(filter(is_server, names)):
            from tools.players.server import ServerPlayer, connect  # needs an optional package

            how = (connect(self.flags), self.flags, self.sampling, self.use)
            players |= {
                name: ServerPlayer(name.removeprefix(SERVER), *how, self._tokens(name), seed) for name in servers
            }
        for name in names:
            if name.startswith(SCRIPTED):
                players[name] = ScriptedPlayer(self.game.scripted(name.removeprefix(SCRIPTED)))
            elif name == HUMAN:
                players[name] = HumanPlayer(self.game)
        return {role: players[name] for role, name in zip(self.game.roles, names, strict=True)}, self._at_once(names)

    def check_opening(self, names: Sequence[str], task: str, templates: prompts.Templates) -> None:
        """Raise UserError if the opening prompt loses rules to --max_length, unless --allow_cuts.

        A player without a known tokenizer is not checked.
        """
        role = self.game.next_role(task, ())
        secrets = self.game.secrets(role, task, ())
        turn = Turn(self.game, role, (), self.flags.turns(self.game), 0, secrets, templates)
        tokens = self._tokens(names[self.game.roles.index(role)])
        if tokens and tokens.encode_turn(turn)[1] and not self.flags.allow_cuts:
            raise UserError(
                f"the opening prompt for {task!r} is longer than --max_length - --max_new_tokens, so it loses the "
                "beginning of the rules; use a larger --max_length, or --allow_cuts True"
            )

    def end(self) -> None:
        """Free the memory of the models in vLLM."""
        ENGINE_THREAD.submit(self._end_vllms).result()

    def _at_once(self, names: Sequence[str]) -> int:
        """How many games to play at once."""
        if HUMAN in names:
            return 1
        if self.flags.concurrent_games:
            return self.flags.concurrent_games
        if self.vllms:
            return self.flags.per_device_eval_batch_size or VLLM_GAMES
        if self.loaded and self.slots:
            return self.batch_size  # every game has its slot, in each engine
        games = self.batch_size * len(self.loaded) if self.loaded else 0  # batch x models games keep one batch full
        return max(games + self.flags.max_concurrency * any(map(is_server, names)), 1)

    def _vllm_players(self, folders: set[Path], seed: int | str) -> dict[Path, Player]:
        """Players by model folder, whose models are in vLLM."""
        flags = self.flags
        if folders != set(self.vllms):
            self._end_vllms()
            how = {"sequences": flags.per_device_eval_batch_size or VLLM_GAMES, "models": len(folders)}
            how |= {"dtype": flags.dtype(), "trust_remote_code": flags.trust_remote_code}
            for folder in sorted(folders):
                self.vllms[folder] = flags.load_vllm(folder, self._tokens(str(folder)), **how)
        batcher, players = Batcher(), {}
        for folder, engine in self.vllms.items():
            engine.drop_requests()
            players[folder] = LocalPlayer(engine, batcher, engine.tokens.chat, seed)
        return players

    def _end_vllms(self) -> None:
        """End all of them at once: a vLLM engine that ends takes down what others in its process share with it."""
        while self.vllms:
            self.vllms.popitem()[1].end()

    def _local_players(self, folders: set[Path], names: Sequence[str]) -> dict[Path, Player]:
        """Players by model folder, whose models are loaded into this process."""
        if folders != set(self.loaded):
            self._load(folders)
        batcher, engine, games = Batcher(), SlotEngine if self.slots else BatchEngine, self._at_once(names)
        return {
            folder: LocalPlayer(engine(local, min(self.batch_size, games)), batcher, local.chat)
            for folder, local in self.loaded.items()
        }

    def _load(self, folders: set[Path]) -> None:
        """Load these models in the place of those in memory; choose their engine and, unless set, the batch size."""
        flags = self.flags
        self.loaded = {folder: model for folder, model in self.loaded.items() if folder in folders}
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no GPU
        how = {"dtype": flags.dtype(), "device_map": flags.device_map, "trust_remote_code": flags.trust_remote_code}
        for folder in sorted(folders - set(self.loaded)):
            local = self.loaded[folder] = models.load_local_model(folder, self.sampling, **how)
            if flags.chat_template:
                local.use_chat_template(str(folder))
        able = all(can_hold(local.model, flags.max_length) for local in self.loaded.values())
        if flags.engine == SLOTS and not able:
            raise UserError(f"--engine {SLOTS} does not know this model's attention; leave --engine out")
        self.slots = able and flags.engine != GENERATE
        sizes = []
        for local in self.loaded.values():
            if self.slots:
                size, local.cache_tokens = slots_for_memory(local.model, engines=len(self.loaded))
                sizes.append(size)
            elif flags.per_device_eval_batch_size is None:
                sizes.append(batch_size_for_memory(local.model, flags.max_length))
        if sizes and flags.per_device_eval_batch_size is None:
            self.batch_size = min(sizes)
            logger.info("--per_device_eval_batch_size %d, from the free memory", self.batch_size)

    def _tokens(self, name: str) -> models.ModelTokens | None:
        """The tokenizer of a model folder or a player, loaded without its model; None if it is not known."""
        if is_local(name):
            name = str(model_folder(name).resolve())
        elif is_server(name) and self.flags.openai_tokenizer:
            name = self.flags.openai_tokenizer
        else:
            return None
        if name not in self.tokens:
            tokens = models.load_tokens(name, self.sampling, trust_remote_code=self.flags.trust_remote_code)
            if self.flags.chat_template:
                tokens.use_chat_template(name)
            self.tokens[name] = tokens
        return self.tokens[name]


def is_local(name: str) -> bool:
    """Whether a player is a model on this machine."""
    return name != HUMAN and not is_server(name) and not name.startswith(SCRIPTED)


def player_setting(name: str, flags: PlayFlags) -> dict | str:
    """A player's entry in the settings file. (A scripted player is part of the game's source.)"""
    if name == HUMAN or name.startswith(SCRIPTED):
        return name
    if is_server(name):
        return flags.server_setting(name)
    return {"path": name, "sha256": model_fingerprint(model_folder(name))}
