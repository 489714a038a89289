"""How many prompts or games fit in memory."""

import os

import psutil
import torch

from utils import warn_on_rank_0

MEMORY_SHARE = 0.7  # of the free memory is for prompts and games; the rest is for activations and fragmentation
# Most prompts or games at once, however much memory there is:
MOST_GAMES = 1024  # slot engine on a GPU
MOST_PROMPTS = 256  # slot engine on a CPU, and plain batches on a GPU
CPU_BATCH = 64  # plain batches on a CPU, where larger ones were hardly faster
UNKNOWN_BATCH = 8  # plain batches of a model whose memory cannot be estimated


def batch_size_for_memory(model, max_length: int) -> int:
    """Prompts of a plain batch whose caches and activations fit in memory at `max_length` tokens each; at least 1."""
    try:
        config = model.config.get_text_config()
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        activations = (8 * config.hidden_size + 4 * inner) * model.dtype.itemsize  # of one token in one layer
        per_prompt = max_length * (token_bytes(model) + activations) + logit_bytes(model)
    except Exception:  # sizes are missing, or differ between layers; each kind of model fails in its own way
        warn_on_rank_0(
            "the memory of a prompt of this model is unknown: %d prompts at once; set --per_device_eval_batch_size",
            UNKNOWN_BATCH,
        )
        return UNKNOWN_BATCH
    fitting = int(MEMORY_SHARE * _free_memory(model) / per_prompt)
    return min(max(fitting, 1), MOST_PROMPTS if model.device.type == "cuda" else CPU_BATCH)


def slots_for_memory(model, engines: int = 1) -> tuple[int, int]:
    """Slots of an engine, and tokens of its cache, if `engines` engines share the memory.

    A slot costs only the memory of its logits, and all slots take at most a quarter of the memory. The rest is for
    keys and values, so the number of games at a time depends on their lengths.
    """
    free = int(MEMORY_SHARE * _free_memory(model) / engines)
    most = MOST_GAMES if model.device.type == "cuda" else MOST_PROMPTS
    slots = min(max(free // 4 // logit_bytes(model), 1), most)
    return slots, max(free - slots * logit_bytes(model), 0) // token_bytes(model)


def token_bytes(model) -> int:
    """Bytes of the keys and values of one token in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * model.dtype.itemsize


def logit_bytes(model) -> int:
    """Bytes of one prompt's logits while a token is sampled: four copies in float32."""
    return 4 * 4 * model.config.get_text_config().vocab_size


def _free_memory(model) -> int:
    """Free bytes of the GPUs that hold the model; on a CPU, this process's share of the free RAM."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    if devices:
        return sum(torch.cuda.mem_get_info(device)[0] for device in devices)
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
