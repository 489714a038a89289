"""The speed of self-play: our engine beside transformers' generate, and vLLM where it is installed.

    python -m tools.bench play --model FOLDER

All replies have the same length, which every engine is made to keep, so that engines differ in speed alone. The time
to load a model is not counted.
"""

import asyncio
import time
from dataclasses import dataclass

from tools.common.errors import UserError
from tools.common.flags import FlagGroup, flag, parse_command
from tools.common.models import model_folder
from tools.common.programs import run_program
from tools.engine.flags import GENERATE, SLOTS, VLLM
from tools.engine.vllm import has_vllm
from tools.players.flags import PlayFlags
from tools.players.make import make_players
from tools.selfplay.episodes import new_tokens
from tools.selfplay.play import play_games

SEED = 42
TURNS = 3  # of a game
REPLY_TOKENS = 60
GENERATE_SHARE = 6  # generate is slow, so it plays a sixth of the games


@dataclass(kw_only=True)
class Play(FlagGroup):
    """Play games of a model against itself."""

    # By default generate plays 32 games, as many as it computes at once.
    games: int = flag("games of our engine", default=192, at_least=1)
    model: str = flag("folder or hub name of a model")


def measure(model: str, engine: str, games: int) -> tuple[float, int]:
    """Play games; returns the seconds and the number of new tokens.

    All other flags have the defaults of play: the type of numbers in the model's config, and as many games at once as
    the engine chooses.
    """
    flags = PlayFlags(max_turns=TURNS, engine=engine, min_new_tokens=REPLY_TOKENS, max_new_tokens=REPLY_TOKENS)
    game = flags.load_game()
    episodes = []
    players, at_once = make_players([model, model], game, flags, seed=SEED, games_left=games)
    tasks = [(number, "qzqzq") for number in range(games)]  # no reply contains it by chance
    play = play_games(game, tasks, players, max_turns=TURNS, concurrent_games=at_once, on_episode=episodes.append)
    started = time.monotonic()
    asyncio.run(play)
    return time.monotonic() - started, sum(map(new_tokens, episodes))


def main() -> None:
    flags = parse_command(Play, description=__doc__)
    model = str(model_folder(flags.model))
    print("| engine | games | games/min | new tokens/s |\n|---|---|---|---|")
    for engine in [SLOTS, GENERATE, *([VLLM] if has_vllm() else [])]:
        games = max(1, flags.games // GENERATE_SHARE) if engine == GENERATE else flags.games
        try:
            seconds, tokens = measure(model, engine, games)
        except UserError as error:  # the other engines can play all the same
            print(f"| {engine} | {error} |")
            continue
        print(f"| {engine} | {games} | {60 * games / seconds:.1f} | {tokens / seconds:.1f} |", flush=True)


if __name__ == "__main__":
    run_program(main)
