"""The settings of the loop: read, filled in, checked, recorded, and printed for the shell.

    eval "$(PYTHONPATH=. python tools/loop/settings.py configs/llama2_7b.sh SEED=142 OUTPUT=outputs/spag142)"

Arguments are settings, NAME=VALUE, and files of such lines; the last one counts. configs/defaults.sh has every setting
with its default and meaning; with LIKE=DIR, DIR/settings.json takes its place.
"""

import difflib
import logging
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import utils
from tools.games import load_game
from utils import ROOT, UserError, read_json

DEFAULTS_FILE = ROOT / "configs" / "defaults.sh"
# The machine, how much is done, and what is measured of the models. (Stages refuse what would mix with their results.)
MAY_DIFFER = set(
    "OUTPUT NPROC NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID TENSOR_PARALLEL_SIZE PLAY_BATCH DEEPSPEED SAVE_STEPS "
    "GRADIENT_CHECKPOINTING ENGINE TRAIN_BATCH EPOCHS UNTIL EVAL_WORDS EVAL_SEEDS EVAL_GAMES_PER_WORD EVAL_EVERY "
    "EVAL_ARGS EVAL_TASKS REASONING_ARGS BELIEF_GAMES BELIEF_ARGS REPORT".split()
)
OF_IMITATION = {"MODEL", "IMITATION_DATA", "IMITATION_LR", "IMITATION_KL", "IMITATION_ARGS"}
OF_PLAY = set(
    "IMITATION_MODEL WORDS GAME GAME_OPTIONS PROMPTS CHAT_TEMPLATE THINKING MAX_TURNS GAMES GAMES_PER_WORD MAX_LENGTH "
    "MAX_NEW_TOKENS TEMPERATURE TOP_K PLAY_ARGS".split()
)
SIZES = "GLOBAL_BATCH TRAIN_BATCH NPROC NNODES TENSOR_PARALLEL_SIZE MAX_LENGTH MAX_NEW_TOKENS".split()
COUNT = r"[1-9]\d*"  # a number that begins with 0 would be octal
PATTERNS = {
    **dict.fromkeys(("EPOCHS", "SEED"), f"0|{COUNT}"),  # the shell computes with these and the next
    **dict.fromkeys((*SIZES, "EVAL_EVERY", "GAMES_PER_WORD"), COUNT),
    "PRECISION": "bf16|fp16|fp32",
    "CHAT_TEMPLATE": "True|False",
    "THINKING": "True|False",
    "GAMES": f"|{COUNT}",
    **dict.fromkeys(("LOSERS", "TIES"), r"\d*\.?\d+"),
    "CONTROL": "|coin_by_length|cloning|sft|silent",
    "UNTIL": rf"|imitation|epoch{COUNT}_(play|train)",
}
PACKAGES = {"LORA_RANK": ("peft", "peft>=0.21,<0.22"), "EVAL_TASKS": ("lm_eval", "lm-eval==0.4.13")}
FILES = ("SFT_DATA", "PROMPTS", "FIRST_EPISODES", "BELIEF_GAMES")  # of stages that may be hours away
RESULT_FILES = ("*/*/*_results.json", "*/*/*_rank*.jsonl", "*/rows/rows.json", "*/model/*")
logger = logging.getLogger(__name__)


def read_file(path: str | Path) -> dict[str, str]:
    """The settings of a file: words NAME=VALUE and comments, as in a shell; $root is the project's folder."""
    settings = {}
    for word in shlex.split(utils.read_text(path), comments=True):
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{path}: {word!r} is not NAME=VALUE; a value with blanks needs quotes")
        settings[name] = os.path.expanduser(value.replace("$root", str(ROOT)))
    return settings


def read_settings(words: list[str]) -> dict[str, str]:
    """The defaults, or the settings of LIKE, changed by the arguments. UserError for an unknown name."""
    defaults, changes = read_file(DEFAULTS_FILE), {}
    for word in (word.replace("\r", "") for word in words):  # of $(cat FILE), where FILE has Windows' line ends
        name, equals, value = word.partition("=")
        changes |= {name: os.path.expanduser(value)} if equals else read_file(word)
    for unknown in changes.keys() - defaults.keys():
        (nearest,) = difflib.get_close_matches(unknown.upper(), defaults, 1, 0)
        raise UserError(f"unknown setting {unknown}; did you mean {nearest}?")
    return (like(changes["LIKE"], changes, defaults) if changes.get("LIKE") else defaults) | changes


