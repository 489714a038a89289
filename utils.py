"""What all programs share: reading, whole writes, settings and locks of runs, ranks of a launch. No torch."""

import argparse
import ctypes
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from errno import EDQUOT, EFBIG, ENOSPC
from functools import partial
from pathlib import Path
from typing import IO, NoReturn, TypeVar

CHUNK = 1 << 20  # bytes read at a time
# What safetensors, torch, and numpy say of a full disk; arrow and files have its error number.
ON_FULL_DISK = re.compile(
    r"No space left|os error 28|PytorchStreamWriter|file write failed|\d requested and \d+ written"
)
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # option of prctl, Linux: the signal that a process gets when its parent dies
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py"]
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # per weights file, read for the fingerprint of a model
# In a word: control characters, line ends of Unicode, and bytes that are not UTF-8, which are read as surrogates.
UNREADABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
FULL_DISK = (ENOSPC, EDQUOT, EFBIG)  # no space, quota exceeded, file larger than allowed
logger = logging.getLogger(__name__)
START_TIMEOUT = timedelta(minutes=10)  # for all ranks of a launch to start
SHARING_TIMEOUT = 120  # seconds for a network file system to show what another machine wrote
LOCKED = "{}: another process is writing to this run; end that one first"
LEFTOVER_SECONDS = 3600  # age at which a temporary file is taken for that of a killed process
LOCK_TIMEOUT = 0.5  # seconds to wait for a lock: `is_locked` of another start holds it for an instant
RANK_0_FIRST = 3  # seconds that the other ranks wait before they report an error
OWN_MODULES = ("arguments", "dataloaders", "tools", "train", "trainers", "utils")
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
T = TypeVar("T")


class UserError(ValueError):
    """An error that the user can mend. The message says where, what, and what to do.

    `run_program` prints it as one line and exits with status 2. All other errors keep their traceback.
    """


class BadRecordError(UserError):
    """An unreadable or invalid record of a file; the message starts with the file and the line."""


# Reading.


def open_text(path: str | os.PathLike, *, errors: str = "strict"):
    """Open a UTF-8 file, with or without a byte order mark, with any line ending; FileNotFoundError names the path."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}")
    return open(path, encoding="utf-8-sig", errors=errors)


def read_json(path: str | os.PathLike):
    """Return the content of a JSON file. Raises FileNotFoundError, and UserError that names the file."""
    try:
        with open_text(path) as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None


def log_skipped(message: str) -> None:
    """Say that a bad record was passed over."""
    logger.warning("skipped: %s", message)


def iter_records(
    path: str | os.PathLike, *, on_skip: Callable[[str], None] | None = None
) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", object) for every object of a JSON list or JSONL file.

    A file that begins with "[" is a JSON list, any other file is JSONL. JSONL, and lists with one object a line (as
    `write_records` writes them), are read line by line in constant memory; other lists are read whole.

    With `on_skip`, records that are not objects are skipped and `on_skip` gets a message for each. A list that is cut
    off raises an error in either case, after its whole lines.

    Raises FileNotFoundError; UserError for an empty file; BadRecordError for text that is not JSON or not UTF-8, and
    for a record that is not an object.
    """
    with open_text(path, errors="surrogateescape") as file:
        first = file.read(CHUNK).lstrip()[:1]
        if not first:
            raise UserError(f"{path}: the file is empty; expected a JSON list or one JSON object per line")
        file.seek(0)
        if first == "[":
            yield from _iter_list(path, file, on_skip)
            return
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield from _checked(f"{path}:{number}", partial(_parse, line, f"{path}:{number}"), on_skip)


def read_json_or_jsonl(path: str | os.PathLike) -> list[dict]:
    """Return every object of a JSON list or JSONL file; errors as in `iter_records`."""
    return [record for _, record in iter_records(path)]


def _iter_list(path, file: IO, on_skip: Callable[[str], None] | None) -> Iterator[tuple[str, dict]]:
    """Read a list line by line while each line holds one object; from the first line that does not, read it whole."""
    yielded, comma = 0, True  # whether the line before allows another object
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
        yield from _checked(where, lambda value=value, where=where: _as_object(value, where), on_skip)


