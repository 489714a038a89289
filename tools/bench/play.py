"""Speed of self-play: the program's defaults beside other ways of generating, a table with ratios and limits.

    python -m tools.bench.play --turns 3
    python -m tools.bench.play --preset 7b --bf16 True --games 512
    python -m tools.bench.play --modes default --processes 2
    VLLM=~/vllm/bin/vllm python -m tools.bench.play --modes vllm default --rounds 3
    python -m tools.bench.play --modes server default --folder bench --openai_base_url http://127.0.0.1:8000/v1

A random Llama plays with the real rules. Every mode plays as tools/play_llm_game.py does, with these settings:
release     one game at a time, the whole prompt computed at every turn: as the method was first published;
batched     whole batches by plain `generate`;
default     the program's defaults where there is no vLLM: none of its flags that concern speed is set;
vllm        --engine vllm: a server that is started for the run, which is not counted;
server      players behind the server at --openai_base_url, which serves FOLDER/model under that name; any other mode
            with --folder FOLDER writes that.
Replies are `forced` to --forced_tokens each, or `drawn`: geometric with mean --mean_tokens, cut at --most_tokens. The
draw is by seed, game and message, so that all modes play the same lengths.

tools/bench/README.md explains the columns. Of several --rounds, each of which plays all modes in turn, the run of
median speed is shown, and the least, median and largest ratio within a round.
"""

import asyncio
import dataclasses
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import utils
from tools.bench.common import LlamaFlags, Shape, measure_machine, print_results, run_ranks, word_of
from tools.engine.model import own_device
from tools.engine.vllm import VLLM
from tools.flags import flag, parse_flags
from tools.games import load_game
from tools.games.prompts import default_templates
from tools.players.player import Player, Reply, Turn
from tools.selfplay.lineup import Lineup
from tools.selfplay.options import GENERATE, PlayFlags
from tools.selfplay.play import play_games, seed_draws
from tools.tiny.models import train_tokenizer
from tools.tiny.players import ROOT
from trainers import peak_memory_gib

RELEASE, BATCHED, DEFAULT, SERVER = "release", "batched", "default", "server"
FORCED, DRAWN = "forced", "drawn"
MODE_FLAGS = {
    RELEASE: {"engine": GENERATE, "per_device_eval_batch_size": 1, "concurrent_games": 1},
    BATCHED: {"engine": GENERATE},
    DEFAULT: {},
    VLLM: {"engine": VLLM},
    SERVER: {"max_concurrency": 256},
}
COLUMNS = {  # of the table, and how they are printed
    "lengths": "{}",
    "mode": "{}",
    "at once": "{}",
    "games": "{}",
    "games/min": "{:.1f}",
    "new tokens/s": "{:.1f}",
    "prefill": "{:.0%}",
    "in prefill": "{:.0%}",
    "in decode": "{:.0%}",
    "peak GiB": "{:.2f}",
    "limit": "{:.0%}",
    "ratio": "{}",
}


@dataclass
class Settings(LlamaFlags):
    """What is measured."""

    modes: list[str] = flag("what is measured", default=[RELEASE, BATCHED, DEFAULT], choices=list(MODE_FLAGS))
    lengths: list[str] = flag("how long replies are", default=[FORCED, DRAWN], choices=[FORCED, DRAWN])
    games: int = flag("games of default; about 3 times those at once, or more", default=200)
    slow_games: int = flag("games of batched", default=64)
    release_games: int = flag("games of release", default=4)
    turns: int = flag("turns of a game", default=5)
    forced_tokens: int = flag("tokens of a reply, where they are forced", default=32)
    mean_tokens: int = flag("mean tokens of a reply, where they are drawn", default=60)
    most_tokens: int = flag("tokens of a reply at most, where they are drawn", default=256)
    bf16: bool = flag("True: bfloat16 weights", default=False)
    rounds: int = flag("measure all modes so often, in turn", default=1)
    folder: str | None = flag("where model and words are written; unset: nowhere for long", default=None)
    openai_base_url: str | None = flag("of the server of mode server", default=None)

    def __post_init__(self):
        if SERVER in self.modes and not (self.openai_base_url and self.folder):
            raise ValueError(f"--modes {SERVER} needs --openai_base_url, and --folder with the model that is served")

    def num_games(self, mode: str) -> int:
        """How many games a mode plays."""
        return {RELEASE: self.release_games, BATCHED: self.slow_games}.get(mode, self.games)

    def play_flags(self, mode: str, model: str) -> PlayFlags:
        """The flags of tools/play_llm_game.py; what is not named here keeps its default."""
        flags = PlayFlags(max_turns=self.turns, bf16=self.bf16, **MODE_FLAGS[mode])
        if mode == SERVER:
            flags.openai_base_url, flags.openai_tokenizer = [self.openai_base_url], model
        return flags

    def reply_tokens(self, lengths: str, game: int, message: int) -> int:
        """Tokens of a message: the same in every mode."""
        if lengths == FORCED:
            return self.forced_tokens
        uniform = random.Random(f"{self.seed}/{game}/{message}").random()
        return min(self.most_tokens, 1 + int(math.log(1 - uniform) / math.log(1 - 1 / self.mean_tokens)))


