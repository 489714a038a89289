"""What every program shares: records in and out, flags, finished work and its locks, ranks, tokens. No torch."""

import argparse
import ctypes
import dataclasses
import difflib
import fcntl
import functools
import glob
import hashlib
import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

CHUNK = 1 << 20  # bytes read at a time
CHECKSUM_THREADS = 4  # a disk keeps so many busy
# What safetensors, torch, and numpy say of a full disk; arrow and files have its error number.
ON_FULL_DISK = re.compile(
    r"No space left|os error 28|PytorchStreamWriter|file write failed|\d requested and \d+ written"
)
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal that a process gets when its parent dies
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py"]
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # per weights file, read for the fingerprint of a model
BLANKS = re.compile(r"\s*")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters and line ends of Unicode
DECODER = json.JSONDecoder()
AFTER = {"[": "]", ",": "", "]": None}  # of a JSON list: what may follow, besides an element
logger = logging.getLogger(__name__)
START_TIMEOUT = timedelta(minutes=10)  # for all ranks of a launch to start
SHARING_TIMEOUT = 120  # seconds for a network file system to show what another machine wrote
LOCKED = "{}: another process is writing to this run; end that one first"
LEFTOVER_SECONDS = 3600  # after which a temporary file that nothing was written to is nobody's
LOCK_TIMEOUT = 0.5  # seconds: another start may be looking at a lock, which takes an instant
RANK_0_FIRST = 3  # seconds
OWN_MODULES = ("arguments", "dataloaders", "tools", "train", "trainers", "utils")
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
T = TypeVar("T")


class BadRecordError(ValueError):
    """An unreadable or invalid record of a file; the message starts with the file and the line."""


class RunError(ValueError):
    """What ends a program at work; its message is all that is to be said, where other errors need a traceback."""


# Reading.


def open_text(path: str | os.PathLike, *, errors: str = "strict"):
    """Open a UTF-8 file, with or without a byte order mark, with any line ending; FileNotFoundError names the path."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}")
    return open(path, encoding="utf-8-sig", errors=errors)


def read_json(path: str | os.PathLike):
    """What a JSON file holds. Raises FileNotFoundError, and ValueError that names the file."""
    try:
        with open_text(path) as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def log_skipped(message: str) -> None:
    """Say that a bad record was passed over."""
    logger.warning("skipped: %s", message)


def iter_records(
    path: str | os.PathLike, *, on_skip: Callable[[str], None] | None = None
) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", object) for every object of a JSON list or JSONL file.

    A file whose first character is "[" is one JSON list, any other is JSONL (blank lines are passed over). Neither
    needs more memory than its largest record, but for the rest of a list after its first fault.
    With `on_skip`, which is told of each, JSONL lines that are no objects are passed over, and a list ends at its
    first fault.

    Raises FileNotFoundError; ValueError for an empty file; BadRecordError for text that is not JSON or not UTF-8,
    a list that is cut off, and a record that is not an object.
    """
    with open_text(path, errors="surrogateescape") as file:
        first = file.read(CHUNK).lstrip()[:1]
        if not first:
            raise ValueError(f"{path}: the file is empty; expected a JSON list or one JSON object per line")
        file.seek(0)
        if first != "[":
            yield from _iter_lines(path, file, on_skip)
            return
        try:
            yield from _iter_list(path, file)
        except BadRecordError as error:
            if not on_skip:
                raise
            on_skip(f"{error} (the rest of the file is lost)")


def read_json_or_jsonl(path: str | os.PathLike) -> list[dict]:
    """Every object of a JSON list or JSONL file; errors as in `iter_records`."""
    return [record for _, record in iter_records(path)]


def _iter_lines(path, file: IO, on_skip: Callable[[str], None] | None) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(file, start=1):
        where, text = f"{path}:{number}", line.strip()
        try:
            if text:
                record, end = _scan(text, 0, where)
                if rest := text[end:].strip():
                    raise BadRecordError(f"{where}: {rest[:20]!r} after the JSON object; one object a line")
                yield where, record
        except BadRecordError as error:
            if not on_skip:
                raise
            on_skip(str(error))


