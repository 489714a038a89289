"""The slot engine: continuous batching in which every game keeps its keys and values between its prompts.

Each game has a slot. The slot caches the keys and values of the game's last prompt and reply. The next prompt of the
game, for either role, begins with the same rules and history, so only the tokens after them are computed. The common
prefix, with which the prompts of all games begin, is computed and stored once.

A step is one forward pass. It computes one token of every running reply, and tokens of new prompts. When a reply ends,
its slot can take the next request at once. The engine starts a request if its prompt and a reply of mean length fit in
the cache. If replies turn out longer and the cache is full, the requests that are cheapest to recompute are preempted:
they lose their cached tokens, wait, and are computed again later.

With a chat template, the prompts of the two roles share only the rules, so the cache saves less. It never changes a
reply.

The model is transformers' own. Only its attention function is replaced, by the one in attention.py.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from os.path import commonprefix

import torch
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tools.engine.attention import ATTENTION, BLOCK, BlockManager, LayerCache, Slot, Step, num_blocks_for
from tools.engine.linear import pack_weights
from tools.engine.model import LocalModel
from tools.players.player import Reply, Sampling
from utils import warn_on_rank_0

PREFILL_TOKENS = 2048  # maximum of prompt tokens in a step: bounds the memory of activations
RECOVERY = 1.0001  # after running out of memory, raise the block limit by this factor for each finished reply


@dataclass(eq=False)
class Request:
    """A prompt and its reply so far."""

    number: int
    prompt: str
    game: int
    limit: int  # maximum number of tokens of the reply
    prompt_ids: list[int] = field(default_factory=list)  # empty until the prompt is encoded
    reply: list[int] = field(default_factory=list)
    prompt_cut: bool = False


class SlotEngine:
    """Continuous batching of at most `slots` requests, for models that `can_hold` accepts.

    Besides the common prefix, the cache holds the keys and values of at most `local.cache_tokens` tokens.
    """

    def __init__(self, local: LocalModel, slots: int):
        self.local, self.model = local, local.model
        self.model.set_attn_implementation(ATTENTION)
        pack_weights(self.model)
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN would make a new plan for each length of a prompt
        self.warp = _warpers(local.sampling)
        self.num_replies = self.num_reply_tokens = 0  # of finished replies
        self.waiting: deque[Request] = deque()
        self.slots = [Slot() for _ in range(slots)]
        self.idle = self.slots.copy()  # slots without a request, in the order in which new games take them
        self.prefix: list[int] = []  # token ids of the common prefix
        self.caches: dict[int, LayerCache] = {}  # by layer
        self.block_manager = BlockManager()
        tokens = local.cache_tokens
        self.max_blocks: float = math.inf if tokens is None else max(1, tokens // BLOCK)
        self.block_limit = self.max_blocks  # maximum at present: lower for a while after running out of memory

    def start(self, request: int, prompt: str, *, game: int, limit: int | None = None, seed: int = 0) -> None:
        """Queue a request. `limit`: maximum number of tokens of the reply (None: --max_new_tokens). No use of `seed`.

        The leading tokens that this prompt shares with the last prompt and reply of the same `game` are not computed
        again.
        """
        self.waiting.append(Request(request, prompt, game, limit or self.local.sampling.max_new_tokens))

    @torch.inference_mode()
    def run(self) -> list[tuple[int, Reply]]:
        """Compute until at least one reply has ended. Returns the (request, reply) pairs of the replies that ended."""
        out_of_memory = False
        while True:
            try:
                if out_of_memory:  # not inside `except`, where the traceback still keeps tensors alive
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
        """Give slots to waiting requests.

        A request takes the slot of its game if that is idle. Otherwise it takes another idle slot, as long as the
        prompts and the expected replies fit in the cache.
        """
        if not self.waiting:
            return
        own = {slot.game: slot for slot in self.idle}
        # Requests whose game has an idle slot go first, so that no other request takes that slot.
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
        """Give a slot to a request, which reuses the cached tokens of the slot or the common prefix."""
        cached = _num_common(slot.token_ids, token_ids)
        if cached <= max(slot.num_prefix_tokens, prefix_tokens):  # the slot has no more than the common prefix has
            cached = slot.num_prefix_tokens = prefix_tokens
        slot.token_ids, slot.num_cached_tokens = token_ids, cached
        slot.request, slot.game = request, request.game
        self.block_manager.resize(slot.block_table, cached - slot.num_prefix_tokens)
        self.idle.remove(slot)
        self.waiting.remove(request)

    def _expected_blocks(self, tokens: int) -> int:
        """Blocks for `tokens` tokens and a reply of mean length, or of maximum length until a reply has ended."""
        if not self.num_replies:
            return num_blocks_for(tokens + self.local.sampling.max_new_tokens)
        return num_blocks_for(tokens + self.num_reply_tokens // self.num_replies)

    def _compute_prefix(self, prompts: list[list[int]]) -> None:
        """Compute and store the common prefix: the tokens with which all of these prompts begin."""
        prefix = list(commonprefix([ids[:-1] for ids in prompts]))
        if prefix:
            block_table = list(range(num_blocks_for(len(prefix))))
            self._forward([Slot(token_ids=prefix, block_table=block_table, num_new_tokens=len(prefix))])
            for cache in self.caches.values():
                cache.set_prefix(len(prefix))
        self.prefix = prefix

    # --- a step

    def _step(self) -> list[tuple[int, Reply]]:
        """One forward pass, then a sampled token for each slot whose tokens are all computed.

        Returns (request, reply) pairs of the replies that ended. Tokens are added to slots and requests only after
        everything that may run out of memory, so a failed step can be repeated.
        """
        slots = self._schedule()
        for cache in self.caches.values():
            cache.grow(self.block_manager.num_blocks, self.block_limit)
        self._compact()
        logits = self._forward(slots)
        complete = [slot for slot in slots if slot.is_complete]
        sampled = self._sample(complete, logits) if complete else []
        for slot in slots:
            slot.num_cached_tokens += slot.num_new_tokens
        replies = [self._append(slot, token) for slot, token in zip(complete, sampled, strict=True)]
        return [reply for reply in replies if reply]

    def _schedule(self) -> list[Slot]:
        """Choose the new tokens: one for every running reply, and at most PREFILL_TOKENS of prompts.

        Returns the slots that have new tokens, those with the fewest pending tokens first.
        """
        while True:
            slots = sorted(self._busy(), key=lambda slot: slot.num_pending_tokens)
            budget = len(slots) + PREFILL_TOKENS
            for slot in slots:
                slot.num_new_tokens = min(slot.num_pending_tokens, budget)
                budget -= slot.num_new_tokens
            if self._make_room(slots):
                break
        for slot in slots:
            self.block_manager.resize(slot.block_table, slot.num_block_tokens)
        return [slot for slot in slots if slot.num_new_tokens]

    def _make_room(self, slots: list[Slot]) -> bool:
        """Make room for the new tokens of these slots, and return whether they fit now.

        Idle slots are cleared first. If that is not enough, one of these slots is preempted, and the result is False.
        """
        more = sum(num_blocks_for(slot.num_block_tokens) - len(slot.block_table) for slot in slots)
        for slot in self.idle:
            if self.block_manager.num_used + more > self.block_limit:
                self._clear(slot)
        if self.block_manager.num_used + more <= self.block_limit or len(slots) == 1:
            return True
        self._preempt(min(slots, key=recompute_cost))
        return False

    def _preempt(self, slot: Slot) -> None:
        """Clear a slot, and put its request first among the waiting ones."""
        self.waiting.appendleft(slot.request)
        self.idle.insert(0, slot)
        self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        self.block_manager.resize(slot.block_table, 0)
        slot.token_ids, slot.num_cached_tokens, slot.num_prefix_tokens = [], 0, 0
        slot.request = slot.game = None

    def _compact(self) -> None:
        """Give the blocks of the busy slots the lowest numbers. Each layer's cache moves its data when it is used."""
        idle = [slot.block_table for slot in self.idle]
        moves = self.block_manager.compact([slot.block_table for slot in self._busy()], idle)
        if moves[0]:
            targets, sources = (torch.tensor(blocks, device=self.model.device) for blocks in moves)
            for cache in self.caches.values():
                cache.moves.append((targets, sources))

    def _shrink(self) -> None:
        """After running out of memory: preempt an eighth of the busy slots, and free all unused blocks."""
        busy = sorted(self._busy(), key=recompute_cost)
        preempted = busy[: 1 + len(busy) // 8]
        warn_on_rank_0("out of memory with %d replies at a time; %d of them have to wait", len(busy), len(preempted))
        for slot in preempted:
            self._preempt(slot)
        for slot in self.idle:
            self._clear(slot)
        self.block_limit = max(1, min(self.block_limit, self.block_manager.num_used))
        # Free the blocks that the failed step had reserved: not every layer's cache had grown to hold them.
        for slot in self._busy():
            self.block_manager.resize(slot.block_table, slot.num_cached_tokens - slot.num_prefix_tokens)
        self._compact()
        self.block_manager.drop_free()
        for cache in self.caches.values():
            cache.shrink(self.block_manager.num_blocks)
        torch.cuda.empty_cache()

    def _forward(self, slots: list[Slot]) -> torch.Tensor:
        """Compute the new tokens of these slots.

        Returns float32 logits (complete slots, vocabulary). Each row predicts the next token of one slot.
        """
        step = Step(slots, len(self.prefix), self.caches)
        plan = step.plan(self.model.device)

        # Logits are computed only where a token is sampled. (transformers' `logits_to_keep` would do the same, but
        # needs the indices on the device of the last layer.)
        def select(module, args):
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
        """A token for each of these slots. `logits`: (slots, vocabulary)."""
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
        """Add a sampled token to a reply. Returns (request, reply) if the reply has ended."""
        request = slot.request
        request.reply.append(token)
        if token not in self.local.stop_ids and len(request.reply) < request.limit:
            slot.token_ids.append(token)
            return None
        slot.request = None
        self.idle.append(slot)
        self.block_limit = min(self.max_blocks, self.block_limit * RECOVERY)
        self.num_replies += 1
        self.num_reply_tokens += len(request.reply)
        return request.number, self.local.decode(request.reply, request.prompt_cut)


def recompute_cost(slot: Slot) -> int:
    """How much it costs to compute the tokens of a slot again, in blocks."""
    return len(slot.block_table)


def _num_common(cached: list[int], token_ids: list[int]) -> int:
    """Number of tokens at the beginning of `token_ids` that are cached.

    The last token never counts: it must be computed, since its logits are needed.
    """
    return len(commonprefix([cached, token_ids[:-1]]))  # `commonprefix` works on lists too


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """Draw one index for each row of (rows, choices) probabilities. A row with NaN gives `choices`: no valid index.

    Uses one random number for each row. torch.multinomial uses one for each choice, which is slow on a CPU.
    """
    if probabilities.device.type == "mps":  # Apple's GPUs have no float64
        probabilities = probabilities.cpu()
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]
    # The first index whose sum is larger than the drawn number. Its probability is never 0.
    return torch.searchsorted(sums, drawn, right=True)[:, 0]


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """The changes to logits that `generate` makes before it samples, in the same order."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def can_hold(model, max_length: int) -> bool:
    """Whether the slot engine can run a model with prompts and replies of `max_length` tokens in all.

    Every layer must attend to all earlier tokens, through transformers' attention interface. Keys and values must have
    the same size. The frequencies of rotary positions must not change with the length of a sequence.
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
