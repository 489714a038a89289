"""Train a model by SFT, by imitation (SFTwithKL) or by self-play (OfflinePO).

    torchrun --nproc_per_node=8 train.py --train_method OfflinePO --model_name_or_path M --ref_model_name_or_path M \
        --train_data_path rows.json --output_dir DIR --deepspeed configs/default_offload_opt_param.json --bf16 True

Started again, the same command continues from the last complete checkpoint. If the run is finished, it says so.
"""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import utils  # isort: skip  (first: it says in one line what to do where packages are missing)
import torch
import transformers
from huggingface_hub import ModelCardData, metadata_load
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed
from yaml import YAMLError

import dataloaders
import trainers
from arguments import LORA_ARGUMENTS, METHOD_ARGUMENTS, REFERENCE_NAME, SPAGArguments, parse_arguments
from dataloaders import RowCounts, RowDataset, SPAGCollator, load_rows
from trainers import TRAIN_METHODS, SPAGTrainer, checkpoints, is_complete
from utils import TOKENIZER_FILES, UserError

SETTINGS, FINISHED = "settings.json", "train_results.json"  # of a run, in OUTPUT_DIR
RESULTS = [FINISHED, "*.safetensors", "checkpoint-*"]
TAG = "spag"  # of model cards
logger = logging.getLogger(__name__)


# Checkpoints.


def check_named_checkpoint(args: SPAGArguments) -> None:
    """Raise UserError if this start needs the checkpoint given by --resume_from_checkpoint, and it is of no use."""
    named, folder = args.resume_from_checkpoint, Path(args.output_dir)
    if not named or (folder / FINISHED).is_file() or any(map(is_complete, checkpoints(folder))):
        return
    if not is_complete(named):
        raise UserError(f"--resume_from_checkpoint {named}: not a complete checkpoint folder")
    record = Path(named).absolute().with_name(SETTINGS)
    try:
        different = utils.differences(utils.read_json(record)["settings"], args.run_settings)
    except (OSError, UserError, KeyError, TypeError, AttributeError):
        raise UserError(f"{record}: this file does not say how {named} was made") from None
    if different:
        why = "; ".join(different)
        raise UserError(f"{record}: made with other settings ({why}); start without --resume_from_checkpoint")


def choose_checkpoint(args: SPAGArguments) -> str | None:
    """The furthest complete checkpoint of OUTPUT_DIR; if it has none, the one given by --resume_from_checkpoint.

    Raises UserError if training cannot continue from it in this launch.
    """
    own, named = [*filter(is_complete, checkpoints(args.output_dir))], args.resume_from_checkpoint
    if not own and not named:
        return None
    chosen = own[-1] if own else Path(named)
    if args.deepspeed:
        check_parts(chosen)
    elif not any(chosen.glob("optimizer*")):  # the Trainer would go on with a new optimizer
        raise UserError(
            f"{chosen}: no optimizer.pt, so training cannot continue from it (it was saved with --deepspeed or with "
            "--save_only_model); delete it to begin anew"
        )
    return str(chosen)


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


# Rows.


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


def derived_folder(args: SPAGArguments) -> Path:
    """The folder of encoded rows with the reference's log-probabilities, until training ends."""
    return Path(args.output_dir) / "derived"


def derived_record(args: SPAGArguments) -> dict:
    """All that the files in `derived_folder` depend on."""
    sources = utils.file_digest([dataloaders.__file__, trainers.__file__])
    record = {"settings": args.run_settings, "deepspeed": args.deepspeed, "made_by": utils.made_by()}
    return json.loads(json.dumps(record | {"sources": sources}))


def load_dataset(args: SPAGArguments, tokenizer, paths: list[str], *, path: Path | None = None) -> RowDataset:
    """Read, check and encode rows. With `path` they are stored there, or read from there."""
    fingerprint = None if args.retokenize else utils.tokenizer_fingerprint(utils.model_folder(args.model_name_or_path))
    rows = load_rows(paths, tokenizer, path, drop_unscored=args.drop_unscored_rows, tokenizer_sha256=fingerprint)
    counted = [f"{number} {name}" for name, number in dataclasses.asdict(rows.counts).items()]
    logger.info("%s: %s", ", ".join(paths), ", ".join(counted))
    return rows


