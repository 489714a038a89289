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
from tools.selfplay.flags import PlayFlags
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
    if text != AUTO and text.lower() not in utils.BOOLEANS:
        raise ArgumentTypeError(f"expected auto, True or False, got {text!r}")
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
    max_words: int | None = flag("play only this number of words, the first of the list", default=None, at_least=1)
    games_per_word: int = flag("games of each word in an epoch", default=1, at_least=1)
    global_batch: int = flag("rows of an optimizer step, over all processes", default=128, at_least=1)
    match_every: int = flag("a match follows each epoch whose number is a multiple of this", default=1, at_least=1)
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
    set_by_loop: set[str]  # flags that the loop sets: no setting may name them


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
FREE = {  # settings of the loop itself that may differ between two starts: how far it runs, and where
    "processes",
    "machines",
    "machine",
    "rendezvous",
    "rendezvous_id",
    "deepspeed",
    "gradient_checkpointing",
    "output",
    "epochs",
    "until",
    "match_every",
    "report",
    "check",
}
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
    "control": "rewards",
    "like": "rewards",
}
# If one of these differs, a run that is `like` another must say what takes the place of its imitation and games.
FOUNDATION = ("model", "play.game", "play.game_options", "play.prompt_templates", "play.chat_template")
OF_EPISODES = ("words", "max_words", "games_per_word")


@dataclass(kw_only=True)
class Loop(OwnSettings):
    """All settings of a loop: its own as attributes, and the flags of each stage."""

    stages: dict[str, dict[str, Value]] = field(default_factory=dict)
    settings_of_like: Settings = field(default_factory=dict)

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
    """The parser of a stage's program, in which no flag is required: a table lacks the flags that the loop sets."""
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
        read = parser_of(stage).parse_args(with_equals(table))
        if flags := PROGRAMS[stage].flags:
            check_values(read, flags)
        return read


@contextmanager
def saying(where: str) -> Iterator[None]:
    """Begin the message of a UserError in this block with where it arose: a parser only knows its flag."""
    try:
        yield
    except UserError as error:
        message = re.sub(r"^argument --(\w+)(/--[\w-]+)*", r"\1", str(error))
        raise UserError(where + message.removesuffix(" (--help lists the flags)")) from error


def parse_command(stage: str, arguments_of_stage: list[str]):
    """Read the command of a stage as its program does, with the checks of its flags that need no device."""
    program = PROGRAMS[stage]
    with saying(f"[{stage}] "):
        read = parser_of(stage).parse_args(arguments_of_stage)
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
    """A command line of --name=value, in which "--flag yes" is not read as a flag that stands alone and a word."""
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
    if isinstance(value, dict):
        what = "write it as a text of JSON" if dot else f"there is no table [{name}]{nearest(name, PROGRAMS)}"
        raise UserError(f"{name}: {what}")
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
    settings: Settings = {}
    for each in taking:
        several = flags_of(each)[key]
        made = to_value(name, value, split=split and several)
        settings[f"{each}.{key}"] = [made] if several and isinstance(made, str) else made
    return settings


def nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; the nearest that exists: {close[0]}" if close else ""


def to_value(name: str, value: Any, *, split: bool) -> Value | None:
    if isinstance(value, list):
        return [to_text(name, each) for each in value]
    if split:
        with utils.user_errors(name, ValueError):
            return [to_text(name, each) for each in shlex.split(value)] or None
    return to_text(name, value) or None


def to_text(name: str, value: Any) -> str:
    """A value as a text, in which ~ and $ROOT are replaced."""
    text = str(value).strip("\r")
    text = re.sub(r"\$ROOT\b", lambda _: str(ROOT), text)
    if other := re.search(r"\$(\w+|\{\w*\}?|\(.*?\)|)", text):
        raise UserError(f"{name}: {other[0]} is not replaced; write the path, ~ or $ROOT")
    return re.sub(r"(?:(?<=^)|(?<==))~(?=/|$)", lambda _: os.path.expanduser("~"), text)


# Reading.


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
    with saying(""):
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
        rank, rate = f"{stage}.lora_rank", f"{stage}.learning_rate"
        if rank in changes and rate not in changes and bool(changes[rank]) != bool(base.get(rank)):
            rates[rate] = LORA_RATE if changes[rank] else read_file(DEFAULTS)[rate]
    return rates


