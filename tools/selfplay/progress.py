"""How far play is: the bar, games to read, curves, games that had to be left unfinished."""

import importlib.util
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from tools.players.budget import TokenBudget
from tools.players.player import ReplyUnavailable
from tools.selfplay.counts import GameCounts
from tools.selfplay.files import Episode, EpisodeFiles
from tools.selfplay.options import PlayFlags
from utils import rank, shown, world_size

UNFINISHED = 3  # exit status: games are missing, and the same command can play them
LOST_IN_A_ROW = 20  # so many unfinished games, with none that ended between them, and the run ends
NONE, TENSORBOARD, WANDB = TRACKERS = "none", "tensorboard", "wandb"
logger = logging.getLogger(__name__)


class GivenUpError(Exception):
    """So many games in a row were left unfinished that the others are not begun."""


class Progress:
    """A bar for the games of this rank and, every `logging_steps` batches, one finished game. Rank 0 shows them.

    As often and at the end, rank 0 writes curves of its own games. Steps are games, those of earlier starts included.
    TensorBoard's files go to OUTPUT_DIR/STEM_tensorboard/TIME; wandb's to OUTPUT_DIR/wandb, by wandb's own environment
    variables. With `quiet` nothing is shown: the terminal is a person's. It also counts the games that had to be left
    unfinished, and what servers charge by `budget`.
    """

    def __init__(
        self,
        flags: PlayFlags,
        files: EpisodeFiles,
        games: int,
        budget: TokenBudget,
        report_to: Sequence[str],
        quiet: bool,
    ):
        self.flags, self.games, self.budget, self.quiet = flags, games, budget, quiet
        self.before = len(range(rank(), len(files.words), world_size())) - games  # games of earlier starts
        self.counts, self.started = GameCounts(files.game), 0.0
        self.batches = self.lost_in_a_row = self.written = 0  # written: games at the last point of the curves
        self.due = False
        title = f"rank 0 of {world_size()}" if world_size() > 1 else "games"
        interval = 0.5 if sys.stderr.isatty() else 30  # seconds; a log file gets few lines
        self.bar = tqdm(total=games, desc=title, unit="game", disable=quiet or rank() != 0, mininterval=interval)
        self.tensorboard = self.wandb = None
        if rank() == 0 and TENSORBOARD in report_to:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(
                files.folder / f"{files.stem}_tensorboard" / time.strftime("%Y%m%d-%H%M%S")
            )
        if rank() == 0 and WANDB in report_to:
            import wandb

            self.wandb = wandb.init(dir=str(files.folder), name=files.stem, config=vars(flags))

    @property
    def seconds(self) -> float:
        """Since the first game began; loading its models was no play."""
        return time.monotonic() - self.started if self.started else 0.0

    @property
    def missing(self) -> int:
        return self.games - self.counts.games

    def begin(self) -> None:
        self.started = self.started or time.monotonic()

    def batch(self) -> None:
        self.batches += 1
        self.due |= self.flags.logging_steps > 0 and self.batches % self.flags.logging_steps == 0

    def game(self, episode: Episode) -> None:
        self.counts.add(episode)
        self.budget.end(episode["index"])
        self.lost_in_a_row = 0
        shares = {outcome: f"{number / self.counts.games:.0%}" for outcome, number in self.counts.outcomes.items()}
        paid = {"server tokens": f"{self.budget.spent.tokens:,.0f}"} if self.budget.spent.calls else {}
        self.bar.set_postfix({"tokens/s": f"{self._speed():.0f}", **paid, **shares}, refresh=False)
        self.bar.update()
        if self.due and rank() == 0:
            if not self.quiet:
                tqdm.write(describe(episode))
            self._write_curves()
            self.due = False

    def lost(self, index: int, task: str, error: ReplyUnavailable) -> None:
        """Note that a game is left unfinished; GivenUpError if many were and none has ended since."""
        logger.warning("%s: left unfinished: %s", task, error)
        self.budget.end(index)
        self.lost_in_a_row += 1
        if self.lost_in_a_row == LOST_IN_A_ROW:
            raise GivenUpError(f"{LOST_IN_A_ROW} games in a row had to be left unfinished, the last one by {error}")

    def end(self) -> None:
        self.bar.close()
        self._write_curves()
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()
        if self.budget.spent.calls:
            cost = self.budget.spent.describe(self.flags.price_in, self.flags.price_out)
            logger.info("servers answered: %s", cost)

    def _speed(self) -> float:
        return self.counts.tokens["new_tokens"] / self.seconds

    def _write_curves(self) -> None:
        counts, step = self.counts, self.before + self.counts.games
        if counts.games == self.written:
            return
        self.written = counts.games
        values = {
            "play/games": counts.games,
            "play/tokens_per_second": self._speed(),
            "play/mean_length": counts.mean_length,
        }
        for outcome in counts.game.outcomes:
            values[f"play/share_{outcome.name.replace(' ', '_')}"] = counts.outcomes[outcome.name] / counts.games
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(values, step=step)


def report_problems(report_to: Sequence[str]) -> list[str]:
    """What is wrong with --report_to, a phrase each."""
    missing = [package for package in sorted({*report_to} - {NONE}) if not importlib.util.find_spec(package)]
    return [f"--report_to {package} needs it: pip install {package}" for package in missing]


def describe(episode: Episode) -> str:
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
