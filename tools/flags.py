"""The command lines of the programs in tools/: a dataclass whose fields are flags. No torch."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from utils import end_with_error, unknown_words

T = TypeVar("T")


def parse_bool(text: str) -> bool:
    """Read True or False; the `type` of a bool flag."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")
    return text.lower() == "true"


def flag(help_line: str, *, default=dataclasses.MISSING, names: Sequence[str] = (), **settings):
    """Return a dataclass field that is a flag of a program. Without a default the flag is required.

    `names` are older names of the flag; `settings` go to `add_argument`.
    """
    metadata = {"help": help_line, "names": tuple(names), "settings": settings}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the `flag` fields of a dataclass to a parser. A list takes several values, a bool True or False."""
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):
        hint = hints[each.name]
        inner, *_ = [part for part in get_args(hint) if part is not type(None)] or [hint]
        several = list in (get_origin(hint), get_origin(inner))
        plain = (*get_args(inner), inner)[0]
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        settings = {"type": parse_bool if plain is bool else plain, "nargs": "+" if several else None}
        line = each.metadata["help"]
        if default not in (dataclasses.MISSING, None, []):
            line += f" (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"
        names = [f"--{name}" for name in (each.name, *each.metadata["names"])]
        settings |= {"required": default is dataclasses.MISSING, "default": default, "help": line.replace("%", "%%")}
        parser.add_argument(*names, dest=each.name, **settings | each.metadata["settings"])


def parse_flags(kind: type[T], argv: Sequence[str] | None = None, *, description: str, prog: str | None = None) -> T:
    """Read the command line into a dataclass of `flag` fields. A wrong flag ends the program with a one-line error."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: end_with_error(f"{message} (--help lists the flags)")
    add_flags(parser, kind)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error("; ".join(unknown_words(unknown, parser)))
    return kind(**vars(values))


def parse_command(kinds: Mapping[str, type[T]], argv: Sequence[str] | None = None, *, description: str) -> T:
    """Read `COMMAND --flag ...` into the dataclass of this command. Its docstring describes the command in --help."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=kinds, help="its own --help lists its flags")
    command = parser.parse_args(words[:1]).command
    kind = kinds[command]
    return parse_flags(kind, words[1:], description=kind.__doc__, prog=f"{parser.prog} {command}")


class NamedPath(NamedTuple):
    """A model or a file, and the name that the user gave it."""

    name: str
    path: str


def named_path(text: str) -> NamedPath:
    """Read NAME=MODEL; the `type` of such flags."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=MODEL, got {text!r}")
    return NamedPath(name, path)
