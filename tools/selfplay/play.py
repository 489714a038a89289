"""Games from their first message to the file: one game, many at once, and those of one rank."""

import argparse
import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable

import torch

from tools.games import taboo
from tools.players.budget import Meter, likely_game
from tools.players.human import HUMAN, HumanPlayer
from tools.players.player import GameView, Player, PlayerUnusable, ReplyUnavailable
from tools.selfplay.curves import PlayLog
from tools.selfplay.files import Episode, EpisodeFiles, FinishedGames, ReplyRecord
from tools.selfplay.lineup import Seats, model_names
from tools.selfplay.progress import GivenUpError, Progress
from utils import rank, world_size

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
    progress = Progress(taboo.Taboo(args.match), len(to_play), args.logging_steps, seats.meter, **how)
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
