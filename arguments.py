"""The settings of train.py.

They are those of transformers.TrainingArguments, of the methods, and those below. Two flags of older transformers that
published commands use keep their meaning: --evaluation_strategy and --warmup_ratio.
"""

import copy
import math
import os
import warnings
from argparse import SUPPRESS, Action, HelpFormatter, Namespace
from dataclasses import MISSING, Field, dataclass, field, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import huggingface_hub
import torch
from accelerate import FullyShardedDataParallelPlugin
from transformers import HfArgumentParser, Trainer, TrainingArguments, get_scheduler
from transformers.hf_argparser import string_to_bool
from transformers.integrations import get_reporting_integration_callbacks

from tools.common import adapters
from tools.common.errors import UserError, require, user_errors
from tools.common.files import read_json
from tools.common.flags import check_values, default_of, defaults, flag, flag_fields, is_compared
from tools.common.models import model_setting
from tools.common.ranks import check_gpus, warn_of_idle_gpu
from tools.common.records import rows_setting
from trainers import MICRO_BATCH, REFERENCE_NAME, TRAIN_METHODS

# By method: its arguments with their defaults. A method refuses arguments that only others use.
METHOD_ARGUMENTS = {name: method.defaults() for name, method in TRAIN_METHODS.items()}
LORA_ARGUMENTS = {name: default_of(each) for name, each in adapters.FLAGS.items()}
# The Trainer's flags that a record compares. Flags of evaluation and saving, such as --eval_steps, are left out,
# although with --load_best_model_at_end they affect which checkpoint becomes the model.
COMPARED = {
    "optim",
    "optim_args",
    "optim_target_modules",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
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
    "load_best_model_at_end",
    "metric_for_best_model",
}

# Set by accelerate launch and obeyed by the Trainer:
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
DEEPSPEED_VARIABLE = "ACCELERATE_USE_DEEPSPEED"
FSDP_VARIABLE = "ACCELERATE_USE_FSDP"
ALL_STEPS = 1 - 1e-9  # for --warmup_steps, where 1 would mean one step
GATHER = "stage3_gather_16bit_weights_on_model_save"  # false by default in DeepSpeed


FLAGS_OF_METHODS = {name: each for method in TRAIN_METHODS.values() for name, each in method.flags.items()}


def _optional(name: str, each: Field) -> tuple:
    """The field of a flag whose default depends on the method or on LoRA, with None as a placeholder for it."""
    default = default_of(each)
    kind = list[str] if isinstance(default, list) else type(default)
    return name, kind | None, field(default=None, metadata=each.metadata)


MethodArguments = make_dataclass(
    "MethodArguments",
    [_optional(name, each) for name, each in (FLAGS_OF_METHODS | adapters.FLAGS).items()],
    bases=(TrainingArguments,),
    kw_only=True,
)


