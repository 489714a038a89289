"""Check the settings of tools/run_spag.sh before its first stage, and make the choices that are left to the machine.

    python -m tools.check_loop ANSWERS NAME=VALUE ...

If anything is wrong, all of it is said (exit status 2) and nothing is written. Otherwise writes OUTPUT/settings.json,
OUTPUT/words.txt (the words of an epoch) and ANSWERS for the shell, a line each: NPROC, the flags of PRECISION,
GRADIENT_CHECKPOINTING, MAX_TURNS, and the DeepSpeed file.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from tools.games.flags import GameFlags
from tools.loop import fit
from utils import UserError, open_text, read_json, read_words, replacing, run_program, write_json

ROOT = Path(__file__).resolve().parents[1]
LARGE = 10**8  # parameters; a model of this size is not trained on a CPU unless the user says so
AUTOMATIC = ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING", "DEEPSPEED")  # settings that may be auto
POSITIVE, NUMBER = r"[1-9]\d*", r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
KINDS = {  # what settings must be: their names, and its pattern
    "a whole number of at least 0": ("TOP_K SEED NODE_RANK", rf"0|{POSITIVE}"),
    "a whole number of at least 1": (
        "EPOCHS GAMES_PER_WORD MAX_LENGTH MAX_NEW_TOKENS GLOBAL_BATCH TRAIN_BATCH NNODES NODE_TIMEOUT "
        "EVAL_GAMES_PER_WORD EVAL_EVERY TENSOR_PARALLEL_SIZE",
        POSITIVE,
    ),
    "a whole number of at least 1, or empty": ("GAMES MAX_TURNS PLAY_BATCH LORA_RANK", f"({POSITIVE})?"),
    "a whole number of at least 1, or auto": ("NPROC", f"auto|{POSITIVE}"),
    "whole numbers, separated by blanks": ("EVAL_SEEDS", r"\d+( +\d+)*"),
    "a number of at least 0": (
        "IMITATION_LR IMITATION_KL LEARNING_RATE KL SFT_COEFF CLIP_RANGE SAVE_STEPS LOSERS TIES",
        NUMBER,
    ),
    "a number above 0": ("TEMPERATURE", f"(?=[0.]*[1-9]){NUMBER}"),
    "a number above 0 and at most 1": ("DECAY_WEIGHT", r"1(\.0*)?|0?(?=\.0*[1-9])\.\d+"),
    "True or False": ("DETACH_KL EVAL_IMITATION REPORT", "True|False"),
    "True, False or auto": ("GRADIENT_CHECKPOINTING", "True|False|auto"),
    "bf16, fp16, fp32 or auto": ("PRECISION", "bf16|fp16|fp32|auto"),
    "auto, vllm, slots or generate": ("ENGINE", "auto|vllm|slots|generate"),
    "sft, coin, cloning, or empty": ("CONTROL", "(sft|coin|cloning)?"),
    "imitation, epochK_play, epochK_train, or empty": ("UNTIL", rf"(imitation|epoch{POSITIVE}_(play|train))?"),
}
ASSIGNED = re.compile(r'\s*: "\$\{(\w+):?=')  # a line of a settings file


def gpu_memory() -> list[int]:
    """Bytes of each GPU that PyTorch can use here."""
    import torch

    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]


def has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def single_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with each setting for itself."""
    yield from (f"--{name.lower()} is missing" for name in ("MODEL", "WORDS", "OUTPUT") if not settings[name])
    for kind, (names, pattern) in KINDS.items():
        wrong = (name for name in names.split() if not re.fullmatch(pattern, settings[name]))
        yield from (f"--{name.lower()} is {settings[name]!r}; it must be {kind}" for name in wrong)
    for name in ("SFT_DATA", "FIRST_EPISODES", "DEEPSPEED"):
        path = Path(settings[name])
        if settings[name] not in ("", "none", "auto") and not (path.is_file() and path.stat().st_size):
            yield f"--{name.lower()} {path}: no such file, or it is empty"
    if settings["SETTINGS"]:
        with open_text(settings["SETTINGS"]) as file:
            for number, line in enumerate(file, start=1):
                if (match := ASSIGNED.match(line)) and match[1] not in settings:
                    yield f"{settings['SETTINGS']}:{number}: unknown setting {match[1]}; --help lists them"


def read_game(settings: dict[str, str]) -> list[str]:
    """Return the words of self-play, and fill in MAX_TURNS. ValueError for a wrong game, prompt or word file."""
    flags = GameFlags(
        game=settings["GAME"],
        game_options=settings["GAME_OPTIONS"].split(),
        match=settings["MATCH"] or None,
        prompt_templates=settings["PROMPTS"] or None,
    )
    game = flags.load_game()
    flags.load_templates(game)
    settings["MAX_TURNS"] = settings["MAX_TURNS"] or str(game.max_turns)
    if "--game" not in settings["EVAL_ARGS"]:  # the match may be of another game
        for item in settings["EVAL_WORDS"].split():
            read_words(item.partition("=")[2] or item, game.check_task)
    return read_words(settings["WORDS"], game.check_task) if settings["WORDS"] else []


