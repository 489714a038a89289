"""The learning tables of the README: self-play learning and its controls in the embedded world, over several seeds.

Every seed has its own scripted games, tokenizer, base model, imitation model, self-play and matches. OUTPUT_DIR/seedS
holds the world of a seed and a loop of tools/run_spag.sh for each way of learning, ARM; all of a seed start from the
imitation model and its games that the first one has made. What is finished is kept: the same command continues.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from tools.flags import flag
from tools.games.game import DEFAULT_GAME
from tools.games.taboo import DEFENDER_WINS
from tools.tiny.build import GAMES, TABOO, suffix
from tools.tiny.players import LEXICON, ROOT
from tools.tiny.questions import REASONING, RESULTS, reasoning
from tools.tiny.table import FIRST_GAMES, RELEASED, SFT_ONLY, Arm, self_play, write_table
from utils import RunSettings, end_with_parent, files_setting, read_json, too_small, write_json

LARGER_LEXICON = LEXICON.with_name("lexicon_large.txt")
SETTINGS, LOOP = ROOT / "configs" / "tiny.sh", ROOT / "tools" / "run_spag.sh"
CONTROL = "-m tools.tiny.controls --control"
LEAST_GUESSED = 0.1  # share of the imitation model's games that end in a right guess, below which it is no yardstick
IMITATION_MODEL = f"{RELEASED}/imitation/model"
WORDS = "played=data/words.txt held_out=data/held_out.txt"
NO_GAME_ROWS = {"train_args": "--allow_no_game_rows True"}


def by_name(*arms: Arm) -> dict[str, Arm]:
    """Arms to look up."""
    return {arm.name: arm for arm in arms}


ARMS = by_name(
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
        after_released=True,
    ),
    Arm("questions", "SP-20Q: self-play of 20 Questions", game="twenty_questions", after_released=True),
    Arm("cities", "SP-GuessCity: self-play of Guess My City", game="guess_my_city", after_released=True),
)

# What theory says should tell the policy losses apart, beside what did not in the small world.
LARGER_ARMS = by_name(
    *(ARMS[name] for name in (RELEASED, "cloning", "shuffled")),
    Arm("drawn", "rows under drawn prompts, `--training_prompt random`", {"reward_args": "--training_prompt random"}),
    Arm(
        "stale",
        "reference: the imitation model, not the one that played",
        {"train_args": f"--ref_model_name_or_path {IMITATION_MODEL}"},
    ),
)


@dataclass(frozen=True)
class World:
    """A seed's folder, in which programs run."""

    folder: Path
    seed: int
    study: "Reproduce"

    def prepare(self) -> None:
        """The world, its imitation model, and the games of that model, the first of every arm."""
        build = [sys.executable, "-m", "tools.tiny_world", "build", "--output_dir", ".", "--seed", self.seed]
        build += ["--lexicon", self.study.lexicon, "--games", *self.study.games, *self.study.build]
        self.once("world", build, self.loop(self.study.arms[RELEASED], until="epoch1_play"))
        guessed = self_play([self.folder / FIRST_GAMES])[DEFENDER_WINS]
        if guessed < LEAST_GUESSED:
            raise RuntimeError(
                f"{self.folder}: the imitation model guesses the word in {guessed:.1%} of its games; it has not "
                "learned the game, and points against it would say little"
            )

    def reason(self) -> None:
        """Ask all models the questions outside the game; again if the answers were deleted."""
        models = {"base": "base", "imitation": IMITATION_MODEL}
        for name in self.study.arms:
            models |= {f"{name}{epoch}": f"{name}/epoch{epoch}/model" for epoch in range(1, self.study.epochs + 1)}
        asked = [*reasoning(models), "--output_dir", REASONING, "--num_processes", 1]
        self.once(REASONING, asked, result=f"{REASONING}/{RESULTS}")

    def once(self, name: str, *commands: list, result: str = "") -> None:
        """Run commands, their output in NAME.log, unless they have ended well before and their result is still there.

        NAME_seconds.json says how long they took, once all is done. RuntimeError if one fails.
        """
        seconds_path = self.folder / f"{name}_seconds.json"
        if seconds_path.is_file() and (self.folder / result).exists():
            return
        started = time.monotonic()
        for command in commands:
            self.program(self.folder / f"{name}.log", command)
        write_json(seconds_path, round(time.monotonic() - started, 1))

    def program(self, log: Path, command: list) -> None:
        """Run one program in the seed's folder, with one thread. Raises RuntimeError if it fails."""
        plain = {name: value for name, value in os.environ.items() if f"{{{name}:=" not in LOOP.read_text("utf-8")}
        environment = plain | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
        environment["HF_DATASETS_CACHE"] = str(self.folder.resolve() / "cache")
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as file:
            words = list(map(str, command))
            how = {"env": environment, "cwd": self.folder, "preexec_fn": end_with_parent}
            done = subprocess.run(words, stdout=file, stderr=file, **how)
        if done.returncode:
            raise RuntimeError(f"{log}: ended with exit status {done.returncode}; run the same command to go on")
        print(f"{time.strftime('%H:%M:%S')} {self.folder.name}/{log.stem}", flush=True)

    def loop(self, arm: Arm, until: str = "") -> list:
        """The command of an arm's loop; the paths of its settings are those in the seed's folder."""
        epochs = self.study.epochs
        settings = {
            "settings": SETTINGS,
            "output": arm.name,
            "model": IMITATION_MODEL,
            "first_episodes": f"{FIRST_GAMES}/imitation_sampling_words_results.json",
            "words": "data/words.txt",
            "sft_data": "data/facts.json",
            "eval_words": WORDS,
            "eval_seeds": self.seed,
            "eval_every": 1 if arm.every_epoch else epochs,
            "seed": 100 * self.seed,
            "epochs": epochs + arm.plays_on,
            "until": until or (f"epoch{epochs + 1}_play" if arm.plays_on else ""),
            "save_steps": 0,
            "report": False,
            "play_args": "--logging_steps 0",
            "eval_args": "--logging_steps 0",
            **self.study.loop,
            **arm.settings,
        }
        if arm.name == RELEASED:
            rows = " ".join(f"data/imitation{suffix(game)}.json" for game in self.study.games)
            settings |= {"model": "base", "imitation_data": rows, "first_episodes": ""}
        if arm.game != DEFAULT_GAME:
            played = GAMES[arm.game]
            settings |= {"game": arm.game, "prompts": played.prompts, "max_turns": played.max_turns}
            settings |= {"words": f"data/words{suffix(arm.game)}.txt", "first_episodes": ""}
            settings |= {"rewards": f"{CONTROL} as_many --like {RELEASED}"}
            prompts = os.path.relpath(TABOO.prompts, self.folder.resolve())
            at_taboo = f"--game {DEFAULT_GAME} --prompt_templates {prompts} --max_turns {TABOO.max_turns}"
            settings["eval_args"] += f" {at_taboo}"  # the last flags win
        return [LOOP, *(word for name in settings for word in (f"--{name}", settings[name]))]


