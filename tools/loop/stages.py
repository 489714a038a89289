"""How the loop runs the programs of its stages: logs, the bar, signals, and the lock of a folder of results.

A stage is a process, so that its GPU memory, and what torch and DeepSpeed leave in the environment, end with it. The
program runs in a session of its own: Ctrl-C reaches the loop alone, which then ends the program by `end_group`. Its
output goes to a file, OUTPUT/logs/STAGE.log. A pipe would break if the loop were killed, and the program with it.
"""

import contextlib
import fcntl
import logging
import os
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

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # Slurm may send USR1 before it ends a job
TERMINATED = 143  # exit status after a signal other than Ctrl-C: 128 + SIGTERM
GRACE = 7  # seconds that the processes of a stage have to end by themselves; the loop then ends within 10
ERROR = ".py: error: "  # in the line of a program that refuses
TAIL = 20  # lines of a failed stage that are shown if none of them is an error of ours
logger = logging.getLogger(__name__)


class StageFailed(UserError):
    """A program of a stage ended with an error; its message is on the terminal already."""


def say(text: str) -> None:
    print(time.strftime("[%X]"), text, flush=True)


class Stages:
    """Runs one program after the other. From the first one on, a signal ends the program at work and then the loop."""

    def __init__(self, output: str, machine: int = 0):
        self.logs = Path(output, "logs")
        self.machine = machine
        self.lock: int | None = None  # descriptor that the programs inherit
        self.signal: int | None = None
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, frame) -> None:
        # To raise here could leave a program behind that Popen has just started. `_wait` looks at it twice a second.
        self.signal = number

    def run(self, name: str, command: Sequence[str], **variables: str) -> None:
        """Run a program to its end, with these environment variables. StageFailed if its exit status is not 0.

        Each start adds to the stage's log: a line with the time and the command, then what the program writes.
        """
        if self.signal:
            self._stop(name)
        log = self.logs / (f"{name}.node{self.machine}.log" if self.machine else f"{name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        say(f"{name} begins; its log: {log}")
        begin = time.monotonic()
        with open(log, "ab") as file:
            file.write(f"\n=== {time.strftime('%c')}: {shlex.join(command)}\n".encode())
            file.flush()
            start = file.tell()  # of what the program writes
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
            status = self._wait(child, log, name)
        finally:  # also if the terminal is gone, where a bar cannot be shown
            if child.poll() is None:
                end_group(child)
        lines = [line for line in pieces(log, start) if line.strip()]
        if status:
            errors = sorted({line for line in lines if ERROR in line})
            print("\n".join(errors or lines[-TAIL:]), file=sys.stderr, flush=True)
            raise StageFailed(f"{name} {how_it_failed(status)}; its log: {log}")
        report_end(name, lines, time.monotonic() - begin)

    def _wait(self, child: subprocess.Popen, log: Path, name: str) -> int:
        """The exit status of a program, whose bar is on the terminal meanwhile. A signal ends it and the loop."""
        with bar_of(log) as show:
            while True:
                if self.signal:
                    end_group(child)
                    self._stop(name)  # which raises SystemExit
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(timeout=0.5)
                show()

    def _stop(self, name: str) -> NoReturn:
        sys.stderr.write(f"\n{Path(sys.argv[0]).name}: stopped in {name}; the same command continues\n")
        sys.exit(INTERRUPTED if self.signal == signal.SIGINT else TERMINATED)


def environment() -> dict[str, str]:
    """The environment of all programs: the loop launches by itself, whatever has launched it."""
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Rows differ in length, which would leave gaps of memory that later rows cannot use.
    variables.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return variables


def end_group(child: subprocess.Popen) -> None:
    """End a program and all that it has started, within GRACE seconds by themselves, then by SIGKILL.

    The workers of torchrun and of vLLM are in sessions of their own, so a signal to the group does not reach them.
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
    """What a process has started, and what that has started."""
    with contextlib.suppress(psutil.Error):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def pieces(log: Path, start: int) -> list[str]:
    """What a log holds behind its first `start` bytes: lines, and states of bars, which end by a carriage return."""
    with open(log, "rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace").replace("\x1b[A", "").replace("\r", "\n")
    return [printable(line) for line in text.split("\n")]


def report_end(name: str, lines: Sequence[str], took: float) -> None:
    """Show a program's warnings, how long it took, and its last line."""
    # Each once: several processes may log the same warning, and only the time and the rank before it differ.
    for warning in sorted({line.partition(" WARNING ")[2] for line in lines if " WARNING " in line}):
        print(f"WARNING: {warning}")
    minutes, seconds = divmod(int(took), 60)
    say(f"{name} took {minutes} min {seconds} s")
    if lines := [line for line in lines if not is_bar(line)]:
        print(lines[-1], flush=True)


def how_it_failed(status: int) -> str:
    """What an exit status says. Below 0 it is the number of a signal; the kernel kills where memory is short."""
    if status == -signal.SIGKILL:
        return "was ended by SIGKILL (often too little memory)"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return "failed"


def is_bar(line: str) -> bool:
    return "%|" in line  # of tqdm


@contextlib.contextmanager
def bar_of(log: Path) -> Iterator:
    """Yield a function that shows the newest bar of a log on the terminal; the block's end takes it away."""
    if not sys.stdout.isatty():
        yield lambda: None
        return

    def show() -> None:
        bars = list(filter(is_bar, pieces(log, max(0, log.stat().st_size - 4000))))
        width = shutil.get_terminal_size().columns - 1
        sys.stdout.write(f"\r\x1b[K{bars[-1][:width] if bars else ''}")
        sys.stdout.flush()

    try:
        yield show
    finally:
        sys.stdout.write("\r\x1b[K")
        sys.stdout.flush()


def hold_lock(folder: str) -> int | None:
    """Keep other loops out of a folder until this process and all that inherit the descriptor have ended.

    UserError if another loop has the lock; None where the file system knows no locks.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(Path(folder, ".loop.lock"), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another loop is at work here; end that one first") from None
    except OSError as error:
        logger.warning("%s: no file locks here (%s); run one loop at a time", folder, error)
        return None
    return descriptor
