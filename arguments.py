"""The settings of train.py.

They are transformers.TrainingArguments', those of the methods, and those below. Published commands use two flags of
older transformers, which keep their meaning: --evaluation_strategy and --warmup_ratio.
"""

import os
import sys
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, Namespace
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch
from transformers import HfArgumentParser, TrainingArguments, get_scheduler
from transformers.hf_argparser import string_to_bool
from transformers.integrations import get_reporting_integration_callbacks

from tools.common.errors import UserError, require, user_errors
from tools.common.files import read_json
from tools.common.flags import with_values
from tools.common.models import model_setting
from tools.common.ranks import check_gpus, warn_of_idle_gpu, world_size
from tools.common.records import rows_setting
from trainers import REFERENCE_NAME, TRAIN_METHODS, Flag

# The arguments of each method with their defaults. A method refuses the arguments of the others.
METHOD_ARGUMENTS = {name: method.defaults() for name, method in TRAIN_METHODS.items()}
LORA_ARGUMENTS = {"lora_alpha": 16.0, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"], "lora_merge": False}
# The flags that change the results, beside those of the method, data, models and the rows of a step. The ZeRO stage,
# the machine, logging and saving do not. Nor does the number of processes, except that several repeat some rows in the
# last step of an epoch. (With --load_best_model_at_end the flags of evaluation and saving, such as --eval_steps and
# --greater_is_better, decide which checkpoint becomes the model, but they are not compared either.)
COMPARED = (
    "train_method",
    "lora_rank",
    *LORA_ARGUMENTS,
    "max_length",
    "padding_side",
    "truncation_side",
    "optim",
    "optim_args",
    "optim_target_modules",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "neftune_noise_alpha",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "max_steps",
    "num_train_epochs",
    "train_sampling_strategy",
    "dataloader_drop_last",
    "seed",
    "data_seed",
    "bf16",
    "fp16",
    "tf32",
    "attn_implementation",
    "load_best_model_at_end",
    "metric_for_best_model",
)

PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # set by accelerate launch; the Trainer would obey it
ZERO_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "muon")  # that DeepSpeed runs under ZeRO without UNTESTED
UNTESTED = "zero_allow_untested_optimizer"
GATHER = "stage3_gather_16bit_weights_on_model_save"  # of DeepSpeed, false by default


def _help(text: str, *, default=None, **metadata):
    return field(default=default, metadata={"help": text, **metadata})


def _as_field(name: str, flag: Flag) -> tuple:
    """A method's flag as a field of a dataclass. None means: the method's default."""
    metadata = {"choices": flag.choices} if flag.choices else {}
    return name, type(flag.default) | None, _help(flag.help, **metadata)


_FLAGS_OF_METHODS = {name: flag for method in TRAIN_METHODS.values() for name, flag in method.flags.items()}
MethodArguments = make_dataclass(
    "MethodArguments",
    [_as_field(name, flag) for name, flag in _FLAGS_OF_METHODS.items()],
    bases=(TrainingArguments,),
    kw_only=True,
)