def load_datasets(args: SPAGArguments, tokenizer, vocabulary: int) -> tuple[RowDataset, RowDataset | None]:
    """The rows to train on, and those to evaluate on. Rank 0 encodes them; the other ranks read what it stored.

    Raises UserError for rows of which training would learn nothing, or that this model cannot read.
    """
    folder, now = derived_folder(args), derived_record(args)
    record = folder / "record.json"
    with args.main_process_first(local=args.save_on_each_node):
        if args.should_save and not (record.is_file() and utils.read_json(record) == now):
            shutil.rmtree(folder, ignore_errors=True)  # other settings, libraries or sources made it
        train_rows = load_dataset(args, tokenizer, args.train_data_path, path=folder / "train.arrow")
        eval_rows = None
        if args.eval_data_path:
            eval_rows = load_dataset(args, tokenizer, args.eval_data_path, path=folder / "eval.arrow")
        if args.should_save:
            utils.write_json(record, now)
    check_rows(train_rows.counts, args)
    every = [rows for rows in (train_rows, eval_rows) if rows]
    names = sorted({name for rows in every for name in rows.role_names})
    for rows in every:
        rows.check_vocabulary(vocabulary, tokenizer)
        rows.number_roles(names)
    return train_rows, eval_rows


def show_examples(args: SPAGArguments) -> None:
    """Print the first rows as the model sees them: [[masked text]], then the target."""
    tokenizer = load_tokenizer(args)
    rows = load_dataset(args, tokenizer, args.train_data_path)
    for row in rows.table.select(rows.kept[: args.show_examples]) if utils.rank() == 0 else ():
        ids, masked = row["input_ids"], row["masked_length"]
        print(f"--- {row['where']}: weight {row['weight']:.4g}, reward {row['reward']:.4g}, SFT {row['is_sft']}")
        print(f"[[{tokenizer.decode(ids[:masked])}]]{tokenizer.decode(ids[masked:])}")


# Models.


def from_pretrained(auto, name: str, args: SPAGArguments, **options):
    """Call `from_pretrained` of an Auto class of transformers. Raises UserError of one line if that fails."""
    repository, _ = utils.split_revision(name)
    commit = utils.hub_commit(utils.model_folder(name))  # the one of the record, though the hub may change
    try:
        return auto.from_pretrained(
            repository, revision=commit or "main", trust_remote_code=args.trust_remote_code, **options
        )
    except Exception as error:  # broken files and the model's own code raise errors of all kinds
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0]}"
        if "trust_remote_code" in str(error):
            why = "it brings its own code; --trust_remote_code True runs it"
        raise UserError(f"{name}: {auto.__name__.removeprefix('Auto')} cannot be loaded ({why})") from error


def load_tokenizer(args: SPAGArguments):
    """Load the model's tokenizer and set its maximum length, padding side and truncation side."""
    options = {"padding_side": args.padding_side, "truncation_side": args.truncation_side}
    options["model_max_length"] = args.max_length
    tokenizer = from_pretrained(AutoTokenizer, args.model_name_or_path, args, **options)
    dataloaders.ensure_pad_token(tokenizer)
    return tokenizer


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
    transformers.utils.logging.disable_progress_bar()  # "Loading weights"; models from the hub are here already
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
    folder = Path(args.output_dir) / "merged"
    adapted.merge_and_unload().save_pretrained(folder)
    load_tokenizer(args).save_pretrained(folder)
    write_model_card(args, folder)


# The model card.


def write_model_card(args: SPAGArguments, folder: Path) -> None:
    """Write README.md: the hub's metadata, and how the model was made."""
    settings = args.run_settings
    made = TRAIN_METHODS[args.train_method].card.format(games=" and ".join(games_of_rows(args.train_data_path)))
    length = {"steps": args.max_steps} if args.max_steps > 0 else {"epochs": args.num_train_epochs}
    taken = METHOD_ARGUMENTS[args.train_method] | (LORA_ARGUMENTS if args.lora_rank else {}) | {"lora_rank": None}
    lines = {"method": args.train_method, "base": settings["model_name_or_path"]}
    lines |= {"reference": settings.get(REFERENCE_NAME), "rows": settings["train_data_path"]}
    lines |= length | {"learning_rate": args.learning_rate, "rows_per_step": settings["rows_per_step"]}
    lines |= {name: settings[name] for name in taken if name in settings and name != REFERENCE_NAME}
    lines |= {"commit of SPAG": utils.made_by().get("spag")}
    table = "\n".join(f"| {name} | {shown(value)} |" for name, value in lines.items() if value is not None)
    text = f"---\n{card_metadata(args, folder).to_yaml()}\n---\n\n# {Path(args.output_dir).resolve().name}\n\n"
    with utils.replacing(folder / "README.md") as file:
        file.write(f"{text}{made}\n\n| | |\n|---|---|\n{table}\n")


