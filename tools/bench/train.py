"""Speed and memory of self-play training: this project's defaults beside the usual recipe, a table with ratios.

    python -m tools.bench.train --preset 30m --batch_size 2
    python -m tools.bench.train --preset 30m --batch_size 2 --accumulation 8 --method_rows True
    python -m tools.bench.train --preset 7b --bf16_weights True --gradient_checkpointing True
    torchrun --nproc_per_node=2 -m tools.bench.train --preset tiny

All modes train a random Llama by OfflinePO on the same random rows, each in a process of its own, with the trainer of
train.py:
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

import tempfile
from pathlib import Path

import utils
from tools.bench.common import compare_and_print, describe_run, print_run, print_table, run_ranks
from tools.bench.train_mode import Settings, make_inputs, measure

DEFAULT, REBALANCED, PLAIN = "default", "rebalanced", "plain"
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


def modes_of(settings: Settings) -> list[str]:
    """What is measured: rows can only be dealt out by length where a step has several micro-batches."""
    several = settings.accumulation * utils.world_size() > 1
    return [DEFAULT, REBALANCED, PLAIN] if several else [DEFAULT, PLAIN]


def compare(settings: Settings) -> dict:
    """Measure all modes: the lines of the table, ratios, and what they were measured with."""
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), settings)
        runs = [[measure_mode(settings, folder, mode) for mode in modes_of(settings)] for _ in range(settings.repeats)]
    lines = [max(of_mode, key=lambda line: line["tokens/s"]) for of_mode in zip(*runs, strict=True)]
    matmul_rate = max(line["matmul_rate"] for line in lines)
    for line in lines:
        line["MFU"] = line["useful_rate"] / matmul_rate
    *others, plain = lines
    return describe_run(settings, lines[0]["device"], {"matmul TFLOP/s": matmul_rate / 1e12}) | {
        "lines": lines,
        "ratios": {f"{line['mode']} / {PLAIN}": ratios(line, plain) for line in others},
    }


def measure_mode(settings: Settings, folder: str, mode: str) -> dict:
    """One line of the table."""
    ranks = run_ranks(measure, settings, folder, mode == PLAIN, mode == REBALANCED)
    sums = {name: sum(rank["sums"][name] for rank in ranks) for name in ranks[0]["sums"]}
    seconds, reference = (max(rank[name] for rank in ranks) for name in ("seconds", "reference_seconds"))
    losses = ranks[0]["losses"]
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
        "device": ranks[0]["device"],
    }


def ratios(line: dict, plain: dict) -> dict[str, float]:
    """A mode's / plain's; the peak also without what a process held before the model was built, where that shows."""
    quotients = {name: line[name] / plain[name] for name in ("tokens/s", "with reference", "peak GiB")}
    above = [each["peak GiB"] - each["before GiB"] for each in (line, plain)]
    return quotients | ({"peak - before": above[0] / above[1]} if above[1] else {})


def print_report(report: dict) -> None:
    """The table in Markdown, the ratios, and what they were measured with."""
    print_table(COLUMNS, report["lines"])
    for name, quotients in report["ratios"].items():
        print(f"{name}: " + ", ".join(f"{what} {value:.3f}" for what, value in quotients.items()))
    print_run(report, f"matrix product {report['matmul TFLOP/s']:.3f} TFLOP/s")


def main() -> None:
    compare_and_print(Settings, __doc__, compare, print_report)


if __name__ == "__main__":
    utils.run_program(main)
