"""End all processes that a process has started, and those that they started: python tools/loop/stop.py PID."""

import contextlib
import os
import sys
import time

import psutil

TIMEOUT = 40  # seconds for programs to end by themselves: torchrun gives its processes 30


def stop(pid: int) -> None:
    """Ask them to end; those that are still there after TIMEOUT are killed."""
    children = [child for child in psutil.Process(pid).children(recursive=True) if child.pid != os.getpid()]
    for signal in ("terminate", "kill"):
        for child in filter(_is_alive, children):
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(child, signal)()
        deadline = time.monotonic() + TIMEOUT
        while any(map(_is_alive, children)) and time.monotonic() < deadline:
            time.sleep(0.1)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    stop(int(sys.argv[1]))
