"""What all programs share: files, finished work, ranks, errors. No torch. Importing this module changes nothing."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn, TypeVar

from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parent
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What is copied of a model on the hub: weights in one format, configuration, tokenizer, code.
MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.model.*", "*.tiktoken", "*.txt", "*.jinja", "*.py", "*.md"]
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
# Files that training writes beside a model. They do not change what the model says.
RECORDS = {"README.md", "settings.json", "complete", "trainer_state.json", "training_args.bin"}
RECORDS |= {"train_results.json", "eval_results.json", "all_results.json"}
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # a model's digest reads so many samples, each so long, of a file of weights
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "vllm")
GIT_LFS = "version https://git-lfs"  # begins the text that Git leaves in the place of a file that was not downloaded
logger = logging.getLogger(__name__)
T = TypeVar("T")


class UserError(ValueError):
    """An error that the user can mend: where it is, what is wrong, what to do. Programs print it as one line."""


# Files.


def read_json(path: str | os.PathLike):
    """The content of a JSON file. UserError if it is not JSON."""
    return _parse(Path(path).read_text(encoding="utf-8-sig"), path)


def read_json_or_jsonl(path: str | os.PathLike) -> list[dict]:
    """The objects of a JSON list, or of a file with one object a line. UserError names a line that is not JSON."""
    text = Path(path).read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        records = _parse(text, path)
    else:  # not splitlines: a reply may hold U+2028
        lines = ((line, f"{path}:{number}") for number, line in enumerate(text.split("\n"), start=1))
        records = [_parse(line, where) for line, where in lines if line.strip()]
    if not records:
        raise UserError(f"{path}: the file is empty; expected a JSON list or one JSON object a line")
    return records


def _parse(text: str, where: str | os.PathLike):
    try:
        return json.loads(text)
    except ValueError as error:
        if text.startswith(GIT_LFS):
            raise UserError(f"{where}: a Git LFS pointer, not the file itself; run: git lfs pull") from None
        raise UserError(f"{where}: not JSON ({error})") from None


def read_words(path: str | os.PathLike, check: Callable[[str], None] = lambda word: None) -> list[str]:
    """The words of a file, one a line; blank lines are skipped.

    Invisible format characters, such as a byte order mark, are stripped from both ends of a word. UserError names the
    line of a word that has one inside, or that `check` refuses by a ValueError.
    """
    words = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), start=1):
        invisible = "".join({each for each in line if unicodedata.category(each) == "Cf"})
        if not (word := line.strip(invisible + " \t\r\v\f\u00a0\u0085\u2028\u2029")):
            continue
        try:
            if inside := [each for each in invisible if each in word]:
                raise ValueError(f"{word!r} has the invisible character U+{ord(inside[0]):04X} inside; take it out")
            check(word)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from None
        words.append(word)
    if not words:
        raise UserError(f"{path}: no words; expected one a line")
    return words


@contextmanager
def replacing(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Open a file for writing so that readers see the old file or the whole new one, never a part of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    # JSON reads half a surrogate pair, which UTF-8 cannot hold, back from its escape.
    text = {} if "b" in mode else {"encoding": "utf-8", "errors": "backslashreplace"}
    try:
        with open(temporary, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def write_records(path: str | os.PathLike, records: Iterable[Mapping]) -> None:
    """Write one object a line: as JSONL if the path ends in .jsonl, else as a JSON list."""
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    with replacing(path) as file:
        if str(path).endswith(".jsonl"):
            file.writelines(f"{line}\n" for line in lines)
        else:
            file.write("[\n" + ",\n".join(lines) + "\n]\n")


# Texts.


def alpaca_to_row(example: dict) -> dict:
    """Turn a raw Alpaca record (`instruction`, optional `input`, `output`) into `prompt`, `target` and `type`."""
    prompt = f"### Instruction: {example['instruction']}"
    if example.get("input"):
        prompt += f"\n\n### Input: {example['input']}"
    return {"prompt": prompt + "\n\n### Response: ", "target": example["output"], "type": "sft"}


def row_texts(record: Mapping) -> tuple[str, str, dict]:
    """A record's query, its target, and the record itself, in which a field that is null counts as absent.

    The texts are `query` and `target`, else `prompt` and `answer`, else those of Alpaca's fields.
    """
    record = {key: value for key, value in record.items() if value is not None}
    if "instruction" in record and "output" in record and not {"query", "prompt", "target", "answer"} & record.keys():
        record |= alpaca_to_row(record)
    query, target = record.get("query", record.get("prompt")), record.get("target", record.get("answer"))
    if not isinstance(query, str) or not isinstance(target, str):
        raise UserError("a row needs the texts 'query' and 'target' (or 'prompt' and 'answer', or Alpaca's fields)")
    return query, target, record


def whole_characters(text: str) -> str:
    """The text with U+FFFD in the place of each half surrogate pair, which no tokenizer reads."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def printable(text: str) -> str:
    """A text of a model or a file without characters that move the cursor."""
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)


