"""What all programs share: reading and writing files, settings and locks of runs, ranks, errors. Torch-free."""

import argparse
import ctypes
import difflib
import fcntl
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import IO, NoReturn, TypeVar

NAMED = 8  # how many files an error message names
CHUNK = 1 << 20  # bytes or characters read at a time
# Error messages of safetensors, torch and numpy when the disk is full. Arrow and Python raise an OSError with errno.
ON_FULL_DISK = re.compile(
    r"No space left|os error 28|PytorchStreamWriter|file write failed|\d requested and \d+ written"
)
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # option of prctl, Linux: the signal that a process gets when its parent dies
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py", "README.md")
MOST_ON_CPU = 0.4e9  # bytes of weights; a larger model trains on a CPU only on request
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # a model's fingerprint reads so many samples, each so long, of a file
# Characters that a word must not have: control characters, Unicode's line ends, and surrogates. `open_text` turns
# bytes that are not UTF-8 into surrogates.
UNREADABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
FULL_DISK = (ENOSPC, EDQUOT, EFBIG)  # no space, quota exceeded, file larger than allowed
logger = logging.getLogger(__name__)
START_TIMEOUT = timedelta(minutes=10)  # for all ranks of a launch to start
MEETING_TIMEOUT = timedelta(hours=1)  # for all ranks to come to a meeting; another machine may be downloading a model
LOCKED = "{}: another process is writing to this run; end that one first"
LEFTOVER_SECONDS = 3600  # a temporary file that is older belongs to a killed process
LOCK_RETRY = 0.5  # seconds until the second try for a lock; `is_locked` in another process may hold it for a moment
RANK_0_FIRST = 3  # seconds that the other ranks wait before they report an error
ROOT = Path(__file__).resolve().parent
FIRST_PARENT = os.getppid()  # the parent process when the program began, which imports this module first
OWN_MODULES = ("arguments", "dataloaders", "tools", "train", "trainers", "utils")
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
T = TypeVar("T")


class UserError(ValueError):
    """An error that the user can mend. The message says where it is, what is wrong, and what to do.

    `run_program` prints it as one line and exits with status 2. All other errors keep their traceback.
    """


class BadRecordError(UserError):
    """An unreadable or invalid record of a file; the message starts with the file and the line."""


# Reading.


def open_text(path: str | os.PathLike, *, errors: str = "strict"):
    """Open a UTF-8 file for reading; a byte order mark is skipped. Raises FileNotFoundError that names the path."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}")
    return open(path, encoding="utf-8-sig", errors=errors)


def read_json(path: str | os.PathLike):
    """Return the content of a JSON file. Raises FileNotFoundError, or UserError if the file is not JSON."""
    try:
        with open_text(path) as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None


def iter_records(path: str | os.PathLike) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", object) for every object of a JSON list or JSONL file.

    A file that begins with "[" is a JSON list; any other file is JSONL. Memory is constant for JSONL, and for lists
    with one object per line, which `write_records` writes. Any other list is loaded whole. Of a file that is cut off,
    the objects on its complete lines are yielded before the error.

    Raises FileNotFoundError; UserError for an empty file; BadRecordError for text that is not JSON or not UTF-8, and
    for a record that is not an object.
    """
    with open_text(path, errors="surrogateescape") as file:
        first = file.read(CHUNK).lstrip()[:1]
        if not first:
            raise UserError(f"{path}: the file is empty; expected a JSON list or one JSON object per line")
        file.seek(0)
        if first == "[":
            yield from _iter_list(path, file)
            return
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def read_json_or_jsonl(path: str | os.PathLike) -> list[dict]:
    """Return every object of a JSON list or JSONL file; errors as in `iter_records`."""
    return [record for _, record in iter_records(path)]


def _iter_list(path, file: IO) -> Iterator[tuple[str, dict]]:
    """Read a list line by line. At the first line that does not hold one object, load the file whole instead."""
    yielded, comma = 0, True  # comma: whether the line before ended with one, so that another object may follow
    for number, line in enumerate(file, start=1):
        text, where = line.strip(), f"{path}:{number}"
        if number == 1 and text == "[":
            continue
        if text == "]" and (not comma or not yielded):
            if not file.read().strip():
                return
            break
        if number == 1 or not comma or not text.startswith("{"):
            break
        try:
            record = _parse(text.removesuffix(","), where)
        except BadRecordError:
            break
        yield where, record
        yielded, comma = yielded + 1, text.endswith(",")
    file.seek(0)
    for number, value in enumerate(_parse(file.read(), str(path), kind=list)[yielded:], start=yielded + 1):
        where = f"{path}: record {number}"
        yield where, _as_object(value, where)


