"""Train a model by SFT, by imitation (SFTwithKL) or by self-play (OfflinePO).

    torchrun --nproc_per_node=8 train.py --train_method OfflinePO --model_name_or_path M --ref_model_name_or_path M \
        --train_data_path rows.json --output_dir DIR --deepspeed configs/default_offload_opt_param.json --bf16 True

Learning rate, schedule, epochs and batch are the Trainer's unless they are set.
Started again, the same command continues from the last complete checkpoint. If the run is finished, it says so. Other
settings than those in OUTPUT_DIR/settings.json are refused.
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
SCRATCH = "_rows"  # in OUTPUT_DIR: the encoded rows of this start. The Trainer uploads nothing that begins with "_"
RESULT_FILES = ["train_results.json", "*.safetensors", "checkpoint-*"]


def main() -> None:
    """Train, or end with one line (`run_program`).

    A stop writes no checkpoint: the next start repeats the steps since the last one, which --save_strategy and
    --save_steps place. With --save_strategy no it repeats all.
    """
    kept = "complete checkpoints are kept, and the same command continues from the last one"
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
    """The checkpoint that this start continues. With --resume_from_checkpoint False there must be none."""
    if str(args.resume_from_checkpoint).lower() == "false":
        check_none(args.output_dir)
    return last_checkpoint(args.output_dir, deepspeed=bool(args.deepspeed))


@contextmanager
def scratch(args: SPAGArguments) -> Iterator[None]:
    """Delete this machine's folder of encoded rows, which a killed start may have left, before and after the block."""
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
    """Train, and write what a training leaves.

    The model of the last step is saved, or with --load_best_model_at_end the best checkpoint.

    --push_to_hub uploads OUTPUT_DIR at `save_model`, and by default at each checkpoint, without the folders
    checkpoint-N and names that begin with "_". So settings.json, with the paths of data and models, and the
    reference's numbers are uploaded too. What is written after `save_model`, such as the folder merged, is not.
    """
    args = trainer.args
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.check_finite()
    trainer.check_weights()
    trainer.save_model()
    # With --push_to_hub rank 0 uploads for longer than NCCL waits; here the other ranks wait without a time limit.
    on_rank_0(lambda: make_weights_readable(args.output_dir))
    if trainer.eval_dataset:
        trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    trainer.create_model_card()
    if args.lora_merge:
        on_rank_0(lambda: merge_lora(trainer))  # without a time limit for the other ranks
    if trainer.is_world_process_zero():
        for name in trainer.data_collator.tables:
            Path(args.output_dir, f"{name}.npy").unlink(missing_ok=True)
    trainer.accelerator.wait_for_everyone()
    # The last file, and the first of RESULT_FILES: `stage` takes no training for finished that lacks it. What
    # else a training shall leave is written above.
    trainer.save_metrics("train", result.metrics)


def set_up(args: SPAGArguments) -> SPAGTrainer:
    """Read the data and the models, in this order: errors of data show before weights are loaded."""
    # The first weights of adapters are drawn. Dropout and the order of rows follow this seed too; --data_seed replaces
    # it for the order.
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
        eval_rows = read_rows(args.eval_data_path, args, tokenizer, size, first_index=len(train_rows))
    model = load_for_training(args.model_name_or_path, **args.loading)
    warn_of_positions(model.config, args.max_length)
    # Saved beside the model, with the maximum length and the sides that it came with.
    saved_tokenizer = load_tokenizer(args.model_name_or_path, trust_remote_code=args.trust_remote_code)
    if (saved_tokenizer.pad_token_id or 0) >= size:
        saved_tokenizer.pad_token = None  # the Trainer copies it to the model's configuration, which could not be read
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
    """The rows of these files that the method learns from, or is evaluated on. They lie in `scratch_folder`."""
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
        line = "%s: rows of these types are trained as rows of games: %s"
        warn_on_rank_0(line, files, ", ".join(sorted(types)))
    return rows if method.reads_weights else leave_out_weight_0(rows, files, args.train_method)


def scratch_folder(args: SPAGArguments) -> Path:
    """The folder of this machine's encoded rows. It goes when training ends; one of a killed start goes first.

    It lies in OUTPUT_DIR because that has space for models, while /tmp is in memory on some machines.
    """
    number = os.environ.get("GROUP_RANK", "0")  # torchrun's number of the machine; other launchers give none
    return Path(args.output_dir, SCRATCH, f"{socket.gethostname()}_{number}")


