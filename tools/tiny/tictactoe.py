"""Self-play against a known answer: a tiny model learns TextArena's TicTacToe by the loop as it is.

The model imitates random legal moves and then plays against itself. After each epoch it meets players that do not
learn: random legal moves, the imitation model, and best play (minimax), against which a draw is the most one can get.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.flags import flag
from tools.games import load_game
from tools.games.prompts import load_templates
from tools.matches.stats import BOTH
from tools.players.player import ScriptedPlayer
from tools.selfplay.files import Episode
from tools.selfplay.play import play_games
from tools.selfplay.rows import ALL, PLAY, RowFlags, make_rows
from tools.tiny.arms import IMITATION
from tools.tiny.models import SHAPE, random_llama, train_tokenizer
from tools.tiny.players import LEXICON
from tools.tiny.programs import SETTINGS, SeedFolder, loop_command, run_all
from tools.tiny.table import markdown, over_seeds
from utils import RunSettings, UserError, read_json, replacing, too_small, write_json, write_records

GAME, OPTIONS, PROMPTS = "textarena", ["env=TicTacToe-v0", "view=board"], LEXICON.with_name("tictactoe.json")
PLAYED = ["--game", GAME, "--game_options", *OPTIONS, "--prompt_templates", PROMPTS]
RANDOM, MINIMAX = "random", "minimax"
OPPONENTS = [f"{name}=scripted:{name}" for name in (RANDOM, MINIMAX)]
IMITATED, SELF_PLAYED, MATCHED = 3000, 2000, 200  # games: imitated, of an epoch, of a match in each role
SAMPLING = {"max_length": 256, "max_new_tokens": 8, "temperature": 1.0}


@dataclass(frozen=True)
class Learner(SeedFolder):
    """A seed's model."""

    epochs: int

    def learn(self) -> None:
        """Make the data, run the loop, and let the model of each epoch meet the others."""
        self.write_data()
        settings = {"settings": SETTINGS, "output": "loop", "model": "random", "imitation_data": "imitation.json"}
        settings |= {"words": "seeds.txt", "game": GAME, "game_options": " ".join(OPTIONS), "prompts": PROMPTS}
        settings |= {"max_turns": "", "games_per_word": 1, "seed": 100 * self.seed, "epochs": self.epochs}
        settings |= {"save_steps": 0, "report": False, "play_args": "--logging_steps 0"}
        # Legal moves are learned slowly. The reference of imitation has random weights: no KL to it.
        settings |= {"imitation_lr": 1e-3, "imitation_kl": 0, "imitation_args": "--num_train_epochs 2"}
        self.once("loop", loop_command(settings | SAMPLING))
        models = [f"{IMITATION}=loop/imitation/model"]
        self.match(RANDOM, OPPONENTS)
        self.match(IMITATION, models + OPPONENTS)
        for epoch in range(1, self.epochs + 1):
            self.match(f"epoch{epoch}", [f"epoch{epoch}=loop/epoch{epoch}/model", *models, *OPPONENTS])

    def write_data(self) -> None:
        """Random legal games and their rows, seeds, a model of random weights and its tokenizer, which comes last."""
        model = self.folder / "random"
        if (model / "tokenizer_config.json").is_file():
            return
        game = load_game(GAME, **dict(option.split("=") for option in OPTIONS))
        self.folder.mkdir(parents=True, exist_ok=True)
        tasks = [str(self.seed * IMITATED + number) for number in range(IMITATED)]
        for name, number in (("seeds", SELF_PLAYED), ("match_seeds", MATCHED)):
            (self.folder / f"{name}.txt").write_text("".join(f"{task}\n" for task in tasks[:number]), encoding="utf-8")
        episodes: list[Episode] = []
        playing = dict.fromkeys(game.roles, ScriptedPlayer(game.scripted(RANDOM)))
        how = {"max_turns": game.max_turns, "templates": load_templates(PROMPTS, game), "concurrent_games": 1}
        numbered = enumerate(tasks, start=self.seed * IMITATED)  # the players draw by these numbers
        asyncio.run(play_games(game, numbered, playing, on_episode=episodes.append, **how))
        games, rows = (self.folder / name for name in ("games.json", "imitation.json"))
        write_records(games, episodes)
        how = {"game": GAME, "game_options": OPTIONS, "prompt_templates": str(PROMPTS)}
        make_rows(RowFlags(**how, messages=ALL, training_prompt=PLAY), [str(games)], str(rows))
        texts = (row[part] for row in read_json(rows) for part in ("query", "target"))
        tokenizer = train_tokenizer(texts, vocab_size=400)
        random_llama(len(tokenizer), self.seed, **SHAPE).save_pretrained(model)
        tokenizer.save_pretrained(model)

    def match(self, name: str, players: list[str]) -> None:
        """The first of these players against each other one."""
        command = [sys.executable, "-m", "tools.evaluate_games", "--output_dir", f"matches/{name}", *PLAYED]
        command += ["--players", *players, "--against", name, "--words", "match_seeds.txt", "--games_per_word", 1]
        command += [word for key, value in SAMPLING.items() for word in (f"--{key}", value)]
        self.once(f"match_{name}", [*command, "--task_type", "sampling", "--top_k", 50, "--logging_steps", 0])

    def results(self) -> dict[str, dict[str, float]]:
        """By player: points against each opponent, and the share of its messages that were illegal moves."""
        found = {}
        for name in (RANDOM, IMITATION, *(f"epoch{epoch}" for epoch in range(1, self.epochs + 1))):
            rows = read_json(self.folder / "matches" / name / "matches.json")["results"]
            own = [row for row in rows if row["player"] == name and row["seed"] is None and row["role"] == BOTH]
            found[name] = {row["opponent"]: row["points"] for row in own}
            found[name]["illegal"] = sum(row["breach_losses"] for row in own) / sum(row["messages"] for row in own)
        return found


