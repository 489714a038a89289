"""The settings of the loop: files of TOML and KEY=VALUE, which `read_loop` makes one `Loop` of, and their record.

A setting has a name, `epochs` or `play.temperature`, and a value, a text or a list of texts: what would stand behind
the flag on the command line of the stage's program. That program's own parser reads it.
"""

import dataclasses
import difflib
import functools
import json
import os
import re
import shlex
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import utils
from tools import assign_rewards, evaluate_belief, evaluate_games, evaluate_reasoning, play_llm_game
from tools.flags import build_parser, check_values, flag, parse_flags
from utils import ROOT, UserError, read_json

DEFAULTS = ROOT / "configs" / "default.toml"
FORMAT = 2  # of OUTPUT/settings.json
AUTO, NONE = "auto", "none"
CONTROLS = ("cloning", "sft", "silent")
LORA_RATE = "1e-4"  # merging adapters into bf16 weights loses smaller updates
Value = str | list[str]
Settings = dict[str, Value | None]  # by name; None: the default of the program counts


def whole_number_or_auto(text: str) -> int | str:
    """The `type` of `processes`."""
    if text == AUTO:
        return text
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ArgumentTypeError(f"expected auto or a whole number above 0, got {text!r}")
    return int(text)


def boolean_or_auto(text: str) -> bool | str:
    """The `type` of `gradient_checkpointing`."""
    return text if text == AUTO else utils.parse_bool(text)


@dataclass(kw_only=True)
class OwnSettings:
    """The settings of the loop itself. All others are flags of a stage."""

    model: str = flag("base model: a folder, or a name on the hub")
    words: str = flag("word list of self-play, one word a line")
    output: str = flag("folder of all results")
    imitation_model: str | None = flag("a trained imitation model, in the place of training one", default=None)
    first_episodes: str | None = flag("file of episodes that takes the place of epoch 1's play", default=None)
    like: str | None = flag("output of another run, which this one begins like (tools/loop/README.md)", default=None)
    control: str | None = flag("rows of a control (configs/README.md)", default=None, choices=CONTROLS)
    until: str | None = flag(
        "stop after imitation, epochK_play, epochK_rewards or epochK_train; without it the same command goes on",
        default=None,
    )
    epochs: int = flag("epochs of self-play", default=3, at_least=0)
    seed: int = flag(
        "seed of play, rows and training; epoch k adds k, so take seeds that are further apart",
        default=42,
        at_least=0,
    )
    max_words: int | None = flag("play only the first so many words", default=None, at_least=1)
    games_per_word: int = flag("games of each word in an epoch", default=1, at_least=1)
    global_batch: int = flag("rows of an optimizer step, over all processes", default=128, at_least=1)
    match_every: int = flag("a match after every so many epochs", default=1, at_least=1)
    machines: int = flag("machines; the same command runs on each, with `output` shared", default=1, at_least=1)
    machine: int = flag("number of this machine, from 0", default=0, at_least=0)
    processes: int | str = flag(
        "processes of this machine; auto: one for each GPU, else 1", default=AUTO, type=whole_number_or_auto
    )
    precision: str = flag(
        "numbers of training and play; auto: bf16 where GPU or CPU compute it, else fp16 on GPUs, fp32 on CPUs",
        default=AUTO,
        choices=(AUTO, "bf16", "fp16", "fp32"),
    )
    gradient_checkpointing: bool | str = flag(
        "True, False, or auto: True with a GPU", default=AUTO, type=boolean_or_auto
    )
    deepspeed: str = flag("a configuration of DeepSpeed, none, or auto: by the GPUs' memory", default=AUTO)
    rendezvous: str = flag("with several machines: host:port of machine 0", default="localhost:0")
    rendezvous_id: str = flag("name of the launch; others that use the same port need another", default="spag")
    report: bool = flag("make report.html after each epoch", default=True)
    check: bool = flag("end after the checks, and print the command of each stage", default=False)


OWN = {each.name: each for each in dataclasses.fields(OwnSettings)}
NEEDED = ("model", "words", "output")
PRECISION = ("bf16", "fp16", "dtype")  # flags that the setting `precision` sets


class Program(NamedTuple):
    """The program of a stage."""

    path: str
    flags: type | None  # dataclass of its flags; None: train.py, whose parser imports transformers
    set_by_loop: set[str]  # flags that the loop sets, and so nobody else


