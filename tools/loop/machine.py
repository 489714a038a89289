"""What this machine's GPUs and the model's size decide, asked in a process of its own that ends.

    PYTHONPATH=. python -m tools.loop.machine '{"model": ..., "processes": "auto", ...}'    prints JSON

The loop itself never touches a GPU: a process that has asked for one keeps some of its memory, and its children would
inherit what torch and DeepSpeed leave in the environment.
"""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass

from tools.common.errors import UserError
from tools.common.files import ROOT, read_json
from tools.common.models import model_folder
from tools.common.programs import run_program
from tools.common.ranks import check_gpus
from tools.loop.keys import AUTO, NONE
from tools.loop.stages import environment


@dataclass
class Question:
    """The settings that are asked about. `lora`: all trainings have adapters; `match_gpus`: None without a match."""

    model: str
    processes: int | str
    machines: int
    precision: str
    gradient_checkpointing: bool | str
    deepspeed: str
    lora: bool
    match_gpus: int | None


def ask(question: Question) -> dict:
    """The settings with values in the place of `auto`. Where the child refuses, it says why, and this program ends."""
    command = [sys.executable, "-m", "tools.loop.machine", json.dumps(dataclasses.asdict(question))]
    # Its bars and its error go to the terminal.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment())
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def answer(question: Question) -> dict:
    """Values for what is `auto`. UserError for GPUs that cannot be used, are too few, or too small for a match.

    `main` in tools/run_spag.py puts them in the place of `auto`, so OUTPUT/settings.json has the values, and a later
    start for which `precision` becomes another one is refused (`check_record` in tools/loop/record.py).
    """
    import torch

    gpus = torch.cuda.device_count()
    if gpus and not torch.cuda.is_available():
        raise UserError("PyTorch cannot use the GPUs; is their driver too old? CUDA_VISIBLE_DEVICES= hides them")
    # GPUs before Ampere emulate bf16, most CPUs too: that is slow
    if gpus:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = torch.cpu._is_avx512_bf16_supported()
    chosen = {
        "processes": gpus or 1,
        "precision": "bf16" if has_bf16 else "fp16" if gpus else "fp32",
        "gradient_checkpointing": gpus > 0,
        "deepspeed": NONE,
    }
    chosen |= {name: getattr(question, name) for name in chosen if getattr(question, name) != AUTO}
    if gpus:
        check_gpus(gpus, processes=chosen["processes"])
        memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
        if question.deepspeed == AUTO:
            chosen["deepspeed"] = choose_deepspeed(question, chosen["processes"] * question.machines, memory)
        if question.match_gpus:
            check_match(question, chosen["precision"], memory)
    return chosen


def choose_deepspeed(question: Question, gpus: int, memory: int) -> str:
    """The first way of training that fits GPUs of `memory` bytes: none, ZeRO-2, ZeRO-3, or offload to the CPU.

    Computed, not measured on a GPU, in bytes a parameter: weights, gradients and Adam in fp32, and half-precision
    copies. With LoRA: frozen half-precision weights, and adapters of a hundredth of the parameters. ZeRO-2 is not
    tried with LoRA, because it splits only what belongs to trained parameters.
    A reference that is another model than the policy is not counted, nor are rows of a micro-batch, their length and
    gradient_checkpointing. If training runs out of memory all the same, name a file: deepspeed=configs/zero3.json. A
    new file of DeepSpeed that `auto` may take is an entry of `ways`.
    """
    # 18: 4 weights + 4 gradients + 8 Adam + 2 copies. 22: DDP has 4 bytes of gradients more, in its buckets.
    # ZeRO-2 splits 16, fp32 gradients and the optimizer's state; 4 are counted whole, half-precision weights and
    # gradients. ZeRO-3 splits all 20.
    ways = {NONE: 18 if gpus == 1 else 22, "configs/zero2.json": 4 + 16 / gpus, "configs/zero3.json": 20 / gpus}
    if question.lora:
        ways = {NONE: 2.2, "configs/zero3.json": 2.2 / gpus}
    parameters = count_parameters(question.model)
    for way, bytes_of_one in ways.items():
        if bytes_of_one * parameters <= 0.85 * memory:  # the rest is for activations
            return way if way == NONE else str(ROOT / way)
    return str(ROOT / "configs/default_offload_opt_param.json")


def check_match(question: Question, precision: str, memory: int) -> None:
    """Raise UserError for two models that do not fit the GPUs of one process together."""
    models = 2 * count_parameters(question.model) * (4 if precision == "fp32" else 2)  # bytes of their weights
    room = 0.9 * question.match_gpus * memory  # vLLM's share of a GPU (MEMORY_SHARE in tools/engine/vllm.py)
    if models > room:
        sizes = f"{models / 2**30:.0f} GiB, and they may take {room / 2**30:.0f} GiB"
        raise UserError(f"match.words: the two models of a match have {sizes}; match.words= leaves matches out")


def count_parameters(model: str) -> float:
    """The parameters of a model, by the bytes of its safetensors."""
    folder = model_folder(model)
    config = read_json(folder / "config.json")
    bytes_of_one = 4 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors")) / bytes_of_one


def main() -> None:
    print(json.dumps(answer(Question(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    run_program(main)
