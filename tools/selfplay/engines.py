"""From the players' names on the command line to players. Models that play are loaded here, and torch with them."""

import gc
import inspect
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tools.engine.vllm import AUTO, VLLM, VLLMEngine, has_vllm
from tools.games.game import Game
from tools.players.human import HUMAN, HumanPlayer
from tools.players.player import SCRIPTED, Player, ScriptedPlayer
from tools.players.server import SERVER, ServerPlayer
from tools.selfplay.flags import GENERATE, SLOTS, PlayFlags
from utils import UserError, files_setting, model_folder, model_setting, on_rank_0, rank, world_size

if TYPE_CHECKING:
    from tools.engine.local import Engine, LocalModel

VLLM_GAMES, GENERATE_PROMPTS = 256, 32  # requests at once, unless --per_device_eval_batch_size says otherwise
# The models of the present match by their folders, under the text of all that their loading depends on.
_loaded: "dict[str, dict[Path, LocalModel | VLLMEngine]]" = {}


def is_local(name: str) -> bool:
    """Whether this player is a model in this process: a folder, or a name on the hub."""
    return name != HUMAN and not name.startswith((SCRIPTED, SERVER))


def choose_engine(flags: PlayFlags, names: Sequence[str]) -> PlayFlags:
    """The flags with the meaning of `--engine auto`: vllm where there are a GPU and the package, else still auto.

    All ranks of the launch must call this.
    """
    if flags.engine != AUTO or not has_vllm() or not any(map(is_local, names)):
        return flags
    import torch

    # Unlike is_available, device_count does not start CUDA, which fixes the GPUs that a process sees.
    return replace(flags, engine=VLLM if on_rank_0(torch.cuda.device_count) else AUTO)


def player_setting(name: str, flags: PlayFlags) -> dict | str:
    """A player as a setting of a stage: all of it that games depend on. A server may move, so its URL is no part."""
    if name.startswith(SERVER):
        return {"path": name, "api": flags.openai_api}
    if name.startswith(SCRIPTED) and ":" in name.removeprefix(SCRIPTED):  # a function in a file of one's own
        return files_setting(inspect.getfile(flags.load_game().scripted(name.removeprefix(SCRIPTED))))
    return model_setting(name) if is_local(name) else name


def make_players(
    names: Sequence[str], game: Game, flags: PlayFlags, *, seed: int | str, games_left: int
) -> tuple[dict[str, Player], int]:
    """Players by role, and how many games to play at once. `names` are those of roles[0] and roles[1].

    The models of an earlier match leave memory. Torch is seeded for this rank. The number of games that are left is a
    part of its seed, so that a resumed run draws anew.
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
    key = repr((folders, flags))
    if key not in _loaded:
        drop_models()
        _loaded[key] = {folder: _load_model(folder, flags, models=len(folders)) for folder in folders}
    engines = dict(_loaded[key])
    for folder, model in _loaded[key].items() if flags.engine != VLLM else ():
        kind, size = BatchEngine, GENERATE_PROMPTS
        if flags.engine != GENERATE and can_hold(model.model, flags.max_length):
            kind, (size, model.cache_tokens) = SlotEngine, slots_for_memory(model.model, engines=len(folders))
        elif flags.engine == SLOTS:
            raise UserError(f"--engine {SLOTS} does not know this model's attention; leave --engine out")
        size = flags.per_device_eval_batch_size or size
        engines[folder] = kind(model, min(size, limit or size))
    return engines


def _load_model(folder: Path, flags: PlayFlags, *, models: int) -> "LocalModel | VLLMEngine":
    from tools.engine.local import load_local_model

    options = {"dtype": flags.dtype(), "trust_remote_code": flags.trust_remote_code}
    if flags.engine == VLLM:
        size = flags.per_device_eval_batch_size or VLLM_GAMES
        model = VLLMEngine(folder, flags, flags.sampling(), size, models=models, **options)
    else:
        model = load_local_model(folder, flags.sampling(), **options)
    tokens = model.tokens if flags.engine == VLLM else model
    tokens.thinking = flags.thinking
    if flags.chat_template:
        tokens.use_chat_template(str(folder))
    return model


def drop_models() -> None:
    """Free the memory of the loaded models."""
    import torch

    for model in [model for models in _loaded.values() for model in models.values() if isinstance(model, VLLMEngine)]:
        model.end()
    _loaded.clear()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is no GPU