@dataclass(kw_only=True)
class SPAGArguments(MethodArguments):
    """The settings of one training run. Raises UserError for settings that contradict each other."""

    train_method: str = _help(
        " ".join(f"{name}: {method.__doc__}" for name, method in TRAIN_METHODS.items()),
        default=MISSING,
        choices=[*TRAIN_METHODS],
    )

    model_name_or_path: str = _help("Folder or hub name of the model to train.", default=MISSING)
    ref_model_name_or_path: str | None = _help("Folder or hub name of the frozen reference model.")
    attn_implementation: str | None = _help("sdpa, eager, flash_attention_2, ...; default: transformers chooses.")
    trust_remote_code: bool = _help("Run model code that comes with the weights (Baichuan2 needs it).", default=False)
    lora_rank: int | None = _help("Train LoRA adapters of this rank; the reference is the model without them.")
    lora_alpha: float | None = _help("LoRA scale, divided by the rank.")
    lora_dropout: float | None = _help("Dropout before the adapters.")
    lora_target_modules: list[str] | None = _help("Names of the layers that get adapters.")
    lora_merge: bool | None = _help("Also write the model with the adapters merged into it, to OUTPUT_DIR/merged.")

    output_dir: str = _help("Folder for the trained model, checkpoints and the run's settings.", default=MISSING)
    train_data_path: list[str] = _help(
        "Rows: JSON, JSONL, .jsonl.gz and Parquet files, or OWNER/NAME of the hub; data/README.md has the format.",
        default=MISSING,
    )
    eval_data_path: list[str] | None = _help("Rows to evaluate with the same loss, by --eval_strategy and at the end.")
    max_length: int = _help("Maximum number of tokens in a row.", default=2048)
    allow_no_game_rows: bool | None = _help("Train although there are only SFT rows.")
    allow_negative_rewards: bool = _help(
        "Train rows with negative rewards although the method imitates them, or has no --detach_kl True.",
        default=False,
    )
    # Right is the default because causal attention then needs no mask.
    padding_side: str = _help("Side on which shorter rows are padded.", default="right", choices=["left", "right"])
    # Left is the default because the target is at the end.
    truncation_side: str = _help("Side from which longer rows are cut.", default="left", choices=["left", "right"])
    logging_nan_inf_filter: bool = _help("Log the mean of earlier losses in place of NaN or infinity.", default=False)
    warmup_ratio: float | None = _help("Share of the steps used for warm-up; ignored if --warmup_steps is above 0.")

    def __post_init__(self):
        check_flags(self)
        _check_precision(self)
        if self.lora_rank and TRAIN_METHODS[self.train_method].reads_reference:
            self.ref_model_name_or_path = self.model_name_or_path
        if self.warmup_ratio is not None:  # in transformers 5 --warmup_steps below 1 are a share
            self.warmup_steps = self.warmup_steps or self.warmup_ratio
            self.warmup_ratio = None
        if self.hub_token:  # training_args.bin would hold it; huggingface_hub reads the environment too
            os.environ["HF_TOKEN"] = self.hub_token
            self.hub_token = None
        # Nothing was tested on Apple's GPUs, where two processes would train without knowing of each other.
        if not self.use_cpu and not torch.cuda.is_available():
            warn_of_idle_gpu()
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available() or torch.backends.mps.is_available()
        if self.use_cpu:
            self.tf32 = None  # TensorFloat-32 is a format of GPUs
            self.dataloader_pin_memory = False
        self.remove_unused_columns = False  # the collator chooses the columns
        self.ddp_find_unused_parameters = bool(self.ddp_find_unused_parameters)  # None would mean True
        with user_errors("the Trainer's flags", ValueError, TypeError, ImportError, RuntimeError):
            super().__post_init__()
            _check_deepspeed_numbers(self)
            for callback in get_reporting_integration_callbacks(self.report_to):
                callback()  # looks for its package
            optimizer = torch.optim.SGD([torch.zeros(1)], self.learning_rate)
            get_scheduler(self.lr_scheduler_type, optimizer, 0, 1, self.lr_scheduler_kwargs)

    @property
    def weights_dtype(self) -> torch.dtype:
        """Half precision under DeepSpeed, which keeps fp32 copies, and for the frozen base of LoRA; otherwise fp32.

        Weights that train need fp32 somewhere: added to a bf16 weight, a step of 2e-6 is mostly lost in rounding.
        The model is also saved in this dtype: in fp32, twice as large, where all weights train without DeepSpeed.
        """
        half = torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32
        return half if self.deepspeed or self.lora_rank else torch.float32

    @property
    def loading(self) -> dict:
        """How policy, reference and the base of merged adapters are loaded."""
        return {
            "dtype": self.weights_dtype,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
        }

    @cached_property
    def run_settings(self) -> dict:
        """Everything that changes the results, as `stage` compares it between two starts.

        `rows_per_step` is the batch of an optimizer step: micro-batch x accumulation x processes. These three may change
        between two starts if their product stays, the micro-batch only under --loss_normalization step or SFT.
        """
        names = [*COMPARED, *METHOD_ARGUMENTS[self.train_method]]
        # An allow_ flag decides whether a training begins, and changes nothing in it.
        settings = {name: getattr(self, name) for name in names if not name.startswith("allow_")}
        settings["rows_per_step"] = self.train_batch_size * self.gradient_accumulation_steps * self.world_size
        if self.loss_normalization == "micro_batch":  # the loss is divided by its numbers of rows
            settings["per_device_train_batch_size"] = self.train_batch_size
        for name in ("train_data_path", "eval_data_path"):
            if paths := getattr(self, name):
                settings[name] = rows_setting(*paths)
        for name in ("model_name_or_path", REFERENCE_NAME):
            if model := getattr(self, name):
                settings[name] = model_setting(model)
        return settings

    @cached_property
    def _setup_devices(self) -> torch.device:
        """The device of this process. On a CPU it tells accelerate about DeepSpeed, which the Trainer does not."""
        if self.deepspeed and "LOCAL_RANK" not in os.environ:  # without torchrun, DeepSpeed would look for MPI
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port
        if not self.use_cpu and torch.cuda.is_available():
            check_gpus(torch.cuda.device_count())  # else NCCL or CUDA would end each process with a traceback
        device = super()._setup_devices
        self._n_gpu = min(self._n_gpu, 1)  # one process uses one GPU; torchrun starts one for each
        if self.deepspeed and self.use_cpu:
            import deepspeed
            from accelerate.utils import DistributedType

            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
            self.distributed_state.distributed_type = DistributedType.DEEPSPEED
        return device


