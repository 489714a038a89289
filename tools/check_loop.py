"""Check the settings of tools/run_spag.sh before its first stage, and choose what they leave open.

    python -m tools.check_loop ANSWERS NAME=VALUE ...

If anything is wrong, all of it is said (exit status 2) and nothing is written. Otherwise writes OUTPUT/settings.json,
OUTPUT/words.txt (the words of an epoch) and ANSWERS for the shell, a line each: NPROC, the flags of PRECISION,
GRADIENT_CHECKPOINTING, GAME_OPTIONS, PROMPTS, MAX_TURNS, the DeepSpeed file, MODEL, FIRST_EPISODES, the model that
takes the place of imitation (with LIKE, else empty), and NAME=WORD for each word of the settings *_ARGS.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from tools.loop import fit
from tools.selfplay.rows import RowFlags
from utils import (
    UserError,
    differences,
    file_digest,
    model_folder,
    open_text,
    read_json,
    read_words,
    refuse_large_model,
    replacing,
    run_program,
    write_json,
)

ROOT = Path(__file__).resolve().parents[1]
POSITIVE, NUMBER = r"[1-9]\d*", r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
KINDS = {  # what settings must be: their names, and its pattern
    "a whole number of at least 0": ("TOP_K SEED NODE_RANK", rf"0|{POSITIVE}"),
    "a whole number of at least 1": (
        "EPOCHS GAMES_PER_WORD MAX_LENGTH MAX_NEW_TOKENS GLOBAL_BATCH TRAIN_BATCH NNODES "
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
    "sft, silent, coin, coin_by_length, cloning, or empty": ("CONTROL", "(sft|silent|coin|coin_by_length|cloning)?"),
    "imitation, epochK_play, epochK_train, or empty": ("UNTIL", rf"(imitation|epoch{POSITIVE}_(play|train))?"),
}
KEPT = (  # settings that may not change while OUTPUT has results
    "GAME GAME_OPTIONS MAX_TURNS MAX_LENGTH MAX_NEW_TOKENS TEMPERATURE TOP_K DECAY_WEIGHT LOSERS TIES GLOBAL_BATCH "
    "SEED IMITATION_LR IMITATION_KL LEARNING_RATE KL SFT_COEFF CLIP_RANGE DETACH_KL LORA_RANK CONTROL"
).split()
ASSIGNED = re.compile(r'\s*: "\$\{(\w+):?=')  # a line of a settings file


def single_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with single settings, a line for each problem."""
    yield from (f"--{name.lower()} is missing" for name in ("MODEL", "WORDS", "OUTPUT") if not settings[name])
    for kind, (names, pattern) in KINDS.items():
        wrong = (name for name in names.split() if not re.fullmatch(pattern, settings[name]))
        yield from (f"--{name.lower()} is {settings[name]!r}; it must be {kind}" for name in wrong)
    for name in ("SFT_DATA", "FIRST_EPISODES", "DEEPSPEED"):
        path = Path(settings[name])
        if settings[name] not in ("", "none", "auto") and not (path.is_file() and path.stat().st_size):
            yield f"--{name.lower()} {path}: no such file, or it is empty"
    for name in (name for name in settings if name.endswith("_ARGS")):
        try:
            if any("\n" in word for word in shlex.split(settings[name])):
                raise ValueError("a line ends within quotes")
        except ValueError as error:
            yield f"--{name.lower()} {settings[name]}: {error}"
    if settings["SETTINGS"]:
        with open_text(settings["SETTINGS"]) as file:
            for number, line in enumerate(file, start=1):
                if (match := ASSIGNED.match(line)) and match[1] not in settings:
                    yield f"{settings['SETTINGS']}:{number}: unknown setting {match[1]}; --help lists them"


