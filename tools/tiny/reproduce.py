"""The learning table of the README: self-play learning and its controls in the embedded world, over several seeds.

    python -m tools.tiny_world reproduce --seeds 3 --output_dir outputs/tiny_world

Every seed has its own scripted games, tokenizer, base model, imitation model, self-play and matches. OUTPUT_DIR/seedS
holds the world of a seed and a loop of tools/run_spag.sh for each way of learning, ARM; all of a seed start from the
imitation model and its games that the first one has made. What is finished is kept: the same command continues.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from tools.games.taboo import DEFENDER_WINS
from tools.tiny.players import LEXICON
from tools.tiny.table import FIRST_GAMES, RELEASED, SFT_ONLY, Arm, read_summary, write_table
from utils import RunSettings, files_setting, write_json

ROOT = Path(__file__).resolve().parents[2]
SETTINGS, LOOP = ROOT / "configs" / "tiny.sh", ROOT / "tools" / "run_spag.sh"
CONTROL = "-m tools.tiny.controls --control"
LEAST_GUESSED = 0.1  # share of the imitation model's games that end in a right guess, below which it is no yardstick

ARMS = {
    arm.name: arm
    for arm in (
        Arm(RELEASED, "SPAG, loss as released", every_epoch=True),
        Arm("detached", "SPAG, `--detach_kl True`", {"detach_kl": True}, every_epoch=True),
        Arm("cloning", "filtered behaviour cloning", {"rewards": f"{CONTROL} cloning"}),
        Arm("shuffled", "rewards shuffled among the winner's messages", {"rewards": f"{CONTROL} shuffled"}),
        Arm("coin", "control: winner drawn by coin", {"rewards": f"{CONTROL} coin"}),
        # Its rows come from no games, so that it plays one only.
        Arm(
            SFT_ONLY,
            "control: SFT rows only, as many steps",
            {"rewards": f"{CONTROL} sft --like {RELEASED}", "games": 1, "games_per_word": 1},
        ),
    )
}


class World:
    """A seed's folder, in which programs run."""

    def __init__(self, folder: Path, seed: int, args: argparse.Namespace):
        self.folder, self.seed, self.args = folder, seed, args

    def once(self, name: str, *commands: list) -> None:
        """Run commands, their output in NAME.log, unless they have ended well before; RuntimeError if one fails."""
        if self.seconds_path(name).is_file():
            return
        started = time.monotonic()
        for command in commands:
            self.program(self.folder / f"{name}.log", command)
        write_json(self.seconds_path(name), round(time.monotonic() - started, 1))

    def seconds_path(self, name: str) -> Path:
        """The file that says how long it took, once it is done."""
        return self.folder / f"{name}_seconds.json"

    def program(self, log: Path, command: list) -> None:
        """Run one program in the seed's folder, with one thread. Raises RuntimeError if it fails."""
        if self.args.stop.is_set():
            raise RuntimeError(f"{log}: not begun, since another program failed")
        plain = {name: value for name, value in os.environ.items() if f"{{{name}:=" not in LOOP.read_text("utf-8")}
        environment = plain | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
        environment["HF_DATASETS_CACHE"] = str(self.folder.resolve() / "cache")
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as file:
            words = list(map(str, command))
            done = subprocess.run(words, stdout=file, stderr=file, env=environment, cwd=self.folder)
        if done.returncode:
            raise RuntimeError(f"{log}: ended with exit status {done.returncode}; run the same command to go on")
        print(f"{time.strftime('%H:%M:%S')} {log.relative_to(self.args.output_dir).with_suffix('')}", flush=True)

    def loop(self, arm: Arm, until: str = "") -> list:
        """The command of an arm's loop; the paths of its settings are those in the seed's folder."""
        epochs = self.args.epochs
        settings = {
            "settings": SETTINGS,
            "output": arm.name,
            "model": f"{RELEASED}/imitation/model",
            "first_episodes": f"{FIRST_GAMES}/imitation_sampling_words_results.json",
            "words": "data/words.txt",
            "sft_data": "data/facts.json",
            "eval_words": "played=data/words.txt held_out=data/held_out.txt",
            "eval_seeds": self.seed,
            "eval_every": 1 if arm.every_epoch else epochs,
            "seed": 100 * self.seed,
            # The last model's games against itself are wanted too.
            "epochs": epochs + 1 if arm.every_epoch else epochs,
            "until": until or (f"epoch{epochs + 1}_play" if arm.every_epoch else ""),
            "save_steps": 0,
            "report": False,
            "play_args": "--logging_steps 0",
            "eval_args": "--logging_steps 0",
            **arm.settings,
        }
        if arm.name == RELEASED:
            settings |= {"model": "base", "imitation_data": "data/imitation.json", "first_episodes": ""}
        return [LOOP, *(word for name in settings for word in (f"--{name}", settings[name]))]


