"""What fits: the way of training on the GPUs (DEEPSPEED=auto of tools/run_spag.sh), and the loop on the disk.

Computed; no GPU has measured it.

    python -m tools.loop.fit     # the table of tools/loop/README.md

In bytes of GPU memory a parameter, in half precision, on N GPUs:

    none     18, 22 on several GPUs   fp32 weights, gradients and Adam, their copies for autocast; DDP's buckets
    zero2    4 + 16 / N               bf16 weights and gradients; Adam with fp32 weights and gradients in N parts
    zero3    20 / N                   the weights and gradients in parts too
    offload  0                        all that in the machines' own memory, 20 bytes a parameter over all machines
    LoRA     2.2; zero3 2.2 / N       frozen bf16 weights, and adapters of about 1% of the parameters; offload 0.2

and beside it the weights that zero3 and offload gather (DeepSpeed's 10^9 at most), and activations: of a Llama's shape
of this size (hidden = 128 layers), 54 bytes a hidden number and token for each layer that keeps them, which is one
with gradient checkpointing, 2 for each other; logits of 256 scored tokens a row over a vocabulary of 128,000. A tenth
of the memory stays free.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

WAYS = ("none", "zero2", "zero3", "offload")  # the first that fits is chosen
FREE = 0.1
GATHERED = 10**9
LOGITS = 12 * 256 * 128_000  # bytes a row
MODELS = {"1B": 1.1e9, "7B": 6.7e9, "13B": 13e9, "70B": 69e9}
GPUS, SIZES = (1, 8, 32), (24, 40, 80, 141)
GIB = 2**30


def gpu_bytes(
    way: str, parameters: float, gpus: int, *, rows: int = 2, length: int = 2048, checkpointing=True, lora=False
) -> float:
    """Bytes of each GPU that training takes, with so many rows at once on it."""
    if lora:
        a_parameter = {"none": 2.2, "zero2": 2.2, "zero3": 2.2 / gpus, "offload": 0.2}[way]
    else:
        whole = 18 if gpus == 1 else 22
        a_parameter = {"none": whole, "zero2": 4 + 16 / gpus, "zero3": 20 / gpus, "offload": 0}[way]
    gathered = 2 * min(parameters, GATHERED) if way in ("zero3", "offload") else 0
    hidden = (128 * parameters / 12) ** (1 / 3)  # a layer has 12 hidden^2 parameters
    layers = hidden / 128
    kept = 54 + 2 * (layers - 1) if checkpointing else 54 * layers
    return a_parameter * parameters + gathered + rows * (length * hidden * kept + LOGITS)


def outside_bytes(parameters: float, lora: bool = False) -> float:
    """Bytes that offload takes of the machines' own memory, over all machines."""
    return parameters * (2 if lora else 20)


def choose(parameters: float, gpus: int, gpu_memory: float, **training) -> tuple[str, Mapping[str, float]]:
    """The first of WAYS that fits, else the last one; and the bytes of each GPU that every way takes."""
    needed = {way: gpu_bytes(way, parameters, gpus, **training) for way in WAYS}
    fitting = (way for way in WAYS if needed[way] <= (1 - FREE) * gpu_memory)
    return next(fitting, WAYS[-1]), needed


def count_parameters(model: str) -> int | None:
    """Parameters of a model, by its safetensors headers or its configuration; None where neither is had."""
    if paths := list(Path(model).glob("*.safetensors")):
        headers = [header for path in paths for header in read_header(path).items()]
        return sum(math.prod(tensor["shape"]) for name, tensor in headers if name != "__metadata__")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)  # False: else it asks at the terminal
        with torch.device("meta"):  # no weights
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False).num_parameters()
    except (OSError, ValueError):
        return None


def read_header(path: Path) -> dict:
    """The tensors of a safetensors file: its first 8 bytes tell how many bytes of JSON follow."""
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def check_disk(settings: Mapping[str, str]) -> None:
    """Tell what models and checkpoints take of the disk and what is free; ValueError if that is too little."""
    output, parameters = Path(settings["OUTPUT"]), count_parameters(settings["MODEL"])
    free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.exists())).free
    if parameters is None:
        say(f"disk: {free / 1e9:.1f} GB free; what is needed is not known, since the model's size is not")
        return
    needed = disk_needed(settings, parameters)
    missing = needed - sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    take = f"models and checkpoints of {parameters:,} parameters take {needed / 1e9:.1f} GB at most"
    say(f"disk: {take}, of which {max(0, missing) / 1e9:.1f} GB are not there yet; {free / 1e9:.1f} GB are free")
    if missing > free and settings["CHECK_DISK"] == "True":
        raise ValueError(
            f"{output}: the disk space does not suffice; --save_steps 0 keeps no checkpoints, --check_disk False "
            "starts all the same"
        )


def disk_needed(settings: Mapping[str, str], parameters: int) -> int:
    """Bytes of the loop's models and of the checkpoints to resume from, at most."""
    half, deepspeed = settings["PRECISION"] != "fp32", settings["DEEPSPEED"] != "none"
    weights = 2 if half and deepspeed else 4  # without DeepSpeed half precision is autocast over fp32 weights
    state = 12 if deepspeed else 8  # Adam's two moments, and DeepSpeed's fp32 copy of the weights
    saves = 0 if float(settings["SAVE_STEPS"]) == 0 else 2  # the new checkpoint is whole before the old one goes
    models = int(settings["EPOCHS"]) + bool(settings["IMITATION_DATA"])
    return (models * weights + saves * (weights + state)) * parameters


def say(text: str) -> None:
    """Tell the user; the shell reads standard output."""
    print(text, file=sys.stderr, flush=True)


def table() -> Iterator[str]:
    """What is chosen for some models and GPUs, as lines of Markdown."""
    yield "| model | GPUs | " + " | ".join(f"of {size} GiB" for size in SIZES) + " |"
    yield "|---|---|" + "---|" * len(SIZES)
    for name, parameters in MODELS.items():
        for gpus, lora in ((1, True), *((gpus, False) for gpus in GPUS)):
            cells = (_cell(parameters, gpus, size * GIB, lora) for size in SIZES)
            yield f"| {name}{', LoRA' * lora} | {gpus} | " + " | ".join(cells) + " |"


def _cell(parameters: float, gpus: int, memory: float, lora: bool) -> str:
    way, needed = choose(parameters, gpus, memory, lora=lora)
    outside = f" + {outside_bytes(parameters, lora) / GIB:,.0f}" if way == "offload" else ""
    return f"{way} {needed[way] / GIB:.0f}{outside}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(table()))
