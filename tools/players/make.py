"""From the players' names on the command line to players. Models that play are loaded here, and torch with them."""

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
from tools.players.flags import PlayFlags
from tools.players.human import HUMAN, HumanPlayer
from tools.players.player import SCRIPTED, Choose, ModelPlayer, Player, ScriptedPlayer
from tools.players.server import SERVER, ServerPlayer

if TYPE_CHECKING:
    from tools.engine.local import Engine, StartEngine  # bring torch
    from tools.engine.state import TorchState

logger = logging.getLogger(__name__)
# Kinds of players by what their names begin with; any other name is a model, a folder or of the hub.
KINDS: dict[str, type[Player]] = {HUMAN: HumanPlayer, SCRIPTED: ScriptedPlayer, SERVER: ServerPlayer}
NoteEngines = Callable[[Iterable[str]], None]
# One match's models by folder; the key is the text of models and flags.
_loaded: dict[str, dict[Path, "StartEngine"]] = {}
_in_memory = ExitStack()  # the blocks of Engine.loaded that these models are in


def player_kind(name: str) -> tuple[type[Player], str]:
    """The kind of the player with this name on the command line, and the name without the prefix of the kind."""
    prefix, colon, rest = name.partition(":")
    kind = KINDS.get(prefix + colon)
    return (kind, rest) if kind else (ModelPlayer, name)


def choose_engine(flags: PlayFlags, names: Iterable[str]) -> PlayFlags:
    """The flags with vllm for `--engine auto`, if there are a GPU and the package. All ranks must call this.

    On a GPU vLLM comes first, because it has kernels of its own, and our engine is plain torch. If vLLM does not
    start, the program ends, and no other engine takes over.
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
    """A player as a setting of a stage: all of it that games depend on."""
    kind, rest = player_kind(name)
    return kind.setting(rest, flags)


def engine_notes(work: Stage) -> NoteEngines:
    """A function that notes the engines of this start in the record of a stage, after those of earlier starts."""
    earlier = work.notes.get("engines", [])
    names: set[str] = set()

    def note_engines(more: Iterable[str]) -> None:
        names.update(more)
        work.note(engines=[*earlier, sorted(names)])

    return note_engines


def make_players(
    names: Sequence[str | Choose],
    game: Game,
    flags: PlayFlags,
    *,
    seed: int | str,
    games_left: int,
    note_engines: NoteEngines = lambda names: None,
) -> tuple[dict[str, Player], int]:
    """Players by role, and how many games to play at once. `names` are those of roles[0] and roles[1], or functions.

    The models of an earlier match leave memory, unless this one has the same players and flags: matches that differ in
    words and seed alone follow each other.

    Our own engines draw from one generator for all games, so two runs with the same seed differ if free memory, batch
    size or the number of processes do; vLLM's draws depend on seed, game and message alone. `games_left` is part of
    the seeds of our engines and of servers, so that a continued run does not repeat the draws of the games that are
    there, and draws a game anew that a server has refused. `note_engines` is given the names of engines once they have
    started.
    """
    kinds = {name: player_kind(name) for name in names if isinstance(name, str)}
    folders = {name: model_folder(name).resolve() for name, (kind, _) in kinds.items() if kind is ModelPlayer}
    # A person plays one game after the other.
    limit = 1 if any(kind.at_terminal for kind, _ in kinds.values()) else flags.concurrent_games
    players: dict[str | Choose, Player] = {}
    if folders:
        players |= _local_players(folders, flags, limit, seed, games_left, note_engines)
    for name in dict.fromkeys(names):
        if callable(name):
            players[name] = ScriptedPlayer(name, flags.thinking)
        elif name not in folders:
            kind, rest = kinds[name]
            players[name] = kind.named(rest, game, flags, f"{seed}/{games_left}")
    at_once = limit or default_games_at_once(set(players.values()), games_left)
    if folders:
        logger.info("%d games at once", at_once)
    return {role: players[name] for role, name in zip(game.roles, names, strict=True)}, at_once


def default_games_at_once(players: Collection[Player], games_left: int) -> int:
    """As many games as the players answer messages at once, so that none of them waits for work."""
    answered_at_once = sum(player.answers_at_once for player in players)
    if not answered_at_once:  # functions answer at once
        return games_left
    return int(min(answered_at_once, *(player.max_concurrent_games for player in players)))


def _local_players(
    folders: Mapping[str, Path],
    flags: PlayFlags,
    limit: int | None,
    seed: int | str,
    games_left: int,
    note_engines: NoteEngines,
) -> dict[str | Choose, Player]:
    """A player for each model; names of the same folder share one, so that it answers both roles in one batch."""
    from tools.engine.local import ENGINE_THREAD, Batcher, LocalPlayer
    from tools.engine.state import TorchState

    precision = "high" if flags.tf32 else "highest"
    to_load = sorted(set(folders.values()))
    loading = TorchState(precision=precision)
    engines = ENGINE_THREAD.submit(_start_engines, to_load, flags, limit or math.inf, loading).result()
    note_engines(engine.name for engine in engines.values())
    for folder, engine in engines.items():
        logger.info("%s: engine %s %s", folder, engine.name, engine.computes_in)
    own_seed = random.Random(f"{seed}/{rank()}/{world_size()}/{games_left}").getrandbits(63)
    batcher = Batcher(TorchState(own_seed, precision))
    players = {folder: LocalPlayer(engine, batcher, seed) for folder, engine in engines.items()}
    return {name: players[folder] for name, folder in folders.items()}


def _start_engines(
    folders: Sequence[Path], flags: PlayFlags, limit: float, state: "TorchState"
) -> dict[Path, "Engine"]:
    """An engine by folder, for at most `limit` games at once. Runs in ENGINE_THREAD, as engines do."""
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
    torch.cuda.empty_cache()  # does nothing where there is no GPU
