"""What every program shares: reading and writing files, the rank of this process, special tokens. No torch."""

import argparse
import ctypes
import dataclasses
import difflib
import hashlib
import json
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar, get_args, get_origin, get_type_hints

CHUNK = 1 << 20  # characters or bytes read at a time
UNDECODABLE = re.compile(r"[\udc80-\udcff]")  # what stands for bytes that are no UTF-8, where faults are skipped
PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal that a process gets when its parent dies
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # per weights file, read for the fingerprint of a model
BLANKS = re.compile(r"\s*")
logger = logging.getLogger(__name__)
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
T = TypeVar("T")


class BadRecordError(ValueError):
    """An unreadable or invalid record of a file; the message starts with the file and the line."""


# --- reading -------------------------------------------------------------------------------------------------------


def open_text(path: str | os.PathLike, *, errors: str = "strict"):
    """Open a UTF-8 file, with or without a byte order mark, with any line ending; FileNotFoundError names the path."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    return open(path, encoding="utf-8-sig", errors=errors)


def log_skipped(message: str) -> None:
    """Say that a bad record was passed over."""
    logger.warning("skipped: %s", message)


def iter_records(
    path: str | os.PathLike, *, skip_bad: bool = False, on_skip: Callable[[str], None] = log_skipped
) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", object) for every object of a JSON list or JSONL file, in constant memory.

    A file whose first character is "[" is one JSON list, any other is JSONL (blank lines are passed over).
    `skip_bad` passes over JSONL lines that are no objects and ends a list at its first fault, telling `on_skip`.

    Raises FileNotFoundError; ValueError for an empty file; BadRecordError for text that is not JSON or not UTF-8,
    a list that is cut off, and a record that is not an object.
    """
    try:
        with open_text(path, errors="surrogateescape" if skip_bad else "strict") as file:
            first = _first_character(file)
            if not first:
                raise ValueError(f"{path}: the file is empty; expected a JSON list or one JSON object per line")
            if first == "[":
                yield from _iter_list(path, file, on_skip if skip_bad else None)
            else:
                yield from _iter_lines(path, file, on_skip if skip_bad else None)
    except UnicodeDecodeError as error:
        raise BadRecordError(f"{path}:{_undecodable_line(path)}: not UTF-8 ({error.reason})") from None


def read_json_or_jsonl(path: str | os.PathLike) -> list[dict]:
    """Every object of a JSON list or JSONL file; errors as in `iter_records`."""
    return [record for _, record in iter_records(path)]


def _first_character(file) -> str:
    """The first character that is not blank, or "" if there is none; the file is wound back to its start."""
    first = ""
    while not first and (chunk := file.read(CHUNK)):
        first = chunk.lstrip()[:1]
    file.seek(0)
    return first


def _undecodable_line(path) -> int:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return number


def _iter_lines(path, file, on_skip: Callable[[str], None] | None) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if UNDECODABLE.search(line):
            _fault(f"{where}: not UTF-8", on_skip)
            continue
        try:
            yield where, _as_object(json.loads(line), where)
        except json.JSONDecodeError as error:
            _fault(f"{where}: not a JSON object on one line ({error.msg}, column {error.colno})", on_skip)
        except BadRecordError as error:
            _fault(str(error), on_skip)
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            _fault(f"{where}: JSON that Python does not read ({error})", on_skip)


def _iter_list(path, file, on_skip: Callable[[str], None] | None) -> Iterator[tuple[str, dict]]:
    reader = _JSONListReader(path, file)
    try:
        separator = reader.take("[")
        if reader.peek() == "]":
            separator = reader.take("]")
        while separator != "]":
            yield reader.element()
            separator = reader.take(",]")
        reader.end()
    except BadRecordError as error:
        _fault(f"{error} (the rest of the file is lost)" if on_skip else str(error), on_skip)


def _as_object(record, where: str) -> dict:
    if not isinstance(record, dict):
        raise BadRecordError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _fault(message: str, on_skip: Callable[[str], None] | None) -> None:
    if on_skip is None:
        raise BadRecordError(message)
    on_skip(message)