DEFAULT_OPTIMIZER = SPAGArguments.__dataclass_fields__["optim"].default


def check_flags(args: SPAGArguments | Namespace) -> None:
    """Give flags that are None the defaults of the method. Raise UserError for flags that contradict each other.

    No device is asked, so that the loop can call this hours before the training, in a process that uses no GPU.
    """
    method_arguments = METHOD_ARGUMENTS[args.train_method] | (LORA_ARGUMENTS if args.lora_rank else {})
    _check_method(args, method_arguments)
    _check_steps(args)
    _check_run(args)
    for name, default in method_arguments.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    # Its micro-batches have different numbers of rows: averaged one by one, a row of a small one would count more.
    if args.train_sampling_strategy == "batch_rebalance" and args.loss_normalization == "micro_batch":
        raise UserError("--train_sampling_strategy batch_rebalance needs --loss_normalization step")


def _check_method(args: SPAGArguments | Namespace, method_arguments: dict) -> None:
    """Raise UserError for flags that the method does not use, and for a reference that is missing or not used."""
    unused = {"label_smoothing_factor", *LORA_ARGUMENTS}.union(*METHOD_ARGUMENTS.values()) - method_arguments.keys()
    for name in sorted(unused):
        if getattr(args, name):
            what = "without --lora_rank" if name in LORA_ARGUMENTS else f"by {args.train_method}"
            raise UserError(f"--{name} is not used {what}")
    model = args.model_name_or_path
    reference = args.ref_model_name_or_path
    if args.lora_rank and reference and os.path.realpath(reference) != os.path.realpath(model):
        raise UserError(f"--{REFERENCE_NAME}: with --lora_rank the reference is the model without its adapters")
    if REFERENCE_NAME in method_arguments and not reference and not args.lora_rank:
        raise UserError(f"--{REFERENCE_NAME} is missing: {args.train_method} compares with a reference model")


def _check_steps(args: SPAGArguments | Namespace) -> None:
    """Raise UserError for flags that make no step, or steps of another number of rows than they say."""
    has_steps = args.max_steps > 0
    if args.max_steps < 0:  # then the epochs count
        has_steps = args.num_train_epochs > 0
    if not has_steps:
        raise UserError("no step would be made: --max_steps and --num_train_epochs must be above 0")
    if args.auto_find_batch_size:  # it takes a smaller micro-batch, and leaves the accumulation
        remedy = "set --per_device_train_batch_size and --gradient_accumulation_steps"
        raise UserError(f"--auto_find_batch_size would make steps of fewer rows without a word; {remedy}")


def _check_run(args: SPAGArguments | Namespace) -> None:
    """Raise UserError for seeds out of range, flags that files or processes overrule, and missing packages."""
    # The settings and the reference's numbers that belong to a checkpoint lie in its --output_dir.
    if str(args.resume_from_checkpoint).lower() not in ("none", "true", "false"):
        raise UserError("--resume_from_checkpoint: training continues from the checkpoints of --output_dir only")
    with user_errors(f"--seed {args.seed}", ValueError):
        np.random.RandomState(args.seed)
    with user_errors(f"--data_seed {args.data_seed}", ValueError):
        torch.Generator().manual_seed(args.data_seed or 0)
    if args.deepspeed:
        _check_deepspeed_file(args)
    if args.lora_rank == 0:
        raise UserError("--lora_rank 0: a rank is at least 1; leave the flag out to train all weights")
    if args.train_sampling_strategy == "group_by_length" and world_size() > 1:
        # Each process shuffles by its own random state, which dropout moves: two of them saw 78 of 93 rows.
        raise UserError(
            "--train_sampling_strategy group_by_length: several processes would see some rows twice and others never; "
            "batch_rebalance groups rows by length too"
        )
    if args.eval_on_start and not args.eval_data_path:
        raise UserError("--eval_on_start evaluates rows of --eval_data_path, which is missing")
    optional = {"peft": args.lora_rank, "deepspeed": args.deepspeed, "liger-kernel": args.use_liger_kernel}
    for package, wanted in optional.items():
        if wanted:
            require(package.replace("-", "_"), package)


def _check_precision(args: SPAGArguments) -> None:
    """Raise UserError if `accelerate launch` asks for a precision that the flags do not say."""
    precision = "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
    asked = os.environ.get(PRECISION_VARIABLE, "no")
    if asked not in ("no", precision):
        remedy = f"give --{asked} True, or " if asked in ("bf16", "fp16") else ""
        raise UserError(
            f"{PRECISION_VARIABLE} is {asked}, which the flags do not say: {remedy}start without accelerate's "
            "mixed precision (accelerate launch --mixed_precision no)"
        )


