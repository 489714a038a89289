"""Paged attention for the slot engine: the tokens of many games in one sequence, without padding.

The prefix that all prompts share is stored once. The keys and values of the tokens after it lie in blocks of BLOCK
tokens, as in vLLM (Kwon et al. 2023, arXiv 2309.06180), so that short games beside long ones cost neither memory nor
time. A `Plan` lays out a forward pass; the attention function that is registered with transformers follows it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, takewhile
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

ATTENTION = "spag_paged"  # name of the attention function in transformers
BLOCK = 32  # tokens


def num_blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK)


@dataclass(eq=False)
class Slot:
    """A game's cached tokens, and those that the next step computes."""

    ids: list[int] = field(default_factory=list)  # cached tokens; the first `shared` lie in the common prefix
    shared: int = 0
    blocks: list[int] = field(default_factory=list)  # of the tokens after the common prefix
    pending: list[int] = field(default_factory=list)  # tokens to compute; the logits of the last give the next token
    chunk: int = 0  # of the pending tokens, those that the next step computes
    request: Any = None  # None: idle
    game: int | None = None

    @property
    def places(self) -> range:
        """Where the chunk goes, as indices of tokens in the blocks."""
        start = len(self.ids) - self.shared
        return range(start, start + self.chunk)


class BlockManager:
    """Allocates blocks by number."""

    def __init__(self):
        self.num_blocks = 0  # that were ever used
        self.free: list[int] = []

    @property
    def used(self) -> int:
        """Blocks that slots hold."""
        return self.num_blocks - len(self.free)

    def resize(self, blocks: list[int], tokens: int) -> None:
        """Allocate or free blocks at the end of a slot's list until it just holds `tokens` tokens."""
        count = num_blocks_for(tokens)
        while len(blocks) > count:
            self.free.append(blocks.pop())
        while len(blocks) < count:
            if not self.free:
                self.free.append(self.num_blocks)
                self.num_blocks += 1
            blocks.append(self.free.pop())

    def compact(self, busy: list[list[int]], idle: list[list[int]]) -> tuple[list[int], list[int]]:
        """Renumber the blocks so that the busy slots' come first: a step then reads them without a copy.

        Returns the blocks to overwrite, and the blocks to overwrite them with.
        """
        used = {block for blocks in busy for block in blocks}
        high = [block for block in used if block >= len(used)]
        low = [block for block in range(len(used)) if block not in used]
        exchanged = dict(zip(high + low, low + high, strict=True))
        for blocks in (*busy, *idle, self.free) if exchanged else ():
            blocks[:] = [exchanged.get(block, block) for block in blocks]
        return low + high, high + low

    def forget_free(self) -> None:
        """Free blocks leave memory; the used ones must come first."""
        self.num_blocks, self.free = self.used, []


