"""Speed of self-play: the program's defaults beside other ways of generating, a table with ratios and limits.

    python -m tools.bench.play --turns 3 --forced_tokens 32
    python -m tools.bench.play --preset 7b --bf16 True --games 512
    torchrun --nproc_per_node=2 -m tools.bench.play --modes default

A random Llama plays with the real rules. Every mode plays as tools/play_llm_game.py does, with these settings:
release     one game at a time, the whole prompt computed at every turn: as the method was first published;
batched     whole batches by plain `generate`;
continuous  transformers' own continuous batching in the place of the engine (not part of the default modes);
default     the program's defaults: none of its flags that concern speed is set.
Replies are `forced` to --forced_tokens each, or `drawn`: geometric with mean --mean_tokens, cut at --most_tokens.

Columns: "prefill" is the share of the prompts' tokens that was computed, padding counted; "in prefill" and "in decode"
are shares of the time; "peak GiB" is the sum over processes. "limit" is the share of the computed limit that was
reached: what the machine's measured rate of a matrix product and its bandwidth of memory allow if every token is
computed once and, with as many games at a time as here, weights and caches are read once a step; of the two the slower
one counts. It and "ratio", that to release, go by new tokens per second: games of drawn lengths are not equally long.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import utils
from tools.bench.common import LlamaFlags, compare_and_print, describe_run, print_run, print_table, run_ranks
from tools.bench.play_mode import CONTINUOUS, make_inputs, measure
from tools.selfplay.options import GENERATE, PlayFlags
from utils import flag

RELEASE, BATCHED, DEFAULT = "release", "batched", "default"
FORCED, DRAWN = "forced", "drawn"
MODE_FLAGS = {
    RELEASE: {"engine": GENERATE, "per_device_eval_batch_size": 1, "concurrent_games": 1},
    BATCHED: {"engine": GENERATE},
    CONTINUOUS: {},
    DEFAULT: {},
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
    "ratio": "{:.1f}",
}


@dataclass
class Settings(LlamaFlags):
    """What is measured."""

    modes: list[str] = flag("what is measured", default=[RELEASE, BATCHED, DEFAULT], choices=list(MODE_FLAGS))
    lengths: list[str] = flag("how long replies are", default=[FORCED, DRAWN], choices=[FORCED, DRAWN])
    games: int = flag("games of default; about 3 times those at once, or more", default=200)
    slow_games: int = flag("games of batched and continuous", default=64)
    release_games: int = flag("games of release", default=4)
    turns: int = flag("turns of a game", default=5)
    forced_tokens: int = flag("tokens of a reply, where they are forced", default=32)
    mean_tokens: int = flag("mean tokens of a reply, where they are drawn", default=60)
    most_tokens: int = flag("tokens of a reply at most, where they are drawn", default=256)
    bf16: bool = flag("True: bfloat16 weights", default=False)

    def problems(self) -> list[str]:
        """What is wrong with the flags, a phrase each."""
        counts = ("games", "slow_games", "release_games", "turns", "forced_tokens", "most_tokens")
        return super().problems() + utils.too_small(self, **dict.fromkeys(counts, 1), mean_tokens=2)

    def num_games(self, mode: str) -> int:
        """How many games a mode plays."""
        return {RELEASE: self.release_games, DEFAULT: self.games}.get(mode, self.slow_games)

    def play_flags(self, mode: str, lengths: str) -> PlayFlags:
        """The flags of tools/play_llm_game.py; what is not named here keeps its default."""
        most = self.forced_tokens if lengths == FORCED else self.most_tokens
        least = most if lengths == FORCED else 0
        return PlayFlags(
            max_turns=self.turns, max_new_tokens=most, min_new_tokens=least, bf16=self.bf16, **MODE_FLAGS[mode]
        )


def compare(settings: Settings) -> dict:
    """Measure all modes and lengths: the lines of the table, and what they were measured with."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        words = max(settings.num_games(mode) for mode in settings.modes)
        make_inputs(Path(folder), settings, words, settings.mean_tokens, bf16=settings.bf16)
        for lengths in settings.lengths:
            of_lengths = [measure_mode(settings, folder, mode, lengths) for mode in settings.modes]
            relate(of_lengths)
            lines += of_lengths
    rates = {
        "matmul TFLOP/s": max(line["ranks"][0]["matmul_rate"] for line in lines) / 1e12,
        "bandwidth GB/s": max(line["ranks"][0]["bandwidth"] for line in lines) / 1e9,
    }
    return describe_run(settings, lines[0]["ranks"][0]["device"], rates) | {"lines": lines}


