"""The record of a loop's settings, OUTPUT/settings.json, and which settings may differ between two starts."""

import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.common.errors import UserError
from tools.common.files import read_json, read_words, write_json, write_words
from tools.common.flags import flag_fields
from tools.common.records import made_by
from tools.loop.keys import OWN, PROGRAMS, Loop, Settings, parser_of

FORMAT = 2  # of OUTPUT/settings.json
# Settings of the loop itself that say how a machine computes. `precision` is none of them, because it changes results.
# The record has the precision that `auto` became. To go on with a run on a machine where `auto` becomes another one,
# give the recorded one, such as precision=bf16.
MACHINE_SETTINGS = {
    "processes",
    "machines",
    "machine",
    "rendezvous",
    "rendezvous_id",
    "deepspeed",
    "gradient_checkpointing",
}
# The flags of stages that say how a machine computes, too. A run like another takes none of these from it. It takes
# over per_device_train_batch_size, which changes the loss unless loss_normalization=step.
THIS_MACHINE = MACHINE_SETTINGS | {
    "engine",
    "tensor_parallel_size",
    "per_device_eval_batch_size",
    "concurrent_games",
}
# Settings of the loop itself that may differ between two starts: those of the machine, how far it runs, and where.
FREE = MACHINE_SETTINGS | {"output", "epochs", "until", "match_every", "report", "check"}
MICRO_BATCH = "per_device_train_batch_size"
MEASURES = ("match", "belief", "reasoning")  # tables that may change: these programs compare their own settings
# Files of a stage that has begun. Its table then may not change.
TRAINED = ("train_results.json", "*.safetensors", "checkpoint-*")
RESULTS = {
    "imitation": [f"imitation/model/{name}" for name in TRAINED],
    "play": ["epoch*/episodes/*_results.json", "epoch*/episodes/*_rank*.jsonl"],
    "rewards": ["epoch*/rows/rows.json"],
    "training": [f"epoch*/model/{name}" for name in TRAINED],
}
# Settings of the loop itself that a stage uses first; all others count as soon as any stage has begun.
USED_FIRST_BY = {
    "words": "play",
    "max_words": "play",
    "games_per_word": "play",
    "first_episodes": "rewards",
    "control": "rewards",  # which model plays epoch 1 does not depend on it
    "like": "rewards",
}


def is_free(name: str) -> bool:
    """Whether a setting may differ between two starts.

    Settings of the loop itself are in FREE. Of a stage's flags those are free that its own record does not compare,
    because they change no result (with load_best_model_at_end some of evaluation and saving do). The tables of
    MEASURES are free here, although they change results: the program of the stage then refuses other settings itself
    (`stage` in utils.py).
    """
    stage, dot, key = name.rpartition(".")
    if not dot:
        return name in FREE
    return stage in MEASURES or key not in compared_flags(stage)


@functools.cache
def compared_flags(stage: str) -> set[str]:
    """The flags of a stage that change its results."""
    if flags := PROGRAMS[stage].flags:
        return {field.name for field in flag_fields(flags) if field.metadata["compared"]}
    import arguments

    fields = arguments.SPAGArguments.__dataclass_fields__.values()
    return {each.name for each in fields if each.metadata.get("compared", each.name in arguments.COMPARED) is True}


def differs(name: str, then: Settings, now: Settings) -> bool:
    """Whether a setting has another value. One that is not given has its program's default."""

    def value_in(settings: Settings) -> Any:
        value = settings.get(name)
        return comparable(default_of(name) if value is None else value)

    return value_in(then) != value_in(now)


def default_of(name: str) -> Any:
    stage, dot, key = name.rpartition(".")
    return parser_of(stage).get_default(key) if dot else OWN[name].default


def comparable(value: Any) -> Any:
    """A value to compare: 1e-4 equals 0.0001, true equals True, False and [] equal None, a path its absolute form."""
    if isinstance(value, list):
        return [comparable(item) for item in value] or None
    text = str(value).lower()
    if text in ("none", "false"):
        return None
    try:
        return float(text)
    except ValueError:
        if text == "true":
            return True
    return os.path.realpath(str(value)) if os.path.exists(str(value)) else str(value)


