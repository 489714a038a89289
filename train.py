"""Train a model by SFT, by imitation (SFTwithKL) or by self-play (OfflinePO).

    torchrun --nproc_per_node=8 train.py --train_method OfflinePO --model_name_or_path M --ref_model_name_or_path M \
        --train_data_path rows.json --output_dir DIR --deepspeed configs/default_offload_opt_param.json --bf16 True

Learning rate, schedule, epochs and batch size have the Trainer's defaults. Rerun the same command to continue from the
last complete checkpoint. A start with other settings than those in OUTPUT_DIR/settings.json is refused.
"""

import logging
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoConfig, set_seed

from arguments import SPAGArguments, parse_arguments
from dataloaders import SPAGCollator, TextRow, column, load_rows
from tools.common.adapters import add_lora
from tools.common.checkpoints import check_none, last_checkpoint
from tools.common.errors import UserError
from tools.common.models import (
    from_folder,
    load_for_training,
    load_tokenizer,
    make_weights_readable,
    warn_of_positions,
)
from tools.common.programs import run_program
from tools.common.ranks import is_first_of_machine, on_each_machine, on_rank_0, rank, warn_on_rank_0
from tools.common.records import stage
from tools.common.rowformats import GAME, SFT
from trainers import TRAIN_METHODS, SPAGTrainer

logger = logging.getLogger(__name__)
SCRATCH = "_rows"  # in OUTPUT_DIR: this start's encoded rows. The Trainer does not upload names that begin with "_"
RESULT_FILES = ["train_results.json", "*.safetensors", "checkpoint-*"]


def main() -> None:
    """Train. A stop writes no checkpoint, so a restart repeats the steps since the last one."""
    kept = "complete checkpoints are kept; rerun the same command to continue from the last one"
    run_program(train, ranks=True, kept=kept)
    leave()


def train() -> None:
    args = parse_arguments()
    trainer = None
    with stage(
        Path(args.output_dir, "settings.json"), args.run_settings, results=RESULT_FILES, defaults=args.defaults
    ) as work:
        if work.todo:
            args.resume_from_checkpoint = on_rank_0(lambda: begin_at(args))
            with scratch(args):
                trainer = set_up(args)
                run(trainer)
            work.notes |= {"rows": len(trainer.train_dataset), "arguments": args.to_dict()}
    if trainer and trainer.is_world_process_zero():
        print(summary(trainer))


def begin_at(args: SPAGArguments) -> str | None:
    """The checkpoint to resume from. With --resume_from_checkpoint False there must be none."""
    if str(args.resume_from_checkpoint).lower() == "false":
        check_none(args.output_dir)
    return last_checkpoint(args.output_dir, deepspeed=bool(args.deepspeed))


@contextmanager
def scratch(args: SPAGArguments) -> Iterator[None]:
    """Delete this machine's encoded rows after the block, and before it those of a killed start."""
    folder = scratch_folder(args)
    on_each_machine(lambda: shutil.rmtree(folder, ignore_errors=True))
    try:
        yield
    finally:
        if is_first_of_machine():
            shutil.rmtree(folder, ignore_errors=True)
        if rank() == 0:
            shutil.rmtree(folder.parent, ignore_errors=True)


def run(trainer: SPAGTrainer) -> None:
    """Train, and save the model of the last step or, with --load_best_model_at_end, the best checkpoint.

    --push_to_hub uploads OUTPUT_DIR at `save_model` and by default at each checkpoint, without checkpoint-N folders
    and names that begin with "_". This includes settings.json, with the paths of data and models, and the reference's
    log-probabilities, but not what is written after `save_model`, such as the folder merged.
    """
    args = trainer.args
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.check_finite()
    trainer.check_weights()
    trainer.save_model()
    # With --push_to_hub rank 0 may upload for longer than NCCL's timeout, so the others wait for it here.
    on_rank_0(lambda: make_weights_readable(args.output_dir))
    if trainer.eval_dataset:
        trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    trainer.create_model_card()
    if args.lora_merge:
        on_rank_0(lambda: merge_lora(trainer))  # may take longer than NCCL's timeout
    if trainer.is_world_process_zero():
        for name in trainer.data_collator.tables:
            Path(args.output_dir, f"{name}.npy").unlink(missing_ok=True)
    trainer.accelerator.wait_for_everyone()
    # Written last, because `stage` takes a training with this file, the first of RESULT_FILES, for finished.
    trainer.save_metrics("train", result.metrics)


