"""Reading text, JSON and word lists, and writing them atomically."""

import functools
import glob
import gzip
import json
import os
import re
import tempfile
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from tools.common.errors import UserError, user_errors

ROOT = Path(__file__).resolve().parents[2]
JOINERS = "\u200c\u200d"  # format characters that are part of words in Persian and Hindi, and of emoji
AROUND_WORDS = " \t\r\v\f\u00a0\u00ad\u200b\ufeff"  # whitespace, including invisible characters
DATA_FILES = (".json", ".jsonl", ".gz", ".parquet", ".csv")  # endings of files; other names may be hub data sets
RECORD_FILES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
StrPath = str | os.PathLike
T = TypeVar("T")


def read_text(path: StrPath) -> str:
    """The text of a UTF-8 file, which may be gzipped, without a byte order mark. UserError if it is not UTF-8."""
    try:
        with (gzip.open if Path(path).suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; save it as UTF-8") from None


def read_json(path: StrPath):
    return _parse(read_text(path), path)


def read_json_or_jsonl(path: StrPath, make: Callable[[dict], Any] = dict) -> list:
    """`make` applied to each object of a JSON list or JSON Lines file.

    UserError names a line that is not JSON, a row that is not an object, or a row for which `make` raises UserError.
    """
    text = read_text(path)
    if text.lstrip().startswith("["):
        records = _parse(text, path)
    else:  # not splitlines: replies may contain U+2028
        lines = enumerate(text.split("\n"), start=1)
        records = [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
    return _made(path, records, make)


def _made(path: StrPath, records: Iterable, make: Callable[[dict], T]) -> list[T]:
    made = []
    for number, record in enumerate(records, start=1):
        with user_errors(f"{path}: row {number}", UserError):
            if not isinstance(record, dict):
                raise UserError("not a JSON object")
            made.append(make(record))
    if not made:
        raise UserError(f"{path}: the file is empty; expected a JSON list or one JSON object per line")
    return made


def read_records(name: StrPath, make: Callable[[dict], Any] = dict) -> list:
    """`make` applied to each record of a JSON, JSONL, .gz or Parquet file, or of the hub's OWNER/NAME (train split).

    UserError as in `read_json_or_jsonl`, and with the message of `datasets` for what it cannot read. Other splits and
    subsets of a data set must be saved to a file first.
    """
    path = Path(name)
    if path.exists() and path.suffix != ".parquet":
        return read_json_or_jsonl(name, make)
    import datasets

    if path.exists():
        source = {"path": "parquet", "data_files": glob.escape(str(name))}
    else:
        source = {"path": str(data_folder(str(name)))}
    datasets.disable_progress_bars()
    # A lasting cache would be reused for whatever is at this path later.
    with tempfile.TemporaryDirectory() as cache:
        try:
            records = datasets.load_dataset(**source, split="train", cache_dir=cache)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            why = str(error.__cause__ or error).partition("\n")[0]
            raise UserError(f"{name}: `datasets` cannot read it: {why}") from error
        return _made(name, (_without_nulls(record) for record in records), make)


@functools.cache
def data_folder(name: str) -> Path:
    """The local snapshot of the hub's data set OWNER/NAME. UserError if there is none."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or Path(name).suffix in DATA_FILES:
        raise UserError(f"{name}: no such file")
    from huggingface_hub import snapshot_download

    with user_errors(f"{name}: no such file, and no such data set on the hub or in its cache", OSError, ValueError):
        return Path(snapshot_download(name, repo_type="dataset"))


def _without_nulls(value):
    """A value without null fields, which Arrow adds because every row has the fields of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _parse(text: str, where: StrPath):
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from None


def read_words(path: StrPath, check: Callable[[str], None] = lambda word: None) -> list[str]:
    """The words of a file, one per line, in NFC and stripped of whitespace and invisible characters.

    UserError names the line of a word that `check` refuses by ValueError, or that contains an invisible character, so
    that it could never match a word in a message.
    """
    words = []
    text = unicodedata.normalize("NFC", read_text(path))  # models write "é" as one character, some lists as two
    for number, line in enumerate(text.split("\n"), start=1):
        if word := line.strip(AROUND_WORDS):
            with user_errors(f"{path}:{number}", ValueError, UserError):
                _check_visible(line, word)
                check(word)
            words.append(word)
    if not words:
        raise UserError(f"{path}: no words; expected one per line")
    return words


def _check_visible(line: str, word: str) -> None:
    """UserError for a format character inside a word, such as U+200B, with its position in the line."""
    start = line.index(word)
    for position, character in enumerate(word, start=start + 1):
        if unicodedata.category(character) == "Cf" and character not in JOINERS:
            code = f"U+{ord(character):04X}"
            raise UserError(f"character {position} is the invisible {code}; delete it")


@contextmanager
def replacing(path: StrPath) -> Iterator[IO[bytes]]:
    """Open a file for atomic replacement: readers see the old content or all of the new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: StrPath, text: str) -> None:
    """Write text as UTF-8, gzipped if the path ends in .gz."""
    # Unpaired surrogates, which UTF-8 cannot encode, become escapes that JSON can read.
    content = text.encode("utf-8", "backslashreplace")
    if Path(path).suffix == ".gz":
        content = gzip.compress(content, mtime=0)  # equal texts give equal files
    with replacing(path) as file:
        file.write(content)


def write_json(path: StrPath, value) -> None:
    write_text(path, json.dumps(finite_json(value), ensure_ascii=False, indent=2) + "\n")


def finite_json(value):
    """A value as plain JSON, with null for NaN and infinity."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def write_words(path: StrPath, words: Iterable[str]) -> None:
    write_text(path, "".join(f"{word}\n" for word in words))


def check_record_file(path: StrPath) -> None:
    """UserError unless the file's ending selects a format."""
    if not str(path).endswith(RECORD_FILES):
        raise UserError(f"{path}: unknown ending; use one of {', '.join(RECORD_FILES)}")


def write_records(path: StrPath, records: Iterable[Mapping]) -> None:
    """Write one object per line: as JSON Lines if the path ends in .jsonl or .jsonl.gz, else as a JSON list."""
    check_record_file(path)
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    if str(path).removesuffix(".gz").endswith(".jsonl"):
        write_text(path, "\n".join([*lines, ""]))
    else:
        write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")
