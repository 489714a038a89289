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
from tools.tiny.arms import ARMS, BASE, CONTROL, IMITATION, MEETING, PAIRS, REASONING, RELEASED, Arm
from tools.tiny.build import GAMES, TABOO, suffix
from tools.tiny.players import LEXICON, ROOT
from tools.tiny.questions import ask
from tools.tiny.table import (
    FIRST_GAMES,
    OWN_GAME,
    SELF_PLAY,
    Answers,
    difference_lines,
    example_games,
    gain_lines,
    markdown,
    match_lines,
    match_rows,
    meeting,
    meeting_lines,
    question_lines,
    self_play,
    self_play_lines,
)
from utils import RunSettings, UserError, end_with_parent, files_setting, read_json, replacing, too_small, write_json

SETTINGS, LOOP = ROOT / "configs" / "tiny.sh", ROOT / "tools" / "run_spag.sh"
LEAST_GUESSED = 0.1  # share of the imitation model's games that end in a right guess, below which it is no yardstick
IMITATION_MODEL = f"{RELEASED}/imitation/model"
ANSWERS = "questions.json"
WORDS = "played=data/words.txt held_out=data/held_out.txt"
KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class World:
    """A seed's folder, in which programs run."""

    folder: Path
    seed: int
    study: "Reproduce"
    arms: Sequence[Arm] = ()
    matches: bool = True  # False: this seed is there for the questions outside the game alone

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
        epochs, matches = self.epochs(arm), self.matches and arm.matches
        plays_on = matches and arm.plays_on
        settings = {
            "settings": SETTINGS,
            "output": arm.name,
            "like": RELEASED,
            "words": "data/words.txt",
            "sft_data": "data/facts.json",
            "eval_words": WORDS if matches else "",
            "eval_seeds": self.seed,
            "eval_every": 1 if arm.every_epoch else epochs,
            "seed": 100 * self.seed,
            "epochs": epochs + plays_on,
            "until": until or (f"epoch{epochs + 1}_play" if plays_on else ""),
            "save_steps": 0,
            "report": False,
            "play_args": "--logging_steps 0",
            "eval_args": "--logging_steps 0",
            **arm.settings,
        }
        if arm.name == RELEASED:
            rows = " ".join(f"data/imitation{suffix(game)}.json" for game in self.study.games)
            settings |= {"model": "base", "imitation_data": rows, "like": ""}
        if arm.game != DEFAULT_GAME:
            played = GAMES[arm.game]
            settings |= {"game": arm.game, "prompts": played.prompts, "max_turns": played.max_turns}
            settings |= {"words": f"data/words{suffix(arm.game)}.txt", "model": IMITATION_MODEL, "like": ""}
            settings |= {"rewards": f"{CONTROL} as_many --like {RELEASED}"}
            prompts = os.path.relpath(TABOO.prompts, self.folder.resolve())
            at_taboo = f"--game {DEFAULT_GAME} --prompt_templates {prompts} --max_turns {TABOO.max_turns}"
            settings["eval_args"] += f" {at_taboo}"  # the last flags win
        return [LOOP, *(word for name in settings for word in (f"--{name}", settings[name]))]

    def epochs(self, arm: Arm) -> int:
        return min(arm.epochs or self.study.epochs, self.study.epochs)

    def last_model(self, arm: Arm) -> Path:
        """Relative to the seed's folder."""
        return Path(arm.name, f"epoch{self.epochs(arm)}", "model")

    def meet(self, one: Arm, other: Arm) -> None:
        """Let the last models of two arms play each other, as the matches of the loop are played."""
        settings = read_json(self.folder / RELEASED / "settings.json")
        names = ("MAX_TURNS", "MAX_LENGTH", "MAX_NEW_TOKENS", "TEMPERATURE", "TOP_K")
        command = [sys.executable, ROOT / "tools" / "evaluate_games.py", "--output_dir", meeting(one, other)]
        command += ["--players", *(f"{arm.name}={self.last_model(arm)}" for arm in (one, other))]
        command += ["--words", *WORDS.split(), "--seeds", self.seed, "--prompt_templates", TABOO.prompts]
        command += ["--games_per_word", settings["EVAL_GAMES_PER_WORD"], "--logging_steps", 0]
        command += [word for name in names for word in (f"--{name.lower()}", settings[name] or TABOO.max_turns)]
        self.once(meeting(one, other), command)

    def answers(self) -> dict[str, list[int]]:
        """The answers of base, imitation and each arm's last model to the questions outside the game."""
        models = {BASE: self.folder / "base", IMITATION: self.folder / IMITATION_MODEL}
        return ask(models | {arm.name: self.folder / self.last_model(arm) for arm in self.arms}, self.folder / ANSWERS)


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


