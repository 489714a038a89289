"""What the benchmarks share: shapes of Llamas, flags, processes for each run, tables, what the machine can do."""

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.multiprocessing.spawn import start_processes
from torch.utils.benchmark import Timer

import utils
from tools.engine.model import own_device
from tools.flags import flag
from tools.tiny.models import random_llama

PACKAGES = ("torch", "transformers", "accelerate")


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int = 32000

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices."""
        attention = 2 * self.hidden_size**2 * (self.heads + self.kv_heads) // self.heads
        return self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def parameters(self) -> int:
        """The norms' few left out."""
        return self.layer_weights + 2 * self.vocab_size * self.hidden_size

    @property
    def cache_numbers(self) -> int:
        """Keys and values of a token."""
        return 2 * self.layers * self.hidden_size * self.kv_heads // self.heads


SHAPES = {
    "tiny": Shape(32, 2, 2, 2, 64, 300),
    "30m": Shape(512, 8, 8, 8, 1376, 8000),
    "100m": Shape(768, 12, 12, 12, 2048, 8000),
    "1b": Shape(2048, 22, 32, 4, 5632),
    "7b": Shape(4096, 32, 32, 32, 11008),
    "13b": Shape(5120, 40, 40, 40, 13824),
    "70b": Shape(8192, 80, 64, 8, 28672),
}


@dataclass
class LlamaFlags:
    """What the benchmarks of a random Llama are told."""

    preset: str = flag("shape of the Llama", default="30m", choices=list(SHAPES))
    vocab_size: int | None = flag("the Llama's vocabulary, at least 300, instead of the shape's", default=None)
    processes: int = flag("processes that share the work, as torchrun would start them", default=1)
    seed: int = flag("of everything random", default=42)

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.preset]
        return dataclasses.replace(shape, vocab_size=self.vocab_size or shape.vocab_size)

    def llama(self, **config):
        """The random Llama of these flags."""
        shape = self.shape
        config |= {"hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size}
        config |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
        return random_llama(shape.vocab_size, self.seed, num_hidden_layers=shape.layers, **config)


def run_ranks(processes: int, measure: Callable[..., dict], *args) -> list[dict]:
    """Call `measure(*args)` in so many new processes, the ranks of a launch; what each gave.

    A process of its own has a peak memory of its own.
    """
    multiprocessing.set_forkserver_preload(["train", "tools.selfplay.play"])  # imported once for all runs
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)  # the fork server has that of its start
        arguments = (measure, args, folder, processes, port, environment)
        start_processes(_run_rank, arguments, processes, start_method="forkserver")
        return [json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(processes)]


def _run_rank(
    rank: int, measure: Callable, args: tuple, folder: str, processes: int, port: int, environment: dict[str, str]
) -> None:
    os.dup2(2, 1)  # standard output is the table's
    os.environ.update(environment)
    if processes > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
    utils.write_json(Path(folder, str(rank)), measure(*args))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def word_of(game: int) -> str:
    """A game's word, which no reply holds by chance."""
    return "zq" + f"{game:05}".translate(str.maketrans("0123456789", "abcdefghij"))


def print_results(columns: dict[str, str], lines: list[dict]) -> None:
    """Lines as a table, and what they were measured with: what `measure_machine` found, and packages."""
    print_table(columns, lines)
    machine = lines[0]["machine"]
    operations, read = (max(rank[name] for rank in machine) for name in ("matmul_rate", "bandwidth"))
    rates = f"matrix product {operations / 1e12:.3f} TFLOP/s, memory {read / 1e9:.0f} GB/s"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    print(f"{len(machine)} x {machine[0]['device']}; {rates}; {versions}")


def print_table(columns: dict[str, str], lines: Iterable[dict]) -> None:
    """Lines as a table in Markdown; `columns` says how each is formatted. What a line does not have stays empty."""
    rows = [list(columns)]
    for line in lines:
        rows.append([form.format(line[name]) if line.get(name) is not None else "" for name, form in columns.items()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |", flush=True)


def measure_machine(bf16: bool) -> dict:
    """Of this process, at its fastest: operations/s of a square matrix product, bytes/s at which a tensor is read."""
    device = own_device()
    on_gpu = device.type == "cuda"
    size, numbers = (8192, 2**30) if on_gpu else (2048, 2**26)
    left, right = torch.ones(2, size, size, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    tensor = torch.ones(numbers, device=device)
    cpu = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu,
        "matmul_rate": 2 * size**3 / _least_seconds(lambda: torch.matmul(left, right)),
        "bandwidth": tensor.nbytes / _least_seconds(tensor.sum),
    }


def _least_seconds(work: Callable) -> float:
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.3).times)
