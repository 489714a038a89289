"""What the settings of the loop leave open. tools/run_spag.sh evaluates the lines that this prints.

    python -m tools.loop.fit NAME=VALUE ...

`auto` becomes what fits this machine's GPUs and the model's size. With LIKE come the model, game options, prompts,
turns and first episodes of the other run, and `like_model`, its imitation model. `precision_flags` and `dtype` are
PRECISION as flags, and each *_ARGS becomes an array of its words.

DEEPSPEED=auto takes the first way of training that fits. Computed, not measured on a GPU: bytes of GPU memory for each
parameter, in half precision, on N GPUs:

    none     18, 22 on several GPUs   fp32 weights, gradients and Adam, their copies for autocast; DDP's buckets
    zero2    4 + 16 / N               bf16 weights and gradients; Adam with fp32 weights and gradients in N parts
    zero3    20 / N                   weights and gradients in N parts too
    offload  0                        all of this in the machines' own memory: 20 over all machines
    LoRA     2.2; zero3 2.2 / N       frozen bf16 weights, adapters of about 1% of the parameters; offload 0.2

Activations are those of a Llama of this size (hidden size = 128 layers): 54 bytes for each hidden number and token in
every layer that keeps them (one layer with gradient checkpointing), 2 in the others; and 256 scored tokens a row.
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from utils import UserError, file_digest, model_folder, read_json, refuse_large_model, run_program

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^([A-Z_]+)=(\S*)", re.MULTILINE)
DEFAULTS = dict(LINE.findall((ROOT / "configs" / "defaults.sh").read_text(encoding="utf-8")))
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")  # a setting that is a number
WAYS = {  # ways of training, and the value of DEEPSPEED: the first that fits is chosen, else the last one
    "none": "none",
    "zero2": "configs/zero2.json",
    "zero3": "configs/zero3.json",
    "offload": "configs/default_offload_opt_param.json",
}
FREE = 0.1  # share of a GPU's memory that is left free
GATHERED = 10**9  # parameters that zero3 and offload hold whole at once
LOGITS = 12 * 256 * 128_000  # bytes a row, with a vocabulary of 128,000


def gpu_bytes(way: str, settings: Mapping[str, str], parameters: float) -> float:
    """Bytes of each GPU that training takes in one of WAYS."""
    gpus = int(settings["NPROC"]) * int(settings["NNODES"])
    each = {"none": 18 if gpus == 1 else 22, "zero2": 4 + 16 / gpus, "zero3": 20 / gpus, "offload": 0}
    if settings["LORA_RANK"]:
        each = {"none": 2.2, "zero2": 2.2, "zero3": 2.2 / gpus, "offload": 0.2}
    gathered = 2 * min(parameters, GATHERED) if way in ("zero3", "offload") else 0
    hidden = (128 * parameters / 12) ** (1 / 3)  # a layer has 12 hidden^2 parameters
    layers = hidden / 128
    kept = 54 + 2 * (layers - 1) if settings["GRADIENT_CHECKPOINTING"] == "True" else 54 * layers
    activations = int(settings["TRAIN_BATCH"]) * (int(settings["MAX_LENGTH"]) * hidden * kept + LOGITS)
    return each[way] * parameters + gathered + activations


def way_of_training(settings: Mapping[str, str], memory: int) -> str:
    """The value of DEEPSPEED for GPUs of `memory` bytes each."""
    if any(Path(settings["OUTPUT"]).glob("*/model/checkpoint-*/complete.json")):
        return recorded(settings["OUTPUT"])["DEEPSPEED"]  # checkpoints of one way fit no other
    parameters = count_parameters(model_folder(settings["MODEL"]))
    fitting = (way for way in WAYS if gpu_bytes(way, settings, parameters) <= (1 - FREE) * memory)
    way = WAYS[next(fitting, "offload")]
    return way if way == "none" else str(ROOT / way)


def count_parameters(folder: Path) -> int:
    """Parameters of a model folder, by the headers of the safetensors files that transformers loads.

    Other files do not count: Mistral's consolidated.safetensors, for example, is a copy of the weights.
    """
    index = folder / "model.safetensors.index.json"
    names = set(read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    total = 0
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no weights as safetensors; save_pretrained of transformers writes them")
        with open(folder / name, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        total += sum(math.prod(tensor["shape"]) for key, tensor in header.items() if key != "__metadata__")
    return total


def choose(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the settings that are `auto`. UserError for a large model where there is no GPU."""
    automatic = [name for name in ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING", "DEEPSPEED")
                 if settings[name] == "auto"]  # fmt: skip
    if not automatic:
        return {}
    import torch

    memory = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    if not memory and trains_on_cpu_by_default(settings) and not torch.accelerator.is_available():
        refuse_large_model(settings["MODEL"], "IMITATION_ARGS='--use_cpu True' TRAIN_ARGS='--use_cpu True'")
    chosen = {"NPROC": str(len(memory) or 1), "GRADIENT_CHECKPOINTING": str(bool(memory)), "DEEPSPEED": "none"}
    if memory:
        chosen["PRECISION"] = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    else:
        chosen["PRECISION"] = "bf16" if cpu_computes_bf16() else "fp32"
    chosen = {name: chosen[name] for name in automatic}
    if memory and "DEEPSPEED" in automatic:
        chosen["DEEPSPEED"] = way_of_training({**settings, **chosen}, min(memory))
    return chosen


