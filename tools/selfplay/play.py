"""Playing: one game, many games at once, and a whole run, which stores each game as it ends."""

import asyncio
import itertools
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from tools.engine.vllm import AUTO, VLLM, choose_engine
from tools.games import prompts
from tools.games.game import DEFAULT_GAME, Game
from tools.players.human import HUMAN, HumanPlayer, HumanQuit
from tools.players.player import Player, PlayerUnusable, ReplyUnavailable, Turn
from tools.selfplay.counts import SERVER_COUNTS, GameCounts
from tools.selfplay.files import Episode, EpisodeFiles, GamesMissing
from tools.selfplay.lineup import Lineup, is_local
from tools.selfplay.options import PlayFlags
from tools.selfplay.progress import Progress
from utils import UserError, from_rank_0, rank, world_size

UNFINISHED = 3  # exit status if games are missing that the same command can play
logger = logging.getLogger(__name__)


async def play_game(
    game: Game,
    task: str,
    players: Mapping[str, Player],
    *,
    max_turns: int,
    index: int = 0,
    templates: prompts.Templates | None = None,
) -> Episode:
    """Play one game to its end (arXiv 2404.10642, algorithm 1) and judge it.

    `players` are by role; `index` is the task's place in the word list; `templates` default to the game's own.
    """
    history: list[dict[str, str]] = []
    replies: list[dict] = []
    while not game.is_over(history, task, max_turns):
        role = game.next_role(task, history)
        turn = Turn(game, role, tuple(history), max_turns, index, game.secrets(role, task, history), templates)
        reply = await players[role].reply(turn)
        history.append({"role": role, "content": reply.text.strip()})
        replies.append({key: value for key, value in vars(reply).items() if key != "text" and value is not None})
    outcome, length = game.judge(history, task, max_turns)
    game.checked_points(task, history[:length], outcome)  # else wrong points would be noticed after the last game
    return {
        "index": index,
        **({} if game.name == DEFAULT_GAME else {"game": game.name}),
        "target_word": task,
        "max_turns": max_turns,
        "history": history,
        "outcome": outcome,
        "length": length,
        "replies": replies,
    }


async def play_games(
    game: Game,
    tasks: Iterable[tuple[int, str]],
    players: Mapping[str, Player],
    *,
    max_turns: int,
    templates: prompts.Templates | None = None,
    concurrent_games: int,
    on_episode: Callable[[Episode], None],
    on_lost: Callable[[str, ReplyUnavailable], None] | None = None,
) -> None:
    """Play (index, task) pairs, `concurrent_games` at a time. An exception in a callback ends all games.

    `on_lost` is called for a game that cannot go on because a reply is unavailable. Without it, such a game ends all.
    """
    to_play = iter(tasks)

    async def keep_playing() -> None:
        for index, task in to_play:  # all share this iterator, so a finished game's place goes to the next task
            try:
                episode = await play_game(game, task, players, max_turns=max_turns, index=index, templates=templates)
            except ReplyUnavailable as error:
                if on_lost is None:
                    raise
                on_lost(task, error)
            else:
                on_episode(episode)

    at_once = [asyncio.create_task(keep_playing()) for _ in range(concurrent_games)]
    try:
        await asyncio.gather(*at_once)
    finally:  # the first exception ends the other games; those that they raise are dropped
        for each in at_once:
            each.cancel()
        await asyncio.gather(*at_once, return_exceptions=True)


@dataclass(frozen=True)
class Pairing:
    """Two players and the seed of their draws; `labels` are stored with each of their games."""

    names: tuple[str, str]  # of roles[0] and roles[1], as on the command line
    seed: int | str
    labels: dict = field(default_factory=dict)


