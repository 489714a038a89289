"""What the benchmarks share: flags, processes for each run, tables, what the machine can do."""

import importlib.metadata
import json
import multiprocessing
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

import utils
from tools.engine.generate import now
from tools.tiny.models import random_llama
from utils import flag

PRESETS = {
    "tiny": (32, 2, 2, 64, 300),
    "30m": (512, 8, 8, 1376, 8000),
    "1b": (2048, 22, 32, 5632, 32000),
    "7b": (4096, 32, 32, 11008, 32000),
}
PACKAGES = ("torch", "transformers", "accelerate")
MATMUL_SIZE = {"cpu": 2048, "mps": 4096, "cuda": 8192}
BANDWIDTH_BYTES = {"cpu": 2**28, "mps": 2**30, "cuda": 2**32}


# --- flags ---------------------------------------------------------------------------------------------------------


@dataclass
class LlamaFlags:
    """The shape of the Llama that is measured, and what all its benchmarks are told. ValueError lists all problems."""

    preset: str = flag("shape of the Llama; the five flags below change it", default="30m", choices=list(PRESETS))
    hidden_size: int | None = flag("the Llama's hidden size", default=None)
    layers: int | None = flag("the Llama's layers", default=None)
    heads: int | None = flag("the Llama's heads", default=None)
    intermediate_size: int | None = flag("the Llama's intermediate size", default=None)
    vocab_size: int | None = flag(
        "the Llama's vocabulary, at least 300; a tokenizer of bytes has 260 tokens", default=None
    )
    seed: int = flag("of everything random", default=42)
    output: str | None = flag("also write the figures to this JSON file", default=None)

    def __post_init__(self):
        for name, value in zip(self.shape, PRESETS[self.preset], strict=True):
            if getattr(self, name) is None:
                setattr(self, name, value)
        if problems := self.problems():
            raise ValueError("\n".join(problems))

    @property
    def shape(self) -> dict[str, int]:
        """The shape as `random_llama` takes it."""
        names = ("hidden_size", "layers", "heads", "intermediate_size", "vocab_size")
        return {name: getattr(self, name) for name in names}

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices."""
        return self.layers * (4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size)

    def problems(self) -> list[str]:
        """What is wrong with the flags, a phrase each."""
        problems = utils.too_small(self, hidden_size=1, layers=1, heads=1, intermediate_size=1, vocab_size=300)
        if not problems and self.hidden_size % (2 * self.heads):
            problems.append("--hidden_size must be a multiple of twice --heads: rotary positions go in pairs")
        return problems

    def llama(self, **config):
        """The random Llama of these flags."""
        return random_llama(seed=self.seed, **self.shape, **config)


# --- runs ----------------------------------------------------------------------------------------------------------


def run_ranks(measure: Callable[..., dict | None], *args) -> list[dict | None]:
    """Call `measure(*args)` in new processes, one for each of this launch, and return what each gave, by rank.

    A process of its own has a peak memory of its own. ValueError if one is killed.
    """
    multiprocessing.set_forkserver_preload([measure.__module__])  # packages are imported once for all runs
    ranks = utils.world_size()
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(_run_rank, (measure, args, folder, ranks, port), ranks, start_method="forkserver")
        except ProcessExitedException as error:
            raise ValueError(f"{error} in {measure.__module__}, most often for want of memory; {args}") from None
        return [json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(ranks)]


def _run_rank(rank: int, measure: Callable, args: tuple, folder: str, ranks: int, port: int) -> None:
    os.dup2(2, 1)  # standard output is the table's
    for name in (*utils.LAUNCHER_VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
    utils.write_json(Path(folder, str(rank)), measure(*args))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def compare_and_print(
    kind: type[LlamaFlags], description: str, compare: Callable[..., dict], print_report: Callable[[dict], None]
) -> None:
    """The main of a benchmark: read its settings, measure, print, and write what --output asks for."""
    settings = utils.parse_flags(kind, description=description)
    if utils.rank():  # the first process starts those that are measured
        return
    report = compare(settings)
    print_report(report)
    if settings.output:
        utils.write_json(settings.output, report)


# --- what is printed -----------------------------------------------------------------------------------------------


def print_table(columns: dict[str, str], lines: Iterable[dict]) -> None:
    """Lines as a table in Markdown; `columns` says how each is formatted. What a line does not have stays empty."""
    rows = [list(columns)]
    for line in lines:
        rows.append([form.format(line[name]) if line.get(name) is not None else "" for name, form in columns.items()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def describe_run(settings: LlamaFlags, device: str, rates: dict[str, float]) -> dict:
    """What the figures were measured with."""
    return {
        "device": device,
        "processes": utils.world_size(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "settings": asdict(settings),
        **rates,
    }


def print_run(report: dict, rates: str) -> None:
    """The last line below a table."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(f"{report['processes']} x {report['device']}; {rates}; {versions}")


# --- what the machine can do ---------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product, at its fastest."""
    size = MATMUL_SIZE[device.type]
    left, right = torch.ones(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / _least_seconds(device, lambda: torch.matmul(left, right))


def bandwidth(device: torch.device) -> float:
    """Bytes per second at which a large tensor is read, at its fastest."""
    tensor = torch.ones(BANDWIDTH_BYTES[device.type] // 4, device=device)
    return tensor.nbytes / _least_seconds(device, tensor.sum)


def _least_seconds(device: torch.device, work: Callable) -> float:
    """The shortest of at least 3 calls and a tenth of a second."""
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < 0.1:
        start = now(device)
        work()
        seconds.append(now(device) - start)
    return min(seconds)
