"""Time what reads the games of a whole epoch, and its memory: the merge of the ranks' files, rewards, report.

    python -m tools.bench.scale --games 10000 1000000

The games are made up, each about a word of its own, as if two processes had played them. Each program runs in a
process of its own; its seconds and its peak memory include Python and the packages that it imports, which is what few
games show. The files of a million games take 10 GB for a while.
"""

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import utils
from tools.bench.common import print_table, word_of
from tools.flags import flag, parse_flags
from tools.games.taboo import Taboo
from tools.players.player import STOP
from tools.selfplay.files import EpisodeFiles

GAME, STEM, PROCESSES = Taboo(), "bench", 2
PROGRAMS = ("merge", "assign_rewards", "report")
INTERVAL = 0.02  # seconds between looks at a program's memory
COLUMNS = {"games": "{:,}"}
COLUMNS |= {f"{program}, s": "{:.1f}" for program in PROGRAMS} | {f"{program}, GiB": "{:.3f}" for program in PROGRAMS}
ROOT = Path(__file__).resolve().parents[2]
TALK = "well maybe they often say that it was long ago and nobody there could tell us what to think of it".split()


def make_episode(index: int, rng: random.Random) -> dict:
    """A game of 6 to 10 messages: guessed, guessed wrongly, said, or undecided."""
    word = word_of(index)
    texts = [" ".join(rng.choices(TALK, k=20)) for _ in range(rng.choice((6, 8, 10)))]
    guesses = [f"I know the word! It is `{guess}`!" for guess in (word, "something")]
    texts[-1] = rng.choice([*guesses, f"{texts[-1]} {word}", texts[-1]])
    history = [{"role": GAME.roles[turn % 2], "content": text} for turn, text in enumerate(texts)]
    outcome, length = GAME.judge(history, word, 5)
    return {
        "index": index,
        "history": history,
        "target_word": word,
        "max_turns": 5,
        "outcome": outcome,
        "length": length,
        "replies": [{"finish_reason": STOP, "tokens": 30, "prompt_cut": False}] * len(history),
    }


def write_games(folder: Path, count: int) -> None:
    """The word list and the rank files of so many finished games."""
    (folder / "words.txt").write_text("\n".join(map(word_of, range(count))), encoding="utf-8")
    for rank in range(PROCESSES):
        rng, own = random.Random(rank), range(rank, count, PROCESSES)
        utils.write_records(folder / f"{STEM}_rank{rank}.jsonl", (make_episode(index, rng) for index in own))


def merge(folder: str) -> None:
    """What the process of play does that ends last."""
    folder = Path(folder)
    EpisodeFiles(folder, STEM, utils.read_words(folder / "words.txt"), GAME).merge(seconds=0, tokens_before=0)


def measure(*arguments: object) -> tuple[float, float]:
    """Seconds and peak resident GiB of Python with these arguments."""
    start, peak = time.perf_counter(), 0
    with psutil.Popen([sys.executable, *map(str, arguments)], stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                peak = max(peak, process.memory_info().rss)
            time.sleep(INTERVAL)
    if process.returncode:
        raise ValueError(f"{arguments[1]} ended with status {process.returncode}; its messages stand above")
    return time.perf_counter() - start, peak / 2**30


def compare(count: int) -> dict:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_games(folder, count)
        results, rows = folder / f"{STEM}_results.json", folder / "rows.json"
        commands = {
            "merge": ("-c", f"from tools.bench import scale; scale.merge({name!r})"),
            "assign_rewards": ("-m", "tools.assign_rewards", "--input_data_path", results, "--output_data_path", rows),
            "report": ("-m", "tools.report", "--episodes", results, "--output", folder / "report.html"),
        }
        line = {"games": count}
        for program in PROGRAMS:
            line[f"{program}, s"], line[f"{program}, GiB"] = measure(*commands[program])
    return line


@dataclass
class Settings:
    """What is measured."""

    games: list[int] = flag("how many, in turn", default=[10_000, 1_000_000])


def main() -> None:
    settings = parse_flags(Settings, description=__doc__)
    print_table(COLUMNS, [compare(count) for count in settings.games])


if __name__ == "__main__":
    utils.run_program(main)