@dataclass(kw_only=True)
class SPAGArguments(MethodArguments):
    """The settings of a training run. UserError for settings that contradict each other."""

    train_method: str = flag(
        " ".join(f"{name}: {method.__doc__}" for name, method in TRAIN_METHODS.items()), choices=[*TRAIN_METHODS]
    )

    model_name_or_path: str = flag("Model to train: a folder or a name on the hub.")
    ref_model_name_or_path: str | None = flag("Frozen reference model: a folder or a name on the hub.", default=None)
    attn_implementation: str | None = flag(
        "sdpa, eager, flash_attention_2, ...; default: chosen by transformers.", default=None
    )
    trust_remote_code: bool = flag(
        "Run Python code that comes with a model (needed by Baichuan2).", default=False, compared=False
    )
    lora_rank: int | None = flag(
        "Train LoRA adapters of this rank; the reference is the model without them.", default=None, at_least=1
    )

    output_dir: str = flag("Folder for the trained model, checkpoints and the run's settings.", compared=False)
    train_data_path: list[str] = flag(
        "Rows: JSON, JSONL, .jsonl.gz and Parquet files, or OWNER/NAME on the hub; data/README.md has the format."
    )
    eval_data_path: list[str] | None = flag(
        "Rows to evaluate with the same loss, by --eval_strategy and at the end.", default=None
    )
    max_length: int = flag("Maximum number of tokens in a row.", default=2048, at_least=1)
    per_device_train_batch_size: int = flag(
        "Rows per micro-batch and process.",
        default=8,
        at_least=1,
        compared=lambda args: args.loss_normalization == MICRO_BATCH,  # over which the loss is then averaged
    )
    loss_normalization: str | None = flag(
        "Average the loss over a micro_batch (as released), or over an optimizer step on all ranks.",
        default=None,
        choices=[MICRO_BATCH, "step"],
    )
    per_device_eval_batch_size: int = flag(
        "Rows per batch in evaluation and for the reference.", default=8, at_least=1, machine=True
    )
    dataloader_num_workers: int = flag(
        "Additional processes that prepare batches.", default=0, at_least=0, machine=True
    )
    neftune_noise_alpha: float | None = flag("Noise to add to embeddings (NEFTune).", default=None, at_least=0)
    # allow_ flags only decide whether training starts, so they are not compared.
    allow_no_game_rows: bool | None = flag("Train even if there are only SFT rows.", default=None, compared=False)
    allow_negative_rewards: bool = flag(
        "Train on negative rewards even if the method imitates these rows or --detach_kl is off.",
        default=False,
        compared=False,
    )
    # Right by default, because causal attention then needs no mask.
    padding_side: str = flag("Side on which shorter rows are padded.", default="right", choices=["left", "right"])
    # Left by default, because the target is at the end.
    truncation_side: str = flag("Side on which longer rows are truncated.", default="left", choices=["left", "right"])
    logging_nan_inf_filter: bool = flag(
        "Log the mean of earlier losses instead of NaN or infinity.", default=False, compared=False
    )
    warmup_ratio: float | None = flag(
        "Fraction of the steps used for warm-up; ignored if --warmup_steps is above 0.",
        default=None,
        at_least=0,
        at_most=1,
    )

    def __post_init__(self):
        check_values(self)
        check_flags(self)
        _check_launcher(self)
        if self.lora_rank and TRAIN_METHODS[self.train_method].compared_kinds:
            self.ref_model_name_or_path = self.model_name_or_path
        if self.warmup_ratio is not None:  # transformers 5 takes --warmup_steps below 1 for a fraction, rounded up
            self.warmup_steps = self.warmup_steps or min(self.warmup_ratio, ALL_STEPS)
            self.warmup_ratio = None
        if self.hub_token:  # training_args.bin would contain it; huggingface_hub also reads the environment
            os.environ["HF_TOKEN"] = self.hub_token
            self.hub_token = None
        # Apple GPUs are not used, because two processes would train there without synchronizing.
        if not self.use_cpu and not torch.cuda.is_available():
            warn_of_idle_gpu()
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available() or torch.backends.mps.is_available()
        if self.use_cpu:
            self.tf32 = None  # TensorFloat-32 exists on GPUs only
            self.dataloader_pin_memory = False
        self.remove_unused_columns = False  # the collator chooses the columns
        self.ddp_find_unused_parameters = bool(self.ddp_find_unused_parameters)  # None would mean True
        # transformers 5.19 has no other name for this flag.
        warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)
        with user_errors("the Trainer's flags", ValueError, TypeError, ImportError, RuntimeError):
            super().__post_init__()
            for callback in get_reporting_integration_callbacks(self.report_to):
                callback()  # raises if its package is missing
            optimizer = self._try_optimizer()
            get_scheduler(self.lr_scheduler_type, optimizer, 0, 1, self.lr_scheduler_kwargs)
        _check_fsdp(self)

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    def _try_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer with these flags for a dummy model. ImportError or ValueError for invalid flags."""
        layers = torch.nn.Sequential(torch.nn.Linear(1, 1))
        kind, options = Trainer.get_optimizer_cls_and_kwargs(self, layers)
        if self.optim_target_modules:  # needs the real model; only the package could be checked
            return torch.optim.SGD(layers.parameters(), self.learning_rate)
        return kind(layers.parameters(), **options)

    @property
    def weights_dtype(self) -> torch.dtype:
        """Half precision under DeepSpeed, which keeps fp32 copies, and for LoRA's frozen base; otherwise fp32.

        Trainable weights need an fp32 copy, because an update of 2e-6 to a bf16 weight is mostly lost in rounding.
        The model is saved in this dtype, so full training without DeepSpeed gives fp32 files, twice as large.
        """
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        return dtypes[self.precision if self.deepspeed or self.lora_rank else "fp32"]

    @property
    def loading(self) -> dict:
        """Options for loading policy, reference and the base of merged adapters."""
        return {
            "dtype": self.weights_dtype,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
        }

    @cached_property
    def run_settings(self) -> dict:
        """Everything that changes results, which `stage` compares between two starts.

        `rows_per_step` is micro-batch x accumulation x processes, which may change if their product stays the same.
        """
        of_other_methods = FLAGS_OF_METHODS.keys() - METHOD_ARGUMENTS[self.train_method].keys()
        names = [name for name in self.__dataclass_fields__ if compares(name, self) and name not in of_other_methods]
        settings = {name: getattr(self, name) for name in names}
        settings["rows_per_step"] = self.train_batch_size * self.gradient_accumulation_steps * self.world_size
        for name in ("train_data_path", "eval_data_path"):
            if paths := getattr(self, name):
                settings[name] = rows_setting(*paths)
        for name in ("model_name_or_path", REFERENCE_NAME):
            if model := getattr(self, name):
                settings[name] = model_setting(model)
        return settings

    @property
    def defaults(self) -> dict:
        """The defaults of all flags, including the method's, by name."""
        return defaults(SPAGArguments) | method_arguments(self)

    @cached_property
    def _setup_devices(self) -> torch.device:
        """This process's device. Also tells accelerate about DeepSpeed on CPUs, which the Trainer does not."""
        # ZeRO-3 triggers this warning for every parameter and micro-batch.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        if self.deepspeed and "LOCAL_RANK" not in os.environ:  # without torchrun, DeepSpeed would try MPI
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port
        if not self.use_cpu and torch.cuda.is_available():
            check_gpus(torch.cuda.device_count())  # otherwise NCCL or CUDA fails with a traceback in each process
        device = super()._setup_devices
        self._n_gpu = min(self._n_gpu, 1)  # one GPU per process; torchrun starts a process for each
        if self.deepspeed and self.use_cpu:
            import deepspeed
            from accelerate.utils import DistributedType

            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
            self.distributed_state.distributed_type = DistributedType.DEEPSPEED
        return device


