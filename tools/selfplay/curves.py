"""Curves of play, for TensorBoard and Weights & Biases."""

import importlib.util
import time
from collections.abc import Sequence

from tools.selfplay.counts import GameCounts
from tools.selfplay.files import EpisodeFiles
from tools.selfplay.options import PlayFlags
from utils import rank

NONE, TENSORBOARD, WANDB = TRACKERS = "none", "tensorboard", "wandb"


def report_problems(report_to: list[str]) -> list[str]:
    """What is wrong with --report_to, a phrase each."""
    wanted = set(report_to) - {NONE}
    problems = [
        f"--report_to {package} needs it: pip install {package}"
        for package in sorted(wanted)
        if importlib.util.find_spec(package) is None
    ]
    if wanted and NONE in report_to:
        problems.append(f"--report_to names {NONE} beside {', '.join(sorted(wanted))}")
    return problems


class PlayLog:
    """Writes numbers of the games that this process has played since its start; rank 0 of several its own only.

    Steps are games, those of earlier starts (`games_before`) included. TensorBoard's files go to
    OUTPUT_DIR/STEM_tensorboard/TIME; wandb's to OUTPUT_DIR/wandb, by wandb's own environment variables.
    """

    def __init__(self, flags: PlayFlags, report_to: Sequence[str], files: EpisodeFiles, *, games_before: int):
        self.games_before, self.written = games_before, 0  # games at the last point
        self.tensorboard = self.wandb = None
        if rank() != 0:
            return
        if TENSORBOARD in report_to:
            from torch.utils.tensorboard import SummaryWriter

            folder = files.folder / f"{files.stem}_tensorboard" / time.strftime("%Y%m%d-%H%M%S")
            self.tensorboard = SummaryWriter(str(folder))
        if WANDB in report_to:
            import wandb

            self.wandb = wandb.init(dir=str(files.folder), name=files.stem, config=vars(flags))

    def write(self, counts: GameCounts, seconds: float) -> None:
        """Write how the games so far have ended, and how fast they came in these seconds."""
        if counts.games == self.written:
            return
        self.written, step = counts.games, self.games_before + counts.games
        values = {
            "play/games": counts.games,
            "play/tokens_per_second": counts.tokens["new_tokens"] / seconds,
            "play/mean_length": counts.mean_length,
        }
        for outcome in counts.game.outcomes:
            values[f"play/share_{outcome.name.replace(' ', '_')}"] = counts.outcomes[outcome.name] / counts.games
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(values, step=step)

    def close(self) -> None:
        """Let the last numbers reach their files."""
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()
