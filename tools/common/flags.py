"""Command-line flags as dataclass fields, and a parser for them. No torch.

Each flag is declared once: type, bounds, default, help, whether a record compares it, and whether all stages of the
loop share it.
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
    """Declare a dataclass field as a flag, which is required if it has no default.

    `names`: older names that the command line still accepts.
    `compared`: whether the value changes results, so that records compare it; or a function of all flags.
    `machine`: the value only affects how results are computed, so it is not compared.
    `shared`: all stages of the loop must have the same value.
    `unique`: a key function under which the values of a list must differ.
    `neutral`: the value at which a sampling parameter has no effect.
    Keys of BOUNDS limit the value; other `settings` go to `add_argument`.

    Annotate the field as str, int, float or bool, one of these | None, or a list of one. Other types need `type`, a
    function of the string.
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
    """The fields of a dataclass or its instance that are flags."""
    return [field for field in dataclasses.fields(kind) if "bounds" in field.metadata]


def is_compared(field: dataclasses.Field, flags) -> bool:
    compared = field.metadata["compared"]
    return compared(flags) if callable(compared) else compared


def compared_values(flags) -> dict[str, Any]:
    """The flags that a record compares, by name. Files and models must still be replaced by their content."""
    return {field.name: getattr(flags, field.name) for field in flag_fields(flags) if is_compared(field, flags)}


def default_of(field: dataclasses.Field) -> Any:
    """A flag's default; MISSING if it is required."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def defaults(kind) -> dict[str, Any]:
    """The defaults of a dataclass of flags, by name."""
    return {field.name: default_of(field) for field in flag_fields(kind) if not _is_required(field)}


@dataclass(kw_only=True)
class FlagGroup:
    """Base of dataclasses whose fields are flags; checks their values."""

    def __post_init__(self):
        check_values(self)


class Parser(argparse.ArgumentParser):
    """A parser that keeps the line breaks of its description and raises UserError for wrong flags.

    It allows no abbreviations, with which --seed would set --seeds.
    """

    def __init__(self, **settings):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": form} | settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the `flag` fields of a dataclass to a parser, required ones first. A list takes several values.

    A boolean flag without a value means True.
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
    """The type of a single value: int for the hints int, int | None and list[int]."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    return parts[0] if parts else hint


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def build_parser(kind: type, **settings) -> Parser:
    parser = Parser(**settings)
    add_flags(parser, kind)
    return parser


def parse_flags(kind: type[T], argv: Sequence[str] | None = None, *, description: str, prog: str | None = None) -> T:
    """Parse the command line into a dataclass of `flag` fields. UserError for a wrong flag."""
    parser = build_parser(kind, description=description, prog=prog)
    return kind(**vars(parser.parse_args(argv)))


def parse_command(*kinds: type[T], description: str) -> T:
    """Parse `COMMAND --flag ...` into the dataclass of that name, whose docstring is the command's --help."""
    commands = {kind.__name__.lower(): kind for kind in kinds}
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands, help="COMMAND --help lists its flags")
    command = parser.parse_args(sys.argv[1:2]).command
    kind = commands[command]
    return parse_flags(kind, sys.argv[2:], description=kind.__doc__ or "", prog=f"{parser.prog} {command}")


def check_values(flags, kind: type | None = None) -> None:
    """UserError for a value that is not among its flag's choices, out of bounds, or a duplicate.

    `kind` is the flags' dataclass, needed if `flags` is a parser's Namespace.
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
            raise UserError(f"{field.name}: duplicate in {value}")


def file_name(text: str) -> str:
    """The `type` of a flag that is (part of) a file's or folder's name, not a path."""
    if "/" in text or text in (".", ".."):
        raise argparse.ArgumentTypeError(f"{text!r} is a path, but must be part of a file name, without '/' and '..'")
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
