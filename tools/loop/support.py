"""What tools/run_spag.sh has to know before its first stage: python tools/loop/support.py NAME=VALUE ... -- FLAGS

Applies the flags to the settings, makes the automatic choices, tells all that is wrong (status 2, and nothing is
written), and prints assignments for the shell: the settings, and what follows from them.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tools.games.flags import GameFlags
from tools.loop import fit
from tools.loop.checks import WHOLE_NUMBERS, find_problems, package_problems
from tools.loop.fit import check_disk, count_parameters, say
from utils import open_text, read_words, replacing, unknown_flag

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
DEEPSPEED = {  # what --deepspeed gets for a way of training
    "none": "none",
    "zero2": str(CONFIGS / "zero2.json"),
    "zero3": str(CONFIGS / "zero3.json"),
    "offload": str(CONFIGS / "default_offload_opt_param.json"),
}
LISTS = ("IMITATION_DATA", "GAME_OPTIONS", "REWARDS", "EVAL_WORDS", "EVAL_SEEDS")  # settings of several values
LISTS += ("IMITATION_ARGS", "TRAIN_ARGS", "PLAY_ARGS", "REWARD_ARGS", "EVAL_ARGS")
AUTOMATIC = ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING")
ASSIGNED = re.compile(r'\s*: "\$\{(\w+):?=')  # a line of a settings file


def apply_flags(settings: dict[str, str], flags: Iterable[str]) -> Iterator[str]:
    """Set what the flags say; yields what is wrong with them."""
    words, known = iter(flags), [f"--{name.lower()}" for name in settings]
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            yield f"'{word}' belongs to no flag; several values of one flag go in quotes"
        elif not equals and (value := next(words, None)) is None:
            yield f"{flag} needs a value"
        elif flag in known:
            settings[flag.removeprefix("--").upper()] = value
        else:
            yield f"{unknown_flag(flag, known)} (--help lists them)"


def unknown_names(path: str, names: Iterable[str]) -> Iterator[str]:
    """What a settings file sets and is no setting."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if (match := ASSIGNED.match(line)) and match[1] not in names:
                yield f"{path}:{number}: unknown setting {match[1]}; --help lists them"


def settle(settings: dict[str, str], gpus: Sequence[int]) -> None:
    """Make the automatic choices but that of DeepSpeed, by this machine's GPUs; write numbers in base 10."""
    choices = (str(len(gpus)), "bf16", "True") if gpus else ("1", "fp32", "False")
    settings |= {name: choice for name, choice in zip(AUTOMATIC, choices, strict=True) if settings[name] == "auto"}
    for name in WHOLE_NUMBERS:
        if settings[name].isdecimal():
            settings[name] = str(int(settings[name]))
    if settings["OUTPUT"]:
        settings["OUTPUT"] = os.path.abspath(settings["OUTPUT"])


def gpu_memory() -> list[int]:
    """Bytes of each CUDA device of this machine; none without torch."""
    if not importlib.util.find_spec("torch"):
        return []
    import torch

    if not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        say(f"WARNING there are GPUs, but the PyTorch of {sys.executable} cannot use them: all runs on the CPU")
    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]


