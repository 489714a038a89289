"""Programs that a study runs for each of its seeds. What has ended well is not run again."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tools.tiny.players import ROOT
from utils import UserError, end_with_parent, write_json

SETTINGS, LOOP = ROOT / "configs" / "tiny.sh", ROOT / "tools" / "run_spag.sh"
KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class SeedFolder:
    """A seed's folder, in which programs run."""

    folder: Path
    seed: int

    def once(self, name: str, *commands: list) -> None:
        """Run commands, their output in NAME.log, unless they have ended well before. UserError if one fails.

        NAME_seconds.json, the seconds that they took, is written last.
        """
        seconds_path = self.folder / f"{name}_seconds.json"
        if seconds_path.is_file():
            return
        started = time.monotonic()
        for command in commands:
            self.program(self.folder / f"{name}.log", command)
        write_json(seconds_path, round(time.monotonic() - started, 1))

    def program(self, log: Path, command: list) -> None:
        """Run one program in the seed's folder, with one thread and none of the loop's settings in its environment."""
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as file:
            words = list(map(str, command))
            how = {"env": environment, "cwd": self.folder, "preexec_fn": end_with_parent}
            done = subprocess.run(words, stdout=file, stderr=file, **how)
        if done.returncode:
            raise UserError(f"{log}: ended with exit status {done.returncode}; run the same command to go on")
        print(f"{time.strftime('%H:%M:%S')} {self.folder.name}/{log.stem}", flush=True)


def loop_command(settings: dict[str, object]) -> list:
    """The command of tools/run_spag.sh with these settings."""
    return [LOOP, *(word for name in settings for word in (f"--{name}", settings[name]))]


def run_all(runs: Iterable[Callable[[], object]], workers: int) -> None:
    """Call all runs, so many at a time; after a failure nothing else begins."""
    pool = ThreadPoolExecutor(workers)
    futures = [pool.submit(run) for run in runs]
    try:
        for done in as_completed(futures):
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