SET_IN_TRAINING = {
    "output_dir",
    "model_name_or_path",
    "ref_model_name_or_path",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "deepspeed",
    "lora_merge",
    "seed",
}
SET_IN_PLAY = {
    "attacker_model_name_or_path",
    "defender_model_name_or_path",
    "data_path",
    "output_dir",
    "model_prefix",
    "data_suffix",
    "max_games",  # the setting max_words
    "seed",
}
SET_IN_REWARDS = {"input_data_path", "output_data_path", "tokenizer", "seed"}
PROGRAMS = {
    "imitation": Program("train.py", None, SET_IN_TRAINING),
    "play": Program("tools/play_llm_game.py", play_llm_game.Flags, SET_IN_PLAY),
    "rewards": Program("tools/assign_rewards.py", assign_rewards.Flags, SET_IN_REWARDS),
    "training": Program("train.py", None, SET_IN_TRAINING | {"train_data_path"}),
    "match": Program("tools/evaluate_games.py", evaluate_games.Flags, {"players", "against", "output_dir"}),
    "belief": Program("tools/evaluate_belief.py", evaluate_belief.Flags, {"models", "output_dir", "max_length"}),
    "reasoning": Program("tools/evaluate_reasoning.py", evaluate_reasoning.Flags, {"models", "output_dir"}),
}
TRAININGS = ("imitation", "training")
THIS_MACHINE = {  # how a machine computes; a run like another does not take these from it
    "processes",
    "machines",
    "machine",
    "rendezvous",
    "rendezvous_id",
    "deepspeed",
    "gradient_checkpointing",
    "engine",
    "tensor_parallel_size",
    "per_device_eval_batch_size",
    "concurrent_games",
}
FREE = THIS_MACHINE | {  # these change no result, so they may change between two starts
    "output",
    "epochs",
    "until",
    "match_every",
    "report",
    "check",
    "per_device_train_batch_size",  # if it does, by micro-batch normalization, train.py refuses to continue
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "report_to",
    "disable_tqdm",
}
MEASURES = ("match", "belief", "reasoning")  # tables that may change: these programs compare their own settings
# Files of a stage that has begun. Its table then may not change.
RESULTS = {
    "imitation": ["imitation/model/*"],
    "play": ["epoch*/episodes/*_results.json", "epoch*/episodes/*_rank*.jsonl"],
    "rewards": ["epoch*/rows/rows.json"],
    "training": ["epoch*/model/*"],
}
# Settings of the loop itself that a stage uses first; all others count as soon as any stage has begun.
USED_FIRST_BY = {
    "words": "play",
    "max_words": "play",
    "games_per_word": "play",
    "first_episodes": "rewards",
    "control": "rewards",
    "like": "rewards",
}
# A run that is `like` another keeps nothing of it if one of these differs.
FOUNDATION = ("model", "play.game", "play.game_options", "play.prompt_templates", "play.chat_template")
OF_EPISODES = ("words", "max_words", "games_per_word")


@dataclass(kw_only=True)
class Loop(OwnSettings):
    """All settings of a loop: its own as attributes, and the flags of each stage."""

    stages: dict[str, dict[str, Value]] = field(default_factory=dict)

    def of(self, stage: str) -> Namespace:
        """The values of a stage's flags as its parser reads them, defaults too."""
        return parse_table(stage, self.stages[stage])

    def settings(self) -> Settings:
        """The settings by name, as they are recorded. Those that are not given are left out."""
        own = {name: getattr(self, name) for name in OWN if getattr(self, name) is not None}
        flags = {f"{stage}.{name}": value for stage, table in self.stages.items() for name, value in table.items()}
        return own | flags


# Names and values.


@functools.cache
def parser_of(stage: str) -> ArgumentParser:
    """The parser of a stage's program, which asks for nothing: what is needed, the loop sets or has checked."""
    if PROGRAMS[stage].flags:
        parser = build_parser(PROGRAMS[stage].flags)
    else:
        import arguments  # brings transformers, which takes 5 s

        parser = arguments.build_parser()
    for action in parser._actions:
        if action.required:
            action.required, action.default = False, None
    return parser


