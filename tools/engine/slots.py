"""The slot engine: continuous batching over games, with the keys and values of each game kept between its prompts.

Every game has a slot that caches its last prompt and reply. The game's next prompt, for either role, begins with the
same rules and history, so that only the tokens after them are computed. The prefix of all prompts is computed and
stored once. A step decodes one token of every running reply and prefills new prompts; a finished reply frees its slot
at once. How many replies run at a time follows from the lengths of those before; when the cache is full
nevertheless, the youngest wait.

(With chat templates the prompts of the two roles share the rules only, and a game that finds no slot of its own starts
from the common prefix: slower, with the same replies.)

The model is transformers' own; only its attention function is replaced, by the one in tools/engine/attention.py.
"""

import functools
import math
from collections import deque
from dataclasses import dataclass, field
from os.path import commonprefix

import torch
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tools.engine.attention import ATTENTION, BLOCK, BlockManager, LayerCache, Plan, Slot, Step, num_blocks_for, upload
from tools.engine.linear import pack_weights
from tools.engine.model import Counts, LocalModel
from tools.players.player import Reply, Sampling
from utils import warn_on_rank_0

PREFILL_TOKENS = 2048  # of prompts in a step at most: bounds the memory of activations
RECOVERY = 1.0001  # what memory that ran out is tried to have again, with each reply


@dataclass(eq=False)
class Request:
    """A prompt of a game and its reply so far."""

    number: int
    prompt: str
    game: int
    limit: int  # tokens of the reply at most
    ids: list[int] = field(default_factory=list)  # of the prompt, once it was encoded
    reply: list[int] = field(default_factory=list)
    prompt_cut: bool = False


