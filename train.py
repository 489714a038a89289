"""Train a model by SFT, by imitation (SFTwithKL) or by self-play (OfflinePO).

    torchrun --nproc_per_node=8 train.py --train_method OfflinePO --model_name_or_path M --ref_model_name_or_path M \
        --train_data_path rows.json --output_dir DIR --deepspeed configs/default_offload_opt_param.json --bf16 True

The same command again continues from the last complete checkpoint, or says that all is there.
"""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import math
import os
import shutil
import sys
from pathlib import Path

import utils  # isort: skip  (first: it says in one line what to do where packages are missing)
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

import dataloaders
import trainers
from arguments import SPAGArguments, parse_arguments
from dataloaders import IGNORE_INDEX, RowCounts, RowDataset, SPAGCollator, load_rows
from trainers import TRAIN_METHODS, SPAGTrainer, checkpoints, is_complete
from utils import TOKENIZER_FILES, UserError

MOST_CUT = 0.5  # share of rows that may lose nearly all of their tokens
MOST_ON_CPU = 100e6  # parameters of a model that trains on a CPU without --use_cpu True
LEAST_MERGED = 0.9  # share of the adapters' update that merging should keep
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
            remedy="other settings, more epochs too, are another run: choose another --output_dir, or delete this "
            f"run's results in {self.folder}: {made}",
        )

    def claim(self) -> bool:
        """Lock the run, choose the checkpoint to continue from, write settings.json; False if the run is finished.

        Rank 0 decides for all. Raises UserError, with nothing written, for a run with other settings.
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
            "sources": utils.file_digest([dataloaders.__file__, trainers.__file__]),
        }
        try:
            before = utils.read_json(self.settings.path)
            same = not utils.differences(before["settings"], same_run)
            same = same and all(before[name] == made_by[name] for name in made_by)
        except (OSError, UserError, KeyError, TypeError, AttributeError):  # none, or not the settings of a run
            same = False
        if not same and derived.exists():
            shutil.rmtree(derived)
        self.settings.write(same_run, arguments=self.args.to_dict(), **made_by)

    def _results(self) -> list[Path]:
        return [*checkpoints(self.folder), *sorted(self.folder.glob("*.safetensors")), *self.folder.glob(FINISHED)]

    def _claim(self) -> tuple[bool, str | None]:
        """Whether the run is finished, and the checkpoint to continue from."""
        finished, _ = self._look()
        if not finished:
            utils.lock(self.settings.lock_path)
        return self._look()  # another launch may have ended in between

    def _look(self) -> tuple[bool, str | None]:
        same_run, finished = self.args.same_run, (self.folder / FINISHED).is_file()
        if finished and self.settings.path.is_file():  # a loop that moves to other GPUs may now train in another dtype
            same_run = same_run | {"weights": self.settings.read().get("weights")}
        self.settings.check(same_run)
        checkpoint = None if finished else self._furthest_checkpoint()
        if checkpoint:
            self._check_optimizer(Path(checkpoint))
        return finished, checkpoint

    def _furthest_checkpoint(self) -> str | None:
        """The furthest complete checkpoint: ours, or the one given by --resume_from_checkpoint."""
        own = next((str(path) for path in reversed(checkpoints(self.folder)) if is_complete(path)), None)
        if not own and checkpoints(self.folder):
            logger.warning("%s: none of its checkpoints is complete; starting from the beginning", self.folder)
        named = self.args.resume_from_checkpoint
        if not named or own and os.path.realpath(Path(named).parent) == os.path.realpath(self.folder):
            return own
        if not is_complete(named):
            raise UserError(f"--resume_from_checkpoint {named}: not a complete checkpoint folder")
        path = Path(named).absolute().with_name(self.settings.path.name)
        remedy = "start without --resume_from_checkpoint"
        utils.RunSettings(path, results=lambda: Path(named), remedy=remedy).check(self.args.same_run)
        steps = {each: utils.read_json(f"{each}/trainer_state.json")["global_step"] for each in (named, own) if each}
        return max(steps, key=steps.get)

    def _check_optimizer(self, checkpoint: Path) -> None:
        """Raise UserError if the checkpoint does not hold the optimizer's state in the form that this launch reads."""
        plain, by_deepspeed = (any(checkpoint.glob(pattern)) for pattern in ("optimizer*", "global_step*"))
        parts = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))  # ZeRO writes one for each rank
        if not plain and not by_deepspeed:
            why = "saved without its optimizer (--save_only_model), so training cannot continue from it"
        elif by_deepspeed != bool(self.args.deepspeed):
            why = f"saved {'with' if by_deepspeed else 'without'} --deepspeed; continue it in the same way"
        elif parts not in (0, self.args.world_size) and not self.args.save_on_each_node:
            why = f"ZeRO saved it for {parts} processes, here are {self.args.world_size}; continue with {parts}"
        else:
            return
        raise UserError(f"{checkpoint}: {why}; {self.settings.remedy}")