def set_up(args: SPAGArguments) -> SPAGTrainer:
    """Read the data and then the models, so that data errors show before weights are loaded."""
    # For adapters' initial weights, dropout and, unless --data_seed is set, the order of rows.
    set_seed(args.seed)
    tokenizer = load_tokenizer(
        args.model_name_or_path,
        trust_remote_code=args.trust_remote_code,
        model_max_length=args.max_length,
        padding_side=args.padding_side,
        truncation_side=args.truncation_side,
    )
    size = vocabulary_size(args)
    train_rows = read_rows(args.train_data_path, args, tokenizer, size)
    check_rows(train_rows, args)
    eval_rows = None
    if args.eval_data_path:
        first = int(column(train_rows, "index").max()) + 1  # not their number: rows of weight 0 may be dropped
        eval_rows = read_rows(args.eval_data_path, args, tokenizer, size, first_index=first)
    model = load_for_training(args.model_name_or_path, **args.loading)
    warn_of_positions(model.config, args.max_length)
    # Saved with the model, with its original maximum length and sides.
    saved_tokenizer = load_tokenizer(args.model_name_or_path, trust_remote_code=args.trust_remote_code)
    if (saved_tokenizer.pad_token_id or 0) >= size:
        saved_tokenizer.pad_token = None  # the Trainer would copy it to the model's configuration, making that invalid
    logger.info("training on %s in %s, weights in %s", args.device, args.precision, model.dtype)
    return TRAIN_METHODS[args.train_method](
        model=add_lora(model, args) if args.lora_rank else model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=SPAGCollator(tokenizer, size),
        processing_class=saved_tokenizer,
    )


def read_rows(paths: list[str], args: SPAGArguments, tokenizer, vocab_size: int, *, first_index: int = 0) -> Dataset:
    """The rows of these files that the method trains or is evaluated on, stored in `scratch_folder`."""
    method = TRAIN_METHODS[args.train_method]
    types: set[str] = set()

    def check(row: TextRow) -> None:
        if method.learns_from_games:
            check_kind(row)
            if row.kind == GAME and row.type is not None:
                types.add(str(row.type))

    file = scratch_folder(args) / f"rows_from_{first_index}.arrow"
    rows = load_rows(paths, tokenizer, vocab_size, file=file, check=check, first_index=first_index)
    files = ", ".join(paths)
    if types:
        line = "%s: rows of these types are trained on as rows of games: %s"
        warn_on_rank_0(line, files, ", ".join(sorted(types)))
    return rows if method.reads_weights else leave_out_weight_0(rows, files, args.train_method)


def scratch_folder(args: SPAGArguments) -> Path:
    """The folder of this machine's encoded rows, in OUTPUT_DIR because /tmp is in memory on some machines."""
    number = os.environ.get("GROUP_RANK", "0")  # torchrun's number of the machine; other launchers set none
    return Path(args.output_dir, SCRATCH, f"{socket.gethostname()}_{number}")


def check_kind(row: TextRow) -> None:
    """UserError for a row that OfflinePO would misread.

    Without a reward it would count as a won game; as an SFT row, its reward would be ignored.
    """
    has_reward = "reward" in row.numbers
    if row.kind == SFT and row.type != "sft" and has_reward:
        remedy = "use 'query' and 'target', or remove the reward"
        raise UserError(f"'reward' beside 'messages' or Alpaca's fields, which are SFT rows; {remedy}")
    if row.kind == GAME and str(row.type).strip().lower() == "sft":
        raise UserError(f'\'type\' is {row.type!r}; an SFT row needs "type": "sft"')
    if row.kind == GAME and not has_reward:
        raise UserError('no \'reward\'; under OfflinePO a row needs a game\'s reward, or "type": "sft"')


