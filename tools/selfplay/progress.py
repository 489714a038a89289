"""How far play is: the bar, games to read, curves, games that had to be left unfinished."""

import logging
import sys
import time
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from tools.games.game import Game
from tools.players.budget import TokenBudget
from tools.players.player import ReplyUnavailable
from tools.selfplay.counts import GameCounts
from tools.selfplay.curves import PlayLog
from tools.selfplay.files import Episode, EpisodeFiles
from tools.selfplay.options import PlayFlags
from utils import rank, shown, world_size

UNFINISHED = 3  # exit status: games are missing, and the same command can play them
LOST_IN_A_ROW = 20  # so many unfinished games, with none that ended between them, and the run ends
logger = logging.getLogger(__name__)


class GivenUpError(Exception):
    """So many games in a row were left unfinished that the others are not begun."""


class Progress:
    """A bar for the games of this rank and, every `logging_steps` batches, one finished game. Rank 0 shows them.

    As often and at the end, the numbers of `log`. With `quiet` nothing is shown: the terminal is a person's. It also
    counts the games that had to be left unfinished, and what servers charge by `budget`.
    """

    def __init__(
        self, game: Game, games: int, flags: PlayFlags, budget: TokenBudget, *, log: PlayLog, quiet: bool = False
    ):
        self.games, self.flags, self.budget, self.log, self.quiet = games, flags, budget, log, quiet
        self.lost_in_a_row, self.seconds = 0, 0.0
        self.counts, self.started = GameCounts(game), None
        self.batches, self.due = 0, False
        title = f"rank 0 of {world_size()}" if world_size() > 1 else "games"
        interval = 0.5 if sys.stderr.isatty() else 30  # seconds; a log file gets few lines
        self.bar = tqdm(total=games, desc=title, unit="game", disable=quiet or rank() != 0, mininterval=interval)

    def begin(self) -> None:
        """Start the clock, once: loading the first models is no play."""
        self.started = self.started or time.monotonic()

    def batch(self) -> None:
        """Note that a batch of prompts was answered."""
        self.batches += 1
        self.due |= self.flags.logging_steps > 0 and self.batches % self.flags.logging_steps == 0

    def game(self, episode: Episode) -> None:
        """Note that a game has ended."""
        self.counts.add(episode)
        self.budget.end(episode["index"])
        self.lost_in_a_row = 0
        shares = {outcome: f"{number / self.counts.games:.0%}" for outcome, number in self.counts.outcomes.items()}
        speed = self.counts.tokens["new_tokens"] / (time.monotonic() - self.started)
        paid = {"server tokens": f"{self.budget.spent.tokens:,.0f}"} if self.budget.spent.calls else {}
        self.bar.set_postfix({"tokens/s": f"{speed:.0f}", **paid, **shares}, refresh=False)
        self.bar.update()
        if self.due and rank() == 0:
            if not self.quiet:
                tqdm.write(describe(episode))
            self.log.write(self.counts, time.monotonic() - self.started)
            self.due = False

    def lost(self, index: int, task: str, error: ReplyUnavailable) -> None:
        """Note that a game is left unfinished; GivenUpError if many were and none has ended since."""
        logger.warning("%s: left unfinished: %s", task, error)
        self.budget.end(index)
        self.lost_in_a_row += 1
        if self.lost_in_a_row == LOST_IN_A_ROW:
            raise GivenUpError(f"{LOST_IN_A_ROW} games in a row had to be left unfinished, the last one by {error}")

    def end(self) -> None:
        """Note that nothing more is played."""
        self.bar.close()
        self.seconds = time.monotonic() - self.started if self.started else 0.0
        self.log.write(self.counts, self.seconds)
        self.log.close()
        if self.budget.spent.calls:
            cost = self.budget.spent.describe(self.flags.price_in, self.flags.price_out)
            logger.info("servers answered: %s", cost)

    @property
    def missing(self) -> int:
        """How many games have not ended."""
        return self.games - self.counts.games


def describe(episode: Episode) -> str:
    """A game to read."""
    lines = [f"{message['role']}: {shown(message['content'])}" for message in episode["history"]]
    return "\n".join([f"--- {shown(episode['target_word'])} ---", *lines, f"--- {episode['outcome']} ---"])


def end_unfinished(files: EpisodeFiles, progress: Progress) -> NoReturn:
    """End the program with one line and a status of its own: games are missing that the same command can play."""
    files.wait_for_others()
    remedy = "the same command plays them"
    if progress.budget.exhausted:
        limit = progress.flags.max_total_tokens
        remedy = f"--max_total_tokens {limit} has no room for them; the same command with more does"
    sys.stderr.write(f"{Path(sys.argv[0]).name}: {progress.missing} games are missing; {remedy}\n")
    sys.exit(UNFINISHED)
