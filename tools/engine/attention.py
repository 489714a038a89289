"""Paged attention for the slot engine: the tokens of many games in one sequence, without padding.

The prefix that all prompts share is stored once. The keys and values of the tokens after it lie in blocks of BLOCK
tokens, as in vLLM (Kwon et al. 2023, arXiv 2309.06180), so that short games beside long ones cost neither memory nor
time. `plan_step` lays out a forward pass; the attention function that is registered with transformers follows that
plan. Plain torch operations only.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

ATTENTION = "spag_paged"  # name of the attention function in transformers
BLOCK = 32  # tokens


def num_blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK)


def upload(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """The lists as tensors on the device, by one copy."""
    packed = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.long).to(device)
    return list(packed.split([len(one) for one in lists]))


class BlockManager:
    """Allocates blocks by number, the lowest free one first, so that the used ones lie close together."""

    def __init__(self):
        self.num_blocks = 0  # that were ever used
        self.free: list[int] = []  # a heap

    @property
    def used(self) -> int:
        """Blocks that slots hold."""
        return self.num_blocks - len(self.free)

    def resize(self, blocks: list[int], tokens: int) -> None:
        """Allocate or free blocks at the end of a slot's list until it just holds `tokens` tokens."""
        count = num_blocks_for(tokens)
        while len(blocks) > count:
            heapq.heappush(self.free, blocks.pop())
        while len(blocks) < count:
            if not self.free:
                self.free.append(self.num_blocks)
                self.num_blocks += 1
            blocks.append(heapq.heappop(self.free))

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
        heapq.heapify(self.free)
        return low + high, high + low

    def forget_free(self) -> None:
        """Free blocks leave memory; the used ones must come first."""
        self.num_blocks, self.free = self.used, []


