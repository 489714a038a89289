"""Who plays: from the names on the command line to players, and to what the settings file says of them.

Imported by tools/play_llm_game.py and tools/evaluate_games.py.
"""

import argparse
import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tools import models
from tools.models import Sampling
from tools.play_flags import SAMPLING
from tools.players import Batcher, LocalPlayer, Player
from tools.server_costs import Meter
from tools.server_flags import is_server, server_setting
from utils import model_fingerprint

logger = logging.getLogger(__name__)


class Seats:
    """The players of a process: only the models of the games at hand are loaded, equal ones once."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.loaded: dict[Path, models.LocalModel] = {}
        self.batch_size = args.per_device_eval_batch_size
        self.meter = Meter()  # of what servers charge
        if self.batch_size == 1:
            logger.info("--per_device_eval_batch_size 1 is slow; leave it out to have it chosen from the free memory")

    def take(self, names: Sequence[str], on_batch: Callable[[], None]) -> tuple[Player, Player, int]:
        """Attacker, defender, and how many games to play at once; earlier models that are not these leave memory."""
        folders = {name: models.model_folder(name).resolve() for name in names if not is_server(name)}
        self._load(set(folders.values()))
        batcher = Batcher(self.batch_size, on_batch)
        local = {folder: LocalPlayer(model, batcher) for folder, model in self.loaded.items()}
        players = {name: local[folder] for name, folder in folders.items()}
        # Of so many games, one of the models always has a full batch waiting.
        games = self.batch_size * len(self.loaded) if self.loaded else 0
        if servers := set(names) - set(folders):
            players |= self._server_players(servers, on_batch)
            games += self.args.max_concurrency
        attacker, defender = (players[name] for name in names)
        return attacker, defender, self.args.concurrent_games or games

    def _server_players(self, names: set[str], on_batch: Callable[[], None]) -> dict[str, Player]:
        from tools.server_player import ServerPlayer, Servers  # an optional package is needed only here

        servers = Servers(self.args, self.meter, on_batch)
        return {name: ServerPlayer(name, servers) for name in names}

    def _load(self, folders: set[Path]) -> None:
        if folders == set(self.loaded):
            return
        self.loaded = {folder: model for folder, model in self.loaded.items() if folder in folders}
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no GPU
        args = self.args
        how = {
            "dtype": torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
            "device_map": args.device_map,
            "trust_remote_code": args.trust_remote_code,
        }
        for folder in sorted(folders - set(self.loaded)):
            self.loaded[folder] = models.load_local_model(folder, sampling_settings(args), **how)
        if args.per_device_eval_batch_size is None:
            sizes = [models.batch_size_for_memory(model.model, args.max_length) for model in self.loaded.values()]
            self.batch_size = min(sizes)
            logger.info("--per_device_eval_batch_size %d, from the free memory", self.batch_size)


def sampling_settings(args: argparse.Namespace) -> Sampling:
    """How replies are drawn, by the flags."""
    return Sampling(
        max_length=args.max_length,
        max_new_tokens=args.max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        do_sample=args.task_type == SAMPLING,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
    )


def model_setting(name: str, args: argparse.Namespace) -> dict:
    """A model as `EpisodeFiles` compares it."""
    if is_server(name):
        return server_setting(name, args)
    return {"path": name, "sha256": model_fingerprint(models.model_folder(name))}
