"""Benchmark of self-play: our engine, transformers' generate, and vLLM if it is installed.

    python -m tools.bench play --model FOLDER

All replies are forced to the same length, so that engines differ only in speed. Loading time is not counted.
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
from tools.selfplay.episodes import new_tokens
from tools.selfplay.flags import PlayFlags
from tools.selfplay.make import make_players
from tools.selfplay.play import play_games

SEED = 42
TURNS = 3  # per game
REPLY_TOKENS = 60
GENERATE_SHARE = 6  # generate is slow, so it plays a sixth of the games


@dataclass(kw_only=True)
class Play(FlagGroup):
    """Let a model play games against itself."""

    # By default generate plays 32 games, one batch of it.
    games: int = flag("games to play with each engine (generate: a sixth)", default=192, at_least=1)
    model: str = flag("a model: a folder or a name on the hub")


def measure(model: str, engine: str, games: int) -> tuple[float, int]:
    """Play games and return the seconds taken and the number of new tokens. Other flags have play's defaults."""
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
        except UserError as error:  # the other engines may still work
            print(f"| {engine} | {error} |")
            continue
        print(f"| {engine} | {games} | {60 * games / seconds:.1f} | {tokens / seconds:.1f} |", flush=True)


if __name__ == "__main__":
    run_program(main)
