"""A vLLM server, its supervisor or the play that started them is killed: no game is lost, no process is left.

The server is the one that the variable VLLM names, else the stand-in.
"""

import random
import subprocess
import sys
from pathlib import Path

import psutil
from conftest import ROOT
from forks import KILL, python
from test_kills import games_of, make_place, play_flags, until
from test_vllm import QUICK, REAL, build_served_model
from trials import ENVIRONMENT, TIMEOUT, finish, scratch, start, users_of

from tools.engine import supervise

SECONDS = 20  # until the last process has ended


def test_vllm_servers(tmp_path, trials):
    place = make_place(tmp_path)
    executable = tmp_path / "vllm"
    executable.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {ROOT}/tests/stand_in_vllm.py "$@"\n')
    executable.chmod(0o700)
    model = build_served_model(tmp_path / "model", "has")

    def begin(output: Path) -> subprocess.Popen:
        how = ["--engine", "vllm", "--concurrent_games", "2", f"--vllm_args={QUICK}"]
        command = [python(), "-m", "tools.play_llm_game", *play_flags(place, model, output), *how]
        return start(command, env=ENVIRONMENT | {"VLLM": REAL or str(executable)})

    def undisturbed() -> dict:
        if not expected:
            finish(begin(tmp_path / "undisturbed"))
            expected.update(games_of(tmp_path / "undisturbed"))
        return expected

    def trial(rng: random.Random) -> int:
        wanted = undisturbed()
        most = sum(path.stat().st_size for path in tmp_path.glob("undisturbed/*_rank0.jsonl"))
        with scratch(tmp_path) as folder:
            process, path = begin(folder), folder / "im_sampling_words_rank0.jsonl"
            size = rng.randint(0, most)
            until(lambda: path.exists() and path.stat().st_size >= size, process)
            delivered = kill_one(rng, process, model)
            safe = path.read_bytes() if path.exists() else b""
            safe = safe[: safe.rfind(b"\n") + 1]
            finish(begin(folder))
            assert path.read_bytes().startswith(safe)
            found = games_of(folder)
            assert found["stored"] == wanted["stored"]
            assert REAL or found == wanted  # a real server rounds as the games that it plays at once
        return delivered

    expected: dict = {}
    trials.run("vLLM servers", trial, short=0, kills=1)


def kill_one(rng: random.Random, play: subprocess.Popen, model: str) -> bool:
    """Kill one of the three; whether it was there. All processes end then."""
    serving = [process for process in users_of(model) if "serve" in process.cmdline()]
    supervisors = [process for process in serving if supervise.__file__ in process.cmdline()]
    doomed = [*supervisors, *(child for each in supervisors for child in each.children(recursive=True))]
    kind = rng.choice(["play", "supervisor", "server"])
    if kind == "play":
        delivered = play.poll() is None
        play.send_signal(KILL)
    else:
        victims = [each for each in serving if (each in supervisors) == (kind == "supervisor")]
        delivered = bool(victims)
        for each in victims:
            each.kill()
    printed, _ = play.communicate(timeout=TIMEOUT)
    assert play.returncode in ((-9, 0) if kind == "play" else (2, 0)), printed
    assert play.returncode != 2 or "its vLLM has ended by SIGKILL" in printed, printed
    assert not psutil.wait_procs(doomed, timeout=SECONDS)[1], kind
    return delivered