def check_rows(counts: RowCounts, args: SPAGArguments) -> None:
    """Raise UserError for rows from which training would learn nothing; warn where some rows are cut that far."""
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
    share = counts.mostly_cut / (counts.rows + counts.dropped)
    if share > MOST_CUT and not args.allow_cuts:
        raise UserError(
            f"{files}: {share:.0%} of the rows lose more than nine tenths of their tokens, or of their target's, at "
            f"--max_length {args.max_length}; use a larger one, or --allow_cuts True"
        )
    if counts.mostly_cut:
        message = "%s: %d rows (%.3g%%) lose more than nine tenths of their tokens, or of their target's"
        utils.warn_on_rank_0(message, files, counts.mostly_cut, 100 * share)


def from_pretrained(auto, name: str, args: SPAGArguments, **settings):
    """Load a part of a model by `auto`, one of transformers' Auto classes; UserError of one line if that fails."""
    try:
        return auto.from_pretrained(name, trust_remote_code=args.trust_remote_code, **settings)
    except Exception as error:  # broken files and the model's own code raise errors of all kinds
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0]}"
        if "trust_remote_code" in str(error):
            why = "it brings its own code; --trust_remote_code True runs it"
        elif args.trust_remote_code and not isinstance(error, OSError):
            why += f"; the model's own code may be for another transformers than {transformers.__version__}"
        raise UserError(f"{name}: {auto.__name__.removeprefix('Auto')} cannot be loaded ({why})") from error


