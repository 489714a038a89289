"""Train a model by SFT, by imitation (SFTwithKL) or by self-play (OfflinePO).

    torchrun --nproc_per_node=8 train.py --train_method OfflinePO --model_name_or_path M --ref_model_name_or_path M \
        --train_data_path rows.json --output_dir DIR --deepspeed configs/default_offload_opt_param.json --bf16 True

Started again, the same command continues from the last complete checkpoint. If the run is finished, it says so.
"""

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import shutil
import sys
from pathlib import Path

import utils  # isort: skip  (first: it says in one line what to do where packages are missing)
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

import dataloaders
import trainers
from arguments import SPAGArguments, parse_arguments
from dataloaders import RowCounts, RowDataset, SPAGCollator, load_rows
from trainers import TRAIN_METHODS, SPAGTrainer, checkpoints, is_complete
from utils import TOKENIZER_FILES, UserError

FINISHED = "train_results.json"  # written last
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "deepspeed", "peft", "numpy")
logger = logging.getLogger(__name__)


class Output:
    """The folder of a run: its settings, its checkpoints, and whether the run is finished."""

    def __init__(self, args: SPAGArguments):
        self.args, self.folder = args, Path(args.output_dir)
        made = ", ".join(path.name for path in self._results())
        self.settings = utils.RunSettings(
            self.folder / "settings.json",
            results=lambda: next(iter(self._results()), None),
            remedy="different settings, also more epochs, make a different run: choose another --output_dir, or "
            f"delete this run's results in {self.folder}: {made}",
        )

    def claim(self) -> bool:
        """Lock the folder and choose the checkpoint to continue from; return False if the run is finished.

        Rank 0 decides for all ranks. Raises UserError, with nothing written, for a run with other settings.
        """
        finished, self.args.resume_from_checkpoint = utils.from_rank_0(self._claim)
        if finished and utils.rank() == 0:
            print(f"{self.folder}: all is there")
        return not finished

    def begin(self) -> None:
        """Delete derived files that other settings, libraries or sources made, then write settings.json."""
        same_run, derived = self.args.same_run, self.args.derived_folder
        installed = filter(importlib.util.find_spec, RECORDED_PACKAGES)
        made_by = {
            "versions": {package: importlib.metadata.version(package) for package in installed},
            "sources": utils.file_digest([__file__, dataloaders.__file__, trainers.__file__, utils.__file__]),
        }
        try:
            before = utils.read_json(self.settings.path)
            same = not utils.differences(before["settings"], same_run)
            same = same and all(before[name] == made_by[name] for name in made_by)
        except (OSError, UserError, KeyError, TypeError, AttributeError):  # no settings of a run
            same = False
        if not same and derived.exists():
            shutil.rmtree(derived)
        self.settings.write(same_run, arguments=self.args.to_dict(), **made_by)

    def _results(self) -> list[Path]:
        return [*checkpoints(self.folder), *sorted(self.folder.glob("*.safetensors")), *self.folder.glob(FINISHED)]

    def _claim(self) -> tuple[bool, str | None]:
        """Take the lock unless the run is finished; return what `_look` returns."""
        finished, _ = self._look()
        if not finished:
            utils.lock(self.settings.lock_path)
        return self._look()  # again, since another launch may have finished in between

    def _look(self) -> tuple[bool, str | None]:
        """Check the settings; return whether the run is finished, and the checkpoint to continue from."""
        same_run, finished = self.args.same_run, (self.folder / FINISHED).is_file()
        if finished and self.settings.path.is_file():  # perhaps on another machine, in another dtype
            same_run = same_run | {"weights": self.settings.read().get("weights")}
        self.settings.check(same_run)
        checkpoint = None if finished else self._checkpoint()
        if checkpoint and self.args.deepspeed:
            check_parts(Path(checkpoint))
        if checkpoint and not self.args.deepspeed and not any(Path(checkpoint).glob("optimizer*")):
            raise UserError(  # without DeepSpeed the Trainer would go on with a new optimizer
                f"{checkpoint}: no optimizer.pt, so training cannot continue from it (it was saved with --deepspeed "
                f"or with --save_only_model); {self.settings.remedy}"
            )
        return finished, checkpoint

    def _checkpoint(self) -> str | None:
        """The last complete checkpoint of this folder; if it has none, the one given by --resume_from_checkpoint."""
        own = next((str(path) for path in reversed(checkpoints(self.folder)) if is_complete(path)), None)
        named = self.args.resume_from_checkpoint
        if own or not named:
            return own
        if not is_complete(named):
            raise UserError(f"--resume_from_checkpoint {named}: not a complete checkpoint folder")
        path = Path(named).absolute().with_name(self.settings.path.name)
        remedy = "start without --resume_from_checkpoint"
        utils.RunSettings(path, results=lambda: Path(named), remedy=remedy).check(self.args.same_run)
        return named


