"""`utils.stage`: work is done once, under the same settings, by one launch at a time."""

import json
import shutil
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT, TORCHRUN, finish, start

import utils

WORK = """
import os, signal, sys, time, utils
def main():
    folder, seed, how = sys.argv[1:]
    with utils.stage(f"{folder}/settings.json", {"seed": int(seed)}, results=["rows.json", "part-*"],
                     ranks=how != "alone") as work:
        print(f"{'todo' if work.todo else 'done'} {utils.rank()}", flush=True)
        if work.todo and utils.rank() == 0:
            open(f"{folder}/part-1", "w").close()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hold":
                time.sleep(60)
            utils.write_json(f"{folder}/rows.json", [])
            work.notes["rows"] = 0
utils.set_up_logging()
utils.run_program(main)
"""
PLATFORM = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def work(folder, seed=1, how="end", launcher=(sys.executable,), **environment):
    program = folder / "work.py"
    program.write_text(WORK)
    return start([*launcher, program, folder, seed, how], env=ENVIRONMENT | environment)


def snapshot(folder):
    but = ("work.py", ".settings.lock")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in but}


def test_work_is_done_once_and_its_record_says_how(tmp_path):
    assert "todo 0" in finish(work(tmp_path))
    record = json.loads((tmp_path / "settings.json").read_text())
    assert record["settings"] == {"seed": 1} and record["finished"] is True and record["rows"] == 0
    assert record["made_by"]["torch"]
    before = snapshot(tmp_path)
    printed = finish(work(tmp_path))
    assert "all is there" in printed and "done 0" in printed and snapshot(tmp_path) == before
    with utils.stage(tmp_path / "settings.json", {"seed": 1}, results=["rows.json"]) as again:
        assert not again.todo and again.notes["rows"] == 0


def test_other_settings_are_named_and_nothing_is_written(tmp_path):
    finish(work(tmp_path))
    before = snapshot(tmp_path)
    printed = finish(work(tmp_path, seed=2), status=2)
    assert "seed: 1 then, 2 now" in printed and str(tmp_path) in printed
    assert all(name in printed for name in ("rows.json", "part-1", "settings.json"))
    assert snapshot(tmp_path) == before
    assert "done 0" in finish(work(tmp_path))  # the refused start has freed the lock


def test_after_a_kill_the_same_command_continues_and_another_is_refused(tmp_path):
    finish(work(tmp_path, how="kill"), status=-9)
    before = snapshot(tmp_path)
    assert "seed: 1 then, 2 now" in finish(work(tmp_path, seed=2), status=2)
    assert snapshot(tmp_path) == before
    assert "todo 0" in finish(work(tmp_path))


def test_settings_without_results_do_not_count_and_results_need_settings(tmp_path):
    utils.write_json(tmp_path / "settings.json", {"settings": {"seed": 1}, "finished": False})
    finish(work(tmp_path, seed=2))
    (tmp_path / "settings.json").unlink()
    assert "is missing, which says how part-1 was made" in finish(work(tmp_path), status=2)


def test_results_that_were_deleted_are_made_again(tmp_path):
    finish(work(tmp_path))
    (tmp_path / "rows.json").unlink()
    assert "todo 0" in finish(work(tmp_path)) and (tmp_path / "rows.json").exists()


def test_an_error_leaves_the_work_unfinished_and_frees_the_lock(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), utils.stage(tmp_path / "s.json", {}, results=["x"]) as again:
            assert again.todo
            (tmp_path / "x").touch()
            raise ZeroDivisionError
    assert utils.read_json(tmp_path / "s.json")["finished"] is False


def test_a_second_launch_is_refused_while_the_first_is_at_work(tmp_path):
    first = work(tmp_path, how="hold")
    assert first.stdout.readline() == "todo 0\n"
    assert "another launch is at work here" in finish(work(tmp_path), status=2)
    first.kill()
    first.communicate()
    assert "todo 0" in finish(work(tmp_path))


def test_where_there_are_no_locks_a_warning_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(utils.FileLock, "acquire", lambda self: (_ for _ in ()).throw(OSError(95, "not supported")))
    with utils.stage(tmp_path / "s.json", {}, results=["x"]) as again:
        assert again.todo and "run one launch at a time" in caplog.text


def test_files_and_models_are_compared_by_content(tmp_path):
    (tmp_path / "a").write_text("words")
    settings = {"sides": ("left", "right"), "words": utils.files_setting(tmp_path / "a")}
    with utils.stage(tmp_path / "s.json", settings, results=["x"]):
        (tmp_path / "x").touch()
    shutil.copy(tmp_path / "a", tmp_path / "b")
    moved = settings | {"words": utils.files_setting(tmp_path / "b")}
    with utils.stage(tmp_path / "s.json", moved, results=["x"]) as again:
        assert not again.todo
    (tmp_path / "b").write_text("other words")
    changed = settings | {"words": utils.files_setting(tmp_path / "b")}
    with pytest.raises(utils.UserError, match="words: .*a .* then, .*b .* now"):
        utils.stage(tmp_path / "s.json", changed, results=["x"]).__enter__()


def test_rank_0_decides_for_all_ranks(tmp_path):
    launcher = [*TORCHRUN, "--nproc_per_node", "2"]
    printed = finish(work(tmp_path, launcher=launcher))
    assert "todo 0" in printed and "todo 1" in printed
    printed = finish(work(tmp_path, launcher=launcher))
    assert "done 0" in printed and "done 1" in printed
    command = [*launcher, tmp_path / "work.py", tmp_path, "2", "end"]
    refused = subprocess.run(command, env=ENVIRONMENT, capture_output=True)
    assert refused.returncode == 1


def test_a_program_that_needs_no_ranks_asks_for_none(tmp_path):
    assert "todo 0" in finish(work(tmp_path, how="alone", **PLATFORM))
