"""Trials of the campaign: each is drawn from a seed that it prints, counted, and repeated by that seed.

bash tools/test.sh tests/faults                                    the short form, part of every test run
bash tools/test.sh tests/faults --campaign 20                      the long one: 20 rounds; a table at its end
bash tools/test.sh tests/faults --campaign 20 --trial_seed 17 -k damaged     one trial again
"""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from conftest import ROOT

ENVIRONMENT = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
TIMEOUT = 300  # seconds of any program here


class Trials:
    """The trials of one test: `short` of them in every test run, `rounds * each` in a campaign."""

    def __init__(self, node, rounds: int, only: int | None):
        self.node, self.rounds, self.only = node, rounds, only

    def run(self, kind: str, trial: Callable[[random.Random], object], *, short: int, each: int = 1) -> None:
        """Make the trials, all of them even if some fail; AssertionError with the seeds of those that do."""
        count = short if self.rounds == 1 else max(short, self.rounds * each)
        seeds = range(count) if self.only is None else [self.only]
        lost = []
        for seed in seeds:
            try:
                trial(random.Random(f"{kind} {seed}"))
            except Exception:  # of whatever kind: it is told below
                lost.append(seed)
                sys.stdout.write(f"--- {kind}, --trial_seed {seed}\n{traceback.format_exc(limit=-3)}\n")
        self.count(kind, len(seeds), len(lost))
        assert not lost, f"{kind}: lost --trial_seed {', '.join(map(str, lost))}"

    def count(self, kind: str, tried: int, lost: int) -> None:
        """Have a line in the table."""
        self.node.user_properties.append(("trials", (kind, tried, lost)))


# --- programs ------------------------------------------------------------------------------------------------------


def start(command: list, **changes) -> subprocess.Popen:
    """Start a program in a process group of its own, in the project's folder."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "text": True}
    how = {"cwd": ROOT, "env": ENVIRONMENT, "start_new_session": True} | pipes | changes
    return subprocess.Popen(list(map(str, command)), **how)


def finish(process: subprocess.Popen, status: int = 0) -> str:
    """Let a program end with this status; what it printed."""
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == status, printed[-3000:]
    return printed


def seconds_of(run: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.monotonic()
    run()
    return time.monotonic() - started


def flags_of(values: dict) -> list[str]:
    """A command line; a list is a flag of several values."""
    words = []
    for name, value in values.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def users_of(folder: Path) -> list[psutil.Process]:
    """The processes that name a folder in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_all(process: subprocess.Popen, folder: Path) -> None:
    """SIGKILL a program and all that work on a folder, as when a machine goes away."""
    doomed = users_of(folder)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    for each in doomed:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.communicate()
    assert not psutil.wait_procs(doomed, timeout=30)[1]


def killed(rng: random.Random, begin: Callable[[], subprocess.Popen], folder: Path, *, kills: int, within: float):
    """Start a program again and again, SIGKILL it at a random moment each time, and let it end at last."""
    for _ in range(kills):
        process = begin()
        try:
            printed, _ = process.communicate(timeout=rng.uniform(0, within))
            assert process.returncode == 0, printed[-3000:]
        except subprocess.TimeoutExpired:
            kill_all(process, folder)
    return finish(begin())


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder for one trial, taken away after a good end."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    yield folder
    shutil.rmtree(folder)
