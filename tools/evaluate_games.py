"""Evaluation by match: players against each other, in both roles, on the same words.

    python -m tools.evaluate_games --players imitation=MODEL epoch1=MODEL epoch2=MODEL --against imitation \\
        --words played=data/words.txt held_out=data/held_out.txt --games_per_word 5 --seeds 0 1 2 --output_dir DIR

Writes DIR/games_results.json (all games), matches.json (points and rates with intervals) and matches.txt. After a
kill, the same command plays the missing games. Points against a frozen player (--against) show progress, whereas
results of self-play do not, because both players change.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.common.errors import UserError
from tools.common.files import read_words
from tools.common.flags import NAMED_MODELS, NamedPath, by_name, defaults, flag, named_path, parse_flags
from tools.common.programs import run_program
from tools.common.ranks import rank
from tools.common.records import stage
from tools.games.game import Game
from tools.measure.matches import ALL, RESULTS, TABLE, pairs, write_results
from tools.selfplay.episodes import EpisodeFiles
from tools.selfplay.flags import PlayFlags, words_setting
from tools.selfplay.make import FORMS, engine_notes, player_setting
from tools.selfplay.play import Planned, play_missing


def named_words(text: str) -> NamedPath:
    """The `type` of --words: NAME=FILE, or FILE, which is named after the file."""
    return named_path(text if "=" in text else f"{Path(text).stem}={text}")


@dataclass(kw_only=True)
class Flags(PlayFlags):
    players: list[NamedPath] = flag(f"players: {FORMS}", **NAMED_MODELS)
    against: str | None = flag("play only matches with this player; unset: all pairs", default=None, metavar="NAME")
    words: list[NamedPath] = flag(
        "word lists, named NAME or after the file", type=named_words, metavar="NAME=FILE", unique=by_name
    )
    games_per_word: int = flag("games per word in each match", default=1, at_least=1)
    max_words: int | None = flag(
        "play only this many words of each list, from the top", default=None, at_least=1, compared=False
    )
    seeds: list[int] = flag("seeds of sampling; every pair plays a match with each", default=[0], unique=int)
    output_dir: str = flag("folder for the results, shared by all processes", compared=False)

    def __post_init__(self):
        super().__post_init__()
        if ALL in dict(self.words):
            raise UserError(f"--words {ALL}=...: {ALL!r} is the table's name for all lists; choose another")
        if self.against not in (None, *dict(self.players)):
            raise UserError(f"--against {self.against} is not one of the --players")


def plan_matches(flags: Flags, game: Game, lists: Mapping[str, list[str]]) -> tuple[list[str], list[Planned]]:
    """The words of all games of all matches, and their players."""
    players = dict(flags.players)
    words: list[str] = []
    plan: list[Planned] = []
    for (first, second), name, seed in itertools.product(pairs(list(players), flags.against), lists, flags.seeds):
        labels = dict(zip((*game.roles, "words", "seed"), (first, second, name, seed), strict=True))
        # Named, not numbered, so that a match's draws do not depend on the other matches.
        draws = json.dumps([first, second, name, seed])
        of_match = lists[name] * flags.games_per_word
        words += of_match
        plan += [Planned(players[first], players[second], draws, labels)] * len(of_match)
    return words, plan


def main() -> None:
    flags = parse_flags(Flags, description=__doc__)
    game = flags.load_game()
    players = dict(flags.players)
    templates = flags.load_templates(game)
    lists = {name: read_words(path, game.check_task)[: flags.max_words] for name, path in flags.words}
    words, plan = plan_matches(flags, game, lists)
    files = EpisodeFiles(flags.output_dir, "games", words, game)
    # A game is stored under its index in `words`, which another player, list or seed would shift.
    settings = {
        **flags.settings(game),
        "players": list(players),
        "words": list(lists),
        **{f"player {name}": player_setting(path, flags) for name, path in players.items()},
        **{f"words {name}": words_setting(path, lists[name]) for name, path in flags.words},
    }
    results = [TABLE, RESULTS, *files.patterns]
    with stage(files.record_path, settings, results=results, defaults=defaults(Flags)) as work:
        if work.todo:
            play_missing(game, plan, flags, files, templates=templates, note_engines=engine_notes(work))
            files.finish()
            if rank() == 0:
                write_results(files.folder, files.results_path, settings, game)
    if rank() == 0:
        print((files.folder / TABLE).read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run_program(main, ranks=True, kept="finished games are kept; rerun the same command to play the others")