def _checked(where: str, make: Callable[[], dict], on_skip: Callable | None) -> Iterator[tuple[str, dict]]:
    """Yield the record that `make` returns, or skip it."""
    try:
        yield where, make()
    except BadRecordError as error:
        if not on_skip:
            raise
        on_skip(str(error))


def _parse(text: str, where: str, kind: type = dict):
    """Parse one JSON value; BadRecordError, with the line of a longer text, if it is not JSON of this kind."""
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
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise BadRecordError(f"{where}: JSON that Python cannot read ({error})") from None
    return value if kind is list else _as_object(value, where)


def _line(where: str, text: str, position: int, kind: type) -> str:
    return where if kind is dict else f"{where}:{text.count(chr(10), 0, position) + 1}"


def _as_object(value, where: str) -> dict:
    if not isinstance(value, dict):
        raise BadRecordError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_words(path: str | os.PathLike, check: Callable[[str], None] = lambda word: None) -> list[str]:
    """Return the words of a list, one a line. Blank lines are skipped, repeated words are kept.

    Raises FileNotFoundError; UserError for a list without words, and, with file and line, for text that is not UTF-8,
    for a word with a control character, and for a word that `check` raises ValueError for.
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


@contextmanager
def replacing(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a file for writing so that readers see the old file or the whole new one, never a part of it.

    A temporary file beside it is written first, and replaces it at the end. Temporary files that killed processes left
    are deleted after an hour. Raises UserError if the path is a link, a device, or anything else that is not a regular
    file.
    """
    path = Path(path)
    if path.is_symlink() or path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file; an output replaces a file or makes a new one")
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
    """Turn an error that a full disk caused into an OSError that names the path. Each library raises another one."""
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


def write_records(path: str | os.PathLike, records: Iterable[Mapping]) -> None:
    """Write records one a line as they come, whole or not at all: as JSONL to *.jsonl, else as one JSON list."""
    with replacing(path) as file:
        put_records(file, records, as_list=not str(path).endswith(".jsonl"))


def put_records(file: IO[str], records: Iterable[Mapping], *, as_list: bool) -> None:
    """Write records to an open file one a line as they come, as JSONL or as one JSON list."""
    if not as_list:
        file.writelines(to_json(record) + "\n" for record in records)
        return
    before = "[\n"
    for record in records:
        file.write(before + to_json(record))
        before = ",\n"
    file.write("[]\n" if before == "[\n" else "\n]\n")


to_json = json.JSONEncoder(ensure_ascii=False).encode  # one line, letters not escaped


# Data.


def alpaca_to_row(example: dict) -> dict:
    """Turn a raw Alpaca record (`instruction`, optional `input`, `output`) into `prompt`, `target` and `type`.

    The one place that knows how an instruction is laid out. Raises UserError where a text is missing.
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
    """Query and target of a record: `query`/`target`, else `prompt`/`answer`, else raw Alpaca; and the whole record.

    Raises UserError for a missing text, and for one that is not Unicode.
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

    Raises UserError if there is none, and for a folder without a config.json.
    """
    folder = Path(name) if os.path.isdir(name) else _from_hub(name)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json; this is not a model folder")
    return folder


@functools.cache
def _from_hub(name: str) -> Path:
    """Looked up once: what is called so may change while this process is at work."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=MODEL_FILES))
    except (OSError, ValueError) as error:
        why = type(error).__name__
        raise UserError(f"{name}: no such folder, and no such model on the hub ({why})") from None


def model_fingerprint(folder: Path) -> str:
    """SHA-256 over configuration, tokenizer, code and samples of the weights; not over what lies between samples."""
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


# Finished work.


