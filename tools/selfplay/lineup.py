"""Who plays: from the names on the command line to players, and to what the settings file says of them."""

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
from tools.engine.vllm import AUTO, VLLM, VLLMServer
from tools.games import prompts
from tools.games.game import Game
from tools.players.human import HUMAN, HumanPlayer
from tools.players.player import SCRIPTED, Player, ScriptedPlayer, Turn
from tools.players.server_flags import SERVER, ServerUse, is_server
from tools.selfplay.options import GENERATE, SLOTS, PlayFlags
from utils import UserError, model_fingerprint, model_folder, warn_on_rank_0

VLLM_GAMES = 256  # at once, unless a flag says otherwise
MOST_CUT = 0.5  # of the opening prompts
LOOKED_AT = 200  # tasks at most, spread over the list
logger = logging.getLogger(__name__)


class Lineup:
    """The players of a process: only the models of the games at hand are loaded, equal ones once."""

    def __init__(self, flags: PlayFlags, game: Game):
        self.flags, self.game = flags, game
        self.loaded: dict[Path, models.LocalModel] = {}
        self.vllms: dict[tuple[Path, int], VLLMServer] = {}  # by folder and number of servers that share the GPUs
        self.tokens: dict[str, models.ModelTokens] = {}  # of models behind servers
        self.batch_size = flags.per_device_eval_batch_size
        self.use = ServerUse()

    def build_players(self, names: Sequence[str], *, seed: int | str = 0) -> tuple[dict[str, Player], int]:
        """Players by role, and how many games to play at once; models of earlier players leave memory.

        `names` are those of roles[0] and roles[1]. `seed` is that of draws on servers; those of this process come from
        torch's generator.
        """
        folders = {name: model_folder(name).resolve() for name in names if is_local(name)}
        if self.flags.engine == VLLM:
            of_folder = self._vllm_players(set(folders.values()), seed)
        else:
            of_folder = ENGINE_THREAD.submit(self._local_players, set(folders.values()), names).result()
        games = self._games_at_once(names)
        players: dict[str, Player] = {name: of_folder[folder] for name, folder in folders.items()}
        players |= self._server_players([name for name in names if is_server(name)], seed)
        for name in names:
            if name.startswith(SCRIPTED):
                players[name] = ScriptedPlayer(self.game.scripted(name.removeprefix(SCRIPTED)))
        if HUMAN in names:
            players[HUMAN] = HumanPlayer(self.game)
        return {role: players[name] for role, name in zip(self.game.roles, names, strict=True)}, games

    def check_openings(self, names: Sequence[str], tasks: Sequence[str], templates: prompts.Templates) -> None:
        """Warn of opening prompts that lose their rules to --max_length; UserError for most, without --allow_cuts.

        Only the player who opens a game is asked. Players whose tokenizer is not known are skipped.
        """
        players, cuts = dict(zip(self.game.roles, names, strict=True)), []
        for task in tasks[:: -(-len(tasks) // LOOKED_AT)]:
            role = self.game.next_role(task, ())
            if tokens := self._tokens_of(players[role]):
                secrets = self.game.secrets(role, task, ())
                turn = Turn(self.game, role, (), self.flags.turns(self.game), 0, secrets, templates)
                cuts.append(tokens.encode_turn(turn)[1])
        if not any(cuts):
            return
        share = sum(cuts) / len(cuts)
        message = f"{share:.0%} of the opening prompts lose the beginning of the rules to --max_length"
        if share > MOST_CUT and not self.flags.allow_cuts:
            raise UserError(f"{message}; use a larger one, or --allow_cuts True")
        warn_on_rank_0("%s", message)

    def end(self) -> None:
        while self.vllms:
            self.vllms.popitem()[1].end()

    def _games_at_once(self, names: Sequence[str]) -> int:
        if HUMAN in names:
            return 1
        if self.flags.concurrent_games:
            return self.flags.concurrent_games
        if self.vllms:
            return self.flags.per_device_eval_batch_size or VLLM_GAMES
        if self.loaded and all(self._engine(local) == SLOTS for local in self.loaded.values()):
            return self.batch_size  # every game has its slot, in each engine
        # A batch for each model: so many games keep one batch full.
        games = self.batch_size * len(self.loaded) if self.loaded else 0
        if any(map(is_server, names)):
            games += self.flags.max_concurrency
        return max(games, 1)  # none of either: scripted players alone

    def _server_players(self, names: Sequence[str], seed: int | str) -> dict[str, Player]:
        if not names:
            return {}
        from tools.players.server import ServerPlayer, connect  # needs an optional package

        flags, client, sampling = self.flags, connect(self.flags), self.flags.sampling()
        players: dict[str, Player] = {}
        for name in names:
            model, tokens = name.removeprefix(SERVER), self._tokens_of(name)
            players[name] = ServerPlayer(model, client, flags, sampling, self.use, tokens, seed)
        return players

    def _local_players(self, folders: set[Path], names: Sequence[str]) -> dict[Path, Player]:
        self._load(folders)
        batcher, games = Batcher(), self._games_at_once(names)
        players: dict[Path, Player] = {}
        for folder, local in self.loaded.items():
            engine = SlotEngine if self._engine(local) == SLOTS else BatchEngine
            players[folder] = LocalPlayer(engine(local, min(self.batch_size, games)), batcher, local.chat)
        return players

    def _vllm_players(self, folders: set[Path], seed: int | str) -> dict[Path, Player]:
        """Players by model folder; servers of earlier players end, unless they go on playing."""
        from tools.engine.vllm_player import VLLMPlayer  # needs an optional package

        flags, games = self.flags, self.flags.per_device_eval_batch_size or VLLM_GAMES
        wanted = {(folder, len(folders)) for folder in folders}
        for key in set(self.vllms) - wanted:
            self.vllms.pop(key).end()
        for folder, models_here in sorted(wanted - set(self.vllms)):
            server = flags.vllm_server(
                folder,
                max_length=flags.max_length,
                dtype=str(flags.dtype()).removeprefix("torch.") if flags.dtype() else None,
                sequences=games,
                models=models_here,
                trust_remote_code=flags.trust_remote_code,
            )
            self.vllms[folder, models_here] = server.start()
        return {
            folder: VLLMPlayer(server, self._tokens(str(folder)), games=games, seed=seed)
            for (folder, _), server in self.vllms.items()
        }

    def _tokens_of(self, name: str) -> models.ModelTokens | None:
        """The tokenizer of a player; None for one without, and for a server's where --openai_tokenizer is not set."""
        if is_local(name):
            return self._tokens(str(model_folder(name).resolve()))
        if is_server(name) and self.flags.openai_tokenizer:
            return self._tokens(self.flags.openai_tokenizer)
        return None

    def _tokens(self, name: str) -> models.ModelTokens:
        if name not in self.tokens:
            tokens = models.load_tokens(name, self.flags.sampling(), trust_remote_code=self.flags.trust_remote_code)
            if self.flags.chat_template:
                tokens.use_chat_template(name)
            self.tokens[name] = tokens
        return self.tokens[name]

    def _load(self, folders: set[Path]) -> None:
        if folders == set(self.loaded):
            return
        self.loaded = {folder: model for folder, model in self.loaded.items() if folder in folders}
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no GPU
        for folder in sorted(folders - set(self.loaded)):
            self.loaded[folder] = models.load_local_model(
                folder,
                self.flags.sampling(),
                dtype=self.flags.dtype(),
                device_map=self.flags.device_map,
                trust_remote_code=self.flags.trust_remote_code,
            )
            if self.flags.chat_template:
                self.loaded[folder].use_chat_template(str(folder))
        fitting = []
        for local in self.loaded.values():
            if self._engine(local) == SLOTS:
                slots, local.cache_tokens = slots_for_memory(local.model, engines=len(self.loaded))
                fitting.append(slots)
            else:
                fitting.append(batch_size_for_memory(local.model, self.flags.max_length))
        if self.flags.per_device_eval_batch_size is None and self.loaded:
            self.batch_size = min(fitting)
            logger.info("--per_device_eval_batch_size %d, from the free memory", self.batch_size)

    def _engine(self, local: models.LocalModel) -> str:
        able = can_hold(local.model, self.flags.max_length)
        if self.flags.engine == SLOTS and not able:
            raise UserError(f"--engine {SLOTS} does not know this model's attention; leave --engine out")
        if self.flags.engine == AUTO:
            return SLOTS if able else GENERATE
        return self.flags.engine


def is_local(name: str) -> bool:
    """Whether a player is a model of this process."""
    return name != HUMAN and not is_server(name) and not name.startswith(SCRIPTED)


def player_setting(name: str, flags: PlayFlags) -> dict | str:
    """A player as runs are compared by it. (A scripted one is part of the game's source.)"""
    if name == HUMAN or name.startswith(SCRIPTED):
        return name
    if is_server(name):
        return flags.server_setting(name)
    return {"path": name, "sha256": model_fingerprint(model_folder(name))}