def like(run: str, changes: dict[str, str], defaults: dict[str, str]) -> dict[str, str]:
    """The settings of another run, with its imitation model and its games of epoch 1 in the place of new ones.

    A changed setting on which imitation or these games depend makes new ones.
    """
    settings = defaults | read_json(Path(run, "settings.json"))["settings"]
    own = "OUTPUT UNTIL CONTROL NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID".split()
    settings |= {name: defaults[name] for name in own}
    changed = {name for name, value in changes.items() if value != settings[name]}
    if changed & OF_IMITATION:
        trained = changes.get("IMITATION_DATA", settings["IMITATION_DATA"])
        settings["IMITATION_MODEL"] = "" if trained else settings["IMITATION_MODEL"]
    elif settings["IMITATION_DATA"] and not settings["IMITATION_MODEL"]:
        model = Path(run, "imitation", "model")
        if not read_json(model / "settings.json")["finished"]:
            raise UserError(f"LIKE={run}: its imitation has not ended; the same command of that run continues")
        settings["IMITATION_MODEL"] = str(model / "merged" if settings["LORA_RANK"] else model)
    games = settings["FIRST_EPISODES"] or f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
    return settings | {"FIRST_EPISODES": "" if changed & (OF_IMITATION | OF_PLAY) else games}


