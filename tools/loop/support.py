"""What tools/run_spag.sh leaves to Python: checks of its settings, disk space, the lock, ending its processes.

python tools/loop/support.py check NAME=value ...      every problem of the settings, a line each; no torch
python tools/loop/support.py prepare NAME=value ...    writes OUTPUT/settings.json, says what disk space it takes
python tools/loop/support.py gpus | lock FD | stop PID | fingerprint FOLDER
python tools/loop/support.py word_list WORDS FIRST TIMES FILE
"""

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import shutil
import struct
import sys
import time
from pathlib import Path

from utils import model_fingerprint, run_program, write_json

MAY_BE_EMPTY = ("GAMES", "PLAY_BATCH", "LORA_RANK")
AT_LEAST = {
    **dict.fromkeys(("EPOCHS", "MAX_TURNS", "GAMES_PER_WORD", "MAX_LENGTH", "MAX_NEW_TOKENS", "GLOBAL_BATCH"), 1),
    **dict.fromkeys(("TRAIN_BATCH", "NPROC", "NNODES", "EVAL_GAMES_PER_WORD", *MAY_BE_EMPTY), 1),
    **dict.fromkeys(("TOP_K", "SEED", "NODE_RANK", "NODE_TIMEOUT"), 0),
}
NUMBERS = ("TEMPERATURE", "IMITATION_LR", "IMITATION_KL", "LEARNING_RATE", "KL", "SFT_COEFF", "CLIP_RANGE")
NUMBERS += ("DECAY_WEIGHT", "SAVE_STEPS")
TRUTH = ("True", "False")
CHOICES = {
    **dict.fromkeys(("DETACH_KL", "GRADIENT_CHECKPOINTING", "EVAL_IMITATION", "REPORT", "CHECK_DISK"), TRUTH),
    "PRECISION": ("bf16", "fp16", "fp32"),
    "MATCH": ("substring", "word"),  # as in tools/games/taboo.py, which is slow to import
    "BACKEND": ("auto", "slots", "generate"),  # as --engine of tools/play_llm_game.py
}
BYTES_PER_TOKEN = 4  # of text, in episodes and rows: English takes about so many
NOT_INSTALLED = f"{{}} is not installed for {sys.executable}; activate the environment that has it, or name its PYTHON"
STOP_TIMEOUT = 40  # seconds for programs to end by themselves: torchrun gives its processes 30


# --- settings ------------------------------------------------------------------------------------------------------


def find_problems(settings: dict[str, str]) -> list[str]:
    """All that is wrong with the loop's settings, a line each."""
    missing = [f"--{name.lower()} is missing" for name in ("MODEL", "WORDS", "OUTPUT") if not settings[name]]
    kinds = (_value_problems, _machine_problems, _batch_problems, _lora_problems, _path_problems, _package_problems)
    return missing + [problem for problems in kinds for problem in problems(settings)]


def _value_problems(settings: dict[str, str]) -> list[str]:
    problems = []
    for name, least in AT_LEAST.items():
        value = settings[name]
        if not (value.isdecimal() and int(value) >= least or not value and name in MAY_BE_EMPTY):
            problems.append(f"--{name.lower()} is {value!r}; it must be a whole number of at least {least}")
    for name in NUMBERS:
        if not _number(settings[name]) >= 0:
            problems.append(f"--{name.lower()} is {settings[name]!r}; it must be a number of at least 0")
    for name, values in CHOICES.items():
        if settings[name] not in values:
            problems.append(f"--{name.lower()} is {settings[name]!r}; it is one of {', '.join(values)}")
    return problems


def _machine_problems(settings: dict[str, str]) -> list[str]:
    problems = []
    if settings["NNODES"] != "1" and not settings["RDZV_ENDPOINT"]:
        problems.append("--rdzv_endpoint is missing: with several machines it is host:port of machine 0")
    rank, machines = settings["NODE_RANK"], settings["NNODES"]
    if rank.isdecimal() and machines.isdecimal() and int(rank) >= int(machines):
        problems.append(f"--node_rank is {rank}; with --nnodes {machines} it is at most {int(machines) - 1}")
    return problems