@dataclass
class Run:
    """One rank's part of a run: it plays its missing games, pairing by pairing, and stores each as it ends."""

    flags: PlayFlags
    game: Game
    templates: prompts.Templates
    files: EpisodeFiles  # its words are the tasks of all games
    pairings: Sequence[Pairing]  # one for each game; equal ones are neighbours

    def __post_init__(self):
        self.names = {name for pairing in self.pairings for name in pairing.names}

    def play(self, settings: dict) -> dict | None:
        """Play the missing games; return the summary of all games on rank 0, None on other ranks.

        `settings` are all settings that the games depend on. If games had to be left unfinished, this ends the program
        with status UNFINISHED.
        """
        self._settle_engine(settings)
        self.flags.set_precision()
        finished = self.files.start(settings)
        missing, games = finished.missing(), len(self.files.words)
        if 0 < len(missing) < games:
            logger.info("continues: %d of %d games are there", games - len(missing), games)
        own = [index for index in missing if index % world_size() == rank()]
        quiet = HUMAN in self.names or not own
        progress = Progress(self.game, len(own), logging_steps=self.flags.logging_steps, quiet=quiet)
        if own:
            self._play(own, finished.counts, progress)
        self.files.meet()
        if progress.missing:
            self._end_unfinished(progress.missing)
        if rank() > 0:
            return None
        seconds = time.monotonic() - progress.began
        try:
            return self.files.merge(seconds=seconds, tokens_before=finished.counts.tokens["new_tokens"])
        except GamesMissing as error:
            self._end_unfinished(error.args[0])

    def _end_unfinished(self, missing: int) -> NoReturn:
        cap = self.flags.max_total_tokens
        more = f", or with a larger --max_total_tokens if {cap} are used up" if cap else ""
        program = Path(sys.argv[0]).name
        sys.stderr.write(f"{program}: {missing} games are missing; the same command plays them{more}\n")
        sys.exit(UNFINISHED)

    def _settle_engine(self, settings: dict) -> None:
        """Decide what `--engine auto` means, and write it into the settings. A run keeps the engine it began with."""
        if self.flags.engine != AUTO or not any(map(is_local, self.names)):
            return
        begun = self.files.settings

        def choose() -> str:
            if begun.results() and begun.path.is_file():
                return VLLM if begun.read().get("engine") == VLLM else AUTO
            return AUTO if self.flags.device_map else choose_engine()

        self.flags.engine = settings["engine"] = from_rank_0(choose)

    def _play(self, own: list[int], before: GameCounts, progress: Progress) -> None:
        """Play these games of all pairings; `before` counts the games of earlier starts."""
        lineup = Lineup(self.flags, self.game)
        for names in sorted({pairing.names for pairing in self.pairings}):
            lineup.check_opening(names, self.files.words[0], self.templates)
        if self.flags.max_total_tokens is not None:  # this rank's share of what is left
            left = self.flags.max_total_tokens - sum(before.tokens[key] for key in SERVER_COUNTS)
            lineup.use.limit = left / world_size()
        try:
            for pairing, indices in itertools.groupby(own, key=self.pairings.__getitem__):
                if not (lineup.use.used_up or progress.given_up):
                    self._play_pairing(pairing, list(indices), lineup, progress)
        except PlayerUnusable as error:
            raise UserError(f"{error}; the games played so far are safe") from None
        except (HumanQuit, KeyboardInterrupt):
            if HUMAN not in self.names:
                raise
            print("\nYou have left. The same command plays the games that are missing.")
            sys.exit(0)
        finally:
            lineup.end()
            progress.bar.close()

    def _play_pairing(self, pairing: Pairing, indices: list[int], lineup: Lineup, progress: Progress) -> None:
        # Players go out of scope at the end of their match, because the next models need the memory.
        players, games_at_once = lineup.build_players(pairing.names, seed=pairing.seed)
        if pairing.labels:
            match = ", ".join(f"{key} {text}" for key, text in pairing.labels.items())
            logger.info("match: %s, %d games", match, len(indices))
        seed_draws(pairing.seed, games_left=len(indices))
        progress.begin(games_at_once)

        def tasks() -> Iterator[tuple[int, str]]:
            for index in indices:
                if lineup.use.used_up or progress.given_up:
                    return
                yield index, self.files.words[index]

        def on_episode(episode: Episode) -> None:
            self.files.append(episode | pairing.labels)
            progress.game(episode)
            for player in set(players.values()):  # one player may have both roles
                if isinstance(player, HumanPlayer):
                    player.end(episode)

        asyncio.run(
            play_games(
                self.game,
                tasks(),
                players,
                max_turns=self.flags.turns(self.game),
                templates=self.templates,
                concurrent_games=games_at_once,
                on_episode=on_episode,
                on_lost=progress.lost,
            )
        )


def seed_draws(seed: int | str, *, games_left: int) -> None:
    """Seed torch for this rank. The number of games left is part of the seed, so a resumed run draws anew."""
    torch.manual_seed(random.Random(f"{seed}/{rank()}/{world_size()}/{games_left}").getrandbits(63))