def check_parts(checkpoint: Path) -> None:
    """Raise UserError for a checkpoint that DeepSpeed cannot load in this launch."""
    parts = len(list(checkpoint.glob("global_step*/*zero_pp_rank_*_optim_states.pt")))
    if not list(checkpoint.glob("global_step*")):
        why = "it was saved without DeepSpeed: leave out --deepspeed"
    elif parts not in (0, utils.world_size()):
        why = f"it was saved by {parts} processes: start as many"
    else:
        return
    raise UserError(f"{checkpoint}: training cannot continue from it, since {why}; or delete it to begin anew")


def check_rows(counts: RowCounts, args: SPAGArguments) -> None:
    """Raise UserError for rows from which training would learn nothing, or that would ruin the model."""
    files = ", ".join(args.train_data_path)
    if counts.rows == counts.sft_rows and args.allow_no_game_rows is False:
        raise UserError(
            f"{files}: only SFT rows, no row of a game: nothing of the games would be learned. Look at the counts of "
            "tools/assign_rewards.py (all games tied?); --allow_no_game_rows True trains all the same"
        )
    if counts.negative and not args.detach_kl and args.allow_negative_rewards is False:
        raise UserError(
            f"{files}: {counts.negative} rows have negative rewards. Without --detach_kl True their log-ratio runs "
            "away and replies degenerate; --allow_negative_rewards True trains all the same"
        )


def from_pretrained(auto, name: str, args: SPAGArguments, **settings):
    """Call `from_pretrained` of an Auto class of transformers. Raises UserError of one line if that fails."""
    try:
        return auto.from_pretrained(name, trust_remote_code=args.trust_remote_code, **settings)
    except Exception as error:  # broken files and the model's own code raise errors of all kinds
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0]}"
        if "trust_remote_code" in str(error):
            why = "it brings its own code; --trust_remote_code True runs it"
        raise UserError(f"{name}: {auto.__name__.removeprefix('Auto')} cannot be loaded ({why})") from error


def load_tokenizer(args: SPAGArguments):
    """Load the model's tokenizer and set its maximum length, padding side and truncation side."""
    sides = {"padding_side": args.padding_side, "truncation_side": args.truncation_side}
    settings = sides | {"model_max_length": args.max_length}
    tokenizer = from_pretrained(AutoTokenizer, args.model_name_or_path, args, **settings)
    dataloaders.ensure_pad_token(tokenizer)
    return tokenizer


def load_dataset(
    paths: list[str], tokenizer, args: SPAGArguments, *, name: str = "train", vocabulary: int | None = None
) -> RowDataset:
    """Read, check and encode rows. Rank 0 writes them to a file; the other ranks wait until they see it.

    Raises UserError for a row with a token that is not in the model's vocabulary.
    """
    path = args.derived_folder / f"{name}_rows.arrow"
    if utils.rank() > 0 and args.should_save:  # --save_on_each_node: every machine has a folder of its own
        dataloaders.write_encoded(paths, tokenizer, path)
    utils.from_rank_0(lambda: dataloaders.write_encoded(paths, tokenizer, path))
    rows, counts = load_rows(paths, tokenizer, path, drop_unscored=args.drop_unscored_rows)
    largest = rows.with_format("numpy")["largest_id"][:]
    if vocabulary and largest.max() >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(int(largest.max()))
        where = rows[int(largest.argmax())]["where"]
        raise UserError(f"{where}: the model's vocabulary of {vocabulary} tokens does not hold the token {token!r}")
    counted = [f"{number} {name}" for name, number in dataclasses.asdict(counts).items()]
    logger.info("%s: %s", ", ".join(paths), ", ".join(counted))
    return RowDataset(rows, counts)


def check_models(args: SPAGArguments, tokenizer) -> int:
    """Compare the models' configurations and tokenizers before loading weights; return the size of the vocabulary.

    A reference in a folder need not have a tokenizer.
    """
    sizes = {}
    for name in filter(None, {args.model_name_or_path, args.ref_model_name_or_path}):
        sizes[name] = from_pretrained(AutoConfig, name, args).get_text_config().vocab_size
        if os.path.isdir(name) and not list(Path(name).glob("*.safetensors")):
            raise UserError(f"{name}: no weights as safetensors; save_pretrained of transformers writes them")
    if len(set(sizes.values())) > 1:
        raise UserError(
            f"model and reference have different vocabularies: {sizes}; their log-probabilities cannot be compared"
        )
    reference = Path(args.ref_model_name_or_path or "")
    if len(sizes) > 1 and (not reference.is_dir() or any((reference / file).is_file() for file in TOKENIZER_FILES)):
        if from_pretrained(AutoTokenizer, str(reference), args).get_vocab() != tokenizer.get_vocab():
            raise UserError(f"{reference}: the reference has another tokenizer than the model")
    vocabulary = min(sizes.values())
    if tokenizer.pad_token_id >= vocabulary:
        tokenizer.pad_token = tokenizer.eos_token  # the model has no embedding for this PAD
    return vocabulary


def check_device(args: SPAGArguments) -> None:
    """Raise UserError if a large model would be trained on the CPU only because PyTorch found no GPU."""
    if args.no_gpu_found:
        utils.refuse_large_model(args.model_name_or_path, "--use_cpu True")


