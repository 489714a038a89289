"""Run a study: the arms of a file, for several seeds, each a loop of tools/run_spag.sh.

    python -m tools.study.run --arms configs/arms/tiny.txt --settings configs/tiny.sh --seeds 0 1 2 --jobs 2 \\
      --output_dir outputs/study

For each seed the first arm makes the imitation model and the games of epoch 1, and the other arms start from both. An
arm whose words name {folder} reads files of other arms and begins after them. What is finished is kept, and the same
command continues. Results are in OUTPUT_DIR, in seedN.json and table.md.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.flags import flag, parse_flags
from tools.study.loops import epoch_folders, loop_record, seed_results
from tools.study.plan import EVERY, IMITATION, LAST, Plan, read_plan
from tools.study.results import refusal
from tools.study.table import tables
from utils import ROOT, UserError, replacing, run_program, too_small, write_json

# The settings of a loop's match and the flags of tools/evaluate_games.py for them.
MATCH_FLAGS = {"EVAL_WORDS": "words", "EVAL_SEEDS": "seeds", "EVAL_GAMES_PER_WORD": "games_per_word", "GAME": "game"}
MATCH_FLAGS |= {"GAME_OPTIONS": "game_options", "PROMPTS": "prompt_templates", "CHAT_TEMPLATE": "chat_template"}
MATCH_FLAGS |= {name.upper(): name for name in "max_turns max_length max_new_tokens temperature top_k engine".split()}
MATCH_FLAGS |= {"PLAY_BATCH": "per_device_eval_batch_size"}


@dataclass(kw_only=True)
class Flags:
    """The flags of this program."""

    arms: str = flag("file of arms", metavar="FILE")
    settings: list[str] = flag("settings of every loop, NAME=VALUE, and files of them", default=[], metavar="WORD")
    seeds: list[int] = flag("seeds; the loops of seed N have SEED=N00", default=[0], metavar="N")
    jobs: int = flag("loops or matches at once, with a thread each", default=1)
    only: list[str] = flag("run these arms of the file, and its first one; unset: all", default=[], metavar="ARM")
    output_dir: str = flag("folder of all results")


class Job(NamedTuple):
    """A command for a seed. In the seed's folder, NAME.log has its output and NAME.finished says that it has ended."""

    folder: Path
    name: str
    command: list[str]

    def path(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{kind}"

    def is_finished(self) -> bool:
        mark = self.path("finished")
        return mark.is_file() and mark.read_text(encoding="utf-8").strip() == " ".join(self.command)


def number_of(folder: Path) -> int:
    """The number of a seed by its folder, seedN."""
    return int(folder.name.removeprefix("seed"))


def fill(words: Iterable[str], folder: Path) -> list[str]:
    """The words for a seed."""
    return [word.replace("{seed}", str(number_of(folder))).replace("{folder}", str(folder)) for word in words]


def loop(plan: Plan, settings: Sequence[str], folder: Path, arm: str) -> Job:
    """The loop of an arm, which adds the number of the epoch to its seed."""
    files = [word for word in settings if "=" not in word]
    words = [f"SEED={100 * number_of(folder)}", *plan.all, *(word for word in settings if "=" in word)]
    words.append(f"OUTPUT={folder / arm}")
    if arm != plan.first:
        words.append(f"LIKE={folder / plan.first}")
    words += [f"{name}={value}" for name, value in plan.arms[arm].items()]
    return Job(folder, arm, [f"{ROOT}/tools/run_spag.sh", *files, *fill(words, folder)])


def run_jobs(jobs: Sequence[Job], plan: Plan, at_once: int) -> None:
    """Run jobs, at most so many at once, and keep the results of each. UserError at the end if one has failed."""
    waiting, running, failed = list(jobs), {}, []
    try:
        while waiting or running:
            if waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[start(job)] = job
                continue
            time.sleep(0.5)
            for process in [process for process in running if process.poll() is not None]:
                job = running.pop(process)
                if process.returncode:
                    failed.append(str(job.path("log")))
                else:
                    job.path("finished").write_text(" ".join(job.command) + "\n", encoding="utf-8")
                    keep(job.folder, plan)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    if failed:
        raise UserError(f"failed; the same command continues. Logs: {' '.join(failed)}")


def start(job: Job) -> subprocess.Popen:
    """Start a command."""
    say(f"{job.folder}: {job.name}")
    job.folder.mkdir(parents=True, exist_ok=True)
    job.path("finished").unlink(missing_ok=True)
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with open(job.path("log"), "a", encoding="utf-8") as log:
        files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(job.command, env=environment, **files)


def keep(folder: Path, plan: Plan) -> dict:
    """Write seedN.json, what the arms show that have ended, and return it."""
    arms = [arm for arm in plan.arms if (folder / f"{arm}.finished").is_file()]
    results = {"seed": number_of(folder), "arms": seed_results(folder, plan, arms)}
    write_json(folder.with_suffix(".json"), results)
    return results


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def matches(folder: Path, plan: Plan, arms: Sequence[str]) -> Iterator[Job]:
    """The matches of these arms of a seed that the plan names. Loops without matches are left out of `last` and
    `every`."""
    for which, opponent, *flags in plan.matches:
        opponent, equals, player = opponent.partition("=")
        if not equals:
            if opponent not in arms:
                continue
            player = weights(trained_epochs(folder / opponent)[-1])
        for arm in (arm for arm in arms if which in (LAST, EVERY, arm)):
            models = {IMITATION: folder / arm / IMITATION} if arm == plan.first and which != arm else {}
            if which == EVERY:
                models |= {epoch.name: epoch for epoch in trained_epochs(folder / arm)}
            else:
                models[arm] = trained_epochs(folder / arm)[-1]
            for name, model in models.items() if loop_record(folder / arm)[0]["EVAL_WORDS"] else ():
                players = [f"{name}={weights(model)}", f"{opponent}={player}", "--against", opponent]
                command = match_command(model, opponent, players)
                yield Job(folder, f"{arm}_{model.name}_against_{opponent}", [*command, *flags])


def match_command(model: Path, opponent: str, players: Sequence[str]) -> list[str]:
    """A match with words, seeds and sampling of the loop's own. `model` is its folder, of an epoch or of imitation."""
    settings, _ = loop_record(model.parent)
    command = [sys.executable, "-m", "tools.evaluate_games", "--output_dir", str(model / f"against_{opponent}")]
    command += ["--players", *players, "--task_type", "sampling"]
    for name, flag_name in MATCH_FLAGS.items():
        command += [f"--{flag_name}", *settings[name].split()] if settings.get(name) else []
    command += [f"--{settings['PRECISION']}", "True"] if settings["PRECISION"] in ("bf16", "fp16") else []
    return command + shlex.split(settings["EVAL_ARGS"])


def trained_epochs(loop: Path) -> list[Path]:
    """The folders of the epochs that have a model. UserError if there is none."""
    if not (found := [epoch for epoch in epoch_folders(loop) if (epoch / "model/train_results.json").is_file()]):
        raise UserError(f"{loop}: no epoch has been trained, so there is no model for a match")
    return found


def weights(model: Path) -> str:
    """The weights of a model by its folder. Without rows of imitation, the imitation model is MODEL."""
    settings, _ = loop_record(model.parent)
    if model.name == IMITATION and not settings["IMITATION_DATA"]:
        return settings["MODEL"]
    return str(model / ("model/merged" if settings["LORA_RANK"] else "model"))


def study(plan: Plan, settings: Sequence[str], folders: list[Path], arms: Sequence[str]) -> Iterator[list[Job]]:
    """The jobs of a study of these arms. Those of a list may run at once, after all of the lists before."""

    def python(name: str, words: list[str]) -> list[Job]:
        return [Job(folder, name, [sys.executable, *fill(words, folder)]) for folder in folders if words]

    def loops(arms: list[str]) -> list[Job]:
        jobs = [loop(plan, settings, folder, arm) for folder in folders for arm in arms]
        return [job for job in jobs if not job.is_finished()]  # a loop needs minutes to see that all is there

    first, *others = arms
    readers = [arm for arm in others if "{folder}" in " ".join(plan.arms[arm].values())]
    yield python("before", plan.before)
    yield loops([first])
    folders = [folder for folder in folders if not refusal(keep(folder, plan), plan)]
    yield loops([arm for arm in others if arm not in readers])
    yield loops(readers)
    yield [job for folder in folders for job in matches(folder, plan, arms)]
    yield python("after", plan.after)


def stop(*_) -> None:
    sys.stderr.write("stopped; the same command continues\n")
    sys.exit(143)


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    plan, output = read_plan(flags.arms), Path(flags.output_dir)
    if problems := too_small(flags, jobs=1):
        raise UserError(problems[0])
    if unknown := {*flags.only} - {*plan.arms}:
        raise UserError(f"--only {' '.join(sorted(unknown))}: no arm of {flags.arms} has this name")
    arms = [arm for arm in plan.arms if not flags.only or arm in (plan.first, *flags.only)]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    folders = [output / f"seed{number}" for number in flags.seeds]
    for jobs in study(plan, flags.settings, folders, arms):
        run_jobs(jobs, plan, flags.jobs)
    with replacing(output / "table.md") as file:
        file.write(tables([keep(folder, plan) for folder in folders], plan))
    say(f"finished; tables are in {output}/table.md")


if __name__ == "__main__":
    run_program(main)