def choose_deepspeed(settings: Mapping[str, str], gpus: Sequence[int]) -> str:
    """DEEPSPEED=auto: the file of a training in its middle, whose checkpoints fit no other, else of what fits."""
    if not gpus:
        return "none"
    for checkpoint in Path(settings["OUTPUT"]).glob("*/model/checkpoint-*"):  # deleted when the training has ended
        path = checkpoint.parent / "settings.json"
        begun = json.loads(path.read_text(encoding="utf-8"))["arguments"]["deepspeed"] or "none"
        say(f"DeepSpeed: {begun}, as in {path}: that training is in its middle")
        return begun
    processes, lora = int(settings["NPROC"]) * int(settings["NNODES"]), bool(settings["LORA_RANK"])
    if (parameters := count_parameters(settings["MODEL"])) is None:
        say("DeepSpeed: offload, since the model's size is not known")
        return DEEPSPEED["offload"]
    way, needed = fit.choose(
        parameters,
        processes,
        min(gpus),
        rows=int(settings["TRAIN_BATCH"]),
        length=int(settings["MAX_LENGTH"]),
        checkpointing=settings["GRADIENT_CHECKPOINTING"] == "True",
        lora=lora,
    )
    say(
        f"DeepSpeed: {way}; computed for {processes} GPUs of {min(gpus) / fit.GIB:.0f} GiB: "
        + ", ".join(f"{name} {size / fit.GIB:.0f}" for name, size in needed.items())
    )
    outside = fit.outside_bytes(parameters, lora) / int(settings["NNODES"])
    if way == "offload" and outside > (there := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        sizes = f"{outside / fit.GIB:.0f} GiB of this machine's memory, which has {there / fit.GIB:.0f}"
        say(f"WARNING offload takes {sizes}; more machines, or --lora_rank 16, take less")
    return DEEPSPEED[way]


def read_game(settings: dict[str, str]) -> list[str]:
    """The words of an epoch; MAX_TURNS is settled by the game. ValueError for a wrong game, prompt or word file."""
    flags = GameFlags(
        game=settings["GAME"],
        game_options=settings["GAME_OPTIONS"].split(),
        match=settings["MATCH"] or None,
        prompt_templates=settings["PROMPTS"] or None,
    )
    game = flags.load_game()
    flags.load_templates(game)
    settings["MAX_TURNS"] = settings["MAX_TURNS"] or str(game.max_turns)
    return read_words(settings["WORDS"], game.check_task) if os.path.isfile(settings["WORDS"]) else []


def prepare(settings: Mapping[str, str], words: list[str]) -> Path:
    """Check the disk space, then write the word list of an epoch; its path. ValueError for what does not do."""
    path = Path(settings["OUTPUT"]) / "words.txt"
    words = words[: int(settings["GAMES"] or len(words))] * int(settings["GAMES_PER_WORD"])
    text = "".join(f"{word}\n" for word in words)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"{path}: not the words that --words, --games and --games_per_word say; use another --output")
    if settings["NODE_RANK"] == "0":
        check_disk(settings)
        with replacing(path) as file:
            file.write(text)
    (path.parent / "logs").mkdir(parents=True, exist_ok=True)
    return path


def assignments(settings: Mapping[str, str], words: Path) -> str:
    """What bash evaluates: the settings, those of several values as lists, and what follows from them."""
    rows_at_once = int(settings["NPROC"]) * int(settings["NNODES"]) * int(settings["TRAIN_BATCH"])
    values = {name: value.split() if name in LISTS else value for name, value in settings.items()}
    values |= {
        "WORDS": str(words),
        "DEEPSPEED": settings["DEEPSPEED"].removesuffix("none"),
        "ACCUMULATION": str(int(settings["GLOBAL_BATCH"]) // rows_at_once),
        "SETTINGS_JSON": json.dumps(settings, ensure_ascii=False, indent=2),
    }
    quoted = {k: f"({shlex.join(v)})" if isinstance(v, list) else shlex.quote(v) for k, v in values.items()}
    return "\n".join(f"{name}={value}" for name, value in quoted.items())


def main(argv: list[str]) -> None:
    start = argv.index("--")
    settings = dict(pair.split("=", 1) for pair in argv[:start])
    problems = list(apply_flags(settings, argv[start + 1 :]))
    if os.path.isfile(settings["SETTINGS"]):
        problems += unknown_names(settings["SETTINGS"], settings)
    gpus = gpu_memory() if "auto" in [settings[name] for name in (*AUTOMATIC, "DEEPSPEED")] else []
    settle(settings, gpus)
    problems += find_problems(settings)
    try:
        words = read_game(settings)
        if not problems and settings["DEEPSPEED"] == "auto":
            settings["DEEPSPEED"] = choose_deepspeed(settings, gpus)
        problems = problems or list(package_problems(settings))
        path = None if problems else prepare(settings, words)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    if problems:
        sys.stderr.writelines(f"run_spag.sh: {problem}\n" for problem in problems)
        sys.exit(2)
    print(assignments(settings, path))


if __name__ == "__main__":
    main(sys.argv[1:])