def load_model(name_or_path: str, args: SPAGArguments) -> PreTrainedModel:
    """Load a causal LM from safetensors in `args.weights_dtype`. Of a multimodal model only the text part trains."""
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
        raise UserError(f"{name_or_path}: weights are missing ({', '.join(sorted(loaded['missing_keys']))})")
    model.config.use_cache = False
    if model.generation_config is not None:
        try:
            model.generation_config.validate(strict=True)
        except ValueError:  # temperature without do_sample, as in copies of Llama-2, could not be saved
            model.generation_config.do_sample = True
    freeze_all_but_text(model)
    return model


def freeze_all_but_text(model: PreTrainedModel) -> None:
    """Freeze what a multimodal model has beside text: DDP needs a gradient for every weight that trains."""
    if model.config.get_text_config() is model.config:
        return
    parts = filter(None, (model.get_decoder(), model.get_output_embeddings()))
    text = {id(weights) for part in parts for weights in part.parameters()}
    for weights in model.parameters():
        if id(weights) not in text:
            weights.requires_grad_(False)


def add_lora(model: PreTrainedModel, args: SPAGArguments):
    """Freeze the model and add adapters in fp32, or in its dtype under DeepSpeed, which keeps fp32 copies."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    targets = args.lora_target_modules or (None if model.config.model_type in KNOWN else ["all-linear"])
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=not args.deepspeed)
    except ValueError as error:  # no layer has one of these names
        raise UserError(f"--lora_target_modules {' '.join(targets or ())}: {error}") from None
    freeze_all_but_text(model)
    return adapted


def merge_lora(args: SPAGArguments) -> None:
    """Write OUTPUT_DIR/merged: the base model with the saved adapters added to its weights."""
    from peft import PeftModel
    from transformers.integrations import deepspeed as deepspeed_integration

    deepspeed_integration.unset_hf_deepspeed_config()  # load the whole model, not one partitioned over ranks
    adapted = PeftModel.from_pretrained(load_model(args.model_name_or_path, args), args.output_dir)
    folder = os.path.join(args.output_dir, "merged")
    adapted.merge_and_unload().save_pretrained(folder)
    load_tokenizer(args).save_pretrained(folder)


def show_examples(args: SPAGArguments) -> None:
    """Print the first rows as the model sees them: [[masked text]], then the target."""
    tokenizer = load_tokenizer(args)
    rows, _ = load_rows(args.train_data_path, tokenizer, drop_unscored=args.drop_unscored_rows)
    for row in itertools.islice(rows, args.show_examples if utils.rank() == 0 else 0):
        ids, masked = row["input_ids"], row["masked_length"]
        print(f"--- {row['where']}: weight {row['weight']:.4g}, reward {row['reward']:.4g}, SFT {row['is_sft']}")
        print(f"[[{tokenizer.decode(ids[:masked])}]]{tokenizer.decode(ids[masked:])}")


def set_up(argv: list[str]) -> SPAGTrainer | None:
    """Read the settings, the data and the models, in this order; None if there is nothing to train.

    Raises UserError and OSError for bad input; errors of data and models show before weights are loaded.
    """
    args = parse_arguments(argv)
    if args.show_examples:
        return show_examples(args)
    output = Output(args)
    if not output.claim():
        return None
    set_seed(args.seed)
    check_device(args)
    tokenizer = load_tokenizer(args)
    vocabulary = check_models(args, tokenizer)
    if args.should_save:
        output.begin()
    train_rows = load_dataset(args.train_data_path, tokenizer, args, vocabulary=vocabulary)
    check_rows(train_rows.counts, args)
    eval_rows = None
    if args.eval_data_path:
        eval_rows = load_dataset(args.eval_data_path, tokenizer, args, name="eval", vocabulary=vocabulary)
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
    with utils.naming_full_disk(args.output_dir):
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.check_finite()
        trainer.save_model()
        if trainer.eval_dataset is not None:
            trainer.save_metrics("eval", trainer.evaluate())
        trainer.save_state()
        if args.lora_merge and trainer.is_world_process_zero():
            merge_lora(args)
        trainer.accelerator.wait_for_everyone()
        if args.should_save:
            shutil.rmtree(args.derived_folder)
        trainer.save_metrics("train", result.metrics)


def leave() -> None:
    """End the process group, and with gloo the process.

    DeepSpeed keeps gloo groups alive. Their threads can abort a process while its interpreter is torn down, after
    everything is written.
    """
    if not torch.distributed.is_initialized():
        return
    backend = torch.distributed.get_backend()
    torch.distributed.destroy_process_group()
    if backend == "gloo":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main(argv: list[str] | None = None) -> None:
    utils.set_up_logging()
    argv = sys.argv[1:] if argv is None else argv
    if trainer := utils.run_program(lambda: set_up(argv)):
        utils.run_program(lambda: run(trainer))
    leave()


if __name__ == "__main__":
    main()
