"""The disk space that a loop takes at most, reckoned from its settings and the model's parameters."""

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

BYTES_PER_TOKEN = 4  # of text, in episodes and rows: English takes about so many


def check_disk(settings: Mapping[str, str], games: int) -> None:
    """Say what disk space the loop needs and has, for so many games an epoch; ValueError if that does not suffice."""
    output, parameters = Path(settings["OUTPUT"]), count_parameters(settings["MODEL"])
    free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.exists())).free
    text, missing = "what is needed is not known, since the model's size is not", 0
    if parameters is not None:
        needed = disk_needed(settings, parameters, games)
        there = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
        parts = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in needed.items())
        text = f"{parameters:,} parameters: {sum(needed.values()) / 1e9:.1f} GB at most ({parts}); "
        text, missing = text + f"{there / 1e9:.1f} GB of it there", sum(needed.values()) - there - free
    text += f", {free / 1e9:.1f} GB free"
    if missing > 0 and settings["CHECK_DISK"] == "True":
        raise ValueError(f"{output}: the disk space does not suffice: {text}. --check_disk False starts all the same")
    say(f"disk: {text}")


def say(text: str) -> None:
    """Tell the user; the shell reads standard output."""
    print(text, file=sys.stderr, flush=True)


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


def disk_needed(settings: Mapping[str, str], parameters: int, games: int) -> dict[str, int]:
    """Bytes that the loop writes at most: its models, the checkpoints to resume from, its games and rows."""
    half, deepspeed = settings["PRECISION"] != "fp32", settings["DEEPSPEED"] != "none"
    weights = 2 if half and deepspeed else 4  # without DeepSpeed half precision is autocast over fp32 weights
    state = 12 if deepspeed else 8  # Adam's two moments, and DeepSpeed's fp32 copy of the weights
    saves = 0 if float(settings["SAVE_STEPS"]) == 0 else 2  # the new checkpoint is whole before the old one goes
    models = int(settings["EPOCHS"]) + bool(settings["IMITATION_DATA"])
    messages = 2 * int(settings["MAX_TURNS"])
    game = 2 * messages * int(settings["MAX_NEW_TOKENS"])  # as it ends, and in the results
    rows = messages * int(settings["MAX_LENGTH"])  # a game may pay both roles
    return {
        "models": models * weights * parameters,
        "checkpoints": saves * (weights + state) * parameters,
        "games and rows": int(settings["EPOCHS"]) * games * (game + rows) * BYTES_PER_TOKEN,
    }
