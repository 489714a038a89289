"""The slot engine: continuous batching over games; each game keeps its keys and values between its prompts.

Every game has a slot that caches its last prompt and reply. The game's next prompt, for either role, begins with the
same rules and history, so only the tokens after them are computed. The prefix of all prompts is computed and stored
once. A step decodes one token of every running reply and prefills new prompts. A finished reply frees its slot at
once. The lengths of earlier replies decide how many run at a time. When the cache is full all the same, the replies
that are cheapest to recompute are preempted: they wait, and are computed again later.

(With chat templates the prompts of the two roles share only the rules, and a game without a slot of its own starts
from the common prefix: slower, with the same replies.)

The model is transformers' own; only its attention function is replaced, by the one in tools/engine/attention.py.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from os.path import commonprefix

import torch
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tools.engine.attention import ATTENTION, BLOCK, BlockManager, LayerCache, Slot, Step, num_blocks_for
from tools.engine.model import EngineCounts, LocalModel
from tools.players.player import Reply, Sampling
from utils import warn_on_rank_0

PREFILL_TOKENS = 2048  # prompt tokens in a step at most: bounds the memory of activations
RECOVERY = 1.0001  # after running out of memory, raise the block limit by this factor for each finished reply


@dataclass(eq=False)
class Request:
    """A prompt of a game and its reply so far."""

    number: int
    prompt: str
    game: int
    limit: int  # most tokens of the reply
    prompt_ids: list[int] = field(default_factory=list)  # empty until the prompt is encoded
    reply: list[int] = field(default_factory=list)
    prompt_cut: bool = False


class SlotEngine:
    """Continuous batching over at most `slots` games at a time, for models that `can_hold` accepts.

    Keys and values take at most the tokens of `local.cache_tokens`, beyond the common prefix.
    """

    def __init__(self, local: LocalModel, slots: int):
        self.local, self.model = local, local.model
        self.model.set_attn_implementation(ATTENTION)
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans anew for every shape, and each prompt has its own
        self.warp = _warpers(local.sampling)
        self.counts = EngineCounts()
        self.waiting: deque[Request] = deque()
        self.slots = [Slot() for _ in range(slots)]
        self.idle = self.slots.copy()  # slots without a request: empty ones first, then the longest idle
        self.prefix: list[int] = []  # tokens that all prompts begin with
        self.caches: dict[int, LayerCache] = {}  # by layer
        self.block_manager = BlockManager()
        tokens = local.cache_tokens
        self.max_blocks: float = math.inf if tokens is None else max(1, tokens // BLOCK)
        self.block_limit = self.max_blocks  # lower for a while after the device ran out of memory

    def start(self, request: int, prompt: str, *, game: int, limit: int | None = None) -> None:
        """Queue a request; `limit` is the most tokens of the reply, None: --max_new_tokens.

        Prompts of the same `game` should begin alike: what they share is computed once.
        """
        self.waiting.append(Request(request, prompt, game, limit or self.local.sampling.max_new_tokens))

    @torch.inference_mode()
    def run(self) -> list[tuple[int, Reply]]:
        """Step until at least one reply has ended: (request, reply) pairs."""
        out_of_memory = False
        while True:
            try:
                if out_of_memory:  # handled here, since the traceback in the handler keeps tensors alive
                    self._shrink()
                    out_of_memory = False
                self._admit()
                if finished := self._step():
                    return finished
            except torch.OutOfMemoryError:
                if len(self._busy()) <= 1:
                    raise
                out_of_memory = True

    def _busy(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.request]

    # --- from requests to slots

    def _admit(self) -> None:
        """Give waiting requests slots: first the slots of the same games, then others while the replies still fit."""
        if not self.waiting:
            return
        own = {slot.game: slot for slot in self.idle}
        # Requests with a slot of their own go first, so that no other request takes it.
        requests = sorted(self.waiting, key=lambda request: request.game not in own)[: len(self.idle)]
        for request in requests:
            if not request.prompt_ids:
                request.prompt_ids, request.prompt_cut = self.local.encode(request.prompt)
        if not self.caches and requests:
            self._compute_prefix([request.prompt_ids for request in requests])
        busy = [self._expected_blocks(len(slot.token_ids) - slot.num_prefix_tokens) for slot in self._busy()]
        free = self.block_limit - sum(busy)
        for request in requests:
            token_ids = request.prompt_ids + request.reply
            prefix_tokens = _num_common(self.prefix, token_ids)
            free -= self._expected_blocks(len(token_ids) - prefix_tokens)
            slot = own.pop(request.game, None)
            if slot is None:
                if free < 0 and len(self.idle) < len(self.slots):
                    break
                slot = self.idle[0]
            self._assign(slot, request, token_ids, prefix_tokens)

    def _assign(self, slot: Slot, request: Request, token_ids: list[int], prefix_tokens: int) -> None:
        """Begin a request. Its first tokens come from the cache: the slot's own, or the common prefix if longer."""
        cached = _num_common(slot.token_ids, token_ids)
        if cached <= max(slot.num_prefix_tokens, prefix_tokens):  # the slot's own blocks are of no use
            cached = slot.num_prefix_tokens = prefix_tokens
        slot.token_ids, slot.num_cached_tokens = token_ids, cached
        slot.request, slot.game = request, request.game
        self.block_manager.resize(slot.block_table, cached - slot.num_prefix_tokens)
        self.idle.remove(slot)
        self.waiting.remove(request)

    def _expected_blocks(self, tokens: int) -> int:
        """Blocks of a slot with `tokens` tokens once its reply has the mean length so far (at first, the longest)."""
        counts, longest = self.counts, self.local.sampling.max_new_tokens
        reply = counts.new_tokens // counts.prompts if counts.prompts else longest
        return num_blocks_for(tokens + reply)

    def _compute_prefix(self, prompts: list[list[int]]) -> None:
        """Compute the prefix that the first prompts have in common."""
        prefix = list(commonprefix([ids[:-1] for ids in prompts]))
        if prefix:
            block_table = list(range(num_blocks_for(len(prefix))))
            self._forward([Slot(token_ids=prefix, block_table=block_table, num_new_tokens=len(prefix))])
            for cache in self.caches.values():
                cache.set_prefix(len(prefix))
        self.prefix = prefix
        self.counts.prefill_tokens = len(prefix)

    # --- a step

    def _step(self) -> list[tuple[int, Reply]]:
        """Compute pending tokens, and sample one for every slot that has no more of them; returns the ended replies.

        Slots and requests change only after everything that may run out of memory: then the step can be repeated.
        """
        slots = self._schedule()
        for cache in self.caches.values():
            cache.grow(self.block_manager.num_blocks, self.block_limit)
        self._compact()
        logits = self._forward(slots)
        complete = [slot for slot in slots if slot.is_complete]
        sampled = self._sample(complete, logits) if complete else []
        for slot in slots:
            decoded = slot.num_new_tokens == 1 and slot.request.reply
            self.counts.prefill_tokens += 0 if decoded else slot.num_new_tokens
            slot.num_cached_tokens += slot.num_new_tokens
        self.counts.steps += 1
        self.counts.at_once = max(self.counts.at_once, len(slots))
        replies = [self._append(slot, token) for slot, token in zip(complete, sampled, strict=True)]
        return [reply for reply in replies if reply]

    def _schedule(self) -> list[Slot]:
        """The slots of a step: one token of every running reply, then prompts up to PREFILL_TOKENS."""
        while True:
            slots = sorted(self._busy(), key=_num_pending)
            budget = len(slots) + PREFILL_TOKENS
            for slot in slots:
                slot.num_new_tokens = min(_num_pending(slot), budget)
                budget -= slot.num_new_tokens
            if self._make_room(slots):
                break
        for slot in slots:
            self.block_manager.resize(slot.block_table, slot.num_block_tokens)
        return [slot for slot in slots if slot.num_new_tokens]

    def _make_room(self, slots: list[Slot]) -> bool:
        """Whether the new tokens of these slots fit, if need be without idle caches; if not, preempt one slot."""
        more = sum(num_blocks_for(slot.num_block_tokens) - len(slot.block_table) for slot in slots)
        for slot in self.idle:
            if self.block_manager.num_used + more > self.block_limit:
                self._clear(slot)
        if self.block_manager.num_used + more <= self.block_limit or len(slots) == 1:
            return True
        self._preempt(min(slots, key=_num_blocks))
        return False

    def _preempt(self, slot: Slot) -> None:
        """Free a slot. Its request waits, and will be computed again."""
        self.waiting.appendleft(slot.request)
        self.idle.insert(0, slot)
        self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        self.block_manager.resize(slot.block_table, 0)
        slot.token_ids, slot.num_cached_tokens, slot.num_prefix_tokens = [], 0, 0
        slot.request = slot.game = None

    def _compact(self) -> None:
        """Put the blocks of the busy slots first."""
        idle = [slot.block_table for slot in self.idle]
        moves = self.block_manager.compact([slot.block_table for slot in self._busy()], idle)
        if moves[0]:
            targets, sources = (torch.tensor(blocks, device=self.model.device) for blocks in moves)
            for cache in self.caches.values():
                cache.moves.append((targets, sources))

    def _shrink(self) -> None:
        """After the device ran out of memory: preempt an eighth of the slots, and free what the others do not need."""
        busy = sorted(self._busy(), key=_num_blocks)
        preempted = busy[: 1 + len(busy) // 8]
        warn_on_rank_0("out of memory with %d replies at a time; %d wait", len(busy), len(preempted))
        for slot in preempted:
            self._preempt(slot)
        for slot in self.idle:
            self._clear(slot)
        self.block_limit = max(1, min(self.block_limit, self.block_manager.num_used))
        for slot in self._busy():  # free the new blocks of the step that failed: some layers may not have them
            self.block_manager.resize(slot.block_table, slot.num_cached_tokens - slot.num_prefix_tokens)
        self._compact()
        self.block_manager.drop_free()
        for cache in self.caches.values():
            cache.shrink(self.block_manager.num_blocks)
        torch.cuda.empty_cache()

    def _forward(self, slots: list[Slot]) -> torch.Tensor:
        """Compute the new tokens of these slots.

        Returns float32 logits (complete slots, vocabulary): of the last token of each slot that has no more pending.
        """
        step = Step(slots, len(self.prefix), self.caches)
        plan = step.plan(self.model.device)

        def select(module, args):  # `logits_to_keep` would need its indices on the device of the last layer
            return args[0][:, plan.logit_indices.to(args[0].device)], *args[1:]

        handle = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            output = self.model(
                input_ids=plan.input_ids[None], position_ids=plan.positions[None], use_cache=False, step=step
            )
        finally:
            handle.remove()
        return output.logits[0].float()

    def _sample(self, slots: list[Slot], logits: torch.Tensor) -> list[int]:
        """A token for each of these slots, from (slots, vocabulary) logits."""
        sampling = self.local.sampling
        stop_ids = [token for token in self.local.stop_ids if token < logits.shape[-1]]
        too_short = [row for row, slot in enumerate(slots) if len(slot.request.reply) < sampling.min_new_tokens]
        if too_short and stop_ids:
            rows, columns = (torch.tensor(indices, device=logits.device) for indices in (too_short, stop_ids))
            logits[rows[:, None], columns] = -math.inf
        if not sampling.do_sample:
            return logits.argmax(-1).tolist()
        sampled = draw(self.warp(None, logits).softmax(-1)).tolist()
        if max(sampled) == logits.shape[-1]:
            raise RuntimeError("the model's logits are NaN or infinite; if it runs in float16, try --bf16 True")
        return sampled

    def _append(self, slot: Slot, token: int) -> tuple[int, Reply] | None:
        """Add a sampled token to a reply. Returns (request, reply) if the reply ends with it."""
        request = slot.request
        request.reply.append(token)
        if token not in self.local.stop_ids and len(request.reply) < request.limit:
            slot.token_ids.append(token)
            return None
        slot.request = None
        self.idle.append(slot)
        self.block_limit = min(self.max_blocks, self.block_limit * RECOVERY)
        self.counts.prompts += 1
        self.counts.prompt_tokens += len(request.prompt_ids)
        self.counts.new_tokens += len(request.reply)
        return request.number, self.local.decode(request.reply, request.prompt_cut)


def _num_pending(slot: Slot) -> int:
    """Tokens that are not cached yet."""
    return len(slot.token_ids) - slot.num_cached_tokens


def _num_blocks(slot: Slot) -> int:
    """The blocks of a slot, which are what it costs to compute it again."""
    return len(slot.block_table)


def _num_common(cached: list[int], token_ids: list[int]) -> int:
    """Number of first tokens that are cached. The last token does not count: its logits must be computed."""
    return len(commonprefix([cached, token_ids[:-1]]))  # works on lists as on strings


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """One index per row of (rows, choices) probabilities; the number of choices for a row with NaN.

    Takes one random number a row. torch.multinomial takes one for each choice, which is slow on a CPU.
    """
    if probabilities.device.type == "mps":  # has no float64
        probabilities = probabilities.cpu()
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]
    # The first index whose sum is larger: never one of probability 0.
    return torch.searchsorted(sums, drawn, right=True)[:, 0]


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """The changes that `generate` makes to logits before it samples, in its order."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def can_hold(model, max_length: int) -> bool:
    """Whether every layer attends to all earlier tokens, through transformers' attention interface.

    False where keys and values differ in size, and for rotary positions that depend on the longest prompt of a batch.
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
    )
