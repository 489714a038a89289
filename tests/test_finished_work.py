"""The one protocol of finished work: settings that are compared, locks, and what the ranks of a launch agree on."""

import json
import os
import random
import subprocess
import sys
import threading
import time

import pytest
from helpers import ENVIRONMENT, finish, reset_process, start

import utils
from utils import UserError


@pytest.fixture(autouse=True)
def locks_end_with_the_test():
    yield
    reset_process()


def make_run(folder, results=None):
    return utils.RunSettings(folder / "settings.json", results=lambda: results, remedy="use another folder")


def test_the_same_settings_pass_and_others_are_named_by_content(tmp_path):
    (tmp_path / "a").write_text("words")
    settings = {"seed": 1, "sides": ("left", "right"), "words": utils.files_setting(tmp_path / "a")}
    run = make_run(tmp_path, results=tmp_path / "a")
    run.write(settings, launch="x")
    run.check(settings | {"words": settings["words"] | {"path": "elsewhere"}})
    (tmp_path / "a").write_text("other words")
    changed = utils.files_setting(tmp_path / "a")
    shown = [f"{setting['path']} (sha256 {setting['sha256'][:8]})" for setting in (settings["words"], changed)]
    with pytest.raises(UserError) as refused:
        run.check({"seed": 2, "sides": ["left", "right"], "words": changed, "new": None})
    assert f"seed: 1 then, 2 now; words: {shown[0]} then, {shown[1]} now)" in str(refused.value)
    assert str(run.path) in str(refused.value) and "use another folder" in str(refused.value)


def test_settings_may_change_before_there_are_results_and_results_without_settings_are_refused(tmp_path):
    run = make_run(tmp_path)
    run.write({"seed": 1})
    run.check({"seed": 2})
    run.path.unlink()
    with pytest.raises(UserError, match="rows.json: .*settings.json.*use another folder"):
        make_run(tmp_path, results=tmp_path / "rows.json").check({"seed": 1})


@pytest.mark.parametrize("found", ["text", None, {"words": {"sha256": 7}}, {"words": {"sha256": None, "path": []}}])
def test_settings_that_are_damaged_are_refused_in_one_line(found, tmp_path):
    run = make_run(tmp_path, results=tmp_path / "rows.json")
    run.write(found)
    with pytest.raises(UserError, match="settings.json: "):
        run.check({"words": {"path": "a", "sha256": "abc"}})


HOLDER = """
import sys, time, utils
try:
    utils.lock(sys.argv[1])
except ValueError as error:
    sys.exit(str(error))
print("locked", flush=True)
time.sleep(60)
"""


def hold(path):
    return start([sys.executable, "-c", HOLDER, path])


def test_a_lock_keeps_others_out_dies_with_its_owner_and_can_be_given_up(tmp_path):
    path = tmp_path / "out" / ".run.lock"
    owner = hold(path)
    assert owner.stdout.readline() == "locked\n" and utils.is_locked(path)
    with pytest.raises(UserError, match="out: another process is writing to this run"):
        utils.lock(path)
    owner.kill()
    owner.communicate()
    assert path.exists() and not utils.is_locked(path)
    utils.lock(path)
    utils.lock(path)  # of one process
    assert not utils.is_locked(path)
    assert "another process is writing to this run" in finish(hold(path), status=1)
    utils.unlock(path)
    other = hold(path)
    assert other.stdout.readline() == "locked\n" and utils.is_locked(path)
    other.kill()
    other.communicate()


def test_a_lock_that_another_start_looks_at_in_that_moment_is_taken(tmp_path, monkeypatch):
    attempts = iter([BlockingIOError(11, "Resource temporarily unavailable"), None])
    ours = utils.fcntl.lockf

    def lock_later(*args):
        if error := next(attempts):
            raise error
        ours(*args)

    with monkeypatch.context() as patch:
        patch.setattr(utils.fcntl, "lockf", lock_later)
        utils.lock(tmp_path / ".run.lock")
    assert "another process" in finish(hold(tmp_path / ".run.lock"), status=1)


