"""The settings of train.py.

They are transformers.TrainingArguments', those of the methods, and those below. Published commands use two flags of
older transformers, which keep their meaning: --evaluation_strategy and --warmup_ratio.
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
from transformers import HfArgumentParser, Trainer, TrainingArguments, get_scheduler
from transformers.hf_argparser import string_to_bool
from transformers.integrations import get_reporting_integration_callbacks

from tools.common import adapters
from tools.common.errors import UserError, require, user_errors
from tools.common.files import read_json
from tools.common.flags import check_values, default_of, defaults, flag, flag_fields, is_compared
from tools.common.models import model_setting
from tools.common.ranks import check_gpus, warn_of_idle_gpu, world_size
from tools.common.records import rows_setting
from trainers import MICRO_BATCH, REFERENCE_NAME, TRAIN_METHODS

# The arguments of each method with their defaults. A method refuses the arguments of the others.
METHOD_ARGUMENTS = {name: method.defaults() for name, method in TRAIN_METHODS.items()}
LORA_ARGUMENTS = {name: default_of(each) for name, each in adapters.FLAGS.items()}
# Of the Trainer's flags those that a record compares. Flags of evaluation and saving, such as --eval_steps, are not
# among them, although they decide under --load_best_model_at_end which checkpoint becomes the model.
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

PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # set by accelerate launch; the Trainer would obey it
ALL_STEPS = 1 - 1e-9  # as --warmup_steps, where 1 would be one step
GATHER = "stage3_gather_16bit_weights_on_model_save"  # of DeepSpeed, false by default


FLAGS_OF_METHODS = {name: each for method in TRAIN_METHODS.values() for name, each in method.flags.items()}


def _optional(name: str, each: Field) -> tuple:
    """The field of a flag whose default depends on the method or on LoRA: None stands for it."""
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
    """The settings of one training run. Raises UserError for settings that contradict each other."""

    train_method: str = flag(
        " ".join(f"{name}: {method.__doc__}" for name, method in TRAIN_METHODS.items()), choices=[*TRAIN_METHODS]
    )

    model_name_or_path: str = flag("Folder or hub name of the model to train.")
    ref_model_name_or_path: str | None = flag("Folder or hub name of the frozen reference model.", default=None)
    attn_implementation: str | None = flag(
        "sdpa, eager, flash_attention_2, ...; default: transformers chooses.", default=None
    )
    trust_remote_code: bool = flag(
        "Run model code that comes with the weights (Baichuan2 needs it).", default=False, compared=False
    )
    lora_rank: int | None = flag(
        "Train LoRA adapters of this rank; the reference is the model without them.", default=None, at_least=1
    )

    output_dir: str = flag("Folder for the trained model, checkpoints and the run's settings.", compared=False)
    train_data_path: list[str] = flag(
        "Rows: JSON, JSONL, .jsonl.gz and Parquet files, or OWNER/NAME of the hub; data/README.md has the format."
    )
    eval_data_path: list[str] | None = flag(
        "Rows to evaluate with the same loss, by --eval_strategy and at the end.", default=None
    )
    max_length: int = flag("Maximum number of tokens in a row.", default=2048, at_least=1)
    per_device_train_batch_size: int = flag(
        "Rows of a micro-batch of one process.",
        default=8,
        at_least=1,
        compared=lambda args: args.loss_normalization == MICRO_BATCH,  # over which the loss is then averaged
    )
    loss_normalization: str | None = flag(
        "Average the loss over the rows of a micro_batch (as released), or of an optimizer step over all ranks.",
        default=None,
        choices=[MICRO_BATCH, "step"],
    )
    per_device_eval_batch_size: int = flag(
        "Rows at once in evaluation and for the reference.", default=8, at_least=1, machine=True
    )
    dataloader_num_workers: int = flag(
        "Processes that make batches beside the training's own.", default=0, at_least=0, machine=True
    )
    neftune_noise_alpha: float | None = flag("Noise that is added to embeddings.", default=None, at_least=0)
    # An allow_ flag decides whether a training begins, and changes nothing in it.
    allow_no_game_rows: bool | None = flag("Train although there are only SFT rows.", default=None, compared=False)
    allow_negative_rewards: bool = flag(
        "Train rows with negative rewards although the method imitates them, or has no --detach_kl True.",
        default=False,
        compared=False,
    )
    # Right is the default because causal attention then needs no mask.
    padding_side: str = flag("Side on which shorter rows are padded.", default="right", choices=["left", "right"])
    # Left is the default because the target is at the end.
    truncation_side: str = flag("Side from which longer rows are cut.", default="left", choices=["left", "right"])
    logging_nan_inf_filter: bool = flag(
        "Log the mean of earlier losses in place of NaN or infinity.", default=False, compared=False
    )
    warmup_ratio: float | None = flag(
        "Share of the steps used for warm-up; ignored if --warmup_steps is above 0.",
        default=None,
        at_least=0,
        at_most=1,
    )

    def __post_init__(self):
        check_values(self)
        check_flags(self)
        _check_precision(self)
        if self.lora_rank and TRAIN_METHODS[self.train_method].compared_kinds:
            self.ref_model_name_or_path = self.model_name_or_path
        if self.warmup_ratio is not None:  # in transformers 5 --warmup_steps below 1 are a share, rounded up to steps
            self.warmup_steps = self.warmup_steps or min(self.warmup_ratio, ALL_STEPS)
            self.warmup_ratio = None
        if self.hub_token:  # training_args.bin would hold it; huggingface_hub reads the environment too
            os.environ["HF_TOKEN"] = self.hub_token
            self.hub_token = None
        # Apple's GPUs are not used: two processes would train there without knowing of each other.
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
            for callback in get_reporting_integration_callbacks(self.report_to):
                callback()  # looks for its package
            optimizer = self._try_optimizer()
            get_scheduler(self.lr_scheduler_type, optimizer, 0, 1, self.lr_scheduler_kwargs)

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    def _try_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer with these flags over one weight. ImportError or ValueError if the flags cannot make one."""
        layers = torch.nn.Sequential(torch.nn.Linear(1, 1))
        kind, options = Trainer.get_optimizer_cls_and_kwargs(self, layers)
        if self.optim_target_modules:  # parts of the model: only whether the package is there is known yet
            return torch.optim.SGD(layers.parameters(), self.learning_rate)
        return kind(layers.parameters(), **options)

    @property
    def weights_dtype(self) -> torch.dtype:
        """Half precision under DeepSpeed, which keeps fp32 copies, and for the frozen base of LoRA; otherwise fp32.

        Weights that train need fp32 somewhere: added to a bf16 weight, a step of 2e-6 is mostly lost in rounding.
        The model is also saved in this dtype: in fp32, twice as large, where all weights train without DeepSpeed.
        """
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        return dtypes[self.precision if self.deepspeed or self.lora_rank else "fp32"]

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

        `rows_per_step` is the batch of an optimizer step: micro-batch x accumulation x processes. So these three may
        change between two starts if their product stays.
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
        """The defaults of all flags by name, those of the method among them."""
        return defaults(SPAGArguments) | method_arguments(self)

    @cached_property
    def _setup_devices(self) -> torch.device:
        """The device of this process. On a CPU it tells accelerate about DeepSpeed, which the Trainer does not."""
        # torch's about the calls of DeepSpeed's ZeRO-3, for each parameter and micro-batch
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
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