def load_tokenizer(args: SPAGArguments):
    """The model's tokenizer with this run's length and sides."""
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
    path = args.derived_folder and args.derived_folder / f"{name}_rows.arrow"
    if path:
        if utils.rank() > 0 and args.should_save:  # --save_on_each_node: every machine has a folder of its own
            dataloaders.write_encoded(paths, tokenizer, path)
        utils.from_rank_0(lambda: dataloaders.write_encoded(paths, tokenizer, path))
        utils.await_inputs([str(path)])
    rows, counts = load_rows(paths, tokenizer, path, drop_unscored=args.drop_unscored_rows)
    largest = rows.with_format("numpy")["largest_id"][:]
    if vocabulary and largest.max() >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(int(largest.max()))
        where = rows[int(largest.argmax())]["where"]
        raise UserError(f"{where}: the model's vocabulary of {vocabulary} tokens does not hold the token {token!r}")
    counted = [f"{number} {name}" for name, number in dataclasses.asdict(counts).items()]
    logger.info("%s: %s", ", ".join(paths), ", ".join(counted))
    if args.show_examples:
        rows = rows.select(range(min(args.show_examples, len(rows))))
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
            f"model and reference have different vocabularies: {sizes}; their log-probabilities differ too"
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
    if not args.no_gpu_found:
        return
    parameters = 0
    for path in utils.model_folder(args.model_name_or_path).glob("model*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                parameters += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
        except SafetensorError:
            return  # load_model will name the broken file
    if parameters >= MOST_ON_CPU:
        raise UserError(
            f"PyTorch {torch.__version__} finds no GPU for {args.model_name_or_path} with its {parameters / 1e9:.1f} "
            "billion parameters: use a machine with a GPU and a PyTorch built for it, or say --use_cpu True"
        )


def load_model(name_or_path: str, args: SPAGArguments) -> PreTrainedModel:
    """A causal LM from safetensors, in `args.weights_dtype`; of a multimodal model only the text part is trained."""
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
        except ValueError:  # such as temperature without do_sample, in copies of Llama-2: saving would be refused
            model.generation_config.do_sample = True
    if model.config.get_text_config() is not model.config:
        parts = filter(None, (model.get_decoder(), model.get_output_embeddings()))
        text = {id(weights) for part in parts for weights in part.parameters()}
        for weights in model.parameters():  # DDP waits for gradients of all weights that train
            weights.requires_grad_(id(weights) in text)
    return model


def add_lora(model: PreTrainedModel, args: SPAGArguments):
    """The frozen model with new adapters, in fp32, or in the model's dtype under DeepSpeed (it keeps fp32 copies)."""
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

    deepspeed_integration.unset_hf_deepspeed_config()  # load the whole model, not one partitioned over ranks
    adapted = PeftModel.from_pretrained(load_model(args.model_name_or_path, args), args.output_dir)
    share, folder = share_merged(adapted), os.path.join(args.output_dir, "merged")
    message = f"{folder}: {share:.0%} of the adapters' update is left after rounding to {adapted.dtype}"
    logger.info(message)
    if share < LEAST_MERGED:
        logger.warning("%s; train with a larger --learning_rate (1e-4 is usual for LoRA)", message)
    adapted.merge_and_unload().save_pretrained(folder)
    load_tokenizer(args).save_pretrained(folder)


@torch.no_grad()
def share_merged(adapted) -> float:
    """Share of the adapters' update that is left in the merged weights: its projection on the exact update."""
    left = whole = 0.0
    for layer in adapted.modules():
        if hasattr(layer, "get_delta_weight") and getattr(layer, "active_adapters", None):
            weight, update = layer.get_base_layer().weight, layer.get_delta_weight(layer.active_adapters[0]).float()
            merged = (weight + update.to(weight.dtype)).float() - weight.float()
            left, whole = left + (merged * update).sum().item(), whole + update.square().sum().item()
    return left / whole if whole else 1.0


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
    """Read the settings, the data and the models, in this order; None if the run is finished.

    Raises UserError and OSError for bad input; errors of data and models show before weights are loaded.
    """
    args = parse_arguments(argv)
    output = None if args.show_examples else Output(args)
    if output and not output.claim():
        return None
    set_seed(args.seed)
    check_device(args)
    tokenizer = load_tokenizer(args)
    vocabulary = check_models(args, tokenizer)
    if output and args.should_save:
        output.begin()
    train_rows = load_dataset(args.train_data_path, tokenizer, args, vocabulary=vocabulary)
    if output:
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
    if args.show_examples:
        return show_examples(trainer)
    with utils.naming_full_disk(args.output_dir):
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
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
    if trainer.is_world_process_zero():
        print(describe_result(trainer))


def describe_result(trainer: SPAGTrainer) -> str:
    """The result of a training in a line, and a line for each checkpoint that stays with its optimizer's states."""
    args, state, counts = trainer.args, trainer.state, trainer.train_dataset.counts
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    part = -(-len(losses) // 10)
    text = f"{args.output_dir}: {args.train_method} of {counts.rows} rows ({counts.sft_rows} of them SFT), "
    text += f"{state.global_step} steps"
    if losses:
        first, last = (sum(some) / part for some in (losses[:part], losses[-part:]))
        text += f", loss {first:.4g} -> {last:.4g} (first and last tenth of the steps)"
    for folder in checkpoints(args.output_dir):
        size = sum(trainers.sizes(folder).values())
        text += f"\n{folder}: {size / 1e9:.1f} GB of model and optimizer states that this run no longer needs"
    return text


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
    utils.end_with_launcher()
    utils.set_up_logging()
    argv = sys.argv[1:] if argv is None else argv
    if trainer := utils.run_program(lambda: set_up(argv)):
        utils.run_program(lambda: run(trainer))
    leave()


if __name__ == "__main__":
    main()
