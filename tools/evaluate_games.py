"""Evaluation by match: players against each other, in both roles, on the same words.

    python -m tools.evaluate_games --players imitation=MODEL epoch1=MODEL epoch2=MODEL --against imitation \\
        --words played=data/words.txt held_out=data/held_out.txt --games_per_word 5 --seeds 0 1 2 \\
        --task_type sampling --output_dir DIR

Writes DIR/games_results.json (all games), matches.json (points and rates with intervals) and matches.txt, which
tools/matches/README.md describes. Every pair of players meets; with --against, every player meets that one; a single
player meets itself. Finished games are stored at once: after a kill, the same command plays the missing ones. Under
torchrun each process plays a share of the games.
"""

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.flags import NamedPath, flag, named_path, parse_flags
from tools.games.game import Game
from tools.matches.stats import ALL, Match, pairs, schedule
from tools.matches.text import RESULTS, TABLE, write_results
from tools.players.player import TESTING
from tools.selfplay.files import EpisodeFiles
from tools.selfplay.flags import PlayFlags, kind_of, words_setting
from tools.selfplay.play import Play, Run
from utils import UserError, rank, read_words, run_program, set_up_logging, too_small

STEM = "games"  # first part of the names of the games' files
GAMES_PER_WORD = 5  # default of --games_per_word with --task_type sampling


def named_words(text: str) -> NamedPath:
    """The `type` of --words."""
    name, equals, path = text.partition("=")
    named = NamedPath(name, path) if equals else NamedPath(Path(text).stem, text)
    if not (named.name and named.path):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE or FILE, got {text!r}")
    return named


@dataclass(kw_only=True)
class Flags(PlayFlags):
    """The flags of this program."""

    players: list[NamedPath] = flag("model folders, hub names, or openai:MODEL", type=named_path, metavar="NAME=MODEL")
    against: str | None = flag("play only matches with this player; unset: all pairs", default=None, metavar="NAME")
    words: list[NamedPath] = flag(
        "word lists; a list without NAME= is called like its file", type=named_words, metavar="NAME=FILE"
    )
    games_per_word: int | None = flag(
        f"games with each word in each match; unset: {GAMES_PER_WORD}, or 1 if play is greedy", default=None
    )
    max_words: int | None = flag("play only the first words of each list, at most so many", default=None)
    seeds: list[int] = flag("seeds of sampling; every pair plays a match with each", default=[0])
    output_dir: str = flag("folder of the results, shared by all processes")

    def __post_init__(self):
        if self.games_per_word is None:
            self.games_per_word = 1 if self.task_type == TESTING else GAMES_PER_WORD

    def check(self) -> None:
        paths = [player.path for player in self.players]
        problems = too_small(self, games_per_word=1, max_words=1) + self.problems(paths)
        names, lists = [player.name for player in self.players], [item.name for item in self.words]
        for name, values in (("players", names), ("words", lists), ("seeds", self.seeds)):
            if repeated := sorted({value for value in values if values.count(value) > 1}):
                problems.append(f"--{name} names {repeated[0]} twice")
        if people := [path for path in paths if kind_of(path).at_terminal]:
            problems.append(f"--players: {people[0]} plays by tools.play_llm_game only")
        if ALL in lists:
            problems.append(f"--words names a list {ALL!r}, which is the name of the rows that pool lists")
        if self.against is not None and self.against not in names:
            problems.append(f"--against {self.against} is none of the --players {', '.join(names)}")
        if self.task_type == TESTING and (self.games_per_word > 1 or len(self.seeds) > 1):
            problems.append(
                f"--task_type {TESTING} plays a word the same way each time: leave out --games_per_word and --seeds"
            )
        if problems:
            raise UserError("; ".join(problems))

    def plays(self, game: Game, lists: Mapping[str, Sequence[str]]) -> list[Play]:
        """The plays of all matches; `lists` are the word lists by name."""
        paths = dict(self.players)
        plays = []
        for match in schedule(pairs(list(paths), self.against), list(lists), self.seeds):
            names, labels = (paths[match.first], paths[match.second]), dict(zip(Match.keys(game), match, strict=True))
            # The seed is made of the players' names too, so a match does not depend on those before it.
            plays.append(Play(names, json.dumps(match), [*lists[match.words]] * self.games_per_word, labels))
        return plays


def main() -> None:
    flags = parse_flags(Flags, description="Players against each other at a game, in both roles.")
    set_up_logging()
    flags.check()
    game = flags.load_game()
    templates, players = flags.load_templates(game), dict(flags.players)
    lists = {item.name: read_words(item.path, game.check_task)[: flags.max_words] for item in flags.words}
    plays = flags.plays(game, lists)
    words = list(itertools.chain(*(play.tasks for play in plays)))
    files = EpisodeFiles(flags.output_dir, STEM, words, game)
    flags = flags.with_engine(list(players.values()), files.settings_then())
    settings = {
        "players": list(players),
        "against": flags.against,
        "words": list(lists),
        "seeds": flags.seeds,
        "games_per_word": flags.games_per_word,
        **{f"player {name}": flags.player_setting(path) for name, path in players.items()},
        **{f"words {name}": words_setting(path, lists[name]) for name, path in flags.words},
        **flags.settings(game, templates),
    }
    with files.stage(settings, made_of_games=[RESULTS, TABLE]) as todo:
        if todo:
            todo.notes["tokenizer_sha256"] = flags.tokenizer_fingerprints(players)
            Run(flags, game, templates, plays, files).play_missing()
            if rank() == 0:
                write_results(files.folder, files.results_path, settings, game)
    if rank() == 0:
        print((files.folder / TABLE).read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run_program(main)
