"""Runs a command until the command ends or standard input closes, then ends all processes that the command started.

    python -IS supervise.py COMMAND...

Standard input is a pipe from the parent process. It closes when the parent ends, even by SIGKILL. If the supervisor
itself is killed, the command gets SIGTERM, and the parent ends the other processes by `end_session`. Linux only.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

# Two options of Linux' prctl:
PR_SET_CHILD_SUBREAPER = 36  # descendants whose parent has ended become children of this process
PR_SET_PDEATHSIG = 1  # the signal that this process gets when its parent ends
LOOK_EVERY = 0.2  # seconds
GRACE = 5  # seconds to wait for processes to end after SIGTERM, and again after SIGKILL


def main(command: list[str]) -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the supervisor must outlive the command
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, the command does not inherit this

    def begin() -> None:
        os.setpgid(0, 0)  # a process group of its own, so that one signal reaches all of it
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=begin)
    while child.poll() is None and not select.select([0], [], [], LOOK_EVERY)[0]:
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        if all_ended(child, time.monotonic() + GRACE):
            break
    return 1 if child.returncode is None else child.returncode


def all_ended(child: subprocess.Popen, deadline: float) -> bool:
    """Wait until all descendants have ended. Returns False if some are left at the deadline."""
    while time.monotonic() < deadline:
        if child.poll() is not None:
            try:
                ended, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if ended:
                continue
        time.sleep(LOOK_EVERY / 10)
    return False


def end_session(leader: int) -> None:
    """SIGKILL all processes of a session: those that a killed supervisor has left behind."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(name)) == leader:
                os.kill(int(name), signal.SIGKILL)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.exit(status if status >= 0 else 128 - status)