def run_all(runs: Iterable[Callable[[], None]], workers: int) -> None:
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

    arms: ClassVar[Mapping[str, Arm]] = ARMS
    differences: ClassVar[Sequence[tuple[str, str]]] = [  # pairs of arms
        *((arm, control) for arm in (RELEASED, "detached") for control in ("coin", SFT_ONLY)),
        *((RELEASED, partner) for partner in ("questions", "cities")),
    ]
    games: ClassVar[Sequence[str]] = tuple(GAMES)  # whose scripted games are imitated
    build: ClassVar[Sequence] = ["--imitation_rounds", 20]  # flags of tiny_world build
    loop: ClassVar[Mapping[str, object]] = {}  # settings of tools/run_spag.sh
    lexicon: ClassVar[Path] = LEXICON

    def run(self) -> None:
        """Run what is missing of all seeds and arms, and make the tables."""
        if problems := too_small(self, seeds=1, epochs=1, workers=1):
            raise ValueError("; ".join(problems))
        folder = Path(self.output_dir)
        made_with = {
            "epochs": self.epochs,
            "settings": files_setting(SETTINGS),
            "texts": files_setting(self.lexicon, *(GAMES[game].prompts for game in self.games)),
            "build": [*self.games, *map(str, self.build)],
            "arms": {name: [arm.game, self.loop | arm.settings] for name, arm in self.arms.items()},
        }
        settings = RunSettings(
            folder / "settings.json",
            results=lambda: next(folder.glob("seed*"), None),
            remedy="use another --output_dir",
        )
        worlds = [World(folder / f"seed{seed}", seed, self) for seed in range(self.seeds)]
        with settings.claimed(made_with):
            settings.write(made_with)
            run_all((world.prepare for world in worlds), self.workers)
            for after in (False, True):
                arms = [arm for arm in self.arms.values() if arm.after_released == after]
                loops = [partial(world.once, arm.name, world.loop(arm)) for world in worlds for arm in arms]
                run_all(loops, self.workers)
            if reasons := self.lexicon == LEXICON:  # the questions outside the game are about it
                run_all((world.reason for world in worlds), self.workers)
        folders = [world.folder for world in worlds]
        print(write_table(folder, folders, self.arms, self.differences, self.epochs, reasons=reasons))
        seconds = sum(read_json(path) for world in folders for path in world.glob("*_seconds.json"))
        print(f"They took {seconds / 60:.0f} minutes in all; {self.workers} ran at a time, each with one thread.")


@dataclass(kw_only=True)
class CompareLosses(Reproduce):
    """Make the table of policy losses in the larger world."""

    output_dir: str = flag("folder to write to", default="outputs/tiny_losses")
    epochs: int = flag("epochs of self-play", default=5)

    arms = LARGER_ARMS
    differences = [(name, RELEASED) for name in LARGER_ARMS if name != RELEASED]
    games = (DEFAULT_GAME,)
    build = [
        *("--hidden_size", 192, "--layers", 4, "--vocab_size", 8192),
        *("--pretraining_facts", 40000, "--imitation_facts", 10000, "--imitation_rounds", 12),
    ]
    loop = {"games_per_word": 2, "eval_games_per_word": 2, "global_batch": 32, "train_batch": 32}
    lexicon = LARGER_LEXICON
