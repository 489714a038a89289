"""`stage`: work is done once, under the same settings, by one launch at a time."""

import contextlib
import errno
import re
import shutil
import sys
import time

import pytest
from filelock import FileLock
from helpers import ENVIRONMENT, contents, finish, run_ranks, start

from tools.common.errors import UserError
from tools.common.files import read_json, write_json
from tools.common.programs import run_program
from tools.common.ranks import rank
from tools.common.records import files_setting, stage

PLATFORM = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def work(folder, seed=1, how="end") -> bool:
    """Write a file, wait if `how` is hold, and write a second file. Returns whether there was work to do."""
    results = ["rows.json", "part-*"]
    settings = {"seed": int(seed)}
    if how == "other":  # on another machine: a seed, and the same model in another cache
        settings = {"seed": int(seed) + rank(), "model": {"path": f"m{rank()}", "sha256": f"{rank()}", "commit": "c"}}
    with stage(f"{folder}/settings.json", settings, results=results, ranks=how != "alone") as begun:
        if begun.todo and rank() == 0:
            write_json(f"{folder}/part-1", [])
        sys.stdout.write(f"{'todo' if begun.todo else 'done'} {rank()}\n")
        sys.stdout.flush()
        time.sleep(60 if how == "hold" else 0)
        if begun.todo and rank() == 0:
            write_json(f"{folder}/rows.json", [])
            begun.notes["rows"] = 0
        return begun.todo


def begin(*words, **environment):
    return start([sys.executable, __file__, *words], env=ENVIRONMENT | environment)


def test_work_is_done_once_and_its_record_says_how(tmp_path):
    assert work(tmp_path)
    before = contents(tmp_path)
    record = read_json(tmp_path / "settings.json")
    assert record["settings"] == {"seed": 1} and record["finished"] is True and record["rows"] == 0
    assert record["made_by"]["torch"]
    assert not work(tmp_path) and contents(tmp_path) == before
    (tmp_path / "rows.json").unlink()
    assert work(tmp_path) and (tmp_path / "rows.json").exists()


def test_other_settings_are_named_and_nothing_is_written(tmp_path):
    work(tmp_path)
    before = contents(tmp_path)
    message = r"made with other settings .seed: 1 then, 2 now.*delete in .*: part-1 rows\.json settings\.json"
    with pytest.raises(UserError, match=message):
        work(tmp_path, seed=2)
    assert contents(tmp_path) == before
    assert not work(tmp_path)  # the refused start has freed the lock


def test_a_setting_that_a_record_lacks_counts_as_its_default(tmp_path):
    work(tmp_path)
    for new, same in ((0.5, True), (0.6, False)):
        settings = {"seed": 1, "new": new, "sides": ("left",)}
        with (
            contextlib.nullcontext() if same else pytest.raises(UserError, match=r"\(new: 0.5 then, 0.6 now\)"),
            stage(
                tmp_path / "settings.json",
                settings,
                results=["rows.json"],
                defaults={"new": 0.5, "seed": 7, "sides": ("left",)},
                ranks=False,
            ) as begun,
        ):
            assert not begun.todo


def test_one_launch_works_at_a_time_and_after_a_kill_the_same_command_continues(tmp_path):
    first = begin(tmp_path, 1, "hold")
    assert first.stdout.readline() == "todo 0\n"
    with pytest.raises(UserError, match="another launch is running here"):
        work(tmp_path)
    first.kill()
    first.communicate()
    with pytest.raises(UserError, match="seed: 1 then, 2 now"):
        work(tmp_path, seed=2)
    assert work(tmp_path)


def test_settings_without_results_do_not_count_and_results_need_settings(tmp_path):
    write_json(tmp_path / "settings.json", {"settings": {"seed": 1}, "finished": False})
    assert work(tmp_path, seed=2)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(UserError, match=r"settings\.json: missing.*delete in .*: part-1 rows\.json"):
        work(tmp_path)


def test_an_error_leaves_the_work_unfinished_and_frees_the_lock(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), stage(tmp_path / "s.json", {}, results=["x"]) as begun:
            assert begun.todo
            (tmp_path / "x").touch()
            raise ZeroDivisionError
    assert read_json(tmp_path / "s.json")["finished"] is False


def test_a_note_is_in_the_record_at_once_and_the_next_start_of_the_same_work_finds_it(tmp_path):
    for starts in (["first"], ["first", "second"]):
        with pytest.raises(ZeroDivisionError), stage(tmp_path / "s.json", {}, results=["y", "x"]) as begun:
            (tmp_path / "x").touch()
            begun.note(starts=[*begun.notes.get("starts", []), starts[-1]])
            record = read_json(tmp_path / "s.json")
            assert record["starts"] == starts and record["finished"] is False
            raise ZeroDivisionError
    (tmp_path / "x").unlink()  # nothing is left of these starts
    with stage(tmp_path / "s.json", {}, results=["y", "x"]) as begun:
        assert begun.notes == {}


@pytest.mark.parametrize("error", [OSError(errno.ENOTSUP, "no"), OSError(errno.EROFS, "no"), NotImplementedError()])
def test_where_there_are_no_locks_a_warning_says_so(tmp_path, monkeypatch, caplog, error):
    monkeypatch.setattr(FileLock, "acquire", lambda self: (_ for _ in ()).throw(error))
    assert work(tmp_path) and "run only one launch here" in caplog.text


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (PermissionError(errno.EACCES, "denied"), UserError, r"\.settings\.lock: denied"),
        (OSError(errno.EIO, "broken"), OSError, "broken"),
    ],
)
def test_a_lock_that_cannot_be_taken_is_an_error(tmp_path, monkeypatch, error, kind, message):
    monkeypatch.setattr(FileLock, "acquire", lambda self: (_ for _ in ()).throw(error))
    with pytest.raises(kind, match=message):
        work(tmp_path)
    assert not list(tmp_path.iterdir())


def test_files_and_models_are_compared_by_content(tmp_path):
    def todo(path) -> bool:
        settings = {"sides": ("left", "right"), "words": files_setting(path)}
        with stage(tmp_path / "s.json", settings, results=["x"]) as begun:
            (tmp_path / "x").touch()
            return begun.todo

    (tmp_path / "a").write_text("words")
    shutil.copy(tmp_path / "a", tmp_path / "b")
    assert todo(tmp_path / "a") and not todo(tmp_path / "b")
    (tmp_path / "b").write_text("other words")
    with pytest.raises(UserError, match=r"words: .*/a'.* then, .*/b'.* now"):
        todo(tmp_path / "b")


def test_rank_0_decides_for_all_ranks(tmp_path):
    for state in ("todo", "done"):
        printed = run_ranks([__file__, tmp_path])
        assert sorted(re.findall(f"{state} ([01])", printed)) == ["0", "1"]
    run_ranks([__file__, tmp_path, 2], status=2)


def test_ranks_with_other_settings_are_refused_on_all_ranks_and_nothing_is_written(tmp_path):
    printed = run_ranks([__file__, tmp_path, 1, "other"], status=2)
    assert printed.count("(seed: 1 on rank 0, 2 on rank 1); ") == 2
    assert not list(tmp_path.iterdir())


def test_a_program_that_needs_no_ranks_asks_for_none(tmp_path):
    assert "todo 0" in finish(begin(tmp_path, 1, "alone", **PLATFORM))


if __name__ == "__main__":
    run_program(lambda: work(*sys.argv[1:]))
