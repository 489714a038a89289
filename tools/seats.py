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
from tools.engine import SlotEngine, can_hold
from tools.models import Sampling
from tools.play_flags import AUTO, GENERATE, SAMPLING, SLOTS
from tools.players import Batcher, LocalPlayer, Player
from utils import model_fingerprint

logger = logging.getLogger(__name__)


ENGINES = {SLOTS: SlotEngine, GENERATE: models.BatchEngine}


class Seats:
    """The players of a process: only the models of the games at hand are loaded, equal ones once."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.loaded: dict[Path, models.LocalModel] = {}
        self.batch_size = args.per_device_eval_batch_size
        if self.batch_size == 1:
            logger.info("--per_device_eval_batch_size 1 is slow; leave it out to have it chosen from the free memory")

    def take(self, names: Sequence[str], on_batch: Callable[[], None]) -> tuple[Player, Player, int]:
        """Attacker, defender, and how many games to play at once; earlier models that are not these leave memory."""
        folders = [models.model_folder(name).resolve() for name in names]
        self._load(set(folders))
        batcher = Batcher(self.batch_size, on_batch)
        players = {
            folder: LocalPlayer(ENGINES[self._engine(local)](local, self.batch_size), batcher)
            for folder, local in self.loaded.items()
        }
        attacker, defender = (players[folder] for folder in folders)
        # Of so many games, one of the models always has a full batch waiting.
        return attacker, defender, self.args.concurrent_games or self.batch_size * len(self.loaded)

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
            self.batch_size = min(map(self._batch_size, self.loaded.values()))
            logger.info("--per_device_eval_batch_size %d, from the free memory", self.batch_size)

    def _batch_size(self, local: models.LocalModel) -> int:
        kept_caches = self._engine(local) == SLOTS
        engines = len(self.loaded) if kept_caches else 1  # plain batches run one at a time
        return models.batch_size_for_memory(
            local.model, self.args.max_length, kept_caches=kept_caches, engines=engines
        )

    def _engine(self, local: models.LocalModel) -> str:
        able = can_hold(local.model, self.args.max_length)
        if self.args.engine == SLOTS and not able:
            raise ValueError(f"--engine {SLOTS} does not know this model's attention; leave --engine out")
        if self.args.engine == AUTO:
            return SLOTS if able else GENERATE
        return self.args.engine


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


def model_setting(name: str) -> dict[str, str]:
    """A model as `EpisodeFiles` compares it."""
    return {"path": name, "sha256": model_fingerprint(models.model_folder(name))}
