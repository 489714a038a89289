"""From the players' names on the command line to players. Models that play are loaded here, and torch with them."""

import gc
import inspect
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tools.engine.vllm import AUTO, VLLM, VLLMEngine, has_vllm
from tools.games.game import Game
from tools.players.human import HUMAN, HumanPlayer
from tools.players.player import SCRIPTED, Player, ScriptedPlayer
from tools.players.server import SERVER, URL_VARIABLE, ServerPlayer
from tools.selfplay.flags import GENERATE, SLOTS, PlayFlags
from utils import UserError, files_setting, model_folder, model_setting, on_rank_0, rank, world_size

if TYPE_CHECKING:
    from tools.engine.local import Engine, LocalModel

VLLM_GAMES, GENERATE_PROMPTS = 256, 32  # requests at once, unless --per_device_eval_batch_size says otherwise
AnyFlags = TypeVar("AnyFlags", bound=PlayFlags)
# The models of the present match, by folder and the flags that their loading depends on.
_loaded: "dict[tuple, LocalModel | VLLMEngine]" = {}


def is_local(name: str) -> bool:
    """Whether this player is a model in this process: a folder, or a name on the hub."""
    return name != HUMAN and not name.startswith((SCRIPTED, SERVER))


def choose_engine(flags: AnyFlags, names: Sequence[str]) -> AnyFlags:
    """The flags with the meaning of `--engine auto`: vllm where there are a GPU and the package, else still auto.

    All ranks of the launch must call this.
    """
    if flags.engine != AUTO or not has_vllm() or not any(map(is_local, names)):
        return flags
    import torch

    # Unlike is_available, device_count does not start CUDA, which fixes the GPUs that a process sees.
    return replace(flags, engine=VLLM if on_rank_0(torch.cuda.device_count) else AUTO)


def player_setting(name: str, flags: PlayFlags) -> dict | str:
    """A player as a setting of a stage: all of it that games depend on."""
    if name.startswith(SERVER):
        url = flags.openai_base_url or os.environ.get(URL_VARIABLE)
        return {"path": name, "api": flags.openai_api, "base_url": url}
    if name.startswith(SCRIPTED) and ":" in name.removeprefix(SCRIPTED):  # a function in a file of one's own
        return files_setting(inspect.getfile(flags.load_game().scripted(name.removeprefix(SCRIPTED))))
    return model_setting(name) if is_local(name) else name


def make_players(
    names: Sequence[str], game: Game, flags: PlayFlags, *, seed: int | str, games_left: int
) -> tuple[dict[str, Player], int]:
    """Players by role, and how many games to play at once. `names` are those of roles[0] and roles[1].

    Models that no longer play leave memory. Torch is seeded for this rank. The number of games that are left is a part
    of its seed, so that a resumed run draws anew.
    """
    folders = {name: model_folder(name).resolve() for name in names if is_local(name)}
    limit = 1 if HUMAN in names else flags.concurrent_games
    players, engines, sizes = {}, {}, []
    if folders:
        import torch

        from tools.engine.local import ENGINE_THREAD, Batcher, LocalPlayer

        engines = ENGINE_THREAD.submit(_start_engines, sorted(set(folders.values())), flags, limit).result()
        batcher = Batcher()
        torch.manual_seed(random.Random(f"{seed}/{rank()}/{world_size()}/{games_left}").getrandbits(63))
    for name in dict.fromkeys(names):
        if name == HUMAN:
            players[name] = HumanPlayer()
        elif name.startswith(SCRIPTED):
            players[name] = ScriptedPlayer(game.scripted(name.removeprefix(SCRIPTED)), flags.thinking)
        elif name.startswith(SERVER):
            model, sampling = name.removeprefix(SERVER), flags.sampling()
            players[name] = ServerPlayer(model, flags, sampling, seed, thinking=flags.thinking)
            sizes.append(flags.max_concurrency)
        else:
            engine = engines[folders[name]]
            players[name] = LocalPlayer(engine, batcher, engine.tokens.chat, seed)
            sizes.append(engine.size)
    # Enough games to keep all of them busy, but no more than have a place of their own in each engine.
    places = [engine.size for engine in engines.values() if engine.keeps_games]
    at_once = limit or max(1, min([sum(sizes), *places]))
    return {role: players[name] for role, name in zip(game.roles, names, strict=True)}, at_once


def _start_engines(folders: Sequence[Path], flags: PlayFlags, limit: int | None) -> "dict[Path, Engine]":
    """An engine for each model, for at most `limit` games at once. Runs in ENGINE_THREAD, as the engines do."""
    import torch

    from tools.engine.generate import BatchEngine
    from tools.engine.memory import slots_for_memory
    from tools.engine.slots import SlotEngine, can_hold

    torch.set_float32_matmul_precision("high" if flags.tf32 else "highest")
    models = _load_models(folders, flags)
    if flags.engine == VLLM:
        return models
    able = [local for local in models.values() if flags.engine != GENERATE and can_hold(local.model, flags.max_length)]
    if flags.engine == SLOTS and len(able) < len(models):
        raise UserError(f"--engine {SLOTS} does not know this model's attention; leave --engine out")
    slots = []
    for local in able:
        most, local.cache_tokens = slots_for_memory(local.model, engines=len(models))
        slots.append(flags.per_device_eval_batch_size or most)
    engines = {}
    for folder, local in models.items():
        size = min(slots) if local in able else flags.per_device_eval_batch_size or GENERATE_PROMPTS
        engines[folder] = (SlotEngine if local in able else BatchEngine)(local, min(size, limit or size))
    return engines


def _load_models(folders: Sequence[Path], flags: PlayFlags) -> "dict[Path, LocalModel | VLLMEngine]":
    """The models of these folders. Those of an earlier match leave memory before others are loaded."""
    from tools.engine.local import load_local_model

    options = {"dtype": flags.dtype(), "trust_remote_code": flags.trust_remote_code}
    settings = flags.engine, flags.chat_template, flags.thinking, flags.sampling(), *options.values()
    keys = {folder: (folder, *settings) for folder in folders}
    if flags.engine == VLLM and set(keys.values()) != set(_loaded):
        drop_models()  # these engines share the memory
    drop_models(keep=keys.values())
    for folder, key in keys.items():
        if key in _loaded:
            continue
        if flags.engine == VLLM:
            size = flags.per_device_eval_batch_size or VLLM_GAMES
            model = VLLMEngine(folder, flags, flags.sampling(), size, models=len(folders), **options)
        else:
            model = load_local_model(folder, flags.sampling(), **options)
        tokens = model.tokens if flags.engine == VLLM else model
        tokens.thinking = flags.thinking
        if flags.chat_template:
            tokens.use_chat_template(str(folder))
        _loaded[key] = model
    return {folder: _loaded[key] for folder, key in keys.items()}


def drop_models(keep: Sequence[tuple] = ()) -> None:
    """Free the memory of the loaded models, except those with the keys in `keep`."""
    import torch

    for key in set(_loaded) - set(keep):
        if isinstance(model := _loaded.pop(key), VLLMEngine):
            model.end()
        del model
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is no GPU
