"""What tests share: programs called in this process or started as new processes, their flags, and their ends."""

import contextlib
import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import utils

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor_interval=0.1"]
TIMEOUT = 300  # seconds that any program of a test may take


class Called(NamedTuple):
    """How a program ended: its exit status, and what it wrote to standard output and standard error."""

    status: int
    output: str
    errors: str


def flags_of(values: Mapping) -> list[str]:
    """A command line: {"n": 3, "names": ["a", "b"]} gives --n 3 --names a b. None leaves a flag out."""
    words = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def call(main: Callable[[], object], *words, status: int = 0) -> Called:
    """Run a program's `main` in this process with these words as its command line; it must end with this status."""
    output, errors, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [main.__module__, *map(str, words)]
    found = 0
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            utils.run_program(main)
    except SystemExit as ended:
        found = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = argv
        reset_process()
    called = Called(found, output.getvalue(), errors.getvalue())
    assert found == status, f"ended with {found}: {called.errors[-3000:]}"
    return called


def reset_process() -> None:
    """Undo what the end of a process would undo: locks, accelerate's state, and what waits to be collected."""
    for path in list(utils._locks):
        utils.unlock(path)
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()


def start(command: list, **changes) -> subprocess.Popen:
    """Start a program in the project's folder, in a process group of its own; its output is one pipe of text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "text": True}
    how = {"cwd": ROOT, "env": ENVIRONMENT, "start_new_session": True} | pipes | changes
    return subprocess.Popen(list(map(str, command)), **how)


def finish(process: subprocess.Popen, status: int = 0) -> str:
    """Wait for a program to end with this status; return what it printed."""
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == status, printed[-3000:]
    return printed
