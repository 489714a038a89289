"""Trials, each drawn from a seed. A failed trial prints its seed, which repeats it.

bash tools/test.sh tests/faults                                    a few trials, part of every test run
bash tools/test.sh tests/faults --campaign 10                      10 rounds of all trials, and a table
bash tools/test.sh tests/faults --campaign 10 --trial_seed 17 -k loop        one trial again
"""

import contextlib
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Trials:
    """The trials of one test: `short` of them in every test run, `rounds * each` in a campaign."""

    def __init__(self, node, rounds: int, only: int | None):
        self.node, self.rounds, self.only = node, rounds, only

    @property
    def campaign(self) -> bool:
        """Whether this is a campaign of several rounds."""
        return self.rounds > 1

    def run(self, kind: str, trial: Callable[[random.Random], int], *, short: int, each: int = 1) -> None:
        """Make all trials, even if some fail. Raises AssertionError with the seeds of the failed ones.

        A trial returns how many processes it killed, and counts only if it killed one. Therefore up to twice as many
        trials are made until enough count. The test is skipped if none does.
        """
        enough = self.rounds * each if self.campaign else short
        lost, tried, delivered = [], 0, 0
        for seed in range(2 * enough) if self.only is None else [self.only]:
            try:
                killed = trial(random.Random(f"{kind} {seed}"))
            except Exception:  # report any failure, then go on with the next trial
                lost.append(seed)
                sys.stdout.write(f"--- {kind}, --trial_seed {seed}\n{traceback.format_exc(limit=-3)}\n")
                killed = 1
            tried += killed > 0  # a program that ended before its kill proves nothing
            delivered += killed
            if tried >= enough:
                break
        self.node.user_properties.append(("trials", (kind, tried, len(lost), delivered)))
        assert not lost, f"{kind}: lost --trial_seed {', '.join(map(str, lost))}"
        if not tried:
            pytest.skip("every program ended before it was killed" if enough else "only in a campaign: --campaign N")


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder for one trial, deleted after a good end."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    yield folder
    shutil.rmtree(folder)
