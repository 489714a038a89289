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
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import psutil

from tools.loop.checks import checked
from tools.loop.fit import DEFAULTS, NUMBER
from utils import UserError, read_json, replacing, run_program, set_up_logging, shown, stage

# Settings that may differ at each start: the machine, how much is done, and what is shown. (The words of WORDS are
# compared by words.txt; training knows itself which DeepSpeed files continue a checkpoint.)
FREE = set(
    "OUTPUT WORDS NPROC NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID TENSOR_PARALLEL_SIZE PLAY_BATCH DEEPSPEED "
    "GRADIENT_CHECKPOINTING SAVE_STEPS EPOCHS UNTIL EVAL_EVERY EVAL_IMITATION EVAL_TASKS REASONING_ARGS REPORT VERBOSE"
    .split()
)  # fmt: skip
# Settings of later stages may differ until such a stage has results. All other settings may not differ once there is
# any result.
PLAYED = ("epoch*/episodes/*_rank*.jsonl", "*/eval/*_rank*.jsonl")
ROWS = "epoch*/rows/*rows.json"
TRAINED = ("epoch*/model/*_results.json", "epoch*/model/checkpoint-*/complete.json")
UNTIL_THERE = {
    "MAX_TURNS MAX_NEW_TOKENS TEMPERATURE TOP_K ENGINE PLAY_ARGS": (*PLAYED, ROWS, *TRAINED),
    "SFT_DATA FIRST_EPISODES DECAY_WEIGHT LOSERS TIES ROLE_WEIGHTS REWARD_ARGS": (ROWS, *TRAINED),
    "LEARNING_RATE KL SFT_COEFF CLIP_RANGE DETACH_KL TRAIN_ARGS": TRAINED,
    "EVAL_WORDS EVAL_SEEDS EVAL_GAMES_PER_WORD EVAL_ARGS": ("*/eval/*_rank*.jsonl", "*/eval/*_results.json"),
}
RECORD = "settings.json"
RESULTS = ["*/*/*_results.json", "*/*/*_rank*.jsonl", ROWS, "*/model/checkpoint-*/complete.json"]
logger = logging.getLogger(__name__)


def take_lock(descriptor: int, output: str) -> None:
    """Lock OUTPUT for the process that opened the descriptor. UserError if a loop is at work there."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        at_work = "; ".join(processes_of(output)) or "it may run on another machine"
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


def free_settings(settings: Mapping[str, str]) -> set[str]:
    """The names of settings that may differ from those of the results in OUTPUT."""
    free, folder = set(FREE), Path(settings["OUTPUT"])
    for names, patterns in UNTIL_THERE.items():
        if not any(chain(*map(folder.glob, patterns))):
            free.update(names.split())
    step = "loss_normalization step"  # where the rows of a step are averaged, those of a micro-batch do not matter
    arguments = [settings["TRAIN_ARGS"], *([settings["IMITATION_ARGS"]] if settings["IMITATION_DATA"] else [])]
    return free | {"TRAIN_BATCH"} if all(step in text.replace("=", " ") for text in arguments) else free


def as_recorded(settings: Mapping[str, str], path: Path) -> dict[str, str]:
    """The settings, with numbers spelled as in the record: 1.0 and 1 are the same.

    A setting that came into the loop after the record was written is left out while it has its default.
    """
    try:
        before = read_json(path)["settings"]
        numbers = {name: value for name, value in before.items() if NUMBER.fullmatch(value)}
    except (OSError, UserError, KeyError, TypeError, AttributeError):
        return dict(settings)  # `stage` says what is wrong with the record
    same = {
        name
        for name in numbers.keys() & settings.keys()
        if NUMBER.fullmatch(settings[name]) and float(settings[name]) == float(numbers[name])
    }
    known = {name: value for name, value in settings.items() if name in before or value != DEFAULTS.get(name)}
    return {name: numbers[name] if name in same else value for name, value in known.items()}


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