def measure_mode(settings: Settings, folder: str, mode: str, lengths: str) -> dict:
    """One line of the table."""
    games = settings.num_games(mode)
    flags = settings.play_flags(mode, lengths)
    ranks = run_ranks(measure, folder, flags, games, settings.seed, mode == CONTINUOUS)
    seconds = max(rank["seconds"] for rank in ranks)
    new_tokens, prompt, prefill = (sum_of(ranks, name) for name in ("new_tokens", "prompt_tokens", "prefill_tokens"))
    parts = {name: ranks[0][f"{name}_seconds"] for name in ("prefill", "decode")}
    line = {
        "lengths": lengths,
        "mode": mode,
        "at once": min(ranks[0]["batch_size"], -(-games // len(ranks))),
        "games": games,
        "games/min": 60 * games / seconds,
        "new tokens/s": new_tokens / seconds,
        "prefill": prefill / prompt or None,  # not counted by transformers' continuous batching
        **{f"in {name}": part / seconds if part else None for name, part in parts.items()},
        "peak GiB": sum_of(ranks, "peak_gib"),
        "new tokens": new_tokens,
        "ranks": ranks,
    }
    if mode == DEFAULT:
        line["limit seconds"] = limit_seconds(settings, ranks, line["at once"])
    return line


def sum_of(ranks: list[dict], name: str) -> float:
    return sum(rank[name] for rank in ranks)


def limit_seconds(settings: Settings, ranks: list[dict], at_once: int) -> dict[str, float]:
    """Seconds that these games, so many at a time in each process, take at the machine's rate and bandwidth.

    Operations: 2 for each weight of the layers and token, computed once; the output layer's for new tokens; attention,
    4 x layers x hidden size x tokens seen. Bytes: the weights once a step, of as many steps as it takes with all games
    under way; with them keys and values of what all prompts begin with; and those that each new token sees besides.
    """
    replies = [tokens for rank in ranks for tokens in rank["reply_tokens"]]
    new = sum(replies)
    seen = new * sum_of(ranks, "prompt_tokens") / sum_of(ranks, "prompts") + sum(tokens**2 for tokens in replies) / 2
    hidden, layers = settings.hidden_size, settings.layers
    operations = 2 * settings.layer_weights * (sum_of(ranks, "prefill_tokens") + new)
    operations += 2 * hidden * settings.vocab_size * new + 4 * layers * hidden * seen
    cache_bytes = 2 * layers * hidden * (2 if settings.bf16 else 4)  # of a token
    steps = new / at_once  # of all processes together
    prefix = ranks[0]["prefix_tokens"]
    read = steps * (ranks[0]["weight_bytes"] + prefix * cache_bytes) + (seen - new * prefix) * cache_bytes
    return {"operations": operations / sum_of(ranks, "matmul_rate"), "bytes": read / sum_of(ranks, "bandwidth")}


def relate(lines: list[dict]) -> None:
    """Add the ratio to release, and the share of the limit, which the default mode's games give."""
    by_mode = {line["mode"]: line for line in lines}
    for line in lines:
        if RELEASE in by_mode:
            line["ratio"] = line["new tokens/s"] / by_mode[RELEASE]["new tokens/s"]
        if DEFAULT in by_mode:
            default = by_mode[DEFAULT]
            line["limit"] = line["new tokens/s"] * max(default["limit seconds"].values()) / default["new tokens"]


def print_report(report: dict) -> None:
    """The table in Markdown, and what it was measured with."""
    print_table(COLUMNS, report["lines"])
    for line in report["lines"]:
        if limits := line.get("limit seconds"):
            parts = ", ".join(f"{seconds:.1f} s by {what}" for what, seconds in limits.items())
            print(f"limit, {line['lengths']} lengths, {line['games']} games: {parts}")
    rates = f"matrix product {report['matmul TFLOP/s']:.3f} TFLOP/s, memory {report['bandwidth GB/s']:.0f} GB/s"
    print_run(report, rates)


def main() -> None:
    compare_and_print(Settings, __doc__, compare, print_report)


if __name__ == "__main__":
    utils.run_program(main)
