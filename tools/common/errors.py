"""Errors that a user can fix, reported as one line."""

import importlib.metadata
import importlib.util
import shlex
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """An error that the user can fix: where it is, what is wrong, what to do. Programs print it as one line."""


@contextmanager
def user_errors(where: object, *types: type[BaseException]) -> Iterator[None]:
    """Turn errors of these types into UserErrors: `where`, and the first line of the library's message.

    For library calls on a user's input; the user's own code must stay outside. A UserError passes unchanged unless
    `types` contains UserError. An ImportError is turned only if a library raised it itself to name a missing package;
    those of an import statement, which have a `name`, are a broken installation.
    """
    try:
        yield
    except types as error:
        if isinstance(error, UserError) and UserError not in types:
            raise
        if _comes_from_inside_a_package(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(f"{where}: {first_line or type(error).__name__}") from error


def _comes_from_inside_a_package(error: BaseException) -> bool:
    return isinstance(error, ImportError) and (error.name is not None or type(error) is not ImportError)


def printable(text: str) -> str:
    """Text of a model or file with control characters, which could move the cursor, replaced."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def require(module: str, requirement: str) -> None:
    """UserError with the install command, unless the module of this optional package is installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {module} is missing: pip install {shlex.quote(requirement)}")
