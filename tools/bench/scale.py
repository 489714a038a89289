"""Time what reads the games of a whole epoch, and its memory: the merge of the ranks' files, rewards, report.

    python -m tools.bench.scale --games 10000 1000000

The games are made up, each about a word of its own, as if two processes had played them. Each program runs in a
process of its own; its seconds and its peak memory include Python and the packages that it imports, which is what few
games show. The files of a million games take 10 GB for a while.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tools.bench.rewards import make_episodes
from tools.games import taboo
from tools.players.player import STOP
from tools.selfplay.files import EpisodeFiles, read_words
from utils import run_program

STEM, PROCESSES = "bench", 2
INTERVAL = 0.02  # seconds between looks at a program's memory
ROOT = Path(__file__).resolve().parents[2]


def write_games(folder: Path, count: int) -> None:
    """The word list and the rank files of so many finished games."""
    with contextlib.ExitStack() as stack:
        names = ["words.txt", *(f"{STEM}_rank{rank}.jsonl" for rank in range(PROCESSES))]
        words, *ranks = (stack.enter_context(open(folder / name, "w", encoding="utf-8")) for name in names)
        for index, episode in enumerate(make_episodes(count)):
            word, history = episode["target_word"], episode["history"]
            outcome, length = taboo.judge(history, word, episode["max_turns"])
            reply = {"finish_reason": STOP, "tokens": 30, "prompt_cut": False}
            record = {"index": index, **episode, "outcome": outcome, "length": length}
            record["replies"] = [reply] * len(history)
            ranks[index % PROCESSES].write(json.dumps(record) + "\n")
            words.write(word + "\n")


def merge(folder: Path) -> None:
    """What the process does that ends last."""
    EpisodeFiles(folder, STEM, read_words(folder / "words.txt")).merge(seconds=0, tokens_before=0)


def measure(module: str, *arguments: object) -> tuple[float, float]:
    """Seconds and peak resident GiB of a program."""
    start, peak = time.perf_counter(), 0
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with psutil.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                peak = max(peak, process.memory_info().rss)
            time.sleep(INTERVAL)
    if process.returncode:
        raise ValueError(f"{module} ended with status {process.returncode}; its messages stand above")
    return time.perf_counter() - start, peak / 2**30


def compare(count: int) -> None:
    """Print a line of the table for each program."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_games(folder, count)
        results, rows = folder / f"{STEM}_results.json", folder / "rows.json"
        programs = {
            "merge": ("tools.bench.scale", "--merge", folder),
            "assign_rewards": ("tools.assign_rewards", "--input_data_path", results, "--output_data_path", rows),
            "report": ("tools.report", "--episodes", results, "--output", folder / "report.html"),
        }
        for program, command in programs.items():
            seconds, peak = measure(*command)
            print(f"| {count:9,} | {program:14} | {seconds:7.1f} | {peak:8.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", type=int, nargs="+", default=[10_000, 1_000_000], help="how many, in turn")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="only merge the files that are there")
    args = parser.parse_args()
    if args.merge:
        merge(args.merge)
        return
    if min(args.games) < 1:
        raise ValueError("--games must be at least 1")
    print(f"| {'games':>9} | {'program':14} | seconds | peak GiB |\n|{'-' * 11}|{'-' * 16}|{'-' * 9}|{'-' * 10}|")
    for count in args.games:
        compare(count)


if __name__ == "__main__":
    run_program(main)