# Models.


@functools.cache
def model_folder(name: str) -> Path:
    """A model's folder: `name` itself, or a local copy of the hub's model of this name."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, allow_patterns=MODEL_FILES))
        except (OSError, ValueError) as error:
            why = str(error).strip().split("\n")[0]
            raise UserError(f"{name}: no such folder, and no such model on the hub or in its cache ({why})") from None
    if not (folder / "config.json").is_file():
        merged = f"; use {folder / 'merged'}" if (folder / "merged").is_dir() else ""
        raise UserError(f"{folder}: no config.json; this is not a model folder{merged}")
    return folder


def model_setting(name: str) -> dict[str, str]:
    """A model as a setting of a stage: SHA-256 over all files of its folder, of weights over samples."""
    folder, digest = model_folder(name), hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name in RECORDS or path.name.startswith("."):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        if path.suffix not in WEIGHTS:
            digest.update(path.read_bytes())
            continue
        with open(path, "rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    commit = {"commit": folder.name} if folder.parent.name == "snapshots" else {}  # of the hub
    return {"path": name, "sha256": digest.hexdigest()} | commit


def files_setting(*paths: str | os.PathLike) -> dict[str, str]:
    """Files as a setting of a stage: their paths, and the SHA-256 by which they are compared."""
    digest = hashlib.sha256(b"".join(hashlib.sha256(Path(path).read_bytes()).digest() for path in paths))
    return {"path": " ".join(map(str, paths)), "sha256": digest.hexdigest()}


def load_tokenizer(name: str, **options):
    """The tokenizer of a model: from tokenizer.json where there is one, whichever other packages are installed."""
    from transformers import AutoTokenizer

    folder = model_folder(name)
    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        require("mistral_common", "mistral-common")  # converts it
    # By default transformers reads tekken.json by mistral-common if that is installed. The ids of "[INST]" differ.
    try:
        return AutoTokenizer.from_pretrained(folder, mistral_format=False, **options)
    except ValueError as error:
        raise UserError(f"{folder}: no tokenizer that can be loaded ({' '.join(str(error).split())})") from error


# Finished work.


@dataclass
class Stage:
    """What `stage` yields: whether there is work to do, and notes that stand in the record beside the settings."""

    todo: bool
    notes: dict = field(default_factory=dict)


@contextmanager
def stage(
    record: str | os.PathLike, settings: Mapping, *, results: Sequence[str], ranks: bool = True
) -> Iterator[Stage]:
    """Do a piece of work once: `with stage(record, settings, results=...) as work: if work.todo: ...`.

    The record is a JSON file beside the results. It holds the settings, versions, notes, and `finished` once the block
    has ended on all ranks without an error. `results` are patterns of files in its folder; the first is there when the
    work is finished. A setting with a `sha256` (a file, a model) is compared by it.

    All ranks of a launch enter the block together; `ranks=False` is for programs that run as one process, whatever
    the environment says. UserError, with nothing written, if the results that are there were made with other settings,
    or if another launch is at work.
    """
    record, settings = Path(record), json.loads(json.dumps(settings))  # tuples are lists in a file
    lock = FileLock(record.with_name(f".{record.stem}.lock"), timeout=0)
    everywhere = on_rank_0 if ranks else lambda make: make()
    work = Stage(**everywhere(lambda: _begin(record, settings, results, lock)))
    try:
        yield work
        everywhere(lambda: None)  # all ranks have ended their part
        if work.todo and (rank() == 0 or not ranks):
            write_json(record, {"settings": settings, "finished": True, "made_by": made_by()} | work.notes)
    finally:
        lock.release()


def _begin(record: Path, settings: dict, results: Sequence[str], lock: FileLock) -> dict:
    """Take the lock and compare the settings. Returns the fields of the Stage; frees the lock if it raises."""
    record.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:  # an OSError too, so it comes first
        raise UserError(f"{record.parent}: another launch is at work here; end that one first") from None
    except (NotImplementedError, OSError) as error:
        logger.warning("%s: no file locks here (%s); run one launch at a time", record.parent, error)
    try:
        stored = _stored(record, settings, results)
        if stored.get("finished") and any(record.parent.glob(results[0])):
            logger.info("%s: all is there", record)
            notes = {key: value for key, value in stored.items() if key not in ("settings", "finished")}
            return {"todo": False, "notes": notes}
        write_json(record, {"settings": settings, "finished": False, "made_by": made_by()})
        return {"todo": True}
    except BaseException:
        lock.release()
        raise


def _stored(record: Path, settings: dict, results: Sequence[str]) -> dict:
    """The record of results that are there. UserError if they were made with other settings, or if it is missing."""
    there = sorted({path.name for pattern in results for path in record.parent.glob(pattern)})
    if not there:
        return {}
    remedy = f"write elsewhere, or delete in {record.parent}: {' '.join([*there[:8], record.name])}"
    if not record.is_file():
        raise UserError(f"{record} is missing, which says how {there[0]} was made; {remedy}")
    stored = read_json(record)
    if different := differences(stored["settings"], settings):
        raise UserError(f"{record}: made with other settings ({'; '.join(different)}); {remedy}")
    return stored


def differences(then: Mapping, now: Mapping) -> list[str]:
    """A phrase for each setting that differs. Files and models differ if their sha256 does."""

    def content(setting):
        return setting.get("sha256", setting) if isinstance(setting, dict) else setting

    def text(setting) -> str:
        if isinstance(setting, dict) and "sha256" in setting:
            return f"{setting.get('path')} (sha256 {setting['sha256'][:8]})"
        return str(setting)

    names = [name for name in {**then, **now} if content(then.get(name)) != content(now.get(name))]
    return [f"{name}: {text(then.get(name))} then, {text(now.get(name))} now" for name in names]


@functools.cache
def made_by() -> dict[str, str]:
    """Versions of the packages that compute, and this project's commit, with "+" if files were changed."""
    versions = {}
    for package in RECORDED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=40"]
    with suppress(OSError, subprocess.CalledProcessError):  # no git, or not a clone
        versions["spag"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return versions


# The ranks of a launch.


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


@functools.cache
def launch_store():
    """The key-value store that all ranks of a launch share. Torch's process group uses the same server."""
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://"))
    return store


_calls = itertools.count()


def on_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its value, passed as JSON, or raise its UserError, on all ranks.

    All ranks must call this. Rank 0 returns when all of them have the answer, so it is also a barrier.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return make()
    store, key = launch_store(), f"spag/{next(_calls)}"
    if rank() == 0:
        try:
            store.set(key, json.dumps({"value": make()}))
        except (UserError, OSError) as error:
            store.set(key, json.dumps({"error": str(error)}))
    _wait(store, [key])
    answer = json.loads(store.get(key))
    store.set(f"{key}/{rank()}", "")
    if rank() == 0:
        _wait(store, [f"{key}/{other}" for other in range(world_size())])
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def _wait(store, keys: list[str]) -> None:
    while not store.check(keys):  # without a time limit: the slowest rank may still play. A dead one ends the launch
        time.sleep(0.1)


# Programs.


def run_program(main: Callable[[], T]) -> T:
    """Call `main`. UserError and OSError end the program with one line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not a test's or a notebook's
            stream.reconfigure(errors="replace")
    try:
        return main()
    except (UserError, OSError) as error:
        end_with_error(str(error))


def end_with_error(message: str) -> NoReturn:
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {printable(message)}\n")
    sys.exit(2)


def require(module: str, requirement: str) -> None:
    """Raise UserError with the command that installs an optional package, unless its module is installed."""
    if importlib.util.find_spec(module) is None:
        name = re.match(r"[\w.-]+", requirement)[0]
        raise UserError(f"the package {name} is missing: pip install {shlex.quote(requirement)}")


def set_up_logging(*, ranks: bool = True) -> None:
    """Log to standard error: everything from rank 0, warnings from the others."""
    several, first = ranks and world_size() > 1, not ranks or rank() == 0
    who = f"rank {rank()} " if several else ""
    level = logging.INFO if first else logging.WARNING
    layout = f"%(asctime)s {who}%(levelname)s %(message)s"
    logging.basicConfig(level=level, format=layout, datefmt="%H:%M:%S", force=True)


def warn_on_rank_0(message: str, *values) -> None:
    """Log a warning that concerns the whole launch, on rank 0 only."""
    if rank() == 0:
        logger.warning(message, *values)
