"""Make players from their names on the command line. Imports torch only if a model plays in this process."""

import gc
import logging
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from tools.common.models import model_folder, model_setting
from tools.common.ranks import on_rank_0, rank, world_size
from tools.common.records import Stage
from tools.engine.flags import AUTO, ENGINES, SLOTS, VLLM
from tools.engine.vllm import INSTALL, has_vllm
from tools.games.game import Game
from tools.players.human import HUMAN, HumanPlayer
from tools.players.player import SCRIPTED, Choose, ModelPlayer, Player, ScriptedPlayer
from tools.players.server import SERVER, ServerPlayer
from tools.selfplay.flags import PlayFlags

if TYPE_CHECKING:
    from tools.engine.local import Engine, StartEngine  # import torch
    from tools.engine.state import TorchState

logger = logging.getLogger(__name__)
# Kinds of players by prefix; any other name is a model: a folder or a name on the hub.
KINDS: dict[str, type[Player]] = {HUMAN: HumanPlayer, SCRIPTED: ScriptedPlayer, SERVER: ServerPlayer}
FORMS = ", ".join([ModelPlayer.form, *(kind.form for kind in KINDS.values())])
NoteEngines = Callable[[Iterable[str]], int]
# Loaded models by folder; the key, made of models and flags, is that of the last match.
_loaded: dict[str, dict[Path, "StartEngine"]] = {}
_in_memory = ExitStack()  # their open `Engine.loaded` blocks


def player_kind(name: str) -> tuple[type[Player], str]:
    """A player's kind, and its name without the kind's prefix."""
    prefix, colon, rest = name.partition(":")
    kind = KINDS.get(prefix + colon)
    return (kind, rest) if kind else (ModelPlayer, name)


def choose_engine(flags: PlayFlags, names: Iterable[str]) -> PlayFlags:
    """Resolve `--engine auto` to vllm if there is a GPU and the package is installed. All ranks must call this.

    On a GPU vLLM has its own kernels, whereas our engine is plain torch. There is no fallback if vLLM fails to start.
    """
    if flags.engine != AUTO or not any(player_kind(name)[0] is ModelPlayer for name in names):
        return flags
    import torch

    if not on_rank_0(torch.cuda.device_count):
        return flags
    if not has_vllm():
        logger.info("engine %s: the package vllm is not installed (%s)", SLOTS, INSTALL)
        return flags
    return replace(flags, engine=VLLM)


def player_setting(name: str, flags: PlayFlags) -> dict | str:
    kind, rest = player_kind(name)
    return kind.setting(rest, flags)


def engine_notes(work: Stage) -> NoteEngines:
    """A function that adds this start's engines to a stage's record, after those of earlier starts.

    It returns the number of this start, from 1.
    """
    earlier = work.notes.get("engines", [])
    names: set[str] = set()

    def note_engines(more: Iterable[str]) -> int:
        names.update(more)
        work.note(engines=[*earlier, sorted(names)])
        return len(earlier) + 1

    return note_engines


def make_players(
    names: Sequence[str | Choose],
    game: Game,
    flags: PlayFlags,
    *,
    seed: int | str,
    games_left: int,
    start: int = 1,
) -> tuple[dict[str, Player], int]:
    """Players by role, and how many games to play at once. `names` are those of roles[0] and roles[1], or functions.

    Models of an earlier match are unloaded unless players and flags are the same.

    Our own engines draw from one generator for all games, so two runs with the same seed differ if free memory, batch
    size or the number of processes differ; vLLM's draws depend only on seed, game and message. So that a continued
    run does not repeat earlier draws, `games_left` is part of our engines' seeds, and `start`, the number of this
    start, of the seeds of servers, whose failed games may be the only ones left again.
    """
    kinds = {name: player_kind(name) for name in names if isinstance(name, str)}
    folders = {name: model_folder(name).resolve() for name, (kind, _) in kinds.items() if kind is ModelPlayer}
    # A person plays one game at a time.
    limit = 1 if any(kind.at_terminal for kind, _ in kinds.values()) else flags.concurrent_games
    players: dict[str | Choose, Player] = {}
    if folders:
        players |= _local_players(folders, flags, limit, seed, games_left)
    for name in dict.fromkeys(names):
        if callable(name):
            players[name] = ScriptedPlayer(name, flags.thinking)
        elif name not in folders:
            kind, rest = kinds[name]
            players[name] = kind.named(rest, game, flags, f"{seed}/{start}")
    at_once = limit or default_games_at_once(set(players.values()), games_left)
    if folders:
        logger.info("%d games at once", at_once)
    return {role: players[name] for role, name in zip(game.roles, names, strict=True)}, at_once


def default_games_at_once(players: Collection[Player], games_left: int) -> int:
    """Enough games that no player waits for work."""
    answered_at_once = sum(player.answers_at_once for player in players)
    if not answered_at_once:  # functions only, which answer immediately
        return games_left
    return int(min(answered_at_once, *(player.max_concurrent_games for player in players)))


def _local_players(
    folders: Mapping[str, Path],
    flags: PlayFlags,
    limit: int | None,
    seed: int | str,
    games_left: int,
) -> dict[str | Choose, Player]:
    """A player for each model. Names of the same folder share one, so that it answers both roles in one batch."""
    from tools.engine.local import ENGINE_THREAD, Batcher, LocalPlayer
    from tools.engine.state import TorchState

    precision = "high" if flags.tf32 else "highest"
    to_load = sorted(set(folders.values()))
    loading = TorchState(precision=precision)
    engines = ENGINE_THREAD.submit(_start_engines, to_load, flags, limit or math.inf, loading).result()
    for folder, engine in engines.items():
        logger.info("%s: engine %s %s", folder, engine.name, engine.computes_in)
    own_seed = random.Random(f"{seed}/{rank()}/{world_size()}/{games_left}").getrandbits(63)
    batcher = Batcher(TorchState(own_seed, precision))
    players = {folder: LocalPlayer(engine, batcher, seed) for folder, engine in engines.items()}
    return {name: players[folder] for name, folder in folders.items()}


def _start_engines(
    folders: Sequence[Path], flags: PlayFlags, limit: float, state: "TorchState"
) -> dict[Path, "Engine"]:
    """Engines by folder, for at most `limit` games at once. Must run in ENGINE_THREAD."""
    key = repr(([model_setting(str(folder)) for folder in folders], flags))
    with state.in_use():
        if key not in _loaded:
            drop_models()
            engine_class = resolve_name(ENGINES[flags.engine].path)
            blocks = {folder: engine_class.loaded(folder, flags, len(folders)) for folder in folders}
            _loaded[key] = {folder: _in_memory.enter_context(block) for folder, block in blocks.items()}
        return {folder: start(limit) for folder, start in _loaded[key].items()}


def drop_models() -> None:
    import torch

    _in_memory.close()
    _loaded.clear()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
