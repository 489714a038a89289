"""What a setting of the loop may be called, and how its value becomes a flag of a stage's program.

A setting has a name, `epochs` or `play.temperature`, and a value, a text or a list of texts: what would stand behind
the flag on the command line of the stage's program. That program's own parser reads it.
"""

import dataclasses
import difflib
import functools
import os
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools import assign_rewards, evaluate_belief, evaluate_games, evaluate_reasoning, play_llm_game
from tools.common.errors import UserError, user_errors
from tools.common.files import ROOT
from tools.common.flags import BOOLEANS, FlagGroup, build_parser, check_values, flag, parse_bool
from tools.controls import CONTROLS, Control

AUTO = "auto"
NONE = "none"
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
    if text != AUTO and text.lower() not in BOOLEANS:
        raise ArgumentTypeError(f"expected auto, True or False, got {text!r}")
    return text if text == AUTO else parse_bool(text)


@dataclass(kw_only=True)
class OwnSettings(FlagGroup):
    """The settings of the loop itself. All others are flags of a stage.

    A new one is a field here. In tools/loop/record.py add its name to FREE if it changes no result, or to
    USED_FIRST_BY if the first stages do not use it. Otherwise it must stay the same once any stage has begun. A run
    that is `like` another takes it over, unless `begin_like` in tools/loop/settings.py drops it. If the machine
    decides its value, add it to Question and `answer` in tools/loop/machine.py.
    """

    model: str = flag("base model: a folder, or a name on the hub")
    words: str = flag("word list of self-play, one word a line")
    output: str = flag("folder of all results")
    imitation_model: str | None = flag("a trained imitation model, in the place of training one", default=None)
    first_episodes: str | None = flag("file of episodes that takes the place of epoch 1's play", default=None)
    like: str | None = flag("output of another run, which this one begins like (tools/loop/README.md)", default=None)
    control: str | None = flag("rows of a control (configs/README.md)", default=None, choices=tuple(CONTROLS))
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
    # With port 0 torch takes a free one, so that several loops can run on one machine.
    rendezvous: str = flag("with several machines: host:port of machine 0", default="localhost:0")
    rendezvous_id: str = flag("name of the launch, which keeps machines of another launch out", default="spag")
    report: bool = flag("make report.html after each epoch", default=True)
    check: bool = flag("end after the checks, and print the command of each stage", default=False)


OWN = {field.name: field for field in dataclasses.fields(OwnSettings)}
# Flags that the setting `precision` sets. A further value of it needs its name in the choices above, in DTYPES and
# `training_step` in tools/run_spag.py, in `answer` and `check_match` in tools/loop/machine.py, and in `weights_dtype`
# in arguments.py.
PRECISION = ("bf16", "fp16", "dtype")


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
# A new stage is a line here, and a Step that `steps` in tools/run_spag.py yields. A key above the tables reaches its
# flags too. Its program is imported at the top of this file, so it must not import torch there: --help would wait.
# If no later stage reads its results, add the table to MEASURES in tools/loop/record.py, otherwise to RESULTS and
# `compared_flags` there. Add its input files to `missing_files` in tools/loop/inputs.py. To show its results, change
# `read_folder` in tools/measure/report_contents.py and `loop_numbers` in tools/lab/table.py.
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


@dataclass(kw_only=True)
class Loop(OwnSettings):
    """All settings of a loop: its own as attributes, and the flags of each stage."""

    stages: dict[str, dict[str, Value]] = field(default_factory=dict)
    settings_of_like: Settings = field(default_factory=dict)

    def of(self, stage: str) -> Namespace:
        """The values of a stage's flags as its parser reads them, defaults too."""
        return parse_table(stage, self.stages[stage])

    @property
    def control_class(self) -> type[Control] | None:
        return CONTROLS.get(self.control)

    def settings(self) -> Settings:
        """The settings by name, as they are recorded. Those that are not given are left out."""
        own = {name: getattr(self, name) for name in OWN if getattr(self, name) is not None}
        flags = {f"{stage}.{name}": value for stage, table in self.stages.items() for name, value in table.items()}
        return own | flags


# Parsers.


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
            action.required = False
            action.default = None
    return parser


@functools.cache
def flags_of(stage: str) -> dict[str, bool]:
    """The flags of a stage that a setting may name, and whether a flag takes several values."""
    actions = [action for action in parser_of(stage)._actions if action.dest != "help"]
    return {action.dest: action.nargs in ("+", "*") for action in actions}