def _check_deepspeed_file(args: SPAGArguments | Namespace) -> None:
    """Raise UserError for what would overrule a flag, and for a ZeRO-3 run that would save no weights.

    The content of the file is in no record, so a start does not notice a change of it.
    """
    path = args.deepspeed
    config = read_json(path)
    if "scheduler" in config:
        raise UserError(f"{path}: 'scheduler' would overrule --lr_scheduler_type; take it out")
    if "optimizer" in config and (args.optim != DEFAULT_OPTIMIZER or args.optim_args):
        remedy = "leave these flags out, or take another file, such as configs/zero3.json"
        raise UserError(f"{path}: 'optimizer' would overrule --optim and --optim_args; {remedy}")
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3 and not zero.get(GATHER):
        raise UserError(f"{path}: no weights would be saved; set {GATHER!r} in 'zero_optimization' to true")
    optimizer = config.get("optimizer", {}).get("type", "AdamW")
    if zero.get("stage") and optimizer.lower() not in ZERO_OPTIMIZERS and not config.get(UNTESTED):
        raise UserError(f"{path}: ZeRO does not know the optimizer {optimizer}; {UNTESTED!r} true tries it")


def _check_deepspeed_numbers(args: SPAGArguments) -> None:
    """Raise UserError for numbers in the DeepSpeed file that differ from the flags, as transformers found them."""
    if args.deepspeed and (different := args.hf_deepspeed_config.mismatches):
        lines = "; ".join(line.strip(" -") for line in different)
        raise UserError(f'{args.deepspeed}: {lines}; write "auto" there, which takes the flags\' values')


def parse_arguments(argv: list[str] | None = None) -> SPAGArguments:
    """Read the command line. UserError for flags that the method does not use; an unknown flag ends the program."""
    return SPAGArguments(**vars(build_parser().parse_args(argv)))


class Parser(HfArgumentParser):
    """transformers' parser, in which every boolean flag may stand alone, for True, as in all programs here."""

    def parse_known_args(self, args=None, namespace=None):
        booleans = [action for action in self._actions if action.type is string_to_bool]
        names = [name for action in booleans for name in action.option_strings]
        return super().parse_known_args(with_values(sys.argv[1:] if args is None else args, names), namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


class HelpFormatter(ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def build_parser() -> Parser:
    """The parser of train.py. Its help begins with the required flags, then this project's, then the Trainer's."""
    usage = "train.py --train_method METHOD --model_name_or_path M --train_data_path FILE ... --output_dir DIR ..."
    how = {"usage": usage, "description": __doc__, "formatter_class": HelpFormatter}
    parser = Parser(SPAGArguments, allow_abbrev=False, **how)
    parser.add_argument("--evaluation_strategy", dest="eval_strategy", default=SUPPRESS, help="--eval_strategy")
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for action in [action for action in parser._optionals._group_actions if action.dest != "help"]:
        group = groups[_group_of(action)]
        parser._optionals._group_actions.remove(action)
        group._group_actions.append(action)
        action.help = f"{action.help}{_default_of(action)}"
    return parser


def _default_of(action: Action) -> str:
    """What --help says of a default that depends on the method, or on --lora_rank."""
    by_method = {method: names[action.dest] for method, names in METHOD_ARGUMENTS.items() if action.dest in names}
    if action.dest == REFERENCE_NAME:
        return f" (needed by {' and '.join(by_method)}, unless there is a --lora_rank)"
    if by_method:
        defaults = ", ".join(f"{method} {default}" for method, default in by_method.items())
        return f" (default: {defaults})"
    if action.dest in LORA_ARGUMENTS:
        default = LORA_ARGUMENTS[action.dest]
        text = " ".join(default) if isinstance(default, list) else default
        return f" (default: {text})"
    return ""


REQUIRED = "required"
OF_METHODS = "of the methods that are named with the default; the other methods refuse the flag"
OF_LORA = "LoRA"
OF_THIS_PROJECT = "models, data and output"
OF_THE_TRAINER = "of transformers' Trainer"
GROUPS = (REQUIRED, OF_METHODS, OF_LORA, OF_THIS_PROJECT, OF_THE_TRAINER)


def _group_of(action: Action) -> str:
    """The title under which --help shows a flag."""
    if action.required:
        return REQUIRED
    if any(action.dest in names for names in METHOD_ARGUMENTS.values()):
        return OF_METHODS
    if action.dest.startswith("lora_"):
        return OF_LORA
    own = {each.name for each in fields(SPAGArguments)} - {each.name for each in fields(TrainingArguments)}
    return OF_THIS_PROJECT if action.dest in own else OF_THE_TRAINER