def choose(settings: dict[str, str], parameters: int | None) -> None:
    """Replace `auto`, by this machine's GPUs and the model's size."""
    import torch

    memory, choices = gpu_memory(), ("1", "fp32", "False", "none")
    if memory:
        half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        choices = (str(len(memory)), half, "True", "auto")
    settings |= {name: choice for name, choice in zip(AUTOMATIC, choices, strict=True) if settings[name] == "auto"}
    if settings["DEEPSPEED"] == "auto":
        way = fit.choose(settings, parameters, min(memory)) if parameters else fit.WAYS["offload"]
        settings["DEEPSPEED"] = way if way == "none" else str(ROOT / way)
        for checkpoint in Path(settings["OUTPUT"]).glob("*/model/checkpoint-*"):  # of a training that was begun
            begun = read_json(checkpoint.parent / "settings.json")["arguments"]["deepspeed"]
            settings["DEEPSPEED"] = begun or "none"  # checkpoints fit no other
        print(f"DeepSpeed: {settings['DEEPSPEED']}")


def joint_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with settings that are right each for itself."""
    number = {name: int(value) for name, value in settings.items() if re.fullmatch(POSITIVE, value)}
    processes, machines, together = number["NPROC"], number["NNODES"], number["TENSOR_PARALLEL_SIZE"]
    if together > 1 and (settings["ENGINE"] != "vllm" or processes % together):
        yield f"--tensor_parallel_size {together} needs --engine vllm, and must divide --nproc {processes}"
    if number["MAX_LENGTH"] <= number["MAX_NEW_TOKENS"]:
        yield f"--max_length {number['MAX_LENGTH']} leaves no room for a prompt; it must be above --max_new_tokens"
    if machines > 1 and not settings["RDZV_ENDPOINT"]:
        yield "--rdzv_endpoint is missing: with several machines it is host:port of machine 0"
    rows, batch = number["GLOBAL_BATCH"], number["TRAIN_BATCH"]
    if rows % (at_once := processes * machines * batch):
        yield (
            f"--global_batch {rows} is no multiple of {processes} processes x {machines} machines x --train_batch "
            f"{batch} = {at_once} rows; change one of them"
        )
    if settings["LIKE"] and settings["IMITATION_DATA"]:
        yield "--like takes the imitation model of the other loop; leave out --imitation_data"
    if settings["LIKE"] and not Path(settings["LIKE"], "settings.json").is_file():
        yield f"--like {settings['LIKE']}: not the OUTPUT of a loop; it has no settings.json"
    if settings["CONTROL"] == "sft" and not settings["LIKE"]:
        yield "--control sft needs --like, the OUTPUT of the loop whose number of rows counts"
    negative = float(settings["LOSERS"]) or float(settings["TIES"])
    if negative and settings["DETACH_KL"] == "False" and "--allow_negative_rewards" not in settings["TRAIN_ARGS"]:
        yield "--losers and --ties make rows with rewards below 0, which need --detach_kl True"


def machine_problems(settings: Mapping[str, str], parameters: int | None) -> Iterator[str]:
    """What the settings need and this machine does not have."""
    trainings = ["imitation_args"] * bool(settings["IMITATION_DATA"]) + ["train_args"]
    unsaid = [name for name in trainings if not re.search(r"--use_cpu[ =]True", settings[name.upper()])]
    if unsaid and (parameters or 0) >= LARGE and not has_accelerator():
        remedy = " ".join(f"--{name} '--use_cpu True'" for name in unsaid)
        yield (
            f"the PyTorch of {sys.executable} can use no GPU, and {settings['MODEL']} has {parameters:,} parameters; "
            f"to train on the CPU all the same: {remedy}"
        )
    if settings["ENGINE"] == "vllm":
        from tools.engine.vllm import VLLMFlags

        yield from (f"--engine vllm: {why}" for why in [VLLMFlags().vllm_missing()] if why)
    if settings["EVAL_TASKS"] and "--lm_eval" not in settings["REASONING_ARGS"] and not find_spec("lm_eval"):
        yield "--eval_tasks needs lm-eval (requirements.txt), or --reasoning_args '--lm_eval COMMAND'"
    needed = {"peft": bool(settings["LORA_RANK"]), "deepspeed": settings["DEEPSPEED"] != "none"}
    yield from (f"{sys.executable} has no {name}" for name in needed if needed[name] and not find_spec(name))


def write_results(settings: Mapping[str, str], words: list[str], answers: str) -> None:
    path = Path(settings["OUTPUT"], "words.txt")
    text = "".join(f"{word}\n" for word in words[: int(settings["GAMES"] or len(words))])
    text *= int(settings["GAMES_PER_WORD"])
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{path}: not the words that --words, --games and --games_per_word say; use another --output")
    if settings["NODE_RANK"] == "0":
        with replacing(path) as file:
            file.write(text)
        write_json(path.with_name("settings.json"), settings)
    precision = "" if settings["PRECISION"] == "fp32" else f"--{settings['PRECISION']} True"
    if settings["PRECISION"] == "bf16":
        from transformers.utils import is_torch_tf32_available

        precision += " --tf32 True" * is_torch_tf32_available()
    lines = [settings["NPROC"], precision, settings["GRADIENT_CHECKPOINTING"]]
    lines += [settings["MAX_TURNS"], settings["DEEPSPEED"].removesuffix("none")]
    Path(answers).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", metavar="ANSWERS", help="file to write")
    parser.add_argument("settings", metavar="NAME=VALUE", nargs="+", help="all settings of the loop")
    given = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in given.settings)
    problems, words = list(single_problems(settings)), []
    try:
        words = read_game(settings)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    refuse(problems)
    parameters = None
    if "auto" in [settings[name] for name in AUTOMATIC]:
        parameters = fit.count_parameters(settings["MODEL"])
        choose(settings, parameters)
    refuse([*joint_problems(settings), *machine_problems(settings, parameters)])
    write_results(settings, words, given.answers)


if __name__ == "__main__":
    run_program(main)
