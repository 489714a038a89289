"""Helpers that tests share: they call programs in this process, or start them as processes and kill them."""

import contextlib
import gc
import io
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
from forks import ENVIRONMENT, ROOT, Fork

from tools.common.files import read_json, write_json, write_records
from tools.common.models import model_folder
from tools.common.programs import run_program

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor_interval=0.1"]
TIMEOUT = 300  # seconds that any program of a test may take


class Called(NamedTuple):
    """What a program wrote to standard output and standard error."""

    output: str
    errors: str


def flags_of(values: Mapping) -> list[str]:
    """A command line: {"n": 3, "names": ["a", "b"]} gives --n 3 --names a b. None leaves a flag out."""
    words = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def words_of(settings: Mapping) -> list[str]:
    """The settings of the loop as words: {"seed": 3} gives seed=3."""
    return [f"{name}={value}" for name, value in settings.items()]


def write_place(folder: Path, words: list[str]) -> Path:
    """Write a word list, and short prompts, which make games on a tiny model quick; return the folder."""
    (folder / "words.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    rules = [f"Rule {number}: {{max_turns}} turns.\n" for number in range(8)]
    told = {"attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."}
    write_json(folder / "prompts.json", {"rules": rules} | told)
    return folder


def play_flags(place: Path, model: str | os.PathLike, output: Path, **changes) -> list[str]:
    """The flags of short games of a model against itself, with the files of `write_place`."""
    values = {f"{role}_model_name_or_path": model for role in ("attacker", "defender")}
    values |= {"data_path": place / "words.txt", "data_suffix": "words", "prompt_templates": place / "prompts.json"}
    values |= {"output_dir": output, "max_turns": 2, "max_length": 256}
    return flags_of(values | changes)


def write_rows(path: Path, rows: list) -> str:
    """Write rows, a line each if the path ends in .jsonl; return the path."""
    write_records(path, rows)
    return str(path)


def copy_model(model: str | os.PathLike, folder: Path, **config) -> Path:
    """Copy a model's folder, with these values in its configuration; return the copy."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    write_json(folder / "config.json", read_json(folder / "config.json") | config)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    """The contents of a folder's files, without the empty lock files."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


# Programs in this process.


def call(main: Callable[[], object], *words, status: int = 0) -> Called:
    """Run a program's `main` in this process with these words as its command line. It must end with `status`."""
    output, errors = io.StringIO(), io.StringIO()
    ended_with = 0
    with as_a_process(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        sys.argv = [main.__module__, *map(str, words)]
        try:
            run_program(main)
        except SystemExit as ended:
            ended_with = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    assert ended_with == status, f"ended with {ended_with}: {errors.getvalue()[-3000:]}"
    return Called(output.getvalue(), errors.getvalue())


@contextlib.contextmanager
def as_a_process() -> Iterator[None]:
    """Undo, when the block ends, what would end with a process: environment, folder, logging, state of modules."""
    argv, environment, folder = sys.argv, dict(os.environ), os.getcwd()
    handlers, level = logging.root.handlers[:], logging.root.level
    if (torch := sys.modules.get("torch")) and torch.distributed.is_initialized():  # by a test before: train.leave
        torch.distributed.destroy_process_group()  # would end this process
    try:
        yield
    finally:
        sys.argv = argv
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        reset_process()


def reset_process() -> None:
    """Free the models that played. If a Trainer was made, reset accelerate and transformers and free its models."""
    model_folder.cache_clear()
    if (make := sys.modules.get("tools.selfplay.make")) and make._loaded:
        make.drop_models()
    state = sys.modules.get("accelerate.state")
    if state is None or not state.PartialState._shared_state:
        return
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
    if deepspeed := sys.modules.get("transformers.integrations.deepspeed"):
        deepspeed.unset_hf_deepspeed_config()
    gc.collect()


# Programs as processes of their own.


def start(command: list, **changes) -> subprocess.Popen:
    """Start a program in the project's folder, in its own process group, with its output and errors in one pipe."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "text": True}
    how = {"cwd": ROOT, "env": ENVIRONMENT, "start_new_session": True} | pipes | changes
    return subprocess.Popen(list(map(str, command)), **how)


def start_ranks(words: list, **how) -> list[Fork]:
    """Start a program as the two ranks of a launch, without a launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [Fork(words, env=ENVIRONMENT | launch | {"RANK": rank, "LOCAL_RANK": rank}, **how) for rank in "01"]


def run_ranks(words: list, *, status: int = 0, **how) -> str:
    """Run a program as two ranks, which must both end with this status; return what they printed."""
    ranks = start_ranks(words, **how)
    try:
        return "".join(finish(rank, status) for rank in ranks)
    finally:
        for rank in ranks:  # one may wait for another that has failed
            rank.kill()


def finish(process: subprocess.Popen | Fork, status: int | None = 0) -> str:
    """Wait for a program to end with this status (None: with any); return what it printed."""
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert status is None or process.returncode == status, printed[-3000:]
    return printed


def wait_for(condition: Callable[[], bool], process: subprocess.Popen | Fork) -> bool:
    """Wait for a condition as long as the program runs, at most TIMEOUT seconds; return whether it came true."""
    deadline = time.monotonic() + TIMEOUT
    while not (met := condition()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


def users_of(folder: str | os.PathLike) -> list[psutil.Process]:
    """The processes whose command line names a folder."""
    return [each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or [])]


def descendants(pid: int, word: str) -> list[psutil.Process]:
    """What a process has started, directly or not, that has this word in its command line and has not ended."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in process.cmdline():
                    found.append(process)
    return found


def kill_all(process: subprocess.Popen | Fork, folder: str | os.PathLike) -> None:
    """SIGKILL a program and all processes that work on a folder; return when they have ended."""
    doomed = users_of(folder)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    for each in doomed:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.communicate()
    assert not psutil.wait_procs(doomed, timeout=30)[1]
