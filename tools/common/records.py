"""Finished work: a record beside the results, and one launch at a time."""

import errno
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from tools.common.errors import UserError
from tools.common.files import ROOT, StrPath, check_record_file, data_folder, read_json, write_json
from tools.common.ranks import barrier, on_rank_0, rank

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EROFS, errno.ENOLCK)  # errors of file systems that know no locks
OF_STAGE = ("settings", "finished", "made_by")  # fields of a record; all others are notes
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "vllm")
logger = logging.getLogger(__name__)


def files_setting(*paths: StrPath) -> dict[str, str]:
    """Files as a setting of a stage: their paths, and the SHA-256 by which they are compared.

    UserError for a pipe, such as <(zcat FILE): it can be read only once.
    """
    digest = hashlib.sha256()
    for path in paths:
        if Path(path).is_fifo():
            raise UserError(f"{path}: a pipe, not a regular file; write its content to a file")
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return {"path": " ".join(map(str, paths)), "sha256": digest.hexdigest()}


def rows_record(path: StrPath) -> Path:
    """The record beside a file of rows: for rows.json, rows.json_rewards_settings.json.

    Named after the whole name: rows.json and rows.jsonl of one folder may be made with different settings.
    """
    file = Path(path)
    return file.with_name(f"{file.name}_rewards_settings.json")


def rows_setting(*names: StrPath) -> dict:
    """Files of rows, and data sets of the hub, as a setting of a stage: compared by content, or by commit."""
    on_hub = [name for name in names if not Path(name).exists()]
    if not on_hub:
        return files_setting(*names)
    commits = {str(name): data_folder(str(name)).name for name in on_hub}
    parts = [commits.get(str(name)) or files_setting(name)["sha256"] for name in names]
    return {"path": " ".join(map(str, names)), "sha256": " ".join(parts), "commits": commits}


@dataclass
class Stage:
    """What `stage` yields: whether there is work to do, and notes that stand in the record beside the settings.

    The notes of an unfinished record are there at the next start of the same work.
    """

    todo: bool
    notes: dict
    record: Path
    settings: dict
    writes: bool  # one process of a launch writes the record

    def note(self, **notes) -> None:
        """Add notes, and write them into the record at once: they are there after a kill too."""
        self.notes |= notes
        self.write(finished=False)

    def write(self, *, finished: bool) -> None:
        if self.writes:
            fields = {"settings": self.settings, "finished": finished, "made_by": made_by()}
            write_json(self.record, fields | self.notes)


@contextmanager
def stage(
    record: StrPath, settings: Mapping, *, results: Sequence[str], defaults: Mapping = {}, ranks: bool = True
) -> Iterator[Stage]:
    """Do a piece of work once: `with stage(record, settings, results=...) as work: if work.todo: ...`.

    The record, a JSON file beside the results, holds the settings, versions, notes, and `finished` once the block has
    ended on all ranks without an error. `results` are patterns of files in its folder; the first is there when the
    work is finished. A setting that a record lacks counts as its value in `defaults`, so that a new flag of a program
    makes no finished work that of other settings. All ranks of a launch enter together; `ranks=False` is for programs
    that run as one process. UserError, with nothing written, if there are results of other settings, or if another
    launch is at work.
    """
    record = Path(record)
    compared = json.loads(json.dumps(settings))  # tuples are lists in a file
    missing = json.loads(json.dumps(defaults, default=str))
    # A soft lock is a file that a killed launch would leave behind; without locks `_begin` warns and goes on.
    lock = FileLock(record.with_name(f".{record.stem}.lock"), timeout=0, fallback_to_soft=False)
    begin = functools.partial(_begin, record, compared, missing, results, lock)
    try:
        todo, notes = on_rank_0(begin) if ranks else begin()
        work = Stage(todo, notes, record, compared, writes=rank() == 0 or not ranks)
        yield work
        if ranks:
            barrier()  # all ranks have ended their part
        if work.todo:
            work.write(finished=True)
    finally:
        lock.release()


def rows_stage(output: StrPath, settings: Mapping, defaults: Mapping) -> AbstractContextManager[Stage]:
    """The `stage` of a program that writes a file of rows. UserError for a name with an unknown ending."""
    check_record_file(output)
    return stage(
        rows_record(output), settings, results=[glob.escape(Path(output).name)], defaults=defaults, ranks=False
    )


def _begin(record: Path, settings: dict, defaults: dict, results: Sequence[str], lock: FileLock) -> tuple[bool, dict]:
    """Take the lock and compare the settings. Returns whether there is work to do, and the notes so far."""
    record.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:  # an OSError too, so it comes first
        raise UserError(f"{record.parent}: another launch is at work here; end that one first") from None
    except PermissionError as error:
        remedy = "another user's launch made it; delete it if nobody is at work here"
        raise UserError(f"{lock.lock_file}: {error.strerror}; {remedy}") from None
    except (NotImplementedError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in NO_LOCKS:
            raise
        logger.warning("%s: no file locks here (%s); run one launch at a time", record.parent, error)
    existing = sorted({path.name for pattern in results for path in record.parent.glob(pattern)})
    remedy = f"write elsewhere, or delete in {record.parent}: {' '.join(existing[:8])}"
    if existing and not record.is_file():
        raise UserError(f"{record}: missing, so nobody can say how the results were made; {remedy}")
    stored = read_json(record) if existing else {"settings": settings}
    if different := differences(stored["settings"], settings, defaults):
        raise UserError(f"{record}: made with other settings ({'; '.join(different)}); {remedy} {record.name}")
    notes = {name: note for name, note in stored.items() if name not in OF_STAGE}
    if stored.get("finished") and any(record.parent.glob(results[0])):
        logger.info("%s: all is there", record)
        return False, notes
    write_json(record, {"settings": settings, "finished": False, "made_by": made_by()} | notes)
    return True, notes


def differences(old: Mapping, new: Mapping, defaults: Mapping = {}) -> list[str]:
    """A phrase for each setting that differs. Files and models differ if their sha256 does.

    A setting that one of them does not have counts as its default, and as None where `defaults` has none.
    """
    phrases = []
    for name in {**old, **new}:
        then = old.get(name, defaults.get(name))
        now = new.get(name, defaults.get(name))
        if _content(then) != _content(now):
            phrases.append(f"{name}: {then} then, {now} now")
    return phrases


def _content(setting):
    return setting.get("sha256", setting) if isinstance(setting, dict) else setting


@functools.cache
def made_by() -> dict[str, str]:
    """Versions of the packages that compute, and this project's commit, with "+" if files were changed."""
    versions = {}
    for package in RECORDED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=40"]
    with suppress(OSError, subprocess.CalledProcessError):  # no git, or not a clone
        versions["spag"] = subprocess.check_output(git, stderr=subprocess.DEVNULL, text=True).strip()
    return versions
