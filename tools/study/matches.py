"""Play the matches that a file of arms names, between the models of a seed and against players without a model.

    python -m tools.study.matches --folder outputs/study/seed1 --arms configs/arms/tiny.txt

Games are sampled, words and seeds chosen, as in the loop's own matches. A match is kept beside its model, in
against_OPPONENT. Finished games are kept; the same command plays the missing ones.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.flags import flag, parse_flags
from tools.study.arms import EVERY, IMITATION, LAST, Plan, read_plan
from tools.study.loops import loop_record
from utils import UserError, end_with_parent, run_program

SAMPLING = ("MAX_TURNS", "MAX_LENGTH", "MAX_NEW_TOKENS", "TEMPERATURE", "TOP_K", "ENGINE")


@dataclass(kw_only=True)
class Flags:
    """The flags of this program."""

    folder: str = flag("folder of a seed, which tools/study/run.sh has made")
    arms: str = flag("the study's file of arms", metavar="FILE")


class Model(NamedTuple):
    """A model that plays."""

    label: str  # its name in the match
    path: Path
    stage: Path  # the folder of its epoch, or of imitation
    settings: Mapping[str, str]  # of its loop


def models_of(loop: Path, *, every: bool) -> list[Model]:
    """The last model of an arm, or the models of all its epochs."""
    settings, _ = loop_record(loop)
    stages = sorted(
        (path.parents[1] for path in loop.glob("epoch*/model/train_results.json")),
        key=lambda stage: int(stage.name.removeprefix("epoch")),
    )
    merged = "model/merged" if settings["LORA_RANK"] else "model"
    names = [stage.name if every else loop.name for stage in stages]
    found = [Model(name, stage / merged, stage, settings) for name, stage in zip(names, stages, strict=True)]
    return found if every else found[-1:]


def imitation_model(loop: Path) -> Model:
    """The imitation model, which the first arm has made or was given."""
    settings, _ = loop_record(loop)
    merged = "imitation/model/merged" if settings["LORA_RANK"] else "imitation/model"
    path = loop / merged if settings["IMITATION_DATA"] else Path(settings["MODEL"])
    return Model(IMITATION, path, loop / IMITATION, settings)


def players(folder: Path, plan: Plan, models: str) -> list[Model]:
    """The models that a line `match:` names. Arms without matches are left out of `last` and `every`."""
    if models not in (LAST, EVERY):
        return models_of(folder / models, every=False)
    found = [imitation_model(folder / plan.first)]
    for name in plan.words:
        if (folder / name / "settings.json").is_file():
            found += models_of(folder / name, every=models == EVERY)
    return [model for model in found if model.settings["EVAL_WORDS"]]


def commands(folder: Path, plan: Plan) -> Iterator[list[str]]:
    """The commands of all matches."""
    for models, opponent, *flags in plan.matches:
        name, equals, player = opponent.partition("=")
        if not equals:
            player = str(models_of(folder / name, every=False)[-1].path)
        for model in players(folder, plan, models):
            yield match_command(model, name, player, flags)


def match_command(model: Model, opponent: str, player: str, flags: list[str]) -> list[str]:
    """The command of one match."""
    settings = model.settings
    command = [sys.executable, "-m", "tools.evaluate_games", "--output_dir", str(model.stage / f"against_{opponent}")]
    command += ["--players", f"{model.label}={model.path}", f"{opponent}={player}", "--against", opponent]
    command += ["--words", *settings["EVAL_WORDS"].split(), "--seeds", *settings["EVAL_SEEDS"].split()]
    command += ["--games_per_word", settings["EVAL_GAMES_PER_WORD"], "--task_type", "sampling"]
    command += ["--game", settings["GAME"]]
    command += ["--game_options", *settings["GAME_OPTIONS"].split()] if settings["GAME_OPTIONS"] else []
    command += ["--prompt_templates", settings["PROMPTS"]] if settings["PROMPTS"] else []
    command += [word for name in SAMPLING if settings[name] for word in (f"--{name.lower()}", settings[name])]
    command += [f"--{settings['PRECISION']}", "True"] if settings["PRECISION"] in ("bf16", "fp16") else []
    command += ["--chat_template", "True"] if settings.get("CHAT_TEMPLATE") == "True" else []
    command += ["--per_device_eval_batch_size", settings["PLAY_BATCH"]] if settings["PLAY_BATCH"] else []
    return command + shlex.split(settings["EVAL_ARGS"]) + flags


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    for command in commands(Path(flags.folder), read_plan(flags.arms)):
        if status := subprocess.run(command, preexec_fn=end_with_parent).returncode:
            raise UserError(f"a match ended with status {status}: {shlex.join(command)}")


if __name__ == "__main__":
    run_program(main)
