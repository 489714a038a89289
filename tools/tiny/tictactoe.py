"""A game with a known answer: what a tiny model needs to learn TextArena's TicTacToe by the loop as it is.

The model imitates random legal moves and then plays against itself. configs/arms/tictactoe.txt has the loop and its
matches. After each epoch the model meets players that do not learn: random legal moves, and best play (minimax).
Against the latter a draw is the most that one can get.
"""

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.flags import flag
from tools.games import load_game
from tools.games.prompts import load_templates
from tools.players.player import ScriptedPlayer
from tools.selfplay.files import Episode
from tools.selfplay.play import play_games
from tools.selfplay.rewards import ALL
from tools.selfplay.row_flags import PLAY, RowFlags
from tools.selfplay.rows import make_rows
from tools.tiny.models import SHAPE, random_llama, train_tokenizer
from tools.tiny.players import LEXICON
from utils import files_setting, read_json, stage, write_records

GAME, OPTIONS, PROMPTS = "textarena", ["env=TicTacToe-v0", "view=board"], LEXICON.with_name("tictactoe.json")


@dataclass(kw_only=True)
class TicTacToe:
    """Make the games, the word lists and the random model from which a tiny model learns TicTacToe."""

    output_dir: str = flag("folder to write to")
    seed: int = flag("of the games and of the model", default=0)
    imitated: int = flag("games of random legal moves to imitate", default=3000)
    self_played: int = flag("games of self-play in an epoch", default=2000)
    matched: int = flag("games of a match, in each role", default=200)

    def run(self) -> None:
        folder, settings = Path(self.output_dir), asdict(self) | {"prompts": files_setting(PROMPTS)}
        del settings["output_dir"]
        results = ["random/tokenizer_config.json", "random", "*.txt", "imitation*.json"]
        with stage(folder / "tictactoe.json", settings, results=results) as todo:
            if todo:
                self.write_data(folder)
        print(f"{folder}: {self.imitated:,} games to imitate, a model of random weights")

    def write_data(self, folder: Path) -> None:
        """Random legal games and their rows, tasks of self-play and of matches, the random model and its tokenizer."""
        game = load_game(GAME, **dict(option.split("=") for option in OPTIONS))
        folder.mkdir(parents=True, exist_ok=True)
        first = self.seed * self.imitated
        tasks = [str(first + number) for number in range(self.imitated)]
        for name, number in (("words", self.self_played), ("match_words", self.matched)):
            (folder / f"{name}.txt").write_text("".join(f"{task}\n" for task in tasks[:number]), encoding="utf-8")
        episodes: list[Episode] = []
        playing = dict.fromkeys(game.roles, ScriptedPlayer(game.scripted("random")))
        templates = load_templates(PROMPTS, game)
        numbered = enumerate(tasks, start=first)  # the players draw by these numbers
        how = {"max_turns": game.max_turns, "templates": templates, "concurrent_games": 1}
        asyncio.run(play_games(game, numbered, playing, on_episode=episodes.append, **how))
        games, rows = folder / "imitation_games.json", folder / "imitation.json"
        write_records(games, episodes)
        flags = RowFlags(
            game=GAME, game_options=OPTIONS, prompt_templates=str(PROMPTS), messages=ALL, training_prompt=PLAY
        )
        make_rows(flags, [str(games)], str(rows))
        texts = (row[part] for row in read_json(rows) for part in ("query", "target"))
        tokenizer = train_tokenizer(texts, vocab_size=400)
        random_llama(len(tokenizer), self.seed, **SHAPE).save_pretrained(folder / "random")
        tokenizer.save_pretrained(folder / "random")
