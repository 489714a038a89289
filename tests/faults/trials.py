"""Trials of the campaign: each is drawn from a seed that it prints, counted, and repeated by that seed.

bash tools/test.sh tests/faults                                    the short form, part of every test run
bash tools/test.sh tests/faults --campaign 10                      the long one: 10 rounds; a table at its end
bash tools/test.sh tests/faults --campaign 10 --trial_seed 17 -k damaged     one trial again
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

    @property
    def campaign(self) -> bool:
        """Whether this is the long form."""
        return self.rounds > 1

    def run(
        self,
        kind: str,
        trial: Callable[[random.Random], int | None],
        *,
        short: int,
        each: int = 1,
        kills: int = 0,
        inputs: int = 1,
    ) -> None:
        """Make the trials, all of them even if some fail; AssertionError with the seeds of those that do.

        Of trials that kill, which return how often, a campaign makes as many as deliver `rounds * kills`. One of many
        `inputs` is counted as so many.
        """
        most = 2 * kills or each  # some trials have ended before they are killed
        count = max(short, self.rounds * most) if self.campaign else short
        lost, delivered, tried = [], 0, 0
        for seed in range(count) if self.only is None else [self.only]:
            tried += 1
            try:
                delivered += trial(random.Random(f"{kind} {seed}")) or 0
            except Exception:  # of whatever kind: it is told below
                lost.append(seed)
                sys.stdout.write(f"--- {kind}, --trial_seed {seed}\n{traceback.format_exc(limit=-3)}\n")
            if kills and self.campaign and delivered >= self.rounds * kills:
                break
        self.count(kind, tried * inputs, len(lost), delivered)
        assert not lost, f"{kind}: lost --trial_seed {', '.join(map(str, lost))}"

    def count(self, kind: str, tried: int, lost: int, kills: int = 0) -> None:
        """Have a line in the table."""
        self.node.user_properties.append(("trials", (kind, tried, lost, kills)))


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


def killed(
    rng: random.Random, begin: Callable[[], subprocess.Popen], folder: Path, *, kills: int, within: float
) -> int:
    """Start a program again and again, SIGKILL it at a random moment each time, and let it end; kills that hit it."""
    delivered = 0
    while delivered < kills:
        process = begin()
        try:
            printed, _ = process.communicate(timeout=rng.uniform(0, within))
        except subprocess.TimeoutExpired:
            kill_all(process, folder)
            delivered += 1
        else:
            assert process.returncode == 0, printed[-3000:]
            break
    finish(begin())
    return delivered


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder for one trial, taken away after a good end."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    yield folder
    shutil.rmtree(folder)
