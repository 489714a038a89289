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
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from tools import taboo
from tools.episodes import Episode, EpisodeFiles, FinishedGames, ReplyRecord, read_words
from tools.human_player import HUMAN, HumanPlayer, human_problems, may_leave
from tools.play_flags import (
    add_game_flags,
    add_machine_flags,
    flag_problems,
    game_rules,
    set_precision,
    too_small,
    words_setting,
)
from tools.play_log import PlayLog, add_report_flag, report_problems
from tools.play_progress import GivenUpError, Progress, end_unfinished
from tools.players import GameView, Player, PlayerUnusable, ReplyUnavailable
from tools.seats import Seats, model_setting
from tools.server_costs import Meter, estimate, likely_game
from tools.server_flags import add_server_flags, is_server, server_flag_problems
from utils import end_with_launcher, parse_bool, rank, run_program, set_up_logging, world_size

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


def play(
    args: argparse.Namespace,
    files: EpisodeFiles,
    finished: FinishedGames,
    to_play: list[int],
    templates: taboo.Templates,
) -> Progress:
    """Play the games that are missing and store each as it ends; returns what became of them."""
    seats = Seats(args, templates)
    log = PlayLog(args, files, games_before=len(range(rank(), len(files.words), world_size())) - len(to_play))
    how = {"log": log, "quiet": HUMAN in model_names(args)}
    progress = Progress(len(to_play), args.logging_steps, seats.meter, **how)
    limit_tokens(args, seats.meter, finished, likely_game(args, model_names(args), templates).tokens)
    attacker, defender, concurrent_games = seats.take(model_names(args), progress.batch)
    seed_draws(args.seed, games_left=len(to_play))
    progress.started = time.monotonic()

    def on_episode(episode: Episode) -> None:
        files.append(episode)
        progress.game(episode)
        for player in (attacker, defender):
            if isinstance(player, HumanPlayer):
                player.end(episode)

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
    add("--attacker_model_name_or_path", required=True, help=f"model folder, hub name, openai:MODEL, or {HUMAN}: you")
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
    add_report_flag(parser)
    add("--overwrite", type=parse_bool, default=False, help="True: delete the games of an earlier run of this name")
    return parser.parse_args(arguments)


def check_args(args: argparse.Namespace) -> None:
    """Raise one ValueError for all that is wrong with the flags."""
    names = model_names(args)
    problems = too_small(args, max_games=1) + flag_problems(args) + server_flag_problems(args, names)
    problems += report_problems(args.report_to) + human_problems(args, names)
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
        with may_leave(model_names(args), files):
            progress = play(args, files, finished, to_play, templates)
        if progress.missing:
            end_unfinished(args, files, progress)
        seconds = progress.seconds
    summary = files.merge(seconds=seconds, tokens_before=finished.new_tokens)
    if summary:
        print(json.dumps(summary))


if __name__ == "__main__":
    run_program(main)