def test_without_locks_there_is_one_warning_and_work_goes_on(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(utils.fcntl, "lockf", refuse)
    for name in ("a", "b"):
        utils.lock(tmp_path / f".{name}.lock")
    assert not utils.is_locked(tmp_path / ".b.lock")
    assert len(caplog.records) == 1 and "Function not implemented" in caplog.text


@pytest.mark.parametrize("kind", ["device", "fifo", "link", "folder"])
def test_outputs_take_the_place_of_regular_files_only(tmp_path, kind):
    output = tmp_path / "output"
    (tmp_path / "kept").write_text("kept")
    if kind == "fifo":
        os.mkfifo(output)
    elif kind == "link":
        output.symlink_to(tmp_path / "kept")
    elif kind == "folder":
        output.mkdir()
    path = "/dev/null" if kind == "device" else output
    before = os.lstat(path)
    with pytest.raises(UserError, match=f"{path}: not a regular file"), utils.replacing(path) as file:
        file.write("lost")
    assert os.lstat(path) == before and (tmp_path / "kept").read_text() == "kept"


WRITER = """
import sys, time, utils
with utils.replacing(sys.argv[1]) as file:
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_killed_writers_left_is_deleted_after_an_hour_and_what_is_written_now_stays(tmp_path):
    path = tmp_path / "results [1].json"
    writer = start([sys.executable, "-c", WRITER, path])
    assert writer.stdout.readline() == "writing\n"
    writer.kill()
    writer.communicate()
    (left,) = tmp_path.glob(".results*.tmp")
    with utils.replacing(path) as file:
        file.write("of another writer")
        utils.write_json(path, {})
        assert len(list(tmp_path.glob(".results*.tmp"))) == 2
        os.utime(left, (0, 0))
        utils.write_json(path, {})
        assert not left.exists()
    assert path.read_text() == "of another writer" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_with_the_path(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")  # as write() does

    monkeypatch.setattr(utils.os, "fsync", refuse)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/settings.json'"):
        utils.write_json(tmp_path / "settings.json", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content, words",
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo", ["one", "two"]),
        (b"\xef\xbb\xbfone\n\n  \n two \none\n", ["one", "two", "one"]),
        ("café\n".encode(), ["café"]),
    ],
)
def test_word_lists_are_read_as_they_come(content, words, tmp_path):
    (tmp_path / "words.txt").write_bytes(content)
    assert utils.read_words(tmp_path / "words.txt") == words


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "no words"),
        (b"\n \r\n", "no words"),
        (b"one\ncaf\xe9\n", ":2: "),
        *((f"snow\nice{odd}cream\n".encode(), ":2: ") for odd in ("\x0c", "\u2028", "\0", "\x1b[2J", "\t")),
    ],
)
def test_an_unusable_word_list_is_refused_with_its_line(content, message, tmp_path):
    (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(UserError, match=f"words.txt.*{message}"):
        utils.read_words(tmp_path / "words.txt")


# --- the ranks of a launch -----------------------------------------------------------------------------------------


RANK = """
import datetime, json, os, time, torch, utils
answers = []
if utils.rank() == 1:
    utils.launch_store().set_timeout(datetime.timedelta(seconds=0.5))  # for a launch to start, not for rank 0 to work
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


def free_port() -> int:
    return random.randint(20_000, 30_000)


def test_rank_0_decides_for_all_and_a_process_group_can_follow(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        start(
            [sys.executable, "-c", RANK],
            cwd=tmp_path,
            env=ENVIRONMENT | address | {"RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in (1, 0)
    ]
    answers = [json.loads(finish(rank)) for rank in ranks]
    assert answers == [[0, "[Errno 2] No such file or directory: 'nowhere'", ["again"]]] * 2


# A machine's torchrun, which waits for the other machines for 2 s instead of 300; and a rank of a launch.
MACHINE = """
import functools, torch.distributed.launcher.api as api
api.LocalElasticAgent = functools.partial(api.LocalElasticAgent, exit_barrier_timeout=2)
from torch.distributed.run import main
main()
"""
LATE = """
import os, sys, time, utils
locks = [f"{sys.argv[1]}/.rank{rank}.lock" for rank in range(2)]
utils.lock(locks[utils.rank()])
utils.from_rank_0(lambda: None)
if utils.rank() == 1:
    time.sleep(6)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), 9)
utils.meet_at_end(locks)
print(f"rank {utils.rank()} has ended")
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


class Store:
    """A launch's store as rank 1 sees it: rank 0 has said what its files are."""

    expected: dict = {}

    def set(self, key, value):
        pass

    def check(self, keys):
        return True

    def get(self, key):
        return json.dumps({"value": self.expected}).encode()


def test_inputs_are_awaited_until_this_machine_sees_what_rank_0_sees(tmp_path, monkeypatch, tiny_model):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(utils, "launch_store", Store)
    late = tmp_path / "late"
    models = {str(path): path.stat().st_size for path in utils.Path(tiny_model).iterdir()}
    monkeypatch.setattr(Store, "expected", {str(late): len("rows")} | models)
    late.write_text("ro")  # half of it shows
    threading.Timer(0.7, late.write_text, ["rows"]).start()
    started = time.monotonic()
    utils.await_inputs([str(late), tiny_model])
    assert time.monotonic() - started > 0.6
    monkeypatch.setattr(utils, "SHARING_TIMEOUT", 0)
    late.unlink()
    with pytest.raises(UserError, match="/late: not as rank 0 sees it"):
        utils.await_inputs([str(late), tiny_model])
