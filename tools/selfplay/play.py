"""Playing: one game, many games at once, and a whole run, which stores each game as it ends.

A run is a list of plays: the games of two players on a list of tasks. Self-play is one play, matches are many.
"""

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from tools.games import prompts
from tools.games.game import DEFAULT_GAME, Game
from tools.players.human import HumanQuit
from tools.players.player import Player, PlayerUnusable, ReplyUnavailable, Turn
from tools.selfplay.counts import SERVER_COUNTS, GameCounts
from tools.selfplay.files import Episode, EpisodeFiles, FinishedGames
from tools.selfplay.flags import PlayFlags, kind_of
from utils import UserError, rank, shown, world_size

if TYPE_CHECKING:
    from tools.selfplay.lineup import Lineup  # brings torch and transformers

UNFINISHED = 3  # exit status if games are missing that the same command can play
LOST_IN_A_ROW = 20  # after so many unfinished games in a row, no other game begins
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
class Play:
    """The games of two players on a list of tasks."""

    names: tuple[str, str]  # of the players of roles[0] and roles[1], as on the command line
    seed: int | str  # of their draws
    tasks: Sequence[str]
    labels: Mapping = field(default_factory=dict)  # stored with each game


@dataclass
class Run:
    """One rank's part of a run. `files` has the tasks of all plays, in their order."""

    flags: PlayFlags
    game: Game
    templates: prompts.Templates
    plays: Sequence[Play]
    files: EpisodeFiles

    def play_missing(self) -> None:
        """Play this rank's share of the missing games, and wait for the other ranks. Rank 0 then writes the results.

        If games had to be left unfinished, this ends the program with status UNFINISHED.
        """
        finished = self.files.finished()
        missing, games = finished.missing(), len(self.files.words)
        if 0 < len(missing) < games:
            logger.info("continues: %d of %d games are there", games - len(missing), games)
        own = {index for index in missing if index % world_size() == rank()}
        progress = Progress(self.game, len(own), self.flags.logging_steps, quiet=self.at_terminal or not own)
        if own:
            self._play(own, finished, progress)
        self.files.meet()
        left = progress.missing
        if rank() == 0 and not left:
            tokens_before = finished.counts.tokens["new_tokens"]
            left = self.files.merge(seconds=time.monotonic() - progress.began, tokens_before=tokens_before)
        if left:
            self._end_unfinished(left)

    @property
    def at_terminal(self) -> bool:
        """Whether a person plays here."""
        return any(kind_of(name).at_terminal for play in self.plays for name in play.names)

    def _end_unfinished(self, missing: int) -> NoReturn:
        cap = self.flags.max_total_tokens
        more = f", or with a larger --max_total_tokens if {cap} are used up" if cap else ""
        program = Path(sys.argv[0]).name
        sys.stderr.write(f"{program}: {missing} games are missing; the same command plays them{more}\n")
        sys.exit(UNFINISHED)

    def _play(self, own: Set[int], finished: FinishedGames, progress: "Progress") -> None:
        """Play these games of all plays; `finished` are those of earlier starts."""
        from tools.selfplay.lineup import Lineup

        lineup = Lineup(self.flags, self.game)
        for names in sorted({play.names for play in self.plays}):
            lineup.check_opening(names, self.files.words[0], self.templates)
        if self.flags.max_total_tokens is not None:  # this rank's share of what is left
            left = self.flags.max_total_tokens - sum(finished.counts.tokens[key] for key in SERVER_COUNTS)
            lineup.use.limit = left / world_size()
        try:
            asyncio.run(self._play_all(own, lineup, progress))
        except PlayerUnusable as error:
            raise UserError(f"{error}; the games played so far are safe") from None
        except (HumanQuit, KeyboardInterrupt):
            if not self.at_terminal:
                raise
            print("\nYou have left. The same command plays the games that are missing.")
            sys.exit(0)
        finally:
            lineup.end()
            progress.bar.close()

    async def _play_all(self, own: Set[int], lineup: "Lineup", progress: "Progress") -> None:
        """Play the plays one after the other, each with the games of it that are in `own`."""
        first = 0
        for play in self.plays:
            games = [(index, task) for index, task in enumerate(play.tasks, start=first) if index in own]
            first += len(play.tasks)
            if games and not (lineup.use.used_up or progress.given_up):
                await self._play_one(play, games, lineup, progress)

    async def _play_one(
        self, play: Play, games: Sequence[tuple[int, str]], lineup: "Lineup", progress: "Progress"
    ) -> None:
        """Play these games, (index, task) pairs, of a play."""
        # Players go out of scope at the end of their play, because the next models need the memory.
        players, games_at_once = lineup.build_players(play.names, seed=play.seed, games_left=len(games))
        if play.labels:
            match = ", ".join(f"{key} {text}" for key, text in play.labels.items())
            logger.info("match: %s, %d games", match, len(games))
        progress.begin(games_at_once)

        def on_episode(episode: Episode) -> None:
            self.files.append(episode | play.labels)
            progress.game(episode)
            for player in set(players.values()):  # one player may have both roles
                player.game_over(episode)

        await play_games(
            self.game,
            itertools.takewhile(lambda _: not (lineup.use.used_up or progress.given_up), games),
            players,
            max_turns=self.flags.turns(self.game),
            templates=self.templates,
            concurrent_games=games_at_once,
            on_episode=on_episode,
            on_lost=progress.lost,
        )


