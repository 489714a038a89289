"""`utils.stage`: work is done once, under the same settings, by one launch at a time."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT, TORCHRUN, finish, start

import utils

WORK = """
import os, signal, sys, time, utils
def main():
    folder, seed, how = sys.argv[1:]
    with utils.stage(f"{folder}/settings.json", {"seed": int(seed)}, results=["rows.json", "part-*"]) as todo:
        print(f"{'todo' if todo else 'done'} {utils.rank()}", flush=True)
        if todo and utils.rank() == 0:
            open(f"{folder}/part-1", "w").close()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hold":
                time.sleep(60)
            utils.write_json(f"{folder}/rows.json", [])
            todo.notes["rows"] = 0
utils.set_up_logging()
utils.run_program(main)
"""


def work(folder, seed=1, how="end", launcher=(sys.executable,)):
    program = folder / "work.py"
    program.write_text(WORK)
    return start([*launcher, program, folder, seed, how], env=ENVIRONMENT)


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "work.py"}


def test_work_is_done_once_and_its_record_says_how(tmp_path):
    assert "todo 0" in finish(work(tmp_path))
    record = json.loads((tmp_path / "settings.json").read_text())
    assert record["settings"] == {"seed": 1} and record["finished"] is True and record["rows"] == 0
    assert record["made_by"]["torch"]
    before = snapshot(tmp_path)
    printed = finish(work(tmp_path))
    assert "all is there" in printed and "done 0" in printed and snapshot(tmp_path) == before


def test_notes_of_finished_work_are_read(tmp_path):
    finish(work(tmp_path))
    with utils.stage(tmp_path / "settings.json", {"seed": 1}, results=["rows.json"]) as todo:
        assert not todo and todo.notes["rows"] == 0


def test_finished_work_is_read_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    finish(work(tmp_path))
    (tmp_path / ".settings.lock").unlink()
    monkeypatch.setattr(utils.os, "open", lambda *_: pytest.fail("nothing is written"))
    with utils.stage(tmp_path / "settings.json", {"seed": 1}, results=["rows.json"]) as todo:
        assert not todo


def test_other_settings_are_named_and_nothing_is_written(tmp_path):
    finish(work(tmp_path))
    before = snapshot(tmp_path)
    printed = finish(work(tmp_path, seed=2), status=2)
    assert "seed: 1 then, 2 now" in printed and str(tmp_path) in printed
    assert all(name in printed for name in ("rows.json", "part-1", "settings.json"))
    assert snapshot(tmp_path) == before


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
    assert "does not say how rows.json was made" in finish(work(tmp_path), status=2)


@pytest.mark.parametrize("record", ["", "[]", "null", '{"settings": 1}', "{}"])
def test_a_damaged_record_beside_results_is_refused(tmp_path, record):
    finish(work(tmp_path))
    (tmp_path / "settings.json").write_text(record)
    assert "does not say how rows.json was made" in finish(work(tmp_path), status=2)


def test_results_that_were_deleted_are_made_again(tmp_path):
    finish(work(tmp_path))
    (tmp_path / "rows.json").unlink()
    assert "todo 0" in finish(work(tmp_path)) and (tmp_path / "rows.json").exists()


def test_an_error_leaves_the_work_unfinished_and_frees_the_lock(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), utils.stage(tmp_path / "s.json", {}, results=["x"]) as todo:
            assert todo
            (tmp_path / "x").touch()
            1 / 0  # noqa: B018
    assert utils.read_json(tmp_path / "s.json")["finished"] is False


def test_a_second_launch_is_refused_while_the_first_is_at_work(tmp_path):
    first = work(tmp_path, how="hold")
    assert first.stdout.readline() == "todo 0\n"
    assert "another process is writing to this run" in finish(work(tmp_path), status=2)
    first.kill()
    first.communicate()
    assert "todo 0" in finish(work(tmp_path))


def test_files_and_models_are_compared_by_content(tmp_path):
    (tmp_path / "a").write_text("words")
    settings = {"sides": ("left", "right"), "words": utils.files_setting(tmp_path / "a")}
    with utils.stage(tmp_path / "s.json", settings, results=["x"]):
        (tmp_path / "x").touch()
    moved = settings | {"words": settings["words"] | {"path": "elsewhere"}}
    with utils.stage(tmp_path / "s.json", moved, results=["x"]) as todo:
        assert not todo
    changed = settings | {"words": {"path": "a", "sha256": "0"}}
    with pytest.raises(utils.UserError, match="words: "), utils.stage(tmp_path / "s.json", changed, results=["x"]):
        pytest.fail("refused before the block")


def test_settings_that_may_change_are_brought_up_to_date_and_the_work_ends_again(tmp_path):
    record, how = tmp_path / "s.json", {"results": ["x"], "may_change": ["epochs"]}
    with utils.stage(record, {"seed": 1, "epochs": 2}, **how):
        (tmp_path / "x").touch()
    with utils.stage(record, {"seed": 1, "epochs": 3}, **how) as todo:
        assert todo and utils.read_json(record)["settings"] == {"seed": 1, "epochs": 3}
    with utils.stage(record, {"seed": 1, "epochs": 3}, **how) as todo:
        assert not todo
    before = record.read_bytes()
    with pytest.raises(utils.UserError, match="seed: 1 then, 2 now") as refused:
        utils.stage(record, {"seed": 2, "epochs": 4}, **how).__enter__()
    assert "epochs" not in str(refused.value) and record.read_bytes() == before


def test_rank_0_decides_for_all_ranks(tmp_path):
    launcher = [*TORCHRUN, "--nproc_per_node", "2"]
    printed = finish(work(tmp_path, launcher=launcher))
    assert "todo 0" in printed and "todo 1" in printed
    printed = finish(work(tmp_path, launcher=launcher))
    assert "done 0" in printed and "done 1" in printed
    assert subprocess.run([*launcher, tmp_path / "work.py", tmp_path, "2", "end"], env=ENVIRONMENT,
                          cwd=os.getcwd(), capture_output=True).returncode == 1  # fmt: skip