def read_record(folder: str | Path) -> dict:
    """The record of a loop. UserError where there is none, and for one of the loop that was a shell script."""
    path = Path(folder, "settings.json")
    if not path.is_file():
        raise UserError(f"{path}: no such file; is {folder} the output of a loop?")
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise UserError(f"{path}: of an older version, whose loop was a shell script; begin anew in another folder")
    return record


# A run like another.


class BegunLike(NamedTuple):
    """What a run takes from the one that it is like."""

    settings: Settings  # before the changes of the command line
    stored: Settings  # those of the other run
    line: str  # what is kept, and what is made anew


def begin_like(folder: str, changes: Settings) -> BegunLike:
    """The settings of another run, with its imitation model and its games of epoch 1 if they can be kept."""
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
    kept, anew = [], []
    if now.get("imitation_model"):
        kept.append(f"imitation ({now['imitation_model']})")
    elif now.get("imitation.train_data_path"):
        anew.append(f"imitation ({', '.join(sorted(why_imitate)) or 'imitation_model='})")
    if now.get("control") not in ("sft", "silent"):
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
    """Whether a setting changes no result, so that it may differ: as the stages' own records of their settings say."""
    stage, dot, key = name.rpartition(".")
    if not dot:
        return name in FREE
    return stage in MEASURES or key not in compared_flags(stage)


@functools.cache
def compared_flags(stage: str) -> set[str]:
    """The flags of a stage that change its results."""
    if stage == "play":
        return set(PlayFlags.COMPARED)
    if stage == "rewards":
        return flags_of(stage).keys() - {"trust_remote_code"}
    import arguments

    of_methods = {name for method in arguments.METHOD_ARGUMENTS.values() for name in method}
    return {*arguments.COMPARED, *of_methods, "train_data_path", "eval_data_path", "warmup_ratio"}


def differs(name: str, then: Settings, now: Settings) -> bool:
    """Whether a setting has another value. One that is not given has its program's default."""
    values = [default_of(name) if of.get(name) is None else of[name] for of in (then, now)]
    return comparable(values[0]) != comparable(values[1])


def default_of(name: str) -> Any:
    stage, dot, key = name.rpartition(".")
    return parser_of(stage).get_default(key) if dot else OWN[name].default


def comparable(value: Any) -> Any:
    """A value to compare: 1e-4 equals 0.0001, true equals True, False and [] equal None, a path its absolute form."""
    if isinstance(value, list):
        return [comparable(each) for each in value] or None
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
    return [stage for stage, patterns in RESULTS.items() if any(any(folder.glob(each)) for each in patterns)]


def check_record(loop: Loop, words: list[str]) -> None:
    """Raise UserError for settings that finished or half-finished stages in `output` were made with differently."""
    folder = Path(loop.output)
    path, list_of_words = folder / "settings.json", folder / "words.txt"
    begun = begun_stages(folder)
    if not path.is_file() or not begun:
        return
    then, now = read_record(folder)["settings"], json.loads(json.dumps(loop.settings()))
    outputs = [str(Path(output)) for output in (then["output"], loop.output)]
    then, now = with_output(then, outputs, "OUTPUT"), with_output(now, outputs, "OUTPUT")
    used = [name for name in {**then, **now} if is_used(name, begun)]
    compared = [name for name in used if not is_free(name) or is_micro_batch_of_loss(loop, name)]
    if different := [name for name in compared if differs(name, then, now)]:
        phrases = "; ".join(f"{name}: {then.get(name)} then, {now.get(name)} now" for name in different)
        way = f"take another output, or delete {path} if no finished stage used them"
        raise UserError(f"{path}: made with other settings ({phrases}); {way}")
    if "play" in begun and list_of_words.is_file() and utils.read_words(list_of_words) != words:
        way = f"put the list back, or delete the folders episodes in {folder}"
        raise UserError(f"words={loop.words}: {list_of_words} has other words, with which games were played; {way}")


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

    def replaced(value):
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return inside.sub(lambda _: f"{other}/", value) if isinstance(value, str) else value

    return {name: replaced(value) for name, value in settings.items()}


def write_record(loop: Loop, words: list[str]) -> None:
    folder = Path(loop.output)
    record = {"format": FORMAT, "settings": loop.settings(), "made_by": utils.made_by()}
    if loop.like:
        record["like"] = loop.settings_of_like
    utils.write_json(folder / "settings.json", record)
    utils.write_words(folder / "words.txt", words)