def compares(name: str, args: SPAGArguments | Namespace) -> bool:
    field = SPAGArguments.__dataclass_fields__[name]
    return is_compared(field, args) if "compared" in field.metadata else name in COMPARED


def check_flags(args: SPAGArguments | Namespace) -> None:
    """Give flags that are None the defaults of the method. Raise UserError for flags that contradict each other.

    No device is asked.
    """
    _check_method(args)
    _check_numbers(args)
    _check_run(args)
    _check_later_use(args)
    set_method_defaults(args)
    # Its micro-batches have different numbers of rows: averaged one by one, a row of a small one would count more.
    if args.train_sampling_strategy == "batch_rebalance" and args.loss_normalization == MICRO_BATCH:
        raise UserError("--train_sampling_strategy batch_rebalance needs --loss_normalization step")


def set_method_defaults(args: SPAGArguments | Namespace) -> None:
    for name, default in method_arguments(args).items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def method_arguments(args: SPAGArguments | Namespace) -> dict:
    """The flags that the method uses and others refuse, with their defaults; those of LoRA where it is trained."""
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
        raise UserError(f"--{REFERENCE_NAME} is missing: {args.train_method} compares with a reference model")


def _check_numbers(args: SPAGArguments | Namespace) -> None:
    """Raise UserError for numbers that would train nothing, or something else than they say."""
    has_steps = args.max_steps > 0
    if args.max_steps < 0:  # then the epochs count
        has_steps = args.num_train_epochs > 0
    if not has_steps:
        raise UserError("no step would be made: --max_steps and --num_train_epochs must be above 0")
    if not 0 <= args.learning_rate < math.inf:
        raise UserError(f"--learning_rate {args.learning_rate}: it must be a finite number, at least 0")


