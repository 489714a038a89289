"""LoRA: its flags, and adding adapters to a model. `args` are the settings of train.py."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tools.common.errors import UserError, user_errors
from tools.common.flags import flag
from tools.common.models import freeze_all_but_text, from_folder

ALL_LINEAR = ["all-linear"]
FLAGS = {  # besides lora_rank
    "lora_alpha": flag("LoRA alpha; adapters are scaled by alpha / rank.", default=16.0, above=0),
    "lora_dropout": flag("Dropout before the adapters.", default=0.0, at_least=0, below=1),
    "lora_target_modules": flag("Names of the layers that get adapters.", default=ALL_LINEAR),
    "lora_merge": flag("Also write the model with merged adapters to OUTPUT_DIR/merged.", default=False),
}


def check_model(name: str, args) -> None:
    """UserError if the model does not support this attention or these adapters. Reads no weights."""
    config = from_folder(AutoConfig, name, trust_remote_code=args.trust_remote_code)
    options = {"attn_implementation": args.attn_implementation, "trust_remote_code": args.trust_remote_code}
    with torch.device("meta"), user_errors(name, ValueError, ImportError):
        model = AutoModelForCausalLM.from_config(config, dtype=args.weights_dtype, **options)
    if args.lora_rank:
        with torch.device("meta"):
            add_lora(model, args)


def add_lora(model: PreTrainedModel, args):
    """Freeze the model and add adapters, in fp32 or, under DeepSpeed, which keeps fp32 copies, in the model's dtype.

    UserError for targets that the model lacks or that peft cannot adapt.
    """
    from peft import LoraConfig, get_peft_model

    is_all = args.lora_target_modules == ALL_LINEAR
    if not is_all:
        check_targets(model, args.lora_target_modules)
    with user_errors("--lora flags", ValueError, TypeError):
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=args.lora_rank,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            target_modules="all-linear" if is_all else args.lora_target_modules,
        )
        adapted = get_peft_model(model, config, autocast_adapter_dtype=not args.deepspeed)
    adapted.peft_config["default"].base_model_name_or_path = args.model_name_or_path  # not the hub's cache
    has_autocast = (args.bf16 or args.fp16) and not args.deepspeed
    if has_autocast:
        keep_adapter_inputs(adapted)
    check_tied_weights(adapted)
    freeze_all_but_text(adapted)
    return adapted


def check_targets(model: PreTrainedModel, targets: list[str]) -> None:
    """UserError for names that no layer has, which peft would ignore as long as one name matches."""
    layers = [f".{name}" for name, _ in model.named_modules()]
    missing = [each for each in targets if not any(name.endswith(f".{each}") for name in layers)]
    if missing:
        raise UserError(f"--lora_target_modules: no layer is called {', '.join(missing)}; separate names by spaces")


def keep_adapter_inputs(adapted) -> None:
    """Stop peft from casting adapter inputs to fp32, which autocast would undo."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.cast_input_dtype_enabled = False


def check_tied_weights(adapted) -> None:
    """UserError for adapters on tied embeddings: merging them would change input and output layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    module = adapted.get_base_model()
    both = module.get_input_embeddings(), module.get_output_embeddings()
    is_adapted = any(isinstance(layer, BaseTunerLayer) for layer in both)
    if is_adapted and module.config.get_text_config().tie_word_embeddings:
        raise UserError("--lora_target_modules: this model's embeddings are tied to its output layer; leave both out")