def check_kind(row: TextRow) -> None:
    """Raise UserError for a row of which OfflinePO would not do what the row says.

    That is one without a reward, which it would take for a won game, and one whose reward would count for nothing.
    """
    has_reward = "reward" in row.numbers
    if row.kind == SFT and row.type != "sft" and has_reward:
        remedy = "give 'query' and 'target' instead, or leave the reward out"
        raise UserError(f"'reward' beside 'messages' or Alpaca's fields, which are SFT rows; {remedy}")
    if row.kind == GAME and str(row.type).strip().lower() == "sft":
        raise UserError(f'\'type\' is {row.type!r}; an SFT row has "type": "sft"')
    if row.kind == GAME and not has_reward:
        raise UserError('no \'reward\'; under OfflinePO a row has the reward of a game, or "type": "sft"')


def leave_out_weight_0(rows: Dataset, files: str, train_method: str) -> Dataset:
    """The rows of a weight above 0, for SFT, which uses no other weights; these are a warning.

    The other methods keep rows of weight 0: these cost nothing, but count among the rows by which a loss is divided.
    """
    weights = column(rows, "weight")
    if (weights == 1).all():
        return rows
    kept = np.flatnonzero(weights)
    if not kept.size:
        raise UserError(f"{files}: all rows have weight 0")
    line = "%s: %s uses no weights, but %d rows have one other than 1: those of weight 0 (%d rows) are left out, and "
    line += "the others count as 1; --train_method SFTwithKL uses weights"
    warn_on_rank_0(line, files, train_method, (weights != 1).sum(), len(rows) - kept.size)
    return rows.select(kept)


def check_rows(rows: Dataset, args: SPAGArguments) -> None:
    """Raise UserError for rows that make no batch, from which no game would be learned, or that ruin the model."""
    files = ", ".join(args.train_data_path)
    batch = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and len(rows) < batch:
        raise UserError(f"{files}: {len(rows)} rows, which --dataloader_drop_last drops: a batch has {batch}")
    learns_from_games = TRAIN_METHODS[args.train_method].learns_from_games
    is_game = column(rows, "kind") == GAME
    rewards = column(rows, "reward")
    if learns_from_games and not is_game.any() and not args.allow_no_game_rows:
        raise UserError(
            f"{files}: only SFT rows, so nothing of the games would be learned (were all games tied?); "
            "--allow_no_game_rows True trains all the same"
        )
    if args.allow_negative_rewards:
        return
    is_avoided = is_game & learns_from_games  # if its reward is below 0
    avoided = ((rewards < 0) & is_avoided).sum()
    imitated = ((rewards < 0) & ~is_avoided).sum()
    remedy = "--allow_negative_rewards True trains all the same"
    if imitated:
        kind = "SFT rows" if learns_from_games else "rows"
        why = f"{args.train_method} would imitate them as if they were good; OfflinePO learns to avoid rows of games"
        raise UserError(f"{files}: {imitated} {kind} have negative rewards. {why}; {remedy}")
    if avoided and not args.detach_kl:
        why = "Without --detach_kl True their log-ratio runs away and replies degenerate"
        raise UserError(f"{files}: {avoided} rows have negative rewards. {why}; {remedy}")


def vocabulary_size(args: SPAGArguments) -> int:
    """The model's. UserError if that of the reference has another size: then l and l_ref are not comparable."""

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

    The next epoch plays with this model and adds new adapters to it: switched off, they leave the model that played,
    which is the reference.
    """
    from peft import PeftModel
    from transformers.integrations import deepspeed as deepspeed_integration

    deepspeed_integration.unset_hf_deepspeed_config()  # load the whole model, not one partitioned over ranks
    args = trainer.args
    folder = Path(args.output_dir, "merged")
    adapted = PeftModel.from_pretrained(load_for_training(args.model_name_or_path, **args.loading), args.output_dir)
    adapted.merge_and_unload().save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    trainer.write_card(folder, merged=True)
    make_weights_readable(folder)


def summary(trainer: SPAGTrainer) -> str:
    """The last line that train.py prints.

    Its losses are the first and the last logged one, each a mean over --logging_steps steps (the Trainer's 500, if the
    flag is not given). A training that logged none, because it has fewer steps, shows no loss.
    """
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    change = f", loss {losses[0]:.3f} at the first and {losses[-1]:.3f} at the last" if losses else ""
    return f"trained {trainer.state.global_step} steps{change}"


def leave() -> None:
    """End the process group, and with gloo the process, which gloo's threads could abort while it is torn down."""
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
