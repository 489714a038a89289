"""What an epoch of the method takes on GPUs that are not at hand: hours and memory, computed and not measured.

    python -m tools.bench.epoch --gpus 8

Columns, all computed:
games at once: whose keys and values fit in the memory share of play, at their mean length.
slots, h: play by our own engine: operations and bytes at half of the data sheet's rates. Each token is computed once;
  each step reads the weights and the keys and values of the rules once, and those of every game, and is never faster
  than its launches.
vLLM, h: play at a rate of new tokens that somebody published for such a GPU.
training by: what DEEPSPEED=auto of the loop chooses for micro-batches of 2 rows; on one GPU also LoRA.
GiB: of each GPU in training (tools/loop/fit.py): states, DeepSpeed's buffers, activations, logits.
training, h: 8 operations a parameter and token, padding included, 6 with LoRA, and 2 in the reference pass, at half of
  the peak rate. A micro-batch is never faster than its launches, nor than the weights and gradients it moves.
"""

from dataclasses import dataclass
from typing import NamedTuple

import utils
from tools.bench.common import SHAPES, Shape, print_table
from tools.engine.memory import MEMORY_SHARE, MOST_GAMES
from tools.flags import flag, parse_flags
from tools.loop import fit

GIB = 2**30
SHARE = 0.5  # of a data sheet's rates that kernels reach
LAUNCH = 6e-6  # seconds to launch a kernel of plain torch
LAUNCHES = 62  # kernels of a layer in a step of play, counted in tests/test_engine_gpu.py
TRAIN_LAUNCHES = 180  # of a layer in a micro-batch: forward twice, backward
PYTHON = 10e-6  # seconds that planning a step takes for each game
LINK, PCIE, HOST = 200e9, 25e9, 200e9  # bytes/s: between GPUs, from a GPU to RAM, of a machine's RAM
ROWS, GPUS_A_MACHINE = 2, 8  # rows of a micro-batch


class GPU(NamedTuple):
    """By the vendor's data sheet: memory, bandwidth, dense bf16 rate."""

    gib: float
    bytes_per_second: float
    operations_per_second: float


MODELS = ("1b", "7b", "13b", "70b")
GPUS = {
    "A100-40": GPU(40, 1.555e12, 312e12),
    "A100-80": GPU(80, 2.039e12, 312e12),
    "H100": GPU(80, 3.35e12, 989e12),
    "H200": GPU(141, 4.8e12, 989e12),
}
PUBLISHED = {  # new tokens/s by vLLM on so many GPUs, of a model of about this size
    ("7b", "A100-80"): (3363, 1),  # DeepSeek-R1-Distill-Qwen-7B: morphllm.com/vllm-benchmarks, April 2026
    ("7b", "H100"): (12_500, 1),  # Llama 3.1 8B: the same page
    ("13b", "A100-80"): (3004, 1),  # DeepSeek-R1-Distill-Qwen-14B: the same page
    ("70b", "A100-80"): (756, 4),  # Llama 3.3 70B, 200 ShareGPT prompts: vllm-project/vllm issue 12315
}
COLUMNS = {"model": "{}", "GPU": "{}", "games at once": "{}", "slots, h (computed)": "{:.2g}"}
COLUMNS |= {"vLLM, h (published rate)": "{:.2g}", "training by": "{}", "GiB (computed)": "{:.0f}"}
COLUMNS |= {"training, h (computed)": "{:.2g}"}


@dataclass
class Settings:
    """What an epoch consists of, by default the paper's."""

    gpus: int = flag("GPUs that share the work", default=8)
    games: int = flag("games of an epoch", default=47591)
    messages: float = flag("mean messages of a game", default=6.0)
    reply_tokens: float = flag("mean tokens of a message", default=60.0)
    rule_tokens: float = flag("tokens that all prompts begin with", default=330.0)
    instruction_tokens: float = flag("tokens at the end of a prompt that are its own", default=45.0)
    rows: float = flag("rows of training a game, its winner's messages", default=2.9)
    sft_rows: int = flag("SFT rows of an epoch", default=52000)
    sft_tokens: float = flag("mean tokens of an SFT row", default=120.0)
    padding: float = flag("share of a micro-batch that is padding; 0.03 with batch_rebalance", default=0.3)
    step_rows: int = flag("rows of an optimizer step", default=128)

    @property
    def new_tokens(self) -> float:
        return self.games * self.messages * self.reply_tokens

    @property
    def seen(self) -> float:
        """Tokens beyond the rules that a new token attends to, on average."""
        return self.messages / 2 * (self.reply_tokens + 5) + self.instruction_tokens


def games_at_once(args: Settings, model: Shape, gpu: GPU, spread: int) -> int:
    """Games whose caches fit beside the weights, on a GPU or on `spread` together."""
    free = spread * gpu.gib * GIB - 2 * model.parameters
    held = (args.seen + args.reply_tokens / 2) * 2 * model.cache_numbers
    return min(MOST_GAMES, max(1, int(MEMORY_SHARE * free / held)))