def _lora_problems(settings: dict[str, str]) -> list[str]:
    return [
        f"--{name.lower()} has --lora_rank; make it a setting of the loop, which plays on with the merged model"
        for name in ("IMITATION_ARGS", "TRAIN_ARGS")
        if "--lora_rank" in settings[name]
    ]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _batch_problems(settings: dict[str, str]) -> list[str]:
    names = ("GLOBAL_BATCH", "NPROC", "NNODES", "TRAIN_BATCH")
    if not all(settings[name].isdecimal() and int(settings[name]) for name in names):
        return []
    rows, *factors = (int(settings[name]) for name in names)
    if rows % math.prod(factors) == 0:
        return []
    processes, machines, batch = factors
    return [
        f"--global_batch {rows} is no multiple of {processes} processes x {machines} machines x --train_batch {batch} "
        f"= {math.prod(factors)} rows; change one of them"
    ]


def _path_problems(settings: dict[str, str]) -> list[str]:
    files = {
        "words": [settings["WORDS"]],
        "imitation_data": settings["IMITATION_DATA"].split(),
        "sft_data": [settings["SFT_DATA"]],
        "prompts": [settings["PROMPTS"]],
        "deepspeed": [settings["DEEPSPEED"]] if settings["DEEPSPEED"] != "none" else [],
        "eval_words": [item.partition("=")[2] or item for item in settings["EVAL_WORDS"].split()],
    }
    problems = [
        f"--{name} {path}: {'the file is empty' if os.path.isfile(path) else 'no such file'}"
        for name, paths in files.items()
        for path in filter(None, paths)
        if not os.path.isfile(path) or not os.path.getsize(path)
    ]
    model = settings["MODEL"]
    looks_local = os.path.exists(model) or os.path.isabs(model) or model.startswith(".") or model.count("/") > 1
    if model and looks_local and not os.path.isfile(os.path.join(model, "config.json")):
        problems.append(f"--model {model}: no model folder (it has no config.json)")
    if len(settings["OUTPUT"].split()) > 1:
        problems.append(f"--output {settings['OUTPUT']!r} holds a blank; settings of several files are split there")
    elif settings["OUTPUT"]:
        output = Path(settings["OUTPUT"]).absolute()
        parent = next(folder for folder in (output, *output.parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            problems.append(f"--output {output}: {parent} is no folder that can be written to")
    return problems


def _package_problems(settings: dict[str, str]) -> list[str]:
    needed = ["torch", "transformers", *(["peft"] if settings["LORA_RANK"] else [])]
    return [NOT_INSTALLED.format(name) for name in needed if not importlib.util.find_spec(name)]


# --- disk space ----------------------------------------------------------------------------------------------------


def count_parameters(model: str) -> int | None:
    """Parameters of a model, by its safetensors headers or its configuration; None where neither is had."""
    if paths := list(Path(model).glob("*.safetensors")):
        return sum(_tensor_sizes(path) for path in paths)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)  # False: else it asks at the terminal
        with torch.device("meta"):  # no weights
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False).num_parameters()
    except (OSError, ValueError):
        return None


def _tensor_sizes(path: Path) -> int:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def disk_needed(settings: dict[str, str], parameters: int) -> dict[str, int]:
    """Bytes that the loop writes at most: its models, the checkpoints to resume from, its games and rows."""
    half, deepspeed = settings["PRECISION"] != "fp32", settings["DEEPSPEED"] != "none"
    weights = 2 if half and deepspeed else 4  # without DeepSpeed half precision is autocast over fp32 weights
    state = 12 if deepspeed else 8  # Adam's two moments, and DeepSpeed's fp32 copy of the weights
    saves = 0 if _number(settings["SAVE_STEPS"]) == 0 else 2  # the new checkpoint is whole before the old one goes
    models = int(settings["EPOCHS"]) + bool(settings["IMITATION_DATA"])
    words = len(_words(settings["WORDS"]))
    games = min(words, int(settings["GAMES"] or words)) * int(settings["GAMES_PER_WORD"])
    messages = 2 * int(settings["MAX_TURNS"])
    game = 2 * messages * int(settings["MAX_NEW_TOKENS"])  # as it ends, and in the results
    rows = messages // 2 * int(settings["MAX_LENGTH"])
    return {
        "models": models * weights * parameters,
        "checkpoints": saves * (weights + state) * parameters,
        "games and rows": int(settings["EPOCHS"]) * games * (game + rows) * BYTES_PER_TOKEN,
    }


