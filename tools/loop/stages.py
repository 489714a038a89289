"""Running stages as processes: logs, progress bar, signals, and the lock on an output folder.

A stage is a separate process so that its GPU memory and environment changes vanish when it ends, and has its own
session so that Ctrl-C reaches only the loop, which then stops it by `end_group`. Its output goes to a file,
OUTPUT/logs/STAGE.log: if the loop were killed, a pipe would break and take the program with it.
"""

import contextlib
import fcntl
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from tools.common.errors import UserError, printable
from tools.common.files import ROOT
from tools.common.programs import INTERRUPTED
from tools.common.ranks import LAUNCHER_VARIABLES

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # Slurm can send USR1 before a job's end
TERMINATED = 143  # exit status after a signal other than Ctrl-C: 128 + SIGTERM
GRACE = 7  # seconds between SIGTERM and SIGKILL; the loop then ends within 10
ERROR = re.compile(r"[\w-]+\.py: error: .*")  # of a program that refuses; a progress bar may precede it
TAIL = 20  # lines to show of a failed stage without such a line
logger = logging.getLogger(__name__)


class StageFailed(UserError):
    """A stage's program failed; its error has already been printed."""


def say(text: str) -> None:
    print(time.strftime("[%X]"), text, flush=True)


class Stages:
    """Runs programs one after another. A signal stops the running program and then the loop."""

    def __init__(self, output: str, machine: int = 0):
        self.logs = Path(output, "logs")
        self.machine = machine
        self.lock: int | None = None  # file descriptor that the programs inherit
        self.signal: int | None = None

    @contextlib.contextmanager
    def _noting_signals(self) -> Iterator[None]:
        """Note signals in `self.signal`. Raising could orphan a program that Popen is just starting."""

        def note(number: int, frame) -> None:
            self.signal = number

        caught = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]  # as under nohup
        before = {number: signal.signal(number, note) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, name: str, command: Sequence[str], **variables: str) -> None:
        """Run a program with additional environment variables, appending to the stage's log. StageFailed on error."""
        log = self.logs / (f"{name}.node{self.machine}.log" if self.machine else f"{name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        say(f"{name} started; log: {log}")
        begin = time.monotonic()
        with open(log, "ab") as file, self._noting_signals():
            file.write(f"\n=== {time.strftime('%c')}: {shlex.join(command)}\n".encode())
            file.flush()
            start = file.tell()  # where the program's output starts
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment() | variables,
                start_new_session=True,
                pass_fds=[] if self.lock is None else [self.lock],
            )
            try:
                status = self._wait(child, log, start, name)
            finally:  # also if the terminal is gone and showing the bar raised
                if child.poll() is None:
                    end_group(child)
        lines = [line for line in pieces(log, start) if line.strip()]
        if status:
            errors = sorted({found[0] for found in map(ERROR.search, lines) if found})
            print("\n".join(errors or lines[-TAIL:]), file=sys.stderr, flush=True)
            raise StageFailed(f"{name} {how_it_failed(status)}; log: {log}")
        report_end(name, lines, time.monotonic() - begin)

    def _wait(self, child: subprocess.Popen, log: Path, start: int, name: str) -> int:
        """Show a program's progress bar until it ends, and return its exit status. A signal stops it and the loop."""
        with bar_of(log, start) as show:
            while True:
                if self.signal:
                    end_group(child)
                    self._stop(name)  # which raises SystemExit
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(timeout=0.5)
                show()

    def _stop(self, name: str) -> NoReturn:
        sys.stderr.write(f"\n{Path(sys.argv[0]).name}: stopped in {name}; rerun the same command to continue\n")
        sys.exit(INTERRUPTED if self.signal == signal.SIGINT else TERMINATED)


def environment() -> dict[str, str]:
    """The environment of all programs, without variables of a launcher that may have started the loop."""
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Rows of different lengths would otherwise fragment GPU memory.
    variables.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return variables


def end_group(child: subprocess.Popen) -> None:
    """Stop a program and all its descendants: SIGTERM, then SIGKILL after GRACE seconds.

    Workers of torchrun and vLLM have their own sessions, so a signal to the process group does not reach them.
    """
    processes = family(child.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and (child.poll() is None or any(map(is_alive, processes))):
        time.sleep(0.1)
        processes |= family(child.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    child.wait()


def family(pid: int) -> set[psutil.Process]:
    """All descendants of a process."""
    with contextlib.suppress(psutil.Error):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def pieces(log: Path, start: int) -> list[str]:
    """A log from byte `start` on, split at line ends and at the carriage returns of progress bars."""
    with open(log, "rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace").replace("\x1b[A", "").replace("\r", "\n")
    return [printable(line) for line in text.split("\n")]


def report_end(name: str, lines: Sequence[str], took: float) -> None:
    """Print a program's warnings, its duration and its last line."""
    # Deduplicated, because ranks may log the same warning, with another time and rank before it.
    for warning in sorted({line.partition(" WARNING ")[2] for line in lines if " WARNING " in line}):
        print(f"WARNING: {warning}")
    minutes, seconds = divmod(int(took), 60)
    say(f"{name} took {minutes} min {seconds} s")
    if lines := [line for line in lines if not is_bar(line)]:
        print(lines[-1], flush=True)


def how_it_failed(status: int) -> str:
    """A phrase for an exit status, which is minus the signal's number for a killed program."""
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (often out of memory)"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return "failed"


def is_bar(line: str) -> bool:
    return "%|" in line  # of tqdm


@contextlib.contextmanager
def bar_of(log: Path, start: int) -> Iterator:
    """Yield a function that shows the newest progress bar after byte `start` of a log; the block's end erases it."""
    if not sys.stdout.isatty():
        yield lambda: None
        return

    def show() -> None:
        bars = list(filter(is_bar, pieces(log, max(start, log.stat().st_size - 4000))))
        width = shutil.get_terminal_size().columns - 1
        sys.stdout.write(f"\r\x1b[K{bars[-1][:width] if bars else ''}")
        sys.stdout.flush()

    try:
        yield show
    finally:
        sys.stdout.write("\r\x1b[K")
        sys.stdout.flush()


def hold_lock(folder: str) -> int | None:
    """Lock a folder until this process and all that inherit the returned descriptor have ended.

    UserError if another loop holds the lock; None if the file system has no locks.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(Path(folder, ".loop.lock"), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        busy = "another loop is running here, or a stage that a killed one left; wait for it or stop it"
        raise UserError(f"{folder}: {busy}") from None
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s); run only one loop here", folder, error)
        return None
    return descriptor
