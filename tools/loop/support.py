"""What tools/run_spag.sh has to know before its first stage: python tools/loop/support.py NAME=VALUE ... -- FLAGS

Applies the flags to the settings, makes the automatic choices, tells all that is wrong (status 2, and nothing is
written), and prints assignments for the shell: the settings, and what follows from them.
"""

import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tools.games.flags import GameFlags
from tools.loop.checks import AT_LEAST, as_number, find_problems
from tools.loop.disk import check_disk
from utils import open_text, read_words, replacing, unknown_flag, write_json

ROOT = Path(__file__).resolve().parents[2]
OFFLOAD = ROOT / "configs" / "default_offload_opt_param.json"
LISTS = ("IMITATION_DATA", "GAME_OPTIONS", "REWARDS", "EVAL_WORDS", "EVAL_SEEDS")  # settings of several values
LISTS += ("IMITATION_ARGS", "TRAIN_ARGS", "PLAY_ARGS", "REWARD_ARGS", "EVAL_ARGS")
ASSIGNED = re.compile(r'\s*: "\$\{(\w+):?=')  # a line of a settings file


# --- reading -------------------------------------------------------------------------------------------------------


def apply_flags(settings: dict[str, str], flags: Iterable[str]) -> Iterator[str]:
    """Set what the flags say; yields what is wrong with them."""
    words, known = iter(flags), [f"--{name.lower()}" for name in settings]
    for word in words:
        flag, equals, value = word.partition("=")
        flag = "--engine" if flag == "--backend" else flag  # its old name, as BACKEND in run.sh
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
        found = ((number, ASSIGNED.match(line)) for number, line in enumerate(file, start=1))
        unknown = ((number, match[1]) for number, match in found if match and match[1] not in names)
        yield from (f"{path}:{number}: unknown setting {name}; --help lists them" for number, name in unknown)


def settle(settings: dict[str, str]) -> None:
    """Make the automatic choices, by the GPUs of this machine, and write numbers in base 10."""
    automatic = ("NPROC", "PRECISION", "DEEPSPEED", "GRADIENT_CHECKPOINTING")
    gpus = count_gpus() if "auto" in [settings[name] for name in automatic] else 0
    choices = (str(gpus), "bf16", str(OFFLOAD), "True") if gpus else ("1", "fp32", "none", "False")
    for name, choice in zip(automatic, choices, strict=True):
        if settings[name] == "auto":
            settings[name] = choice
    for name in AT_LEAST:
        if settings[name].isdecimal():
            settings[name] = str(int(settings[name]))
    if as_number(settings["SAVE_STEPS"]) == 0:
        settings["SAVE_STEPS"] = "0"
    if settings["OUTPUT"]:
        settings["OUTPUT"] = os.path.abspath(settings["OUTPUT"])


def count_gpus() -> int:
    """CUDA devices of this machine; none without torch."""
    if not importlib.util.find_spec("torch"):
        return 0
    import torch

    return torch.cuda.device_count()


def read_game(settings: dict[str, str]) -> list[str]:
    """The words; MAX_TURNS is settled by the game. Raises ValueError for a wrong game, prompt file or word list."""
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


# --- what the shell gets -------------------------------------------------------------------------------------------


def shell_values(settings: Mapping[str, str]) -> dict[str, str | list[str]]:
    """What is assigned in the shell: all settings, those of several values as lists, and what follows from them."""
    processes = int(settings["NPROC"]) * int(settings["NNODES"])
    values: dict[str, str | list[str]] = dict(settings)
    values |= {name: settings[name].split() for name in LISTS}
    if not os.path.exists(values["REWARDS"][0]) and (ROOT / values["REWARDS"][0]).is_file():
        values["REWARDS"][0] = str(ROOT / values["REWARDS"][0])
    values["WORDS"] = str(words_path(settings))
    values["DEEPSPEED"] = settings["DEEPSPEED"].removesuffix("none")
    values["ACCUMULATION"] = str(int(settings["GLOBAL_BATCH"]) // (processes * int(settings["TRAIN_BATCH"])))
    values["SETTINGS_JSON"] = json.dumps(settings, ensure_ascii=False, indent=2)
    return values


def assignments(values: Mapping[str, str | list[str]]) -> str:
    """The values as bash reads them."""
    quoted = (
        (name, shlex.quote(value) if isinstance(value, str) else f"({shlex.join(value)})")
        for name, value in values.items()
    )
    return "\n".join(f"{name}={value}" for name, value in quoted)


def words_path(settings: Mapping[str, str]) -> Path:
    """The word list of an epoch."""
    return Path(settings["OUTPUT"]) / "words.txt"


def write_files(settings: Mapping[str, str], words: str) -> None:
    """Write words.txt, and settings.json where there is none: that of a loop at work stays as it is."""
    if not words_path(settings).is_file():
        with replacing(words_path(settings)) as file:
            file.write(words)
    if not (settings_path := Path(settings["OUTPUT"]) / "settings.json").is_file():
        write_json(settings_path, settings)


def prepare(settings: Mapping[str, str], words: list[str]) -> None:
    """Check what is there already and the disk space, then write. Raises ValueError for what does not do."""
    words = words[: int(settings["GAMES"] or len(words))] * int(settings["GAMES_PER_WORD"])
    text = "".join(f"{word}\n" for word in words)
    path = words_path(settings)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"{path}: not the words that --words, --games and --games_per_word say; use another --output")
    if settings["NODE_RANK"] == "0":
        check_disk(settings, len(words))
        write_files(settings, text)
    Path(settings["OUTPUT"], "logs").mkdir(parents=True, exist_ok=True)


def main(argv: list[str]) -> None:
    start = argv.index("--")
    settings = dict(pair.split("=", 1) for pair in argv[:start])
    problems = list(apply_flags(settings, argv[start + 1 :]))
    if os.path.isfile(settings["SETTINGS"]):
        problems += unknown_names(settings["SETTINGS"], settings)
    settle(settings)
    problems += find_problems(settings)
    try:
        words = read_game(settings)
        if not problems:
            values = shell_values(settings)
            prepare(settings, words)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    if problems:
        sys.stderr.writelines(f"run_spag.sh: {problem}\n" for problem in problems)
        sys.exit(2)
    print(assignments(values))


if __name__ == "__main__":
    main(sys.argv[1:])
