"""Checkpoints of a training: which are complete, which one continues it, which may go."""

import logging
import shutil
from pathlib import Path

from tools.common.errors import UserError
from tools.common.files import StrPath

COMPLETE = "complete"  # an empty file, written last into a checkpoint folder
logger = logging.getLogger(__name__)


def checkpoints_of(folder: Path) -> list[Path]:
    """The folders checkpoint-N, by N. A copy such as checkpoint-100-backup is none."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def last_checkpoint(folder: StrPath, *, deepspeed: bool) -> str | None:
    """The furthest complete checkpoint that a start with or without --deepspeed can continue, None if there is none.

    UserError for checkpoints of the other kind: the Trainer would begin without the optimizer's state.
    """
    complete = [checkpoint for checkpoint in checkpoints_of(Path(folder)) if (checkpoint / COMPLETE).is_file()]
    state = "global_step*" if deepspeed else "optimizer*"
    with_state = [str(checkpoint) for checkpoint in complete if any(checkpoint.glob(state))]
    if complete and not with_state:
        raise UserError(
            f"{folder}: its checkpoints are of another --deepspeed, or hold no optimizer; start with the "
            "--deepspeed that made them, or delete them"
        )
    return with_state[-1] if with_state else None


def check_none(folder: StrPath) -> None:
    """Raise UserError if there are checkpoints, which would mix with those of a run that shall not continue them."""
    if checkpoints := checkpoints_of(Path(folder)):
        raise UserError(
            f"--resume_from_checkpoint False: {folder} holds checkpoints; leave the flag out to continue, or delete "
            f"there: {' '.join(path.name for path in checkpoints)}"
        )


def old_checkpoints(folder: Path, limit: int | None, best: str | None) -> list[Path]:
    """The checkpoints to delete: incomplete ones, and the first of those beyond --save_total_limit.

    Neither the last nor the best one is among them. Incomplete ones are of a killed launch, and do not count.
    """
    checkpoints = checkpoints_of(folder)
    complete = [checkpoint for checkpoint in checkpoints if (checkpoint / COMPLETE).is_file()]
    incomplete = [checkpoint for checkpoint in checkpoints if checkpoint not in complete]
    if not limit or limit < 0:
        return incomplete
    kept = {complete[-1], *(checkpoint for checkpoint in complete if best and checkpoint.name == Path(best).name)}
    surplus = len(complete) - max(limit, len(kept))
    return incomplete + [checkpoint for checkpoint in complete if checkpoint not in kept][: max(surplus, 0)]


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint. One that cannot be deleted, as NFS keeps files that are open elsewhere, is a warning."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s: this old checkpoint cannot be deleted (%s); training goes on", folder, error)