class _JSONListReader:
    """Takes the elements of one large JSON list off a file, holding a chunk of it at a time."""

    def __init__(self, path, file):
        self.path, self.file, self.decoder = path, file, json.JSONDecoder()
        self.buffer, self.position, self.line, self.at_end = "", 0, 1, False

    def peek(self) -> str:
        """Pass over blanks; the next character, or "" at the end of the file."""
        while True:
            blanks = BLANKS.match(self.buffer, self.position)
            self._advance(blanks.end())
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if self.at_end:
                return ""
            self._fill()

    def take(self, expected: str) -> str:
        """Take one character, which must be one of `expected`."""
        found = self.peek()
        if not found:
            raise BadRecordError(f"{self.path}:{self.line}: the JSON list has no end; was the file cut off?")
        if found not in expected:
            raise BadRecordError(f"{self.path}:{self.line}: expected one of {expected!r}, found {found!r}")
        self._advance(self.position + 1)
        return found

    def element(self) -> tuple[str, dict]:
        """Take one element of the list."""
        self.peek()
        where = f"{self.path}:{self.line}"
        while True:
            try:
                record, end = self.decoder.raw_decode(self.buffer, self.position)
                break
            except json.JSONDecodeError as error:
                if self.at_end:
                    raise BadRecordError(f"{where}: not JSON, or the file was cut off here ({error.msg})") from None
                self._fill()
            except (ValueError, RecursionError) as error:
                raise BadRecordError(f"{where}: JSON that Python does not read ({error})") from None
        if UNDECODABLE.search(self.buffer, self.position, end):
            raise BadRecordError(f"{where}: not UTF-8")
        self._advance(end)
        return where, _as_object(record, where)

    def end(self) -> None:
        """Nothing but blanks may follow the list."""
        if found := self.peek():
            raise BadRecordError(f"{self.path}:{self.line}: {found!r} after the end of the JSON list; one list a file")

    def _advance(self, position: int) -> None:
        self.line += self.buffer.count("\n", self.position, position)
        self.position = position

    def _fill(self) -> None:
        rest = self.buffer[self.position :]
        more = self.file.read(max(CHUNK, len(rest)))  # at least doubles, so that one huge element stays linear
        self.buffer, self.position, self.at_end = rest + more, 0, not more


def read_words(path: str | os.PathLike, check: Callable[[str], None] = lambda word: None) -> list[str]:
    """The words of a list, one a line; blank lines are passed over, repeated words kept.

    Raises FileNotFoundError; ValueError for a list without words, for text that is not UTF-8, and, with its line, for
    a word that `check` raises ValueError for.
    """
    words = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        try:
            if word := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                check(word)
                words.append(word)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: not UTF-8 ({error.reason})") from None
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not words:
        raise ValueError(f"{path}: no words; expected one a line")
    return words


# --- writing -------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a file to write that a reader finds whole or not at all: a temporary file beside it takes its place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    with replacing(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def write_records(path: str | os.PathLike, records: Iterable[dict]) -> None:
    """Write records one a line as they come, whole or not at all: as JSONL to *.jsonl, else as one JSON list."""
    lines = str(path).endswith(".jsonl")
    with replacing(path) as file:
        before, after = ("", "\n") if lines else ("[\n", "")
        for record in records:
            file.write(before + json.dumps(record, ensure_ascii=False) + after)
            before = before and ",\n"
        if not lines:
            file.write("[]\n" if before == "[\n" else "\n]\n")


# --- data ----------------------------------------------------------------------------------------------------------


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


