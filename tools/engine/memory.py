"""How many games fit in memory."""

import os

import psutil
import torch

MEMORY_SHARE = 0.7  # of free memory for games; the rest is for activations and fragmentation
MOST_ON_GPU = 1024  # games at once, at most
MOST_ON_CORES = 256


def slots_for_memory(model, engines: int = 1) -> tuple[int, int]:
    """The number of slots of an engine, and of tokens in its cache.

    `engines` engines, whose models are loaded already, share the free memory equally. The logits of all slots take at
    most a quarter of a share, the cache the rest.
    """
    free = int(MEMORY_SHARE * _free_memory(model) / engines)
    most = MOST_ON_GPU if model.device.type == "cuda" else MOST_ON_CORES
    slots = min(max(free // 4 // logit_bytes(model), 1), most)
    return slots, max(free - slots * logit_bytes(model), 0) // token_bytes(model)


def token_bytes(model) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * model.dtype.itemsize


def logit_bytes(model) -> int:
    """Bytes of one slot's logits during sampling: four float32 copies."""
    return 4 * 4 * model.config.get_text_config().vocab_size


def _free_memory(model) -> int:
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # left by the previous match
        return torch.cuda.mem_get_info(model.device)[0]
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
