"""What is cheap to check of the loop's settings, before its first stage."""

import logging
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from tools.games.game import Game
from tools.games.prompts import templates_digest
from tools.loop import fit
from tools.loop.fit import DEFAULTS, NUMBER
from tools.selfplay.layout import layout_of
from tools.selfplay.row_flags import RowFlags
from utils import UserError, read_json, read_words

KINDS = {  # settings with which the shell computes, or which it compares: what they must be, and its pattern
    "a whole number of at least 1": (
        "EPOCHS GAMES_PER_WORD MAX_LENGTH MAX_NEW_TOKENS GLOBAL_BATCH TRAIN_BATCH EVAL_GAMES_PER_WORD EVAL_EVERY "
        "NNODES TENSOR_PARALLEL_SIZE",
        r"[1-9]\d*",
    ),
    "a whole number of at least 0": ("SEED NODE_RANK TOP_K", r"0|[1-9]\d*"),
    "a whole number of at least 1, or auto": ("NPROC", r"auto|[1-9]\d*"),
    "a whole number of at least 1, or empty": ("GAMES MAX_TURNS LORA_RANK PLAY_BATCH", r"([1-9]\d*)?"),
    "whole numbers, each once": ("EVAL_SEEDS", r"(?!.*\b(\d+)\b.*\b\1\b) *\d+( +\d+)* *"),
    "auto, vllm, slots or generate": ("ENGINE", "auto|vllm|slots|generate"),
    "True or False": ("CHAT_TEMPLATE EVAL_IMITATION REPORT VERBOSE", "True|False"),
    "bf16, fp16, fp32 or auto": ("PRECISION", "bf16|fp16|fp32|auto"),
    "coin, coin_by_length, cloning, sft, silent, or empty": ("CONTROL", "|coin|coin_by_length|cloning|sft|silent"),
    "imitation, epochK_play, epochK_train, or empty": ("UNTIL", r"|imitation|epoch[1-9]\d*_(play|train)"),
}
FILES = ("IMITATION_DATA", "SFT_DATA", "PROMPTS", "FIRST_EPISODES", "DEEPSPEED")
logger = logging.getLogger(__name__)


