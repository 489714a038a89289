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

import torch
from tqdm import tqdm

from tools import taboo
from tools.episodes import Episode, EpisodeFiles, ReplyRecord, Summary, read_words
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
from tools.players import GameView, Player
from tools.seats import Seats, model_setting
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
        replies.append({"finish_reason": reply.finish_reason, "tokens": reply.tokens, "prompt_cut": reply.prompt_cut})
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


async def play_games(
    games: Iterable[tuple[int, str]],
    attacker: Player,
    defender: Player,
    *,
    concurrent_games: int,
    on_episode: Callable[[Episode], None],
    **rules,
) -> None:
    """Play (index, word) pairs, so many at a time; `rules` are those of `play_game`."""
    to_play = iter(games)

    async def keep_playing() -> None:
        for index, word in to_play:  # shared by all: a finished game's place goes to the next word at once
            on_episode(await play_game(word, attacker, defender, index=index, **rules))

    await asyncio.gather(*(keep_playing() for _ in range(concurrent_games)))


# --- the run -------------------------------------------------------------------------------------------------------


class Progress:
    """A bar for the games of this rank and, every `logging_steps` batches, one finished game. Rank 0 shows them.

    As often and at the end, the numbers of `log`. With `quiet` nothing is shown: the terminal is a person's.
    """

    def __init__(self, games: int, logging_steps: int, *, log: PlayLog | None = None, quiet: bool = False):
        self.log, self.quiet = log, quiet
        self.summary, self.started = Summary(), time.monotonic()
        self.logging_steps, self.batches, self.due = logging_steps, 0, False
        title = f"rank 0 of {world_size()}" if world_size() > 1 else "games"
        interval = 0.5 if sys.stderr.isatty() else 30  # seconds; a log file gets few lines
        self.bar = tqdm(total=games, desc=title, unit="game", disable=quiet or rank() != 0, mininterval=interval)

    def batch(self) -> None:
        """Note that a batch of prompts was answered."""
        self.batches += 1
        self.due |= self.logging_steps > 0 and self.batches % self.logging_steps == 0

    def game(self, episode: Episode) -> None:
        """Note that a game has ended."""
        self.summary.add(episode)
        shares = {outcome: f"{number / self.summary.games:.0%}" for outcome, number in self.summary.outcomes.items()}
        speed = self.summary.counts["new_tokens"] / self.seconds
        self.bar.set_postfix({"tokens/s": f"{speed:.0f}", **shares}, refresh=False)
        self.bar.update()
        if self.due and rank() == 0:
            if not self.quiet:
                tqdm.write(describe(episode))
            if self.log:
                self.log.write(self.summary, self.seconds)
            self.due = False

    @property
    def seconds(self) -> float:
        """Since the games began."""
        return time.monotonic() - self.started

    def close(self) -> None:
        """Show and write what is still to be, and end the bar."""
        self.bar.close()
        if self.log:
            self.log.write(self.summary, self.seconds)
            self.log.close()


def describe(episode: Episode) -> str:
    """A game to read."""
    lines = [f"{message['role']}: {message['content']}" for message in episode["history"]]
    return "\n".join([f"--- {episode['target_word']} ---", *lines, f"--- {episode['outcome']} ---"])


def play(args: argparse.Namespace, files: EpisodeFiles, to_play: list[int], templates: taboo.Templates) -> float:
    """Play the games that are missing and store each as it ends; returns the seconds this took."""
    games_before = len(range(rank(), len(files.words), world_size())) - len(to_play)
    log = PlayLog(args, files, games_before=games_before)
    progress = Progress(len(to_play), args.logging_steps, log=log, quiet=HUMAN in model_names(args))
    attacker, defender, concurrent_games = Seats(args, templates).take(model_names(args), progress.batch)
    seed_draws(args.seed, games_left=len(to_play))
    progress.started = time.monotonic()

    def on_episode(episode: Episode) -> None:
        files.append(episode)
        progress.game(episode)
        for player in (attacker, defender):
            if isinstance(player, HumanPlayer):
                player.end(episode)

    games = [(index, files.words[index]) for index in to_play]
    try:
        run_games(args, games, attacker, defender, templates, concurrent_games=concurrent_games, on_episode=on_episode)
    finally:
        progress.close()
    return progress.seconds


def run_games(args: argparse.Namespace, games, attacker, defender, templates: taboo.Templates, **how) -> None:
    """Play (index, word) pairs by the rules in the flags; `how` as in `play_games`. RuntimeError for any fault."""
    rules = {"max_turns": args.taboo_max_turns, "match": args.match, "templates": templates}
    try:
        asyncio.run(play_games(games, attacker, defender, **how, **rules))
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
    add("--attacker_model_name_or_path", required=True, help=f"model folder, hub name, or {HUMAN}: you")
    add("--defender_model_name_or_path", required=True, help="the same for the defender; equal ones are loaded once")
    add("--data_path", required=True, help="file of target words, one a line; one game is played for each")
    add("--output_dir", required=True, help="folder of the results, shared by all processes")
    add("--model_prefix", required=True, help="first part of the names of the result files")
    add("--data_suffix", required=True, help="last part of the names of the result files")
    add("--max_games", type=int, help="play the first so many words only; a larger number extends a run")
    add("--seed", type=int, default=42, help="of sampling")
    add_game_flags(parser)
    add_machine_flags(parser)
    add_report_flag(parser)
    add("--overwrite", type=parse_bool, default=False, help="True: delete the games of an earlier run of this name")
    return parser.parse_args(arguments)


def check_args(args: argparse.Namespace) -> None:
    """Raise one ValueError for all that is wrong with the flags."""
    problems = too_small(args, max_games=1) + flag_problems(args)
    problems += report_problems(args.report_to) + human_problems(args, model_names(args))
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
    attacker, defender = (model_setting(name) for name in model_names(args))
    return {
        "attacker_model_name_or_path": attacker,
        "defender_model_name_or_path": defender,
        "data_path": words_setting(args.data_path, words),
        **game_rules(args, templates),
        "seed": args.seed,
    }


def main() -> None:
    end_with_launcher()
    args = parse_args()
    set_up_logging()
    check_args(args)
    words = read_words(args.data_path)
    templates = taboo.load_templates(args.prompt_templates)
    stem = f"{args.model_prefix}_{args.task_type}_{args.data_suffix}"
    files = EpisodeFiles(args.output_dir, stem, words[: args.max_games])
    set_precision(args)
    finished = files.start(game_settings(args, words, templates), overwrite=args.overwrite)
    to_play = finished.missing(range(rank(), len(files.words), world_size()))
    with may_leave(model_names(args), files):
        seconds = play(args, files, to_play, templates) if to_play else 0.0
    summary = files.merge(seconds=seconds, tokens_before=finished.new_tokens)
    if summary:
        print(json.dumps(summary))


if __name__ == "__main__":
    run_program(main)
