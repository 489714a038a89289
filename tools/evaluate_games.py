"""Evaluation by match: players against each other at Adversarial Taboo, in both roles, on the same words.

    python -m tools.evaluate_games --players imitation=MODEL epoch1=MODEL epoch2=MODEL --against imitation \\
        --words played=data/words.txt held_out=data/held_out.txt --games_per_word 5 --seeds 0 1 2 \\
        --task_type sampling --output_dir DIR

Writes DIR/games_results.json (every game), matches.json (points and rates with intervals), matches.txt and
matches.svg; data/README.md tells what is in them. Every pair of different players meets, or with --against every
player meets that one; a single player meets itself. Finished games are stored at once: after a kill, the same command
plays those that are missing. Under torchrun the games are dealt out to the processes.
"""

import argparse
import itertools
import json
import logging
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.engine import model as models
from tools.games import taboo
from tools.matches.stats import ALL, Match, count_matches, result_rows
from tools.matches.text import matches_text, write_plot
from tools.players.budget import estimate, likely_game
from tools.players.human import HUMAN
from tools.players.player import SAMPLING, TESTING
from tools.players.server_flags import add_server_flags, is_server, server_flag_problems
from tools.selfplay.files import Episode, EpisodeFiles, FinishedGames, read_words
from tools.selfplay.lineup import Seats, model_setting
from tools.selfplay.options import (
    add_game_flags,
    add_machine_flags,
    flag_problems,
    game_rules,
    set_precision,
    too_small,
    words_setting,
)
from tools.selfplay.play import limit_tokens, run_games, seed_draws
from tools.selfplay.progress import GivenUpError, Progress, end_unfinished
from utils import (
    await_inputs,
    end_with_launcher,
    iter_records,
    parse_bool,
    rank,
    replacing,
    run_program,
    set_up_logging,
    world_size,
    write_json,
)

STEM = "games"  # of the files of the games
GAMES_PER_WORD = {SAMPLING: 5, TESTING: 1}
logger = logging.getLogger(__name__)


# --- the schedule --------------------------------------------------------------------------------------------------


def pairs(players: Sequence[str], against: str | None = None) -> list[tuple[str, str]]:
    """Attacker and defender of every match; those of the same two players stand side by side."""
    if len(players) == 1:
        return [(players[0], players[0])]
    meetings = itertools.combinations(players, 2)
    if against is not None:
        meetings = ((player, against) for player in players if player != against)
    return [pair for one, other in meetings for pair in ((one, other), (other, one))]