def parse_table(stage: str, table: Mapping[str, Value]) -> Namespace:
    """Read a table by its stage's parser. UserError that names the table."""
    with prefix_errors(f"[{stage}] "):
        read = parser_of(stage).parse_args(with_equals(table))
        if flags := PROGRAMS[stage].flags:
            check_values(read, flags)
        return read


@contextmanager
def prefix_errors(where: str) -> Iterator[None]:
    """Begin the message of a UserError in this block with where it arose: a parser only knows its flag."""
    try:
        yield
    except UserError as error:
        message = re.sub(r"^argument --(\w+)(/--[\w-]+)*", r"\1", str(error))
        raise UserError(where + message.removesuffix(" (--help lists the flags)")) from error


def check_command(stage: str, argv: list[str]) -> None:
    """Read the command of a stage as its program does, with the checks of its flags that need no device.

    UserError for a command that the program would refuse.
    """
    program = PROGRAMS[stage]
    with prefix_errors(f"[{stage}] "):
        read = parser_of(stage).parse_args(argv)
        if program.flags:
            program.flags(**vars(read))  # the dataclass checks its values
        else:
            import arguments  # brings transformers

            arguments.check_flags(read)


def plays_games(control: str | None) -> bool:
    """Whether a loop with this setting `control` plays games. Some controls take the rows of another run."""
    return control not in CONTROLS or CONTROLS[control].plays_games


def has_reference(train_method: str) -> bool:
    """Whether a method of train.py compares with a reference model."""
    import arguments

    return arguments.REFERENCE_NAME in arguments.METHOD_ARGUMENTS[train_method]


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """A command line: {"n": 3, "names": ["a", "b"]} gives --n 3 --names a b. None leaves a flag out."""
    argv = []
    for name, value in flags.items():
        if isinstance(value, list):
            argv += [f"--{name}", *map(str, value)]
        elif str(value).startswith("-"):
            argv.append(f"--{name}={value}")
        elif value is not None:
            argv += [f"--{name}", str(value)]
    return argv


def with_equals(flags: Mapping[str, Value]) -> list[str]:
    """A command line of --name=value, in which "--flag yes" is not read as a flag that stands alone and a word."""
    argv = []
    for name, value in flags.items():
        if isinstance(value, list):
            argv += command_line({name: value})
        else:
            argv.append(f"--{name}={value}")
    return argv


# Names and values.


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
    settings: Settings = {}
    for taker in stages_taking(name):
        several = flags_of(taker)[key]
        made = to_value(name, value, split=split and several)
        if several and isinstance(made, str):
            made = [made]
        if several and made == []:  # no values: the default of the program counts
            made = None
        settings[f"{taker}.{key}"] = made
    return settings


def stages_taking(name: str) -> list[str]:
    """The stages whose program has this flag, unless the loop sets it. UserError if there are none."""
    table, dot, key = name.rpartition(".")
    stages = [table] if dot else list(PROGRAMS)
    having = [stage for stage in stages if key in flags_of(stage)]
    if not having:
        if dot:
            what = f"no flag of {PROGRAMS[table].path}"
            known = set(flags_of(table))
        else:
            what = "neither a setting of the loop nor a flag of a stage"
            known = set(OWN).union(*map(flags_of, PROGRAMS))
        raise UserError(f"{name}: {what}{nearest(key, known)}")
    taking = [stage for stage in having if key not in PROGRAMS[stage].set_by_loop]
    if not taking:
        raise UserError(f"{name}: the loop sets this flag")
    return taking


def nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; the nearest that exists: {close[0]}" if close else ""


def to_value(name: str, value: Any, *, split: bool) -> Value | None:
    if isinstance(value, list):
        return [to_text(name, one) for one in value]
    if split:
        with user_errors(name, ValueError):
            return [to_text(name, one) for one in shlex.split(value)] or None
    return to_text(name, value) or None


def to_text(name: str, value: Any) -> str:
    """A value as a text, in which ~ and $ROOT are replaced."""
    text = str(value).strip("\r")
    text = re.sub(r"\$ROOT\b", lambda _: str(ROOT), text)
    # $NAME, ${NAME}, $(a command), or a $ that stands alone. No shell reads a file of settings: it would stay there.
    if other := re.search(r"\$(\w+|\{\w*\}?|\(.*?\)|)", text):
        raise UserError(f"{name}: {other[0]} is not replaced; write the path, ~ or $ROOT")
    # ~ as a whole path or as its first part, where the text begins or behind a =, as in NAME=~/model
    return re.sub(r"(?:(?<=^)|(?<==))~(?=/|$)", lambda _: os.path.expanduser("~"), text)
