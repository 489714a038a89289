"""Speed and memory of self-play training: this project's defaults beside the usual recipe, a table with ratios.

    python -m tools.bench.train --preset 30m --batch_size 2
    python -m tools.bench.train --preset 30m --batch_size 2 --accumulation 8 --method_rows True
    python -m tools.bench.train --preset 7b --bf16_weights True --gradient_checkpointing True --largest_batch True
    torchrun --nproc_per_node=2 -m tools.bench.train --preset tiny

All modes train a random Llama by OfflinePO on the same random rows, each in a process of its own
(tools/bench/train_mode.py) with the trainer of train.py:
default     reference log-probabilities computed before the first step by the policy itself, logits only at labels;
rebalanced  the same with --train_sampling_strategy batch_rebalance, which deals the rows of a step out by length;
plain       a second, frozen model runs at every step, and logits are (batch, sequence, vocabulary).
`rebalanced` is measured where a step has several micro-batches; all run under --loss_normalization step and have the
same losses but for the order of the rows. Only `plain` passes an attention mask, as is usual.

Columns: tokens are those of the rows, without padding. "with reference" adds the pass over the rows before the first
step, spread over one epoch. "before" is what the process held before the model was built (on a CPU: Python and its
libraries), part of "peak". With several processes tokens, memory and operations are sums over them.
MFU is useful operations over those of a matrix product in the same precision, measured in the same run. Useful are
6 x (parameters of the layers x tokens + parameters of the output layer x scored tokens), and for causal attention
6 x layers x hidden size x length^2 a row: neither the reference nor logits that nothing scores nor recomputation.
"""

import argparse
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import utils

DEFAULT, REBALANCED, PLAIN = "default", "rebalanced", "plain"
SHAPE = ("hidden_size", "layers", "heads", "intermediate_size", "vocab_size")
PRESETS = {
    "tiny": (32, 2, 2, 64, 300),
    "30m": (512, 8, 8, 1376, 8000),
    "1b": (2048, 22, 32, 5632, 32000),
    "7b": (4096, 32, 32, 11008, 32000),
}
PACKAGES = ("torch", "transformers", "accelerate")
COLUMNS = {  # of the table, and how they are printed
    "mode": "{}",
    "batch": "{}",
    "tokens/s": "{:.1f}",
    "with reference": "{:.1f}",
    "s/step": "{:.3f}",
    "peak GiB": "{:.3f}",
    "before GiB": "{:.3f}",
    "first loss": "{:.6f}",
    "last loss": "{:.6f}",
    "MFU": "{:.1%}",
    "padding": "{:.1%}",
}


