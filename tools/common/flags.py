"""Flags of programs: dataclasses whose fields are flags, and a parser for them. No torch.

One declaration says everything about a flag: type, bounds, default, help, whether a record compares it, and whether
all stages of the loop share it.
"""

import argparse
import dataclasses
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, ge, gt, le, lt
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from tools.common.errors import UserError

T = TypeVar("T")
BOUNDS = {"at_least": ge, "above": gt, "at_most": le, "below": lt}  # of a flag's value
BOOLEANS = ("true", "false")
by_name = attrgetter("name")


def flag(
    help_line: str,
    *,
    default=dataclasses.MISSING,
    names: Sequence[str] = (),
    compared: bool | Callable[[Any], bool] = True,
    machine: bool = False,
    shared: bool = False,
    unique: Callable | None = None,
    neutral: float | None = None,
    **settings,
):
    """Return a dataclass field that is a flag of a program. Without a default the flag is required.

    `names`: older names, which the command line still takes; records know the field alone.
    `compared`: whether results made under another value are other results, so that a record compares it; or a function
    of all flags that says so. `machine`: it only says how a machine computes, so no record compares it.
    `shared`: all stages of the loop have one value.
    `unique`: the values of a list must differ in what this function gives for them.
    `neutral`: the value of a sampling parameter that changes nothing.
    The keys of BOUNDS are limits of the value; other `settings` go to `add_argument`.

    A field is annotated as str, int, float, bool, one of these | None, or a list of one; for another type give `type`,
    a function of the text.
    """
    bounds = {bound: settings.pop(bound) for bound in BOUNDS if bound in settings}
    metadata = {
        "help": help_line,
        "names": names,
        "compared": False if machine else compared,
        "machine": machine,
        "shared": shared,
        "unique": unique,
        "neutral": neutral,
        "bounds": bounds,
        "settings": settings,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_fields(kind) -> list[dataclasses.Field]:
    """The fields of a dataclass, or of one of its objects, that are flags."""
    return [field for field in dataclasses.fields(kind) if "bounds" in field.metadata]


def is_compared(field: dataclasses.Field, flags) -> bool:
    compared = field.metadata["compared"]
    return compared(flags) if callable(compared) else compared


def compared_values(flags) -> dict[str, Any]:
    """The flags that a record compares, by name. Where one names a file or a model, the content must replace it."""
    return {field.name: getattr(flags, field.name) for field in flag_fields(flags) if is_compared(field, flags)}


def default_of(field: dataclasses.Field) -> Any:
    """The default of a flag; MISSING if it is required."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def defaults(kind) -> dict[str, Any]:
    """The defaults of a dataclass of flags by name, as `stage` takes them for settings that a record does not have."""
    return {field.name: default_of(field) for field in flag_fields(kind) if not _is_required(field)}


@dataclass(kw_only=True)
class FlagGroup:
    """The base of dataclasses whose fields are flags. Whoever makes one, a parser or code, has its values checked."""

    def __post_init__(self):
        check_values(self)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, which keeps the lines of its description.

    With abbreviations --seed would set --seeds in tools/evaluate_games.py. A wrong flag is a UserError.
    """

    def __init__(self, **settings):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": form} | settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the `flag` fields of a dataclass to a parser, required ones first. A list takes several values.

    A boolean flag may stand alone, for True.
    """
    hints = get_type_hints(kind)
    for field in sorted(flag_fields(kind), key=lambda field: not _is_required(field)):
        hint = hints[field.name]
        several = get_origin(hint) is list
        plain = _plain_type(hint)
        default = default_of(field)
        line = field.metadata["help"]
        if default not in (dataclasses.MISSING, None, []):
            text = " ".join(map(str, default)) if isinstance(default, list) else default
            line += f" (default: {text})"
        names = [f"--{name}" for name in (field.name, *field.metadata["names"])]
        settings: dict[str, Any] = {"type": plain, "nargs": "+" if several else None}
        if plain is bool:
            settings = {"type": parse_bool, "nargs": "?", "const": True}
        settings |= {"required": _is_required(field), "default": default, "help": line.replace("%", "%%")}
        parser.add_argument(*names, dest=field.name, **settings | field.metadata["settings"])


def _plain_type(hint) -> type:
    """The type of one value: int for the hints int, int | None and list[int]."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    return parts[0] if parts else hint


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


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
    for field in flag_fields(kind or flags):
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


def parse_bool(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise ArgumentTypeError(f"expected True or False, got {text!r}")
    return text.lower() == "true"