def _iter_list(path, file: IO) -> Iterator[tuple[str, dict]]:
    """The elements of a list; the text at hand grows until the next one is whole."""
    text, at, line, expected = "", 0, 1, "["  # one of the characters `expected` comes next, or an element
    while True:
        blanks = BLANKS.match(text, at)
        line, at = line + blanks[0].count("\n"), blanks.end()
        where, found = f"{path}:{line}", text[at : at + 1]
        if not found and (more := file.read(CHUNK)):
            text, at = more, 0
        elif not found or expected == AFTER["]"]:
            break
        elif found in expected:
            at, expected = at + 1, AFTER[found]
        elif expected == ",]":
            raise BadRecordError(f"{where}: expected ',' or ']', found {found!r}")
        else:
            try:
                record, end = _scan(text, at, where)
            except BadRecordError:
                if not (more := file.read(len(text))):
                    raise
                text, at = text[at:] + more, 0
                continue
            yield where, record
            line += text.count("\n", at, end)
            at, expected = end, ",]"
    if found:
        raise BadRecordError(f"{where}: {found!r} after the end of the JSON list; one list a file")
    if expected != AFTER["]"]:
        raise BadRecordError(f"{where}: the JSON list has no end; was the file cut off?")


def _scan(text: str, at: int, where: str) -> tuple[dict, int]:
    """The object that begins at a place of a text, and where it ends."""
    try:
        record, end = DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        why = f"({error.msg} at character {error.pos - at + 1} of {text[at : at + 40]!r}...)"
        raise BadRecordError(f"{where}: not a JSON object, or the file was cut off here {why}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise BadRecordError(f"{where}: JSON that Python does not read ({error})") from None
    _check_utf8(text[at:end], where)
    if not isinstance(record, dict):
        raise BadRecordError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record, end


def _check_utf8(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8 were read as surrogates
        raise BadRecordError(f"{where}: not UTF-8") from None


def read_words(path: str | os.PathLike, check: Callable[[str], None] = lambda word: None) -> list[str]:
    """The words of a list, one a line; blank lines are passed over, repeated words kept.

    Raises FileNotFoundError; ValueError for a list without words, and, with its line, for text that is not UTF-8, for
    a word with a control character or another kind of line end in it, and for one that `check` raises ValueError for.
    """
    words = []
    with open_text(path, errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            word, where = line.strip(), f"{path}:{number}"
            _check_utf8(word, where)
            if unprintable := UNPRINTABLE.search(word):
                raise ValueError(f"{where}: {unprintable[0]!r} in a word; expected one a line, as UTF-8")
            try:
                if word:
                    check(word)
                    words.append(word)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    if not words:
        raise ValueError(f"{path}: no words; expected one a line")
    return words


# Writing.


@contextmanager
def replacing(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a file to write that a reader finds whole or not at all: a temporary file beside it takes its place.

    What killed processes left is deleted after an hour. Raises ValueError for what is no regular file, such as a
    device or a link.
    """
    path = Path(path)
    if path.is_symlink() or path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a regular file, which outputs take the place of; name another one")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):  # another process may be at it, or another user's
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
    """Turn what writers raise on a full disk, each in its own way, into an OSError that names the path."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EFBIG)
        if full and error.filename or not full and not ON_FULL_DISK.search(str(error)):
            raise
        number = error.errno if full else ENOSPC
        raise OSError(number, os.strerror(number), str(path)) from error


def write_json(path: str | os.PathLike, value) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    with replacing(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def write_records(path: str | os.PathLike, records: Iterable[Mapping]) -> None:
    """Write records one a line as they come, whole or not at all: as JSONL to *.jsonl, else as one JSON list."""
    with replacing(path) as file:
        if str(path).endswith(".jsonl"):
            file.writelines(to_json(record) + "\n" for record in records)
            return
        before = "[\n"
        for record in records:
            file.write(before + to_json(record))
            before = ",\n"
        file.write("[]\n" if before == "[\n" else "\n]\n")


to_json = json.JSONEncoder(ensure_ascii=False).encode  # a record on one line, its letters as they are


# Data.


def alpaca_to_row(example: dict) -> dict:
    """Turn a raw Alpaca record (`instruction`, optional `input`, `output`) into `prompt`, `target` and `type`.

    The one place that knows how an instruction is laid out. Raises ValueError where a text is missing.
    """
    for key in ("instruction", "output"):
        if not isinstance(example.get(key), str):
            raise ValueError(f"'{key}' is missing; Alpaca records have 'instruction', 'output' and perhaps 'input'")
    if not isinstance(example.get("input") or "", str):
        raise ValueError(f"'input' must be a text, got {example['input']!r}")
    prompt = f"### Instruction: {example['instruction']}"
    if example.get("input"):
        prompt += f"\n\n### Input: {example['input']}"
    return {"prompt": prompt + "\n\n### Response: ", "target": example["output"], "type": "sft"}


def row_texts(record: dict, from_alpaca: Callable[[dict], dict] = alpaca_to_row) -> tuple[str, str, dict]:
    """Query and target of a record: `query`/`target`, else `prompt`/`answer`, else raw Alpaca; and the whole record.

    Raises ValueError for a missing text, and for one that is no Unicode.
    """
    if not ({"query", "prompt", "target", "answer"} & record.keys()) and "instruction" in record:
        record = record | from_alpaca(record)
    texts = []
    for name, other in (("query", "prompt"), ("target", "answer")):
        key = name if name in record else other
        if key not in record:
            raise ValueError(
                f"'{name}' is missing; every row needs 'query' and 'target' (or 'prompt' and 'answer', or Alpaca's "
                "'instruction' and 'output')"
            )
        if not isinstance(record[key], str):
            raise ValueError(f"'{key}' must be a text, got {record[key]!r}")
        try:
            record[key].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"'{key}' is no Unicode text ({error.reason})") from None
        texts.append(record[key])
    return texts[0], texts[1], record


def file_digest(paths: Iterable[str | os.PathLike]) -> str:
    """SHA-256 over the contents of the files, in the order given."""
    return hashlib.sha256(b"".join(bytes.fromhex(file_sha256(path)) for path in paths)).hexdigest()


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of one file, as sha256sum prints it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def model_folder(name: str) -> Path:
    """A model's folder: `name` itself, or the copy on this machine of what is called so on the hub.

    Raises ValueError if there is none, and for a folder without a config.json.
    """
    folder = Path(name) if os.path.isdir(name) else _from_hub(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json; this is not a model folder")
    return folder


@functools.cache
def _from_hub(name: str) -> Path:
    """Looked up once: what is called so may change while this process is at work."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=MODEL_FILES))
    except (OSError, ValueError) as error:
        why = type(error).__name__
        raise ValueError(f"{name}: no such folder, nor a model that can be had from the hub ({why})") from None


def model_fingerprint(folder: Path) -> str:
    """SHA-256 over configuration, tokenizer, and samples of the weights; what lies between them is not seen."""
    digest = hashlib.sha256()
    small = ("config.json", "generation_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
    small += ("chat_template.jinja",)
    for path in sorted(folder / file for file in (*small, *TOKENIZER_FILES)):
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


# Finished work.


class RunSettings:
    """Results in a folder: what they were made with, and the lock that keeps a second launch out.

    The file holds {"settings": ...}, all that the results depend on; of a file or a model, {"path", "sha256"},
    only the content counts. `results()` is a path among what settings bind, None if nothing is there yet; `remedy`
    ends the message of a refused start, which has written nothing.
    """

    def __init__(self, settings_path: str | os.PathLike, *, results: Callable[[], Path | None], remedy: str):
        self.path, self.results, self.remedy = Path(settings_path), results, remedy
        self.lock_path = self.path.with_name(f".{self.path.stem}.lock")

    def claim(self, settings: Mapping, *, overwrite: bool = False) -> None:
        """Keep other launches out from now on; ValueError as in `check`, with `overwrite` for another launch only."""
        self.check(settings, overwrite=overwrite)
        lock(self.lock_path)
        self.check(settings, overwrite=overwrite)  # another launch may have ended in between

    @contextmanager
    def claimed(self, settings: Mapping, *, overwrite: bool = False) -> Iterator[None]:
        """`claim` for as long as the block runs."""
        self.claim(settings, overwrite=overwrite)
        try:
            yield
        finally:
            unlock(self.lock_path)

    def check(self, settings: Mapping, *, overwrite: bool = False) -> None:
        """Raise ValueError if another launch is at work here, or if the results were made with other settings."""
        if is_locked(self.lock_path):
            raise ValueError(LOCKED.format(self.path))
        if overwrite or (found := self.results()) is None:
            return
        if not self.path.is_file():
            raise ValueError(f"{found}: no {self.path.name} beside it says how it was made; {self.remedy}")
        if different := differences(self.read(), settings):
            raise ValueError(f"{self.path}: made with other settings ({'; '.join(different)}); {self.remedy}")

    def read(self, name: str = "settings"):
        """One entry of the settings file; ValueError if it has none."""
        try:
            found = read_json(self.path)[name]
        except (ValueError, KeyError, TypeError):
            found = None
        if found is None or name == "settings" and not isinstance(found, dict):
            raise ValueError(f"{self.path}: not the settings of a run, or of an earlier version; {self.remedy}")
        return found

    def write(self, settings: Mapping, **more) -> None:
        """Write the settings file."""
        write_json(self.path, {"settings": settings, **more})


def differences(then: Mapping, now: Mapping) -> list[str]:
    """The settings that differ, a phrase each."""
    now = json.loads(json.dumps(now))  # tuples are lists in a file
    return [
        f"{key}: {_show(then.get(key))} then, {_show(now.get(key))} now"
        for key in {**then, **now}
        if _content(then.get(key)) != _content(now.get(key))
    ]


def files_setting(*paths: str | os.PathLike) -> dict[str, str]:
    """Files as `RunSettings` compares them."""
    return {"path": " ".join(map(str, paths)), "sha256": file_digest(paths)}


def _content(setting):
    return setting.get("sha256", setting) if isinstance(setting, dict) else setting


def _show(setting) -> str:
    if isinstance(setting, dict) and "sha256" in setting:
        options = f" {setting['options']}" if setting.get("options") else ""
        return f"{setting.get('path')}{options} (sha256 {str(setting['sha256'])[:8]})"
    return str(setting)


# The locks of this process, with their descriptors. They are POSIX locks, which die with their process and are not
# inherited by its children; closing any other descriptor of the file would end them. The empty files stay: one that is
# taken away could be locked by one process and made anew by another.
_locks: dict[Path, int] = {}
os.register_at_fork(after_in_child=_locks.clear)


def lock(path: str | os.PathLike) -> None:
    """Take a lock file, which nothing else may open, for this process; ValueError if another process has it."""
    path = Path(path).absolute()
    if path in _locks:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    if not wait_until(lambda: _try_lock(descriptor, fcntl.LOCK_EX, path), LOCK_TIMEOUT):
        os.close(descriptor)
        raise ValueError(LOCKED.format(path.parent))
    _locks[path] = descriptor


def unlock(path: str | os.PathLike) -> None:
    """Give up a lock of this process before it ends."""
    os.close(_locks.pop(Path(path).absolute()))


def is_locked(path: str | os.PathLike) -> bool:
    """Whether another process has a lock file; False on a file system without locks."""
    path = Path(path).absolute()
    if path in _locks:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
    """What `make` gives on rank 0, as JSON keeps it: all ranks of the launch meet here.

    Its ValueError or OSError on rank 0 is a ValueError on all. Ranks started by hand, without MASTER_ADDR, are alone.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return make()
    store, key = launch_store(), f"spag/{next(_meetings)}"
    answer: dict
    if rank() == 0:
        try:
            answer = {"value": make()}
        except (ValueError, OSError) as error:
            answer = {"error": str(error)}
        store.set(key, json.dumps(answer))
    while not store.check([key]):  # without limit: rank 0 may be fetching a model from the hub
        time.sleep(0.1)
    answer = json.loads(store.get(key))
    store.set(f"{key}/{rank()}", "")
    if rank() == 0:  # without torchrun the store lives in this process
        store.wait([f"{key}/{other}" for other in range(world_size())])
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["value"]


@functools.cache
def launch_store():
    """Where the ranks of a launch leave each other words; torch's process group shares its server."""
    from torch.distributed import rendezvous

    if os.environ.get("MASTER_PORT") == "0":
        raise ValueError("torchrun --master_port=0 leaves ranks without a port; use --standalone or a port number")
    store, _, _ = next(rendezvous("env://", timeout=START_TIMEOUT))
    return store


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition at most so long; whether it came true."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return met


def await_inputs(paths: Iterable[str]) -> None:
    """Wait until this machine sees the files and model folders that rank 0 sees.

    Machines may get here before another's results do. Raises ValueError for one that stays without them.
    """
    if world_size() == 1:
        return

    def digest(path: str) -> str | None:
        if os.path.isfile(path):
            return file_sha256(path)
        return model_fingerprint(Path(path)) if os.path.isdir(path) else None  # which may be a name on the hub

    def different() -> list[str]:
        return [path for path, expected in digests.items() if expected and digest(path) != expected]

    digests = from_rank_0(lambda: {path: digest(path) for path in paths})
    if rank() != 0 and not wait_until(lambda: not different(), SHARING_TIMEOUT):
        raise ValueError(
            f"{', '.join(different())}: not what rank 0 has, after {SHARING_TIMEOUT} s; do all machines share it?"
        )


def restarted() -> bool:
    """Whether torchrun or Slurm has started this launch again: what is there is its own."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(os.environ.get(name, "0") != "0" for name in counts)


# Checkpoints.

COMPLETE = "complete.json"  # written last into a checkpoint folder: [size, CRC-32] of every other file in it


def checksums(folder: str | os.PathLike, *, of_rank: int | None = None) -> dict[str, list[int]]:
    """Size and CRC-32 of the files in a checkpoint folder, by name; of those that one rank has written."""
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.name != COMPLETE]
    paths = [path for path in paths if of_rank in (None, _writer(path))]
    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
        sums = pool.map(_size_and_crc, paths)
        return {str(path.relative_to(folder)): each for path, each in zip(paths, sums, strict=True)}


def _writer(path: Path) -> int:
    """The rank that writes a file of a checkpoint."""
    number = re.search(r"(?:pp_rank|rng_state)_(\d+)", path.name)
    return int(number[1]) if number else 0


def _size_and_crc(path: Path) -> list[int]:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
        return [file.tell(), crc]


def is_complete(folder: str | os.PathLike) -> bool:
    """Whether a checkpoint folder was written to its end and still has all its files, of their sizes."""
    paths = {Path(folder, name): size for name, (size, _) in _mark(folder).items()}
    return bool(paths) and all(path.is_file() and path.stat().st_size == paths[path] for path in paths)


def is_undamaged(folder: str | os.PathLike) -> bool:
    """Whether the files of a complete checkpoint folder are what was written, which they are read for once."""
    return _is_undamaged(Path(folder).absolute(), Path(folder, COMPLETE).stat().st_mtime_ns)


@functools.cache
def _is_undamaged(folder: Path, marked: int) -> bool:
    found = checksums(folder)
    damaged = [name for name, (size, crc) in _mark(folder).items() if crc is not None and found[name] != [size, crc]]
    for name in damaged:
        logger.warning("%s: damaged, not what was written; its checkpoint is passed over", folder / name)
    return not damaged


def _mark(folder: str | os.PathLike) -> dict[str, list]:
    """What a checkpoint folder's mark says of its files, sizes alone where an earlier version made it; {}: no mark."""
    try:
        marked = read_json(Path(folder) / COMPLETE)
        return {name: noted if isinstance(noted, list) else [noted, None] for name, noted in marked.items()}
    except (OSError, ValueError):
        return {}


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The checkpoint folders of a run, by step, whole or not."""
    found = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in Path(output_dir).glob("checkpoint-*")}
    return sorted((path for path in found if found[path]), key=lambda path: int(found[path][1]))


def last_complete_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The checkpoint folder of the highest step that is whole; None where there is none."""
    for path in reversed(checkpoints(output_dir)):
        if is_complete(path) and is_undamaged(path):
            return str(path)
    if checkpoints(output_dir):
        logger.warning("%s: none of its checkpoints is whole; starting from the beginning", output_dir)
    return None


# Programs.


def parse_bool(text: str) -> bool:
    """The `type` of a flag that takes True or False."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")
    return text.lower() == "true"


def flag(help_line: str, *, default=dataclasses.MISSING, names: Sequence[str] = (), **settings):
    """A field of a dataclass that holds a program's flags; `names` are older names, `settings` go to add_argument.

    Without a default the flag must be given.
    """
    metadata = {"help": help_line, "names": tuple(names), "settings": settings}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Declare the flags of a dataclass of `flag` fields; a list takes several values, a bool True or False."""
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):
        hint = hints[each.name]
        inner, *_ = [part for part in get_args(hint) if part is not type(None)] or [hint]
        several = list in (get_origin(hint), get_origin(inner))
        plain = (*get_args(inner), inner)[0]
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        settings = {"type": parse_bool if plain is bool else plain, "nargs": "+" if several else None}
        line = each.metadata["help"]
        if default not in (dataclasses.MISSING, None, []):
            line += f" (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"
        names = [f"--{name}" for name in (each.name, *each.metadata["names"])]
        settings |= {"required": default is dataclasses.MISSING, "default": default, "help": line.replace("%", "%%")}
        parser.add_argument(*names, dest=each.name, **settings | each.metadata["settings"])


def parse_flags(kind: type[T], argv: Sequence[str] | None = None, *, description: str, prog: str | None = None) -> T:
    """Read the command line into a dataclass of `flag` fields; ends the program with a remedy for a wrong flag."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: end_with_error(f"{message} (--help lists the flags)")
    add_flags(parser, kind)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error("; ".join(unknown_words(unknown, parser)))
    return kind(**vars(values))


def parse_command(kinds: Mapping[str, type[T]], argv: Sequence[str] | None = None, *, description: str) -> T:
    """Read `COMMAND --flag ...` into the dataclass of this command, whose docstring is the command's description."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=kinds, help="its own --help lists its flags")
    command = parser.parse_args(words[:1]).command
    kind = kinds[command]
    return parse_flags(kind, words[1:], description=kind.__doc__, prog=f"{parser.prog} {command}")


def unknown_flag(flag_given: str, known: Iterable[str]) -> str:
    """What to say of a flag that does not exist, with the one that was probably meant."""
    close = difflib.get_close_matches(flag_given.split("=")[0], list(known), n=1)
    return f"unknown flag {flag_given}" + (f"; did you mean {close[0]}?" if close else "")


def unknown_words(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """What to say of words of a command line that a parser does not know."""
    known = [name for action in parser._actions for name in action.option_strings if name != "--help"]
    flags = [unknown_flag(word, known) for word in words if word.startswith("-")]
    return flags or [f"{word!r} belongs to no flag" for word in words[:1]]


class NamedPath(NamedTuple):
    """A model or a file with a name to call it by."""

    name: str
    path: str


def named_path(text: str) -> NamedPath:
    """The `type` of flags that take NAME=MODEL."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=MODEL, got {text!r}")
    return NamedPath(name, path)


def too_small(flags, **least: float) -> list[str]:
    """One phrase for each of these flags that is set to less than its least value."""
    values = {name: getattr(flags, name) for name in least}
    return [
        f"--{name} is {values[name]}; it must be at least {minimum}"
        for name, minimum in least.items()
        if values[name] is not None and not values[name] >= minimum
    ]


def run_program(main: Callable[[], T], *, expected: type[Exception] = ValueError) -> T:
    """Run a program or a part of it; what is `expected`, and OSError, ends it with its message and exit status 2."""
    try:
        return main()
    except (expected, OSError) as error:
        end_with_error(str(error))


def end_with_error(message: str) -> NoReturn:
    """End the program with one line and exit status 2.

    Ranks mostly fail alike: rank 0 speaks at once, and its launcher then ends the others before they do.
    """
    if rank() > 0:
        time.sleep(RANK_0_FIRST)
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {shown(message)}\n")
    sys.exit(2)


def _name_missing_package(kind, error, trace) -> None:
    if issubclass(kind, ModuleNotFoundError) and str(error.name).split(".")[0] not in OWN_MODULES:
        end_with_error(f"{error} for {sys.executable}; activate the environment: source .venv/bin/activate")
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _name_missing_package  # every program imports this module before what may be missing


# Processes.


def rank() -> int:
    """The number of this process among those of the launch, 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """How many processes the launch has, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def plain_environment() -> dict[str, str]:
    """The environment without what a launcher has put there, for programs that are none of its ranks."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}


def end_with_launcher() -> None:
    """End this process when the loop's script is killed: orphans would keep the next launch out.

    Ranks end with torchrun from the moment in which they import this module. The script is no parent of its programs:
    it is looked for every second.
    """

    def watch(pid: int) -> None:
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1)

    if loop := os.environ.get("SPAG_LOOP_PID"):
        threading.Thread(target=watch, args=[int(loop)], daemon=True).start()


def end_with_parent() -> None:
    """End this process when the thread that started it ends, however that is; Linux only."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if "TORCHELASTIC_RUN_ID" in os.environ:
    end_with_parent()  # at once: the imports to come take seconds, in which torchrun may be killed


def shown(text: str) -> str:
    """A text of a model, a server or a file as it may be shown: nothing in it steers the terminal or looks like ours.

    Control characters and the like become U+FFFD; lines after the first are set in.
    """
    text = text.replace("\t", " ")
    return "\n    ".join("".join(c if c.isprintable() else "\ufffd" for c in line) for line in text.split("\n"))


class CleanFormatter(logging.Formatter):
    """Messages of the log may quote models, servers and files."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shown(record.message)
        return super().formatMessage(record)


def set_up_logging() -> None:
    """Log to standard error: everything from rank 0, warnings from the others."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of libraries, each step
    warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)  # our own flag
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    who = f"rank {rank()} " if world_size() > 1 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(CleanFormatter(f"%(asctime)s {who}%(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO if rank() == 0 else logging.WARNING, handlers=[handler], force=True)


def warn_on_rank_0(message: str, *values) -> None:
    """Log a warning that concerns the whole launch: on rank 0 only."""
    if rank() == 0:
        logger.warning(message, *values)


# Tokenizers.


def ensure_pad_token(tokenizer) -> None:
    """Give a tokenizer without PAD its EOS for padding. The vocabulary is never resized: that would break the KL.

    Raises ValueError for a tokenizer with neither.
    """
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has neither a PAD nor an EOS token")
    tokenizer.pad_token = tokenizer.eos_token