DEFAULT_OPTIMIZER = SPAGArguments.__dataclass_fields__["optim"].default


def compares(name: str, args: SPAGArguments | Namespace) -> bool:
    field = SPAGArguments.__dataclass_fields__[name]
    return is_compared(field, args) if "compared" in field.metadata else name in COMPARED


def check_flags(args: SPAGArguments | Namespace) -> None:
    """Fill in the method's defaults for flags that are None. UserError for flags that contradict each other.

    Touches no device.
    """
    _check_method(args)
    _check_numbers(args)
    _check_run(args)
    _check_later_use(args)
    set_method_defaults(args)
    # Its micro-batches differ in size, so per-micro-batch means would give rows of small ones more weight.
    if args.train_sampling_strategy == "batch_rebalance" and args.loss_normalization == MICRO_BATCH:
        raise UserError("--train_sampling_strategy batch_rebalance needs --loss_normalization step")


def set_method_defaults(args: SPAGArguments | Namespace) -> None:
    for name, default in method_arguments(args).items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def method_arguments(args: SPAGArguments | Namespace) -> dict:
    """The method's flags with their defaults, plus LoRA's if --lora_rank is set."""
    return METHOD_ARGUMENTS.get(args.train_method, {}) | (LORA_ARGUMENTS if args.lora_rank else {})


def _check_method(args: SPAGArguments | Namespace) -> None:
    others = {"label_smoothing_factor", *LORA_ARGUMENTS}.union(*METHOD_ARGUMENTS.values())
    for name in sorted(others - method_arguments(args).keys()):
        if getattr(args, name):
            what = "without --lora_rank" if name in LORA_ARGUMENTS else f"by {args.train_method}"
            raise UserError(f"--{name} is not used {what}")
    model = args.model_name_or_path
    reference = args.ref_model_name_or_path
    if args.lora_rank and reference and os.path.realpath(reference) != os.path.realpath(model):
        raise UserError(f"--{REFERENCE_NAME}: with --lora_rank the reference is the model without its adapters")
    if REFERENCE_NAME in method_arguments(args) and not reference and not args.lora_rank:
        raise UserError(f"--{REFERENCE_NAME} is missing: {args.train_method} needs a reference model")


def _check_numbers(args: SPAGArguments | Namespace) -> None:
    has_steps = args.max_steps > 0
    if args.max_steps < 0:  # unset
        has_steps = args.num_train_epochs > 0
    if not has_steps:
        raise UserError("there would be no steps: --max_steps and --num_train_epochs must be above 0")
    if not 0 <= args.learning_rate < math.inf:
        raise UserError(f"--learning_rate {args.learning_rate}: must be finite and at least 0")


