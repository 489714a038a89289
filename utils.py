"""What all programs share: errors, ranks, files, models, finished work. No torch; importing this changes nothing.

So programs without a model start quickly, and the loop, which imports this, touches no GPU.
"""

import errno
import functools
import glob
import gzip
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
import tempfile
import time
import unicodedata
import uuid
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parent
BOOLEANS = ("true", "false")
INTERRUPTED = 130  # exit status after Ctrl-C
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What is copied of a model on the hub: weights in one format, configuration, tokenizer, code.
MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.model.*", "*.tiktoken", "*.txt", "*.jinja", "*.py", "*.md"]
BYTE_LEVEL = re.compile(r'"type":\s*"ByteLevel"')
TWICE = ["consolidated*", "original/*"]  # the same weights in another layout
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
# What templates that tell the date are given, so that prompts do not change from day to day: the default of Llama 3's.
DAY = "26 Jul 2024"
FIXED_DAY = f"{{%- macro strftime_now(format) -%}}{DAY}{{%- endmacro -%}}"
SAMPLES = 4096  # of a file of weights, which a model's digest reads
SAMPLE_BYTES = 4096  # the length of a sample
# Files that training writes beside a model. They do not change what the model says.
RECORDS = {
    "README.md",
    "settings.json",
    "complete",
    "trainer_state.json",
    "training_args.bin",
    "train_results.json",
    "eval_results.json",
    "all_results.json",
}
# Encoders that transformers loads as causal language models too. They read ahead unless `is_decoder` is true.
ENCODERS = {
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
JOINERS = "\u200c\u200d"  # format characters that belong to words: Persian and Hindi are spelled with them, and emoji
AROUND_WORDS = " \t\r\v\f\u00a0\u00ad\u200b\ufeff"  # blanks, also invisible ones
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EROFS, errno.ENOLCK)  # errors of file systems that know no locks
OF_STAGE = ("settings", "finished", "made_by")  # fields of a record; all others are notes
DATA_FILES = (".json", ".jsonl", ".gz", ".parquet", ".csv")  # a name that ends so is a file, no data set of the hub
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "vllm")
logger = logging.getLogger(__name__)
T = TypeVar("T")
StrPath = str | os.PathLike


# Programs and their errors.


class UserError(ValueError):
    """An error that the user can mend: where it is, what is wrong, what to do. Programs print it as one line."""