def begun_stages(folder: Path) -> list[str]:
    """The stages that have left results in the output of a loop."""
    begun = []
    for stage, patterns in RESULTS.items():
        if any(any(folder.glob(pattern)) for pattern in patterns):
            begun.append(stage)
    return begun


def check_record(loop: Loop, words: list[str]) -> None:
    """Raise UserError for settings that finished or half-finished stages in `output` were made with differently.

    Each program compares its own settings with its record too (`stage` in utils.py). But it does so only when its turn
    comes, and it does not know the loop's own settings. A table counts as used from the first epoch on: a setting
    cannot change between epochs of one run (`stage_step` in tools/run_spag.py says how to get that).

    The words are compared with OUTPUT/words.txt once there are games, because the file that `words` names may have
    changed.
    """
    folder = Path(loop.output)
    path = folder / "settings.json"
    words_path = folder / "words.txt"
    begun = begun_stages(folder)
    if not path.is_file() or not begun:
        return
    then = read_record(folder)["settings"]
    now = json.loads(json.dumps(loop.settings()))
    outputs = [str(Path(output)) for output in (then["output"], loop.output)]
    then = with_output(then, outputs, "OUTPUT")
    now = with_output(now, outputs, "OUTPUT")
    used = [name for name in {**then, **now} if is_used(name, begun)]
    compared = [name for name in used if not is_free(name) or is_micro_batch_of_loss(loop, name)]
    if different := [name for name in compared if differs(name, then, now)]:
        phrases = "; ".join(f"{name}: {then.get(name)} then, {now.get(name)} now" for name in different)
        way = f"take another output, or delete {path} if no finished stage used them"
        raise UserError(f"{path}: made with other settings ({phrases}); {way}")
    if "play" in begun and words_path.is_file() and read_words(words_path) != words:
        way = f"put the list back, or delete the folders episodes in {folder}"
        raise UserError(f"words={loop.words}: {words_path} has other words, with which games were played; {way}")


def is_micro_batch_of_loss(loop: Loop, name: str) -> bool:
    """Whether this is the size of the micro-batches over which a training averages its loss."""
    stage, _, key = name.rpartition(".")
    return key == MICRO_BATCH and loop.of(stage).loss_normalization != "step"


def is_used(name: str, begun: Iterable[str]) -> bool:
    """Whether a setting counts when these stages have begun."""
    table, dot, _ = name.partition(".")
    stage = table if dot else USED_FIRST_BY.get(name)
    return stage is None or stage in begun


def with_output(settings: Settings, outputs: Iterable[str], other: str) -> Settings:
    """Settings in which paths inside one of these folders are paths inside another one: `output` may be moved."""
    inside = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, outputs))})/")

    def replace_output(value):
        if isinstance(value, list):
            return [replace_output(item) for item in value]
        return inside.sub(lambda _: f"{other}/", value) if isinstance(value, str) else value

    return {name: replace_output(value) for name, value in settings.items()}


def write_record(loop: Loop, words: list[str]) -> None:
    """Write OUTPUT/settings.json and words.txt, over those of an earlier start.

    `made_by` has versions and the commit of this start. `check_record` does not compare them, so a run goes on under
    changed code.
    """
    folder = Path(loop.output)
    record = {"format": FORMAT, "settings": loop.settings(), "made_by": made_by()}
    if loop.like:
        record["like"] = loop.settings_of_like
    write_json(folder / "settings.json", record)
    write_words(folder / "words.txt", words)


def read_record(folder: str | Path) -> dict:
    """The record of a loop. UserError where there is none, and for one of the loop that was a shell script."""
    path = Path(folder, "settings.json")
    if not path.is_file():
        raise UserError(f"{path}: no such file; is {folder} the output of a loop?")
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise UserError(f"{path}: of an older version, whose loop was a shell script; begin anew in another folder")
    return record
