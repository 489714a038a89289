"""The processes of a launch: their numbers, and how they wait for each other."""

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
    """UserError that names both numbers if this machine's processes use more than its `gpus`."""
    last = int(os.environ.get("LOCAL_RANK", 0)) + 1
    processes = max(processes, last, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    needed = processes * gpus_of_process
    if needed > gpus:
        raise UserError(
            f"{processes} processes on this machine need {needed} GPUs; it has {gpus}. Start at most "
            f"{gpus // gpus_of_process} (torchrun --nproc_per_node; in the loop processes)"
        )


def processes_of_cores() -> int:
    """How many processes a model of a few million parameters gets: one for each core, at most two; one with a GPU."""
    return 1 if shutil.which("nvidia-smi") else min(2, os.cpu_count() or 1)


def warn_of_idle_gpu() -> None:
    """Warn of an NVIDIA GPU on a machine where PyTorch sees none, unless CUDA_VISIBLE_DEVICES hides it."""
    if Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        why = "its build may be one for CPUs, or the driver too old"
        warn_on_rank_0("the CPU computes, because PyTorch cannot use the GPU of this machine: %s", why)


@functools.cache
def launch_store():
    """The key-value store that all ranks of a launch share. Torch's process group uses the same server."""
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://"))
    return store


def on_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its value, passed as JSON, or raise its UserError, on all ranks.

    All ranks must call this. A barrier for rank 0 only, which waits for all; the others wait for rank 0's answer. It
    goes through the launcher's store, because play makes no process group, and NCCL's would end a long wait.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return make()
    store = launch_store()
    key = f"spag/{next(_calls)}"
    if rank() == 0:
        try:
            store.set(key, json.dumps({"value": make()}))
        except (UserError, OSError) as error:
            store.set(key, json.dumps({"error": str(error)}))
    while not store.check([key]):  # without a time limit: rank 0 may have to wait for the slowest game
        time.sleep(0.1)
    answer = json.loads(store.get(key))
    store.add(f"{key}/heard", 1)
    while rank() == 0 and store.add(f"{key}/heard", 0) < world_size():
        time.sleep(0.1)
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def barrier() -> None:
    on_rank_0(lambda: None)  # rank 0 goes on when all have called it
    on_rank_0(lambda: None)  # and lets the others go on


def is_first_of_machine() -> bool:
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def on_each_machine(make: Callable[[], None]) -> None:
    """Call `make` in the first process of each machine; all ranks wait, and raise a UserError of rank 0's."""
    if rank() > 0 and is_first_of_machine():
        make()
    on_rank_0(make)
    barrier()