def _check_run(args: SPAGArguments | Namespace) -> None:
    if args.auto_find_batch_size:  # it shrinks the micro-batch without changing the accumulation
        remedy = "set --per_device_train_batch_size and --gradient_accumulation_steps"
        raise UserError(f"--auto_find_batch_size would silently use fewer rows per step; {remedy}")
    if args.accelerator_config:  # dispatch_batches would split tensors whose first dimension is not the batch
        raise UserError("--accelerator_config would change the batches that other flags specify; omit it")
    # A checkpoint's settings and reference log-probabilities are in its --output_dir.
    if str(args.resume_from_checkpoint).lower() not in ("none", "true", "false"):
        raise UserError("--resume_from_checkpoint: training resumes only from checkpoints in --output_dir")
    if args.deepspeed:
        _check_deepspeed_file(args)
    if args.train_sampling_strategy == "group_by_length":
        # It shuffles by a process's own random state: two processes, and a resumed one, saw 78 and 74 of 93 rows.
        raise UserError(
            "--train_sampling_strategy group_by_length: with several processes, or after a restart, some rows would "
            "be seen twice and others never; batch_rebalance also groups rows by length"
        )
    optional = {"peft": args.lora_rank, "deepspeed": args.deepspeed, "liger-kernel": args.use_liger_kernel}
    for package, wanted in optional.items():
        if wanted:
            require(package.replace("-", "_"), package)


def _check_later_use(args: SPAGArguments | Namespace) -> None:
    """UserError for what the Trainer would refuse only after loading rows and models, or after training."""
    evaluates = args.eval_strategy != "no" or args.eval_on_start or args.save_strategy == "best"
    if evaluates and not args.eval_data_path:
        raise UserError("--eval_strategy, --eval_on_start and --save_strategy best need --eval_data_path")
    if args.save_strategy == "best" and not args.metric_for_best_model:
        raise UserError("--save_strategy best needs --metric_for_best_model, such as eval_loss")
    by_steps = args.eval_strategy == args.save_strategy == "steps"
    eval_steps = args.eval_steps or args.logging_steps  # as the Trainer fills it in
    if args.load_best_model_at_end and by_steps and eval_steps != args.save_steps:
        why = "the best evaluation may have no checkpoint, and an older or the last model would be kept"
        remedy = f"set --eval_steps ({eval_steps}) and --save_steps ({args.save_steps}) to the same number"
        raise UserError(f"--load_best_model_at_end: {why}; {remedy}")
    if args.push_to_hub and args.lora_rank and Path(args.model_name_or_path).exists():
        remedy = "use a model from the hub"
        raise UserError(f"--push_to_hub: the adapters' base is a folder that only this machine has; {remedy}")
    if args.push_to_hub and not (args.hub_token or huggingface_hub.get_token()):
        raise UserError("--push_to_hub needs a login: hf auth login, or HF_TOKEN in the environment")
    if args.torch_compile_backend and args.torch_compile_backend not in torch._dynamo.list_backends(None):
        raise UserError(f"--torch_compile_backend {args.torch_compile_backend}: torch.compile has no such backend")
    if isinstance(args.gradient_checkpointing_kwargs, str) and not args.gradient_checkpointing_kwargs.startswith("{"):
        raise UserError(f"--gradient_checkpointing_kwargs {args.gradient_checkpointing_kwargs}: not a JSON object")


def _check_launcher(args: SPAGArguments) -> None:
    """UserError if `accelerate launch` asks for DeepSpeed or another precision than the flags."""
    if os.environ.get(DEEPSPEED_VARIABLE, "false").lower() == "true" and not args.deepspeed:
        raise UserError(f"{DEEPSPEED_VARIABLE} is true: start without accelerate's DeepSpeed, with --deepspeed FILE")
    asked = os.environ.get(PRECISION_VARIABLE, "no")
    if asked not in ("no", args.precision):
        remedy = f"set --{asked} True, or " if asked in ("bf16", "fp16") else ""
        raise UserError(
            f"{PRECISION_VARIABLE} is {asked}, but the flags say {args.precision}: {remedy}start without accelerate's "
            "mixed precision (accelerate launch --mixed_precision no)"
        )


