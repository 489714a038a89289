"""From the players' names on the command line to players. Models that play are loaded here, and torch with them.

A further kind of player is a subclass of Player (tools/players/player.py). Its name is read in `is_local`,
`player_setting` and `make_players`. `default_games_at_once` must count how many messages it answers at once: a player
that is not counted there is taken for a function, which answers at once. A class of its flags is a base of PlayFlags
(tools/players/flags.py). The help texts in tools/play_llm_game.py and tools/evaluate_games.py list the kinds.
"""

import gc
import logging
import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
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
from tools.games.game import Game, load_member, member_setting
from tools.players.flags import PlayFlags
from tools.players.human import HUMAN, HumanPlayer
from tools.players.player import SCRIPTED, Choose, Player, ScriptedPlayer
from tools.players.server import SERVER, ServerPlayer

if TYPE_CHECKING:
    from tools.engine.local import Engine, StartEngine  # bring torch
    from tools.engine.state import TorchState

logger = logging.getLogger(__name__)
SERVER_GAMES = 64  # games at once with a model on a server, unless --concurrent_games says otherwise
NoteEngines = Callable[[Iterable[str]], None]
# One match's models by folder; the key is the text of models and flags.
_loaded: dict[str, dict[Path, "StartEngine"]] = {}
_in_memory = ExitStack()  # the blocks of Engine.loaded that these models are in


def is_local(name: str | Choose) -> bool:
    """Whether this player is a model in this process: a folder, or a name on the hub."""
    return isinstance(name, str) and name != HUMAN and not name.startswith((SCRIPTED, SERVER))


def choose_engine(flags: PlayFlags, names: Sequence[str]) -> PlayFlags:
    """The flags with vllm for `--engine auto`, if there are a GPU and the package. All ranks must call this.

    Logs which engine plays, and why. `engine_notes` notes it in the record of play, STEM_settings.json, as "engines".
    The rest of `auto` needs the loaded model: AutoEngine (tools/engine/slots.py). On a GPU vLLM comes first, because
    it has kernels of its own, and our engine is plain torch. On a CPU `auto` never takes it. If vLLM does not start,
    the program ends, and no other engine takes over (`_start` in tools/engine/vllm.py).
    """
    if not any(map(is_local, names)):
        return flags
    if flags.engine != AUTO:
        logger.info("engine %s: --engine asks for it", flags.engine)
        return flags
    import torch

    if not on_rank_0(torch.cuda.device_count):
        logger.info("engine %s: there is no GPU", SLOTS)
        return flags
    if not has_vllm():
        logger.info("engine %s: the package vllm is not installed (%s)", SLOTS, INSTALL)
        return flags
    logger.info("engine %s: there are a GPU and the package vllm", VLLM)
    return replace(flags, engine=VLLM)


def player_setting(name: str, flags: PlayFlags) -> dict | str:
    """A player as a setting of a stage: all of it that games depend on. A server may move, so its URL is no part.

    A model is compared by the digest of its folder, so `stage` in utils.py refuses to go on with a model that was
    trained again at the same path. What a server computes with is not known: its model has the name alone.
    `differences_from_play` in tools/assign_rewards.py reads "api" and "path" to compare the prompts of rows with those
    of play.
    """
    if name.startswith(SERVER):
        return {"path": name, "api": flags.openai_api}
    if name.startswith(SCRIPTED):
        return member_setting(name.removeprefix(SCRIPTED))
    return model_setting(name) if is_local(name) else name


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

    The models of an earlier match leave memory, unless this one has the same players and flags: matches that differ
    in words and seed alone follow each other.

    Our own engines draw from one generator for all games (`draw` in tools/engine/slots.py). So two runs with the same
    seed differ if free memory, batch size or the number of processes do. `games_left` is part of its seed, so that a
    continued run does not repeat the draws of the games that are there. It is part of the seeds for servers, so that a
    game that a server has refused is drawn anew. vLLM's draws depend on seed, game and message alone. `note_engines`
    is given the names of engines once they have started. If no flag gives the number of games at once or an engine's
    type of numbers, the log alone says what they are.
    """
    folders = {name: model_folder(name).resolve() for name in names if is_local(name)}
    limit = 1 if HUMAN in names else flags.concurrent_games  # a person plays one game after the other
    players: dict[str | Choose, Player] = {}
    engines: dict[Path, Engine] = {}
    if folders:
        from tools.engine.local import ENGINE_THREAD, Batcher, LocalPlayer
        from tools.engine.state import TorchState

        precision = "high" if flags.tf32 else "highest"
        to_load = sorted(set(folders.values()))
        loading = TorchState(precision=precision)
        engines = ENGINE_THREAD.submit(_start_engines, to_load, flags, limit or math.inf, loading).result()
        note_engines(engine.name for engine in engines.values())
        own_seed = random.Random(f"{seed}/{rank()}/{world_size()}/{games_left}").getrandbits(63)
        batcher = Batcher(TorchState(own_seed, precision))
    for name in dict.fromkeys(names):
        if callable(name):
            players[name] = ScriptedPlayer(name, flags.thinking)
        elif name == HUMAN:
            players[name] = HumanPlayer(game)
        elif name.startswith(SCRIPTED):
            players[name] = ScriptedPlayer(load_member(name.removeprefix(SCRIPTED)), flags.thinking)
        elif name.startswith(SERVER):
            players[name] = ServerPlayer(name.removeprefix(SERVER), flags, f"{seed}/{games_left}")
        else:
            players[name] = LocalPlayer(engines[folders[name]], batcher, seed)
    at_once = limit or default_games_at_once(players.values(), engines.values(), games_left)
    for folder, engine in engines.items():
        logger.info("%s: engine %s %s, %d games at once", folder, engine.name, engine.computes_in, at_once)
    return {role: players[name] for role, name in zip(game.roles, names, strict=True)}, at_once


def default_games_at_once(players: Iterable[Player], engines: Collection["Engine"], games_left: int) -> int:
    """As many games as the players answer messages at once, so that none of them waits for work.

    An engine whose `size_limits_games` is true allows at most its `size`, also beside another engine: it keeps the
    keys and values of a game between its messages, and those of more games would displace each other. Plain generate
    keeps none, so with two models the sum keeps both batches full.
    """
    servers = sum(isinstance(player, ServerPlayer) for player in players)
    answered_at_once = servers * SERVER_GAMES + sum(engine.size for engine in engines)
    if not answered_at_once:  # functions answer at once
        return games_left
    limits = [engine.size for engine in engines if engine.size_limits_games]
    return min([answered_at_once, *limits])


def _start_engines(
    folders: Sequence[Path], flags: PlayFlags, limit: float, state: "TorchState"
) -> dict[Path, "Engine"]:
    """An engine by folder, for at most `limit` games at once. Runs in ENGINE_THREAD, as they do.

    `make_players` names each folder once, so a model that plays both roles is in memory once and answers both in one
    batch.
    """
    key = repr(([model_setting(str(folder)) for folder in folders], flags))
    with state.in_use():
        if key not in _loaded:
            drop_models()
            engine_class = resolve_name(ENGINES[flags.engine].path)
            # All models of a match get the same flags. Flags of one player alone, such as chat_template or thinking,
            # would be chosen here by folder, in `make_players` for other players, and recorded by `player_setting`.
            blocks = {folder: engine_class.loaded(folder, flags, len(folders)) for folder in folders}
            _loaded[key] = {folder: _in_memory.enter_context(block) for folder, block in blocks.items()}
        return {folder: start(limit) for folder, start in _loaded[key].items()}


def drop_models() -> None:
    import torch

    _in_memory.close()
    _loaded.clear()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is no GPU
