"""Self-play of Adversarial Taboo: one game per word of a list, many games at once, on any number of processes.

    torchrun --nproc_per_node=8 --master_port=6000 -m tools.play_llm_game \\
        --attacker_model_name_or_path MODEL --defender_model_name_or_path MODEL --model_prefix im_llama2 \\
        --data_path data/all_target_words.txt --data_suffix all_words --output_dir data/self_play_results \\
        --task_type sampling --max_length 2048 --max_new_tokens 256 --bf16 True --tf32 True

Writes OUTPUT_DIR/im_llama2_sampling_all_words_results.json. Finished games are stored at once: after a kill, the same
command plays those that are missing. Without a launcher (python -m tools.play_llm_game ...) it is one process.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm

from tools import taboo
from tools.episodes import Episode, EpisodeFiles, FinishedGames, ReplyRecord, Summary, read_words
from tools.play_flags import (
    add_game_flags,
    add_machine_flags,
    flag_problems,
    game_rules,
    set_precision,
    too_small,
    words_setting,
)
from tools.players import GameView, Player, PlayerUnusable, ReplyUnavailable
from tools.seats import Seats, model_setting
from tools.server_costs import Meter, estimate, likely_game
from tools.server_flags import add_server_flags, is_server, server_flag_problems
from utils import end_with_launcher, parse_bool, rank, run_program, set_up_logging, world_size

UNFINISHED = 3  # exit status: games are missing, and the same command can play them
LOST_IN_A_ROW = 20  # so many unfinished games, with none that ended between them, and the run ends
logger = logging.getLogger(__name__)


# --- the game ------------------------------------------------------------------------------------------------------


async def play_game(
    target_word: str,
    attacker: Player,
    defender: Player,
    *,
    max_turns: int,
    index: int = 0,
    match: str = taboo.SUBSTRING,
    templates: taboo.Templates | None = None,
) -> Episode:
    """Play one game to its end (arXiv 2404.10642, algorithm 1) and judge it; `index` is its place in the word list."""
    players = {taboo.ATTACKER: attacker, taboo.DEFENDER: defender}
    history: list[dict[str, str]] = []
    replies: list[ReplyRecord] = []
    while not taboo.is_over(history, target_word, max_turns, match=match):
        role = taboo.next_player(history)
        prompt = taboo.play_prompt(history, target_word, max_turns, templates)
        known_word = target_word if role == taboo.ATTACKER else None
        reply = await players[role].reply(prompt, view=GameView(role, tuple(history), max_turns, index, known_word))
        history.append({"role": role, "content": reply.text.strip()})
        record = {"finish_reason": reply.finish_reason, "tokens": reply.tokens, "prompt_cut": reply.prompt_cut}
        replies.append(record if reply.prompt_tokens is None else record | {"prompt_tokens": reply.prompt_tokens})
    outcome, length = taboo.judge(history, target_word, max_turns, match=match)
    return {
        "index": index,
        "target_word": target_word,
        "max_turns": max_turns,
        "history": history,
        "outcome": outcome,
        "length": length,
        "replies": replies,
    }


def raise_it(index: int, word: str, error: Exception) -> None:
    """What `play_games` does about a game whose reply cannot be had, unless it is told otherwise."""
    raise error


async def play_games(
    games: Iterable[tuple[int, str]],
    attacker: Player,
    defender: Player,
    *,
    concurrent_games: int,
    on_episode: Callable[[Episode], None],
    on_lost: Callable[[int, str, ReplyUnavailable], None] = raise_it,
    **rules,
) -> None:
    """Play (index, word) pairs, so many at a time; `rules` are those of `play_game`. Both callbacks may raise."""
    to_play = iter(games)

    async def keep_playing() -> None:
        for index, word in to_play:  # shared by all: a finished game's place goes to the next word at once
            try:
                episode = await play_game(word, attacker, defender, index=index, **rules)
            except ReplyUnavailable as error:
                on_lost(index, word, error)
            else:
                on_episode(episode)

    await asyncio.gather(*(keep_playing() for _ in range(concurrent_games)))


# --- the run -------------------------------------------------------------------------------------------------------


class GivenUpError(Exception):
    """So many games in a row were left unfinished that the others are not begun."""


class Progress:
    """A bar for the games of this rank and, every `logging_steps` batches, one finished game. Rank 0 shows them.

    It also counts the games that had to be left unfinished, and what servers charge by `meter`.
    """

    def __init__(self, games: int, logging_steps: int, meter: Meter):
        self.games, self.meter = games, meter
        self.lost_in_a_row, self.seconds = 0, 0.0
        self.summary, self.started = Summary(), time.monotonic()
        self.logging_steps, self.batches, self.due = logging_steps, 0, False
        title = f"rank 0 of {world_size()}" if world_size() > 1 else "games"
        interval = 0.5 if sys.stderr.isatty() else 30  # seconds; a log file gets few lines
        self.bar = tqdm(total=games, desc=title, unit="game", disable=rank() != 0, mininterval=interval)

    def batch(self) -> None:
        """Note that a batch of prompts was answered."""
        self.batches += 1
        self.due |= self.logging_steps > 0 and self.batches % self.logging_steps == 0

    def game(self, episode: Episode) -> None:
        """Note that a game has ended."""
        self.summary.add(episode)
        self.meter.end(episode["index"])
        self.lost_in_a_row = 0
        shares = {outcome: f"{number / self.summary.games:.0%}" for outcome, number in self.summary.outcomes.items()}
        speed = self.summary.counts["new_tokens"] / (time.monotonic() - self.started)
        paid = {"server tokens": f"{self.meter.spent.tokens:,.0f}"} if self.meter.spent.calls else {}
        self.bar.set_postfix({"tokens/s": f"{speed:.0f}", **paid, **shares}, refresh=False)
        self.bar.update()
        if self.due and rank() == 0:
            tqdm.write(describe(episode))
            self.due = False

    def lost(self, index: int, word: str, error: ReplyUnavailable) -> None:
        """Note that a game is left unfinished; GivenUpError if many were and none has ended since."""
        logger.warning("%s: left unfinished: %s", word, error)
        self.meter.end(index)
        self.lost_in_a_row += 1
        if self.lost_in_a_row == LOST_IN_A_ROW:
            raise GivenUpError(f"{LOST_IN_A_ROW} games in a row had to be left unfinished, the last one by {error}")

    def end(self, args: argparse.Namespace) -> None:
        """Note that nothing more is played."""
        self.bar.close()
        self.seconds = time.monotonic() - self.started
        if self.meter.spent.calls:
            logger.info("servers answered: %s", self.meter.spent.describe(args))

    @property
    def missing(self) -> int:
        """How many games have not ended."""
        return self.games - self.summary.games


def describe(episode: Episode) -> str:
    """A game to read."""
    lines = [f"{message['role']}: {message['content']}" for message in episode["history"]]
    return "\n".join([f"--- {episode['target_word']} ---", *lines, f"--- {episode['outcome']} ---"])


def play(
    args: argparse.Namespace,
    files: EpisodeFiles,
    finished: FinishedGames,
    to_play: list[int],
    templates: taboo.Templates,
) -> Progress:
    """Play the games that are missing and store each as it ends; returns what became of them."""
    seats = Seats(args)
    progress = Progress(len(to_play), args.logging_steps, seats.meter)
    limit_tokens(args, seats.meter, finished, likely_game(args, model_names(args), templates).tokens)
    attacker, defender, concurrent_games = seats.take(model_names(args), progress.batch)
    seed_draws(args.seed, games_left=len(to_play))
    progress.started = time.monotonic()

    def on_episode(episode: Episode) -> None:
        files.append(episode)
        progress.game(episode)

    games = seats.meter.deal((index, files.words[index]) for index in to_play)
    how = {"concurrent_games": concurrent_games, "on_episode": on_episode, "on_lost": progress.lost}
    try:
        run_games(args, games, attacker, defender, templates, **how)
    except GivenUpError as error:
        logger.error("%s", error)
    finally:
        progress.end(args)
    return progress


def limit_tokens(args: argparse.Namespace, meter: Meter, finished: FinishedGames, game: float) -> None:
    """Give this rank its share of what --max_total_tokens leaves; a game takes about so many tokens."""
    if args.max_total_tokens is not None:
        meter.set_limit((args.max_total_tokens - finished.server_tokens) / world_size(), game)


def run_games(args: argparse.Namespace, games, attacker, defender, templates: taboo.Templates, **how) -> None:
    """Play (index, word) pairs by the rules in the flags; `how` as in `play_games`.

    ValueError for a player that can never answer, RuntimeError for any other fault.
    """
    rules = {"max_turns": args.taboo_max_turns, "match": args.match, "templates": templates}
    try:
        asyncio.run(play_games(games, attacker, defender, **how, **rules))
    except PlayerUnusable as error:
        raise ValueError(f"{error}; the games played so far are safe") from None
    except (OSError, ValueError) as error:  # no bad input, which takes one line, but a fault: show where it arose
        raise RuntimeError(f"{type(error).__name__} in play; the games played so far are safe") from error


def end_unfinished(args: argparse.Namespace, files: EpisodeFiles, progress: Progress) -> NoReturn:
    """End the program with one line and a status of its own: games are missing that the same command can play."""
    files.wait_for_others()
    remedy = "the same command plays them"
    if progress.meter.exhausted:
        remedy = f"--max_total_tokens {args.max_total_tokens} has no room for them; the same command with more does"
    sys.stderr.write(f"{Path(sys.argv[0]).name}: {progress.missing} games are missing; {remedy}\n")
    sys.exit(UNFINISHED)


def seed_draws(seed: int | str, *, games_left: int) -> None:
    """Seed torch for this rank. What is left to play counts too: a resumed run draws anew."""
    torch.manual_seed(random.Random(f"{seed}/{rank()}/{world_size()}/{games_left}").getrandbits(63))


# --- the program ---------------------------------------------------------------------------------------------------


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Self-play of Adversarial Taboo.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--attacker_model_name_or_path", required=True, help="model folder, name on the hub, or openai:MODEL")
    add("--defender_model_name_or_path", required=True, help="the same for the defender; equal ones are loaded once")
    add("--data_path", required=True, help="file of target words, one a line; one game is played for each")
    add("--output_dir", required=True, help="folder of the results, shared by all processes")
    add("--model_prefix", required=True, help="first part of the names of the result files")
    add("--data_suffix", required=True, help="last part of the names of the result files")
    add("--max_games", type=int, help="play the first so many words only; a larger number extends a run")
    add("--seed", type=int, default=42, help="of sampling")
    add_game_flags(parser)
    add_machine_flags(parser)
    add_server_flags(parser)
    add("--overwrite", type=parse_bool, default=False, help="True: delete the games of an earlier run of this name")
    return parser.parse_args(arguments)


def check_args(args: argparse.Namespace) -> None:
    """Raise one ValueError for all that is wrong with the flags."""
    problems = too_small(args, max_games=1) + flag_problems(args) + server_flag_problems(args, model_names(args))
    for name in ("model_prefix", "data_suffix"):
        value = getattr(args, name)
        if not value or Path(value).name != value:
            problems.append(f"--{name} {value!r} is no part of a file name")
    if problems:
        raise ValueError("; ".join(problems))


def model_names(args: argparse.Namespace) -> tuple[str, str]:
    """Of attacker and defender."""
    return args.attacker_model_name_or_path, args.defender_model_name_or_path


def game_settings(args: argparse.Namespace, words: list[str], templates: taboo.Templates) -> dict:
    """All that the games depend on; of files and models, what is in them."""
    attacker, defender = (model_setting(name, args) for name in model_names(args))
    return {
        "attacker_model_name_or_path": attacker,
        "defender_model_name_or_path": defender,
        "data_path": words_setting(args.data_path, words),
        **game_rules(args, templates),
        "seed": args.seed,
    }


def missing_words(finished: FinishedGames) -> list[str]:
    """The words whose games are not there, of all ranks."""
    return [finished.words[index] for index in finished.missing(range(len(finished.words)))]


def cost_estimate(args: argparse.Namespace, words: list[str], templates: taboo.Templates) -> str:
    """What the games of these words will cost."""
    return estimate(args, [(model_names(args), words)], templates)


def main() -> None:
    end_with_launcher()
    args = parse_args()
    set_up_logging()
    check_args(args)
    words = read_words(args.data_path)
    templates = taboo.load_templates(args.prompt_templates)
    stem = f"{args.model_prefix}_{args.task_type}_{args.data_suffix}"
    files = EpisodeFiles(args.output_dir, stem, words[: args.max_games])
    if args.dry_run:
        print(cost_estimate(args, files.words if args.overwrite else missing_words(files.finished()), templates))
        return
    set_precision(args)
    finished = files.start(game_settings(args, words, templates), overwrite=args.overwrite)
    seconds, to_play = 0.0, finished.missing(range(rank(), len(files.words), world_size()))
    if to_play:
        if any(map(is_server, model_names(args))):
            logger.info("%s", cost_estimate(args, missing_words(finished), templates))
        progress = play(args, files, finished, to_play, templates)
        if progress.missing:
            end_unfinished(args, files, progress)
        seconds = progress.seconds
    summary = files.merge(seconds=seconds, tokens_before=finished.new_tokens)
    if summary:
        print(json.dumps(summary))


if __name__ == "__main__":
    run_program(main)
