"""Training checkpoints: which are complete, which one to resume from, which to delete."""

import logging
import shutil
from pathlib import Path

from tools.common.errors import UserError
from tools.common.files import StrPath

COMPLETE = "complete"  # an empty file, written last into a checkpoint folder
logger = logging.getLogger(__name__)


def checkpoints_of(folder: Path) -> list[Path]:
    """The folders checkpoint-N, sorted by N. Copies such as checkpoint-100-backup do not count."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def last_checkpoint(folder: StrPath, *, deepspeed: bool) -> str | None:
    """The furthest complete checkpoint that can be resumed with or without --deepspeed, or None.

    UserError if all are of the other kind, because the Trainer would resume without optimizer state.
    """
    complete = [checkpoint for checkpoint in checkpoints_of(Path(folder)) if (checkpoint / COMPLETE).is_file()]
    state = "global_step*" if deepspeed else "optimizer*"
    with_state = [str(checkpoint) for checkpoint in complete if any(checkpoint.glob(state))]
    if complete and not with_state:
        raise UserError(
            f"{folder}: its checkpoints were made with another --deepspeed or lack an optimizer; use the "
            "--deepspeed that made them, or delete them"
        )
    return with_state[-1] if with_state else None


def check_none(folder: StrPath) -> None:
    """UserError if there are checkpoints, which would get mixed up with those of the new run."""
    if checkpoints := checkpoints_of(Path(folder)):
        raise UserError(
            f"--resume_from_checkpoint False: {folder} contains checkpoints; omit the flag to resume, or delete "
            f"them: {' '.join(path.name for path in checkpoints)}"
        )


def old_checkpoints(folder: Path, limit: int | None, best: str | None) -> list[Path]:
    """The checkpoints to delete: incomplete ones, left by a killed launch, and the oldest beyond --save_total_limit.

    The last and the best complete one always stay.
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
    """Delete a checkpoint, or warn if that fails, as on NFS while a file is open elsewhere."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s: could not delete this old checkpoint (%s); training continues", folder, error)
