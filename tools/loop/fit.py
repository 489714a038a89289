"""What fits on the GPUs (DEEPSPEED=auto of tools/run_spag.sh). Computed, not measured on a GPU.

Bytes of GPU memory for each parameter, in half precision, on N GPUs:

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
from collections.abc import Mapping
from pathlib import Path

from utils import UserError, read_json

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


def choose(settings: Mapping[str, str], parameters: float, memory: int) -> str:
    """The value of DEEPSPEED for GPUs of `memory` bytes each."""
    fitting = (way for way in WAYS if gpu_bytes(way, settings, parameters) <= (1 - FREE) * memory)
    return WAYS[next(fitting, "offload")]


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
