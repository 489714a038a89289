"""A study: the arms of a file, each a loop of its own, for several seeds.

    python -m tools.lab.study configs/arms/tiny.toml --output_dir outputs/tiny_study --seeds 20 21 22 --jobs 2

What is finished is kept; the same command continues. After each arm OUTPUT_DIR/seedN.json holds the numbers of the
seed, at the end OUTPUT_DIR/table.md those of all these seeds.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tools.common.errors import UserError, user_errors
from tools.common.files import ROOT, read_json, read_text, write_text
from tools.common.flags import FlagGroup, build_parser, flag
from tools.common.programs import INTERRUPTED, run_program
from tools.games.game import load_member
from tools.lab import table
from tools.loop.settings import TABLES, Loop, read_loop
from tools.loop.stages import TERMINATED, environment, say

# For each program, because seeds run side by side. Where the user has set these variables, they stay: a single seed on
# many cores, or a training with offload, whose optimizer runs on the CPU, needs more threads.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

# How a program ends after a signal: by the signal itself, or with the status of our own programs.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = (*(-number for number in STOPPING), INTERRUPTED, TERMINATED)

running: set[subprocess.Popen] = set()  # programs at work, of all seeds
stopping = threading.Event()  # no further program begins


@dataclass(kw_only=True)
class Flags(FlagGroup):
    output_dir: str | None = flag("folder of all results; unset: outputs/NAME_study for arms/NAME.toml", default=None)
    seeds: list[int] = flag("seeds of the study; the loops of seed N have the seed 100 x N", default=[0], unique=int)
    jobs: int = flag("seeds that run at once, with a thread each", default=1, at_least=1)
    settings: list[str] = flag(
        "settings of every loop; they count more than [all], and less than those of an arm",
        default=[],
        metavar="KEY=VALUE",
    )


# The file of arms.


@dataclass(kw_only=True)
class Study:
    arms: dict[str, dict]  # settings by arm
    all: dict = field(default_factory=dict)  # settings of every arm
    files: list[str] = field(default_factory=list)  # files of settings, which come before [all]
    prepare: str = ""  # a function that makes what the loops of a seed need
    after: str = ""  # a function that is called when a loop has ended
    # [MEASURE, ARM, OTHER], or with a margin within which the arms are called equal, [MEASURE, ARM, OTHER, MARGIN]:
    primary: list[list[str]] = field(default_factory=list)  # their p values are adjusted by Holm's method
    minus: list[list[str]] = field(default_factory=list)  # further ones
    picture: list[str] = field(default_factory=list)  # measures that are drawn by epoch


def read_study(path: str, settings: Sequence[str]) -> Study:
    """Read a file of arms. UserError for a wrong setting in it, also in the last arm, which may be days away.

    Files that settings name are not checked here, because `prepare` may still have to make them. Nor are measures of
    comparisons: only results bring their names.
    """
    study = Study(**tomllib.loads(read_text(path), parse_float=str))
    if taken := {table.BASE, table.IMITATION}.intersection(study.arms):
        raise UserError(f"{path}: [arms.{min(taken)}]: the name of a model that all arms share; choose another name")
    for arm in study.arms:
        with user_errors(f"{path}: [arms.{arm}]", UserError):
            settings_of(study, arm, settings)
    for function in filter(None, (study.prepare, study.after)):
        load_member(function)
    return study


def settings_of(study: Study, arm: str, settings: Sequence[str], seed: int = 0, folder: Path = Path()) -> Loop:
    """The settings of an arm, before what it takes over from its run `like`. UserError if the loop refuses them."""
    argv = loop_argv(study, arm, seed, folder, settings)
    if like := like_of(study, arm):
        argv = [*loop_argv(study, like, seed, folder, settings), *argv]
    loop = read_loop(argument for argument in argv if not argument.startswith("like="))
    for stage in TABLES:
        loop.of(stage)  # reads the values
    return loop


def like_of(study: Study, arm: str) -> str | None:
    """The arm that an arm begins like: the first one, unless it says another one. None for the first one."""
    arms = list(study.arms)
    default = None if arm == arms[0] else arms[0]
    like = study.arms[arm].get("like", default)
    if like and like not in arms[: arms.index(arm)]:
        raise UserError(f"like is {like!r}; expected an arm above it")
    return like


def loop_argv(study: Study, arm: str, seed: int, folder: Path, settings: Sequence[str]) -> list[str]:
    own = {key: value for key, value in study.arms[arm].items() if key != "like"}
    names = {"{seed}": str(seed), "{folder}": str(folder)}
    argv = [str(ROOT / name) for name in study.files]
    # Epoch k adds k to the seed of its loop, so loops with the seeds 1, 2, 3 would share draws.
    argv += [*arguments_of(study.all, names), f"seed={100 * seed}", f"output={folder / arm}"]
    if like := like_of(study, arm):
        argv.append(f"like={folder / like}")
    return [*argv, *settings, *arguments_of(own, names)]


def arguments_of(settings: Mapping[str, Any], names: Mapping[str, str], before: str = "") -> Iterator[str]:
    """Settings of TOML as arguments, KEY=VALUE, with `names` replaced. The keys of a table in them get dots."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from arguments_of(value, names, f"{before}{key}.")
        elif isinstance(value, list):
            yield f"{before}{key}={json.dumps([fill_names(item, names) for item in value], ensure_ascii=False)}"
        else:
            yield f"{before}{key}={fill_names(value, names)}"