class SlotEngine:
    """Continuous batching over at most `slots` games at a time, for models that `can_hold` accepts.

    Keys and values take at most the tokens of `local.cache_tokens`, beyond the common prefix.
    """

    def __init__(self, local: LocalModel, slots: int):
        self.local, self.model = local, local.model
        self.model.set_attn_implementation(ATTENTION)
        pack_weights(self.model)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and every prompt has its own
        self.warp = _warpers(local.sampling)
        self.counts = Counts()
        self.waiting: deque[Request] = deque()
        self.slots = [Slot() for _ in range(slots)]
        self.idle = self.slots.copy()  # without a request: the empty ones first, then those that wait longest
        self.prefix: list[int] = []
        self.caches: dict[int, LayerCache] = {}  # by layer
        self.block_manager = BlockManager()
        tokens = local.cache_tokens
        self.most_blocks: float = math.inf if tokens is None else max(1, tokens // BLOCK)
        self.fitting = self.most_blocks  # fewer for a while after the device ran out of memory

    def start(self, request: int, prompt: str, *, game: int, limit: int | None = None) -> None:
        """Queue a request; its prompt is expected to begin as earlier ones of this `game` did."""
        self.waiting.append(Request(request, prompt, game, limit or self.local.sampling.max_new_tokens))

    @torch.inference_mode()
    def run(self) -> list[tuple[int, Reply]]:
        """Step until at least one reply has ended: (request, reply) pairs."""
        out_of_memory = False
        while True:
            try:
                if out_of_memory:  # not in the handler, whose traceback keeps tensors alive
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
        """Give waiting requests slots: the slot of the same game first, then others while the replies still fit."""
        if not self.waiting:
            return
        own = {slot.game: slot for slot in self.idle}
        # Requests with a slot of their own go first, so that no other takes it.
        requests = sorted(self.waiting, key=lambda request: request.game not in own)[: len(self.idle)]
        for request in requests:
            if not request.ids:
                request.ids, request.prompt_cut = self.local.encode(request.prompt)
        if not self.caches and requests:
            self._compute_prefix([request.ids for request in requests])
        busy = [self._likely_blocks(len(slot.ids) + len(slot.pending) - slot.shared) for slot in self._busy()]
        free = self.fitting - sum(busy)
        for request in requests:
            ids = request.ids + request.reply
            common = _num_common(self.prefix, ids)
            free -= self._likely_blocks(len(ids) - common)
            slot = own.pop(request.game, None)
            if slot is None:
                if free < 0 and len(self.idle) < len(self.slots):
                    break
                slot = self.idle[0]
            self._assign(slot, request, ids, common)

    def _assign(self, slot: Slot, request: Request, ids: list[int], common: int) -> None:
        """Begin a request: reuse the longest cached prefix of its tokens, the slot's own or the common one."""
        kept = _num_common(slot.ids, ids)
        if kept <= max(slot.shared, common):  # none of the slot's own blocks, which begin at `shared`, is of use
            kept = slot.shared = common
        slot.ids, slot.pending, slot.request, slot.game = ids[:kept], ids[kept:], request, request.game
        self.block_manager.resize(slot.blocks, kept - slot.shared)
        self.idle.remove(slot)
        self.waiting.remove(request)

    def _likely_blocks(self, tokens: int) -> int:
        """Blocks of a slot with so many tokens at the end of its reply, if that is as long as those before."""
        counts, longest = self.counts, self.local.sampling.max_new_tokens
        reply = counts.new_tokens // counts.prompts if counts.prompts else longest
        return num_blocks_for(tokens + reply)

    def _compute_prefix(self, prompts: list[list[int]]) -> None:
        """Compute the prefix that the first prompts have in common."""
        prefix = list(commonprefix([ids[:-1] for ids in prompts]))
        if prefix:
            blocks = list(range(num_blocks_for(len(prefix))))
            self._forward([Slot(blocks=blocks, pending=prefix, chunk=len(prefix))])
            for cache in self.caches.values():
                cache.set_prefix(len(prefix))
        self.prefix = prefix
        self.counts.prefill_tokens = self.counts.prefix_tokens = len(prefix)

    # --- a step

    def _step(self) -> list[tuple[int, Reply]]:
        """Compute pending tokens and sample a token for every slot without any left; returns the replies that end."""
        slots = self._schedule()
        for cache in self.caches.values():
            cache.grow(self.block_manager.num_blocks, self.fitting)
        self._compact()
        logits = self._forward(slots)
        for slot in slots:
            decoded = slot.chunk == 1 and slot.request.reply
            self.counts.prefill_tokens += 0 if decoded else slot.chunk
            slot.ids += slot.pending[: slot.chunk]
            del slot.pending[: slot.chunk]
        self.counts.steps += 1
        self.counts.at_once = max(self.counts.at_once, len(slots))
        complete = [slot for slot in slots if not slot.pending]
        return self._sample(complete, logits) if complete else []

    def _schedule(self) -> list[Slot]:
        """The slots of a step: one token of every running reply, then prompts up to PREFILL_TOKENS."""
        while True:
            slots = sorted(self._busy(), key=lambda slot: len(slot.pending))
            budget = len(slots) + PREFILL_TOKENS
            for slot in slots:
                slot.chunk = min(len(slot.pending), budget)
                budget -= slot.chunk
            if self._have_room(slots):
                break
        for slot in slots:
            self.block_manager.resize(slot.blocks, slot.places.stop)
        return [slot for slot in slots if slot.chunk]

    def _have_room(self, slots: list[Slot]) -> bool:
        """Whether the chunks of these slots fit; makes room by idle caches, else parks a request if it can."""
        more = sum(num_blocks_for(slot.places.stop) - len(slot.blocks) for slot in slots)
        for slot in self.idle:
            if self.block_manager.used + more > self.fitting:
                self._clear(slot)
        if self.block_manager.used + more <= self.fitting or len(slots) == 1:
            return True
        self._park(min(slots, key=lambda slot: len(slot.blocks)))  # with the fewest tokens to compute again
        return False

    def _park(self, slot: Slot) -> None:
        """Let the request of a slot wait."""
        self.waiting.appendleft(slot.request)
        self.idle.insert(0, slot)
        self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        self.block_manager.resize(slot.blocks, 0)
        slot.ids, slot.pending, slot.shared, slot.request, slot.game = [], [], 0, None, None

    def _compact(self) -> None:
        """Put the blocks of the busy slots first."""
        idle = [slot.blocks for slot in self.idle]
        moves = self.block_manager.compact([slot.blocks for slot in self._busy()], idle)
        if moves[0] and self.caches:
            overwritten, source = upload(moves, self.model.device)
            for cache in self.caches.values():
                cache.moves.append((overwritten, source))

    def _shrink(self) -> None:
        """After the device ran out of memory: park an eighth of the requests, and free what no other needs."""
        busy = sorted(self._busy(), key=lambda slot: len(slot.blocks))
        parked = busy[: 1 + len(busy) // 8]
        warn_on_rank_0("out of memory with %d replies at a time; %d wait", len(busy), len(parked))
        for slot in parked:
            self._park(slot)
        for slot in self.idle:
            self._clear(slot)
        self.fitting = max(1, min(self.fitting, self.block_manager.used))
        for slot in self._busy():  # the new blocks of the step that failed hold nothing, and may not be in all layers
            self.block_manager.resize(slot.blocks, len(slot.ids) - slot.shared)
        self._compact()
        self.block_manager.forget_free()
        for cache in self.caches.values():
            cache.shrink(self.block_manager.num_blocks)
        torch.cuda.empty_cache()

    def _forward(self, slots: list[Slot]) -> torch.Tensor:
        """Compute the chunks of these slots: logits of the last pending tokens, in float32: (slots, vocabulary)."""
        plan = functools.cache(functools.partial(Plan, slots, len(self.prefix)))
        step = Step(plan, self.caches, num_blocks=1 + max(max(slot.blocks) for slot in slots))
        here = plan(self.model.device)

        def select(module, args):  # not by `logits_to_keep`, which must be where the last layer is
            return args[0][:, here.ends.to(args[0].device)], *args[1:]

        handle = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            output = self.model(
                input_ids=here.tokens[None], position_ids=here.positions[None], use_cache=False, step=step
            )
        finally:
            handle.remove()
        return output.logits[0].float()

    def _sample(self, slots: list[Slot], logits: torch.Tensor) -> list[tuple[int, Reply]]:
        """Sample a token for each of these slots from (slots, vocabulary) logits; the replies that end with it."""
        sampling, stop_ids = self.local.sampling, self.local.stop_ids
        too_short = [row for row, slot in enumerate(slots) if len(slot.request.reply) < sampling.min_new_tokens]
        if too_short and stop_ids:
            rows, columns = upload([too_short, stop_ids], logits.device)
            logits[rows[:, None], columns] = -math.inf
        if sampling.do_sample:
            sampled = draw(self.warp(None, logits).softmax(-1)).tolist()
            if max(sampled) == logits.shape[-1]:
                raise RuntimeError("the model's logits are no numbers; if it runs in float16, try --bf16 True")
        else:
            sampled = logits.argmax(-1).tolist()
        finished = []
        for slot, token in zip(slots, sampled, strict=True):
            slot.request.reply.append(token)
            if token in stop_ids or len(slot.request.reply) == slot.request.limit:
                finished.append(self._finish(slot))
            else:
                slot.pending = [token]
        return finished

    def _finish(self, slot: Slot) -> tuple[int, Reply]:
        request, slot.request = slot.request, None
        self.idle.append(slot)
        self.fitting = min(self.most_blocks, self.fitting * RECOVERY)
        self.counts.prompts += 1
        self.counts.prompt_tokens += len(request.ids)
        self.counts.new_tokens += len(request.reply)
        return request.number, self.local.decode(request.reply, request.prompt_cut)


def _num_common(cached: list[int], ids: list[int]) -> int:
    """Tokens that need not be computed; the last must be, for its logits."""
    return len(commonprefix([cached, ids[:-1]]))  # works on lists as on strings


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """One index per row of (rows, choices) probabilities; the number of choices where they are no numbers.

    Takes one random number a row. torch.multinomial takes one for each choice, which is slow on a CPU.
    """
    if probabilities.device.type == "mps":  # has no float64
        probabilities = probabilities.cpu()
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]
    # The first index whose sum is larger: never one of probability 0.
    return torch.searchsorted(sums, drawn, right=True)[:, 0]


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """What `generate` does to logits before it samples, in its order."""
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