def _parse(text: str, where: str, kind: type = dict):
    """Parse a JSON object, or with `kind=list` a whole file that holds a list. Raises BadRecordError."""
    try:
        text.encode()
        value = json.loads(text)
    except UnicodeEncodeError as error:  # open_text reads bytes that are not UTF-8 as surrogates
        raise BadRecordError(f"{_line(where, text, error.start, kind)}: not UTF-8") from None
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.colno}"
        raise BadRecordError(
            f"{_line(where, text, error.pos, kind)}: not JSON, or the file was cut off here ({why})"
        ) from None
    except (ValueError, RecursionError) as error:  # a number or brackets without end
        raise BadRecordError(f"{where}: JSON that Python cannot read ({error})") from None
    return value if kind is list else _as_object(value, where)


def _line(where: str, text: str, position: int, kind: type) -> str:
    return where if kind is dict else f"{where}:{text.count(chr(10), 0, position) + 1}"


def _as_object(value, where: str) -> dict:
    if not isinstance(value, dict):
        raise BadRecordError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_words(path: str | os.PathLike, check: Callable[[str], None] = lambda word: None) -> list[str]:
    """Return the words of a file with one word per line. Blank lines are skipped; repeated words are kept.

    Raises FileNotFoundError, and UserError if the file has no words. UserError also names the line of a word that is
    not UTF-8, holds a control character, or makes `check` raise ValueError.
    """
    words = []
    with open_text(path, errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            word = line.strip()
            try:
                if bad := UNREADABLE.search(word):
                    raise ValueError(f"{bad[0]!r} in a word; expected one word a line, as UTF-8")
                if word:
                    check(word)
                    words.append(word)
            except ValueError as error:
                raise UserError(f"{path}:{number}: {error}") from None
    if not words:
        raise UserError(f"{path}: no words; expected one a line")
    return words


# Writing.


def refuse_odd_file(path: Path) -> None:
    """Raise UserError for a link, a folder or a device in the place of an output."""
    if path.is_symlink() or path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file; an output replaces a file or makes a new one")


def refuse_overwriting(inputs: Iterable[str | os.PathLike], outputs: Iterable[str | os.PathLike]) -> None:
    """Raise FileNotFoundError for a missing input, UserError for an output that is also an input or another output."""
    taken = set()
    for path in inputs:
        open_text(path).close()
        taken.add(Path(path).resolve())
    for path in outputs:
        if Path(path).resolve() in taken:
            raise UserError(f"{path}: would be written over another file of this run; choose another name")
        taken.add(Path(path).resolve())


@contextmanager
def replacing(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a file for writing so that readers see the old file or the whole new one, never a part of it.

    The block writes to a temporary file in the same folder, which replaces the old file at the end. If the process is
    killed, the temporary file stays; a later write deletes it when it is an hour old. Raises UserError if the path is
    not a regular file, such as a link or a device.
    """
    path = Path(path)
    refuse_odd_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):  # another process may have deleted it, or it is another user's
            if time.time() - left.lstat().st_mtime > LEFTOVER_SECONDS:
                left.unlink()
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with (
            naming_full_disk(path),
            open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as file,
        ):
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming_full_disk(path: str | os.PathLike) -> Iterator[None]:
    """If the disk is full, raise an OSError that names the path, whatever error the writing library raised."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number not in FULL_DISK:
            if not ON_FULL_DISK.search(str(error)):
                raise
            number = ENOSPC
        raise OSError(number, os.strerror(number), str(getattr(error, "filename", None) or path)) from error


def write_json(path: str | os.PathLike, value) -> None:
    """Write `value` as indented JSON, by `replacing`."""
    with replacing(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


@contextmanager
def writing_records(path: str | os.PathLike) -> Iterator[Callable[[Mapping], object]]:
    """Write records by `replacing`, with the function that is yielded, one per line.

    The file is JSONL if the path ends in .jsonl, else one JSON list.
    """
    jsonl = str(path).endswith(".jsonl")
    before = itertools.repeat("") if jsonl else itertools.chain(["[\n"], itertools.repeat(",\n"))
    after = "\n" if jsonl else ""
    with replacing(path) as file:
        yield lambda record: file.write(next(before) + to_json(record) + after)
        if not jsonl:
            file.write("\n]\n" if file.tell() else "[]\n")


def write_records(path: str | os.PathLike, records: Iterable[Mapping]) -> None:
    """Write all records as `writing_records` does."""
    with writing_records(path) as write:
        for record in records:
            write(record)


to_json = json.JSONEncoder(ensure_ascii=False).encode  # on one line, with non-ASCII letters as they are


# Data.


def alpaca_to_row(example: dict) -> dict:
    """Turn a raw Alpaca record (`instruction`, optional `input`, `output`) into `prompt`, `target` and `type`.

    The layout of instructions is defined only here. Raises UserError if a text is missing.
    """
    for key in ("instruction", "output"):
        if not isinstance(example.get(key), str):
            raise UserError(f"'{key}' is missing; Alpaca records have 'instruction', 'output' and perhaps 'input'")
    if not isinstance(example.get("input") or "", str):
        raise UserError(f"'input' must be a text, got {example['input']!r}")
    prompt = f"### Instruction: {example['instruction']}"
    if example.get("input"):
        prompt += f"\n\n### Input: {example['input']}"
    return {"prompt": prompt + "\n\n### Response: ", "target": example["output"], "type": "sft"}


def row_texts(record: dict, from_alpaca: Callable[[dict], dict] = alpaca_to_row) -> tuple[str, str, dict]:
    """Return a record's query, its target, and the record itself.

    The texts are `query` and `target`, else `prompt` and `answer`. A raw Alpaca record is converted first. Raises
    UserError for a text that is missing or cannot be encoded as UTF-8.
    """
    if not ({"query", "prompt", "target", "answer"} & record.keys()) and "instruction" in record:
        record = record | from_alpaca(record)
    texts = []
    for name, other in (("query", "prompt"), ("target", "answer")):
        key = name if name in record else other
        if key not in record:
            raise UserError(
                f"'{name}' is missing; every row needs 'query' and 'target' (or 'prompt' and 'answer', or Alpaca's "
                "'instruction' and 'output')"
            )
        if not isinstance(record[key], str):
            raise UserError(f"'{key}' must be a text, got {record[key]!r}")
        try:
            record[key].encode()
        except UnicodeEncodeError as error:
            raise UserError(f"'{key}' is not Unicode text ({error.reason})") from None
        texts.append(record[key])
    return texts[0], texts[1], record


def file_digest(paths: Iterable[str | os.PathLike]) -> str:
    """SHA-256 over the SHA-256 of each file, in the order given."""
    digests = hashlib.sha256()
    for path in paths:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        digests.update(digest.digest())
    return digests.hexdigest()


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return a model's folder: `name` itself if it is a folder, else a local copy of the hub's model of this name.

    `revision` is a commit, branch or tag on the hub; `name` may also be NAME@REVISION.
    Raises UserError if there is no such model, for a revision of a folder, or if the folder has no config.json.
    """
    repository, revision_in_name = split_revision(name)
    revision = revision or revision_in_name
    if os.path.isdir(repository):
        if revision:
            raise UserError(f"{repository} is a folder, which has no revision {revision}; only models on the hub have")
        folder = Path(repository)
    else:
        folder = _from_hub(repository, revision)
    if not (folder / "config.json").is_file():
        merged = f"; use {folder / 'merged'}" if (folder / "merged").is_dir() else ""
        raise UserError(f"{folder}: no config.json; this is not a model folder{merged}")
    return folder


def split_revision(name: str) -> tuple[str, str | None]:
    """Split NAME@REVISION of a model on the hub. The name of a folder stays whole."""
    repository, _, revision = (name, "", "") if os.path.isdir(name) else name.partition("@")
    return repository, revision or None


@functools.cache
def _from_hub(name: str, revision: str | None = None, files: tuple[str, ...] = MODEL_FILES) -> Path:
    """Download a model. The answer is kept, since the model on the hub may change while this process runs."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        kind = type(error).__name__
        why = {
            "GatedRepoError": "the hub asks you to accept the model's licence on its page; then: hf auth login",
            "LocalEntryNotFoundError": "the hub cannot be reached, and the model is not in its cache",
            "RevisionNotFoundError": f"the hub's model has no revision {revision}",
        }.get(kind, f"no such model on the hub ({kind})")
        raise UserError(f"{name}: no such folder, and {why}") from None


def hub_commit(folder: Path) -> str | None:
    """The commit of a model's local copy that `model_folder` returned; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def refuse_large_model(name: str, request: str) -> None:
    """Raise UserError if a model, for which PyTorch found no GPU, is too large for a CPU. `request` asks for a CPU."""
    size = sum(path.stat().st_size for path in model_folder(name).glob("model*.safetensors"))
    if size > MOST_ON_CPU:
        raise UserError(
            f"{name} has {size / 1e9:.1f} GB of weights, and PyTorch finds no GPU: use a machine with a GPU and a "
            f"PyTorch built for it, or say {request}"
        )


def model_fingerprint(folder: Path) -> str:
    """SHA-256 over configuration, tokenizer, code, and samples of the *.safetensors; other weights are not read."""
    digest = hashlib.sha256()
    small = ("config.json", "generation_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
    small += ("chat_template.jinja",)
    for path in sorted([*(folder / file for file in (*small, *TOKENIZER_FILES)), *folder.glob("*.py")]):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_fingerprint(name: str | os.PathLike) -> str:
    """SHA-256 over the tokenizer's files in a model's folder, or in the hub's model of this name."""
    repository, revision = split_revision(str(name))
    folder = Path(name) if os.path.isdir(name) else _from_hub(repository, revision, TOKENIZER_FILES)
    return file_digest(folder / file for file in TOKENIZER_FILES if (folder / file).is_file())


def model_setting(name: str, revision: str | None = None) -> dict[str, str]:
    """Return a model in the form in which `stage` compares it, by its sha256; from the hub with its commit."""
    folder = model_folder(name, revision)
    commit = hub_commit(folder)
    return {"path": name, "sha256": model_fingerprint(folder)} | ({"commit": commit} if commit else {})


# Finished work.

RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "deepspeed", "peft", "vllm", "numpy")


@dataclass
class Todo:
    """What `stage` yields: true if there is work to do. `notes` stand in the record beside the settings."""

    needed: bool
    notes: dict

    def __bool__(self) -> bool:
        return self.needed


@contextmanager
def stage(
    record: str | os.PathLike, settings: Mapping, *, results: Sequence[str], may_change: Collection[str] = ()
) -> Iterator[Todo]:
    """Do a piece of work once: `with stage(record, settings, results=...) as todo: if todo: ...`.

    `record` is a JSON file beside the results. It holds `settings`, a flat dictionary of everything that changes the
    results, the versions that made them, and whether they are finished, which is noted when the block has ended
    without an error. `results` are names or patterns of the files of this work in the record's folder; while one that
    is a name is missing, the work is not finished. In `settings` a file or a model is {"path", "sha256"}, and only the
    sha256 is compared. `may_change` names settings in which a later start may differ. Then the record gets the new
    values, and the work counts as unfinished until it has ended again.

    All ranks of a launch enter the block together; rank 0 decides for them, holds the lock and writes the record.
    Raises UserError, with nothing written, if another launch is at work, if results were made with other settings, or
    if nothing says how they were made. Settings without any result do not count.
    """
    record = Path(record)
    lock_path = record.with_name(f".{record.stem}.lock")
    settings = json.loads(json.dumps(settings))  # tuples are lists in a file

    def begin() -> dict:
        stored = stored_record(record, settings, results, may_change)
        if not stored["finished"]:
            lock(lock_path)
            stored = stored_record(record, settings, results, may_change)  # another may have ended since
        if stored["finished"]:
            logger.info("%s: all is there", record)
            return stored
        stored = {"settings": settings, "finished": False, "made_by": made_by()}
        write_json(record, stored)
        return stored

    stored = from_rank_0(begin)
    if different := differences(stored["settings"], settings):
        raise UserError(f"rank {rank()} was started with other settings than rank 0 ({'; '.join(different)})")
    todo = Todo(not stored["finished"], {key: stored[key] for key in stored if key not in ("settings", "finished")})
    try:
        yield todo
        if todo and rank() == 0:
            write_json(record, {"settings": settings, "finished": True, **todo.notes})
    finally:
        unlock(lock_path)


def stored_record(record: Path, settings: Mapping, results: Sequence[str], may_change: Collection[str] = ()) -> dict:
    """The record of results that exist, else {"finished": False}, as `stage` finds it.

    Raises UserError if they are those of other work.
    """
    found = [sorted(str(path.relative_to(record.parent)) for path in record.parent.glob(each)) for each in results]
    whole = all(files for files, pattern in zip(found, results, strict=True) if "*" not in pattern)
    names = list(dict.fromkeys(itertools.chain(*found)))
    if not names:
        return {"finished": False}
    remedy = f"write elsewhere, or delete in {record.parent}: {', '.join([*names[:NAMED], record.name])}"
    try:
        stored = read_json(record)
        different = differences(stored["settings"], settings)
        refused = differences(stored["settings"], settings, but=may_change)
    except (OSError, UserError, KeyError, TypeError, AttributeError):
        raise UserError(f"{record}: this file does not say how {names[0]} was made; {remedy}") from None
    if refused:
        raise UserError(f"{record}: made with other settings ({'; '.join(refused)}); {remedy}")
    return stored | {"finished": bool(stored.get("finished") and whole and not different)}


@functools.cache
def made_by() -> dict[str, str]:
    """Versions of the packages that compute, the CPU, and this project's commit, with "+" if files were changed."""
    found = {"cpu": cpu()}
    for package in RECORDED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=40"]
    with suppress(OSError, subprocess.CalledProcessError):  # no git, or not a clone
        found["spag"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return found


def cpu() -> str:
    """The name of this machine's processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def differences(then: Mapping, now: Mapping, but: Collection[str] = ()) -> list[str]:
    """Return a phrase for each setting that differs, but for those named in `but`."""
    now = json.loads(json.dumps(now))  # tuples are lists in a file
    return [
        f"{key}: {_show(then.get(key))} then, {_show(now.get(key))} now"
        for key in {**then, **now}
        if key not in but and _content(then.get(key)) != _content(now.get(key))
    ]


def files_setting(*paths: str | os.PathLike) -> dict[str, str]:
    """Return files in the form in which `stage` compares them."""
    return {"path": " ".join(map(str, paths)), "sha256": file_digest(paths)}


def _content(setting):
    return setting.get("sha256", setting) if isinstance(setting, dict) else setting


def _show(setting) -> str:
    if isinstance(setting, dict) and "sha256" in setting:
        options = f" {setting['options']}" if setting.get("options") else ""
        return f"{setting.get('path')}{options} (sha256 {str(setting['sha256'])[:8]})"
    return str(setting)


# The locks that this process holds, with their file descriptors. A POSIX lock ends with its process, and children do
# not inherit it. It also ends when the process closes any other descriptor of the lock file, so only `lock` and
# `is_locked` may open that file. Lock files are never deleted: otherwise one process could lock a deleted file while
# another process locks a new file of the same name.
_locks: dict[Path, int] = {}
os.register_at_fork(after_in_child=_locks.clear)


def lock(path: str | os.PathLike) -> None:
    """Take this lock for this process. Raises UserError if another process holds it."""
    path = Path(path).absolute()
    if path in _locks:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    taken = _try_lock(descriptor, fcntl.LOCK_EX, path)
    if not taken:
        time.sleep(LOCK_RETRY)
        taken = _try_lock(descriptor, fcntl.LOCK_EX, path)
    if not taken:
        os.close(descriptor)
        raise UserError(LOCKED.format(path.parent))
    _locks[path] = descriptor


def unlock(path: str | os.PathLike) -> None:
    """Release a lock, if this process holds it."""
    if (descriptor := _locks.pop(Path(path).absolute(), None)) is not None:
        os.close(descriptor)


def is_locked(path: str | os.PathLike) -> bool:
    """Return whether another process holds this lock; False on a file system without locks."""
    path = Path(path).absolute()
    if path in _locks:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH, path)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int, path: Path) -> bool:
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    except OSError as error:
        _warn_without_locks(path.parent, str(error))
    return True


@functools.cache
def _warn_without_locks(folder: Path, error: str) -> None:
    logger.warning("%s: no locks on this file system (%s); run one launch at a time", folder, error)


# The ranks of a launch.


_meetings = itertools.count()


def from_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its value on all ranks, passed as JSON. All ranks of the launch must call this.

    If `make` raises UserError or OSError, all ranks raise UserError. Rank 0 returns when all ranks have the answer, so
    whatever they did before the call is done. A process without MASTER_ADDR was not started by a launcher, so it calls
    `make` itself.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return make()
    store, key = launch_store(), f"spag/{next(_meetings)}"
    answer: dict
    if rank() == 0:
        try:
            answer = {"value": make()}
        except (UserError, OSError) as error:
            answer = {"error": str(error)}
        store.set(key, json.dumps(answer))
    while not store.check([key]):  # no time limit: rank 0 may be downloading a model
        time.sleep(0.1)
    answer = json.loads(store.get(key))
    store.set(f"{key}/{rank()}", "")
    if rank() == 0:  # (without torchrun rank 0 also serves the store, which would end with it)
        store.wait([f"{key}/{other}" for other in range(world_size())], MEETING_TIMEOUT)
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


@functools.cache
def launch_store():
    """Return the key-value store that all ranks of a launch share. Torch's process group uses the same server."""
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=START_TIMEOUT))
    return store


# Programs.


def unknown_words(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The error messages for words of a command line that a parser does not know, with the flags that were meant."""
    known = [name for action in parser._actions for name in action.option_strings if name != "--help"]
    messages = []
    for word in words:
        if word.startswith("-"):
            close = difflib.get_close_matches(word.split("=")[0], known, n=1)
            messages.append(f"unknown flag {word}" + (f"; did you mean {close[0]}?" if close else ""))
    return messages or [f"{word!r} belongs to no flag" for word in words[:1]]


def too_small(flags, **least: float) -> list[str]:
    """Return one phrase for each flag whose value is below its minimum in `least`."""
    values = {name: getattr(flags, name) for name in least}
    return [
        f"--{name} is {values[name]}; it must be at least {minimum}"
        for name, minimum in least.items()
        if values[name] is not None and not values[name] >= minimum
    ]


def run_program(main: Callable[[], T]) -> T:
    """Call `main`. UserError, OSError and a missing package end the program with one line and exit status 2.

    From here on a rank ends when its torchrun is killed. If torchrun was killed before, while this process imported
    its packages, it ends here.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
        if os.getppid() != FIRST_PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        return main()
    except (UserError, OSError) as error:
        end_with_error(str(error))
    except ModuleNotFoundError as error:
        _end_if_package_is_missing(error)
        raise


def end_with_error(message: str) -> NoReturn:
    """End the program with one line and exit status 2.

    Most errors happen on all ranks alike. Ranks other than 0 wait before they report, so the launcher ends them after
    rank 0's report and the error is printed once.
    """
    if rank() > 0:
        time.sleep(RANK_0_FIRST)
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {shown(message)}\n")
    sys.exit(2)


def require(module: str, requirement: str) -> None:
    """Raise UserError with the command that installs an optional package, unless its module is installed."""
    if importlib.util.find_spec(module) is None:
        package = re.match(r"[\w.-]+", requirement)[0]
        raise UserError(f"the package {package} is missing: pip install {shlex.quote(requirement)}")


def _end_if_package_is_missing(error: BaseException) -> None:
    """End the program if the error is a missing package of others. A missing module of our own is a bug."""
    if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] not in OWN_MODULES:
        end_with_error(f"{error} for {sys.executable}: source .venv/bin/activate, or pip install -r requirements.txt")


def _report_uncaught(kind: type[BaseException], error: BaseException, trace) -> None:
    _end_if_package_is_missing(error)
    sys.__excepthook__(kind, error, trace)


# A program imports its packages before it calls run_program. A test or a notebook that imports utils is left alone.
if Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve().parent in (ROOT, ROOT / "tools"):
    sys.excepthook = _report_uncaught


# Processes.


def rank() -> int:
    """Return the rank of this process in its launch; 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of processes in the launch; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def end_with_parent() -> None:
    """Have Linux kill this process when its parent, or the thread of it that started this process, ends."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def shown(text: str) -> str:
    """Make a text from a model, a server or a file safe to print.

    Unprintable characters become U+FFFD, so the text cannot move the cursor. Lines after the first are indented, so
    the text cannot imitate log lines.
    """
    text = text.replace("\t", " ")
    return "\n    ".join("".join(c if c.isprintable() else "\ufffd" for c in line) for line in text.split("\n"))


class CleanFormatter(logging.Formatter):
    """Makes log messages safe to print, since they may quote models, servers and files."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shown(record.message)
        return super().formatMessage(record)


def set_up_logging() -> None:
    """Log to standard error: everything from rank 0, warnings from the others."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # at each step
    warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)  # a flag of ours
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    who = f"rank {rank()} " if world_size() > 1 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(CleanFormatter(f"%(asctime)s {who}%(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO if rank() == 0 else logging.WARNING, handlers=[handler], force=True)


def warn_on_rank_0(message: str, *values) -> None:
    """Log a warning that concerns the whole launch, on rank 0 only."""
    if rank() == 0:
        logger.warning(message, *values)