def leave_out_weight_0(rows: Dataset, files: str, train_method: str) -> Dataset:
    """The rows with a weight above 0, for SFT, which otherwise ignores weights and warns of them.

    The other methods keep rows of weight 0, which count in the loss denominators.
    """
    weights = column(rows, "weight")
    if (weights == 1).all():
        return rows
    kept = np.flatnonzero(weights)
    if not kept.size:
        raise UserError(f"{files}: all rows have weight 0")
    line = "%s: %s ignores weights, but %d rows have one other than 1: those of weight 0 (%d rows) are dropped, and "
    line += "the others count as 1; --train_method SFTwithKL uses weights"
    warn_on_rank_0(line, files, train_method, (weights != 1).sum(), len(rows) - kept.size)
    return rows.select(kept)


def check_rows(rows: Dataset, args: SPAGArguments) -> None:
    """UserError for rows that make no batch, contain no games, or would ruin the model."""
    files = ", ".join(args.train_data_path)
    batch = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and len(rows) < batch:
        raise UserError(f"{files}: {len(rows)} rows, which --dataloader_drop_last drops: a batch has {batch}")
    learns_from_games = TRAIN_METHODS[args.train_method].learns_from_games
    is_game = column(rows, "kind") == GAME
    rewards = column(rows, "reward")
    if learns_from_games and not is_game.any() and not args.allow_no_game_rows:
        raise UserError(
            f"{files}: only SFT rows, so nothing would be learned from games (were all games tied?); "
            "--allow_no_game_rows True trains anyway"
        )
    if args.allow_negative_rewards:
        return
    is_avoided = is_game & learns_from_games  # if its reward is below 0
    avoided = ((rewards < 0) & is_avoided).sum()
    imitated = ((rewards < 0) & ~is_avoided).sum()
    remedy = "--allow_negative_rewards True trains anyway"
    if imitated:
        kind = "SFT rows" if learns_from_games else "rows"
        why = f"{args.train_method} would imitate them as if they were good; OfflinePO learns to avoid rows of games"
        raise UserError(f"{files}: {imitated} {kind} have negative rewards. {why}; {remedy}")
    if avoided and not args.detach_kl:
        why = "Without --detach_kl True their log-ratio runs away and replies degenerate"
        raise UserError(f"{files}: {avoided} rows have negative rewards. {why}; {remedy}")


def vocabulary_size(args: SPAGArguments) -> int:
    """The model's. UserError if the reference's differs, because l and l_ref would not be comparable."""

    def size_of(name: str) -> int:
        config = from_folder(AutoConfig, name, trust_remote_code=args.trust_remote_code)
        return config.get_text_config().vocab_size

    model = size_of(args.model_name_or_path)
    reference = size_of(args.ref_model_name_or_path) if args.ref_model_name_or_path else model
    if model != reference:
        raise UserError(f"model and reference have different vocabularies: {model} and {reference} tokens")
    return model


def merge_lora(trainer: SPAGTrainer) -> None:
    """Write OUTPUT_DIR/merged: the base model with the saved adapters added to its weights.

    The next epoch plays with this model and adds new adapters, which when switched off leave the model that played,
    the reference.
    """
    from peft import PeftModel
    from transformers.integrations import deepspeed as deepspeed_integration

    deepspeed_integration.unset_hf_deepspeed_config()  # load the whole model instead of this rank's partition
    args = trainer.args
    folder = Path(args.output_dir, "merged")
    adapted = PeftModel.from_pretrained(load_for_training(args.model_name_or_path, **args.loading), args.output_dir)
    adapted.merge_and_unload().save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    trainer.write_card(folder, merged=True)
    make_weights_readable(folder)


def summary(trainer: SPAGTrainer) -> str:
    """The last line that train.py prints, with the first and the last logged loss, if any was logged."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    change = f", loss {losses[0]:.3f} at the first and {losses[-1]:.3f} at the last" if losses else ""
    return f"trained {trainer.state.global_step} steps{change}"


def leave() -> None:
    """End the process group and, with gloo, the process, because gloo's threads can abort during teardown."""
    if not torch.distributed.is_initialized():
        return
    backend = torch.distributed.get_backend()
    torch.distributed.destroy_process_group()
    if backend == "gloo":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