def make_inputs(folder: Path, settings: Settings) -> None:
    """Write model/, a random Llama with a tokenizer of this project's texts, and words.txt for all games.

    Replies are plain text that never ends by itself: with --top_k 50 the model draws words and letters only.
    """
    rules = default_templates(load_game())["rules"]
    texts = utils.read_words(ROOT / "data/target_words.txt") + 20 * rules
    tokenizer = train_tokenizer(texts, settings.shape.vocab_size)
    tokenizer.save_pretrained(folder / "model")
    model = settings.llama(max_position_embeddings=4096, dtype=torch.bfloat16 if settings.bf16 else torch.float32)
    texts = [tokenizer.decode(token, skip_special_tokens=True) for token in range(len(model.lm_head.weight))]
    others = [token for token, text in enumerate(texts) if not (text.isascii() and text.strip().isalpha())]
    model.lm_head.weight.data[others] = 0  # less likely than the likeliest 50, half of which are above 0
    model.save_pretrained(folder / "model")
    most = max(map(settings.num_games, settings.modes))
    (folder / "words.txt").write_text("\n".join(map(word_of, range(most))), encoding="utf-8")


# A run.


class FixedLengths:
    """Asks a player for replies of given lengths."""

    def __init__(self, player: Player, tokens: Callable[[int, int], int]):
        self.player, self.tokens = player, tokens

    async def reply(self, turn: Turn) -> Reply:
        """A reply of `tokens(game, message)` tokens."""
        tokens = self.tokens(turn.index, len(turn.history))
        return await self.player.reply(dataclasses.replace(turn, max_new_tokens=tokens))


def measure(settings: Settings, folder: str, mode: str, lengths: str) -> dict:
    """Play this rank's share of a mode's games as tools/play_llm_game.py does; what it took."""
    games = list(enumerate(utils.read_words(f"{folder}/words.txt")[: settings.num_games(mode)]))
    games = games[utils.rank() :: utils.world_size()]
    flags = settings.play_flags(mode, f"{folder}/model")
    game = flags.load_game()
    name = f"openai:{folder}/model" if mode == SERVER else f"{folder}/model"
    tokens = partial(settings.reply_tokens, lengths)
    episodes: list[dict] = []
    lineup = Lineup(flags, game)
    try:
        players, at_once = lineup.build_players([name] * 2, on_batch=lambda: None, seed=settings.seed)
        seed_draws(settings.seed, games_left=len(games))
        start = time.monotonic()
        asyncio.run(
            play_games(
                game,
                games,
                {role: FixedLengths(player, tokens) for role, player in players.items()},
                max_turns=flags.turns(game),
                concurrent_games=at_once,
                on_episode=episodes.append,
            )
        )
        seconds = time.monotonic() - start
    finally:
        lineup.end()
    replies = [reply["tokens"] for episode in episodes for reply in episode["replies"]]
    noted = {"seconds": seconds, "at_once": min(at_once, len(games)), "reply_tokens": replies}
    if mode in (VLLM, SERVER):
        return noted
    engine = players[game.roles[0]].engine
    noted |= {"engine": type(engine).__name__, "peak_gib": peak_memory_gib(own_device())}
    return noted | dataclasses.asdict(engine.counts)


