"""Time assign_rewards on synthetic episodes against the plain way: derivatives made anew for every message.

    python -m tools.bench.rewards --episodes 20000

Prints the seconds of both in one run: judging and making rows within a process, without start-up and output, and as
whole processes, from a file of episodes to a file of rows. Every game has another word, so that no cache helps.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nltk.tokenize import TreebankWordTokenizer
from textblob import TextBlob

from tools.assign_rewards import Games, assign_rewards, game_rows
from tools.games import taboo
from utils import read_json_or_jsonl, run_program, write_records

SYLLABLES = "ba co di fe gu ha jo ki lu ma ne po qua ri sto tra vi wo xen yul zar".split()
TALK = "well maybe they often say that it was long ago and nobody there could tell us what to think of it".split()
GUESS_SHARE = 0.4  # of all games end with a guess
SAID_SHARE = 0.3  # of all games end with the word being said


def make_episodes(count: int, seed: int = 0) -> Iterator[dict]:
    """Games of 6 to 10 messages, each about a word of its own; most are decided by their last message."""
    rng = random.Random(seed)
    for index in range(count):
        word = "".join(rng.choice(SYLLABLES) for _ in range(3)) + _letters(index)
        texts = [" ".join(rng.choices(TALK, k=20)) for _ in range(rng.choice((6, 8, 10)))]
        ending = rng.random()
        if ending < GUESS_SHARE:
            texts[-1] = f"I know the word! It is `{rng.choice((word, 'something'))}`!"
        elif ending < GUESS_SHARE + SAID_SHARE:
            texts[-1] += f" {word}"
        history = [{"role": taboo.ROLES[turn % 2], "content": text} for turn, text in enumerate(texts)]
        yield {"history": history, "target_word": word, "max_turns": 5}


def judge_plainly(history: taboo.History, target_word: str, max_turns: int) -> taboo.Verdict:
    """The yardstick: every derivative made and searched for in every message, the plural by way of tokenised text.

    That is the way of the released games; their tokenizer needs a download, NLTK's for Treebank does not.
    """
    for length, message in enumerate(history[: 2 * max_turns], start=1):
        text = message["content"].lower()
        plural = TextBlob(target_word, tokenizer=TreebankWordTokenizer()).words[0].pluralize()
        forms = [target_word, f"{target_word}ing", f"{target_word}ed", plural]
        forms = [f"{quote}{form}{quote}".lower() for quote in ("", '"', "'", "`") for form in forms]
        guesses = re.search(r"i know the word! it.{1,8}", text)
        if message["role"] == taboo.DEFENDER and guesses:
            right = any(re.search(rf"i know the word! it.{{1,8}}{re.escape(form)}", text) for form in forms)
            return taboo.Verdict(taboo.DEFENDER_WINS if right else taboo.ATTACKER_WINS, length)
        if guesses or any(form in text for form in forms):
            outcomes = {taboo.DEFENDER: taboo.ATTACKER_WINS, taboo.ATTACKER: taboo.ATTACKER_BREAKS}
            return taboo.Verdict(outcomes[message["role"]], length)
    return taboo.Verdict(taboo.TIED, min(len(history), 2 * max_turns))


def assign_plainly(episodes: list[dict], rng: random.Random) -> list[dict]:
    """The rows of all games, judged the plain way."""
    games = Games(judge_plainly(game["history"], game["target_word"], game["max_turns"]) for game in episodes)

    def prompt_fn(history: taboo.History, target_word: str, max_turns: float) -> str:
        return taboo.training_prompt(history, target_word, max_turns, rng=rng)

    return list(game_rows(episodes, games, decay_weight=0.8, prompt_fn=prompt_fn))


def compare(count: int, folder: Path) -> None:
    """Print the seconds of both ways for `count` episodes."""
    episodes = list(make_episodes(count))
    path = folder / "episodes.json"
    write_records(path, episodes)
    start = time.perf_counter()
    rows = assign_rewards(episodes, rng=random.Random(0))
    ours = time.perf_counter() - start
    start = time.perf_counter()
    plain_rows = assign_plainly(episodes, random.Random(0))
    plain = time.perf_counter() - start
    if rows != plain_rows:
        raise AssertionError("the two ways disagree")
    result = {"episodes": count, "rows": len(rows), "in_process": _ratio(ours, plain)}
    ours = _seconds("tools.assign_rewards", "--input_data_path", path, "--output_data_path", folder / "rows.json")
    plain = _seconds("tools.bench.rewards", "--plain", path, folder / "plain_rows.json")
    print(json.dumps(result | {"whole_process": _ratio(ours, plain)}))


def _ratio(ours: float, plain: float) -> dict[str, float]:
    return {"ours_s": round(ours, 2), "plain_s": round(plain, 2), "times_faster": round(plain / ours, 1)}


def _seconds(module: str, *arguments: object) -> float:
    """How long a program runs, start-up and output included."""
    start = time.perf_counter()
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).resolve().parents[2])
    return time.perf_counter() - start


def _letters(number: int) -> str:
    """A number as letters, so that every word is another one."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time assign_rewards against the plain way.", allow_abbrev=False)
    parser.add_argument("--episodes", type=int, default=20000, help="how many episodes to make up (default: 20000)")
    parser.add_argument("--plain", nargs=2, metavar=("EPISODES", "ROWS"), help="only turn one into the other, plainly")
    args = parser.parse_args()
    if args.plain:
        write_records(args.plain[1], assign_plainly(read_json_or_jsonl(args.plain[0]), random.Random(0)))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(args.episodes, Path(folder))


if __name__ == "__main__":
    run_program(main)