@functools.cache
def flags_of(stage: str) -> dict[str, bool]:
    """The flags of a stage that a setting may name, and whether a flag takes several values."""
    actions = [action for action in parser_of(stage)._actions if action.dest != "help"]
    return {action.dest: action.nargs in ("+", "*") for action in actions}


def parse_table(stage: str, table: Mapping[str, Value]) -> Namespace:
    """Read a table by its stage's parser. UserError that names the table."""
    with saying(f"[{stage}] "):
        return parser_of(stage).parse_args(with_equals(table))


@contextmanager
def saying(where: str) -> Iterator[None]:
    """Begin the message of a UserError in this block with where it arose: a parser only knows its flag."""
    try:
        yield
    except UserError as error:
        message = re.sub(r"^argument --(\w+)(/--[\w-]+)*", r"\1", str(error))
        raise UserError(where + message.removesuffix(" (--help lists the flags)")) from error


def parse_command(stage: str, words: list[str]):
    """Read the command of a stage as its program does, with the checks of its flags that need no device."""
    program = PROGRAMS[stage]
    with saying(f"[{stage}] "):
        read = parser_of(stage).parse_args(words)
        if program.flags:
            flags = program.flags(**vars(read))
            check_values(flags)
            return flags
        import arguments  # brings transformers

        arguments.check_flags(read)
        return read