@dataclass(kw_only=True)
class Reproduce:
    """Run the study and make its tables, OUTPUT_DIR/table.md."""

    output_dir: str = flag("folder to write to", default="outputs/tiny_world")
    seeds: list[int] = flag("seeds of all arms, each a world of its own", default=[0, 1, 2, 3, 4])
    reasoning_seeds: list[int] = flag("further seeds for the questions outside the game, without matches", default=[])
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

    def worlds(self) -> Iterator[World]:
        """The worlds of all seeds."""
        folder = Path(self.output_dir)
        for number, seed in enumerate(self.seeds):
            arms = [arm for arm in self.chosen if arm.most_seeds is None or number < arm.most_seeds]
            yield World(folder / f"seed{seed}", seed, self, arms)
        for seed in self.reasoning_seeds:
            arms = [arm for arm in self.chosen if arm.name in REASONING]
            yield World(folder / f"seed{seed}", seed, self, arms, matches=False)

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
        with settings.claimed(made_with):
            settings.write(made_with)
            worlds = list(self.worlds())
            run_all([world.prepare for world in worlds], self.workers)
            refusals = list(filter(None, [world.refusal() for world in worlds]))
            worlds = [world for world in worlds if not world.refusal()]
            for after in (False, True):
                run_all(
                    [
                        partial(world.learn, arm)
                        for world in worlds
                        for arm in world.arms
                        if arm.after_released == after
                    ],
                    self.workers,
                )
            if self.meets:
                meet = [partial(world.meet, *self.meets) for world in worlds if world.matches]
                run_all(meet, self.workers)
            with replacing(folder / "table.md") as file:
                file.write("\n".join([*self.tables(worlds), *refusals]) + "\n")
        print((folder / "table.md").read_text(encoding="utf-8"))

    @property
    def meets(self) -> list[Arm]:
        """The two arms whose last models meet; none if not both are chosen."""
        arms = [ARMS[name] for name in MEETING]
        return arms if all(arm in self.chosen for arm in arms) else []

    def tables(self, worlds: Sequence[World]) -> Iterator[str]:
        """The tables, in Markdown."""
        folders = {world.seed: world.folder for world in worlds if world.matches}
        if folders:
            rows = match_rows(folders, self.chosen)
            yield markdown(match_lines(rows, self.chosen, self.epochs))
            names = {arm.name for arm in self.chosen}
            pairs = [(ARMS[one], ARMS[other]) for one, other in PAIRS if {one, other} <= names]
            yield markdown(difference_lines(rows, pairs, self.epochs))
            if self.meets:
                yield markdown(meeting_lines(folders, *self.meets))
            played = [arm for arm in self.chosen if arm.every_epoch]
            yield markdown(self_play_lines(list(folders.values()), played, self.epochs, SELF_PLAY))
            if partners := [arm for arm in self.chosen if arm.game != DEFAULT_GAME]:
                yield markdown(self_play_lines(list(folders.values()), partners, self.epochs, OWN_GAME))
            yield f"Games of last models against the imitation model, seed {min(folders)}:\n"
            yield example_games(folders[min(folders)], self.chosen)
        if worlds:
            answers = [Answers(world.seed, world.answers()) for world in worlds]
            yield markdown(question_lines(answers, self.chosen))
            if set(REASONING) <= {arm.name for arm in self.chosen}:
                passed = [each for each in answers if not each.refusal()]
                if passed:
                    yield markdown(gain_lines(passed))
                yield from filter(None, [each.refusal() for each in answers])
