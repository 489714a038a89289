"""Train a model by SFT, by imitation (SFTwithKL) or by self-play (OfflinePO).

    torchrun --nproc_per_node=8 train.py --train_method OfflinePO --model_name_or_path M --ref_model_name_or_path M \
        --train_data_path rows.json --output_dir DIR --deepspeed configs/default_offload_opt_param.json --bf16 True

The same command again continues from the last whole checkpoint, or says that all is there.
"""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path

import utils  # isort: skip  (first: it says in one line what to do where packages are missing)
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

from arguments import SPAGArguments, parse_arguments
from dataloaders import IGNORE_INDEX, RowCounts, RowDataset, SPAGCollator, load_rows
from trainers import TRAIN_METHODS, SPAGTrainer
from utils import TOKENIZER_FILES

MOST_CUT = 0.5  # share of rows that may lose nearly all
FINISHED = "train_results.json"  # written last
REMEDY = (
    "other settings, more epochs too, are another run: choose another --output_dir, or --overwrite_output_dir True "
    "to start anew"
)
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "deepspeed", "peft", "numpy")
logger = logging.getLogger(__name__)


class Output:
    """The folder of a run: whether all is there, where to continue, what settings it was made with."""

    def __init__(self, args: SPAGArguments):
        self.args, self.folder = args, Path(args.output_dir)
        path = self.folder / "settings.json"
        self.settings = utils.RunSettings(path, results=lambda: next(iter(self._held()), None), remedy=REMEDY)

    def claim(self) -> bool:
        """Keep other launches out and choose the checkpoint to continue from; False if all is there already.

        Rank 0 decides for all. Raises ValueError, with nothing written, for a run with other settings.
        """
        finished, self.args.resume_from_checkpoint = utils.from_rank_0(self._claim)
        if finished and utils.rank() == 0:
            print(f"{self.folder}: all is there")
        return not finished

    def begin(self, trainer: SPAGTrainer) -> None:
        """Take away what is not to be continued from, and write settings.json: how this run is made, and by what."""
        (self.folder / FINISHED).unlink(missing_ok=True)  # first: without it nobody takes the rest for finished
        for path in self._held() if not self.args.resume_from_checkpoint else []:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        datasets = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
        data = {name: {"key": rows.key, **dataclasses.asdict(rows.counts)} for name, rows in datasets.items() if rows}
        installed = filter(importlib.util.find_spec, RECORDED_PACKAGES)
        versions = {package: importlib.metadata.version(package) for package in installed}
        self.settings.write(self.args.same_run, arguments=self.args.to_dict(), data=data, versions=versions)

    def _held(self) -> list[Path]:
        return [*utils.checkpoints(self.folder), *self.folder.glob("*.safetensors"), *self.folder.glob(FINISHED)]

    def _claim(self) -> tuple[bool, str | None]:
        """Whether all is there, and the checkpoint to continue from."""
        finished, _ = self._look()
        if not finished:
            utils.lock(self.settings.lock_path)
        return self._look()  # another launch may have ended in between

    def _look(self) -> tuple[bool, str | None]:
        overwrite = self.args.overwrite_output_dir and not utils.restarted()
        same_run, finished = self.args.same_run, (self.folder / FINISHED).is_file()
        if finished and self.settings.path.is_file():  # a loop that goes on elsewhere may train otherwise from now on
            same_run = same_run | {"weights": self.settings.read().get("weights")}
        self.settings.check(same_run, overwrite=overwrite)
        if overwrite or finished:
            return not overwrite, None
        if checkpoint := self._furthest_checkpoint():
            self._check_optimizer(Path(checkpoint))
        return False, checkpoint

    def _furthest_checkpoint(self) -> str | None:
        """Of this folder's whole ones and the one that was named, which a start of the same command names again."""
        own, named = utils.last_complete_checkpoint(self.folder), self.args.resume_from_checkpoint
        if not named or own and os.path.realpath(Path(named).parent) == os.path.realpath(self.folder):
            return own
        if not (utils.is_complete(named) and utils.is_undamaged(named)):
            raise ValueError(f"--resume_from_checkpoint {named}: not a whole checkpoint folder")
        path = Path(named).absolute().with_name(self.settings.path.name)
        utils.RunSettings(path, results=lambda: Path(named), remedy=REMEDY).check(self.args.same_run)
        steps = {each: utils.read_json(f"{each}/trainer_state.json")["global_step"] for each in (named, own) if each}
        return max(steps, key=steps.get)

    def _check_optimizer(self, checkpoint: Path) -> None:
        """Raise ValueError where the optimizer's state is not there, or not as this launch would read it."""
        plain, by_deepspeed = (any(checkpoint.glob(pattern)) for pattern in ("optimizer*", "global_step*"))
        parts = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))  # of ZeRO: one of each rank
        if not plain and not by_deepspeed:
            why = "saved without its optimizer (--save_only_model), which training cannot continue from"
        elif by_deepspeed != bool(self.args.deepspeed):
            why = f"saved {'with' if by_deepspeed else 'without'} --deepspeed; continue it so"
        elif parts not in (0, self.args.world_size) and not self.args.save_on_each_node:
            why = f"ZeRO saved it for {parts} processes, here are {self.args.world_size}; continue with {parts}"
        else:
            return
        raise ValueError(f"{checkpoint}: {why}; {self.settings.remedy}")


