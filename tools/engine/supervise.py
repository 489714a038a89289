"""Runs a command until it ends or standard input closes, then ends everything that the command has started.

    python -IS supervise.py COMMAND...

Its parent holds the other end of its standard input, a pipe, which closes when the parent ends, by SIGKILL too. If
this process itself is killed, the command gets SIGTERM, and the parent ends the rest by `end_session`. Linux only.
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
PR_SET_CHILD_SUBREAPER = 36  # orphans among the descendants become children of this process
PR_SET_PDEATHSIG = 1  # a signal that is sent when the parent ends
LOOK_EVERY = 0.2  # seconds
GRACE = 5  # seconds that processes have to end after SIGTERM, and then after SIGKILL


def main(command: list[str]) -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # left to the command, which may get them too
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, this is not inherited

    def begin() -> None:
        os.setpgid(0, 0)  # a process group of its own, which can be signalled as a whole
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
    """Wait for all descendants to end; False at the deadline."""
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
    """SIGKILL the processes that a killed supervisor has left behind, all of its session."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(name)) == leader:
                os.kill(int(name), signal.SIGKILL)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.exit(status if status >= 0 else 128 - status)