class RunSettings:
    """The settings file of a run, and the lock that keeps a second launch out.

    The file holds {"settings": ...}: everything that the results depend on. A file or a model is stored as
    {"path", "sha256"}; only its content is compared. `results()` returns an existing output made under these
    settings, or None. `remedy` tells what to do; it ends the message where a start is refused. A refused start has
    written nothing.
    """

    def __init__(self, settings_path: str | os.PathLike, *, results: Callable[[], Path | None], remedy: str):
        self.path, self.results, self.remedy = Path(settings_path), results, remedy
        self.lock_path = self.path.with_name(f".{self.path.stem}.lock")

    def claim(self, settings: Mapping) -> None:
        """Lock the run for this process; UserError as in `check`."""
        self.check(settings)
        lock(self.lock_path)
        self.check(settings)  # another launch may have ended in between

    @contextmanager
    def claimed(self, settings: Mapping) -> Iterator[None]:
        """`claim` for as long as the block runs."""
        self.claim(settings)
        try:
            yield
        finally:
            unlock(self.lock_path)

    def check(self, settings: Mapping) -> None:
        """Raise UserError if another launch is at work here, or if the results were made with other settings."""
        if is_locked(self.lock_path):
            raise UserError(LOCKED.format(self.path))
        if (found := self.results()) is None:
            return
        if not self.path.is_file():
            raise UserError(f"{found}: there is no {self.path.name} that says how it was made; {self.remedy}")
        if different := differences(self.read(), settings):
            raise UserError(f"{self.path}: made with other settings ({'; '.join(different)}); {self.remedy}")

    def read(self, name: str = "settings"):
        """Return one entry of the settings file; UserError if it has none."""
        try:
            found = read_json(self.path)[name]
        except (UserError, KeyError, TypeError):
            found = None
        if found is None or name == "settings" and not isinstance(found, dict):
            raise UserError(f"{self.path}: not the settings file of a run; {self.remedy}")
        return found

    def write(self, settings: Mapping, **more) -> None:
        """Write the settings file; `more` are further entries, which are not compared."""
        write_json(self.path, {"settings": settings, **more})


def differences(then: Mapping, now: Mapping) -> list[str]:
    """Return a phrase for each setting that differs."""
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


# The locks that this process holds, with their file descriptors. POSIX locks end with their process, and children do
# not inherit them. They also end when the process closes any other descriptor of the file, so nothing else may open
# it. The empty files stay: if one were deleted, two processes could lock an old and a new file of the same name.
_locks: dict[Path, int] = {}
os.register_at_fork(after_in_child=_locks.clear)


def lock(path: str | os.PathLike) -> None:
    """Lock a file, which nothing else may open, for this process; UserError if another process holds the lock."""
    path = Path(path).absolute()
    if path in _locks:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    if not wait_until(lambda: _try_lock(descriptor, fcntl.LOCK_EX, path), LOCK_TIMEOUT):
        os.close(descriptor)
        raise UserError(LOCKED.format(path.parent))
    _locks[path] = descriptor


def unlock(path: str | os.PathLike) -> None:
    """Give up a lock of this process before it ends."""
    os.close(_locks.pop(Path(path).absolute()))


def is_locked(path: str | os.PathLike) -> bool:
    """Whether another process holds this lock; False on a file system without locks."""
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
    """Return on all ranks what `make` returns on rank 0, as JSON keeps it. All ranks of the launch must call it.

    A UserError or OSError of `make` becomes a UserError on all ranks. A process without MASTER_ADDR was not started
    by a launcher and calls `make` itself.
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
    while not store.check([key]):  # without limit: rank 0 may be fetching a model from the hub
        time.sleep(0.1)
    answer = json.loads(store.get(key))
    store.set(f"{key}/{rank()}", "")
    if rank() == 0:  # without torchrun the store lives in this process
        store.wait([f"{key}/{other}" for other in range(world_size())])
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def meet_at_end(lock_paths: Sequence[str | os.PathLike]) -> None:
    """Wait at the end of the work until no rank of this launch is at work.

    Without this, torchrun ends the launch of several machines 300 s after the first machine is done. `lock_paths` are
    the locks of all ranks, by rank. A rank holds its own from its start, and gives it up here. A dead rank holds none,
    so nobody waits for it. A rank that fails does not call this.
    """
    unlock(lock_paths[rank()])
    while any(map(is_locked, lock_paths)):
        time.sleep(0.5)


@functools.cache
def launch_store():
    """The key-value store that the ranks of a launch share; torch's process group uses the same server."""
    from torch.distributed import rendezvous

    if os.environ.get("MASTER_PORT") == "0":
        raise UserError("torchrun --master_port=0 leaves ranks without a port; use --standalone or a port number")
    store, _, _ = next(rendezvous("env://", timeout=START_TIMEOUT))
    return store


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition, at most `seconds`; return whether it came true."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return met


