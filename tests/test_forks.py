"""The executable that the tests start programs with is one that ends, speaks and dies as Python does."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT
from forks import KILL, python

SHOW = """import json, os, sys
heard = [os.getcwd(), os.environ.get("WORD"), sys.stdin.read()]
json.dump([sys.argv, *heard, sys.path[0], "torch" in sys.modules], sys.stdout)
print("error", file=sys.stderr)
sys.exit(3)"""
WAIT = "import time; print('here', flush=True); time.sleep(100)"


def both(*arguments, **how) -> list:
    """How the program ends under it and under Python."""
    ends = []
    for executable in (python(), sys.executable):
        command = [executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **how)
        ends.append((done.returncode, done.stdout, done.stderr))
    return ends


def test_a_program_gets_all_that_it_is_given_and_hands_back_its_status():
    environment = os.environ | {"WORD": "one"}
    (status, out, err), real = both("-c", SHOW, "a b", "c", env=environment, input="two")
    assert (status, err) == (3, "error\n")
    assert json.loads(out) == [["-c", "a b", "c"], str(ROOT), "one", "two", "", True]
    assert real == (status, out.replace("true", "false"), err)


def test_files_that_are_open_stay_open(tmp_path):
    with open(tmp_path / "file", "w") as file:
        os.dup2(file.fileno(), 19)
        forked, real = both("-c", "import os; os.write(19, b'line ')", pass_fds=[19])
        os.close(19)
    assert (forked, real) == ((0, "", ""),) * 2 and (tmp_path / "file").read_text() == "line line "


@pytest.mark.parametrize("how", [["-m", "tools.report"], ["-u", "-m", "tools.report"], ["tools/report.py"]])
def test_the_projects_programs_run_by_module_and_by_path(how):
    forked, real = both(*how, "--help", env=os.environ | {"PYTHONPATH": "."})
    assert forked == real and "usage: report.py" in real[1]


def test_errors_that_nobody_catches_end_it_with_status_1():
    (status, _, err), _ = both("-c", "raise ValueError('so')")
    assert status == 1 and err.endswith("ValueError: so\n")


@pytest.mark.parametrize(
    "sent, code, status",
    [
        (signal.SIGTERM, WAIT, -signal.SIGTERM),
        (signal.SIGINT, WAIT, -signal.SIGINT),
        (KILL, WAIT, -signal.SIGKILL),
        (signal.SIGTERM, f"import signal; signal.signal(signal.SIGTERM, lambda *_: exit(5)); {WAIT}", 5),
    ],
)
def test_signals_reach_the_program(sent, code, status):
    process = subprocess.Popen([python(), "-c", code], cwd=ROOT, stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "here\n"
    process.send_signal(sent)
    process.communicate()
    assert process.returncode == status


def test_a_program_dies_with_what_stands_for_it():
    code = f"import os; print(os.getpid()); {WAIT}"
    process = subprocess.Popen([python(), "-c", code], cwd=ROOT, stdout=-1, text=True)
    number = int(process.stdout.readline())
    process.kill()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(number):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.communicate()


@pytest.mark.parametrize(
    "how", [{"env": os.environ | {"HF_HOME": "/"}}, {"cwd": "/"}, {"env": os.environ | {"PYTHONPATH": "/"}}]
)
def test_where_a_fork_would_be_something_else_the_real_python_starts(how):
    code = "import sys; print('torch' in sys.modules)"
    done = subprocess.run([python(), "-c", code], **({"cwd": ROOT} | how), capture_output=True, text=True)
    assert done.stdout == "False\n"