def shown(setting) -> str:
    """A setting in the table of the model card; of files and models the path, and the commit or the digest."""
    if not isinstance(setting, dict):
        return str(setting)
    version = f"commit {setting['commit']}" if "commit" in setting else f"sha256 {setting['sha256']}"
    return f"{setting['path']} ({version})"


def card_metadata(args: SPAGArguments, folder: Path) -> ModelCardData:
    """The metadata of a model card. Licence and base model are those that the base model's own card names."""
    base = utils.model_folder(args.model_name_or_path)
    known = {"license": utils.read_json(base / "config.json").get("license")}
    try:
        known |= metadata_load(base / "README.md") or {}
    except (OSError, ValueError, YAMLError):  # no card, or not one of the hub
        pass
    licence = {name: known[name] for name in ("license", "license_name", "license_link") if known.get(name)}
    base_model = None
    if utils.hub_commit(base):
        base_model, _ = utils.split_revision(args.model_name_or_path)
    elif isinstance(known.get("tags"), list) and TAG in known["tags"]:  # a model that was trained here: its base model
        base_model = known.get("base_model")
    return ModelCardData(
        base_model=base_model,
        library_name="peft" if (folder / "adapter_config.json").is_file() else "transformers",
        pipeline_tag="text-generation",
        tags=[TAG, args.train_method],
        **licence,
    )


def games_of_rows(paths: list[str]) -> list[str]:
    """The games of these rows, as the records beside the files say; Taboo if there is no record."""
    names = set()
    for record in map(dataloaders.rows_record, paths):
        with contextlib.suppress(KeyError, TypeError):  # other files of rows name no game
            names.add(str(record["settings"]["game"]["path"]))
    return sorted("Adversarial Taboo" if name == "taboo" else name for name in names or {"taboo"})


# A run.


def set_up(args: SPAGArguments) -> SPAGTrainer:
    """Read the data and the models, in this order.

    Raises UserError and OSError for bad input; errors of data and models show before weights are loaded.
    """
    set_seed(args.seed)
    check_device(args)
    tokenizer = load_tokenizer(args)
    vocabulary = check_models(args, tokenizer)
    train_rows, eval_rows = load_datasets(args, tokenizer, vocabulary)
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
    """Train, save and evaluate; train_results.json is the last file of a finished run."""
    args = trainer.args
    with utils.naming_full_disk(args.output_dir):
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.check_finite()
        trainer.save_model(_internal_call=True)  # without an upload to the hub, which comes last
        if trainer.eval_dataset is not None:
            trainer.save_metrics("eval", trainer.evaluate())
        trainer.save_state()
        if trainer.is_world_process_zero():
            write_model_card(args, Path(args.output_dir))
            if args.lora_merge:
                merge_lora(args)
        trainer.accelerator.wait_for_everyone()
        if args.should_save:
            shutil.rmtree(derived_folder(args))
        trainer.save_metrics("train", result.metrics)


def push(trainer: SPAGTrainer) -> None:
    """Upload the finished model to the hub. Raises UserError if that fails; the run stays finished."""
    try:
        trainer.push_to_hub()
    except OSError as error:  # the hub's errors too
        raise UserError(
            f"{trainer.args.output_dir}: the model is saved, but it could not be uploaded ({error}); "
            f"hf upload {trainer.hub_model_id} {trainer.args.output_dir} uploads it"
        ) from error


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


def train(argv: list[str]) -> None:
    """Do what the command line says, unless an earlier start has finished it."""
    args = parse_arguments(argv)
    if args.show_examples:
        return show_examples(args)
    check_named_checkpoint(args)
    trainer = None
    with utils.stage(Path(args.output_dir, SETTINGS), args.run_settings, results=RESULTS) as todo:
        if todo:
            args.resume_from_checkpoint = utils.from_rank_0(lambda: choose_checkpoint(args))
            trainer = set_up(args)
            run(trainer)
            todo.notes["arguments"] = args.to_dict()
    if trainer and args.push_to_hub:
        push(trainer)


def main(argv: list[str] | None = None) -> None:
    utils.set_up_logging()
    utils.run_program(lambda: train(sys.argv[1:] if argv is None else argv))
    leave()


if __name__ == "__main__":
    main()