def _check_fsdp(args: SPAGArguments) -> None:
    """UserError if the Trainer would save no model, because --fsdp or `accelerate launch` asks for sharded weights."""
    by_launcher = os.environ.get(FSDP_VARIABLE, "false").lower() == "true"
    if args.fsdp or by_launcher:
        plugin = FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}))  # as the Trainer makes it
        if "FULL_STATE_DICT" not in str(plugin.state_dict_type):
            where = "--fsdp_config" if args.fsdp else f"{FSDP_VARIABLE} is true"
            raise UserError(
                f"{where}: FSDP with state_dict_type {plugin.state_dict_type.name} would save no model; set it to "
                "FULL_STATE_DICT, or use --deepspeed configs/zero3.json instead"
            )


def _check_deepspeed_file(args: SPAGArguments | Namespace) -> None:
    """UserError if the file would override a flag, or if ZeRO-3 would save no weights.

    The file's content is not recorded, so a restart does not notice changes to it.
    """
    path = args.deepspeed
    config = read_json(path)
    if "scheduler" in config:
        raise UserError(f"{path}: 'scheduler' would override --lr_scheduler_type; remove it")
    if "optimizer" in config and (args.optim != DEFAULT_OPTIMIZER or args.optim_args):
        remedy = "omit these flags, or use another file, such as configs/zero3.json"
        raise UserError(f"{path}: 'optimizer' would override --optim and --optim_args; {remedy}")
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3 and not zero.get(GATHER):
        raise UserError(f"{path}: no weights would be saved; set {GATHER!r} in 'zero_optimization' to true")
    needed = {"gradient_clipping"} - config.keys()
    if "optimizer" in config:
        of_adam = {"betas", "eps"} if "adam" in config["optimizer"].get("type", "").lower() else set()
        params = {"lr", "weight_decay"} | of_adam
        needed |= {f"optimizer.params.{name}" for name in params - config["optimizer"].get("params", {}).keys()}
    if needed:
        why = "DeepSpeed's defaults would silently override flags"
        raise UserError(f'{path}: {", ".join(sorted(needed))} missing, so {why}; add with the value "auto"')


def parse_arguments(argv: list[str] | None = None) -> SPAGArguments:
    return SPAGArguments(**vars(build_parser().parse_args(argv)))


class Parser(HfArgumentParser):
    """transformers' parser for `flag` fields."""

    @staticmethod
    def _parse_dataclass_field(parser, field):
        """Pass only `add_argument`'s own keys from a `flag`'s metadata."""
        if "settings" in field.metadata:
            field = copy.copy(field)
            field.metadata = {"help": field.metadata["help"], **field.metadata["settings"]}
        HfArgumentParser._parse_dataclass_field(parser, field)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


def build_parser() -> Parser:
    """train.py's parser. A boolean flag without a value means True.

    --help lists required flags first, then this project's, then the Trainer's.
    """
    usage = "train.py --train_method METHOD --model_name_or_path M --train_data_path FILE ... --output_dir DIR ..."
    how = {"usage": usage, "description": __doc__, "formatter_class": HelpFormatter}
    parser = Parser(SPAGArguments, allow_abbrev=False, **how)
    parser.add_argument("--evaluation_strategy", dest="eval_strategy", default=SUPPRESS, help="--eval_strategy")
    own = {each.name for each in flag_fields(SPAGArguments)}
    actions = parser._optionals._group_actions
    actions.sort(key=lambda action: (action.dest != "help", not action.required, action.dest not in own))
    for action in actions:
        action.help = f"{action.help}{_default_of(action)}"
        if action.type is string_to_bool:
            action.nargs, action.const = "?", True
    return parser


def _default_of(action: Action) -> str:
    """A default in --help, which may depend on the method or on --lora_rank."""
    by_method = {method: names[action.dest] for method, names in METHOD_ARGUMENTS.items() if action.dest in names}
    if action.dest == REFERENCE_NAME:
        return f" (required by {' and '.join(by_method)}, unless --lora_rank is set)"
    if by_method:
        defaults = ", ".join(f"{method} {default}" for method, default in by_method.items())
        return f" (default: {defaults})"
    if action.dest in LORA_ARGUMENTS:
        default = LORA_ARGUMENTS[action.dest]
        text = " ".join(default) if isinstance(default, list) else default
        return f" (default: {text})"
    return "" if action.default in (None, SUPPRESS, MISSING) else f" (default: {action.default})"