def check_disk(settings: dict[str, str]) -> None:
    """Say what disk space the loop needs and has; ValueError if that does not suffice."""
    output, parameters = Path(settings["OUTPUT"]), count_parameters(settings["MODEL"])
    free = shutil.disk_usage(output).free
    if parameters is None:
        print(f"disk: {free / 1e9:.1f} GB free; what is needed is not known, since the model's size is not")
        return
    needed = disk_needed(settings, parameters)
    there = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    parts = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in needed.items())
    text = f"{sum(needed.values()) / 1e9:.1f} GB at most ({parts}); {there / 1e9:.1f} GB of it there, "
    text += f"{free / 1e9:.1f} GB free"
    print(f"disk: {parameters:,} parameters: {text}")
    if sum(needed.values()) - there > free and settings["CHECK_DISK"] == "True":
        raise ValueError(f"{output}: the disk space does not suffice: {text}. --check_disk False starts all the same")


# --- commands ------------------------------------------------------------------------------------------------------


def check(*pairs: str) -> None:
    """Print all problems and end with status 2, if there are any."""
    problems = find_problems(_settings(pairs))
    for problem in problems:
        print(f"run_spag.sh: {problem}", file=sys.stderr)
    sys.exit(2 if problems else 0)


def prepare(*pairs: str) -> None:
    """Check the disk space and write settings.json."""
    settings = _settings(pairs)
    check_disk(settings)
    write_json(Path(settings["OUTPUT"]) / "settings.json", settings)


def _settings(pairs: tuple[str, ...]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in pairs)


def gpus() -> None:
    """Print the number of CUDA devices; ValueError without torch."""
    if not importlib.util.find_spec("torch"):
        raise ValueError(NOT_INSTALLED.format("torch"))
    import torch

    print(torch.cuda.device_count())


def lock(descriptor: str) -> None:
    """Lock an inherited file; the lock lasts while any process has it open. Exit status 1 if it is locked."""
    try:
        fcntl.flock(int(descriptor), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(1)
    except OSError as error:
        print(f"no locks on this file system ({error}); run one loop at a time", file=sys.stderr)


def stop(pid: str) -> None:
    """End all processes that a process started, and those that they started."""
    import psutil

    def is_alive(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    children = [child for child in psutil.Process(int(pid)).children(recursive=True) if child.pid != os.getpid()]
    for signal in ("terminate", "kill"):
        for child in filter(is_alive, children):
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(child, signal)()
        deadline = time.monotonic() + STOP_TIMEOUT
        while any(map(is_alive, children)) and time.monotonic() < deadline:
            time.sleep(0.1)


def fingerprint(folder: str) -> None:
    """Print a checksum of a model folder."""
    print(model_fingerprint(Path(folder)))


def word_list(words: str, first: str, times: str, output: str) -> None:
    """Write the first so many words of a list (all if `first` is empty), so many times over, unless that is there."""
    chosen = _words(words)[: int(first) if first else None]
    path, whole = Path(output), "".join(f"{word}\n" for word in chosen) * int(times)
    if not path.is_file() or path.read_text(encoding="utf-8") != whole:
        path.write_text(whole, encoding="utf-8")


def _words(path: str) -> list[str]:
    return [word for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if (word := line.strip())]


COMMANDS = {command.__name__: command for command in (check, prepare, gpus, lock, stop, fingerprint, word_list)}

if __name__ == "__main__":
    run_program(lambda: COMMANDS[sys.argv[1]](*sys.argv[2:]))
