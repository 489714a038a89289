"""The command lines of the programs in tools/: dataclasses whose fields are flags. No torch.

One declaration serves the program, the loop, whose settings are the flags of its stages (PROGRAMS in
tools/loop/keys.py), and code that makes the dataclass itself (tools/spag.py). transformers has such a parser too, but
importing it takes seconds. Only train.py uses it, because its flags extend the Trainer's (arguments.py).
"""

import argparse
import dataclasses
import inspect
import itertools
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, ge, gt, le
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from tools.common.errors import UserError

T = TypeVar("T")
BOUNDS = {"at_least": ge, "above": gt, "at_most": le}  # of a flag's value
BOOLEANS = ("true", "false")
by_name = attrgetter("name")


def flag(
    help_line: str,
    *,
    default=dataclasses.MISSING,
    names: Sequence[str] = (),
    unique: Callable | None = None,
    neutral: float | None = None,
    **settings,
):
    """Return a dataclass field that is a flag of a program. Without a default the flag is required.

    `names` are older names of the flag, which the command line still takes. Records and the loop know a flag by its
    field alone, so results that were made under the old name count as made with other settings. `unique`: the values
    of a list must differ in what this function gives for them. `neutral`: the value of a sampling parameter that
    changes nothing (Sampling in tools/players/player.py). The keys of BOUNDS are limits of the value; other `settings`
    go to `add_argument`.

    A field is annotated as str, int, float, bool, one of these | None, or a list of one; for another type give `type`,
    a function of the text. tools/assign_rewards.py and tools/controls.py compare each of their flags between two
    starts, unless ELSEWHERE or `elsewhere` there names it. Play and matches compare a new flag of PlayFlags only if it
    is a field of Sampling, or if COMPUTING in tools/players/flags.py names it. Other programs compare the flags that
    their `main` puts into its settings.
    """
    bounds = {bound: settings.pop(bound) for bound in BOUNDS if bound in settings}
    metadata = {
        "help": help_line,
        "names": names,
        "unique": unique,
        "neutral": neutral,
        "bounds": bounds,
        "settings": settings,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class FlagGroup:
    """The base of dataclasses whose fields are flags. Whoever makes one, a parser or code, has its values checked.

    A check of several flags together belongs into `__post_init__` of their class, as in RewardFlags of
    tools/selfplay/rewards.py. For its stages the loop makes these classes too, before the first one begins
    (`check_command` in tools/loop/keys.py).
    """

    def __post_init__(self):
        check_values(self)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, which keeps the lines of its description. A boolean flag needs no value.

    With abbreviations --seed would set --seeds in tools/evaluate_games.py. A wrong flag is a UserError.
    """

    def __init__(self, **settings):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": form} | settings)

    def parse_known_args(self, args=None, namespace=None):
        booleans = [name for action in self._actions if action.type is parse_bool for name in action.option_strings]
        return super().parse_known_args(with_values(sys.argv[1:] if args is None else args, booleans), namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the `flag` fields of a dataclass to a parser. A list takes several values, a bool True or False.

    In the help, required flags come first, then a group for each dataclass that `kind` is made of.
    """
    hints = get_type_hints(kind)
    groups = dict[str, argparse._ArgumentGroup]()
    for field in sorted(dataclasses.fields(kind), key=lambda field: not _is_required(field)):
        title = "required" if _is_required(field) else _group(kind, field.name)
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        hint = hints[field.name]
        several = get_origin(hint) is list
        plain = _plain_type(hint)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        line = field.metadata["help"]
        if default not in (dataclasses.MISSING, None, []):
            text = " ".join(map(str, default)) if isinstance(default, list) else default
            line += f" (default: {text})"
        names = [f"--{name}" for name in (field.name, *field.metadata["names"])]
        settings: dict[str, Any] = {"type": parse_bool if plain is bool else plain, "nargs": "+" if several else None}
        settings |= {"required": _is_required(field), "default": default, "help": line.replace("%", "%%")}
        group.add_argument(*names, dest=field.name, **settings | field.metadata["settings"])


def _plain_type(hint) -> type:
    """The type of one value: int for the hints int, int | None and list[int]."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    return parts[0] if parts else hint


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _group(kind: type, name: str) -> str:
    """The title of the flags of the class that defines this field; those of the program itself have none."""
    # Python 3.14 has no __annotations__ among the attributes of a class.
    owner = next(part for part in kind.__mro__ if name in inspect.get_annotations(part))
    return vars(owner).get("group", "this program")


def build_parser(kind: type, **settings) -> Parser:
    parser = Parser(**settings)
    add_flags(parser, kind)
    return parser


def parse_flags(kind: type[T], argv: Sequence[str] | None = None, *, description: str, prog: str | None = None) -> T:
    """Read the command line into a dataclass of `flag` fields. UserError for a wrong flag."""
    parser = build_parser(kind, description=description, prog=prog)
    return kind(**vars(parser.parse_args(argv)))


def parse_command(*kinds: type[T], description: str) -> T:
    """Read `COMMAND --flag ...` into the dataclass of this name. Its docstring describes the command in --help."""
    commands = {kind.__name__.lower(): kind for kind in kinds}
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands, help="its own --help lists its flags")
    command = parser.parse_args(sys.argv[1:2]).command
    kind = commands[command]
    return parse_flags(kind, sys.argv[2:], description=kind.__doc__ or "", prog=f"{parser.prog} {command}")


def check_values(flags, kind: type | None = None) -> None:
    """UserError for a value that is none of its flag's choices or out of its bounds, and for a value that is twice.

    `kind` is the dataclass of these flags where `flags` is what the parser has read.
    """
    for field in dataclasses.fields(kind or flags):
        if "bounds" not in field.metadata:  # no flag
            continue
        choices = field.metadata["settings"].get("choices")
        value = getattr(flags, field.name)
        if choices and value not in (*choices, field.default):
            raise UserError(f"{field.name} is {value!r}; it must be {' or '.join(map(repr, choices))}")
        for bound, limit in field.metadata["bounds"].items():
            if value is not None and not BOUNDS[bound](value, limit):
                raise UserError(f"{field.name} is {value}; it must be {bound.replace('_', ' ')} {limit}")
        unique = field.metadata["unique"]
        if unique and value and len(set(map(unique, value))) < len(value):
            raise UserError(f"{field.name}: one of {value} stands there twice")


def file_name(text: str) -> str:
    """The `type` of a flag whose value is the name of a file or folder, or a part of one: no path."""
    if "/" in text or text in (".", ".."):
        raise argparse.ArgumentTypeError(f"{text!r} is a path; it names files, so give it without '/' and '..'")
    return text


class NamedPath(NamedTuple):
    name: str
    path: str


def named_path(text: str) -> NamedPath:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=MODEL, got {text!r}")
    return NamedPath(name, path)


NAMED_MODELS = {"type": named_path, "metavar": "NAME=MODEL", "unique": by_name}  # settings of a `flag`


def with_values(argv: Iterable[str], booleans: Collection[str]) -> list[str]:
    """A command line in which each of these flags that stands without True or False has the value True.

    So `--x` means `--x True`, and `--x FOLDER` leaves the folder to the program.
    """
    argv = list(argv)
    filled = []
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        filled.append(argument)
        if argument in booleans and following.lower() not in BOOLEANS:
            filled.append("True")
    return filled


def parse_bool(text: str) -> bool:
    """The `type` of boolean flags."""
    if text.lower() not in BOOLEANS:
        raise ArgumentTypeError(f"expected True or False, got {text!r}")
    return text.lower() == "true"
