"""What can be wrong with the settings of tools/run_spag.sh, told before its first stage. No torch."""

import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAY_BE_EMPTY = ("GAMES", "MAX_TURNS", "PLAY_BATCH", "LORA_RANK")
AT_LEAST = {
    **dict.fromkeys(("EPOCHS", "GAMES_PER_WORD", "MAX_LENGTH", "MAX_NEW_TOKENS", "GLOBAL_BATCH", "TRAIN_BATCH"), 1),
    **dict.fromkeys(("NPROC", "NNODES", "NODE_TIMEOUT", "EVAL_GAMES_PER_WORD", "EVAL_EVERY", *MAY_BE_EMPTY), 1),
    **dict.fromkeys(("TOP_K", "SEED", "NODE_RANK"), 0),
}
NUMBERS = ("TEMPERATURE", "IMITATION_LR", "IMITATION_KL", "LEARNING_RATE", "KL", "SFT_COEFF", "CLIP_RANGE")
NUMBERS += ("DECAY_WEIGHT", "SAVE_STEPS")
ABOVE_0 = ("TEMPERATURE", "DECAY_WEIGHT")
SWITCHES = ("DETACH_KL", "GRADIENT_CHECKPOINTING", "EVAL_IMITATION", "REPORT", "CHECK_DISK")
CHOICES = {
    **dict.fromkeys(SWITCHES, ("True", "False")),
    "PRECISION": ("bf16", "fp16", "fp32"),
    "ENGINE": ("auto", "slots", "generate"),  # as tools/selfplay/options.py has them, which imports torch
}
LAST_STAGES = re.compile(r"imitation|epoch([1-9]\d*)_(play|train)")  # in which all machines take part
NOT_INSTALLED = f"{{}} is not installed for {sys.executable}; activate the environment that has it, or name its PYTHON"


def find_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """All that is wrong with the settings, a line each."""
    yield from (f"--{name.lower()} is missing" for name in ("MODEL", "WORDS", "OUTPUT") if not settings[name])
    yield from _value_problems(settings)
    yield from _range_problems(settings)
    yield from _number_problems(settings)
    yield from _path_problems(settings)
    needed = {"torch": True, "transformers": True, "peft": settings["LORA_RANK"]}
    needed["deepspeed"] = settings["DEEPSPEED"] != "none"
    yield from (NOT_INSTALLED.format(name) for name in needed if needed[name] and not importlib.util.find_spec(name))


def _value_problems(settings: Mapping[str, str]) -> Iterator[str]:
    for name, least in AT_LEAST.items():
        value = settings[name]
        if not (value.isdecimal() and int(value) >= least or not value and name in MAY_BE_EMPTY):
            yield f"--{name.lower()} is {value!r}; it must be a whole number of at least {least}"
    for name in NUMBERS:
        if not 0 <= as_number(settings[name]) < math.inf:
            yield f"--{name.lower()} is {settings[name]!r}; it must be a number of at least 0"
    for name, values in CHOICES.items():
        if settings[name] not in values:
            yield f"--{name.lower()} is {settings[name]!r}; it is one of {', '.join(values)}"
    for name in ("IMITATION_ARGS", "TRAIN_ARGS"):
        if "--lora_rank" in settings[name]:
            why = "make it a setting of the loop, which plays on with the merged model"
            yield f"--{name.lower()} has --lora_rank; {why}"


def _range_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """What a later stage would refuse, hours after the start."""
    for name in ABOVE_0:
        if as_number(settings[name]) == 0:
            yield f"--{name.lower()} is {settings[name]!r}; it must be above 0"
    if as_number(settings["DECAY_WEIGHT"]) > 1:
        yield f"--decay_weight is {settings['DECAY_WEIGHT']!r}; it must be at most 1"
    length, new = (settings[name] for name in ("MAX_LENGTH", "MAX_NEW_TOKENS"))
    if length.isdecimal() and new.isdecimal() and int(length) <= int(new):
        yield f"--max_length {length} leaves no room for a prompt: it must be larger than --max_new_tokens {new}"


def as_number(text: str) -> float:
    """A number, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _number_problems(settings: Mapping[str, str]) -> Iterator[str]:
    numbers = {name: int(settings[name]) for name in AT_LEAST if settings[name].isdecimal()}
    factors = [numbers.get(name) or 1 for name in ("NPROC", "NNODES", "TRAIN_BATCH")]
    processes, machines, batch = factors
    if machines > 1 and not settings["RDZV_ENDPOINT"]:
        yield "--rdzv_endpoint is missing: with several machines it is host:port of machine 0"
    if numbers.get("NODE_RANK", 0) >= machines:
        yield f"--node_rank is {numbers['NODE_RANK']}; with --nnodes {machines} it is at most {machines - 1}"
    if (rows := numbers.get("GLOBAL_BATCH", 0)) % math.prod(factors):
        yield (
            f"--global_batch {rows} is no multiple of {processes} processes x {machines} machines x --train_batch "
            f"{batch} = {math.prod(factors)} rows; change one of them"
        )
    last, until = LAST_STAGES.fullmatch(settings["UNTIL"]), settings["UNTIL"]
    left_out = until == "imitation" and not settings["IMITATION_DATA"]
    left_out |= until == "epoch1_play" and bool(settings["FIRST_EPISODES"])
    if until and (left_out or not last or int(last[1] or 0) > numbers.get("EPOCHS", 0)):
        yield f"--until {until}: imitation, epochK_play or epochK_train, one of this loop's stages"


def _path_problems(settings: Mapping[str, str]) -> Iterator[str]:
    names = ("WORDS", "SFT_DATA", "FIRST_EPISODES", "DEEPSPEED")
    files = [(name, settings[name]) for name in names if settings[name] not in ("", "none")]
    files += [("IMITATION_DATA", path) for path in settings["IMITATION_DATA"].split()]
    files += [("EVAL_WORDS", item.partition("=")[2] or item) for item in settings["EVAL_WORDS"].split()]
    for name, path in files:
        if not os.path.isfile(path) or not os.path.getsize(path):
            yield f"--{name.lower()} {path}: {'the file is empty' if os.path.isfile(path) else 'no such file'}"
    program = (settings["REWARDS"].split() or [""])[0]
    if program != "-m" and not any(os.path.isfile(os.path.join(folder, program)) for folder in ("", ROOT)):
        yield f"--rewards {settings['REWARDS']}: no such program"
    if not settings["EVAL_SEEDS"].replace(" ", "").isdecimal():
        yield f"--eval_seeds is {settings['EVAL_SEEDS']!r}; it must be whole numbers, separated by blanks"
    lists = [item.partition("=")[0] for item in settings["EVAL_WORDS"].split()]
    twice = sorted({name for name in lists if lists.count(name) > 1})
    yield from (f"--eval_words names {name} twice" for name in twice)
    model = settings["MODEL"]
    looks_local = os.path.exists(model) or os.path.isabs(model) or model.startswith(".") or model.count("/") > 1
    if model and looks_local and not os.path.isfile(os.path.join(model, "config.json")):
        yield f"--model {model}: no model folder (it has no config.json)"
    if settings["OUTPUT"]:
        output = Path(settings["OUTPUT"]).absolute()
        parent = next(folder for folder in (output, *output.parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            yield f"--output {output}: {parent} is no folder that can be written to"
