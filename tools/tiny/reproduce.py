"""The study: self-play learning and its controls in the embedded world, over several seeds.

Every seed has its own scripted games, tokenizer, base model, imitation model, self-play and matches. OUTPUT_DIR/seedS
holds the world of a seed and, for each way of learning, a loop of tools/run_spag.sh in ARM. All arms of a seed start
from the same imitation model and its games. What is finished is kept: the same command continues.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.flags import flag
from tools.games.game import DEFAULT_GAME
from tools.games.taboo import DEFENDER_WINS
from tools.tiny.build import GAMES, TABOO, suffix
from tools.tiny.players import LEXICON, ROOT
from tools.tiny.questions import COLUMNS, PRIMARY, ask, by_word
from tools.tiny.table import (
    BASE,
    FIRST_GAMES,
    IMITATION,
    OWN_GAME,
    RELEASED,
    SELF_PLAY,
    Arm,
    Lines,
    difference_lines,
    markdown,
    match_lines,
    match_rows,
    over_seeds,
    self_play,
    self_play_lines,
)
from utils import RunSettings, UserError, end_with_parent, files_setting, replacing, too_small, write_json

SETTINGS, LOOP = ROOT / "configs" / "tiny.sh", ROOT / "tools" / "run_spag.sh"
CONTROL = "-m tools.tiny.controls --control"
LEAST_GUESSED = 0.1  # share of the imitation model's games that end in a right guess, below which it is no yardstick
IMITATION_MODEL = f"{RELEASED}/imitation/model"
WORDS = "played=data/words.txt held_out=data/held_out.txt"
KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_WAIT_POLICY")
NO_GAME_ROWS = {"train_args": "--allow_no_game_rows True"}
LIKE_RELEASED = {"games": 1, "games_per_word": 1, **NO_GAME_ROWS}  # no rows of its games, so it plays one
ARMS = {
    arm.name: arm
    for arm in (
        Arm(RELEASED, "SPAG, loss as released", every_epoch=True),
        Arm("detached", "SPAG, `--detach_kl True`", {"detach_kl": True}, every_epoch=True),
        Arm("cloning", "cloning of the winners", {"rewards": f"{CONTROL} cloning", **NO_GAME_ROWS}),
        Arm("coin", "control: winner drawn by coin", {"rewards": f"{CONTROL} coin"}),
        Arm(
            "sft",
            "control: SFT rows only, as many steps",
            {"rewards": f"{CONTROL} sft --like {RELEASED}", **LIKE_RELEASED},
            after_released=True,
        ),
        Arm("questions", "SP-20Q: self-play of 20 Questions", game="twenty_questions", after_released=True),
        Arm("cities", "SP-GuessCity: self-play of Guess My City", game="guess_my_city", after_released=True),
    )
}
PAIRS = [("detached", RELEASED), (RELEASED, "coin"), (RELEASED, "sft"), (RELEASED, "questions"), (RELEASED, "cities")]


@dataclass(frozen=True)
class World:
    """A seed's folder, in which programs run."""

    folder: Path
    seed: int
    study: "Reproduce"

    def prepare(self) -> None:
        """Make the world, its imitation model, and that model's games, which are the first of every arm."""
        build = [sys.executable, "-m", "tools.tiny_world", "build", "--output_dir", ".", "--seed", self.seed]
        self.once("world", [*build, "--games", *self.study.games], self.loop(ARMS[RELEASED], until="epoch1_play"))

    def refusal(self) -> str | None:
        """Why this seed is left out, if it is: points against a model that cannot play would say little."""
        guessed = self_play([self.folder / FIRST_GAMES])[DEFENDER_WINS]
        if guessed >= LEAST_GUESSED:
            return None
        return f"Seed {self.seed} is left out: its imitation model guesses the word in {guessed:.1%} of its games."

    def learn(self, arm: Arm) -> None:
        """Run an arm's loop."""
        self.once(arm.name, self.loop(arm))

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

    def loop(self, arm: Arm, until: str = "") -> list:
        """The command of an arm's loop; paths are relative to the seed's folder."""
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

    def answers(self) -> dict[str, list[int]]:
        """The answers of all models to the questions outside the game, by name: base, imitation, released1, ..."""
        models = {BASE: self.folder / "base", IMITATION: self.folder / IMITATION_MODEL}
        for arm in self.study.chosen:
            for epoch in range(1, self.study.epochs + 1):
                models[f"{arm.name}{epoch}"] = self.folder / arm.name / f"epoch{epoch}" / "model"
        return ask(models, self.folder / "questions.json")