def fill_names(value: Any, names: Mapping[str, str]) -> str:
    text = str(value)
    for name, its_value in names.items():
        text = text.replace(name, its_value)
    return text


# The loops.


class Stopped(Exception):
    """A signal ended a program of the study, or the study itself."""


def run_seed(study: Study, settings: Sequence[str], folder: Path, seed: int) -> None:
    """Run the arms that have not ended with these settings. UserError for one that fails, Stopped after a signal.

    One after the other, because later arms begin with the imitation model and the games of an earlier one.
    ARM.finished holds the command of an arm that has ended. With another command the arm runs again, but its loop
    refuses settings that change results in the same folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if study.prepare:
        of_first = settings_of(study, next(iter(study.arms)), settings, seed, folder).given
        run(function_command(study.prepare, folder=str(folder), seed=seed, settings=of_first), folder / "prepare.log")
    for arm in study.arms:
        argv = loop_argv(study, arm, seed, folder, settings)
        mark, log = folder / f"{arm}.finished", folder / f"{arm}.log"
        if mark.is_file() and read_text(mark) == f"{shlex.join(argv)}\n":
            continue
        if stopping.is_set():
            raise Stopped
        say(f"seed {seed}: {arm}")
        run(loop_command(argv), log)
        if study.after:
            run(function_command(study.after, loop=str(folder / arm)), log)
        # In the order of the file: an arm that was put between others ends after those behind it.
        ended = [name for name in study.arms if name == arm or (folder / f"{name}.finished").is_file()]
        table.collect(folder, ended)
        write_text(mark, f"{shlex.join(argv)}\n")


def loop_command(argv: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tools.run_spag", *argv]


def function_command(function: str, **arguments) -> list[str]:
    return [sys.executable, "-m", "tools.lab.preparations", function, json.dumps(arguments)]


def run(command: Sequence[str], log: Path) -> None:
    """Run a program, whose output goes to the end of a log. UserError if its exit status is not 0.

    Stopped if a signal ended it: that of Ctrl-C goes to all programs of a terminal, and may end them before this one.
    Then no seed goes on. SIGKILL, such as for want of memory, is none of these signals: it fails its seed alone.
    """
    if stopping.is_set():
        raise Stopped
    with open(log, "ab") as file:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    running.add(program)
    status = program.wait()
    running.discard(program)
    if status in STOPPED:
        stopping.set()
        raise Stopped
    if status:
        raise UserError(f"log: {log}")


def hand_on(number: int, frame) -> NoReturn:
    """End the programs at work by the signal that ends the study: SIGTERM, or SIGHUP of a terminal that closes.

    Ctrl-C needs no handler, because a terminal sends its signal to these programs too.
    """
    stopping.set()
    for program in list(running):
        program.send_signal(number)
    sys.exit(TERMINATED)


def run_and_report(study: Study, settings: Sequence[str], output: Path, seed: int) -> bool:
    """Run a seed to its end, and return whether it succeeded. If it fails, this is said, and the other seeds go on."""
    try:
        run_seed(study, settings, output / f"seed{seed}", seed)
    except Stopped:
        return False
    except (UserError, OSError) as error:
        say(f"seed {seed} failed; {error}")
        return False
    return True


def main() -> None:
    parser = build_parser(Flags, description=__doc__)
    parser.add_argument("arms", help="file of arms, such as configs/arms/tiny.toml")
    given = vars(parser.parse_args())
    arms = given.pop("arms")
    flags = Flags(**given)
    study = read_study(arms, flags.settings)
    output = Path(flags.output_dir or f"outputs/{Path(arms).stem}_study")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, hand_on)
    os.environ.update(ONE_THREAD | environment())
    pool = ThreadPoolExecutor(flags.jobs)  # threads suffice: they only wait for programs
    try:
        ended = list(pool.map(partial(run_and_report, study, flags.settings, output), flags.seeds))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C no further seed begins
    if stopping.is_set():
        say("a signal ended a program, so the study stops; what is finished is kept; the same command continues")
    if not all(ended):
        # No table of fewer seeds than the command names. The command with --seeds of those that have ended writes it.
        sys.exit(1)
    seeds = [read_json(output / f"seed{seed}.json") for seed in flags.seeds]
    write_text(output / "table.md", table.table_text(seeds, study.primary, study.minus))
    say(f"finished; the table is {output / 'table.md'}")


if __name__ == "__main__":
    run_program(main, kept="what is finished is kept; the same command continues")
