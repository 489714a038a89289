"""The settings of a loop: read from files of TOML and from KEY=VALUE, and taken from another run."""

import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tools.common.errors import UserError
from tools.common.files import ROOT, read_json, read_text
from tools.common.flags import parse_flags
from tools.loop.keys import (
    OWN,
    PROGRAMS,
    TRAININGS,
    Loop,
    OwnSettings,
    Settings,
    Value,
    expand,
    plays_games,
    prefix_errors,
    with_equals,
)
from tools.loop.record import THIS_MACHINE, begun_stages, differs, is_free, read_record, with_output

DEFAULTS = ROOT / "configs" / "default.toml"
NEEDED = ("model", "words", "output")
LORA_RATE = "1e-4"  # merging adapters into bf16 weights loses smaller updates
# If one of these differs, a run that is `like` another must say what takes the place of its imitation and games: the
# imitation model has learned this game in these prompts.
FOUNDATION = ("model", "play.game", "play.game_options", "play.prompt_templates", "play.chat_template")
OF_EPISODES = ("words", "max_words", "games_per_word")


def read_loop(arguments: Iterable[str]) -> tuple[Loop, str | None]:
    """The settings of files and of KEY=VALUE, and a line that says what a run keeps of the one that it is `like`."""
    changes: Settings = {}
    for argument in (argument.strip("\r") for argument in arguments):  # of $(cat FILE) with Windows' line ends
        changes |= read_argument(argument)
    begun = begin_like(str(changes["like"]), changes) if changes.get("like") else None
    settings = begun.settings if begun else read_file(DEFAULTS)
    settings |= changes | learning_rates(settings, changes)
    own = {name: str(value) for name, value in settings.items() if name in OWN and value is not None}
    if missing := [name for name in NEEDED if name not in own]:
        raise UserError(f"{missing[0]}=... is missing (--help shows the settings)")
    with prefix_errors(""):
        read = parse_flags(OwnSettings, with_equals(own), description="")
    stages: dict[str, dict[str, Value]] = {stage: {} for stage in PROGRAMS}
    for name, value in settings.items():
        stage, dot, key = name.rpartition(".")
        if dot and value is not None:
            stages[stage][key] = value
    loop = Loop(**vars(read), stages=stages, settings_of_like=begun.stored if begun else {})
    return loop, begun.line if begun else None


def read_argument(argument: str) -> Settings:
    """The settings of KEY=VALUE, or of a file, whose path may have a "=" too."""
    name, equals, value = argument.partition("=")
    if not equals or "/" in name or os.path.isfile(argument):
        return read_file(argument)
    return expand(name, value, split=True)


def read_file(path: str | Path) -> Settings:
    """The settings of a TOML file. Keys above its tables come first, so a key of a table counts more."""
    text = read_text(path)
    try:
        tree = tomllib.loads(text, parse_float=str)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    settings: Settings = {}
    with prefix_errors(f"{path}: "):
        for name, value in tree.items():
            if name not in PROGRAMS:
                settings |= expand(name, value, split=False)
        for table in PROGRAMS:
            keys = tree.get(table, {})
            if not isinstance(keys, dict):
                raise UserError(f"{table}: it is a table, [{table}], with keys below it")
            for key, value in keys.items():
                settings |= expand(f"{table}.{key}", value, split=False)
    return settings


def learning_rates(base: Settings, changes: Settings) -> Settings:
    """The learning rates of trainings that get adapters, or lose them, without a learning rate of their own."""
    rates: Settings = {}
    for stage in TRAININGS:
        lora_rank = f"{stage}.lora_rank"
        learning_rate = f"{stage}.learning_rate"
        if lora_rank not in changes or learning_rate in changes:
            continue
        if bool(changes[lora_rank]) != bool(base.get(lora_rank)):
            rates[learning_rate] = LORA_RATE if changes[lora_rank] else read_file(DEFAULTS)[learning_rate]
    return rates


# A run like another.


class BegunLike(NamedTuple):
    """What a run takes from the one that it is like."""

    settings: Settings  # before the changes of the command line
    stored: Settings  # those of the other run
    line: str  # what is kept, and what is made anew


