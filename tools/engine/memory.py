"""How many games fit in memory."""

import os

import psutil
import torch

MEMORY_SHARE = 0.7  # of the free memory is for games; the rest is for activations and fragmentation
# The most games at once, however much memory there is:
MOST_ON_GPU = 1024
MOST_ON_CORES = 256


def slots_for_memory(model, engines: int = 1) -> tuple[int, int]:
    """Slots of an engine, whose logits take at most a quarter of its memory, and tokens of its cache, the rest.

    All models of a match are loaded by then. Its `engines` get equal shares of what is free. The cache takes its
    memory as games need it. If memory runs out in play, a smaller --per_device_eval_batch_size helps, because a slot
    holds the tokens of one game; so does a smaller MEMORY_SHARE.
    """
    free = int(MEMORY_SHARE * _free_memory(model) / engines)
    most = MOST_ON_GPU if model.device.type == "cuda" else MOST_ON_CORES
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
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # of the match before
        return torch.cuda.mem_get_info(model.device)[0]
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
