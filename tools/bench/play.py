"""Speed of self-play: tools/play_llm_game.py as it is beside other ways of generating, a table with ratios and limits.

    python -m tools.bench.play --turns 3 --forced_tokens 32
    python -m tools.bench.play --preset 7b --bf16 True --games 512
    torchrun --nproc_per_node=2 -m tools.bench.play --modes default

A random Llama plays with the real rules. All modes are the program itself, with these settings:
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

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import utils
from tools.bench.play_mode import CONTINUOUS, make_inputs
from tools.bench.train import SHAPE, add_shape_flags, fill_in_shape
from tools.selfplay.options import GENERATE, SLOTS

RELEASE, BATCHED, DEFAULT = "release", "batched", "default"
FORCED, DRAWN = "forced", "drawn"
MODE_FLAGS = {
    RELEASE: ["--engine", GENERATE, "--per_device_eval_batch_size", "1", "--concurrent_games", "1"],
    BATCHED: ["--engine", GENERATE],
    CONTINUOUS: ["--engine", SLOTS],
    DEFAULT: [],
}
PACKAGES = ("torch", "transformers")
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


def parse(argv: list[str]) -> argparse.Namespace:
    """The settings of the command line; ValueError for what is wrong with them."""
    parser = argparse.ArgumentParser(
        "bench_play", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_shape_flags(parser)
    add("--modes", nargs="+", choices=MODE_FLAGS, default=[RELEASE, BATCHED, DEFAULT], help="what is measured")
    add("--lengths", nargs="+", choices=(FORCED, DRAWN), default=[FORCED, DRAWN], help="how long replies are")
    add("--games", type=int, default=200, help="games of default; about 3 times those at once, or more")
    add("--slow_games", type=int, default=64, help="games of batched and continuous")
    add("--release_games", type=int, default=4, help="games of release")
    add("--turns", type=int, default=5, help="turns of a game")
    add("--forced_tokens", type=int, default=32, help="tokens of a reply, where they are forced")
    add("--mean_tokens", type=int, default=60, help="mean tokens of a reply, where they are drawn")
    add("--most_tokens", type=int, default=256, help="tokens of a reply at most, where they are drawn")
    add("--bf16", type=utils.parse_bool, default=False, help="True: bfloat16 weights")
    add("--seed", type=int, default=42, help="of weights and draws")
    add("--output", help="also write the figures to this JSON file")
    settings = fill_in_shape(parser.parse_args(argv))
    counts = ("games", "slow_games", "release_games", "turns", "forced_tokens", "most_tokens")
    problems = [f"--{name} must be at least 1" for name in counts if getattr(settings, name) < 1]
    if settings.mean_tokens < 2:
        problems.append("--mean_tokens must be at least 2")
    if settings.vocab_size < 300:
        problems.append("--vocab_size must be at least 300: a byte-level tokenizer has 256 tokens, and special ones")
    if problems:
        raise ValueError("\n".join(problems))
    return settings


def flags(settings: argparse.Namespace, folder: str, mode: str, lengths: str) -> list[str]:
    """The command line of tools/play_llm_game.py."""
    forced = lengths == FORCED
    most = settings.forced_tokens if forced else settings.most_tokens
    values = {
        "attacker_model_name_or_path": f"{folder}/model",
        "defender_model_name_or_path": f"{folder}/model",
        "data_path": f"{folder}/words.txt",
        "output_dir": f"{folder}/{mode}_{lengths}",
        "model_prefix": "bench",
        "data_suffix": "words",
        "max_games": num_games(settings, mode),
        "taboo_max_turns": settings.turns,
        "max_new_tokens": most,
        "min_new_tokens": most if forced else 0,
        "bf16": settings.bf16,
        "seed": settings.seed,
        "logging_steps": 0,
    }
    return [text for name, value in values.items() for text in (f"--{name}", str(value))] + MODE_FLAGS[mode]


def num_games(settings: argparse.Namespace, mode: str) -> int:
    """How many games a mode plays."""
    return {RELEASE: settings.release_games, DEFAULT: settings.games}.get(mode, settings.slow_games)


def run_mode(settings: argparse.Namespace, folder: str, mode: str, lengths: str) -> dict:
    """Play as the mode does, in processes of its own; one line of the table."""
    utils.write_json(f"{folder}/mode.json", {"mode": mode, "flags": flags(settings, folder, mode, lengths)})
    command = [sys.executable, "-m"]
    if utils.world_size() > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc_per_node={utils.world_size()}", "-m"]
    command += ["tools.bench.play_mode", folder]
    finished = subprocess.run(command, env=utils.plain_environment(), stdout=sys.stderr)
    if finished.returncode:
        what = f"mode {mode}, {lengths} lengths: it ended with status {finished.returncode}"
        raise ValueError(f"{what}; its messages stand above (-9: killed, most often for want of memory)")
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("stats_rank*.json"))]
    return line_of(settings, mode, lengths, ranks, f"{folder}/{mode}_{lengths}/bench_sampling_words_results.json")


def line_of(settings: argparse.Namespace, mode: str, lengths: str, ranks: list[dict], results: str) -> dict:
    """One line of the table, from what the ranks noted and the games."""
    replies = [reply["tokens"] for _, episode in utils.iter_records(results) for reply in episode["replies"]]
    games = num_games(settings, mode)
    seconds = max(stats["seconds"]["play"] for stats in ranks)
    total = {name: sum(stats[name] for stats in ranks) for name in ("prompt", "prefill", "prompts", "peak_gib")}
    at_once = 1 if mode == RELEASE else min(ranks[0]["batch_size"], -(-games // len(ranks)))
    watched = mode in (RELEASE, BATCHED)
    line = {
        "lengths": lengths,
        "mode": mode,
        "at once": at_once,
        "games": games,
        "games/min": 60 * games / seconds,
        "new tokens/s": sum(replies) / seconds,
        "prefill": total["prefill"] / total["prompt"] if mode != CONTINUOUS else None,
        "in prefill": ranks[0]["seconds"]["prefill"] / seconds if watched else None,
        "in decode": ranks[0]["seconds"]["decode"] / seconds if watched else None,
        "peak GiB": total["peak_gib"],
        "new tokens": sum(replies),
        "ranks": ranks,
    }
    if mode == DEFAULT:
        line["limit seconds"] = limit_seconds(settings, ranks, replies, total, at_once)
    return line


def limit_seconds(
    settings: argparse.Namespace, ranks: list[dict], replies: list[int], total: dict, at_once: int
) -> dict:
    """Seconds that these games, so many at a time in each process, take at the machine's rate and bandwidth.

    Operations: 2 for each weight of the layers and token, computed once; the output layer's for new tokens; attention,
    4 x layers x hidden size x tokens seen. Bytes: the weights once a step, of as many steps as it takes with all games
    under way; with them keys and values of what all prompts begin with; and those that each new token sees besides.
    """
    new = sum(replies)
    seen = new * total["prompt"] / total["prompts"] + sum(tokens**2 for tokens in replies) / 2
    layer_weights = settings.layers * (
        4 * settings.hidden_size**2 + 3 * settings.hidden_size * settings.intermediate_size
    )
    output_weights = settings.hidden_size * settings.vocab_size
    operations = 2 * layer_weights * (total["prefill"] + new) + 2 * output_weights * new
    operations += 4 * settings.layers * settings.hidden_size * seen
    number_bytes = 2 if settings.bf16 else 4
    cache_bytes = 2 * settings.layers * settings.hidden_size * number_bytes  # of a token
    steps = new / at_once  # of all processes together
    prefix = ranks[0]["prefix"]
    read = steps * (ranks[0]["weight_bytes"] + prefix * cache_bytes) + (seen - new * prefix) * cache_bytes
    rate, bandwidth = (sum(stats[name] for stats in ranks) for name in ("matmul_rate", "bandwidth"))
    return {"operations": operations / rate, "bytes": read / bandwidth}


def compare(settings: argparse.Namespace) -> dict:
    """Measure all modes and lengths: the lines of the table, and what they were measured with."""
    with tempfile.TemporaryDirectory() as folder:
        shape = {name: getattr(settings, name) for name in SHAPE}
        words = max(num_games(settings, mode) for mode in settings.modes)
        make_inputs(Path(folder), shape, words, settings.mean_tokens, settings.seed, bf16=settings.bf16)
        lines = [run_mode(settings, folder, mode, lengths) for lengths in settings.lengths for mode in settings.modes]
    for lengths in settings.lengths:
        relate([line for line in lines if line["lengths"] == lengths])
    return {
        "device": lines[0]["ranks"][0]["device"],
        "processes": utils.world_size(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "settings": vars(settings),
        "matmul TFLOP/s": max(line["ranks"][0]["matmul_rate"] for line in lines) / 1e12,
        "bandwidth GB/s": max(line["ranks"][0]["bandwidth"] for line in lines) / 1e9,
        "lines": lines,
    }


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
    rows = [list(COLUMNS)]
    for line in report["lines"]:
        rows.append([form.format(line[name]) if line.get(name) is not None else "" for name, form in COLUMNS.items()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    for line in report["lines"]:
        if limits := line.get("limit seconds"):
            parts = ", ".join(f"{seconds:.1f} s by {what}" for what, seconds in limits.items())
            print(f"limit, {line['lengths']} lengths, {line['games']} games: {parts}")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    rates = f"matrix product {report['matmul TFLOP/s']:.3f} TFLOP/s, memory {report['bandwidth GB/s']:.0f} GB/s"
    print(f"{report['processes']} x {report['device']}; {rates}; {versions}")


def main() -> None:
    settings = parse(sys.argv[1:])
    if utils.rank():  # the first process starts those that play
        return
    report = compare(settings)
    print_report(report)
    if settings.output:
        utils.write_json(settings.output, report)


if __name__ == "__main__":
    utils.run_program(main)