# The table.


def compare(settings: Settings) -> list[dict]:
    """Measure the machine, then all modes and lengths: the lines of the table."""
    lines = []
    machine = run_ranks(settings.processes, measure_machine, settings.bf16)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(settings.folder or own)
        if SERVER not in settings.modes or not (folder / "words.txt").exists():
            make_inputs(folder, settings)
        for lengths in settings.lengths:
            rounds = [
                [measure_mode(settings, machine, str(folder), mode, lengths) for mode in settings.modes]
                for _ in range(settings.rounds)
            ]
            first_mode = [runs[0] for runs in rounds]
            lines += [middle_run(runs, first_mode) for runs in zip(*rounds, strict=True)]
    return lines


def middle_run(runs: Sequence[dict], first_mode: Sequence[dict]) -> dict:
    """A mode's run of median speed, with the ratios of its runs to those of the first mode in the same round."""
    ratios = sorted(run["new tokens/s"] / first["new tokens/s"] for run, first in zip(runs, first_mode, strict=True))
    spread = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(runs) > 1 else ""
    line = sorted(runs, key=lambda run: run["new tokens/s"])[len(runs) // 2]
    return line | {"ratio": f"{statistics.median(ratios):.2f}{spread}"}


def measure_mode(settings: Settings, machine: list[dict], folder: str, mode: str, lengths: str) -> dict:
    """One line of the table."""
    ranks = run_ranks(settings.processes, measure, settings, folder, mode, lengths)
    games, seconds = settings.num_games(mode), max(rank["seconds"] for rank in ranks)
    new_tokens = sum(sum(rank["reply_tokens"]) for rank in ranks)
    line = {
        "lengths": lengths,
        "mode": mode,
        "at once": ranks[0]["at_once"],
        "games": games,
        "games/min": 60 * games / seconds,
        "new tokens/s": new_tokens / seconds,
        "ranks": ranks,
        "machine": machine,
    }
    if mode in (VLLM, SERVER):
        return line
    line["prefill"] = sum_of(ranks, "prefill_tokens") / sum_of(ranks, "prompt_tokens")
    line["peak GiB"] = sum_of(ranks, "peak_gib")
    if mode == DEFAULT:
        limit = limit_seconds(settings.shape, machine, ranks, 2 if settings.bf16 else 4)
        return line | {"limit": max(limit.values()) / seconds}
    return line | {f"in {part}": ranks[0][f"{part}_seconds"] / seconds for part in ("prefill", "decode")}


def sum_of(ranks: list[dict], name: str) -> float:
    return sum(rank[name] for rank in ranks)


def limit_seconds(shape: Shape, machine: list[dict], ranks: list[dict], number_bytes: int) -> dict[str, float]:
    """Seconds that these games, so many at a time in each process, take at the machine's rate and bandwidth.

    Operations: 2 for each weight of the layers and token, computed once; the output layer's for new tokens; attention,
    4 x layers x hidden size x tokens seen. Bytes: the weights once a step, of as many steps as it takes with all games
    under way; with them keys and values of what all prompts begin with; and those that each new token sees besides.
    """
    replies = [tokens for rank in ranks for tokens in rank["reply_tokens"]]
    new = sum(replies)
    seen = new * sum_of(ranks, "prompt_tokens") / sum_of(ranks, "prompts") + sum(tokens**2 for tokens in replies) / 2
    operations = 2 * shape.layer_weights * (sum_of(ranks, "prefill_tokens") + new)
    operations += 2 * shape.hidden_size * shape.vocab_size * new + 4 * shape.layers * shape.hidden_size * seen
    steps, prefix = new / ranks[0]["at_once"], ranks[0]["prefix_tokens"]  # steps of all processes together
    numbers = steps * (shape.parameters + prefix * shape.cache_numbers) + (seen - new * prefix) * shape.cache_numbers
    return {
        "operations": operations / sum_of(machine, "matmul_rate"),
        "bytes": numbers * number_bytes / sum_of(machine, "bandwidth"),
    }


def main() -> None:
    print_results(COLUMNS, compare(parse_flags(Settings, description=__doc__)))


if __name__ == "__main__":
    utils.run_program(main)