def checked(settings: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the settings, with those that were left open, and the words. UserError lists all that is wrong."""
    settings |= fit.follow(settings)
    problems = list(value_problems(settings))
    if not problems:
        try:
            game, words = read_game(settings)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    problems += content_problems(settings)
    if not problems:
        settings |= fit.choose(settings) | {"MAX_TURNS": settings["MAX_TURNS"] or str(game.max_turns)}
        problems += joint_problems(settings)
    if problems:
        raise UserError("\n".join(problems))
    return {name: settings[name] for name in DEFAULTS}, words


def value_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings whose values are of another kind than they must be."""
    yield from (f"{name}=... is missing" for name in ("MODEL", "WORDS", "OUTPUT") if not settings[name])
    listed = set()
    for kind, (names, pattern) in KINDS.items():
        listed.update(names.split())
        wrong = (name for name in names.split() if not re.fullmatch(pattern, settings[name]))
        yield from (f"{name}={settings[name]}: must be {kind}" for name in wrong)
    for name in (name for name, default in DEFAULTS.items() if name not in listed and NUMBER.fullmatch(default)):
        if not NUMBER.fullmatch(settings[name]):
            yield f"{name}={settings[name]}: must be a number, such as {DEFAULTS[name]}"


def content_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield missing files, misspelled benchmarks, and further flags that cannot be read or are settings."""
    imitation = {"IMITATION_DATA": settings["IMITATION_DATA"].split()}  # may be several files; the others are one path
    for name, path in ((each, path) for each in FILES for path in imitation.get(each, [settings[each]])):
        if path not in ("", "auto", "none") and not (Path(path).is_file() and Path(path).stat().st_size):
            yield f"{name}={path}: no such file, or it is empty"
    if settings["CHAT_TEMPLATE"] == "True" and not may_have_chat_template(settings["MODEL"]):
        yield f"CHAT_TEMPLATE=True: the tokenizer of {settings['MODEL']} has no chat template"
    if settings["EVAL_TASKS"]:
        yield from task_problems(settings["EVAL_TASKS"].split())
    for name in (name for name in settings if name.endswith("_ARGS")):
        try:
            flags = [word.partition("=")[0] for word in shlex.split(settings[name])]
        except ValueError as error:
            yield f"{name}={settings[name]}: {error}"
        else:
            if "--chat_template" in flags and name != "REASONING_ARGS":
                yield f"{name}: say CHAT_TEMPLATE=True instead of --chat_template; play, rows and matches all need it"


def task_problems(tasks: list[str]) -> Iterator[str]:
    """Yield benchmarks that are spelled in another way. (Other names are tasks of the harness.)"""
    from tools.reasoning.jobs import BENCHMARKS  # imports scipy

    known = {benchmark.name.lower(): benchmark.name for benchmark in BENCHMARKS}
    for task in (task.partition(":")[0] for task in tasks):
        if task != known.get(task.lower(), task):
            yield f"EVAL_TASKS={task}: this benchmark is called {known[task.lower()]}"


def may_have_chat_template(model: str) -> bool:
    """False for a folder whose tokenizer has no chat template. Of models on the hub nothing is known here."""
    config = Path(model, "tokenizer_config.json")
    if not config.is_file() or Path(model, "chat_template.jinja").is_file():
        return True
    return "chat_template" in read_json(config)


def joint_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield combinations of settings that would give wrong results, or fail hours after the start."""
    names = ("NPROC", "NNODES", "GLOBAL_BATCH", "TRAIN_BATCH", "TENSOR_PARALLEL_SIZE")
    number = {name: int(settings[name]) for name in names}
    at_once = number["NPROC"] * number["NNODES"] * number["TRAIN_BATCH"]
    if number["GLOBAL_BATCH"] % at_once:
        yield (
            f"GLOBAL_BATCH={number['GLOBAL_BATCH']} is no multiple of the {at_once} rows that {number['NPROC']} "
            f"processes on {number['NNODES']} machines take at once, with TRAIN_BATCH={number['TRAIN_BATCH']} each"
        )
    together = number["TENSOR_PARALLEL_SIZE"]
    if together > 1 and (settings["ENGINE"] != "vllm" or number["NPROC"] % together):
        yield f"TENSOR_PARALLEL_SIZE={together} needs ENGINE=vllm, and must divide NPROC={number['NPROC']}"
    if float(settings["TEMPERATURE"]) == 0:
        yield "TEMPERATURE=0: must be above 0"
    if int(settings["MAX_LENGTH"]) <= int(settings["MAX_NEW_TOKENS"]):
        yield f"MAX_LENGTH={settings['MAX_LENGTH']}: must be larger than MAX_NEW_TOKENS={settings['MAX_NEW_TOKENS']}"
    if number["NNODES"] > 1 and not settings["RDZV_ENDPOINT"]:
        yield "RDZV_ENDPOINT=... is missing: with several machines it is host:port of machine 0"
    epoch = re.match(r"epoch(\d+)", settings["UNTIL"])
    if epoch and int(epoch[1]) > int(settings["EPOCHS"]):
        yield f"UNTIL={settings['UNTIL']}: there are EPOCHS={settings['EPOCHS']}"
    negative = float(settings["LOSERS"]) or float(settings["TIES"])
    if negative and settings["DETACH_KL"] == "False" and "--allow_negative_rewards" not in settings["TRAIN_ARGS"]:
        yield "LOSERS and TIES make rows with rewards below 0, which need DETACH_KL=True"
    needed = {
        "vllm": settings["ENGINE"] == "vllm",
        "peft": settings["LORA_RANK"],
        "deepspeed": settings["DEEPSPEED"] != "none",
    }
    own_harness = "--lm_eval" not in settings["REASONING_ARGS"] or "accelerate launch" in settings["REASONING_ARGS"]
    needed["lm_eval"] = settings["EVAL_TASKS"] and own_harness
    for package in (name for name, is_needed in needed.items() if is_needed and not find_spec(name)):
        yield f"the settings need the package {package}, which requirements.txt names"


def read_game(settings: Mapping[str, str]) -> tuple[Game, list[str]]:
    """Return the game and the words of self-play. UserError for a wrong game, prompts, words, layout or control."""
    own = {field.name: field.type for field in fields(RowFlags)}
    numbers = [name for name in settings if own.get(name.lower()) is float]  # DECAY_WEIGHT, LOSERS, ...
    flags = RowFlags(
        game=settings["GAME"],
        game_options=settings["GAME_OPTIONS"].split(),
        prompt_templates=settings["PROMPTS"] or None,
        control=settings["CONTROL"] or None,
        like_rows=settings["LIKE"] or None,
        **{name.lower(): float(settings[name]) for name in numbers},
    )
    game = flags.load_game()
    flags.check(game, settings["SFT_DATA"])
    check_layout(settings, templates_digest(flags.load_templates(game)))
    if "--game" not in settings["EVAL_ARGS"]:  # the match may be of another game
        for item in settings["EVAL_WORDS"].split():
            read_words(item.partition("=")[2] or item, game.check_task)
    return game, read_words(settings["WORDS"], game.check_task)


def check_layout(settings: Mapping[str, str], prompts: str) -> None:
    """Raise UserError if the rows of imitation were made for other prompts than those of play (their digest)."""
    layouts = {path: layout_of(path) for path in settings["IMITATION_DATA"].split()}
    known = {path: layout for path, layout in layouts.items() if layout}
    for path in layouts.keys() - known.keys():
        logger.warning("%s: nothing says how these rows were made; their prompts should be like those of play", path)
    for path, layout in known.items():
        if bool(layout["chat_template"]) != (settings["CHAT_TEMPLATE"] == "True"):
            given = "with" if layout["chat_template"] else "without"
            raise UserError(f"IMITATION_DATA={path}: rows {given} a chat template need another CHAT_TEMPLATE")
    if known and prompts not in [layout["prompt_templates"] for layout in known.values()]:
        raise UserError(f"IMITATION_DATA={' '.join(known)}: made with other prompts than those of play; see PROMPTS")