def begin_like(folder: str, changes: Settings) -> BegunLike:
    """The settings of another run, with its imitation model and its games of epoch 1 if they can be kept.

    Both are kept unless a changed setting decides them, so that the runs do not differ by another draw of imitation or
    games too. Which settings decide them is in FOUNDATION, OF_EPISODES, and `is_free` of tools/loop/record.py.

    The other run may go on: once a stage of this run has begun, `settings_of_like` takes the other run's settings from
    this run's own settings.json, where `write_record` in tools/loop/record.py keeps them as "like".
    """
    stored = settings_of_like(folder, str(changes.get("output")))
    dropped = THIS_MACHINE | {"output", "like", "control", "until", "check"}
    settings = {name: value for name, value in stored.items() if name.rpartition(".")[2] not in dropped}
    different = {name for name in changes if not is_free(name) and differs(name, stored, changes)}
    given = changes.keys() & {"imitation_model", "first_episodes"}
    foundation = different.intersection(FOUNDATION)
    if foundation and len(given) < 2:
        remedy = "say imitation_model= and first_episodes= too (empty: made anew; a path: kept)"
        raise UserError(f"like={folder}: {', '.join(sorted(foundation))} must be those of {folder}; {remedy}")
    why_imitate = {name for name in different if name.startswith("imitation.")}
    # Another imitation model would play other games, so what decides imitation decides the games too.
    why_play = why_imitate | {name for name in different if name in OF_EPISODES or name.startswith("play.")}
    if "imitation_model" in given:
        why_play.add("imitation_model")  # a model trains on its own games
    else:
        settings["imitation_model"] = imitation_of(folder, settings | changes, anew=why_imitate)
    settings["first_episodes"] = None if why_play else stored["first_episodes"]
    line = kept_and_anew(folder, settings | changes, why_imitate | foundation, why_play | foundation)
    return BegunLike(settings, stored, line)


def kept_and_anew(folder: str, now: Settings, why_imitate: set[str], why_play: set[str]) -> str:
    """A line: what a run keeps of the one that it is like, and what it makes anew because of which settings."""
    kept = []
    anew = []
    if now.get("imitation_model"):
        kept.append(f"imitation ({now['imitation_model']})")
    elif now.get("imitation.train_data_path"):
        anew.append(f"imitation ({', '.join(sorted(why_imitate)) or 'imitation_model='})")
    if plays_games(now.get("control")):
        if now.get("first_episodes"):
            kept.append(f"games of epoch 1 ({now['first_episodes']})")
        else:
            why = ", ".join(sorted(why_play)) or f"{folder} has none that are finished, or first_episodes="
            anew.append(f"games of epoch 1 ({why})")
    return f"like={folder}: kept: {' and '.join(kept) or '-'}; made anew: {' and '.join(anew) or '-'}"


def settings_of_like(folder: str, output: str) -> Settings:
    """The settings of a run that another one is like: as they were when that one began, because the run may go on."""
    path = Path(output, "settings.json")
    if path.is_file() and begun_stages(Path(output)):
        record = read_record(output)
        if record["settings"].get("like") == folder:
            return record["like"]
    stored = read_record(folder)["settings"]
    stored = with_output(stored, [str(Path(stored["output"]))], str(Path(folder)))  # which may have been moved
    return stored | {"first_episodes": episodes_of(folder, stored)}


def imitation_of(folder: str, settings: Settings, *, anew: Iterable[str]) -> Value | None:
    """The imitation model that a run like another begins with. None: it trains one, or the base model plays."""
    model = settings.get("imitation_model")
    rows = settings.get("imitation.train_data_path")
    if anew:
        return None if rows else model  # without rows the model was given, not trained
    if model or not rows:
        return model
    trained = Path(folder, "imitation", "model")
    if not (trained / "settings.json").is_file() or not read_json(trained / "settings.json")["finished"]:
        raise UserError(f"like={folder}: its imitation has not ended; the same command of that run continues")
    return str(trained / "merged" if settings.get("imitation.lora_rank") else trained)


def episodes_of(folder: str, stored: Settings) -> Value | None:
    """The games of epoch 1 of a run, if they are finished."""
    files = sorted(map(str, Path(folder, "epoch1", "episodes").glob("*_words_results.json")))
    return stored.get("first_episodes") or (files[0] if files else None)
