"""Static batches with transformers' `generate`, for models that the slot engine cannot run."""

from collections import deque

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from tools.common.errors import UserError
from tools.engine.flags import GENERATE, EngineFlags
from tools.engine.local import Codec, LocalModel, OwnEngine, Prompt
from tools.players.player import Reply

PROMPTS_AT_ONCE = 32  # default batch; not chosen by memory, because cache sizes of unusual models are unknown


class BatchEngine(OwnEngine):
    """Answers requests batch by batch, with any causal language model. A batch runs until its longest reply ends."""

    name = GENERATE
    size_limits_games = False

    def __init__(self, local: LocalModel, batch_size: int):
        super().__init__(local, batch_size)
        self.waiting: deque[tuple[int, str]] = deque()  # (request, prompt)

    @classmethod
    def over(cls, local: LocalModel, flags: EngineFlags, models: int, limit: float) -> "BatchEngine":
        return cls(local, min(flags.per_device_eval_batch_size or PROMPTS_AT_ONCE, limit))

    def start(self, request: int, prompt: Prompt) -> None:
        self.waiting.append((request, prompt.text))

    def run(self) -> list[tuple[int, Reply]]:
        batch = [self.waiting.popleft() for _ in range(min(self.size, len(self.waiting)))]
        encoded = [self.codec.encode(prompt) for _, prompt in batch]  # (token ids, whether the prompt was cut)
        rows = [torch.tensor(ids) for ids, _ in encoded]
        input_ids = self._pad(rows)  # (batch, longest prompt)
        attention_mask = self._pad([torch.ones_like(row) for row in rows])
        output = self.model.generate(
            input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config(self.codec),
            logits_processor=LogitsProcessorList([CheckLogits()]),
        )
        new_ids = output[:, input_ids.shape[1] :].tolist()
        replies = [self.codec.decode(ids, prompt_cut=cut) for ids, (_, cut) in zip(new_ids, encoded, strict=True)]
        return [(request, reply) for (request, _), reply in zip(batch, replies, strict=True)]

    def _pad(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(rows, batch_first=True, padding_side="left").to(self.model.device)


def check_logits(logits: torch.Tensor) -> None:
    """UserError if a row of (rows, vocabulary) logits contains NaN or +inf, or only -inf."""
    if not logits.amax(-1).isfinite().all():  # amax of a row with a NaN is NaN
        raise UserError("the model's logits are NaN or infinite; if it runs in float16, try --bf16 True")


class CheckLogits(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_logits(scores)
        return scores


def generation_config(codec: Codec) -> GenerationConfig:
    sampling = codec.sampling
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        do_sample=sampling.do_sample,
        **(sampling.drawing() if sampling.do_sample else {}),
        use_cache=True,
        pad_token_id=0,  # any token: padding is masked
        eos_token_id=codec.stop_ids or None,
    )
