"""The first and the last command of the loop: check its settings and record them; at the end, mark them as finished.

    python -m tools.loop.begin [--lock DESCRIPTOR] NAME=VALUE ...
    python -m tools.loop.begin --end OUTPUT

The first takes all settings of configs/defaults.sh and checks what is cheap to check. All problems are said at once
(exit status 2), and nothing is written. Else it writes OUTPUT/words.txt, the words of an epoch, and
OUTPUT/settings.json, the record of the loop. A loop whose results were made with other settings is refused.

--lock names the descriptor of OUTPUT's lock file. The lock belongs to the open file, so tools/run_spag.sh, which
opened it, and the stage that it runs keep it after this program has ended.
"""

import argparse
import fcntl
import logging
import re
import shlex
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import psutil

from tools.games.game import Game
from tools.games.prompts import templates_digest
from tools.loop import fit
from tools.loop.fit import DEFAULTS
from tools.selfplay.layout import layout_of
from tools.selfplay.rows import RowFlags
from utils import UserError, read_json, read_words, replacing, run_program, set_up_logging, shown, stage

KINDS = {  # settings with which the shell computes, or which it compares: what they must be, and its pattern
    "a whole number of at least 1": (
        "EPOCHS GAMES_PER_WORD GLOBAL_BATCH TRAIN_BATCH EVAL_EVERY NNODES TENSOR_PARALLEL_SIZE",
        r"[1-9]\d*",
    ),
    "a whole number of at least 0": ("SEED NODE_RANK", r"0|[1-9]\d*"),
    "a whole number of at least 1, or auto": ("NPROC", r"auto|[1-9]\d*"),
    "a whole number of at least 1, or empty": ("GAMES", r"([1-9]\d*)?"),
    "True or False": ("CHAT_TEMPLATE EVAL_IMITATION REPORT VERBOSE", "True|False"),
    "bf16, fp16, fp32 or auto": ("PRECISION", "bf16|fp16|fp32|auto"),
    "coin, coin_by_length, cloning, sft, silent, or empty": ("CONTROL", "|coin|coin_by_length|cloning|sft|silent"),
    "imitation, epochK_play, epochK_train, or empty": ("UNTIL", r"|imitation|epoch[1-9]\d*_(play|train)"),
}
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
FILES = ("IMITATION_DATA", "SFT_DATA", "PROMPTS", "FIRST_EPISODES", "DEEPSPEED")

# Settings that may differ at each start: the machine, how much is done, and what is shown. (The words of WORDS are
# compared by words.txt; training knows itself which DeepSpeed files continue a checkpoint.)
FREE = set(
    "OUTPUT WORDS NPROC NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID TENSOR_PARALLEL_SIZE PLAY_BATCH DEEPSPEED "
    "GRADIENT_CHECKPOINTING SAVE_STEPS EPOCHS UNTIL EVAL_EVERY EVAL_IMITATION EVAL_TASKS REASONING_ARGS REPORT VERBOSE"
    .split()
)  # fmt: skip
# Settings of later stages may differ until such a stage has results. All other settings may not differ once there is
# any result.
TRAINED = ("epoch*/model/*_results.json", "epoch*/model/checkpoint-*/complete.json")
UNTIL_THERE = {
    "PLAY_ARGS": ("epoch*/episodes/*_rank*.jsonl", "epoch*/rows/*rows.json", *TRAINED),
    "DECAY_WEIGHT LOSERS TIES ROLE_WEIGHTS REWARD_ARGS": ("epoch*/rows/*rows.json", *TRAINED),
    "LEARNING_RATE KL SFT_COEFF CLIP_RANGE DETACH_KL TRAIN_ARGS": TRAINED,
    "EVAL_WORDS EVAL_SEEDS EVAL_GAMES_PER_WORD EVAL_ARGS": ("*/eval/*_rank*.jsonl", "*/eval/*_results.json"),
}
RECORD = "settings.json"
RESULTS = ["*/*/*_results.json", "*/*/*_rank*.jsonl", "epoch*/rows/*rows.json", "*/model/checkpoint-*/complete.json"]
logger = logging.getLogger(__name__)


def take_lock(descriptor: int, output: str) -> None:
    """Lock OUTPUT for the process that opened the descriptor. UserError if a loop is at work there."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        at_work = "; ".join(processes_of(output)) or "on another machine"
        raise UserError(
            f"{output}: another process is at work in this folder: {at_work}; end that one first"
        ) from None
    except OSError as error:
        logger.warning("%s: no locks on this file system (%s); run one loop at a time", output, error)


def processes_of(output: str) -> list[str]:
    """The processes that name this folder in their command lines, without this one and those that started it."""
    own = {process.pid for process in (psutil.Process(), *psutil.Process().parents())}
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if process.info["pid"] not in own and re.search(rf"(^|[ =]){re.escape(output)}([/ ]|$)", command):
            found.append(f"pid {process.info['pid']} ({shown(command)[:120]})")
    return found


def value_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings whose values are of another kind than they must be."""
    yield from (f"{name}=... is missing" for name in ("MODEL", "WORDS", "OUTPUT") if not settings[name])
    checked = set()
    for kind, (names, pattern) in KINDS.items():
        checked.update(names.split())
        wrong = (name for name in names.split() if not re.fullmatch(pattern, settings[name]))
        yield from (f"{name}={settings[name]}: must be {kind}" for name in wrong)
    for name in (name for name, default in DEFAULTS.items() if name not in checked and NUMBER.fullmatch(default)):
        words = settings[name].split()  # EVAL_SEEDS may be several
        if not words or not all(map(NUMBER.fullmatch, words)):
            yield f"{name}={settings[name]}: must be a number, such as {DEFAULTS[name]}"


