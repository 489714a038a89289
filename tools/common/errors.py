"""Errors that a user can mend, as one line."""

import importlib.metadata
import importlib.util
import shlex
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """An error that the user can mend: where it is, what is wrong, what to do. Programs print it as one line."""


@contextmanager
def user_errors(where: object, *types: type[BaseException]) -> Iterator[None]:
    """Raise errors of these types as UserError: where, and the first line of what the library said.

    For the places where a library reads what a person gave. A person's own code does not belong inside. A UserError
    gets no second `where` unless it is among the types. An ImportError counts only if a library raised it by hand, to
    name a package; Python's own, which have a name, come from inside an installed package.
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
    """Whether Python's import raised this error, and not a library by hand."""
    return isinstance(error, ImportError) and (error.name is not None or type(error) is not ImportError)


def printable(text: str) -> str:
    """A text of a model or a file without characters that move the cursor."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def require(module: str, requirement: str) -> None:
    """Raise UserError with the command that installs an optional package, unless its module is installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {module} is missing: pip install {shlex.quote(requirement)}")