class LayerCache:
    """Keys and values: `prefix` (2, kv heads, prefix, size) and `blocks` (2, blocks, kv heads, size, BLOCK).

    A block's tokens come last: products with single queries are up to twice as quick on a CPU so.
    """

    def __init__(self, keys: torch.Tensor, size: int):
        """Empty, with `size` blocks for (1, kv heads, tokens, size) keys such as these."""
        self.prefix = keys.new_zeros(2, keys.shape[1], 0, keys.shape[3])
        self.blocks = keys.new_zeros(2, size, keys.shape[1], keys.shape[3], BLOCK)
        self.moves: list[tuple[torch.Tensor, torch.Tensor]] = []  # that are still to be made

    def set_prefix(self, tokens: int) -> None:
        """Make the first tokens of the blocks the prefix; the blocks go."""
        self.prefix = self.tokens_of(slice(None))[:, :, :tokens].clone()
        self.shrink(0)

    def tokens_of(self, blocks: torch.Tensor | slice) -> torch.Tensor:
        """Keys and values of all tokens of some blocks: (2, kv heads, tokens, size)."""
        return self.blocks[:, blocks].permute(0, 2, 1, 4, 3).flatten(2, 3)

    def grow(self, size: int, most: float) -> None:
        """Grow to `size` blocks, and a quarter to spare if `most` allows; new blocks are zero-filled."""
        old = self.blocks  # what no token attends to must be numbers
        if size > old.shape[1]:
            self.blocks = old.new_zeros(2, max(size, int(min(size + size // 4, most))), *old.shape[2:])
            self.blocks[:, : old.shape[1]] = old

    def shrink(self, size: int) -> None:
        """Keep the first `size` blocks only."""
        self.move()
        if size < self.blocks.shape[1]:
            self.blocks = self.blocks[:, :size].clone()

    def move(self) -> None:
        """Make the moves. One that fails for want of memory is made later."""
        while self.moves:
            overwritten, source = (one.to(self.blocks.device) for one in self.moves[0])
            moved = self.blocks[:, source]
            self.blocks.index_copy_(1, overwritten, moved)  # which takes no memory, so that all or none are moved
            del self.moves[0]

    def write(self, keys: torch.Tensor, values: torch.Tensor, plan: "Plan") -> None:
        """Store a step's tokens, (1, kv heads, tokens, size) each."""
        self.move()
        self.blocks[:, plan.blocks, :, :, plan.offsets] = torch.cat([keys, values]).permute(2, 0, 1, 3)


# Planning.


class PrefillChunk(NamedTuple):
    """A chunk of several tokens."""

    tokens: slice  # of the step's tokens
    shared: int
    blocks: torch.Tensor  # (blocks,)
    mask: torch.Tensor  # (tokens, cached tokens + tokens), True where a token attends


class Plan:
    """The tokens of a forward pass, where they are stored and what they attend to, on one device.

    The first `rows` are chunks of a single token, which attend together: each used block is read once.
    """

    def __init__(self, slots: Sequence[Slot], prefix: int, device: torch.device):
        """Of the chunks of these slots, those of one token first; `prefix` is the common prefix's length."""
        single = list(takewhile(lambda slot: slot.chunk == 1, slots))
        self.rows, longer = len(single), slots[len(single) :]
        ends = list(accumulate(slot.chunk for slot in slots))
        # Of the blocks up to the rows' highest: whose each is, and how many of its tokens attend besides the first.
        row, visible = ([0] * (1 + max((max(slot.blocks) for slot in single), default=-1)) for _ in range(2))
        for number, slot in enumerate(single):
            for block in slot.blocks:
                row[block], visible[block] = number, BLOCK - 1
            visible[slot.blocks[-1]] = slot.places[0] % BLOCK
        lists = [
            [token for slot in slots for token in slot.pending[: slot.chunk]],
            [len(slot.ids) + index for slot in slots for index in range(slot.chunk)],
            [slot.blocks[place // BLOCK] for slot in slots for place in slot.places],
            [place % BLOCK for slot in slots for place in slot.places],
            [end - 1 for slot, end in zip(slots, ends, strict=True) if slot.chunk == len(slot.pending)],
            [block for slot in single for block in slot.blocks],
            list(accumulate((len(slot.blocks) for slot in single), initial=0))[:-1],
            row,
            visible,
            [slot.shared for slot in single],
            *(slot.blocks for slot in longer),
        ]
        (
            self.tokens,  # (tokens,)
            self.positions,  # (tokens,) in their prompts
            self.blocks,  # (tokens,) where keys and values go
            self.offsets,  # (tokens,) in the block
            self.ends,  # (slots with no token pending afterwards,) index of each one's last token
            self.row_blocks,  # (blocks,) of the rows, one row after the other
            self.row_starts,  # (rows,) where each row begins there
            self.row,  # (used blocks,) whose row each block belongs to; of other slots' blocks, any
            visible,
            shared,
            *tables,
        ) = upload(lists, device)
        # Added to the rows' scores, (used blocks, BLOCK) and (rows, prefix): -inf where a token must not attend.
        self.block_mask = torch.where(torch.arange(BLOCK, device=device) > visible[:, None], -math.inf, 0.0)
        self.prefix_mask = None
        if any(slot.shared < prefix for slot in single):
            self.prefix_mask = torch.where(torch.arange(prefix, device=device) >= shared[:, None], -math.inf, 0.0)
        self.prefills = []
        for slot, end, table in zip(longer, ends[self.rows :], tables, strict=True):
            cached = len(slot.ids)
            mask = torch.ones(slot.chunk, cached + slot.chunk, dtype=torch.bool, device=device).tril(cached)
            self.prefills.append(PrefillChunk(slice(end - slot.chunk, end), slot.shared, table, mask))

    def reduce(self, values: torch.Tensor, mode: str) -> torch.Tensor:
        """The "sum" or "max" over each row's blocks: (used blocks, ...) to (rows, ...)."""
        reduced = F.embedding_bag(self.row_blocks, values.flatten(1), self.row_starts, mode=mode)
        return reduced.unflatten(1, values.shape[1:])


@dataclass
class Step:
    """A forward pass. Not a tuple, which accelerate's hooks would copy."""

    plan: Callable[[torch.device], Plan]
    caches: dict[int, LayerCache]  # by layer
    num_blocks: int  # that there must be
    attended: set[int] = field(default_factory=set)  # layers that have


def upload(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """The lists as tensors on the device, by one copy."""
    packed = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.long).to(device)
    return list(packed.split([len(one) for one in lists]))


# Attention.


def _attend(module, query, key, value, attention_mask, scaling, step: Step, **kwargs):
    """The attention function: (1, heads, tokens, size) each to (1, tokens, heads, size), None."""
    layer = module.layer_idx
    if layer in step.attended:
        raise RuntimeError("this model attends twice in a layer, which this engine cannot do; --engine generate can")
    step.attended.add(layer)
    if layer not in step.caches:
        step.caches[layer] = LayerCache(key, step.num_blocks)
    cache, plan = step.caches[layer], step.plan(query.device)
    cache.write(key, value, plan)
    queries = query[0].transpose(0, 1) * scaling
    outputs = [_attend_prefill(queries, cache, chunk) for chunk in plan.prefills]
    if plan.rows:
        outputs.insert(0, _attend_decode(queries[: plan.rows], cache, plan))
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[None], None


def _attend_prefill(queries: torch.Tensor, cache: LayerCache, chunk: PrefillChunk) -> torch.Tensor:
    """Attention of a chunk's tokens: (tokens, heads, size)."""
    own = cache.tokens_of(chunk.blocks)[:, :, : chunk.mask.shape[1] - chunk.shared]
    seen = torch.cat([cache.prefix[:, :, : chunk.shared], own], 2)  # (2, kv heads, tokens, size)
    # Not by `enable_gqa`: with a mask, a GPU would then take torch's slow way, which holds all scores.
    share = queries.shape[1] // seen.shape[1]
    keys, values = seen[:, :, None].expand(-1, -1, share, -1, -1).flatten(1, 2)[:, None]
    query = queries[chunk.tokens].transpose(0, 1)[None]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=chunk.mask, scale=1.0)[0].transpose(0, 1)


def _attend_decode(queries: torch.Tensor, cache: LayerCache, plan: Plan) -> torch.Tensor:
    """Attention of single tokens: (rows, heads, size). In half precision scores are rounded, as by eager attention."""
    row, (prefix_keys, prefix_values) = plan.row, cache.prefix
    keys, values = cache.blocks[:, : len(row)]  # (used blocks, kv heads, size, BLOCK)
    rows, kv_heads, size = len(queries), keys.shape[1], keys.shape[2]
    grouped = queries.view(rows, kv_heads, -1, size)  # (rows, kv heads, share, size): heads with the same keys
    to_prefix = grouped.transpose(0, 1).flatten(1, 2) @ prefix_keys.mT  # (kv heads, rows x share, prefix)
    to_prefix = to_prefix.float().unflatten(1, (rows, -1)).transpose(0, 1)
    if plan.prefix_mask is not None:
        to_prefix.add_(plan.prefix_mask[:, None, None])
    to_blocks = (grouped.index_select(0, row) @ keys).float()  # (used blocks, kv heads, share, BLOCK)
    to_blocks.add_(plan.block_mask[:, None, None])
    # Softmax over prefix and blocks: each row's highest score, and the sum of its weights: (rows, kv heads, share, 1).
    highest = plan.reduce(to_blocks.amax(-1, keepdim=True), "max")
    if prefix_keys.shape[1]:
        highest = torch.maximum(highest, to_prefix.amax(-1, keepdim=True))
    to_prefix, to_blocks = to_prefix.sub_(highest).exp_(), to_blocks.sub_(highest[row]).exp_()
    sums = to_prefix.sum(-1, keepdim=True) + plan.reduce(to_blocks.sum(-1, keepdim=True), "sum")
    of_prefix = to_prefix.div_(sums).to(queries.dtype).transpose(0, 1).flatten(1, 2) @ prefix_values
    of_blocks = plan.reduce(to_blocks.div_(sums[row]).to(queries.dtype) @ values.mT, "sum")
    return (of_prefix.unflatten(1, (rows, -1)).transpose(0, 1) + of_blocks).flatten(1, 2)


AttentionInterface.register(ATTENTION, _attend)