def check_rows(counts: RowCounts, args: SPAGArguments) -> None:
    """Raise ValueError for rows that training would succeed with and teach nothing; warn of those that come close."""
    files = ", ".join(args.train_data_path)
    if counts.rows == counts.sft_rows and args.allow_no_game_rows is False:
        raise ValueError(
            f"{files}: SFT rows alone, no row of a game: nothing of the games would be learned. Look at the counts of "
            "tools/assign_rewards.py (all games tied?); --allow_no_game_rows True trains all the same"
        )
    share = counts.mostly_cut / (counts.rows + counts.dropped)
    if share > MOST_CUT and not args.allow_cuts:
        raise ValueError(
            f"{files}: {share:.0%} of the rows lose more than nine tenths of their tokens, or of their target's, at "
            f"--max_length {args.max_length}; use a larger one, or --allow_cuts True"
        )
    if counts.mostly_cut:
        message = "%s: %d rows (%.3g%%) lose more than nine tenths of their tokens, or of their target's"
        utils.warn_on_rank_0(message, files, counts.mostly_cut, 100 * share)


def from_pretrained(auto, name: str, args: SPAGArguments, **settings):
    """Load a model's part by `auto`, one of transformers' Auto classes; ValueError of one line for what cannot be."""
    try:
        return auto.from_pretrained(name, trust_remote_code=args.trust_remote_code, **settings)
    except Exception as error:  # broken files and the model's own code raise everything
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0]}"
        if "trust_remote_code" in str(error):
            why = "it brings its own code; --trust_remote_code True runs it"
        elif args.trust_remote_code and not isinstance(error, OSError):
            why += f"; the model's own code may be for another transformers than {transformers.__version__}"
        raise ValueError(f"{name}: {auto.__name__.removeprefix('Auto')} cannot be loaded ({why})") from error


def load_tokenizer(args: SPAGArguments):
    """The model's tokenizer with this run's length and sides."""
    sides = {"padding_side": args.padding_side, "truncation_side": args.truncation_side}
    settings = sides | {"model_max_length": args.max_length}
    tokenizer = from_pretrained(AutoTokenizer, args.model_name_or_path, args, **settings)
    utils.ensure_pad_token(tokenizer)
    return tokenizer


def load_dataset(paths: list[str], tokenizer, args: SPAGArguments) -> RowDataset:
    """Read, check and encode rows: the first process of each machine does, the others find its result."""
    with args.main_process_first(desc="encoding rows"), utils.naming_full_disk(args.cache_dir):
        rows, counts = load_rows(paths, tokenizer, args.cache_dir, drop_unscored=args.drop_unscored_rows)
    counted = [f"{number} {name}" for name, number in dataclasses.asdict(counts).items()]
    logger.info("%s: %s", ", ".join(paths), ", ".join(counted))
    if args.show_examples:
        rows = rows.select(range(min(args.show_examples, len(rows))))
    return RowDataset(rows, counts)


def check_models(args: SPAGArguments, tokenizer) -> None:
    """Read the configurations, before any weights: code that must be trusted, and vocabularies that differ.

    A reference in a folder need not have a tokenizer.
    """
    sizes = {}
    for name in filter(None, {args.model_name_or_path, args.ref_model_name_or_path}):
        sizes[name] = from_pretrained(AutoConfig, name, args).get_text_config().vocab_size
        if os.path.isdir(name) and not list(Path(name).glob("*.safetensors")):
            raise ValueError(f"{name}: no weights as safetensors; save_pretrained of transformers writes them")
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"model and reference have different vocabularies: {sizes}; their log-probabilities differ too"
        )
    reference = Path(args.ref_model_name_or_path or "")
    if len(sizes) > 1 and (not reference.is_dir() or any((reference / file).is_file() for file in TOKENIZER_FILES)):
        if from_pretrained(AutoTokenizer, str(reference), args).get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{reference}: the reference has another tokenizer than the model")
    if len(tokenizer) > min(sizes.values()):
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, more than the model's vocabulary: {sizes}")


def load_model(name_or_path: str, args: SPAGArguments) -> PreTrainedModel:
    """A causal LM from safetensors, its weights in `args.weights_dtype`."""
    model, loaded = from_pretrained(
        AutoModelForCausalLM,
        name_or_path,
        args,
        output_loading_info=True,
        dtype=args.weights_dtype,
        attn_implementation=args.attn_implementation,
        use_safetensors=True,
    )
    if loaded["missing_keys"]:
        raise ValueError(f"{name_or_path}: weights are missing ({', '.join(sorted(loaded['missing_keys']))})")
    model.config.use_cache = False
    return model