def parse(argv: list[str]) -> argparse.Namespace:
    """The settings of the command line; ValueError for what is wrong with them."""
    parser = argparse.ArgumentParser(
        "bench_train", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_shape_flags(parser)
    add("--query_tokens", type=int, default=450, help="mean tokens of a row's query")
    add("--target_tokens", type=int, default=60, help="mean tokens of a row's target; a row is longer by BOS and EOS")
    add("--length_spread", type=float, default=0.0, help="S: lengths are drawn from 1 - S to 1 + S times these means")
    add(
        "--method_rows",
        type=utils.parse_bool,
        default=False,
        help="True: two game rows of any turn to one SFT row, of lengths as the method has them, instead of these",
    )
    add("--batch_size", type=int, default=2, help="rows of a micro-batch and process")
    add("--accumulation", type=int, default=1, help="micro-batches of a step")
    add("--steps", type=int, default=10, help="measured steps")
    add("--warmup_steps", type=int, default=2, help="steps before them that are left out, at least 1")
    add("--learning_rate", type=float, default=2e-6, help="learning rate")
    add("--seed", type=int, default=42, help="of weights, rows and their order")
    add("--bf16", type=utils.parse_bool, default=False, help="True: fp32 weights, computing in bf16, as train.py does")
    add("--bf16_weights", type=utils.parse_bool, default=False, help="True: weights and optimizer are bf16 as well")
    add("--gradient_checkpointing", type=utils.parse_bool, default=False, help="True: recompute layers backwards")
    add("--attn_implementation", default="sdpa", help="attention kernel")
    add("--deepspeed", help="DeepSpeed JSON, as for train.py")
    add("--use_cpu", type=utils.parse_bool, default=False, help="True: leave the GPU alone")
    add("--repeats", type=int, default=1, help="measure each mode so often, in turn; the fastest run counts")
    add("--largest_batch", type=utils.parse_bool, default=False, help="True: also double the batch while it fits")
    add("--output", help="also write the figures to this JSON file")
    settings = fill_in_shape(parser.parse_args(argv))
    check(settings)
    return settings


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the Llama that is measured, for `fill_in_shape`."""
    parser.add_argument(
        "--preset", choices=PRESETS, default="30m", help="shape of the Llama; single flags below change it"
    )
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int, help=f"the Llama's {name.replace('_', ' ')}")


def fill_in_shape(settings: argparse.Namespace) -> argparse.Namespace:
    """The settings, with what is not given of the shape as the preset has it."""
    for name, value in zip(SHAPE, PRESETS[settings.preset], strict=True):
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    return settings


def check(settings: argparse.Namespace) -> None:
    positive = (*SHAPE, "query_tokens", "target_tokens", "batch_size", "accumulation")
    positive += ("steps", "warmup_steps", "repeats")
    problems = [f"--{name} must be at least 1" for name in positive if getattr(settings, name) < 1]
    if not 0 <= settings.length_spread < 1:
        problems.append(f"--length_spread must be at least 0 and below 1, got {settings.length_spread}")
    if settings.vocab_size < 5:
        problems.append(f"--vocab_size must be at least 5, got {settings.vocab_size}: four tokens are special")
    if settings.heads > 0 and settings.hidden_size % (2 * settings.heads):
        problems.append("--hidden_size must be a multiple of twice --heads: rotary positions go in pairs")
    if settings.largest_batch and (settings.use_cpu or not torch.cuda.is_available() or utils.world_size() > 1):
        problems.append("--largest_batch needs a GPU and a single process; leave it out here")
    if problems:
        raise ValueError("\n".join(problems))


# --- the table -----------------------------------------------------------------------------------------------------


def run_mode(settings: argparse.Namespace, mode: str) -> dict | None:
    """Measure a mode in fresh processes, one a rank of this launch; None where the GPU's memory did not suffice."""
    with tempfile.TemporaryDirectory() as folder:
        utils.write_json(f"{folder}/settings.json", vars(settings) | {"mode": mode})
        command = [sys.executable, "-m", "tools.bench.train_mode", folder]
        finished = subprocess.run(command, env=os.environ | own_rendezvous(), stdout=sys.stderr)
        if finished.returncode:
            what = f"mode {mode}, batch {settings.batch_size}: its process ended with status {finished.returncode}"
            raise ValueError(f"{what}; its messages stand above (-9: killed, most often for want of memory)")
        result = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    results = everywhere(result)
    return None if None in results else combine(settings, mode, results)


def own_rendezvous() -> dict[str, str]:
    """Environment in which the processes of one mode find each other, apart from those of this launch."""
    if utils.world_size() == 1:
        return {}
    with socket.socket() as free:
        free.bind(("", 0))
        port = everywhere(free.getsockname()[1])[0]
    return {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def everywhere(value) -> list:
    """The values of all ranks."""
    values = [value] * utils.world_size()
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def combine(settings: argparse.Namespace, mode: str, results: list[dict]) -> dict:
    """One line of the table from the figures of all ranks."""
    sums = {name: sum(result["sums"][name] for result in results) for name in results[0]["sums"]}
    seconds, reference = (max(result[name] for result in results) for name in ("seconds", "reference_seconds"))
    losses = results[0]["losses"]
    return sums | {
        "mode": mode,
        "batch": settings.batch_size,
        "tokens/s": sums["tokens"] / seconds,
        "with reference": sums["tokens"] / (seconds + reference),
        "peak GiB": sums["peak_gib"],
        "before GiB": sums["before_gib"],
        "s/step": seconds / settings.steps,
        "first loss": losses[0],
        "last loss": losses[-1],
        "losses": losses,
        "padding": 1 - sums["tokens"] / sums["places"],
        "useful_rate": sums["useful_operations"] / seconds,
        "device": results[0]["device"],
    }


def find_largest(settings: argparse.Namespace, result: dict | None) -> dict | None:
    """The line of the largest batch, doubled from the measured one, that fits; None where even that did not."""
    largest = None
    while result is not None:
        largest, settings = result, argparse.Namespace(**vars(settings) | {"batch_size": 2 * result["batch"]})
        result = run_mode(settings, result["mode"])
    return largest


def compare(settings: argparse.Namespace) -> dict:
    """Measure everything: the lines of the table, ratios, and what they were measured with."""
    several = settings.accumulation * utils.world_size() > 1
    modes = [DEFAULT, REBALANCED, PLAIN] if several else [DEFAULT, PLAIN]
    runs = [[run_mode(settings, mode) for mode in modes] for _ in range(settings.repeats)]
    measured = {"equal batch": [fastest(list(of_mode)) for of_mode in zip(*runs, strict=True)]}
    if settings.largest_batch:
        measured["largest batch"] = [find_largest(settings, line) for line in measured["equal batch"]]
    lines = [line for of_batch in measured.values() for line in of_batch if line]
    if not lines:
        raise ValueError(f"--batch_size {settings.batch_size}: too large for the GPU in every mode; try a smaller one")
    matmul_rate = max(line["matmul_rate"] for line in lines)
    for line in lines:
        line["MFU"] = line["useful_rate"] / matmul_rate
    return {
        "device": lines[0]["device"],
        "processes": utils.world_size(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "settings": vars(settings),
        "matmul TFLOP/s": matmul_rate / 1e12,
        "lines": lines,
        "ratios": {
            f"{line['mode']} / {PLAIN}, {name}": ratios(line, plain)
            for name, (*others, plain) in measured.items()
            for line in others
            if line and plain
        },
        "too large": [mode for mode, line in zip(modes, measured["equal batch"], strict=True) if line is None],
    }


def fastest(lines: list[dict | None]) -> dict | None:
    """The fastest run of one mode; None where one did not fit."""
    return None if None in lines else max(lines, key=lambda line: line["tokens/s"])


def ratios(line: dict, plain: dict) -> dict[str, float]:
    """A mode's / plain's; the peak also without what a process held before the model was built, where that shows."""
    quotients = {name: line[name] / plain[name] for name in ("tokens/s", "with reference", "peak GiB")}
    above = [each["peak GiB"] - each["before GiB"] for each in (line, plain)]
    return quotients | ({"peak - before": above[0] / above[1]} if above[1] else {})


def print_report(report: dict) -> None:
    """The table in Markdown, the ratios, and what they were measured with."""
    rows = [COLUMNS, *([form.format(line[name]) for name, form in COLUMNS.items()] for line in report["lines"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    for mode in report["too large"]:
        print(f"{mode}: out of memory at batch {report['settings']['batch_size']}")
    for name, quotients in report["ratios"].items():
        print(f"{name}: " + ", ".join(f"{what} {value:.3f}" for what, value in quotients.items()))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    where = f"{report['processes']} x {report['device']}"
    print(f"{where}; matrix product {report['matmul TFLOP/s']:.3f} TFLOP/s; {versions}")


def main() -> None:
    settings = parse(sys.argv[1:])
    if utils.world_size() > 1:
        torch.distributed.init_process_group("gloo")
    report = compare(settings)
    if utils.rank() == 0:
        print_report(report)
        if settings.output:
            utils.write_json(settings.output, report)


if __name__ == "__main__":
    utils.run_program(main)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
