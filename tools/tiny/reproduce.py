"""The study: self-play learning and its controls in the embedded world, over several seeds.

Every seed has its own scripted games, tokenizer, base model, imitation model, self-play and matches. OUTPUT_DIR/seedS
holds the world of a seed and, for each way of learning, a loop of tools/run_spag.sh in ARM. All arms of a seed start
from the same imitation model and its games. What is finished is kept: the same command continues.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.flags import flag
from tools.games.game import DEFAULT_GAME
from tools.tiny.arms import ARMS, BASE, CONTROL, IMITATION, MEETING, REASONING, RELEASED, Arm
from tools.tiny.build import GAMES, TABOO, suffix
from tools.tiny.players import LEXICON, ROOT
from tools.tiny.programs import SETTINGS, SeedFolder, loop_command, run_all
from tools.tiny.questions import ask
from tools.tiny.results import MEETING_FOLDER, seed_results
from tools.tiny.table import refusal, tables
from utils import RunSettings, UserError, files_setting, read_json, replacing, too_small, write_json

IMITATION_MODEL = f"{RELEASED}/imitation/model"
ANSWERS = "questions.json"
WORDS = "played=data/words.txt held_out=data/held_out.txt"


@dataclass(frozen=True)
class World(SeedFolder):
    """A seed of the study."""

    study: "Reproduce"
    arms: Sequence[Arm] = ()
    matches: bool = True  # False: this seed is there for the questions outside the game alone

    def prepare(self) -> None:
        """Make the world, its imitation model, and that model's games, which are the first of every arm."""
        build = [sys.executable, "-m", "tools.tiny_world", "build", "--output_dir", ".", "--seed", self.seed]
        self.once("world", [*build, "--games", *self.study.games], self.loop(ARMS[RELEASED], until="epoch1_play"))

    @property
    def counts(self) -> bool:
        """Whether the imitation model plays well enough."""
        return not refusal(seed_results(self.folder, self.seed, [ARMS[RELEASED]], {}))

    def keep_results(self) -> Path:
        """Write what the tables need of this seed, and return the file."""
        path = self.folder / "results.json"
        arms, answers = (self.arms, self.answers()) if self.counts else ([ARMS[RELEASED]], {})
        write_json(path, seed_results(self.folder, self.seed, arms, answers))
        return path

    def learn(self, arm: Arm) -> None:
        """Run an arm's loop."""
        self.once(arm.name, self.loop(arm))

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
        return loop_command(settings)

    def epochs(self, arm: Arm) -> int:
        return min(arm.epochs or self.study.epochs, self.study.epochs)

    def last_model(self, arm: Arm) -> Path:
        """Relative to the seed's folder."""
        return Path(arm.name, f"epoch{self.epochs(arm)}", "model")

    def meet(self) -> None:
        """Let the last models of the arms of MEETING play each other, as the matches of the loop are played."""
        settings = read_json(self.folder / RELEASED / "settings.json")
        names = ("MAX_TURNS", "MAX_LENGTH", "MAX_NEW_TOKENS", "TEMPERATURE", "TOP_K")
        command = [sys.executable, ROOT / "tools" / "evaluate_games.py", "--output_dir", MEETING_FOLDER]
        command += ["--players", *(f"{name}={self.last_model(ARMS[name])}" for name in MEETING)]
        command += ["--words", *WORDS.split(), "--seeds", self.seed, "--prompt_templates", TABOO.prompts]
        command += ["--games_per_word", settings["EVAL_GAMES_PER_WORD"], "--logging_steps", 0]
        command += [word for name in names for word in (f"--{name.lower()}", settings[name] or TABOO.max_turns)]
        self.once(MEETING_FOLDER, command)

    def answers(self) -> dict[str, list[int]]:
        """The answers of base, imitation and each arm's last model to the questions outside the game."""
        models = {BASE: self.folder / "base", IMITATION: self.folder / IMITATION_MODEL}
        return ask(models | {arm.name: self.folder / self.last_model(arm) for arm in self.arms}, self.folder / ANSWERS)


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
            counted = [world for world in worlds if world.counts]
            for after in (False, True):
                runs = [(world, arm) for world in counted for arm in world.arms if arm.after_released == after]
                run_all([partial(world.learn, arm) for world, arm in runs], self.workers)
            if set(MEETING) <= {arm.name for arm in self.chosen}:
                run_all([world.meet for world in counted if world.matches], self.workers)
            results = [read_json(world.keep_results()) for world in worlds]
            with replacing(folder / "table.md") as file:
                file.write(tables(results))
        print((folder / "table.md").read_text(encoding="utf-8"))


@dataclass(kw_only=True)
class Tables:
    """Print the tables of the study from the results of its seeds."""

    results: list[str] = flag("files results.json of the seeds, or copies of them")

    def run(self) -> None:
        print(tables([read_json(Path(path)) for path in self.results]))