# --- all of them ---------------------------------------------------------------------------------------------------


def prepare(world: World) -> None:
    """The world of a seed, its imitation model, and the games of that model, the first of every arm."""
    build = [sys.executable, "-m", "tools.tiny_world", "build", "--output_dir", ".", "--seed", world.seed]
    world.once("world", build, world.loop(ARMS[RELEASED], until="epoch1_play"))
    summary = read_summary(world.folder / FIRST_GAMES)
    guessed = summary["outcomes"][DEFENDER_WINS] / summary["games"]
    if guessed < LEAST_GUESSED:
        raise RuntimeError(
            f"{world.folder}: the imitation model guesses the word in {guessed:.1%} of its games; it has not learned "
            "the game, and points against it would say little"
        )


def run_arm(world: World, arm: Arm, waits_for: Future) -> None:
    """A way of learning, once what it starts from is there."""
    waits_for.result()
    world.once(arm.name, world.loop(arm))


def submit(pool: ThreadPoolExecutor, worlds: list[World]) -> list[Future]:
    """All that is to be done, in an order in which nothing waits for what comes after it."""
    prepared = {world: pool.submit(prepare, world) for world in worlds}
    runs: dict[tuple[World, str], Future] = {}
    for world in worlds:
        for name, arm in ARMS.items():
            waits_for = runs[world, RELEASED] if name == SFT_ONLY else prepared[world]
            runs[world, name] = pool.submit(run_arm, world, arm, waits_for)
    return [*prepared.values(), *runs.values()]


def run_all(worlds: list[World], args: argparse.Namespace) -> None:
    """Run what is missing, so many at a time; after a failure nothing else begins."""
    args.stop = threading.Event()
    pool = ThreadPoolExecutor(args.workers)
    try:
        for run in as_completed(submit(pool, worlds)):
            run.result()
    finally:
        args.stop.set()
        pool.shutdown(cancel_futures=True)


def reproduce(args: argparse.Namespace) -> None:
    """Run what is missing of all seeds and arms, and make the table."""
    args.output_dir = Path(args.output_dir)
    for name in ("seeds", "epochs", "workers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    made_with = {"epochs": args.epochs, "settings": files_setting(SETTINGS), "lexicon": files_setting(LEXICON)}
    settings = RunSettings(
        args.output_dir / "settings.json",
        results=lambda: next(args.output_dir.glob("seed*"), None),
        remedy="use another --output_dir",
    )
    with settings.claimed(made_with):
        settings.write(made_with)
        worlds = [World(args.output_dir / f"seed{seed}", seed, args) for seed in range(args.seeds)]
        run_all(worlds, args)
    print(write_table(args.output_dir, list(ARMS.values()), args.seeds, args.epochs))
    took = [json.loads(world.seconds_path(name).read_text()) for world in worlds for name in ("world", *ARMS)]
    print(f"They took {sum(took) / 60:.0f} minutes in all; {args.workers} ran at a time, each with one thread.")