class LayerCache:
    """Keys and values of one layer: `prefix` (kv heads, prefix, size), `blocks` (blocks, kv heads, BLOCK, size)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        """From the prefix's (kv heads, prefix, size) each."""
        # Copies: a view would keep the whole tensor behind it in memory.
        self.prefix = tuple(one.clone(memory_format=torch.contiguous_format) for one in (keys, values))
        self.blocks = [one.new_zeros(0, one.shape[0], BLOCK, one.shape[2]) for one in self.prefix]
        self.moves: list[tuple[torch.Tensor, torch.Tensor]] = []  # that are still to be made

    def grow(self, size: int, most: float = math.inf) -> None:
        """Grow to `size` blocks, and a quarter to spare if `most` allows; new blocks are zero-filled."""
        if size > len(self.blocks[0]):
            self._reallocate(max(size, int(min(size + size // 4, most))))

    def shrink(self, size: int) -> None:
        """Keep the first `size` blocks only."""
        self.move()
        if size < len(self.blocks[0]):
            self._reallocate(size)

    def _reallocate(self, size: int) -> None:
        for number, old in enumerate(self.blocks):
            new = old.new_empty(size, *old.shape[1:])
            new[: len(old)] = old[:size]
            new[len(old) :] = 0  # what no token attends to must be numbers
            self.blocks[number] = new

    def move(self) -> None:
        """Make the moves. One that fails for want of memory is made later."""
        while self.moves:
            overwritten, source = (one.to(self.blocks[0].device) for one in self.moves[0])
            moved = [stored[source] for stored in self.blocks]
            for stored, content in zip(self.blocks, moved, strict=True):
                stored.index_copy_(0, overwritten, content)  # which takes no memory, so that both or none are moved
            del self.moves[0]

    def write(self, keys: torch.Tensor, values: torch.Tensor, plan: "Plan") -> None:
        """Store a step's tokens, (tokens, kv heads, size) each."""
        self.move()
        for stored, new in zip(self.blocks, (keys, values), strict=True):
            stored[plan.blocks, :, plan.offsets] = new


# --- planning ------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Consecutive tokens of a slot that a step computes."""

    slot: int
    tokens: list[int]
    position: int  # of the first token in its prompt
    shared: int  # tokens of the common prefix that the slot builds on; its blocks begin at this position
    blocks: list[int]  # the slot's, with room for these tokens
    complete: bool = True  # whether no token is pending after them

    @property
    def places(self) -> range:
        """Indices of the tokens among those in the slot's blocks."""
        start = self.position - self.shared
        return range(start, start + len(self.tokens))


class DecodeBatch(NamedTuple):
    """The chunks of a single token, first in a step, which attend together: each used block is read once."""

    prefix_mask: torch.Tensor | None  # (rows, prefix), added to scores: -inf where a token must not attend
    block_mask: torch.Tensor  # (used blocks, BLOCK), the same for the blocks
    row: torch.Tensor  # (used blocks,) whose row each block belongs to; of other slots' blocks, any
    blocks: torch.Tensor  # (blocks,) of the rows, one row after the other
    starts: torch.Tensor  # (rows,) where each row begins in `blocks`

    def reduce(self, values: torch.Tensor, mode: str) -> torch.Tensor:
        """The "sum" or "max" over each row's blocks: (used blocks, ...) to (rows, ...)."""
        reduced = F.embedding_bag(self.blocks, values.flatten(1), self.starts, mode=mode)
        return reduced.unflatten(1, values.shape[1:])


class PrefillChunk(NamedTuple):
    """A chunk of several tokens."""

    tokens: slice  # of the step's tokens
    shared: int
    blocks: torch.Tensor  # (blocks,)
    mask: torch.Tensor  # (tokens, cached tokens + tokens), True where a token attends


class Plan(NamedTuple):
    """A step's tokens, where they are stored and what they attend to, on one device."""

    tokens: torch.Tensor  # (tokens,)
    positions: torch.Tensor  # (tokens,) in their prompts
    blocks: torch.Tensor  # (tokens,) where keys and values go
    offsets: torch.Tensor  # (tokens,) in the block
    ends: torch.Tensor  # (complete chunks,) index of each one's last token
    decode: DecodeBatch | None
    prefills: list[PrefillChunk]


@dataclass
class Step:
    """A forward pass over chunks, those of one token first, for games with a common prefix of so many tokens.

    Not a tuple, which accelerate's hooks would copy.
    """

    chunks: Sequence[Chunk]
    caches: dict[int, LayerCache]  # by layer
    prefix: int
    num_blocks: int  # that there must be
    attended: set[int] = field(default_factory=set)  # layers that have
    plans: dict[torch.device, Plan] = field(default_factory=dict)

    def on(self, device: torch.device) -> Plan:
        """The plan on this device, which takes one upload."""
        if device not in self.plans:
            self.plans[device] = plan_step(self.chunks, self.prefix, device)
        return self.plans[device]


@dataclass
class PrefixStep:
    """A forward pass over the common prefix."""

    caches: dict[int, LayerCache]
    attended: set[int] = field(default_factory=set)


def plan_step(chunks: Sequence[Chunk], prefix: int, device: torch.device) -> Plan:
    """How to compute these chunks, those of one token first; `prefix` is the common prefix's length."""
    rows = list(takewhile(lambda chunk: len(chunk.tokens) == 1, chunks))
    ends = list(accumulate(len(chunk.tokens) for chunk in chunks))
    # Of the blocks up to the rows' highest: whose each is, and how many of its tokens attend besides the first.
    row, visible = ([0] * (1 + max((max(chunk.blocks) for chunk in rows), default=-1)) for _ in range(2))
    for number, chunk in enumerate(rows):
        for block in chunk.blocks:
            row[block], visible[block] = number, BLOCK - 1
        visible[chunk.blocks[-1]] = chunk.places[0] % BLOCK
    tokens, positions, blocks, offsets, last, row, visible, of_rows, starts, shared, *tables = upload(
        [
            [token for chunk in chunks for token in chunk.tokens],
            [chunk.position + index for chunk in chunks for index in range(len(chunk.tokens))],
            [chunk.blocks[place // BLOCK] for chunk in chunks for place in chunk.places],
            [place % BLOCK for chunk in chunks for place in chunk.places],
            [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.complete],
            row,
            visible,
            [block for chunk in rows for block in chunk.blocks],
            list(accumulate((len(chunk.blocks) for chunk in rows[:-1]), initial=0)) if rows else [],
            [chunk.shared for chunk in rows],
            *(chunk.blocks for chunk in chunks[len(rows) :]),
        ],
        device,
    )
    decode = None
    if rows:
        prefix_mask = None
        if any(chunk.shared < prefix for chunk in rows):
            prefix_mask = _hide(torch.arange(prefix, device=device) >= shared[:, None])
        block_mask = _hide(torch.arange(BLOCK, device=device) > visible[:, None])
        decode = DecodeBatch(prefix_mask, block_mask, row, of_rows, starts)
    prefills = []
    for chunk, end, table in zip(chunks[len(rows) :], ends[len(rows) :], tables, strict=True):
        length = len(chunk.tokens)
        mask = torch.ones(length, chunk.position + length, dtype=torch.bool, device=device).tril(chunk.position)
        prefills.append(PrefillChunk(slice(end - length, end), chunk.shared, table, mask))
    return Plan(tokens, positions, blocks, offsets, last, decode, prefills)


def _hide(hidden: torch.Tensor) -> torch.Tensor:
    """-inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -math.inf)


# --- attention -----------------------------------------------------------------------------------------------------


def _attend(module, query, key, value, attention_mask, scaling, step: Step | PrefixStep, **kwargs):
    """The attention function: (1, heads, tokens, size) each to (1, tokens, heads, size), None."""
    if module.layer_idx in step.attended:
        raise RuntimeError("this model attends twice in a layer, which this engine cannot do; --engine generate can")
    step.attended.add(module.layer_idx)
    if isinstance(step, PrefixStep):
        step.caches[module.layer_idx] = LayerCache(key[0], value[0])
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query * scaling, key, value))
    if module.layer_idx not in step.caches:  # there is no common prefix
        step.caches[module.layer_idx] = LayerCache(key[0, :, :0], value[0, :, :0])
        step.caches[module.layer_idx].grow(step.num_blocks)
    cache, plan = step.caches[module.layer_idx], step.on(query.device)
    cache.write(keys, values, plan)
    outputs = [_attend_prefill(queries, cache, chunk) for chunk in plan.prefills]
    if plan.decode:
        outputs.insert(0, _attend_decode(queries[: len(plan.decode.starts)], cache, plan.decode))
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[None], None


def _attend_prefill(queries: torch.Tensor, cache: LayerCache, chunk: PrefillChunk) -> torch.Tensor:
    """Attention of a chunk's tokens: (tokens, heads, size)."""

    def whole(prefix: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """Keys or values of the prefix and the blocks: (1, heads, tokens, size)."""
        own = stored[chunk.blocks].transpose(0, 1).flatten(1, 2)
        tokens = torch.cat([prefix[:, : chunk.shared], own[:, : chunk.mask.shape[1] - chunk.shared]], 1)
        # Not by `enable_gqa`: with a mask, a GPU would then take torch's slow way, which holds all scores.
        return tokens[:, None].expand(-1, queries.shape[1] // len(tokens), -1, -1).flatten(0, 1)[None]

    keys, values = map(whole, cache.prefix, cache.blocks)
    query = queries[chunk.tokens].transpose(0, 1)[None]
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=chunk.mask, scale=1.0)
    return output[0].transpose(0, 1)


def _attend_decode(queries: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
    """Attention of single tokens: (rows, heads, size). In half precision scores are rounded, as by eager attention."""
    row = batch.row
    keys, values = (stored[: len(row)] for stored in cache.blocks)  # (used blocks, kv heads, BLOCK, size)
    prefix_keys, prefix_values = cache.prefix
    rows, kv_heads, size = len(queries), keys.shape[1], keys.shape[3]

    def scores(products: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return products.float() if mask is None else products.float().add_(mask[:, None, None])

    grouped = queries.view(rows, kv_heads, -1, size)  # (rows, kv heads, share, size): heads with the same keys
    to_prefix = grouped.transpose(0, 1).flatten(1, 2) @ prefix_keys.mT  # (kv heads, rows x share, prefix)
    to_prefix = scores(to_prefix.unflatten(1, (rows, -1)).transpose(0, 1), batch.prefix_mask)
    # (used blocks, kv heads, share, BLOCK)
    to_blocks = scores(grouped.index_select(0, row) @ keys.mT, batch.block_mask)
    # Softmax over prefix and blocks: each row's highest score, and the sum of its weights: (rows, kv heads, share, 1).
    highest = batch.reduce(to_blocks.amax(-1, keepdim=True), "max")
    if prefix_keys.shape[1]:
        highest = torch.maximum(highest, to_prefix.amax(-1, keepdim=True))
    to_prefix, to_blocks = to_prefix.sub_(highest).exp_(), to_blocks.sub_(highest[row]).exp_()
    sums = to_prefix.sum(-1, keepdim=True) + batch.reduce(to_blocks.sum(-1, keepdim=True), "sum")
    of_prefix = to_prefix.div_(sums).to(queries.dtype).transpose(0, 1).flatten(1, 2) @ prefix_values
    of_blocks = batch.reduce(to_blocks.div_(sums[row]).to(queries.dtype) @ values, "sum")
    return (of_prefix.unflatten(1, (rows, -1)).transpose(0, 1) + of_blocks).flatten(1, 2)


AttentionInterface.register(ATTENTION, _attend)
