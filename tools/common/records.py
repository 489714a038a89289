"""Stages: work that is done once, with a record beside its results, by one launch at a time."""

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
from tools.common.ranks import barrier, gather, on_rank_0, rank

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EROFS, errno.ENOLCK)  # errors of file systems without locks
OF_STAGE = ("settings", "finished", "made_by")  # a record's own fields; all others are notes
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "vllm")
logger = logging.getLogger(__name__)


def files_setting(*paths: StrPath) -> dict[str, str]:
    """Files as a setting of a stage: their paths, and the SHA-256 by which they are compared.

    UserError for a pipe, such as <(zcat FILE), which can be read only once.
    """
    digest = hashlib.sha256()
    for path in paths:
        if Path(path).is_fifo():
            raise UserError(f"{path}: a pipe, not a file; write its content to a file")
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return {"path": " ".join(map(str, paths)), "sha256": digest.hexdigest()}


def rows_record(path: StrPath) -> Path:
    """The record beside a file of rows: for rows.json, rows.json_rewards_settings.json.

    The name includes the ending, because rows.json and rows.jsonl may be made with different settings.
    """
    file = Path(path)
    return file.with_name(f"{file.name}_rewards_settings.json")


def rows_setting(*names: StrPath) -> dict:
    """Files of rows and hub data sets as a setting of a stage, compared by content or by commit."""
    on_hub = [name for name in names if not Path(name).exists()]
    if not on_hub:
        return files_setting(*names)
    commits = {str(name): data_folder(str(name)).name for name in on_hub}
    parts = [commits.get(str(name)) or files_setting(name)["sha256"] for name in names]
    return {"path": " ".join(map(str, names)), "sha256": " ".join(parts), "commits": commits}


@dataclass
class Stage:
    """What `stage` yields: whether there is work to do, and notes that are stored in the record.

    A restart of unfinished work gets the notes back.
    """

    todo: bool
    notes: dict
    record: Path
    settings: dict
    writes: bool  # one process of a launch writes the record

    def note(self, **notes) -> None:
        """Add notes and write the record at once, so that they survive a kill."""
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

    The record, a JSON file beside the results, holds settings, versions, notes, and `finished` once the block has
    ended without an error on all ranks. `results` are file patterns in its folder, the first of which must exist when
    the work is finished. A setting missing in the record counts as its value in `defaults`, so that a new flag does
    not invalidate finished work. All ranks enter together; `ranks=False` is for single-process programs. UserError,
    with nothing written, if there are results made with other settings, the ranks' settings differ, or another launch
    is running.
    """
    record = Path(record)
    compared = json.loads(json.dumps(settings))  # tuples are lists in a file
    missing = json.loads(json.dumps(defaults, default=str))
    # No soft lock, because a killed launch would leave its file behind; without locks `_begin` just warns.
    lock = FileLock(record.with_name(f".{record.stem}.lock"), timeout=0, fallback_to_soft=False)
    begin = functools.partial(_begin, record, compared, missing, results, lock)
    try:
        if ranks:
            check_ranks(compared)
        todo, notes = on_rank_0(begin) if ranks else begin()
        work = Stage(todo, notes, record, compared, writes=rank() == 0 or not ranks)
        yield work
        if ranks:
            barrier()  # all ranks have finished their part
        if work.todo:
            work.write(finished=True)
    finally:
        lock.release()


def check_ranks(settings: Mapping) -> None:
    """UserError on all ranks if the settings of one differ from rank 0's.

    Models of the hub are compared by commit, because the caches of two machines may have more or fewer of its files.
    """
    first, *others = gather(settings)
    for number, other in enumerate(others, start=1):
        labels = ("on rank 0", f"on rank {number}")
        if phrases := "; ".join(differences(first, other, labels=labels, by=("commit", "sha256"))):
            raise UserError(f"the processes have different settings ({phrases}); start all with the same command")


def rows_stage(output: StrPath, settings: Mapping, defaults: Mapping) -> AbstractContextManager[Stage]:
    """The `stage` of a program that writes a file of rows. UserError for an unknown file ending."""
    check_record_file(output)
    return stage(
        rows_record(output), settings, results=[glob.escape(Path(output).name)], defaults=defaults, ranks=False
    )


def _begin(record: Path, settings: dict, defaults: dict, results: Sequence[str], lock: FileLock) -> tuple[bool, dict]:
    """Take the lock and compare the settings. Returns whether there is work to do, and earlier notes."""
    record.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:  # also an OSError, so it must come first
        raise UserError(f"{record.parent}: another launch is running here; wait for it or stop it") from None
    except PermissionError as error:
        remedy = "another user's launch made it; delete it if no launch is running here"
        raise UserError(f"{lock.lock_file}: {error.strerror}; {remedy}") from None
    except (NotImplementedError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in NO_LOCKS:
            raise
        logger.warning("%s: this file system has no locks (%s); run only one launch here", record.parent, error)
    existing = sorted({path.name for pattern in results for path in record.parent.glob(pattern)})
    remedy = f"write elsewhere, or delete in {record.parent}: {' '.join(existing[:8])}"
    if existing and not record.is_file():
        raise UserError(f"{record}: missing, so the settings of the results are unknown; {remedy}")
    stored = read_json(record) if existing else {"settings": settings}
    if different := differences(stored["settings"], settings, defaults):
        raise UserError(f"{record}: made with other settings ({'; '.join(different)}); {remedy} {record.name}")
    notes = {name: note for name, note in stored.items() if name not in OF_STAGE}
    if stored.get("finished") and any(record.parent.glob(results[0])):
        logger.info("%s: already finished", record)
        return False, notes
    write_json(record, {"settings": settings, "finished": False, "made_by": made_by()} | notes)
    return True, notes


def differences(
    old: Mapping,
    new: Mapping,
    defaults: Mapping = {},
    *,
    labels: tuple[str, str] = ("then", "now"),
    by: Sequence[str] = ("sha256",),
) -> list[str]:
    """A phrase for each setting that differs, with a label for each value.

    A missing setting counts as its value in `defaults`, or else as None. Files and models are compared by the first of
    their fields named in `by`.
    """
    phrases = []
    for name in {**old, **new}:
        values = old.get(name, defaults.get(name)), new.get(name, defaults.get(name))
        one, other = (_content(value, by) for value in values)
        if one != other:
            labelled = (f"{value} {label}" for value, label in zip(values, labels, strict=True))
            phrases.append(f"{name}: {', '.join(labelled)}")
    return phrases


def _content(setting, by: Sequence[str]):
    """What a setting is compared by."""
    if not isinstance(setting, dict):
        return setting
    return next((setting[field] for field in by if field in setting), setting)


@functools.cache
def made_by() -> dict[str, str]:
    """Versions of relevant packages, and this project's commit, with "+" if files were changed."""
    versions = {}
    for package in RECORDED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=40"]
    with suppress(OSError, subprocess.CalledProcessError):  # no git, or not a clone
        versions["spag"] = subprocess.check_output(git, stderr=subprocess.DEVNULL, text=True).strip()
    return versions