def slots_hours(args: Settings, model: Shape, gpu: GPU, spread: int) -> float:
    """Hours of play by our engine; GPUs that share a model take turns."""
    new, cache = args.new_tokens, 2 * model.cache_numbers
    prompts = args.games * args.messages * (args.reply_tokens + 5 + args.instruction_tokens)  # each token once
    at_once = games_at_once(args, model, gpu, spread)
    attended = args.rule_tokens + args.seen
    operations = 2 * model.parameters * (new + prompts) + 4 * model.layers * model.hidden_size * attended * new
    steps = new / at_once
    read = steps * (2 * model.parameters + args.rule_tokens * cache) + new * args.seen * cache
    computing = (operations / gpu.operations_per_second + read / gpu.bytes_per_second) / SHARE
    seconds = max(computing, steps * model.layers * LAUNCHES * LAUNCH) + new * PYTHON
    return seconds * spread / args.gpus / 3600


def vllm_hours(args: Settings, name: str, card: str) -> float | None:
    """Hours of play at a published rate; None where there is none, or it takes more GPUs."""
    rate, gpus = PUBLISHED.get((name, card), (0, 0))
    return args.new_tokens / rate / (args.gpus / gpus) / 3600 if 0 < gpus <= args.gpus else None


def train_hours(args: Settings, model: Shape, gpu: GPU, way: str, lora: bool) -> float:
    """Hours of training this way with gradient checkpointing, the reference pass included.

    With offload the CPU's Adam reads and writes 28 bytes a parameter once a step.
    """
    row = args.rule_tokens + args.seen + args.reply_tokens
    game_tokens = args.games * args.rows * row / (1 - args.padding)
    tokens = game_tokens + args.sft_rows * args.sft_tokens / (1 - args.padding)
    rows = args.games * args.rows + args.sft_rows
    micro_batches = rows / ROWS / args.gpus
    rate = SHARE * gpu.operations_per_second
    computing = (6 if lora else 8) * model.parameters * tokens / args.gpus / micro_batches / rate
    launching = model.layers * TRAIN_LAUNCHES * LAUNCH
    seconds = micro_batches * max(computing, launching, moving_seconds(model, args.gpus, way, lora))
    seconds += 2 * model.parameters * game_tokens / args.gpus / rate  # the reference pass
    if way == "offload" and not lora:
        machines = -(-args.gpus // GPUS_A_MACHINE)
        seconds += rows / args.step_rows * 28 * model.parameters / machines / HOST
    return seconds / 3600


def moving_seconds(model: Shape, gpus: int, way: str, lora: bool) -> float:
    """Seconds that a micro-batch's weights and gradients are on their way.

    zero2 sends the gradients; zero3 gathers the weights three times and sends the gradients; offload fetches this
    GPU's part of them over PCIe as well.
    """
    weights, gradients = 2 * model.parameters, 0 if lora else 2 * model.parameters
    over_link = {"none": 0, "zero2": gradients}.get(way, 3 * weights + gradients) * (1 - 1 / gpus) / LINK
    over_pcie = (3 * weights + gradients) / gpus / PCIE if way == "offload" else 0
    return max(over_link, over_pcie)


def table_line(args: Settings, name: str, card: str, lora: bool) -> dict:
    """One model on one kind of GPU; no hours where it does not fit."""
    model, gpu = SHAPES[name], GPUS[card]
    spread = next(n for n in (1, 2, 4, 8, 16, 32) if 2 * model.parameters < 0.8 * n * gpu.gib * GIB)
    way, needed = fit.choose(model.parameters, args.gpus, gpu.gib * GIB, rows=ROWS, lora=lora)
    fits = needed[way] <= (1 - fit.FREE) * gpu.gib * GIB
    cells = [
        name,
        card,
        f"{games_at_once(args, model, gpu, spread)}" + (f" on {spread} GPUs" if spread > 1 else ""),
        slots_hours(args, model, gpu, spread) if spread <= args.gpus else None,
        vllm_hours(args, name, card),
        f"LoRA, {way}" if lora else way,
        needed[way] / GIB,
        train_hours(args, model, gpu, way, lora) if fits else None,
    ]
    return dict(zip(COLUMNS, cells, strict=True))


def main() -> None:
    args = parse_flags(Settings, description=__doc__)
    print(f"{args.gpus} GPUs, {args.games} games and {args.games * args.rows + args.sft_rows:.0f} rows; computed:\n")
    ways = (True, False) if args.gpus == 1 else (False,)
    lines = [table_line(args, name, card, lora) for name in MODELS for card in GPUS for lora in ways]
    print_table(COLUMNS, lines)


if __name__ == "__main__":
    utils.run_program(main)
