"""The settings of train.py, and which of them each method uses.

transformers.TrainingArguments defines the Trainer's settings; the ones below are this project's. Published commands
use two flags of older transformers, which keep their meaning: --evaluation_strategy and --warmup_ratio.
"""

import argparse
import importlib.util
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.utils import is_torch_tf32_available

import utils

# The arguments of each method, with the paper's values as defaults. A method refuses the arguments of the others.
REFERENCE_NAME = "ref_model_name_or_path"
REFERENCE = {REFERENCE_NAME: None, "ref_model_revision": None, "loss_normalization": "micro_batch"}
METHOD_ARGUMENTS = {
    "SFT": {},
    "SFTwithKL": {"lm_kl_coeff": 0.1, **REFERENCE},
    "OfflinePO": {
        **{"lm_kl_coeff": 0.2, "lm_sft_coeff": 0.5, "clip_range": 0.2, "detach_kl": False, **REFERENCE},
        **{"allow_no_game_rows": False, "allow_negative_rewards": False},
    },
}
LORA_ARGUMENTS = {"lora_alpha": 16.0, "lora_dropout": 0.0, "lora_target_modules": None, "lora_merge": False}

# Flags that change the results; `run_settings` adds data, models and the rows of a step. The number of processes, the
# ZeRO stage, the machine, logging and saving do not change them.
COMPARED = (
    *("train_method", "lm_kl_coeff", "lm_sft_coeff", "clip_range", "detach_kl", "loss_normalization"),
    *("lora_rank", *LORA_ARGUMENTS),
    *("max_length", "padding_side", "truncation_side", "drop_unscored_rows", "retokenize"),
    *("optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "neftune_noise_alpha", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("max_steps", "num_train_epochs", "train_sampling_strategy", "dataloader_drop_last", "seed", "data_seed"),
    *("bf16", "fp16", "tf32", "attn_implementation", "load_best_model_at_end", "metric_for_best_model"),
)
AMPERE = 8  # CUDA capability from which GPUs compute in bf16
REPORTERS = ("tensorboard", "wandb")  # values of --report_to that are packages


def _help(text: str, **metadata):
    return field(default=metadata.pop("default", None), metadata={"help": text, **metadata})


@dataclass
class SPAGArguments(TrainingArguments):
    """Settings of one training run. Raises UserError that lists everything that is wrong with them."""

    # Method. None means: the method's default, from METHOD_ARGUMENTS.
    train_method: str | None = _help("SFT, SFTwithKL (imitation) or OfflinePO (self-play).")
    lm_kl_coeff: float | None = _help("beta: weight of the KL to the reference model.")
    lm_sft_coeff: float | None = _help("alpha: weight of the SFT rows' loss beside the game rows' (OfflinePO).")
    clip_range: float | None = _help("epsilon: the importance ratio is clipped to 1 - epsilon .. 1 + epsilon.")
    detach_kl: bool | None = _help("Keep the gradient out of the KL inside OfflinePO's advantage.")
    loss_normalization: str | None = _help(
        "Average the loss over the rows of a micro_batch (as released), or of an optimizer step over all ranks.",
        choices=["micro_batch", "step"],
    )

    # Models.
    model_name_or_path: str | None = _help("Folder or hub name of the model to train.")
    model_revision: str | None = _help("Commit, branch or tag of the model on the hub; or write NAME@REVISION.")
    ref_model_name_or_path: str | None = _help("Folder or hub name of the frozen reference model.")
    ref_model_revision: str | None = _help("The same for the reference model.")
    attn_implementation: str | None = _help("sdpa, eager, flash_attention_2, ...; default: transformers chooses.")
    trust_remote_code: bool = _help("Run model code that comes with the weights (Baichuan2 needs it).", default=False)
    lora_rank: int | None = _help("Train LoRA adapters of this rank; the reference is the model without them.")
    lora_alpha: float | None = _help("LoRA scale, divided by the rank.")
    lora_dropout: float | None = _help("Dropout before the adapters.")
    lora_target_modules: list[str] | None = _help("Layers that get adapters; default: peft's choice, else all-linear.")
    lora_merge: bool | None = _help("Also write the model with the adapters merged into it, to OUTPUT_DIR/merged.")

    # Data.
    train_data_path: list[str] | None = _help("JSON or JSONL files of rows; data/README.md has the format.")
    eval_data_path: list[str] | None = _help("Rows to evaluate with the same loss, by --eval_strategy and at the end.")
    max_length: int = _help("Maximum number of tokens in a row.", default=2048)
    allow_no_game_rows: bool | None = _help("Train OfflinePO although there are only SFT rows.")
    allow_negative_rewards: bool | None = _help("Train rows with negative rewards without --detach_kl True.")
    padding_side: str = _help(
        "Side on which the shorter rows of a batch are padded.", default="right", choices=["left", "right"]
    )
    truncation_side: str = _help("Side from which longer rows are cut.", default="left", choices=["left", "right"])
    retokenize: bool = _help("Tokenize the texts of rows that have `target_ids` of another tokenizer.", default=False)
    drop_unscored_rows: bool = _help("Leave out rows whose whole target is cut off by --max_length.", default=False)
    show_examples: int = _help("Print this many rows as the model sees them and stop; nothing is written.", default=0)
    hub_strategy: str = _help("With --push_to_hub the model is uploaded once, when training has ended.", default="end")
    logging_nan_inf_filter: bool = _help("Log the mean of earlier losses in place of NaN or infinity.", default=False)
    warmup_ratio: float | None = _help("Share of the steps used for warm-up; ignored if --warmup_steps is above 0.")

    def __post_init__(self):
        if problems := find_problems(self):
            raise utils.UserError("\n".join(problems))
        taken = METHOD_ARGUMENTS[self.train_method] | (LORA_ARGUMENTS if self.lora_rank else {})
        for name, default in taken.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        self._join_revisions()
        if self.lora_rank and REFERENCE_NAME in taken:
            self.ref_model_name_or_path = self.model_name_or_path
        if str(self.resume_from_checkpoint).lower() in ("true", "false"):
            self.resume_from_checkpoint = None  # every start continues from the last checkpoint anyway
        if self.warmup_ratio is not None:  # as in transformers 4
            self.warmup_steps = self.warmup_steps or self.warmup_ratio
            self.warmup_ratio = None
        self._settle_device()
        if self.show_examples:
            self.deepspeed = None  # no process group is needed
        self.remove_unused_columns = False  # the collator chooses the columns
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # every trainable parameter is used in every step
        try:
            super().__post_init__()
        except ValueError as error:  # transformers refuses the settings
            raise utils.UserError(str(error)) from error

    def _join_revisions(self) -> None:
        """Name models as NAME@REVISION, so that a name stands for one commit everywhere."""
        for model in ("model", "ref_model"):
            if revision := getattr(self, f"{model}_revision"):
                name = f"{model}_name_or_path"
                setattr(self, name, f"{getattr(self, name)}@{revision}")
                setattr(self, f"{model}_revision", None)

    def _settle_device(self) -> None:
        """Run on the CPU where there is no GPU, and drop what the device cannot do."""
        self.no_gpu_found = not self.use_cpu and not torch.accelerator.is_available()
        self.use_cpu = self.use_cpu or self.no_gpu_found
        if self.tf32 and (self.use_cpu or not is_torch_tf32_available()):
            utils.warn_on_rank_0("--tf32 is ignored: it needs an NVIDIA GPU since Ampere")
            self.tf32 = None
        if self.use_cpu:
            if self.fp16:
                utils.warn_on_rank_0("--fp16 is ignored on a CPU")
            self.fp16 = False
            self.dataloader_pin_memory = False

    @property
    def weights_dtype(self) -> torch.dtype:
        """Half precision under DeepSpeed, which keeps fp32 copies, and for the frozen base of LoRA; otherwise fp32."""
        half = torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32
        return half if self.deepspeed or self.lora_rank else torch.float32

    @cached_property
    def run_settings(self) -> dict:
        """Everything that changes the results, as `utils.stage` compares it between two starts."""
        settings = {name: getattr(getattr(self, name), "value", getattr(self, name)) for name in COMPARED}
        if self.max_steps > 0:
            settings["num_train_epochs"] = None
        settings["rows_per_step"] = self.train_batch_size * self.gradient_accumulation_steps * self.world_size
        if self.loss_normalization == "micro_batch":
            settings["per_device_train_batch_size"] = self.train_batch_size
        for name in ("train_data_path", "eval_data_path"):
            if paths := getattr(self, name):
                settings[name] = utils.files_setting(*paths)
        for name in ("model_name_or_path", REFERENCE_NAME):
            if model := getattr(self, name):
                settings[name] = utils.model_setting(model)
        return settings

    @cached_property
    def _setup_devices(self) -> torch.device:
        """The device of this process.

        On a CPU the Trainer does not tell accelerate about DeepSpeed; this method does, and DeepSpeed uses gloo.
        """
        if self.deepspeed and "LOCAL_RANK" not in os.environ:
            self._set_up_alone()
        device = super()._setup_devices
        self._n_gpu = min(self._n_gpu, 1)  # one process uses one GPU; torchrun starts one for each
        if self.deepspeed and self.use_cpu:
            import deepspeed
            from accelerate.utils import DistributedType

            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
            self.distributed_state.distributed_type = DistributedType.DEEPSPEED
        return device

    def _set_up_alone(self) -> None:
        """Set the variables that torchrun would set for one process; without them DeepSpeed looks for MPI."""
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # unused
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo" if self.use_cpu else None, store=store, rank=0, world_size=1)


def parse_arguments(argv: list[str]) -> SPAGArguments:
    """Read the command line.

    Raises UserError that lists all problems: unknown flags, missing files, arguments that the method does not use.
    """
    flag, new_flag = "--evaluation_strategy", "--eval_strategy"
    argv = [new_flag + word.removeprefix(flag) if word.split("=")[0] == flag else word for word in argv]
    parser = build_parser()
    try:
        namespace, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise utils.UserError(str(error)) from None
    problems = utils.unknown_words(unknown, parser)
    try:
        arguments = SPAGArguments(**vars(namespace))
    except utils.UserError as error:
        problems += str(error).split("\n")
    if problems:
        raise utils.UserError("\n".join(problems))
    return arguments


def build_parser() -> HfArgumentParser:
    """The parser of train.py. Its help shows the flags of this project first, then those of the Trainer."""
    usage = "train.py --train_method METHOD --model_name_or_path M --train_data_path FILE ... --output_dir DIR ..."
    options = {"allow_abbrev": False, "exit_on_error": False, "usage": usage, "description": __doc__}
    parser = HfArgumentParser(SPAGArguments, **options)
    ours, theirs = parser._optionals, parser.add_argument_group("flags of transformers' Trainer")
    ours.title = "flags of this project"
    names = {each.name for each in fields(TrainingArguments)}
    theirs._group_actions += [action for action in ours._group_actions if action.dest in names]
    ours._group_actions = [action for action in ours._group_actions if action.dest not in names]
    return parser


def find_problems(args) -> list[str]:
    """The problems of the settings that can be found before anything is loaded, one line each."""
    kinds = (_method_problems, _value_problems, _device_problems, _package_problems, _path_problems)
    return [*itertools.chain(*(problems(args) for problems in kinds))]


def _method_problems(args) -> Iterator[str]:
    if args.train_method not in METHOD_ARGUMENTS:
        given = "is missing" if args.train_method is None else f"{args.train_method} is unknown"
        yield f"--train_method {given}; it is one of {', '.join(METHOD_ARGUMENTS)}"
        return
    taken, reference = METHOD_ARGUMENTS[args.train_method], args.ref_model_name_or_path
    for name in sorted(set().union(*METHOD_ARGUMENTS.values()) - taken.keys()):
        if getattr(args, name) is not None:
            yield f"--{name} is not used by {args.train_method}"
    if args.lora_rank is None:
        yield from (f"--{name} needs --lora_rank" for name in LORA_ARGUMENTS if getattr(args, name) is not None)
        if REFERENCE_NAME in taken and reference is None:
            yield f"--{REFERENCE_NAME} is missing; {args.train_method} compares with a reference model"
    elif args.ref_model_revision or reference and not _same_path(reference, args.model_name_or_path):
        yield f"--{REFERENCE_NAME}: with --lora_rank the reference is the model without its adapters"
    per_step = args.loss_normalization == "step" or "loss_normalization" not in taken
    if args.train_sampling_strategy == "batch_rebalance" and not per_step:
        yield (
            "--train_sampling_strategy batch_rebalance distributes the rows of a step by length, which changes the "
            "averages over micro-batches; it needs --loss_normalization step"
        )
    if args.label_smoothing_factor:
        yield "--label_smoothing_factor is not used by any method"


def _value_problems(args) -> Iterator[str]:
    least = {"max_length": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 1, "lora_rank": 1}
    least |= {"per_device_eval_batch_size": 1, "show_examples": 0, "learning_rate": 0, "warmup_steps": 0}
    least |= {"lm_kl_coeff": 0, "lm_sft_coeff": 0, "clip_range": 0}
    yield from utils.too_small(args, **least)
    if args.num_train_epochs <= 0 and args.max_steps <= 0:
        yield f"--num_train_epochs must be above 0, got {args.num_train_epochs}"
    if args.torch_compile:
        yield "--torch_compile: every batch would be compiled again, because the number of logits changes"
    if args.hub_strategy != "end":
        yield f"--hub_strategy {args.hub_strategy}: a model is uploaded once, when training has ended"
    if args.warmup_ratio is not None and not 0 <= args.warmup_ratio < 1:
        yield f"--warmup_ratio {args.warmup_ratio}: expected a share of the steps, at least 0 and below 1"


def _device_problems(args) -> Iterator[str]:
    if args.bf16 and not args.use_cpu and torch.cuda.is_available() and torch.version.hip is None:
        if torch.cuda.get_device_capability()[0] < AMPERE:
            yield f"--bf16 True: {torch.cuda.get_device_name()} cannot compute in bf16; use --fp16 True"


def _package_problems(args) -> Iterator[str]:
    reporters = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    packages = {name: f"--report_to {name}" for name in reporters if name in REPORTERS}
    packages |= {"peft": "--lora_rank"} if args.lora_rank else {}
    packages |= {"deepspeed": "--deepspeed"} if args.deepspeed else {}
    for package, flag in packages.items():
        if importlib.util.find_spec(package) is None:
            yield f"{flag} needs the package {package}: pip install {package}"


def _path_problems(args) -> Iterator[str]:
    for name in ("output_dir", "model_name_or_path", "train_data_path"):
        if not getattr(args, name):
            yield f"--{name} is missing"
    for path in [*(args.train_data_path or []), *(args.eval_data_path or [])]:
        if not os.path.isfile(path):
            yield f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}"
    if getattr(args.eval_strategy, "value", args.eval_strategy) != "no" and not args.eval_data_path:
        yield "--eval_strategy needs --eval_data_path"
    if isinstance(args.deepspeed, str):
        try:
            if "scheduler" in utils.read_json(args.deepspeed):
                yield f"--deepspeed {args.deepspeed}: its 'scheduler' would overrule --lr_scheduler_type; take it out"
        except (OSError, utils.UserError) as error:
            yield f"--deepspeed {error}"
    if any(_same_path(args.output_dir, model) for model in (args.model_name_or_path, args.ref_model_name_or_path)):
        yield f"--output_dir {args.output_dir} is the model's own folder; it would be overwritten"


def _same_path(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)
