"""What all programs share: settings and locks of a run, whole writes, word lists, ranks, starts and errors."""

import json
import os
import socket
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT, ROOT, TORCHRUN, start

import utils

# Locks.


HOLDER = """
import sys, time, utils
utils.run_program(lambda: utils.lock(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def hold(path) -> subprocess.Popen:
    """Start a process that prints "locked" when it holds the lock, or ends with an error."""
    return start([sys.executable, "-c", HOLDER, path])


def test_a_lock_keeps_others_out_and_dies_with_its_owner(tmp_path):
    path = tmp_path / "out" / ".run.lock"
    owner = hold(path)
    assert owner.stdout.readline() == "locked\n" and utils.is_locked(path)
    with pytest.raises(utils.UserError, match="another process is writing to this run"):
        utils.lock(path)
    owner.kill()
    owner.communicate()
    assert path.exists() and not utils.is_locked(path)
    utils.lock(path)
    utils.lock(path)  # it is ours already
    assert not utils.is_locked(path)
    assert "another process is writing to this run" in hold(path).communicate()[0]
    utils.unlock(path)
    other = hold(path)
    assert other.stdout.readline() == "locked\n"
    other.kill()
    other.communicate()


def test_a_lock_ends_with_its_owner_although_a_child_lives_on(tmp_path):
    path, child = tmp_path / ".run.lock", "import subprocess; subprocess.Popen(['sleep', '30'])"
    owner = start([sys.executable, "-c", f"{child}; {HOLDER}", path], stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == "locked\n" and utils.is_locked(path)
        owner.kill()
        owner.wait()
        assert not utils.is_locked(path)
    finally:
        os.killpg(owner.pid, 9)
        owner.communicate()


def test_a_lock_that_another_start_checks_at_this_moment_is_taken(tmp_path, monkeypatch):
    attempts = iter([BlockingIOError(11, "Resource temporarily unavailable"), None])
    ours = utils.fcntl.lockf

    def lock_later(*args):
        if error := next(attempts):
            raise error
        ours(*args)

    monkeypatch.setattr(utils.fcntl, "lockf", lock_later)
    utils.lock(tmp_path / ".run.lock")
    monkeypatch.undo()
    assert "another process" in hold(tmp_path / ".run.lock").communicate()[0]


def test_a_file_system_without_locks_gives_one_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(utils.fcntl, "lockf", refuse)
    for name in ("a", "b"):
        utils.lock(tmp_path / f".{name}.lock")
    assert not utils.is_locked(tmp_path / ".b.lock")
    (record,) = caplog.records
    assert str(tmp_path) in record.message and "no locks" in record.message


# Whole writes.


@pytest.mark.parametrize("name", ["device", "link", "folder"])
def test_an_output_replaces_regular_files_only(tmp_path, name):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "folder").mkdir()
    path = "/dev/null" if name == "device" else tmp_path / name
    with pytest.raises(utils.UserError, match=f"{path}: not a regular file"):
        utils.write_json(path, "lost")
    assert (tmp_path / "kept").read_text() == "kept" and (tmp_path / "link").is_symlink()
    assert not os.path.isfile("/dev/null")


WRITER = """
import sys, time, utils
with utils.replacing(sys.argv[1]) as file:
    file.write("half of it")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_killed_writer_leaves_the_old_file_and_its_temporary_one_goes_after_an_hour(tmp_path):
    path = tmp_path / "results [1].json"
    utils.write_json(path, ["old"])
    writer = start([sys.executable, "-c", WRITER, path])
    assert writer.stdout.readline() == "writing\n"
    writer.kill()
    writer.communicate()
    assert utils.read_json(path) == ["old"]
    (left,) = tmp_path.glob(".results*.tmp")
    with utils.replacing(path) as file:
        file.write("of another writer")
        utils.write_json(path, {})
        assert len(list(tmp_path.glob(".results*.tmp"))) == 2
        os.utime(left, (0, 0))
        utils.write_json(path, {})
        assert not left.exists()
    assert path.read_text() == "of another writer" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file data/0")]
)
def test_a_full_disk_is_an_os_error_that_names_the_file(tmp_path, error):
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/x.json'"):
        with utils.replacing(tmp_path / "x.json"):
            raise error
    assert list(tmp_path.iterdir()) == []


# Word lists.