def follow(settings: dict[str, str]) -> str:
    """Fill in what the run LIKE has: model, options and prompts of the game, turns, first episodes.

    Returns the model that its self-play starts from. Raises UserError for a run that has another game or model.
    """
    run = settings["LIKE"]
    path = Path(run, "settings.json")
    made = read_json(path) if path.is_file() else {}
    if "MODEL" not in made or path.parent.resolve() == Path(settings["OUTPUT"]).resolve():
        raise UserError(f"--like {run}: not the --output of another run of the loop")
    if not settings["FIRST_EPISODES"]:
        own = f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
        settings["FIRST_EPISODES"] = made["FIRST_EPISODES"] or own
    while made.get("LIKE"):
        run = made["LIKE"]
        made = read_json(Path(run, "settings.json"))
    for name in ("MODEL", "IMITATION_DATA", "GAME", "GAME_OPTIONS", "PROMPTS", "MAX_TURNS"):
        same_file = name == "PROMPTS" and made[name] and settings[name]
        if same_file and file_digest([settings[name]]) == file_digest([made[name]]):
            continue
        if settings[name] not in ("", made[name]):
            raise UserError(f"--{name.lower()} {settings[name]}: the run of --like {run} has {made[name]!r}")
    settings |= {name: settings[name] or made[name] for name in ("MODEL", "GAME_OPTIONS", "PROMPTS", "MAX_TURNS")}
    return f"{run}/imitation/model{'/merged' * bool(made['LORA_RANK'])}" if made["IMITATION_DATA"] else made["MODEL"]


def row_flags(settings: Mapping[str, str]) -> RowFlags:
    """The flags with which rows are made."""
    if settings["CONTROL"] and settings["REWARDS"]:
        raise UserError("--control and --rewards both say how rows are made; give one of them")
    numbers = {name.lower(): float(settings[name]) for name in ("SFT_COEFF", "LOSERS", "TIES") if settings["CONTROL"]}
    return RowFlags(
        game=settings["GAME"],
        game_options=settings["GAME_OPTIONS"].split(),
        prompt_templates=settings["PROMPTS"] or None,
        control=settings["CONTROL"] or None,
        like_rows=settings["LIKE"] or None,
        **numbers,
    )


def read_game(settings: dict[str, str]) -> list[str]:
    """Return the words of self-play, and fill in MAX_TURNS. ValueError for a wrong game, prompt or word file."""
    flags = row_flags(settings)
    game = flags.load_game()
    flags.check(game, settings["SFT_DATA"])
    flags.load_templates(game)
    settings["MAX_TURNS"] = settings["MAX_TURNS"] or str(game.max_turns)
    if "--game" not in settings["EVAL_ARGS"]:  # the match may be of another game
        for item in settings["EVAL_WORDS"].split():
            read_words(item.partition("=")[2] or item, game.check_task)
    return read_words(settings["WORDS"], game.check_task) if settings["WORDS"] else []


def trains_unasked(settings: Mapping[str, str]) -> bool:
    """Whether the loop will train with flags that do not ask for a CPU."""
    if settings["UNTIL"].endswith("_play") and not settings["IMITATION_DATA"]:
        return False
    return "--use_cpu" not in settings["IMITATION_ARGS" if settings["UNTIL"] == "imitation" else "TRAIN_ARGS"]


def choose(settings: dict[str, str]) -> None:
    """Replace `auto` by what fits this machine's GPUs and the model's size."""
    automatic = ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING", "DEEPSPEED")
    if "auto" not in [settings[name] for name in automatic]:
        return
    import torch

    memory = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    choices = ("1", "fp32", "False", "none")
    if memory:
        half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        choices = (str(len(memory)), half, "True", "auto")
    elif trains_unasked(settings) and not torch.accelerator.is_available():
        refuse_large_model(settings["MODEL"], "--imitation_args '--use_cpu True' --train_args '--use_cpu True'")
    settings |= {name: choice for name, choice in zip(automatic, choices, strict=True) if settings[name] == "auto"}
    if settings["DEEPSPEED"] == "auto":
        way = fit.choose(settings, fit.count_parameters(model_folder(settings["MODEL"])), min(memory))
        settings["DEEPSPEED"] = way if way == "none" else str(ROOT / way)
        for checkpoint in Path(settings["OUTPUT"]).glob("*/model/checkpoint-*"):  # a training has begun
            begun = read_json(checkpoint.parent / "settings.json")["arguments"]["deepspeed"]
            settings["DEEPSPEED"] = begun or "none"  # its checkpoints load under no other
        print(f"DeepSpeed: {settings['DEEPSPEED']}")


