"""Checkpoints of a training: which are complete, which one continues it, which may go."""

import logging
import shutil
from pathlib import Path

from transformers.integrations import is_deepspeed_zero3_enabled

from tools.common.errors import UserError

COMPLETE = "complete"  # an empty file, written last into a checkpoint folder
logger = logging.getLogger(__name__)


def checkpoints_of(folder: Path) -> list[Path]:
    """The folders checkpoint-N, by N. A copy such as checkpoint-100-backup is none."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def last_checkpoint(args) -> str | None:
    """The furthest complete checkpoint of a run that this start can continue. UserError if it can continue none.

    With --resume_from_checkpoint False there must be no checkpoints: they would mix with those of the new run.
    """
    checkpoints = checkpoints_of(Path(args.output_dir))
    if checkpoints and str(args.resume_from_checkpoint).lower() == "false":
        raise UserError(
            f"--resume_from_checkpoint False: {args.output_dir} holds checkpoints; leave the flag out to continue, or "
            f"delete there: {' '.join(path.name for path in checkpoints)}"
        )
    state = "optimizer*"
    if args.deepspeed:
        kind = "zero_pp" if is_deepspeed_zero3_enabled() else "mp"
        state = f"global_step*/{kind}_rank_*_model_states.pt"
    complete = [checkpoint for checkpoint in checkpoints if (checkpoint / COMPLETE).is_file()]
    with_state = [str(checkpoint) for checkpoint in complete if any(checkpoint.glob(state))]
    if complete and not with_state:
        raise UserError(
            f"{args.output_dir}: its checkpoints are of another --deepspeed, or hold no optimizer; start with the "
            "--deepspeed that made them, or delete them"
        )
    last = with_state[-1] if with_state else None
    processes = len(list(Path(last).glob("global_step*/*zero_pp_rank_*_optim_states.pt"))) if last else 0
    if args.deepspeed and processes not in (0, args.world_size):  # ZeRO: a part of the optimizer for each process
        raise UserError(
            f"{last}: made by {processes} processes, which ZeRO cannot continue with {args.world_size}; start with "
            f"{processes} processes, or delete the checkpoints"
        )
    return last


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