def test_word_lists_may_have_any_line_ends_blank_lines_and_repeated_words(tmp_path):
    (tmp_path / "words.txt").write_bytes("\ufeffone\r\n\n  \n two \ncafé\none".encode())
    assert utils.read_words(tmp_path / "words.txt") == ["one", "two", "café", "one"]


@pytest.mark.parametrize(
    "content, named",
    [
        (b"", "no words"),
        (b"\n \r\n", "no words"),
        (b"one\ncaf\xe9\n", ":2: "),
        *((f"snow\nice{odd}cream\n".encode(), ":2: ") for odd in ("\x0c", "\u2028", "\0", "\x1b[2J", "\t")),
    ],
)
def test_an_unusable_word_list_is_refused_with_its_line(content, named, tmp_path):
    (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(utils.UserError, match=f"words.txt.*{named}"):
        utils.read_words(tmp_path / "words.txt")


# Ranks.


RANK = """
import datetime, json, time, torch, utils
answers = []
if utils.rank() == 1:
    utils.launch_store().set_timeout(datetime.timedelta(seconds=0.5))  # less than rank 0 takes
for make in (lambda: utils.rank(), lambda: open("nowhere"), lambda: time.sleep(1.5) or ["again"]):
    try:
        answers.append(utils.from_rank_0(make))
    except utils.UserError as error:
        answers.append(str(error))
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
print(json.dumps(answers))
torch.distributed.destroy_process_group()
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_all_ranks_get_the_answers_and_errors_of_rank_0_and_a_process_group_can_follow(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    ranks = [
        start([sys.executable, "-c", RANK], env=ENVIRONMENT | address | {"RANK": rank}, stderr=None, cwd=tmp_path)
        for rank in ("1", "0")
    ]
    answers = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert answers == [[0, "[Errno 2] No such file or directory: 'nowhere'", ["again"]]] * 2


# MACHINE is the torchrun of one machine; it waits for other machines for 2 s instead of 300. LATE is a rank.
MACHINE = """
import functools, torch.distributed.launcher.api as api
api.LocalElasticAgent = functools.partial(api.LocalElasticAgent, exit_barrier_timeout=2)
from torch.distributed.run import main
main()
"""
LATE = """
import os, sys, time
from tools.selfplay.files import EpisodeFiles
from utils import rank
files = EpisodeFiles(sys.argv[1], "run", [], None)
with files.stage({}):
    if rank() == 1:
        time.sleep(6)
        if sys.argv[2] == "dies":
            os.kill(os.getpid(), 9)
    files.meet()
print(f"rank {rank()} has ended")
"""


@pytest.mark.parametrize("rank_1", ["lives", "dies"])
def test_the_machine_that_ends_first_waits_for_the_other_unless_that_is_dead(rank_1, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    command = [sys.executable, "-c", MACHINE, "--nnodes=2", "--nproc_per_node=1", "--monitor_interval=0.1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}", "--rdzv_id=x"]
    rank = [tmp_path / "late.py", tmp_path, rank_1]
    machines = [start([*command, f"--rdzv_conf=is_host={number == 0}", *rank]) for number in (0, 1)]
    printed = [machine.communicate(timeout=100)[0] for machine in machines]
    ended = [f"rank {number} has ended" in "".join(printed) for number in (0, 1)]
    assert ended == [True, rank_1 == "lives"]
    assert [machine.returncode == 0 for machine in machines] == ended or rank_1 == "dies"


# Starts and errors.


PROGRAMS = sorted(
    path.relative_to(ROOT).with_suffix("")
    for path in (ROOT / "train.py", *ROOT.glob("tools/*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
PLAIN = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}


def run(*words, cwd=ROOT, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=PLAIN | environment, capture_output=True, text=True)


def test_importing_utils_changes_nothing_outside_of_programs():
    code = """
import ctypes, signal, sys
before = [signal.getsignal(number) for number in signal.valid_signals()]
import utils
deadly = ctypes.c_int()
utils.LIBC.prctl(2, ctypes.byref(deadly))  # PR_GET_PDEATHSIG
assert deadly.value == 0 and sys.excepthook is sys.__excepthook__
assert before == [signal.getsignal(number) for number in signal.valid_signals()]
"""
    done = run("-c", code, TORCHELASTIC_RUN_ID="x")
    assert done.returncode == 0, done.stderr


# A rank that imports its packages after utils, and a launcher that starts it and is killed.
SLOW_IMPORTS = """
import sys, time, utils
print("importing", flush=True)
if sys.argv[1] == "during":
    time.sleep(3)
utils.run_program(lambda: (print("at work", flush=True), time.sleep(60)))
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize("when, said", [("during", "importing"), ("after", "at work")])
def test_a_rank_ends_when_its_launcher_is_killed_during_its_imports_or_later(when, said, tmp_path):
    (tmp_path / "rank.py").write_text(SLOW_IMPORTS)
    command = [sys.executable, "-c", LAUNCHER, tmp_path / "rank.py", when]
    launcher = start(command, env=ENVIRONMENT | {"TORCHELASTIC_RUN_ID": "x"})
    while said not in launcher.stdout.readline():
        pass
    launcher.kill()
    printed, _ = launcher.communicate(timeout=30)  # ends when the rank has closed the pipe
    assert printed == ""


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_without_its_packages_prints_its_help_or_says_in_one_line_what_to_do(program, tmp_path):
    by_path = run("-S", ROOT / f"{program}.py", "--help", cwd=tmp_path)  # -S: without installed packages
    as_module = run("-S", "-m", str(program).replace("/", "."), "--help")
    for done in (by_path, as_module):
        if done.returncode == 0:
            assert "--" in done.stdout
            continue
        (line,) = done.stderr.splitlines() or [""]
        assert done.returncode == 2 and line.startswith(f"{program.name}.py: error: No module named '"), done.stderr
        assert "source .venv/bin/activate" in line


MISSING_AT_WORK = """
import torch, utils
def main():
    torch.distributed.init_process_group("gloo")  # torch now has an excepthook of its own
    import no_such_package
utils.run_program(main)
"""


def test_a_package_that_is_missing_during_work_is_named_under_torchrun_too(tmp_path):
    (tmp_path / "work.py").write_text(MISSING_AT_WORK)
    done = run(*TORCHRUN[1:], "--nproc_per_node=2", tmp_path / "work.py", PYTHONPATH=str(ROOT))
    lines = {line for line in done.stderr.splitlines() if "no_such_package" in line}
    assert len(lines) == 1, done.stderr  # rank 1 repeats it if rank 0 takes long to end
    assert lines.pop().startswith("work.py: error: No module named 'no_such_package' for ")


def test_a_missing_optional_package_is_named_with_the_command_that_installs_it():
    utils.require("json", "json")
    with pytest.raises(utils.UserError, match="^the package lm-nothing is missing: pip install 'lm-nothing>=1,<2'$"):
        utils.require("lm_nothing", "lm-nothing>=1,<2")


def test_a_program_runs_by_its_path_from_any_folder(tmp_path):
    program, words = ROOT / "tools/assign_rewards.py", ("--input_data_path", "none.json", "--output_data_path", "x")
    for environment in ({}, {"PYTHONPATH": "."}, {"PYTHONPATH": str(ROOT)}):
        done = run(program, *words, cwd=tmp_path, **environment)
        assert (done.returncode, done.stderr) == (2, "assign_rewards.py: error: none.json: no such file\n")


def test_an_error_of_all_ranks_is_printed_once_before_the_launchers_report(tmp_path):
    words = ("--input_data_path", tmp_path / "none.json", "--output_data_path", tmp_path / "x")
    done = run(*TORCHRUN[1:], "--nproc_per_node=3", ROOT / "tools/assign_rewards.py", *words, cwd=tmp_path)
    ours = [number for number, line in enumerate(done.stderr.splitlines()) if "no such file" in line]
    reports = [number for number, line in enumerate(done.stderr.splitlines()) if "ChildFailedError" in line]
    assert done.returncode == 1 and len(ours) == 1 and reports and ours[0] < reports[0]


def test_an_error_of_one_rank_alone_is_printed():
    code = "import utils; utils.RANK_0_FIRST = 0.1; utils.run_program(lambda: open('none'))"
    done = run("-c", code, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 2 and "No such file or directory: 'none'" in done.stderr


def test_user_errors_are_one_line_and_all_others_keep_their_traceback():
    for error, traceback in (("utils.UserError('a\\x1b[2J')", False), ("ValueError('a')", True)):
        done = run("-c", f"import utils\ndef main(): raise {error}\nutils.run_program(main)")
        assert ("Traceback" in done.stderr) == traceback and "\x1b" not in done.stderr
        assert done.returncode == (1 if traceback else 2)