def add_lora(model: PreTrainedModel, args: SPAGArguments):
    """The model with fresh adapters, in fp32 unless DeepSpeed keeps a copy of that; its own weights are frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear" if args.lora_target_modules == ["all-linear"] else args.lora_target_modules,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=not args.deepspeed)


def merge_lora(args: SPAGArguments) -> None:
    """Write OUTPUT_DIR/merged: the base model with the saved adapters added to its weights."""
    from peft import PeftModel
    from transformers.integrations import deepspeed as deepspeed_integration

    deepspeed_integration.unset_hf_deepspeed_config()  # a whole copy, not one partitioned over ranks
    merged = PeftModel.from_pretrained(load_model(args.model_name_or_path, args), args.output_dir).merge_and_unload()
    merged.save_pretrained(os.path.join(args.output_dir, "merged"))
    load_tokenizer(args).save_pretrained(os.path.join(args.output_dir, "merged"))


def show_examples(trainer: SPAGTrainer) -> None:
    """Print the rows as they are trained on: [[masked]] text, then the target; numbers; the reference."""
    trainer.prepare_reference()
    tokenizer = trainer.processing_class
    if not trainer.is_world_process_zero():
        return
    compared = set(trainer.rows_with_reference(trainer.train_dataset)) if trainer.uses_reference else ()
    for index, row in enumerate(trainer.train_dataset.__getitems__(list(range(len(trainer.train_dataset))))):
        masked = sum(label == IGNORE_INDEX for label in row["labels"])
        kind = "SFT" if row["is_sft"] else "game"
        print(f"--- row {index}: {kind}, weight {row['weight']:.4g}, reward {row['reward']:.4g}", end="")
        print(f", reference log-probability {row['ref_logprob']:.4f}" if index in compared else "")
        print(f"[[{tokenizer.decode(row['input_ids'][:masked])}]]{tokenizer.decode(row['input_ids'][masked:])}")


def set_up(argv: list[str]) -> SPAGTrainer | None:
    """Read the settings, the data and the models, in this order; None if the run is finished already.

    Raises ValueError and OSError for bad input; what is wrong with data and models shows before weights are loaded.
    """
    args = parse_arguments(argv)
    if not args.show_examples and not Output(args).claim():
        return None
    set_seed(args.seed)
    tokenizer = load_tokenizer(args)
    check_models(args, tokenizer)
    train_rows = load_dataset(args.train_data_path, tokenizer, args)
    if not args.show_examples:
        check_rows(train_rows.counts, args)
    eval_rows = load_dataset(args.eval_data_path, tokenizer, args) if args.eval_data_path else None
    if eval_rows:
        names = sorted({*train_rows.role_names, *eval_rows.role_names})
        for rows in (train_rows, eval_rows):
            rows.number_roles(names)
    model = load_model(args.model_name_or_path, args)
    return TRAIN_METHODS[args.train_method](
        model=add_lora(model, args) if args.lora_rank else model,
        args=args,
        load_reference=lambda: load_model(args.ref_model_name_or_path, args),
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=SPAGCollator(tokenizer),
        processing_class=tokenizer,
    )


def run(trainer: SPAGTrainer) -> None:
    """Train, evaluate and save; train_results.json is the last file of a finished run."""
    args = trainer.args
    if args.show_examples:
        return show_examples(trainer)
    if trainer.is_world_process_zero():
        Output(args).begin(trainer)
    with utils.naming_full_disk(args.output_dir):
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        if trainer.eval_dataset is not None:
            trainer.save_metrics("eval", trainer.evaluate())
        trainer.save_state()
        if args.lora_merge and trainer.is_world_process_zero():
            merge_lora(args)
        trainer.save_metrics("train", result.metrics)
    if trainer.is_world_process_zero():
        print(describe_result(trainer))


def describe_result(trainer: SPAGTrainer) -> str:
    """What came of a training, in a line, and a line for each checkpoint that stays with its optimizer's states."""
    args, state, counts = trainer.args, trainer.state, trainer.train_dataset.counts
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    part = -(-len(losses) // 10)
    text = f"{args.output_dir}: {args.train_method} of {counts.rows} rows ({counts.sft_rows} of them SFT), "
    text += f"{state.global_step} steps"
    if losses:
        first, last = (sum(some) / part for some in (losses[:part], losses[-part:]))
        text += f", loss {first:.4g} -> {last:.4g} (first and last tenth of the steps)"
    for folder in utils.checkpoints(args.output_dir):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        text += f"\n{folder}: {size / 1e9:.1f} GB of model and optimizer states that this run no longer needs"
    return text


def leave() -> None:
    """End the process group, and with gloo the process.

    DeepSpeed keeps gloo groups alive, and their threads now and then abort a process whose interpreter is torn down
    around them, after everything is written.
    """
    if not torch.distributed.is_initialized():
        return
    backend = torch.distributed.get_backend()
    torch.distributed.destroy_process_group()
    if backend == "gloo":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main(argv: list[str]) -> None:
    utils.end_with_launcher()
    utils.set_up_logging()
    if trainer := utils.run_program(lambda: set_up(argv)):
        utils.run_program(lambda: run(trainer))
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