def remember_settings(path: Path, made_with: dict) -> None:
    """Write down what results are made with; ValueError if those that are there were made with something else."""
    if path.is_file():
        then = json.loads(path.read_text(encoding="utf-8"))
        if different := [key for key in {**then, **made_with} if then.get(key) != made_with.get(key)]:
            raise ValueError(f"{path}: made with other settings ({', '.join(different)}); use another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, made_with)


def file_digest(paths: Iterable[str | os.PathLike]) -> str:
    """SHA-256 over the contents of the files, in the order given."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(_sha256(path).digest())
    return whole.hexdigest()


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of one file, as sha256sum prints it."""
    return _sha256(path).hexdigest()


def _sha256(path: str | os.PathLike):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest


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


# --- checkpoints ---------------------------------------------------------------------------------------------------

COMPLETE = "complete.json"  # written last into a checkpoint folder: the size of every other file in it


def mark_complete(folder: str | os.PathLike) -> None:
    """Write down that a checkpoint folder is whole."""
    folder = Path(folder)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    write_json(folder / COMPLETE, sizes)


def is_complete(folder: str | os.PathLike) -> bool:
    """Whether a checkpoint folder was written to its end and still has all its files."""
    folder = Path(folder)
    if not (folder / COMPLETE).is_file():
        return False
    sizes = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The checkpoint folders of a run, by step, whole or not."""
    found = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in Path(output_dir).glob("checkpoint-*")}
    return sorted((path for path in found if found[path]), key=lambda path: int(found[path][1]))


def last_complete_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The checkpoint folder of the highest step that is whole; None where there is none."""
    whole = [path for path in checkpoints(output_dir) if is_complete(path)]
    if not whole and checkpoints(output_dir):
        logger.warning("%s: none of its checkpoints is whole; starting from the beginning", output_dir)
    return str(whole[-1]) if whole else None


# --- programs ------------------------------------------------------------------------------------------------------


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
        inner = [hint for hint in get_args(hints[each.name]) if hint is not type(None)]
        several = list in (get_origin(hints[each.name]), *map(get_origin, inner))
        plain = get_args(inner[0])[0] if inner and get_args(inner[0]) else inner[0] if inner else hints[each.name]
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        needed = default is dataclasses.MISSING
        settings = {"type": parse_bool if plain is bool else plain, "nargs": "+" if several else None}
        line = each.metadata["help"]
        if not needed and default not in (None, []):
            line += f" (default: {' '.join(map(str, default)) if several else default})"
        names = [f"--{name}" for name in (each.name, *each.metadata["names"])]
        settings |= {"required": needed, "default": None if needed else default, "help": line.replace("%", "%%")}
        parser.add_argument(*names, dest=each.name, **settings | each.metadata["settings"])


def parse_flags(kind: type[T], argv: Sequence[str] | None = None, *, description: str) -> T:
    """Read the command line into a dataclass of `flag` fields; ends the program with a remedy for a wrong flag."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add_flags(parser, kind)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        parser.error(
            "; ".join(unknown_flag(word, known) for word in unknown if word.startswith("-"))
            or f"{unknown[0]!r} belongs to no flag"
        )
    return kind(**vars(values))


def unknown_flag(flag_given: str, known: Iterable[str]) -> str:
    """What to say of a flag that does not exist, with the one that was probably meant."""
    close = difflib.get_close_matches(flag_given.split("=")[0], list(known), n=1)
    return f"unknown flag {flag_given}" + (f"; did you mean {close[0]}?" if close else "")


def too_small(flags, **least: float) -> list[str]:
    """One phrase for each of these flags that is set to less than its least value."""
    values = {name: getattr(flags, name) for name in least}
    return [
        f"--{name} is {values[name]}; it must be at least {minimum}"
        for name, minimum in least.items()
        if values[name] is not None and not values[name] >= minimum
    ]


def run_program(main: Callable[[], T]) -> T:
    """Run a program or its first part; bad input (ValueError, OSError) ends it with its message and exit status 2."""
    try:
        return main()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {error}\n")
        sys.exit(2)


# --- processes -----------------------------------------------------------------------------------------------------


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
    """End this process when torchrun is killed: its orphans would write on into the files of the next launch."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """End this process when the thread that started it ends, however that is; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_up_logging() -> None:
    """Log to standard error: everything from rank 0, warnings from the others."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of libraries, each step
    who = f"rank {rank()} " if world_size() > 1 else ""
    logging.basicConfig(
        level=logging.INFO if rank() == 0 else logging.WARNING,
        format=f"%(asctime)s {who}%(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


def warn_once(message: str, *values) -> None:
    """Log a warning that concerns the whole launch: on rank 0 only."""
    if rank() == 0:
        logger.warning(message, *values)


# --- tokenizers ----------------------------------------------------------------------------------------------------


def ensure_pad_token(tokenizer) -> None:
    """Give a tokenizer without PAD its EOS for padding. The vocabulary is never resized: that would break the KL.

    Raises ValueError for a tokenizer with neither.
    """
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has neither a PAD nor an EOS token")
    tokenizer.pad_token = tokenizer.eos_token