def run_all(runs: Iterable[Callable[[], object]], workers: int) -> list:
    """What each run returns, so many at a time; after a failure nothing else begins."""
    pool = ThreadPoolExecutor(workers)
    futures = [pool.submit(run) for run in runs]
    try:
        for done in as_completed(futures):
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def question_lines(answers: Sequence[dict[str, list[int]]], arms: Iterable[Arm], epochs: int) -> Lines:
    """A line for base, imitation and each arm's last model, with shares of right answers; `answers` are by seed."""

    def share(right: Sequence[float], column: str) -> float:
        sizes, totals = by_word(right, column)
        return sum(totals) / sum(sizes)

    yield ["model", *COLUMNS, f"{PRIMARY} minus imitation"]
    for title, model in ((BASE, BASE), (IMITATION, IMITATION), *((arm.title, f"{arm.name}{epochs}") for arm in arms)):
        shares = {column: [share(of_seed[model], column) for of_seed in answers] for column in COLUMNS}
        cells = [f"{sum(values) / len(values):.3f}" for values in shares.values()]
        before = [share(of_seed[IMITATION], PRIMARY) for of_seed in answers]
        minus = [now - then for now, then in zip(shares[PRIMARY], before, strict=True)]
        yield [title, *cells, over_seeds(minus, "+.3f") if model not in (BASE, IMITATION) else ""]


@dataclass(kw_only=True)
class Reproduce:
    """Run the study and make its tables, OUTPUT_DIR/table.md."""

    output_dir: str = flag("folder to write to", default="outputs/tiny_world")
    seeds: list[int] = flag("seeds, each a world of its own", default=[0, 1, 2, 3, 4])
    arms: list[str] = flag(
        "ways of learning; released is always one", default=[name for name in ARMS if ARMS[name].game == DEFAULT_GAME]
    )
    games: list[str] = flag("games whose scripted play is imitated", default=[DEFAULT_GAME], choices=tuple(GAMES))
    epochs: int = flag("epochs of self-play", default=3)
    workers: int = flag("programs that run at the same time, with a thread each", default=os.cpu_count())

    def __post_init__(self):
        if problems := too_small(self, epochs=1, workers=1):
            raise UserError("; ".join(problems))
        for name in self.arms:
            if name not in ARMS or ARMS[name].game not in self.games:
                known = ", ".join(name for name in ARMS if ARMS[name].game in self.games)
                raise UserError(f"--arms {name}: with --games {' '.join(self.games)} the arms are {known}")

    @property
    def chosen(self) -> list[Arm]:
        return [arm for arm in ARMS.values() if arm.name in (RELEASED, *self.arms)]

    def run(self) -> None:
        """Run what is missing, and write the tables."""
        folder = Path(self.output_dir)
        made_with = {
            "epochs": self.epochs,
            "games": self.games,
            "settings": files_setting(SETTINGS),
            "texts": files_setting(LEXICON, *(GAMES[game].prompts for game in self.games)),
        }
        settings = RunSettings(
            folder / "settings.json",
            results=lambda: next(folder.glob("seed*"), None),
            remedy="use another --output_dir",
        )
        worlds = [World(folder / f"seed{seed}", seed, self) for seed in self.seeds]
        with settings.claimed(made_with):
            settings.write(made_with)
            run_all([world.prepare for world in worlds], self.workers)
            refusals = list(filter(None, [world.refusal() for world in worlds]))
            worlds = [world for world in worlds if not world.refusal()]
            for after in (False, True):
                arms = [arm for arm in self.chosen if arm.after_released == after]
                run_all([partial(world.learn, arm) for world in worlds for arm in arms], self.workers)
            with replacing(folder / "table.md") as file:
                file.write("\n".join([*self.tables(worlds), *refusals]))
        print((folder / "table.md").read_text(encoding="utf-8"))

    def tables(self, worlds: Sequence[World]) -> Iterator[str]:
        """The tables, in Markdown."""
        if not worlds:
            return
        folders = {world.seed: world.folder for world in worlds}
        rows = match_rows(folders, self.chosen)
        yield markdown(match_lines(rows, self.chosen, self.epochs))
        pairs = [(ARMS[one], ARMS[other]) for one, other in PAIRS if {one, other} <= {arm.name for arm in self.chosen}]
        yield markdown(difference_lines(rows, pairs, self.epochs))
        played = [arm for arm in self.chosen if arm.every_epoch]
        yield markdown(self_play_lines(list(folders.values()), played, self.epochs, SELF_PLAY))
        if partners := [arm for arm in self.chosen if arm.game != DEFAULT_GAME]:
            yield markdown(self_play_lines(list(folders.values()), partners, self.epochs, OWN_GAME))
        answers = run_all([world.answers for world in worlds], 1)
        yield markdown(question_lines(answers, self.chosen, self.epochs))