def await_inputs(paths: Iterable[str]) -> None:
    """Wait until this machine sees the files that rank 0 sees, with the same sizes; those in model folders too.

    One machine may start a stage before another machine's results have reached it.
    Raises UserError that names the files if they do not appear.
    """
    if world_size() == 1:
        return

    def sizes(path: str) -> dict[str, int]:
        files = sorted(Path(path).iterdir()) if os.path.isdir(path) else [Path(path)]
        return {str(file): file.stat().st_size for file in files if file.is_file()}

    def missing() -> list[str]:
        return [file for file, size in expected.items() if not os.path.isfile(file) or os.path.getsize(file) != size]

    expected = from_rank_0(lambda: {file: size for path in paths for file, size in sizes(path).items()})
    if rank() != 0 and not wait_until(lambda: not missing(), SHARING_TIMEOUT):
        raise UserError(f"{', '.join(missing())}: not as rank 0 sees it, after {SHARING_TIMEOUT} s; is it shared?")


# Programs.


def unknown_flag(flag_given: str, known: Iterable[str]) -> str:
    """The error message for a flag that does not exist, with the flag that was probably meant."""
    close = difflib.get_close_matches(flag_given.split("=")[0], list(known), n=1)
    return f"unknown flag {flag_given}" + (f"; did you mean {close[0]}?" if close else "")


def unknown_words(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The error messages for words of a command line that a parser does not know."""
    known = [name for action in parser._actions for name in action.option_strings if name != "--help"]
    flags = [unknown_flag(word, known) for word in words if word.startswith("-")]
    return flags or [f"{word!r} belongs to no flag" for word in words[:1]]


def too_small(flags, **least: float) -> list[str]:
    """One phrase for each of these flags that is set to less than its least value."""
    values = {name: getattr(flags, name) for name in least}
    return [
        f"--{name} is {values[name]}; it must be at least {minimum}"
        for name, minimum in least.items()
        if values[name] is not None and not values[name] >= minimum
    ]


def run_program(main: Callable[[], T]) -> T:
    """Run a program or a part of it. UserError and OSError end it with their message and exit status 2."""
    try:
        return main()
    except (UserError, OSError) as error:
        end_with_error(str(error))


def end_with_error(message: str) -> NoReturn:
    """End the program with one line and exit status 2.

    Most errors happen on all ranks alike. Rank 0 reports at once, and the launcher then ends the others before they
    report the same.
    """
    if rank() > 0:
        time.sleep(RANK_0_FIRST)
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {shown(message)}\n")
    sys.exit(2)


def _name_missing_package(kind, error, trace) -> None:
    if issubclass(kind, ModuleNotFoundError) and str(error.name).split(".")[0] not in OWN_MODULES:
        end_with_error(f"{error} for {sys.executable}; activate the environment: source .venv/bin/activate")
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _name_missing_package  # every program imports utils before any package that may be missing


# Processes.


def rank() -> int:
    """The number of this process among those of the launch, 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """How many processes the launch has, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def plain_environment() -> dict[str, str]:
    """The environment without the launcher's variables, for programs that are not ranks of this launch."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}


def end_with_launcher() -> None:
    """End this process when the loop's script is killed, so that it does not keep the next launch out.

    The script is not our parent process, so a thread polls its pid every second. (Ranks of torchrun end with torchrun
    from the moment in which they import this module.)
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
    """Have Linux kill this process when its parent ends, exactly: when the thread that started it ends."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if "TORCHELASTIC_RUN_ID" in os.environ:
    end_with_parent()  # now, since torchrun may be killed during the imports that follow


def shown(text: str) -> str:
    """Make a text of a model, a server or a file safe to print: it cannot move the cursor or imitate our own lines.

    Characters that are not printable become U+FFFD; lines after the first are indented.
    """
    text = text.replace("\t", " ")
    return "\n    ".join("".join(c if c.isprintable() else "\ufffd" for c in line) for line in text.split("\n"))


class CleanFormatter(logging.Formatter):
    """Makes log messages safe to print, which may quote models, servers and files."""

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
    """Log a warning on rank 0 only, because it concerns the whole launch."""
    if rank() == 0:
        logger.warning(message, *values)


# Tokenizers.


def ensure_pad_token(tokenizer) -> None:
    """Let a tokenizer without PAD pad with EOS. The vocabulary is never resized: that would break the KL.

    Raises UserError for a tokenizer with neither.
    """
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has neither a PAD nor an EOS token")
    tokenizer.pad_token = tokenizer.eos_token
