"""How a program starts, logs and ends."""

import io
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from tools.common.errors import UserError, printable
from tools.common.ranks import rank, world_size

INTERRUPTED = 130  # exit status after Ctrl-C
T = TypeVar("T")


def run_program(
    main: Callable[[], T], *, ranks: bool = False, kept: str = "nothing is half done; rerun the same command"
) -> T:
    """Set up logging and call `main`. UserError and OSError end the program with one line and exit status 2.

    Ctrl-C ends it with status 130 and one line, in which `kept` says what is kept and how to continue.
    """
    set_up_logging(ranks=ranks)
    if isinstance(sys.stdout, io.TextIOWrapper):  # tests and notebooks replace it
        sys.stdout.reconfigure(errors="replace")
    try:
        return main()
    except (UserError, OSError) as error:
        end_with_error(str(error))
    except KeyboardInterrupt:
        if not ranks or rank() == 0:
            sys.stderr.write(f"\n{Path(sys.argv[0]).name}: stopped; {kept}\n")
        sys.exit(INTERRUPTED)


def end_with_error(message: str) -> NoReturn:
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {printable(message)}\n")
    sys.exit(2)


def set_up_logging(*, ranks: bool) -> None:
    """Log to standard error: everything from rank 0, warnings from the others."""
    who = f"rank {rank()} " if ranks and world_size() > 1 else ""
    level = logging.WARNING if ranks and rank() > 0 else logging.INFO
    form = f"%(asctime)s {who}%(levelname)s %(message)s"
    logging.basicConfig(level=level, format=form, datefmt="%Y-%m-%d %X", force=True)
    for library in ("openai", "httpx", "httpx2"):  # which log every request
        logging.getLogger(library).setLevel(logging.WARNING)


def run_python(*argv) -> None:
    """Run Python with these arguments; CalledProcessError if it fails."""
    subprocess.run([sys.executable, *map(str, argv)], check=True)
