"""How many games fit in memory."""

import os

import psutil
import torch

MEMORY_SHARE = 0.7  # of the free memory, for the games; the rest absorbs fragmentation and the cache's growth
# The most prompts at once, whatever the memory: for the slot engine on a GPU; for it on a CPU, and for plain batches
# on a GPU; for plain batches on a CPU, where larger ones gained little.
MOST_GAMES, MOST_PROMPTS, CPU_BATCH = 1024, 256, 64


def batch_size_for_memory(model, max_length: int, *, kept_caches: bool, engines: int = 1) -> int:
    """How many prompts to answer at once: as many as fit with their caches and activations, at least 1.

    Plain batches compute all `max_length` tokens of a prompt at once. An engine with `kept_caches` computes few tokens
    at a time, so that activations do not count; on a GPU it takes games at half the length, since most are shorter,
    and halves its games if they are not. The `engines` share the memory. Call it when all models are loaded.
    """
    on_gpu = model.device.type == "cuda"
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * heads * head_size  # keys and values of a token
    if not kept_caches:
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        numbers += 8 * config.hidden_size + 4 * inner  # activations of one layer
    tokens = max_length // 2 if kept_caches and on_gpu else max_length
    per_prompt = tokens * numbers * model.dtype.itemsize + 4 * 4 * config.vocab_size  # logits in float32
    fitting = int(MEMORY_SHARE * _free_memory(model) / engines / per_prompt)
    most = MOST_GAMES if on_gpu and kept_caches else MOST_PROMPTS if on_gpu or kept_caches else CPU_BATCH
    return min(max(fitting, 1), most)


def _free_memory(model) -> int:
    """Bytes free on the devices that hold the model; of RAM, this process's share."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    if devices:
        return sum(torch.cuda.mem_get_info(device)[0] for device in devices)
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
