"""The speed of self-play: our engine beside transformers' generate, and vLLM where it is installed.

    python -m tools.bench play                     a random Llama of 33.5M parameters
    python -m tools.bench play --model FOLDER      your model on your machine

The lengths of replies are drawn (geometric, mean 60 tokens, cut at 256), the same for all engines. A model of yours
may end a reply earlier; what it wrote is counted.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tools.engine.flags import GENERATE, SLOTS, VLLM
from tools.engine.local import LocalPlayer, Prompt
from tools.engine.vllm import has_vllm
from tools.flags import flag, parse_command
from tools.games import load_game
from tools.games.prompts import default_templates
from tools.players.player import Reply, Turn
from tools.selfplay.engines import make_players
from tools.selfplay.flags import PlayFlags
from tools.selfplay.play import play_games
from tools.tiny.models import random_llama, train_tokenizer
from utils import ROOT, UserError, read_words, run_program

SEED, TURNS, MEAN_TOKENS, MOST_TOKENS = 42, 3, 60, 256  # turns of a game; tokens of replies
FEWER = {SLOTS: 1, GENERATE: 6, VLLM: 1}  # generate is slow, so it plays a sixth of the games
VOCABULARY = 8000
SHAPE = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1376}


@dataclass(kw_only=True)
class Play:
    """Play games of a model against itself, as tools/play_llm_game.py does."""

    games: int = flag("games of our engine", default=200)
    model: str | None = flag("folder or hub name of a model; unset: a random Llama, without vLLM", default=None)


class TimedPlayer(LocalPlayer):
    async def reply(self, turn: Turn) -> Reply:
        tokens = reply_tokens(turn.index, len(turn.history))
        return await self.batcher.submit(self.engine, Prompt(turn.prompt(), turn.index, tokens))


def reply_tokens(game: int, message: int) -> int:
    return min(MOST_TOKENS, 1 + int(random.Random(f"{game}/{message}").expovariate(1 / MEAN_TOKENS)))


def write_model(folder: str) -> None:
    """Write a model that never ends a reply by itself: the 50 tokens that top-k leaves are always words."""
    texts = [*default_templates(load_game("taboo"))["rules"] * 20, *read_words(ROOT / "data/target_words.txt")]
    tokenizer = train_tokenizer(texts, VOCABULARY)
    model = random_llama(VOCABULARY, SEED, **SHAPE, max_position_embeddings=4096)
    texts = [tokenizer.decode(token, skip_special_tokens=True) for token in range(VOCABULARY)]
    others = [token for token, text in enumerate(texts) if not (text.isascii() and text.strip().isalpha())]
    model.lm_head.weight.data[others] = 0  # logit 0, below those of the 50 likeliest words
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def measure(model: str, engine: str, games: int) -> tuple[float, list[int]]:
    """Play games; returns the seconds and the tokens of each reply."""
    flags, episodes = PlayFlags(max_turns=TURNS, engine=engine), []
    game = flags.load_game()
    players, at_once = make_players([model, model], game, flags, seed=SEED, games_left=games)
    players = {role: TimedPlayer(player.engine, player.batcher, SEED) for role, player in players.items()}
    words = [(number, "qzqzq") for number in range(games)]  # no reply contains it by chance
    play = play_games(game, words, players, max_turns=TURNS, concurrent_games=at_once, on_episode=episodes.append)
    started = time.monotonic()
    asyncio.run(play)
    seconds = time.monotonic() - started
    return seconds, [reply["tokens"] for episode in episodes for reply in episode["replies"]]


def main() -> None:
    flags = parse_command(Play, description=__doc__)
    if flags.model:
        show_speeds(flags.model, flags.games, [SLOTS, GENERATE, *[VLLM] * has_vllm()])
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        show_speeds(folder, flags.games, [SLOTS, GENERATE])


def show_speeds(model: str, most: int, engines: Sequence[str]) -> None:
    """Print a line for each engine; one that cannot play says why."""
    print("| engine | games | games/min | new tokens/s | tokens a reply |\n|---|---|---|---|---|")
    for engine in engines:
        games = max(1, most // FEWER[engine])
        try:
            seconds, tokens = measure(model, engine, games)
        except UserError as error:
            print(f"| {engine} | {error} |")
            continue
        speeds = f"{60 * games / seconds:.1f} | {sum(tokens) / seconds:.1f} | {sum(tokens) / len(tokens):.1f}"
        print(f"| {engine} | {games} | {speeds} |", flush=True)


if __name__ == "__main__":
    run_program(main)
