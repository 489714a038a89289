"""The processes (ranks) of a launch: their numbers, and how they synchronize."""

import functools
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tools.common.errors import UserError

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
logger = logging.getLogger(__name__)
T = TypeVar("T")


def warn_on_rank_0(message: str, *values) -> None:
    if rank() == 0:
        logger.warning(message, *values)


_calls = itertools.count()  # of on_rank_0


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def check_gpus(gpus: int, gpus_of_process: int = 1, processes: int = 1) -> None:
    """UserError if this machine's processes need more GPUs than it has."""
    last = int(os.environ.get("LOCAL_RANK", 0)) + 1
    processes = max(processes, last, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    needed = processes * gpus_of_process
    if needed > gpus:
        raise UserError(
            f"{processes} processes on this machine need {needed} GPUs, but it has {gpus}; start at most "
            f"{gpus // gpus_of_process} (torchrun --nproc_per_node, or processes= of the loop)"
        )


def processes_of_cores() -> int:
    """Processes for a model of a few million parameters: one per core but at most two; one with a GPU."""
    return 1 if shutil.which("nvidia-smi") else min(2, os.cpu_count() or 1)


def warn_of_idle_gpu() -> None:
    """Warn if the machine has an NVIDIA GPU that PyTorch does not see, unless CUDA_VISIBLE_DEVICES hides it."""
    if Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        why = "it may be a CPU-only build, or the driver is too old"
        warn_on_rank_0("running on the CPU, because PyTorch cannot use this machine's GPU: %s", why)


def is_launch() -> bool:
    """Whether there are several ranks that can synchronize."""
    return world_size() > 1 and "MASTER_ADDR" in os.environ


@functools.cache
def launch_store():
    """The key-value store shared by all ranks of a launch, on the same server as torch's process group."""
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://"))
    return store


def on_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0; on all ranks return its value, passed as JSON, or raise its UserError.

    All ranks must call this. Rank 0 waits until all have the answer; the others wait only for the answer. It goes
    through the launcher's store, because play has no process group, and NCCL's would time out on a long wait.
    """
    if not is_launch():
        return make()
    store = launch_store()
    key = f"spag/{next(_calls)}"
    if rank() == 0:
        try:
            store.set(key, json.dumps({"value": make()}))
        except (UserError, OSError) as error:
            store.set(key, json.dumps({"error": str(error)}))
    while not store.check([key]):  # no time limit, because rank 0 may be waiting for the slowest game
        time.sleep(0.1)
    answer = json.loads(store.get(key))
    store.add(f"{key}/heard", 1)
    while rank() == 0 and store.add(f"{key}/heard", 0) < world_size():
        time.sleep(0.1)
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def barrier() -> None:
    on_rank_0(lambda: None)  # rank 0 returns when all have called it
    on_rank_0(lambda: None)  # and then releases the others


def gather(value: T) -> list[T]:
    """The values of all ranks in their order, passed as JSON. All ranks must call this."""
    if not is_launch():
        return [value]
    store = launch_store()
    key = f"spag/{next(_calls)}"
    store.set(f"{key}/{rank()}", json.dumps(value))
    on_rank_0(lambda: None)  # rank 0 returns when all values are there
    return on_rank_0(lambda: [json.loads(store.get(f"{key}/{number}")) for number in range(world_size())])


def is_first_of_machine() -> bool:
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def on_each_machine(make: Callable[[], None]) -> None:
    """Call `make` in the first process of each machine. All ranks wait for it, and raise rank 0's UserError."""
    if rank() > 0 and is_first_of_machine():
        make()
    on_rank_0(make)
    barrier()