def fill(settings: dict[str, str]) -> None:
    """Replace what is `auto`, in place."""
    names = ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING", "DEEPSPEED")
    automatic = [name for name in names if settings[name] == "auto"]
    if not automatic:
        return
    import torch

    gpus = torch.cuda.device_count()
    if gpus and not torch.cuda.is_available():
        raise UserError("PyTorch cannot use the GPUs; is their driver too old? CUDA_VISIBLE_DEVICES= hides them")
    hidden = os.getenv("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not hidden and not torch.backends.cuda.is_built() and shutil.which("nvidia-smi"):
        raise UserError("PyTorch is built for CPUs, and here are GPUs: delete .venv; CUDA_VISIBLE_DEVICES= hides them")
    # GPUs before Ampere emulate bf16, most CPUs too: that is slow
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if gpus else torch.cpu._is_avx512_bf16_supported()
    values = {"NPROC": str(gpus or 1), "GRADIENT_CHECKPOINTING": str(gpus > 0), "DEEPSPEED": "none"}
    values["PRECISION"] = "bf16" if bf16 else "fp16" if gpus else "fp32"
    if gpus and "DEEPSPEED" in automatic:
        memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
        used = gpus if settings["NPROC"] == "auto" else int(settings["NPROC"])
        values["DEEPSPEED"] = deepspeed_file(settings, used * int(settings["NNODES"]), memory)
    settings |= {name: values[name] for name in automatic}


def deepspeed_file(settings: dict[str, str], gpus: int, memory: int) -> str:
    """The first way of training that fits GPUs of `memory` bytes: none, ZeRO-2, ZeRO-3, or offload to the CPU.

    Computed, not measured on a GPU, in bytes a parameter: weights, gradients and Adam in fp32, and half-precision
    copies. With LoRA: frozen half-precision weights, and adapters of a hundredth of the parameters.
    """
    folder = utils.model_folder(settings["MODEL"])
    config = read_json(folder / "config.json")
    fp32 = "float32" in (config.get("dtype"), config.get("torch_dtype"))
    parameters = sum(path.stat().st_size for path in folder.glob("model*.safetensors")) / (4 if fp32 else 2)
    ways = {"none": 18 if gpus == 1 else 22, "configs/zero2.json": 4 + 16 / gpus, "configs/zero3.json": 20 / gpus}
    if settings["LORA_RANK"]:
        ways = {"none": 2.2, "configs/zero3.json": 2.2 / gpus}
    for way, each in ways.items():
        if each * parameters <= 0.85 * memory:  # the rest is for activations
            return way if way == "none" else str(ROOT / way)
    return str(ROOT / "configs/default_offload_opt_param.json")


def check(settings: dict[str, str]) -> None:
    """Raise UserError for what would fail only after hours, or give wrong results. The stages check the rest."""
    for name, pattern in PATTERNS.items():
        if not re.fullmatch(pattern, settings[name]):
            raise UserError(f"{name}={settings[name]}: expected {pattern}")
    for name in FILES:
        if settings[name] and not Path(settings[name]).is_file():
            raise UserError(f"{settings[name]}: no such file")
    for name in filter(settings.get, PACKAGES):
        utils.require(*PACKAGES[name])
    check_sizes({name: int(settings[name]) for name in SIZES})
    negative = float(settings["LOSERS"]) or float(settings["TIES"]) or settings["BASELINE"] != "none"
    if negative and settings["DETACH_KL"] != "True" and "--allow_negative_rewards" not in settings["TRAIN_ARGS"]:
        raise UserError("LOSERS, TIES and BASELINE make rows with rewards below 0, which need DETACH_KL=True")
    if settings["THINKING"] == "True" and settings["BELIEF_GAMES"]:
        raise UserError("BELIEF_GAMES asks for messages without thoughts; leave it out with THINKING=True")
    if settings["CONTROL"] in ("sft", "silent") and not settings["LIKE"]:
        raise UserError(f"CONTROL={settings['CONTROL']} needs LIKE, the run whose rows it takes")


def check_sizes(sizes: dict[str, int]) -> None:
    at_once = sizes["NPROC"] * sizes["NNODES"] * sizes["TRAIN_BATCH"]
    if sizes["GLOBAL_BATCH"] % at_once or sizes["NPROC"] % sizes["TENSOR_PARALLEL_SIZE"]:
        rows = f"GLOBAL_BATCH must be a multiple of NPROC x NNODES x TRAIN_BATCH, {at_once}"
        raise UserError(f"{rows}, and NPROC of TENSOR_PARALLEL_SIZE")
    if sizes["MAX_NEW_TOKENS"] >= sizes["MAX_LENGTH"]:  # play would find out, after imitation
        raise UserError("MAX_LENGTH must be above MAX_NEW_TOKENS: it holds the prompt too")


def check_sft_data(settings: dict[str, str]) -> None:
    """Raise UserError if MODEL has no chat template for SFT rows of messages: training would find out after play."""
    path, model = settings["SFT_DATA"], settings["MODEL"]
    records = utils.read_json_or_jsonl(path) if path else []
    if any(map(utils.in_messages, records)) and not utils.load_tokenizer(model).chat_template:
        raise UserError(f"{path}: messages need a chat template, and the tokenizer of {model} has none")


def check_layout(settings: dict[str, str], prompt_file: str | Path) -> None:
    """Raise UserError if the record beside rows of imitation names another layout than that of play."""
    prompts = utils.files_setting(prompt_file)["sha256"]
    of_play = (settings["CHAT_TEMPLATE"] == "True", settings["THINKING"] == "True", prompts)
    for path in settings["IMITATION_DATA"].split():
        record = Path(path).with_name(f"{Path(path).stem}_rewards_settings.json")
        layout = read_json(record)["settings"] if record.is_file() else {}
        if "prompt_templates" not in layout:  # rows of other people, or of tools/controls.py
            logger.warning("%s: no record says how these rows were made; their prompts should be those of play", path)
            continue
        thinking, prompts = bool(layout.get("thinking")), layout["prompt_templates"]["sha256"]
        if (bool(layout["chat_template"]), thinking, prompts) != of_play:
            raise UserError(f"{path}: its CHAT_TEMPLATE, THINKING or prompts are not those of play ({prompt_file})")


def record(settings: dict[str, str], words: list[str]) -> None:
    """Write OUTPUT/settings.json and OUTPUT/words.txt. UserError if there are results of other settings."""
    folder = Path(settings["OUTPUT"])
    path = folder / "settings.json"
    if path.is_file() and any(any(folder.glob(pattern)) for pattern in RESULT_FILES):
        stored = read_file(DEFAULTS_FILE) | read_json(path)["settings"]
        then, now = ({name: each[name] for name in settings.keys() - MAY_DIFFER} for each in (stored, settings))
        if different := "; ".join(sorted(utils.differences(then, now))):
            way = f"use another OUTPUT, or delete {path} if no finished stage used them"
            raise UserError(f"{path}: made with other settings ({different}); {way}")
    utils.write_json(path, {"settings": settings, "made_by": utils.made_by()})
    utils.write_text(folder / "words.txt", "".join(f"{word}\n" for word in words))


def main() -> None:
    settings = read_settings(sys.argv[1:])
    for name in ("MODEL", "WORDS", "OUTPUT"):
        if not settings[name]:
            raise UserError(f"{name}=... is missing")
    fill(settings)
    check(settings)
    check_sft_data(settings)
    options = {key: value for key, _, value in (word.partition("=") for word in settings["GAME_OPTIONS"].split())}
    game = load_game(settings["GAME"], **options)
    check_layout(settings, settings["PROMPTS"] or game.prompt_file)
    lists = [settings["WORDS"], *(word.rpartition("=")[2] for word in settings["EVAL_WORDS"].split())]
    words, *_ = [utils.read_words(path, game.check_task) for path in lists]
    if settings["NODE_RANK"] == "0":
        record(settings, words[: int(settings["GAMES"] or len(words))] * int(settings["GAMES_PER_WORD"]))
    for name, value in settings.items():  # for `eval`; each *_ARGS is an array
        arguments = name.endswith("_ARGS")
        print(f"{name}=({shlex.join(shlex.split(value))})" if arguments else f"{name}={shlex.quote(value)}")


if __name__ == "__main__":
    utils.run_program(main)