@contextmanager
def user_errors(where: object, *types: type[BaseException]) -> Iterator[None]:
    """Raise errors of these types as UserError: where, and the first line of what the library said.

    For the places where a library reads what a person gave. A person's own code does not belong inside. A UserError
    gets no second `where` unless it is among the types. An ImportError counts only if a library raised it by hand, to
    name a package; Python's own, which have a name, come from inside an installed package.
    """
    try:
        yield
    except types as error:
        if isinstance(error, UserError) and UserError not in types:
            raise
        if _comes_from_inside_a_package(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(f"{where}: {first_line or type(error).__name__}") from error


def _comes_from_inside_a_package(error: BaseException) -> bool:
    """Whether Python's import raised this error, and not a library by hand."""
    return isinstance(error, ImportError) and (error.name is not None or type(error) is not ImportError)


def run_program(
    main: Callable[[], T], *, ranks: bool = False, kept: str = "nothing is half done; the same command begins again"
) -> T:
    """Set up logging and call `main`. UserError and OSError end the program with one line and exit status 2.

    Ctrl-C ends it with one line and status 130. `kept` says there what is kept and what the same command does next.
    """
    set_up_logging(ranks=ranks)
    if isinstance(sys.stdout, io.TextIOWrapper):  # not a test's or a notebook's
        sys.stdout.reconfigure(errors="replace")
    try:
        return main()
    except (UserError, OSError) as error:
        end_with_error(str(error))
    except KeyboardInterrupt:
        if not ranks or rank() == 0:
            sys.stderr.write(f"\n{Path(sys.argv[0]).name}: stopped; {kept}\n")
        sys.exit(INTERRUPTED)


def end_with_error(message: str) -> NoReturn:
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {printable(message)}\n")
    sys.exit(2)


def printable(text: str) -> str:
    """A text of a model or a file without characters that move the cursor."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def require(module: str, requirement: str) -> None:
    """Raise UserError with the command that installs an optional package, unless its module is installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {module} is missing: pip install {shlex.quote(requirement)}")


def set_up_logging(*, ranks: bool) -> None:
    """Log to standard error: everything from rank 0, warnings from the others."""
    who = f"rank {rank()} " if ranks and world_size() > 1 else ""
    level = logging.WARNING if ranks and rank() > 0 else logging.INFO
    form = f"%(asctime)s {who}%(levelname)s %(message)s"
    logging.basicConfig(level=level, format=form, datefmt="%Y-%m-%d %X", force=True)
    for library in ("openai", "httpx", "httpx2"):  # they log each request
        logging.getLogger(library).setLevel(logging.WARNING)


def warn_on_rank_0(message: str, *values) -> None:
    if rank() == 0:
        logger.warning(message, *values)


def with_values(argv: Iterable[str], booleans: Collection[str]) -> list[str]:
    """A command line in which each of these flags that stands without True or False has the value True.

    So `--x` means `--x True`, and `--x FOLDER` leaves the folder to the program.
    """
    argv = list(argv)
    filled = []
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        filled.append(argument)
        if argument in booleans and following.lower() not in BOOLEANS:
            filled.append("True")
    return filled


def parse_bool(text: str) -> bool:
    """The `type` of boolean flags."""
    if text.lower() not in BOOLEANS:
        raise ArgumentTypeError(f"expected True or False, got {text!r}")
    return text.lower() == "true"


def run_python(*argv) -> None:
    """Run Python with these arguments, as texts; CalledProcessError if it fails."""
    subprocess.run([sys.executable, *map(str, argv)], check=True)


# The ranks of a launch.

_calls = itertools.count()  # of on_rank_0


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def check_gpus(gpus: int, gpus_of_process: int = 1, processes: int = 1) -> None:
    """UserError that names both numbers if this machine's processes use more than its `gpus`."""
    last = int(os.environ.get("LOCAL_RANK", 0)) + 1
    processes = max(processes, last, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    needed = processes * gpus_of_process
    if needed > gpus:
        raise UserError(
            f"{processes} processes on this machine need {needed} GPUs; it has {gpus}. Start at most "
            f"{gpus // gpus_of_process} (torchrun --nproc_per_node; in the loop processes)"
        )


def warn_of_idle_gpu() -> None:
    """Warn of an NVIDIA GPU on a machine where PyTorch sees none, unless CUDA_VISIBLE_DEVICES hides it."""
    if Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        why = "its build may be one for CPUs, or the driver too old"
        warn_on_rank_0("the CPU computes, because PyTorch cannot use the GPU of this machine: %s", why)


@functools.cache
def launch_store():
    """The key-value store that all ranks of a launch share. Torch's process group uses the same server."""
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://"))
    return store


def on_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its value, passed as JSON, or raise its UserError, on all ranks.

    All ranks must call this. A barrier for rank 0 only, which waits for all; the others wait for rank 0's answer. It
    goes through the launcher's store, because play makes no process group, and NCCL's would end a long wait.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return make()
    store = launch_store()
    key = f"spag/{next(_calls)}"
    if rank() == 0:
        try:
            store.set(key, json.dumps({"value": make()}))
        except (UserError, OSError) as error:
            store.set(key, json.dumps({"error": str(error)}))
    while not store.check([key]):  # without a time limit: rank 0 may have to wait for the slowest game
        time.sleep(0.1)
    answer = json.loads(store.get(key))
    store.add(f"{key}/heard", 1)
    while rank() == 0 and store.add(f"{key}/heard", 0) < world_size():
        time.sleep(0.1)
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def barrier() -> None:
    """Wait until all ranks have come here."""
    on_rank_0(lambda: None)  # rank 0 goes on when all have called it
    on_rank_0(lambda: None)  # and lets the others go on


def is_first_of_machine() -> bool:
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def on_each_machine(make: Callable[[], None]) -> None:
    """Call `make` in the first process of each machine; all ranks wait, and raise a UserError of rank 0's."""
    if rank() > 0 and is_first_of_machine():
        make()
    on_rank_0(make)
    barrier()


# Files and what stands in them.


def read_text(path: StrPath) -> str:
    """The text of a file, which may be gzipped, without a byte order mark. UserError if it is not UTF-8."""
    try:
        with (gzip.open if Path(path).suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text in UTF-8; save it as UTF-8") from None


def read_json(path: StrPath):
    """The content of a JSON file. UserError if it is not JSON."""
    return _parse(read_text(path), path)


def read_json_or_jsonl(path: StrPath, make: Callable[[dict], Any] = dict) -> list:
    """`make` of each object of a JSON list, or of a file with one object a line.

    UserError names a line that is not JSON, a row that is no object, and a row of which `make` raises one.
    """
    text = read_text(path)
    if text.lstrip().startswith("["):
        records = _parse(text, path)
    else:  # not splitlines: a reply may hold U+2028
        lines = enumerate(text.split("\n"), start=1)
        records = [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
    return _made(path, records, make)


def _made(path: StrPath, records: Iterable, make: Callable[[dict], T]) -> list[T]:
    """`make` of each record. UserError names a row that is no object, and one of which `make` raises a UserError."""
    made = []
    for number, record in enumerate(records, start=1):
        with user_errors(f"{path}: row {number}", UserError):
            if not isinstance(record, dict):
                raise UserError("not a JSON object")
            made.append(make(record))
    if not made:
        raise UserError(f"{path}: the file is empty; expected a JSON list or one JSON object a line")
    return made


def read_records(name: StrPath, make: Callable[[dict], Any] = dict) -> list:
    """`make` of each record of a JSON, JSONL, .gz or Parquet file, or of the training split of the hub's OWNER/NAME.

    UserError as of `read_json_or_jsonl`, and in the words of `datasets` for what it cannot read. For another split or
    subset of a data set, write it to a file of your own: a name has no place for it.

    `rows_setting` shows a further start whether a file of rows, or the commit of a data set, has changed.
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
    # Its copy of the data would stand for whatever lies at this path later, so it does not outlive this call.
    with tempfile.TemporaryDirectory() as cache:
        try:
            records = datasets.load_dataset(**source, split="train", cache_dir=cache)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            why = str(error.__cause__ or error).partition("\n")[0]
            raise UserError(f"{name}: `datasets` cannot read it: {why}") from error
        return _made(name, (_without_nulls(record) for record in records), make)


@functools.cache
def data_folder(name: str) -> Path:
    """A local copy of the hub's data set OWNER/NAME, in the cache of huggingface_hub. UserError if there is none."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or Path(name).suffix in DATA_FILES:
        raise UserError(f"{name}: no such file")
    from huggingface_hub import snapshot_download

    with user_errors(f"{name}: no such file, and no such data set on the hub or in its cache", OSError, ValueError):
        return Path(snapshot_download(name, repo_type="dataset"))


def _without_nulls(value):
    """A value of an Arrow table without the fields that are null: all rows have all fields that any row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _parse(text: str, where: StrPath):
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from None


def read_words(path: StrPath, check: Callable[[str], None] = lambda word: None) -> list[str]:
    """The words of a file, one a line, without blanks and invisible characters (a byte order mark) at their ends.

    UserError names the line of a word that holds an invisible character, with which no said word would be equal, or
    that `check` refuses by ValueError.
    """
    words = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if word := line.strip(AROUND_WORDS):
            with user_errors(f"{path}:{number}", ValueError, UserError):
                _check_visible(line, word)
                check(word)
            words.append(word)
    if not words:
        raise UserError(f"{path}: no words; expected one a line")
    return words


def _check_visible(line: str, word: str) -> None:
    """Raise UserError for a format character inside a word, such as U+200B; it names its position in the line."""
    start = line.index(word)
    for position, character in enumerate(word, start=start + 1):
        if unicodedata.category(character) == "Cf" and character not in JOINERS:
            code = f"U+{ord(character):04X}"
            raise UserError(f"character {position} is the invisible {code}, which nobody says; delete it")


@contextmanager
def replacing(path: StrPath) -> Iterator[IO[bytes]]:
    """Open a file for writing so that readers see the old file or the whole new one, never a part of it."""
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
    with replacing(path) as file:
        # JSON reads half a surrogate pair, which UTF-8 cannot hold, back from its escape.
        file.write(text.encode("utf-8", "backslashreplace"))


def write_json(path: StrPath, value) -> None:
    """Write a value as JSON, as `finite_json` makes it."""
    write_text(path, json.dumps(finite_json(value), ensure_ascii=False, indent=2) + "\n")


def finite_json(value):
    """A value as JSON can hold it, which knows no NaN and no infinity: null stands for them."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def write_words(path: StrPath, words: Iterable[str]) -> None:
    write_text(path, "".join(f"{word}\n" for word in words))


def write_records(path: StrPath, records: Iterable[Mapping]) -> None:
    """Write one object a line: as JSONL if the path ends in .jsonl, else as a JSON list."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    if str(path).endswith(".jsonl"):
        write_text(path, "\n".join([*lines, ""]))
    else:
        write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")


def alpaca_to_row(example: dict) -> dict:
    """Turn a raw Alpaca record (`instruction`, optional `input`, `output`) into `prompt`, `target` and `type`.

    In rows with a chat template `sft_row` in tools/selfplay/rows.py takes `alpaca_to_turn` in its place.
    """
    instruction, given, output = alpaca_texts(example)
    context = f"\n\n### Input: {given}" if given else ""
    prompt = f"### Instruction: {instruction}{context}\n\n### Response: "
    return {"prompt": prompt, "target": output, "type": "sft"}


def alpaca_texts(example: Mapping) -> tuple[str, str, str]:
    """Instruction, input (empty if it is null or missing) and output. UserError for one that is no text."""
    given = "" if example.get("input") is None else example["input"]
    texts = {"instruction": example["instruction"], "input": given, "output": example["output"]}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"Alpaca's {name!r} must be a text, not {text!r:.60}")
    return texts["instruction"], texts["input"], texts["output"]


def read_row(record: Mapping, from_alpaca: Callable[[dict], dict] = alpaca_to_row) -> dict:
    """A record of a row with its texts as `query` and `target`, or else its conversation as `messages` and `tools`.

    A field that is null counts as absent, and messages count where there is no target. `from_alpaca` makes prompt and
    target of Alpaca's fields. UserError for a record with neither texts nor a conversation.

    A further format is turned into one of the two here. If it becomes a conversation, `sft_row` in
    tools/selfplay/rows.py must change too: it copies the record's own `messages`, not those that this returns.
    """
    row = {key: value for key, value in record.items() if value is not None}
    messages = row.pop("messages", None)
    if messages and not {"target", "answer", "output"} & row.keys():
        return row | {"messages": _conversation(messages), "tools": _tools(row.get("tools"))}
    if {"instruction", "output"} <= row.keys() and not {"query", "prompt", "target", "answer"} & row.keys():
        row |= from_alpaca(row)
    query = row.get("query", row.get("prompt"))
    target = row.get("target", row.get("answer"))
    if not isinstance(query, str) or not isinstance(target, str):
        forms = "'query' and 'target' (or 'prompt' and 'answer'), 'messages', or Alpaca's 'instruction' and 'output'"
        raise UserError(f"a row needs the texts {forms}; this one has {', '.join(map(repr, row))}")
    return row | {"query": query, "target": target}


def _conversation(messages) -> list[dict]:
    """The messages of a record, each content as a text.

    A content is a text or a list of parts, all of them texts; beside tool calls it may be null. The arguments of a
    tool call may be a JSON text, as OpenAI writes them, and become an object, as chat templates take them.
    """
    messages = messages if isinstance(messages, list) else [messages]
    return [_with_arguments(_in_text(message)) for message in messages]


def _in_text(message) -> dict:
    match message:
        case {"role": str(), "content": str()}:
            return message
        case {"content": [{"type": "text", "text": str(text)}, *others]}:
            rest = _in_text(message | {"content": others or ""})
            return rest | {"content": text + rest["content"]}
        case {"tool_calls": [_, *_]} if message.get("content") is None:
            return _in_text(message | {"content": ""})
    raise UserError(f"a message needs 'role' and 'content' (not 'from' and 'value'), both texts: {message!r:.80}")


def _with_arguments(message: dict) -> dict:
    """The message, the arguments of its tool calls as objects."""
    calls = message.get("tool_calls")
    return message | {"tool_calls": list(map(_with_object, calls))} if isinstance(calls, list) else message


def _with_object(call):
    match call:
        case {"function": {"arguments": str()} as function}:
            return call | {"function": _with_object(function)}
        case {"arguments": str(text)}:
            arguments = _parse(text, f"a tool call's 'arguments' {text:.60}")
            if not isinstance(arguments, dict):
                raise UserError(f"a tool call's 'arguments' must be a JSON object, not {text:.60}")
            return call | {"arguments": arguments}
    return call


def _tools(tools) -> list | None:
    """The tools that a record's conversation may call, a list or the JSON text of one; None if there are none."""
    tools = tools or None
    tools = _parse(tools, "'tools'") if isinstance(tools, str) else tools
    if not isinstance(tools, list | None):
        raise UserError(f"'tools' must be a list, not {tools!r:.60}")
    return tools or None


def chat_text(tokenizer, messages: list[dict], **options) -> str:
    """Messages in the tokenizer's chat template, on a fixed day; `options` are those of `apply_chat_template`."""
    template = tokenizer.get_chat_template()
    template = (FIXED_DAY if "strftime_now" in template else "") + template
    options |= {"chat_template": template, "date_string": DAY, "tokenize": False}
    return tokenizer.apply_chat_template(messages, **options)


def whole_characters(text: str) -> str:
    """The text with U+FFFD in the place of each half surrogate pair, which no tokenizer reads."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# Models.


@functools.cache
def model_folder(name: str) -> Path:
    """A model's folder: `name` itself, or a local copy of the hub's model of this name.

    UserError if it holds no model, or a model and an adapter.
    """
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        with user_errors(f"{name}: no such folder, and no such model on the hub or in its cache", OSError, ValueError):
            folder = Path(snapshot_download(name, allow_patterns=MODEL_FILES, ignore_patterns=TWICE))
    has_config = (folder / "config.json").is_file()
    has_adapter = (folder / "adapter_config.json").is_file()
    if has_config and has_adapter:  # transformers would add the adapter to weights that may hold it already
        remedy = "take it out if the weights are merged, or give the folder merged/ of the training"
        raise UserError(f"{folder}: adapter_config.json lies beside a whole model; {remedy}")
    if has_adapter:
        remedy = "give the folder merged/ inside it, which train.py writes with --lora_merge True"
        raise UserError(f"{folder}: an adapter (adapter_config.json, no config.json), not a model; {remedy}")
    if not has_config:
        raise UserError(f"{folder}: no config.json; this is not a model folder")
    return folder


def public_name(name: str) -> str:
    """What to call a model or a file in what leaves this machine: as the user did, but for the folders above it.

    The name of a folder begins with "./", so that nobody takes it for a model of the hub.
    """
    path = Path(name)
    shown = path.name if path.is_absolute() else name
    return f"./{shown}" if path.is_dir() and not shown.startswith(".") else shown


def from_folder(auto, name: StrPath, **options):
    """`auto.from_pretrained` of a model's folder. UserError, in transformers' words, if it cannot be loaded."""
    folder = model_folder(str(name))
    with user_errors(folder, ValueError, ImportError):
        try:
            return auto.from_pretrained(folder, **options)
        except ValueError as error:
            if "trust_remote_code" in str(error):
                raise UserError(f"{folder}: has code of its own; --trust_remote_code True runs it") from error
            raise


def load_model(name: StrPath, **options):
    """A causal language model in eval mode, from safetensors: weights that are pickled could run code.

    To read pickled weights (*.bin), load them once by transformers and call `save_pretrained`, which writes
    safetensors. Or take `use_safetensors` out here, and add their names to MODEL_FILES.

    UserError if it cannot be loaded, lacks weights, or is not causal: its tokens see those that follow.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # "Loading weights"
    options |= {"use_safetensors": True, "output_loading_info": True}
    model, report = from_folder(AutoModelForCausalLM, name, **options)
    if report["missing_keys"]:  # transformers would draw them at random
        raise UserError(f"{name}: weights are missing ({', '.join(sorted(report['missing_keys']))})")
    if reads_ahead(model.config):
        kind = f"by its config.json this {model.config.model_type} reads what follows a token"
        raise UserError(f"{name}: {kind}; take a causal language model")
    return model


def reads_ahead(config) -> bool:
    """Whether tokens attend to later tokens in a model of this configuration."""
    config = config.get_text_config()
    if not getattr(config, "is_causal", True):  # transformers' masks obey it in any model
        return True
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # Gemma; "vision" is for images alone
        return True
    match config.model_type:
        case "cpmant":
            return True
        case "xlm":
            return not config.causal
        case "xlnet":
            return config.attn_type == "bi"
    return config.model_type in ENCODERS and not config.is_decoder


class Positions:
    """How many positions a model has, by its configuration, and whether a table holds them: none lies behind it."""

    def __init__(self, model):
        self.most: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.in_table = any(self._is_table(name, module) for name, module in model.named_modules())
        self.warned = False

    def _is_table(self, name: str, module) -> bool:
        """Whether this is the embedding of the text's positions: OPT's and BART's tables have two rows more."""
        rows = getattr(module, "num_embeddings", None)
        last_name = name.rpartition(".")[2]
        is_named_so = "position" in last_name or last_name == "wpe"
        return is_named_so and self.most is not None and rows in range(self.most, self.most + 3)

    def check(self, what: str, tokens: int) -> None:
        """UserError for more tokens than a table of positions holds. A warning, once, for rotary positions."""
        if self.most is None or tokens <= self.most or self.warned:
            return
        if self.in_table:
            remedy = f"--max_length {self.most} cuts what is longer"
            raise UserError(f"{what}: {tokens} tokens, and the model has {self.most} positions; {remedy}")
        self.warned = True
        warn_on_rank_0("%s: %d tokens, and the model's config.json says %d positions", what, tokens, self.most)


def make_weights_readable(folder: StrPath) -> None:
    """Give a model's weights the mode of any new file: safetensors lets their owner alone read them."""
    mask = os.umask(0)
    os.umask(mask)
    for path in Path(folder).glob("*.safetensors"):
        path.chmod(0o666 & ~mask)


def check_token(token: int, tokenizer, vocab_size: float) -> None:
    """Raise UserError for a token that a model with embeddings of `vocab_size` tokens lacks."""
    if token >= vocab_size:
        text = tokenizer.convert_ids_to_tokens(int(token))
        raise UserError(f"the model has {vocab_size} tokens, not token {token} ({text}); is the tokenizer its own?")


def load_tokenizer(name: str, **options):
    """A model's tokenizer, never by mistral-common, which reads tekken.json and gives "[INST]" other ids."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = from_folder(AutoTokenizer, name, mistral_format=False, **options)
    file = model_folder(name) / "tokenizer.json"
    is_llama = type(tokenizer).__name__ == "LlamaTokenizer" and file.is_file()
    if is_llama and BYTE_LEVEL.search(file.read_text("utf-8")):
        # DeepSeek's Llamas: transformers before 5.24 knows them only by their names on the hub, else it loses blanks.
        # This goes when requirements.txt asks for transformers 5.24.
        options.pop("trust_remote_code", None)
        return PreTrainedTokenizerFast.from_pretrained(file.parent, **options)
    return tokenizer


def special_texts(tokenizer) -> frozenset[str]:
    """The texts that this tokenizer reads as special tokens, wherever they stand."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return frozenset(filter(None, [*added, *tokenizer.all_special_tokens]))


def without(texts: frozenset[str], text: str) -> str:
    """A text without any of these texts, also without those that are only there once others have been taken out."""
    if texts:
        while (shorter := _any_of(texts).sub("", text)) != text:
            text = shorter
    return text


@functools.lru_cache(maxsize=16)
def _any_of(texts: frozenset[str]) -> re.Pattern:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def model_setting(name: str) -> dict:
    """A model as a setting of a stage: SHA-256 over all files of its folder, of weights above 16 MiB over samples.

    Each start asks for it, and would wait while all weights of a large model are read. Training changes weights all
    over the file, so samples show it.
    """
    folder = model_folder(name)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name in RECORDS or path.name.startswith("."):
            continue
        size = path.stat().st_size
        stride = max(SAMPLE_BYTES, size // SAMPLES) if path.suffix in WEIGHTS else SAMPLE_BYTES
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for start in range(0, size, stride):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    commit = {"commit": folder.name} if folder.parent.name == "snapshots" else {}  # of the hub
    return {"path": name, "sha256": digest.hexdigest()} | commit


# Finished work.


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
    """The record beside X.json, a file of rows: X_rewards_settings.json."""
    file = Path(path)
    return file.with_name(f"{file.stem}_rewards_settings.json")


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
def stage(record: StrPath, settings: Mapping, *, results: Sequence[str], ranks: bool = True) -> Iterator[Stage]:
    """Do a piece of work once: `with stage(record, settings, results=...) as work: if work.todo: ...`.

    The record, a JSON file beside the results, holds the settings, versions, notes, and `finished` once the block has
    ended on all ranks without an error. `results` are patterns of files in its folder; the first is there when the
    work is finished. All ranks of a launch enter together; `ranks=False` is for programs that run as one process.
    UserError, with nothing written, if there are results of other settings, or if another launch is at work.
    """
    record = Path(record)
    compared = json.loads(json.dumps(settings))  # tuples are lists in a file
    # A soft lock is a file that a killed launch would leave behind; without locks `_begin` warns and goes on.
    lock = FileLock(record.with_name(f".{record.stem}.lock"), timeout=0, fallback_to_soft=False)
    begin = functools.partial(_begin, record, compared, results, lock)
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


def _begin(record: Path, settings: dict, results: Sequence[str], lock: FileLock) -> tuple[bool, dict]:
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
    if different := differences(stored["settings"], settings):
        raise UserError(f"{record}: made with other settings ({'; '.join(different)}); {remedy} {record.name}")
    notes = {name: note for name, note in stored.items() if name not in OF_STAGE}
    if stored.get("finished") and any(record.parent.glob(results[0])):
        logger.info("%s: all is there", record)
        return False, notes
    write_json(record, {"settings": settings, "finished": False, "made_by": made_by()} | notes)
    return True, notes


def differences(old: Mapping, new: Mapping) -> list[str]:
    """A phrase for each setting that differs. Files and models differ if their sha256 does.

    A setting that is missing counts as None, so a new one with another default makes older results differ.
    """
    phrases = []
    for name in {**old, **new}:
        then = old.get(name)
        now = new.get(name)
        if _content(then) != _content(now):
            phrases.append(f"{name}: {then} then, {now} now")
    return phrases


def _content(setting):
    """The digest of a file or a model, else the value itself."""
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