class Progress:
    """Counts the games of this rank in this start. Rank 0 shows a bar and now and then a game.

    With `quiet` it shows nothing, because a person plays in the terminal or there is nothing to play.
    """

    def __init__(self, game: Game, games: int, logging_steps: int, *, quiet: bool):
        self.counts, self.games, self.logging_steps = GameCounts(game), games, logging_steps
        self.shows = rank() == 0 and not quiet
        self.lost_in_a_row = 0
        self.shown_at = 0  # number of messages when a game was last shown
        self.began = time.monotonic()
        title = f"rank 0 of {world_size()}" if world_size() > 1 else "games"
        interval = 0.5 if sys.stderr.isatty() else 30  # seconds; a log file gets few lines
        self.bar = tqdm(total=games, desc=title, unit="game", disable=not self.shows, mininterval=interval)

    @property
    def missing(self) -> int:
        """How many games have not ended."""
        return self.games - self.counts.games

    @property
    def given_up(self) -> bool:
        """Whether no other game is to begin, because too many were left unfinished in a row."""
        return self.lost_in_a_row >= LOST_IN_A_ROW

    def begin(self, games_at_once: int) -> None:
        """Note how many games are played at once, and start the clock, which leaves out loading the first models."""
        self.batch = games_at_once
        if not self.counts.games:
            self.began = time.monotonic()

    def game(self, episode: Episode) -> None:
        """Count a finished game, and show one for every `logging_steps` batches of messages."""
        self.counts.add(episode)
        self.lost_in_a_row = 0
        speed = self.counts.tokens["new_tokens"] / (time.monotonic() - self.began)
        shares = {outcome: f"{number / self.counts.games:.0%}" for outcome, number in self.counts.outcomes.items()}
        self.bar.set_postfix({"tokens/s": f"{speed:.0f}", **shares}, refresh=False)
        self.bar.update()
        messages = self.counts.messages.total()
        if self.shows and self.logging_steps and messages - self.shown_at >= self.logging_steps * self.batch:
            tqdm.write(describe(episode))
            self.shown_at = messages

    def lost(self, task: str, error: ReplyUnavailable) -> None:
        """Note that a game is left unfinished."""
        logger.warning("%s: left unfinished: %s", task, error)
        self.lost_in_a_row += 1
        if self.lost_in_a_row == LOST_IN_A_ROW:
            logger.error("%d games in a row had to be left unfinished; no other game begins", LOST_IN_A_ROW)


def describe(episode: Episode) -> str:
    """An episode as lines of text."""
    lines = [f"{message['role']}: {shown(message['content'])}" for message in episode["history"]]
    return "\n".join([f"--- {shown(episode['target_word'])} ---", *lines, f"--- {episode['outcome']} ---"])