@dataclass(kw_only=True)
class TicTacToe:
    """Let a tiny model learn TicTacToe, and show how near it comes to best play."""

    output_dir: str = flag("folder to write to", default="outputs/tictactoe")
    seeds: list[int] = flag("seeds, each with its own games, model and loop", default=[0, 1, 2])
    epochs: int = flag("epochs of self-play", default=5)
    workers: int = flag("programs that run at the same time, with a thread each", default=os.cpu_count())

    def run(self) -> None:
        """Run what is missing; the table goes to OUTPUT_DIR/table.md, its numbers to results.json."""
        if problems := too_small(self, epochs=1, workers=1):
            raise UserError("; ".join(problems))
        folder = Path(self.output_dir)
        settings = RunSettings(
            folder / "settings.json",
            results=lambda: next(folder.glob("seed*"), None),
            remedy="use another --output_dir",
        )
        with settings.claimed({"epochs": self.epochs}):
            settings.write({"epochs": self.epochs})
            learners = [Learner(folder / f"seed{seed}", seed, self.epochs) for seed in self.seeds]
            run_all([learner.learn for learner in learners], self.workers)
            results = {learner.seed: learner.results() for learner in learners}
            write_json(folder / "results.json", results)
            with replacing(folder / "table.md") as file:
                file.write(markdown(lines(list(results.values()))))
        print((folder / "table.md").read_text(encoding="utf-8"))


def lines(results: list[dict]) -> Iterator[list[str]]:
    """A line for each player: means over seeds with Student's intervals."""
    columns = {"illegal": "illegal moves", RANDOM: "points against random", IMITATION: "against imitation"}
    columns |= {MINIMAX: "against best play"}
    yield ["player", *columns.values()]
    for player in results[0]:
        found = [result[player] for result in results]
        cells = [over_seeds([each[name] for each in found]) if name in found[0] else "-" for name in columns]
        yield [player, *cells]
