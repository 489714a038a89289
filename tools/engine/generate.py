"""Plain batches by transformers' `generate`, for models that the slot engine cannot run."""

import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from tools.engine.model import LocalModel
from tools.players.player import Reply
from utils import warn_on_rank_0


class BatchEngine:
    """Answers requests batch after batch, with any causal language model.

    A batch runs until its longest reply has ended, and every prompt is computed from its first token. After running
    out of memory, the engine goes on with half the batch size.
    """

    def __init__(self, local: LocalModel, batch_size: int):
        self.local, self.batch_size = local, batch_size
        if local.model.config._attn_implementation != local.attention:  # the model has played with SlotEngine
            local.model.set_attn_implementation(local.attention)
        self.waiting: deque[tuple[int, str, int]] = deque()  # (request, prompt, most tokens of the reply)

    def start(self, request: int, prompt: str, *, game: int, limit: int | None = None, seed: int = 0) -> None:
        """Queue a request. `limit`: most tokens of the reply (None: --max_new_tokens). The others are not used."""
        self.waiting.append((request, prompt, limit or self.local.sampling.max_new_tokens))

    def run(self) -> list[tuple[int, Reply]]:
        """Answer the next batch. Returns (request, reply) pairs."""
        batch = list(islice(self.waiting, self.batch_size))
        try:
            replies = self.generate([prompt for _, prompt, _ in batch], [limit for _, _, limit in batch])
        except torch.OutOfMemoryError:
            if self.batch_size == 1:
                raise
        else:
            return [(self.waiting.popleft()[0], reply) for reply in replies]
        warn_on_rank_0("out of memory with %d prompts at once; going on with half as many", self.batch_size)
        self.batch_size //= 2
        torch.cuda.empty_cache()  # not inside `except`, where the traceback still keeps tensors alive
        return self.run()

    def generate(self, prompts: Sequence[str], limits: Sequence[int] = ()) -> list[Reply]:
        """One reply for each prompt. `limits`: most tokens of each reply. Draws use torch's global generator."""
        local, device = self.local, self.local.model.device
        limits = limits or [local.sampling.max_new_tokens] * len(prompts)
        encoded = [local.encode(prompt) for prompt in prompts]
        lengths = torch.tensor([len(ids) for ids, _ in encoded])
        width = int(lengths.max())
        config = generation_config(local)
        config.max_new_tokens = max(limits)
        rows = [torch.tensor(ids) for ids, _ in encoded]
        input_ids = pad_sequence(rows, batch_first=True, padding_value=config.pad_token_id, padding_side="left")
        attention_mask = (torch.arange(width) >= width - lengths[:, None]).long()  # (batch, width), as input_ids
        output = local.model.generate(
            input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), generation_config=config
        )
        new_ids = [ids[:limit] for ids, limit in zip(output[:, width:].tolist(), limits, strict=True)]
        return [local.decode(ids, cut) for ids, (_, cut) in zip(new_ids, encoded, strict=True)]


def generation_config(local: LocalModel) -> GenerationConfig:
    """Our sampling settings in the form that `generate` takes."""
    sampling = local.sampling
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        do_sample=sampling.do_sample,
        **(drawn if sampling.do_sample else {}),
        use_cache=True,
        pad_token_id=0,  # any token: padding is masked
        eos_token_id=local.stop_ids or None,
    )


def now(device: torch.device) -> float:
    """The time in seconds, read after the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