def content_problems(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield missing files, misspelled benchmarks, and further flags that cannot be read or are settings."""
    for name, path in ((each, path) for each in FILES for path in settings[each].split()):
        if path not in ("auto", "none") and not (Path(path).is_file() and Path(path).stat().st_size):
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
    if number["NNODES"] > 1 and not settings["RDZV_ENDPOINT"]:
        yield "RDZV_ENDPOINT=... is missing: with several machines it is host:port of machine 0"
    epoch = re.match(r"epoch(\d+)", settings["UNTIL"])
    if epoch and int(epoch[1]) > int(settings["EPOCHS"]):
        yield f"UNTIL={settings['UNTIL']}: there are EPOCHS={settings['EPOCHS']}"
    negative = float(settings["LOSERS"]) or float(settings["TIES"])
    if negative and settings["DETACH_KL"] == "False" and "--allow_negative_rewards" not in settings["TRAIN_ARGS"]:
        yield "LOSERS and TIES make rows with rewards below 0, which need DETACH_KL=True"
    needed = {"peft": settings["LORA_RANK"], "deepspeed": settings["DEEPSPEED"] != "none"}
    own_harness = "--lm_eval" not in settings["REASONING_ARGS"] or "accelerate launch" in settings["REASONING_ARGS"]
    needed["lm_eval"] = settings["EVAL_TASKS"] and own_harness
    for package in (name for name, is_needed in needed.items() if is_needed and not find_spec(name)):
        yield f"the settings need the package {package}, which requirements.txt names"


def read_game(settings: Mapping[str, str]) -> tuple[Game, list[str]]:
    """Return the game and the words of self-play. UserError for a wrong game, prompts, words, layout or control."""
    numbers = ("DECAY_WEIGHT", "LOSERS", "TIES", "SFT_COEFF")
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


def free_settings(settings: Mapping[str, str]) -> set[str]:
    """The names of settings that may differ from those of the results in OUTPUT."""
    free, folder = set(FREE), Path(settings["OUTPUT"])
    for names, patterns in UNTIL_THERE.items():
        if not any(chain(*map(folder.glob, patterns))):
            free |= set(names.split())
    step = "loss_normalization step"  # where the rows of a step are averaged, those of a micro-batch do not matter
    arguments = [settings["TRAIN_ARGS"], *([settings["IMITATION_ARGS"]] if settings["IMITATION_DATA"] else [])]
    return free | {"TRAIN_BATCH"} if all(step in text.replace("=", " ") for text in arguments) else free


def as_recorded(settings: Mapping[str, str], path: Path) -> dict[str, str]:
    """The settings, with numbers spelled as in the record: 1.0 and 1 are the same."""
    try:
        before = read_json(path)["settings"].items()
        numbers = {name: value for name, value in before if NUMBER.fullmatch(value)}
    except (OSError, UserError, KeyError, TypeError, AttributeError):
        return dict(settings)  # `stage` says what is wrong with the record
    same = {
        name
        for name in numbers.keys() & settings.keys()
        if NUMBER.fullmatch(settings[name]) and float(settings[name]) == float(numbers[name])
    }
    return {name: numbers[name] if name in same else value for name, value in settings.items()}


def begin(settings: Mapping[str, str], words: list[str]) -> None:
    """Write OUTPUT/words.txt and the loop's record. UserError for results made with other settings or words."""
    path = Path(settings["OUTPUT"], RECORD)
    text = "".join(f"{word}\n" for word in words[: int(settings["GAMES"] or len(words))])
    text *= int(settings["GAMES_PER_WORD"])
    stored = path.with_name("words.txt")
    if stored.is_file() and stored.read_text(encoding="utf-8") != text:
        raise UserError(
            f"{stored}: not the words of WORDS, GAMES and GAMES_PER_WORD; use another OUTPUT, or delete this file if "
            "no game was played yet"
        )
    with stage(path, as_recorded(settings, path), results=RESULTS, may_change=free_settings(settings)) as todo:
        if not stored.is_file():
            with replacing(stored) as file:
                file.write(text)
        todo.needed = False  # the record stays as it is until the loop ends


def end(output: str) -> None:
    """Mark the loop's record as finished."""
    path = Path(output, RECORD)
    with stage(path, read_json(path)["settings"], results=RESULTS):
        pass


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lock", type=int, metavar="DESCRIPTOR", help="of OUTPUT's lock file")
    parser.add_argument("--end", metavar="OUTPUT", help="the loop has ended: mark its record as finished")
    parser.add_argument("settings", metavar="NAME=VALUE", nargs="*", help="all settings of the loop")
    given = parser.parse_args()
    set_up_logging()
    if given.end:
        return end(given.end)
    settings = dict(pair.split("=", 1) for pair in given.settings)
    if given.lock is not None:
        take_lock(given.lock, settings["OUTPUT"])
    settings, words = checked(settings)
    if settings["NODE_RANK"] == "0":
        begin(settings, words)


if __name__ == "__main__":
    run_program(main)