def joint_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """Combinations of settings that would give wrong results, or fail hours after the start."""
    number = {name: int(value) for name, value in settings.items() if re.fullmatch(POSITIVE, value)}
    processes, together, rows = number["NPROC"], number["TENSOR_PARALLEL_SIZE"], number["GLOBAL_BATCH"]
    if together > 1 and (settings["ENGINE"] != "vllm" or processes % together):
        yield f"--tensor_parallel_size {together} needs --engine vllm, and must divide --nproc {processes}"
    if number["NNODES"] > 1 and not settings["RDZV_ENDPOINT"]:
        yield "--rdzv_endpoint is missing: with several machines it is host:port of machine 0"
    if rows % (at_once := processes * number["NNODES"] * number["TRAIN_BATCH"]):
        yield (
            f"--global_batch {rows} is no multiple of the {at_once} rows that {processes} processes on "
            f"{number['NNODES']} machines take at once, with --train_batch {number['TRAIN_BATCH']} each"
        )
    if (epoch := re.match(r"epoch(\d+)", settings["UNTIL"])) and int(epoch[1]) > number["EPOCHS"]:
        yield f"--until {settings['UNTIL']}: there are --epochs {number['EPOCHS']}"
    used = {"PLAY_ARGS": settings["CONTROL"] != "sft", "REWARD_ARGS": True, "EVAL_ARGS": settings["EVAL_WORDS"]}
    in_template = {name: "--chat_template" in settings[name] for name in used if used[name]}
    if len(set(in_template.values())) > 1:
        missing = ", ".join(f"--{name.lower()}" for name, given in in_template.items() if not given)
        yield f"--chat_template is missing in {missing}: play, rewards and matches must all have it"
    negative = float(settings["LOSERS"]) or float(settings["TIES"])
    if negative and settings["DETACH_KL"] == "False" and "--allow_negative_rewards" not in settings["TRAIN_ARGS"]:
        yield "--losers and --ties make rows with rewards below 0, which need --detach_kl True"
    needed = {"peft": settings["LORA_RANK"], "deepspeed": settings["DEEPSPEED"] != "none"}
    other = re.search(r"--lm_eval\b(?![= ]['\"]?accelerate )", settings["REASONING_ARGS"])  # accelerate is ours
    needed["lm_eval"] = settings["EVAL_TASKS"] and not other
    for package in (name for name, used in needed.items() if used and not find_spec(name)):
        yield f"{sys.executable} has no package {package}, which the settings need (requirements.txt names it)"


def as_number(value: str) -> float | str:
    """The number that a setting is, so that 1.0 and 1 are the same; other settings stay as they are."""
    try:
        return float(value)
    except ValueError:
        return value


def write_results(settings: Mapping[str, str], words: list[str], start: str, answers: str) -> None:
    path = Path(settings["OUTPUT"], "words.txt")
    text = "".join(f"{word}\n" for word in words[: int(settings["GAMES"] or len(words))])
    text *= int(settings["GAMES_PER_WORD"])
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{path}: not the words of --words, --games and --games_per_word; use another --output")
    stored = path.with_name("settings.json")
    if stored.is_file() and any(path.parent.glob("epoch*/*/*results.json")):
        before = settings | read_json(stored)
        if changed := differences(*({name: as_number(each[name]) for name in KEPT} for each in (before, settings))):
            raise UserError(
                f"{stored}: made with other settings ({'; '.join(changed)}); use another --output, or delete this "
                "file if the results were made with the new ones"
            )
    if settings["NODE_RANK"] == "0":
        with replacing(path) as file:
            file.write(text)
        write_json(stored, settings)
    precision = "" if settings["PRECISION"] == "fp32" else f"--{settings['PRECISION']} True"
    if settings["PRECISION"] == "bf16":
        from transformers.utils import is_torch_tf32_available

        precision += " --tf32 True" * is_torch_tf32_available()
    lines = [settings["NPROC"], precision, settings["GRADIENT_CHECKPOINTING"], settings["GAME_OPTIONS"]]
    lines += [settings["PROMPTS"], settings["MAX_TURNS"]]
    lines += [settings["DEEPSPEED"].removesuffix("none"), settings["MODEL"], settings["FIRST_EPISODES"], start]
    lines += [f"{name}={word}" for name in settings if name.endswith("_ARGS") for word in shlex.split(settings[name])]
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
    start = follow(settings) if settings["LIKE"] else ""
    problems, words = list(single_problems(settings)), []
    try:
        words = read_game(settings)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    refuse(problems)
    choose(settings)
    refuse(list(joint_problems(settings)))
    write_results(settings, words, start, given.answers)


if __name__ == "__main__":
    run_program(main)
