"""The one protocol of finished work: settings that are compared, locks, and what the ranks of a launch agree on."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

import utils


def make_run(folder, results=None):
    return utils.RunSettings(folder / "settings.json", results=lambda: results, remedy="use another folder")


def test_the_same_settings_pass_and_others_are_named_by_content(tmp_path):
    (tmp_path / "a").write_text("words")
    settings = {"seed": 1, "sides": ("left", "right"), "words": utils.files_setting(tmp_path / "a")}
    run = make_run(tmp_path, results=tmp_path / "a")
    run.write(settings, launch="x")
    moved = settings["words"] | {"path": "elsewhere"}
    run.check(settings | {"words": moved})
    (tmp_path / "a").write_text("other words")
    changed = utils.files_setting(tmp_path / "a")
    shown = [f"{setting['path']} (sha256 {setting['sha256'][:8]})" for setting in (settings["words"], changed)]
    with pytest.raises(ValueError) as refused:
        run.check({"seed": 2, "sides": ["left", "right"], "words": changed, "new": None})
    difference = f"seed: 1 then, 2 now; words: {shown[0]} then, {shown[1]} now"
    assert str(refused.value) == f"{run.path}: made with other settings ({difference}); use another folder"
    run.check({"seed": 2}, overwrite=True)


def test_settings_bind_nobody_before_there_are_results_and_results_without_them_are_refused(tmp_path):
    run = make_run(tmp_path)
    run.write({"seed": 1})
    run.check({"seed": 2})
    run.path.unlink()
    with pytest.raises(ValueError, match="rows.json: no settings.json beside it says how it was made; use another"):
        make_run(tmp_path, results=tmp_path / "rows.json").check({"seed": 1})


@pytest.mark.parametrize("found", ["text", None, {"words": {"sha256": 7}}, {"words": {"sha256": None, "path": []}}])
def test_settings_that_are_damaged_are_refused_in_one_line(found, tmp_path):
    run = make_run(tmp_path, results=tmp_path / "rows.json")
    run.write(found)
    with pytest.raises(ValueError, match="settings.json: (not the settings of a run|made with other settings)"):
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
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_lock_keeps_others_out_dies_with_its_owner_and_can_be_given_up(tmp_path):
    path = tmp_path / "out" / ".run.lock"
    owner = hold(path)
    assert owner.stdout.readline() == "locked\n" and utils.is_locked(path)
    with pytest.raises(ValueError, match="out: another process is writing to this run; end that one first"):
        utils.lock(path)
    owner.kill()
    owner.communicate()
    assert path.exists() and not utils.is_locked(path)
    utils.lock(path)
    utils.lock(path)  # of one process
    assert not utils.is_locked(path)
    assert "another process is writing to this run" in hold(path).communicate()[1]
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

    monkeypatch.setattr(utils.fcntl, "lockf", lock_later)
    utils.lock(tmp_path / ".run.lock")
    monkeypatch.undo()
    assert "another process" in hold(tmp_path / ".run.lock").communicate()[1]


def test_without_locks_there_is_one_warning_and_work_goes_on(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(utils.fcntl, "lockf", refuse)
    for name in ("a", "b"):
        utils.lock(tmp_path / f".{name}.lock")
    assert not utils.is_locked(tmp_path / ".b.lock")
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: no locks on this file system ([Errno 38] Function not implemented); run one launch at a time"
    ]


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
    with pytest.raises(ValueError, match=f"{path}: not a regular file"), utils.replacing(path) as file:
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
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"writing\n"
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


@pytest.mark.parametrize("word", ["ice\x0ccream", "ice\u2028cream", "i\0c\0e\0", "ice\x1b[2J", "ice\tcream"])
def test_a_word_with_control_characters_is_refused_with_its_line(tmp_path, word):
    (tmp_path / "words.txt").write_text(f"snow\n{word}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="words.txt:2: .* in a word; expected one a line, as UTF-8"):
        utils.read_words(tmp_path / "words.txt")


RANK = """
import datetime, json, os, time, torch, utils
answers = []
if utils.rank() == 1:
    utils.launch_store().set_timeout(datetime.timedelta(seconds=0.5))  # for a launch to start, not for rank 0 to work
for make in (lambda: utils.rank(), lambda: open("nowhere"), lambda: time.sleep(1.5) or ["again"]):
    try:
        answers.append(utils.from_rank_0(make))
    except ValueError as error:
        answers.append(str(error))
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
print(json.dumps(answers))
torch.distributed.destroy_process_group()
"""


def test_rank_0_decides_for_all_and_a_process_group_can_follow(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            cwd=tmp_path,
            env=os.environ | address | {"RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        for rank in (1, 0)
    ]
    answers = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert answers == [[0, "[Errno 2] No such file or directory: 'nowhere'", ["again"]]] * 2


class Store:
    """A launch's store as rank 1 sees it: rank 0 has said what its files are."""

    expected: dict = {}

    def set(self, key, value):
        pass

    def check(self, keys):
        return True

    def get(self, key):
        return json.dumps({"value": self.expected}).encode()


@pytest.fixture
def rank_1(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(utils, "launch_store", Store)


def test_inputs_are_awaited_until_this_machine_sees_what_rank_0_sees(tmp_path, rank_1, monkeypatch, tiny_model):
    (tmp_path / "there").write_text("rows")
    late, digest = tmp_path / "late", utils.file_sha256(tmp_path / "there")
    expected = {str(late): digest, "hub/name": None, tiny_model: utils.model_fingerprint(utils.Path(tiny_model))}
    monkeypatch.setattr(Store, "expected", expected)
    late.write_text("ro")  # half of it shows
    threading.Timer(0.7, late.write_text, ["rows"]).start()
    started = time.monotonic()
    utils.await_inputs(list(expected))
    assert time.monotonic() - started > 0.6
    monkeypatch.setattr(utils, "SHARING_TIMEOUT", 0)
    late.unlink()
    with pytest.raises(ValueError, match="/late: not what rank 0 has, after 0 s; do all machines share it"):
        utils.await_inputs(list(expected))
