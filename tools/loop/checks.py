"""What can be wrong with the settings of tools/run_spag.sh and would show only hours after its start. No torch."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from tools.loop.fit import say
from utils import open_text

NUMBER = r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
WHOLE = {  # what settings must be: their names, and the pattern of it
    "a whole number of at least 0": ("TOP_K SEED NODE_RANK", r"\d+"),
    "a whole number of at least 1": (
        "EPOCHS GAMES_PER_WORD MAX_LENGTH MAX_NEW_TOKENS GLOBAL_BATCH TRAIN_BATCH NPROC NNODES NODE_TIMEOUT "
        "EVAL_GAMES_PER_WORD EVAL_EVERY TENSOR_PARALLEL_SIZE",
        r"0*[1-9]\d*",
    ),
    "a whole number of at least 1, or empty": ("GAMES MAX_TURNS PLAY_BATCH LORA_RANK", r"(0*[1-9]\d*)?"),
}
KINDS = WHOLE | {
    "whole numbers, separated by blanks": ("EVAL_SEEDS", r"\d+( +\d+)*"),
    "a number of at least 0": ("IMITATION_LR IMITATION_KL LEARNING_RATE KL SFT_COEFF CLIP_RANGE SAVE_STEPS", NUMBER),
    "a number above 0": ("TEMPERATURE", f"(?=[0.]*[1-9]){NUMBER}"),
    "a number above 0 and at most 1": ("DECAY_WEIGHT", r"1(\.0*)?|0?(?=\.0*[1-9])\.\d+"),
    "True or False": ("DETACH_KL GRADIENT_CHECKPOINTING EVAL_IMITATION REPORT CHECK_DISK", "True|False"),
    "bf16, fp16 or fp32": ("PRECISION", "bf16|fp16|fp32"),
    "auto, vllm, slots or generate": ("ENGINE", "auto|vllm|slots|generate"),
}
WHOLE_NUMBERS = [name for names, _ in WHOLE.values() for name in names.split()]
REMEDY = f"install what is missing into the environment of {sys.executable}, or name another one's PYTHON"
VLLM = "import sys; from tools.engine.vllm import VLLMFlags; sys.exit(VLLMFlags().vllm_missing())"
COMPILE = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"


def find_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """All that is wrong with the settings, a line each."""
    yield from (f"--{name.lower()} is missing" for name in ("MODEL", "WORDS", "OUTPUT") if not settings[name])
    for kind, (names, pattern) in KINDS.items():
        wrong = (name for name in names.split() if not re.fullmatch(pattern, settings[name]))
        yield from (f"--{name.lower()} is {settings[name]!r}; it must be {kind}" for name in wrong)
    yield from _number_problems(settings)
    yield from _path_problems(settings)
    missing = (name for name in ("torch", "transformers") if not importlib.util.find_spec(name))
    yield from (f"{name} is not installed; {REMEDY}" for name in missing)


def package_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """What the settings need and cannot be imported, found or compiled."""
    deepspeed = settings["DEEPSPEED"] != "none"
    if settings["ENGINE"] == "vllm" and (why := _error_of(VLLM)):
        yield f"--engine vllm: {why}"
    for name in ["peft"] * bool(settings["LORA_RANK"]) + ["deepspeed"] * deepspeed:
        if why := _error_of(f"import {name}"):
            yield f"{name} cannot be imported: {why}; {REMEDY}"
            return
    if deepspeed and _needs_cpu_adam(settings["DEEPSPEED"]):
        say("DeepSpeed's CPU Adam is looked for; where it was never compiled, that takes 3 minutes now")
        if why := _error_of(COMPILE):
            yield (
                f"--deepspeed {settings['DEEPSPEED']}: DeepSpeed cannot compile its CPU Adam: {why}. It needs g++, "
                "ninja and, beside GPUs, CUDA's nvcc (CUDA_HOME); or choose configs/zero3.json, or --lora_rank 16"
            )


def _error_of(code: str) -> str:
    """The last line that Python says when it cannot run the code."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""


def _needs_cpu_adam(path: str) -> bool:
    with open_text(path) as file:
        config = json.load(file)
    optimizer = config.get("optimizer", {})
    offloaded = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none") != "none"
    return offloaded and "Adam" in optimizer.get("type", "") and not optimizer.get("params", {}).get("torch_adam")


def _number_problems(settings: Mapping[str, str]) -> Iterator[str]:
    numbers = {name: int(settings[name]) for name in WHOLE_NUMBERS if settings[name].isdecimal()}
    together, engine = numbers.get("TENSOR_PARALLEL_SIZE", 1), settings["ENGINE"]
    if together > 1 and (engine != "vllm" or numbers.get("NPROC", together) % together):
        yield f"--tensor_parallel_size {together} is of --engine vllm, and must divide --nproc"
    for name in ("PLAY_ARGS", "EVAL_ARGS"):
        if re.search(r"(^|\s)--(vllm|tensor_parallel_size)(=|\s|$)", settings[name]):
            yield f"--{name.lower()}: --tensor_parallel_size is a setting of the loop, VLLM=PATH a variable for it"
    length, new = numbers.get("MAX_LENGTH", math.inf), numbers.get("MAX_NEW_TOKENS", 0)
    if length <= new:
        yield f"--max_length {length} leaves no room for a prompt: it must be larger than --max_new_tokens {new}"
    processes, machines, batch = (numbers.get(name) or 1 for name in ("NPROC", "NNODES", "TRAIN_BATCH"))
    if machines > 1 and not settings["RDZV_ENDPOINT"]:
        yield "--rdzv_endpoint is missing: with several machines it is host:port of machine 0"
    if (rows := numbers.get("GLOBAL_BATCH", 0)) % (at_once := processes * machines * batch):
        yield (
            f"--global_batch {rows} is no multiple of {processes} processes x {machines} machines x --train_batch "
            f"{batch} = {at_once} rows; change one of them"
        )
    epochs = range(1, numbers.get("EPOCHS", 0) + 1)
    stages = ["imitation"] * bool(settings["IMITATION_DATA"])
    stages += [f"epoch{epoch}_{name}" for epoch in epochs for name in ("play", "train")]  # all machines take part
    if settings["UNTIL"] not in ("", *stages) or settings["FIRST_EPISODES"] and settings["UNTIL"] == "epoch1_play":
        yield f"--until {settings['UNTIL']}: imitation, epochK_play or epochK_train, one of this loop's stages"


def _path_problems(settings: Mapping[str, str]) -> Iterator[str]:
    names = ("WORDS", "SFT_DATA", "FIRST_EPISODES", "DEEPSPEED")
    files = [(name, settings[name]) for name in names if settings[name] not in ("", "none", "auto")]
    files += [("EVAL_WORDS", item.partition("=")[2] or item) for item in settings["EVAL_WORDS"].split()]
    for name, path in files:
        if not os.path.isfile(path) or not os.path.getsize(path):
            yield f"--{name.lower()} {path}: {'the file is empty' if os.path.isfile(path) else 'no such file'}"
