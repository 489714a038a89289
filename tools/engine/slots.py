"""The slot engine: continuous batching in which every game keeps its keys and values between its prompts.

A game's next prompt, for either role, begins with the same rules and history, so only the tokens after them are
computed (in a chat template the roles' prompts share only the rules). The common prefix of all prompts is computed and
stored once. A step is one forward pass over one token of every running reply and some tokens of new prompts. The model
is transformers' own with another attention function.
"""

import logging
import math

import torch
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tools.common.errors import UserError
from tools.engine.attention import ATTENTION, LayerCache, Step, UnknownAttention
from tools.engine.flags import GENERATE, SLOTS, EngineFlags
from tools.engine.generate import BatchEngine, check_logits
from tools.engine.linear import pack_weights
from tools.engine.local import LocalModel, OwnEngine, Prompt
from tools.engine.memory import slots_for_memory
from tools.engine.scheduler import BLOCK, Request, Scheduler, Slot, num_blocks_for
from tools.players.player import Reply, Sampling

logger = logging.getLogger(__name__)


class SlotEngine(OwnEngine):
    """Continuous batching of at most `slots` requests, for models that `can_hold` accepts.

    The cache holds the common prefix and at most `cache_tokens` further tokens.
    """

    name = SLOTS
    size_limits_games = True

    def __init__(self, local: LocalModel, slots: int, cache_tokens: int = 1 << 30):
        super().__init__(local, slots)
        sampling = local.codec.sampling
        self.model.set_attn_implementation(ATTENTION)
        pack_weights(self.model)
        self.warp = _warpers(sampling)
        block_limit = max(1, cache_tokens // BLOCK)
        self.scheduler = Scheduler(slots, block_limit=block_limit, max_new_tokens=sampling.max_new_tokens)
        self.caches: dict[int, LayerCache] = {}  # by layer

    @classmethod
    def over(cls, local: LocalModel, flags: EngineFlags, models: int, limit: float) -> "SlotEngine":
        if not can_hold(local.model, flags.max_length):
            raise UserError(f"--engine {SLOTS} does not support this model's attention; omit --engine")
        slots, cache_tokens = slots_for_memory(local.model, engines=models)
        return cls(local, min(flags.per_device_eval_batch_size or slots, limit), cache_tokens)

    def start(self, request: int, prompt: Prompt) -> None:
        ids, prompt_cut = self.codec.encode(prompt.text)
        self.scheduler.waiting.append(Request(request, ids, prompt.game_index, prompt_cut))

    @torch.inference_mode()
    def run(self) -> list[tuple[int, Reply]]:
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN would build a new plan for each prompt length
        if not self.caches:
            self._compute_prefix()
        while True:
            self.scheduler.admit()
            if finished := self.step():
                return finished

    def _compute_prefix(self) -> None:
        """Compute and store the common prefix of the first prompts. Later prompts may use a part of it."""
        prefix = self.scheduler.prefix = self.scheduler.common_prefix()
        if prefix:
            block_table = list(range(num_blocks_for(len(prefix))))
            slot = Slot(token_ids=prefix, block_table=block_table, num_new_tokens=len(prefix))
            self.forward([slot], prefix_length=0)
            for cache in self.caches.values():
                cache.set_prefix(len(prefix))

    def step(self) -> list[tuple[int, Reply]]:
        """Run a forward pass and sample a token for each complete slot. Returns (request, reply) of ended replies."""
        slots, (targets, sources) = self.scheduler.schedule()
        targets = torch.tensor(targets, device=self.model.device)
        sources = torch.tensor(sources, device=self.model.device)
        for cache in self.caches.values():
            cache.grow(self.scheduler.block_manager.num_blocks, self.scheduler.block_limit)
            if len(targets):
                cache.move_blocks(targets, sources)
        logits = self.forward(slots, prefix_length=len(self.scheduler.prefix))
        complete = [slot for slot in slots if slot.is_complete]
        sampled = self.sample(complete, logits) if complete else []
        for slot in slots:
            slot.num_cached_tokens += slot.num_new_tokens
        replies = map(self._append, complete, sampled)
        return [reply for reply in replies if reply]

    def forward(self, slots: list[Slot], *, prefix_length: int) -> torch.Tensor:
        """Compute the new tokens. Returns float32 logits: (complete slots, vocabulary)."""
        step = Step(slots, prefix_length, self.caches, self.model.device)

        # Logits only where a token is sampled (not every model supports `logits_to_keep`).
        def select(module, args):
            return args[0][:, step.logit_indices], *args[1:]

        handle = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            return _compute(self.model, step)[0].float()
        finally:
            handle.remove()

    def sample(self, slots: list[Slot], logits: torch.Tensor) -> list[int]:
        """A token for each slot. `logits`: (slots, vocabulary)."""
        check_logits(logits)
        sampling = self.codec.sampling
        stop_ids = [token for token in self.codec.stop_ids if token < logits.shape[-1]]
        lengths = [len(slot.request.reply) for slot in slots]
        too_short = [row for row, length in enumerate(lengths) if length < sampling.min_new_tokens]
        if too_short and stop_ids:
            rows = torch.tensor(too_short, device=logits.device)
            columns = torch.tensor(stop_ids, device=logits.device)
            logits[rows[:, None], columns] = -math.inf
        if not sampling.do_sample:
            return logits.argmax(-1).tolist()
        return draw(self.warp(None, logits).softmax(-1)).tolist()

    def _append(self, slot: Slot, token: int) -> tuple[int, Reply] | None:
        """Append a sampled token to a reply. Returns (request, reply) if that ended it."""
        request = slot.request
        request.reply.append(token)
        if token not in self.codec.stop_ids and len(request.reply) < self.codec.sampling.max_new_tokens:
            slot.token_ids.append(token)
            return None
        self.scheduler.finish(slot)
        return request.number, self.codec.decode(request.reply, prompt_cut=request.prompt_cut)


class AutoEngine(OwnEngine):
    """The slot engine if it can run the model, otherwise plain batches."""

    @classmethod
    def over(cls, local: LocalModel, flags: EngineFlags, models: int, limit: float) -> SlotEngine | BatchEngine:
        if can_hold(local.model, flags.max_length):
            return SlotEngine.over(local, flags, models, limit)
        logger.info("engine %s: %s does not support the attention of %s", GENERATE, SLOTS, local.model.name_or_path)
        return BatchEngine.over(local, flags, models, limit)


def _compute(model, step: Step) -> torch.Tensor:
    """The logits of a step: (1, tokens, vocabulary)."""
    return model(input_ids=step.input_ids[None], position_ids=step.positions[None], use_cache=False, step=step).logits


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """Draw one index for each row of (rows, choices) probabilities.

    Uses one random number per row; torch.multinomial uses one per choice, which is slow on a CPU. Sums are float64,
    because float32 would lose the small probabilities of a large vocabulary. All rows share a generator, so a draw
    depends on the other rows of its batch.
    """
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    totals = sums[:, -1:]
    drawn = torch.rand(totals.shape, dtype=totals.dtype, device=totals.device) * totals
    # the first index whose sum is larger than the drawn number; its probability is never 0
    return torch.searchsorted(sums, drawn, right=True)[:, 0]


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """The logits processors that `generate` applies before sampling, in its order."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def can_hold(model, max_length: int) -> bool:
    """Whether the slot engine can run a model on sequences of up to `max_length` tokens.

    Every layer must attend to all earlier tokens through transformers' attention interface, with keys and values of
    equal size. Rotary frequencies must not depend on the sequence length, because cached keys are not rotated again.
    """
    config = model.config.get_text_config()
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None) if not kinds else None
    return (
        model._supports_attention_backend
        and kinds <= {"full_attention"}
        and (window is None or window >= max_length)
        and getattr(config, "attn_logit_softcapping", None) is None
        and getattr(config, "v_head_dim", None) is None
        and rope_type not in ("dynamic", "longrope")
        and _can_attend(model)
    )


@torch.inference_mode()
def _can_attend(model) -> bool:
    """Whether our attention function supports this model, found by a pass over one token."""
    slot = Slot(token_ids=[0], block_table=[0], num_new_tokens=1)
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        _compute(model, Step([slot], prefix_length=0, caches={}, device=model.device))
    except UnknownAttention:
        return False
    finally:
        model.set_attn_implementation(before)
    return True