def trains_on_cpu_by_default(settings: Mapping[str, str]) -> bool:
    """Whether the loop will train, by flags that do not ask for a CPU."""
    if settings["IMITATION_DATA"] and "--use_cpu" not in settings["IMITATION_ARGS"]:
        return True
    return settings["UNTIL"] not in ("imitation", "epoch1_play") and "--use_cpu" not in settings["TRAIN_ARGS"]


def cpu_computes_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16 (Linux); elsewhere it is emulated, and slower than float32."""
    try:
        return bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", Path("/proc/cpuinfo").read_text(encoding="utf-8")))
    except OSError:
        return False


def follow(settings: Mapping[str, str]) -> dict[str, str]:
    """Return what the run LIKE has in the place of settings that are empty, and `like_model`, its imitation model.

    Raises UserError for a run that has another game or model.
    """
    if not (run := settings["LIKE"]):
        return {}
    made = recorded(run)
    if Path(run).resolve() == Path(settings["OUTPUT"]).resolve():
        raise UserError(f"LIKE={run}: that is the OUTPUT of this run")
    games = made["FIRST_EPISODES"] or f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
    while made["LIKE"]:
        run = made["LIKE"]
        made = recorded(run)
    for name in ("MODEL", "IMITATION_DATA", "GAME", "GAME_OPTIONS", "PROMPTS", "MAX_TURNS"):
        same_file = name == "PROMPTS" and made[name] and settings[name]
        if same_file and file_digest([settings[name]]) == file_digest([made[name]]):
            continue
        if settings[name] not in ("", made[name]):
            raise UserError(f"{name}={settings[name]}: the run of LIKE={run} has {made[name]!r}")
    model = f"{run}/imitation/model{'/merged' * bool(made['LORA_RANK'])}" if made["IMITATION_DATA"] else made["MODEL"]
    filled = {name: settings[name] or made[name] for name in ("MODEL", "GAME_OPTIONS", "PROMPTS", "MAX_TURNS")}
    return filled | {"FIRST_EPISODES": settings["FIRST_EPISODES"] or games, "like_model": model}


def recorded(run: str) -> dict[str, str]:
    """The settings of a run of the loop, from its record. UserError if there is none."""
    try:
        return DEFAULTS | read_json(Path(run, "settings.json"))["settings"]
    except (OSError, UserError, KeyError, TypeError):
        raise UserError(f"{run}: no settings.json of a run of the loop, which LIKE and checkpoints need") from None


def shell_lines(settings: Mapping[str, str], filled: Mapping[str, str]) -> list[str]:
    """The lines for the shell: what was filled in, and settings that are words of command lines as arrays."""
    values = {"like_model": "", **filled}
    precision = {**settings, **filled}["PRECISION"]
    flags = {"bf16": "--bf16 True", "fp16": "--fp16 True", "fp32": ""}[precision]
    if precision == "bf16":
        from transformers.utils import is_torch_tf32_available

        flags += " --tf32 True" * is_torch_tf32_available()
    values["dtype"] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision]
    if {**settings, **filled}["DEEPSPEED"] == "none":
        values["DEEPSPEED"] = ""
    arrays = {"precision_flags": flags} | {name: value for name, value in settings.items() if name.endswith("_ARGS")}
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    return lines + [f"{name}=({shlex.join(shlex.split(value))})" for name, value in arrays.items()]


def main() -> None:
    settings = dict(pair.split("=", 1) for pair in sys.argv[1:])
    filled = follow(settings)
    filled |= choose({**settings, **filled})
    print("\n".join(shell_lines(settings, filled)))


if __name__ == "__main__":
    run_program(main)
