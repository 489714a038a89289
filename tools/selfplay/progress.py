"""The progress of play: a bar, now and then a game to read, and games that had to be left unfinished."""

import logging
import sys
import time

from tqdm import tqdm

from tools.games.game import Game
from tools.players.player import ReplyUnavailable
from tools.selfplay.counts import GameCounts
from tools.selfplay.files import Episode
from utils import rank, shown, world_size

LOST_IN_A_ROW = 20  # after so many unfinished games in a row, no other game begins
logger = logging.getLogger(__name__)


class Progress:
    """Counts the games of this rank, and shows its progress on rank 0.

    With `quiet` it shows nothing, because a person plays in the terminal or there is nothing to play.
    """

    def __init__(self, game: Game, games: int, *, logging_steps: int, quiet: bool):
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
