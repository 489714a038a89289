"""The speed of self-play: our engine beside transformers' generate, and vLLM where it is installed.

    python -m tools.bench play                     a random Llama of 33.5M parameters
    python -m tools.bench play --model FOLDER      your model on your machine

All replies have the same length, which every engine is made to keep, so that engines differ in speed alone. The time
to load a model is not counted.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tools.common.errors import UserError
from tools.common.files import ROOT, read_words
from tools.common.flags import FlagGroup, flag, parse_command
from tools.common.models import model_folder
from tools.common.programs import run_program
from tools.engine.flags import GENERATE, SLOTS, VLLM
from tools.engine.random_model import random_llama, train_tokenizer
from tools.engine.vllm import has_vllm
from tools.games import load_game
from tools.games.prompts import default_templates
from tools.players.flags import PlayFlags
from tools.players.make import make_players
from tools.selfplay.episodes import new_tokens
from tools.selfplay.play import play_games

SEED = 42
TURNS = 3  # of a game
REPLY_TOKENS = 60
GENERATE_SHARE = 6  # generate is slow, so it plays a sixth of the games
VOCABULARY = 8000
SHAPE = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1376}


@dataclass(kw_only=True)
class Play(FlagGroup):
    """Play games of a model against itself."""

    # By default generate plays 32 games, as many as it computes at once.
    games: int = flag("games of our engine", default=192, at_least=1)
    model: str | None = flag("folder or hub name of a model; unset: a random Llama, without vLLM", default=None)


def write_model(folder: str) -> None:
    texts = [*default_templates(load_game("taboo"))["rules"] * 20, *read_words(ROOT / "data/target_words.txt")]
    train_tokenizer(texts, VOCABULARY).save_pretrained(folder)
    random_llama(VOCABULARY, SEED, **SHAPE, max_position_embeddings=4096).save_pretrained(folder)


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
    if flags.model:
        engines = [SLOTS, GENERATE, VLLM] if has_vllm() else [SLOTS, GENERATE]
        show_speeds(str(model_folder(flags.model)), flags.games, engines)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        show_speeds(folder, flags.games, [SLOTS, GENERATE])


def show_speeds(model: str, games_of_ours: int, engines: Sequence[str]) -> None:
    """Print a line for each engine; one that cannot play says why."""
    print("| engine | games | games/min | new tokens/s |\n|---|---|---|---|")
    for engine in engines:
        games = max(1, games_of_ours // GENERATE_SHARE) if engine == GENERATE else games_of_ours
        try:
            seconds, tokens = measure(model, engine, games)
        except UserError as error:
            print(f"| {engine} | {error} |")
            continue
        print(f"| {engine} | {games} | {60 * games / seconds:.1f} | {tokens / seconds:.1f} |", flush=True)


if __name__ == "__main__":
    run_program(main)
