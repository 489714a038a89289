"""The learning table of the README: self-play learning and its controls in the embedded world, over several seeds.

    python -m tools.tiny_world reproduce --seeds 3 --output_dir outputs/tiny_world

Every seed has its own scripted games, tokenizer, base model, imitation model, self-play and matches. OUTPUT_DIR/seedS
holds the world of a seed and a loop of tools/run_spag.sh for each way of learning, ARM; all of a seed start from the
imitation model and its games that the first one has made. What is finished is kept: the same command continues.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.games.taboo import DEFENDER_WINS
from tools.tiny.players import LEXICON
from tools.tiny.table import FIRST_GAMES, RELEASED, SFT_ONLY, Arm, self_play, write_table
from utils import RunSettings, files_setting, flag, too_small, write_json

ROOT = Path(__file__).resolve().parents[2]
SETTINGS, LOOP = ROOT / "configs" / "tiny.sh", ROOT / "tools" / "run_spag.sh"
CONTROL = "-m tools.tiny.controls --control"
LEAST_GUESSED = 0.1  # share of the imitation model's games that end in a right guess, below which it is no yardstick
NO_GAME_ROWS = {"train_args": "--allow_no_game_rows True"}

ARMS = {
    arm.name: arm
    for arm in (
        Arm(RELEASED, "SPAG, loss as released", every_epoch=True),
        Arm("detached", "SPAG, `--detach_kl True`", {"detach_kl": True}, every_epoch=True),
        Arm("cloning", "filtered behaviour cloning", {"rewards": f"{CONTROL} cloning", **NO_GAME_ROWS}),
        Arm("shuffled", "rewards shuffled among the winner's messages", {"rewards": f"{CONTROL} shuffled"}),
        Arm("coin", "control: winner drawn by coin", {"rewards": f"{CONTROL} coin"}),
        # Its rows come from no games, so that it plays one only.
        Arm(
            SFT_ONLY,
            "control: SFT rows only, as many steps",
            {"rewards": f"{CONTROL} sft --like {RELEASED}", "games": 1, "games_per_word": 1, **NO_GAME_ROWS},
        ),
    )
}


@dataclass(frozen=True)
class World:
    """A seed's folder, in which programs run."""

    folder: Path
    seed: int
    epochs: int

    def prepare(self) -> None:
        """The world, its imitation model, and the games of that model, the first of every arm."""
        build = [sys.executable, "-m", "tools.tiny_world", "build", "--output_dir", ".", "--seed", self.seed]
        self.once("world", build, self.loop(ARMS[RELEASED], until="epoch1_play"))
        guessed = self_play([self.folder / FIRST_GAMES])[DEFENDER_WINS]
        if guessed < LEAST_GUESSED:
            raise RuntimeError(
                f"{self.folder}: the imitation model guesses the word in {guessed:.1%} of its games; it has not "
                "learned the game, and points against it would say little"
            )

    def learn(self, arm: Arm) -> None:
        """A way of learning; what it starts from must be there."""
        self.once(arm.name, self.loop(arm))

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
        plain = {name: value for name, value in os.environ.items() if f"{{{name}:=" not in LOOP.read_text("utf-8")}
        environment = plain | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
        environment["HF_DATASETS_CACHE"] = str(self.folder.resolve() / "cache")
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as file:
            words = list(map(str, command))
            done = subprocess.run(words, stdout=file, stderr=file, env=environment, cwd=self.folder)
        if done.returncode:
            raise RuntimeError(f"{log}: ended with exit status {done.returncode}; run the same command to go on")
        print(f"{time.strftime('%H:%M:%S')} {self.folder.name}/{log.stem}", flush=True)

    def loop(self, arm: Arm, until: str = "") -> list:
        """The command of an arm's loop; the paths of its settings are those in the seed's folder."""
        settings = {
            "settings": SETTINGS,
            "output": arm.name,
            "model": f"{RELEASED}/imitation/model",
            "first_episodes": f"{FIRST_GAMES}/imitation_sampling_words_results.json",
            "words": "data/words.txt",
            "sft_data": "data/facts.json",
            "eval_words": "played=data/words.txt held_out=data/held_out.txt",
            "eval_seeds": self.seed,
            "eval_every": 1 if arm.every_epoch else self.epochs,
            "seed": 100 * self.seed,
            # The last model's games against itself are wanted too.
            "epochs": self.epochs + 1 if arm.every_epoch else self.epochs,
            "until": until or (f"epoch{self.epochs + 1}_play" if arm.every_epoch else ""),
            "save_steps": 0,
            "report": False,
            "play_args": "--logging_steps 0",
            "eval_args": "--logging_steps 0",
            **arm.settings,
        }
        if arm.name == RELEASED:
            settings |= {"model": "base", "imitation_data": "data/imitation.json", "first_episodes": ""}
        return [LOOP, *(word for name in settings for word in (f"--{name}", settings[name]))]


def run_all(runs: Sequence[Callable[[], None]], workers: int) -> None:
    """Run so many at a time; after a failure nothing else begins."""
    pool = ThreadPoolExecutor(workers)
    try:
        for done in as_completed([pool.submit(run) for run in runs]):
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(kw_only=True)
class Reproduce:
    """Make the tables of tools/tiny/README.md."""

    output_dir: str = flag("folder to write to", default="outputs/tiny_world")
    seeds: int = flag("seeds 0 to N - 1, each a world of its own", default=3)
    epochs: int = flag("epochs of self-play", default=3)
    workers: int = flag("programs that run at the same time, with a thread each", default=os.cpu_count())

    def run(self) -> None:
        """Run what is missing of all seeds and arms, and make the tables."""
        if problems := too_small(self, seeds=1, epochs=1, workers=1):
            raise ValueError("; ".join(problems))
        folder = Path(self.output_dir)
        made_with = {"epochs": self.epochs, "settings": files_setting(SETTINGS), "lexicon": files_setting(LEXICON)}
        settings = RunSettings(
            folder / "settings.json",
            results=lambda: next(folder.glob("seed*"), None),
            remedy="use another --output_dir",
        )
        worlds = [World(folder / f"seed{seed}", seed, self.epochs) for seed in range(self.seeds)]
        with settings.claimed(made_with):
            settings.write(made_with)
            run_all([world.prepare for world in worlds], self.workers)
            for after in (False, True):  # SFT_ONLY has as many rows as RELEASED had
                arms = [arm for name, arm in ARMS.items() if (name == SFT_ONLY) == after]
                run_all([partial(world.learn, arm) for world in worlds for arm in arms], self.workers)
        print(write_table(folder, list(ARMS.values()), self.seeds, self.epochs))
        took = [json.loads(world.seconds_path(name).read_text()) for world in worlds for name in ("world", *ARMS)]
        print(f"They took {sum(took) / 60:.0f} minutes in all; {self.workers} ran at a time, each with one thread.")
