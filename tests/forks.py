"""Programs in forks of a process that has imported torch and its like: a fresh interpreter takes 5 to 9 s for that.

The project's modules are imported by each program itself, so none may be imported here.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

# The server computes nothing: a fork of a process whose OpenMP threads have run would hang.
SERVER = multiprocessing.get_context("forkserver")
LIBRARIES = ["datasets", "deepspeed", "peft", "textblob", "torch.utils.tensorboard", "transformers.trainer"]
SERVER.set_forkserver_preload([*LIBRARIES, "transformers.models.llama.modeling_llama"])


@atexit.register
def kill_the_rest() -> None:
    """Python would wait for programs that failed tests have left."""
    for process in multiprocessing.active_children():
        process.kill()


class Fork:
    """A program with the methods of Popen. `words` are those of Python: `-m MODULE ...` or `FILE ...`.

    It has a process group, folder, environment, streams and status of its own. Libraries have read the environment of
    the tests when they were imported. `terminal` is the path of a terminal for the streams.
    """

    def __init__(self, words: list, *, cwd: Path = ROOT, env: Mapping = ENVIRONMENT, terminal: str | None = None):
        self.output = tempfile.NamedTemporaryFile("r", encoding="utf-8")
        begun, begins = SERVER.Pipe(duplex=False)
        how = (list(map(str, words)), cwd, dict(env), terminal or self.output.name, begins)
        self.process = SERVER.Process(target=_become, args=how)
        self.process.start()
        self.pid = self.process.pid
        begins.close()
        begun.recv()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"{self}", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.output.read(), None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()


def _become(words: list[str], cwd: Path, environment: dict, output: str, begins: Connection) -> None:
    """Make this fork the program."""
    os.setsid()
    end = os.open(output, os.O_RDWR | os.O_APPEND | os.O_NOCTTY)
    begins.send(True)
    for stream in (0, 1, 2) if os.isatty(end) else (1, 2):
        os.dup2(end, stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    is_module = words[0] == "-m"
    folder = str(cwd if is_module else Path(words[0]).parent)
    sys.path[:0] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    if is_module:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
