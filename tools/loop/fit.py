"""Which way of training fits a model on GPUs: DEEPSPEED=auto of tools/run_spag.sh. Computed; no GPU has measured it.

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
from collections.abc import Iterator, Mapping

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