def _check_run(args: SPAGArguments | Namespace) -> None:
    if args.auto_find_batch_size:  # it takes a smaller micro-batch, and leaves the accumulation
        remedy = "set --per_device_train_batch_size and --gradient_accumulation_steps"
        raise UserError(f"--auto_find_batch_size would make steps of fewer rows without a word; {remedy}")
    if args.accelerator_config:  # dispatch_batches would cut tensors that have no row for each row of the batch
        raise UserError("--accelerator_config would make other batches than the flags say; leave it out")
    # The settings and the reference's numbers that belong to a checkpoint lie in its --output_dir.
    if str(args.resume_from_checkpoint).lower() not in ("none", "true", "false"):
        raise UserError("--resume_from_checkpoint: training continues from the checkpoints of --output_dir only")
    if args.deepspeed:
        _check_deepspeed_file(args)
    if args.train_sampling_strategy == "group_by_length" and world_size() > 1:
        # Each process shuffles by its own random state, which dropout moves: two of them saw 78 of 93 rows.
        raise UserError(
            "--train_sampling_strategy group_by_length: several processes would see some rows twice and others never; "
            "batch_rebalance groups rows by length too"
        )
    optional = {"peft": args.lora_rank, "deepspeed": args.deepspeed, "liger-kernel": args.use_liger_kernel}
    for package, wanted in optional.items():
        if wanted:
            require(package.replace("-", "_"), package)


def _check_later_use(args: SPAGArguments | Namespace) -> None:
    """Raise UserError for what the Trainer would refuse only when rows and models are read, or when it has trained."""
    evaluates = args.eval_strategy != "no" or args.eval_on_start or args.save_strategy == "best"
    if evaluates and not args.eval_data_path:
        raise UserError(
            "--eval_strategy, --eval_on_start and --save_strategy best need rows: --eval_data_path is missing"
        )
    if args.save_strategy == "best" and not args.metric_for_best_model:
        raise UserError("--save_strategy best needs --metric_for_best_model, such as eval_loss")
    if args.push_to_hub and args.lora_rank and Path(args.model_name_or_path).exists():
        remedy = "name a model of the hub"
        raise UserError(f"--push_to_hub: adapters name their base, here a folder that nobody else has; {remedy}")
    if args.push_to_hub and not (args.hub_token or huggingface_hub.get_token()):
        raise UserError("--push_to_hub needs a login: hf auth login, or HF_TOKEN in the environment")
    if args.torch_compile_backend and args.torch_compile_backend not in torch._dynamo.list_backends(None):
        raise UserError(f"--torch_compile_backend {args.torch_compile_backend}: torch.compile has no such backend")
    if isinstance(args.gradient_checkpointing_kwargs, str) and not args.gradient_checkpointing_kwargs.startswith("{"):
        raise UserError(f"--gradient_checkpointing_kwargs {args.gradient_checkpointing_kwargs}: no object of JSON")


def _check_precision(args: SPAGArguments) -> None:
    """Raise UserError if `accelerate launch` asks for a precision that the flags do not say."""
    asked = os.environ.get(PRECISION_VARIABLE, "no")
    if asked not in ("no", args.precision):
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


def parse_arguments(argv: list[str] | None = None) -> SPAGArguments:
    return SPAGArguments(**vars(build_parser().parse_args(argv)))


class Parser(HfArgumentParser):
    """transformers' parser for `flag` fields."""

    @staticmethod
    def _parse_dataclass_field(parser, field):
        """Give `add_argument` of a `flag` only the keys that it knows."""
        if "settings" in field.metadata:
            field = copy.copy(field)
            field.metadata = {"help": field.metadata["help"], **field.metadata["settings"]}
        HfArgumentParser._parse_dataclass_field(parser, field)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


def build_parser() -> Parser:
    """The parser of train.py. A boolean flag may stand alone, for True.

    Its help begins with the required flags, then this project's, then the Trainer's.
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
    """What --help says of a default, which may depend on the method, or on --lora_rank."""
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
    return "" if action.default in (None, SUPPRESS, MISSING) else f" (default: {action.default})"