def has_reference(train_method: str) -> bool:
    """Whether a method of train.py compares with a reference model."""
    import arguments

    return arguments.REFERENCE_NAME in arguments.METHOD_ARGUMENTS[train_method]


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """A command line: {"n": 3, "names": ["a", "b"]} gives --n 3 --names a b. None leaves a flag out."""
    words = []
    for name, value in flags.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif str(value).startswith("-"):
            words.append(f"--{name}={value}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def with_equals(flags: Mapping[str, Value]) -> list[str]:
    """A command line in which a value that is no boolean cannot be taken for something else than its flag's."""
    words = []
    for name, value in flags.items():
        words += command_line({name: value}) if isinstance(value, list) else [f"--{name}={value}"]
    return words


def expand(name: str, value: Any, *, split: bool) -> Settings:
    """The settings that one key means: a key above the tables may be a flag of several stages.

    `value` is a text of the command line, which is split at its blanks if the flag takes several values, or a value of
    TOML. An empty text removes the setting. UserError for a key that nothing takes.
    """
    stage, dot, key = name.rpartition(".")
    if isinstance(value, dict) and name not in PROGRAMS:
        raise UserError(f"{name}: there is no table [{name}]{nearest(name, PROGRAMS)}")
    if name in OWN:
        if isinstance(value, list):
            raise UserError(f"{name}: it takes one value")
        return {name: to_value(name, value, split=False)}
    if dot and stage not in PROGRAMS:
        raise UserError(f"{name}: there is no table [{stage}]{nearest(stage, PROGRAMS)}")
    if key in PRECISION:
        raise UserError(f"{name}: the setting `precision` sets this flag (bf16, fp16 or fp32)")
    if re.search(r"[_-]token$", key):
        raise UserError(f"{name}: a token would stand in records and logs; export HF_TOKEN=... in its place")
    having = [each for each in ([stage] if dot else PROGRAMS) if key in flags_of(each)]
    if not having:
        known = flags_of(stage) if dot else {*OWN}.union(*map(flags_of, PROGRAMS))
        what = f"no flag of {PROGRAMS[stage].path}" if dot else "neither a setting of the loop nor a flag of a stage"
        raise UserError(f"{name}: {what}{nearest(key, known)}")
    taking = [each for each in having if key not in PROGRAMS[each].set_by_loop]
    if not taking:
        raise UserError(f"{name}: the loop sets this flag")
    return {f"{each}.{key}": to_value(name, value, split=split and flags_of(each)[key]) for each in taking}


def nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; the nearest that exists: {close[0]}" if close else ""


def to_value(name: str, value: Any, *, split: bool) -> Value | None:
    if isinstance(value, list):
        return [to_text(name, each) for each in value]
    if split:
        with utils.told(name, ValueError):
            return [to_text(name, each) for each in shlex.split(value)] or None
    return to_text(name, value) or None


def to_text(name: str, value: Any) -> str:
    """A value as a text, in which ~ and $ROOT are replaced."""
    text = str(value).strip("\r").replace("$ROOT", str(ROOT))
    if other := re.search(r"\$(\w+|\{\w*\}?|\(.*?\)|)", text):
        raise UserError(f"{name}: {other[0]} is not replaced; write the path, ~ or $ROOT")
    return re.sub(r"(?:(?<=^)|(?<==))~(?=/|$)", lambda _: os.path.expanduser("~"), text)


# Reading.


def read_loop(arguments: Iterable[str]) -> tuple[Loop, list[str]]:
    """The settings of files and of KEY=VALUE, and lines that say what a run keeps of the one that it is `like`."""
    changes: Settings = {}
    for argument in (argument.strip("\r") for argument in arguments):  # of $(cat FILE) with Windows' line ends
        name, equals, value = argument.partition("=")
        changes |= expand(name, value, split=True) if equals else read_file(argument)
    lines: list[str] = []
    if changes.get("like"):
        settings, lines = begin_like(str(changes["like"]), changes)
    else:
        settings = read_file(DEFAULTS)
    settings |= changes | learning_rates(settings, changes)
    own = {name: str(value) for name, value in settings.items() if name in OWN and value is not None}
    if missing := [name for name in NEEDED if name not in own]:
        raise UserError(f"{missing[0]}=... is missing (--help shows the settings)")
    with saying(""):
        read = parse_flags(OwnSettings, with_equals(own), description="")
    stages: dict[str, dict[str, Value]] = {stage: {} for stage in PROGRAMS}
    for name, value in settings.items():
        stage, dot, key = name.rpartition(".")
        if dot and value is not None:
            stages[stage][key] = value
    return Loop(**vars(read), stages=stages), lines


def read_file(path: str | Path) -> Settings:
    """The settings of a TOML file. Keys above its tables come first, so a key of a table counts more."""
    text = utils.read_text(path)
    try:
        tree = tomllib.loads(text, parse_float=str)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    settings: Settings = {}
    with saying(f"{path}: "):
        for name, value in tree.items():
            if name not in PROGRAMS:
                settings |= expand(name, value, split=False)
        for table in PROGRAMS:
            for key, value in tree.get(table, {}).items():
                settings |= expand(f"{table}.{key}", value, split=False)
    return settings


def learning_rates(base: Settings, changes: Settings) -> Settings:
    """The learning rates of trainings whose lora_rank is a new one, unless a learning rate comes with it."""
    rates: Settings = {}
    for stage in TRAININGS:
        rank, rate = f"{stage}.lora_rank", f"{stage}.learning_rate"
        if rank in changes and rate not in changes and changes[rank] != base.get(rank):
            rates[rate] = LORA_RATE if changes[rank] else read_file(DEFAULTS)[rate]
    return rates


def read_record(folder: str | Path) -> Settings:
    """The settings in the record of a loop. UserError for the record of the loop that was a shell script."""
    path = Path(folder, "settings.json")
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise UserError(f"{path}: of an older version, whose loop was a shell script; take another output")
    return record["settings"]


# A run like another.


def begin_like(folder: str, changes: Settings) -> tuple[Settings, list[str]]:
    """The settings of another run, with its imitation model and its games of epoch 1 as far as they stay.

    Also a line that says what is kept, and what is made anew because of which settings.
    """
    stored = read_record(folder)
    stored = with_output(stored, [stored["output"]], folder)  # which may have been moved
    dropped = THIS_MACHINE | {"output", "like", "control", "until", "check"}
    settings = {name: value for name, value in stored.items() if name.rpartition(".")[2] not in dropped}
    different = {name for name in changes if not is_free(name) and differs(name, stored, changes)}
    different -= {"output", "like", "control", "imitation_model", "first_episodes"}
    given = changes.keys() & {"imitation_model", "first_episodes"}
    if (named := different.intersection(FOUNDATION)) and len(given) < 2:
        remedy = "say imitation_model= and first_episodes= too (empty: made anew; a path: kept)"
        raise UserError(f"like={folder}: {', '.join(sorted(named))} cannot differ from its; {remedy}")
    imitate_anew = {name for name in different if name.startswith("imitation.")}
    play_anew = {name for name in different if name in OF_EPISODES or name.startswith("play.")} | imitate_anew
    if "imitation_model" not in given:
        settings["imitation_model"] = imitation_of(folder, settings | changes, anew=imitate_anew)
    if any(Path(str(changes.get("output")), "epoch1", "episodes").glob("*_rank*.jsonl")):
        play_anew.add("this run has begun to play them")
    settings["first_episodes"] = None if play_anew else episodes_of(folder, stored)
    now = settings | changes
    kept, anew = [], []
    for what, name, reasons in (
        ("imitation", "imitation_model", imitate_anew),
        ("games of epoch 1", "first_episodes", play_anew or {"it has none that are finished"}),
    ):
        if now.get(name):
            kept.append(f"{what} ({now[name]})")
        elif reasons:
            anew.append(f"{what} ({', '.join(sorted(reasons))})")
    line = f"like={folder}: kept: {' and '.join(kept) or '-'}; made anew: {' and '.join(anew) or '-'}"
    return settings, [line]


def imitation_of(folder: str, settings: Settings, *, anew: Iterable[str]) -> Value | None:
    """The imitation model that a run like another begins with; None: it is trained, or the base model plays."""
    model, rows = settings.get("imitation_model"), settings.get("imitation.train_data_path")
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


# The record.


def is_free(name: str) -> bool:
    stage, _, key = name.rpartition(".")
    return key in FREE or stage in MEASURES


def differs(name: str, then: Settings, now: Settings) -> bool:
    """Whether a setting has another value. One that is not given has its program's default."""
    return comparable(then.get(name, default_of(name))) != comparable(now.get(name) or default_of(name))


def default_of(name: str) -> Any:
    stage, dot, key = name.rpartition(".")
    return parser_of(stage).get_default(key) if dot else OWN[name].default


def comparable(value: Any) -> Any:
    """A value such that 1e-4 equals 0.0001, true equals True, and an empty list or False nothing at all."""
    if isinstance(value, list):
        return [comparable(each) for each in value] or None
    text = str(value).lower()
    if text in ("none", "false"):
        return None
    try:
        return float(text)
    except ValueError:
        return str(value) if text != "true" else True


def check_record(loop: Loop, words: list[str]) -> None:
    """Raise UserError for settings that finished or half-finished stages in `output` were made with differently."""
    folder = Path(loop.output)
    path, list_of_words = folder / "settings.json", folder / "words.txt"
    begun = [stage for stage, patterns in RESULTS.items() if any(any(folder.glob(each)) for each in patterns)]
    if not path.is_file() or not begun:
        return
    then, now = read_record(folder), json.loads(json.dumps(loop.settings()))
    outputs = [str(Path(output)) for output in (then["output"], loop.output)]
    then, now = with_output(then, outputs, "OUTPUT"), with_output(now, outputs, "OUTPUT")
    used = [name for name in {**then, **now} if is_used(name, begun) and not is_free(name)]
    if different := [name for name in used if differs(name, then, now)]:
        phrases = "; ".join(f"{name}: {then.get(name)} then, {now.get(name)} now" for name in different)
        way = f"take another output, or delete {path} if no finished stage used them"
        raise UserError(f"{path}: made with other settings ({phrases}); {way}")
    if "play" in begun and list_of_words.is_file() and utils.read_words(list_of_words) != words:
        way = f"put the list back, or delete the folders episodes in {folder}"
        raise UserError(f"words={loop.words}: {list_of_words} has other words, with which games were played; {way}")


def is_used(name: str, begun: Iterable[str]) -> bool:
    """Whether a setting counts when these stages have begun."""
    table, dot, _ = name.partition(".")
    stage = table if dot else USED_FIRST_BY.get(name)
    return stage is None or stage in begun


def with_output(settings: Settings, outputs: Iterable[str], other: str) -> Settings:
    """Settings in which paths inside one of these folders are paths inside another one: `output` may be moved."""
    inside = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, outputs))})/")

    def replaced(value):
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return inside.sub(lambda _: f"{other}/", value) if isinstance(value, str) else value

    return {name: replaced(value) for name, value in settings.items()}


def write_record(loop: Loop, words: list[str]) -> None:
    folder = Path(loop.output)
    record = {"format": FORMAT, "settings": loop.settings(), "made_by": utils.made_by()}
    utils.write_json(folder / "settings.json", record)
    utils.write_words(folder / "words.txt", words)