class Schedule(Sequence[str]):
    """The target words of all games, match after match: in each, every word of its list once, then all again."""

    def __init__(self, matches: Sequence[Match], lists: dict[str, list[str]], games_per_word: int):
        self.matches, self.lists = matches, lists
        lengths = (len(lists[match.words]) * games_per_word for match in matches)
        self.starts = list(itertools.accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = self.match_of(index)
        words = self.lists[self.matches[number].words]
        return words[(index - self.starts[number]) % len(words)]

    def match_of(self, index: int) -> int:
        """The number of the match that a game belongs to."""
        return bisect_right(self.starts, index) - 1


def make_schedule(args: argparse.Namespace) -> Schedule:
    """What is to be played, by the flags; reads the word lists."""
    lists = {item.name: read_words(item.path)[: args.max_words] for item in args.words}
    names = [player.name for player in args.players]
    matches = [
        Match(attacker, defender, words, seed)
        for attacker, defender in pairs(names, args.against)
        for words in lists
        for seed in args.seeds
    ]
    return Schedule(matches, lists, games_per_word(args))


# --- the run -------------------------------------------------------------------------------------------------------


class Table:
    """Where one match after another is played, and each game stored as it ends."""

    def __init__(self, args: argparse.Namespace, files: EpisodeFiles, templates: taboo.Templates, games: int):
        self.args, self.files, self.templates = args, files, templates
        self.folders = {
            name: path if is_server(path) else str(models.model_folder(path)) for name, path in args.players
        }
        self.seats = Seats(args, templates)
        self.progress = Progress(games, args.logging_steps, self.seats.meter)

    def play(self, match: Match, indices: list[int]) -> None:
        """Play these games of one match."""
        names = (self.folders[match.attacker], self.folders[match.defender])
        # Held no longer than their match: the next models need the room.
        attacker, defender, concurrent_games = self.seats.take(names, self.progress.batch)
        logger.info("%s attacks %s: %s, seed %d, %d games", *match, len(indices))
        # By the names too, so that a match does not depend on what was played before, and no two draw alike.
        seed_draws(json.dumps(match), games_left=len(indices))

        def on_episode(episode: Episode) -> None:
            self.files.append(episode | match._asdict())
            self.progress.game(episode)

        games = self.seats.meter.deal((index, self.files.words[index]) for index in indices)
        how = {"concurrent_games": concurrent_games, "on_episode": on_episode, "on_lost": self.progress.lost}
        run_games(self.args, games, attacker, defender, self.templates, **how)


def play_matches(
    args: argparse.Namespace,
    files: EpisodeFiles,
    finished: FinishedGames,
    to_play: list[int],
    templates: taboo.Templates,
) -> Progress:
    """Play the games that are missing, match after match; returns what became of them."""
    schedule, table = files.words, Table(args, files, templates, len(to_play))
    dearest = max(likely_game(args, model_names(args, match), templates).tokens for match in schedule.matches)
    limit_tokens(args, table.seats.meter, finished, dearest)
    try:
        for number, indices in itertools.groupby(to_play, key=schedule.match_of):
            if not table.seats.meter.exhausted:
                table.play(schedule.matches[number], list(indices))
    except GivenUpError as error:
        logger.error("%s", error)
    finally:
        table.progress.end(args)
    return table.progress


def write_results(folder: Path, results_path: Path, settings: dict) -> str:
    """Write the statistics of all games as JSON, text and, if it can be drawn, a plot; returns the text."""
    counts = count_matches(episode for _, episode in iter_records(results_path))
    results = {"settings": settings, "results": list(result_rows(counts)), "games_path": results_path.name}
    text = matches_text(results)
    with replacing(folder / "matches.txt") as file:
        file.write(text)
    write_plot(folder / "matches.svg", results)
    write_json(folder / "matches.json", results)  # last: who finds it finds the others
    return text


# --- the program ---------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    """A file or folder with a name to call it by."""

    name: str
    path: str


def named_player(text: str) -> Named:
    """The `type` of --players."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=MODEL, got {text!r}")
    return Named(name, path)


def named_words(text: str) -> Named:
    """The `type` of --words."""
    name, equals, path = text.partition("=")
    named = Named(name, path) if equals else Named(Path(text).stem, text)
    if not (named.name and named.path):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE or FILE, got {text!r}")
    return named


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Players against each other at Adversarial Taboo, in both roles.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--players",
        nargs="+",
        required=True,
        type=named_player,
        metavar="NAME=MODEL",
        help="model folders, hub names, or openai:MODEL",
    )
    add("--against", metavar="NAME", help="only matches with this player; unset: every pair of players")
    add(
        "--words",
        nargs="+",
        required=True,
        type=named_words,
        metavar="NAME=FILE",
        help="word lists; a file's own name is used if no name is given",
    )
    add("--games_per_word", type=int, help=f"of each match and seed; {GAMES_PER_WORD[SAMPLING]} if unset, 1 if greedy")
    add("--max_words", type=int, help="take the first so many words of each list only")
    add("--seeds", nargs="+", type=int, default=[0], help="of sampling; every match is played with each")
    add("--output_dir", required=True, help="folder of the results, shared by all processes")
    add_game_flags(parser)
    add_machine_flags(parser)
    add_server_flags(parser)
    add("--overwrite", type=parse_bool, default=False, help="True: delete the games of an earlier run in this folder")
    return parser.parse_args(arguments)


def check_args(args: argparse.Namespace) -> None:
    """Raise one ValueError for all that is wrong with the flags."""
    problems = too_small(args, games_per_word=1, max_words=1) + flag_problems(args)
    players, lists = [player.name for player in args.players], [item.name for item in args.words]
    for flag, values in (("players", players), ("words", lists), ("seeds", args.seeds)):
        if repeated := sorted({value for value in values if values.count(value) > 1}):
            problems.append(f"--{flag} names {repeated[0]} twice")
    if HUMAN in {player.path for player in args.players}:
        problems.append(f"--players: {HUMAN} plays by tools.play_llm_game only")
    if ALL in lists:
        problems.append(f"--words names a list {ALL!r}, the name of what pools the lists; call it otherwise")
    if args.against is not None and args.against not in players:
        problems.append(f"--against {args.against} is none of the --players {', '.join(players)}")
    if args.task_type == TESTING and (games_per_word(args) > 1 or len(args.seeds) > 1):
        problems.append(f"--task_type {TESTING} plays a word alike each time: leave out --games_per_word and --seeds")
    problems += server_flag_problems(args, [player.path for player in args.players])
    if problems:
        raise ValueError("; ".join(problems))


def games_per_word(args: argparse.Namespace) -> int:
    """How often each word is played in a match."""
    return args.games_per_word or GAMES_PER_WORD[args.task_type]


def evaluation_settings(args: argparse.Namespace, schedule: Schedule, templates: taboo.Templates) -> dict:
    """All that the games depend on; of files and models, what is in them."""
    return {
        "players": [player.name for player in args.players],
        "against": args.against,
        "words": list(schedule.lists),
        "seeds": args.seeds,
        "games_per_word": games_per_word(args),
        **{f"player {name}": model_setting(path, args) for name, path in args.players},
        **{f"words {name}": words_setting(path, schedule.lists[name]) for name, path in args.words},
        **game_rules(args, templates),
    }


def model_names(args: argparse.Namespace, match: Match) -> tuple[str, str]:
    """Of attacker and defender, as the command line names them."""
    paths = dict(args.players)
    return paths[match.attacker], paths[match.defender]


def cost_estimate(
    args: argparse.Namespace, schedule: Schedule, games: Sequence[int], templates: taboo.Templates
) -> str:
    """What these games of the schedule will cost."""
    matches = (
        (model_names(args, schedule.matches[number]), [schedule[index] for index in indices])
        for number, indices in itertools.groupby(games, key=schedule.match_of)
    )
    return estimate(args, matches, templates)


def main() -> None:
    end_with_launcher()
    args = parse_args()
    set_up_logging()
    check_args(args)
    await_inputs([item.path for item in (*args.words, *args.players)])
    schedule = make_schedule(args)
    templates = taboo.load_templates(args.prompt_templates)
    files = EpisodeFiles(args.output_dir, STEM, schedule, flags="--output_dir")
    if args.dry_run:
        games = range(len(schedule)) if args.overwrite else files.finished().missing(range(len(schedule)))
        print(cost_estimate(args, schedule, games, templates))
        return
    set_precision(args)
    settings = evaluation_settings(args, schedule, templates)
    finished = files.start(settings, overwrite=args.overwrite)
    seconds, to_play = 0.0, finished.missing(range(rank(), len(schedule), world_size()))
    if to_play:
        for name in ("matches.json", "matches.txt", "matches.svg"):  # of fewer games, or of those overwritten
            (files.folder / name).unlink(missing_ok=True)
        if any(is_server(player.path) for player in args.players):
            logger.info("%s", cost_estimate(args, schedule, finished.missing(range(len(schedule))), templates))
        progress = play_matches(args, files, finished, to_play, templates)
        if progress.missing:
            end_unfinished(args, files, progress)
        seconds = progress.seconds
    if files.merge(seconds=seconds, tokens_before=finished.new_tokens):
        print(write_results(files.folder, files.results_path, settings), end="")


if __name__ == "__main__":
    run_program(main)
