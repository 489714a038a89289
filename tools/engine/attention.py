"""Paged attention for the slot engine: the tokens of many games in one sequence, without padding.

The prefix that all prompts share is stored once. The keys and values of the tokens after it lie in blocks of BLOCK
tokens, as in vLLM (Kwon et al. 2023, arXiv 2309.06180), so that short games beside long ones cost neither memory nor
time. `plan_step` lays out a forward pass; the attention function that is registered with transformers follows that
plan. Plain torch operations only.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

ATTENTION = "spag_paged"  # name of the attention function in transformers
BLOCK = 32  # tokens


class BlockManager:
    """Allocates blocks by number, the lowest free one first, so that the used ones lie close together."""

    def __init__(self):
        self.num_blocks = 0  # that were ever used
        self.free: list[int] = []  # a heap

    def resize(self, blocks: list[int], tokens: int) -> None:
        """Allocate or free blocks at the end of a slot's list until it just holds `tokens` tokens."""
        count = -(-tokens // BLOCK)
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


class Chunk(NamedTuple):
    """Consecutive tokens of a slot that a step computes."""

    slot: int
    tokens: list[int]
    position: int  # of the first token in its prompt
    shared: int  # tokens of the common prefix that the slot builds on; its blocks begin at this position
    blocks: list[int]  # the slot's, with room for these tokens
    complete: bool = True  # whether no token is pending after them


class DecodeBatch(NamedTuple):
    """The chunks of a single token, first in a step, which attend together: each used block is read once."""

    prefix_mask: torch.Tensor  # (rows, prefix), added to scores: -inf where a token must not attend
    block_mask: torch.Tensor  # (used blocks, BLOCK), the same for the blocks
    row: torch.Tensor  # (used blocks,) whose row each block belongs to; of other slots' blocks, any
    blocks: torch.Tensor  # (blocks,) of the rows, one row after the other
    starts: torch.Tensor  # (rows,) where each row begins in `blocks`

    def reduce(self, values: torch.Tensor, mode: str) -> torch.Tensor:
        """The "sum" or "max" over each row's blocks: (used blocks, ...) to (rows, ...)."""
        reduced = F.embedding_bag(self.blocks, values.flatten(1), self.starts, mode=mode)
        return reduced.unflatten(1, values.shape[1:])


@dataclass
class PrefillChunk:
    """A chunk of several tokens."""

    tokens: slice  # of the step's tokens
    shared: int
    blocks: torch.Tensor  # (blocks,)
    mask: torch.Tensor  # (tokens, cached tokens + tokens), True where a token attends


@dataclass
class Step:
    """Where the tokens of a forward pass are stored, and what they attend to."""

    caches: dict[int, "LayerCache"]  # by layer
    positions: torch.Tensor  # (tokens,) in their prompts
    blocks: torch.Tensor  # (tokens,) where keys and values go
    offsets: torch.Tensor  # (tokens,) in the block
    ends: torch.Tensor  # (chunks,) index of each chunk's last token, on the CPU
    num_blocks: int  # that there must be
    moves: torch.Tensor  # (2, blocks): those to overwrite before anything else, and with which
    decode: DecodeBatch | None
    prefills: list[PrefillChunk]
    attended: set[int] = field(default_factory=set)  # layers that have


@dataclass
class PrefixStep:
    """A forward pass over the common prefix. Not a tuple, which accelerate's hooks would copy."""

    caches: dict[int, "LayerCache"]
    attended: set[int] = field(default_factory=set)


class LayerCache:
    """Keys and values of one layer: `prefix` (kv heads, prefix, size), `blocks` (blocks, kv heads, BLOCK, size)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        """From the prefix's (kv heads, prefix, size) each."""
        # Copies: a view would keep the whole tensor behind it in memory.
        self.prefix = tuple(one.clone(memory_format=torch.contiguous_format) for one in (keys, values))
        self.size = 0  # blocks that are initialized
        self.blocks = self._empty(0)

    def _empty(self, size: int) -> tuple[torch.Tensor, ...]:
        return tuple(one.new_empty(size, one.shape[0], BLOCK, one.shape[2]) for one in self.prefix)

    def grow(self, size: int) -> None:
        """Grow to `size` blocks; new blocks are zero-filled."""
        if size > len(self.blocks[0]):
            spare = size if self.blocks[0].device.type == "cpu" else size // 4  # RAM is free until it is written
            larger = self._empty(size + spare)
            for new, old in zip(larger, self.blocks, strict=True):
                new[: self.size] = old[: self.size]
            self.blocks = larger
        for stored in self.blocks:
            stored[self.size : size] = 0
        self.size = size

    def write(self, keys: torch.Tensor, values: torch.Tensor, step: Step) -> None:
        """Move blocks as the step says, then store its tokens' (tokens, kv heads, size) each."""
        self.grow(step.num_blocks)
        overwritten, source = step.moves.to(keys.device)
        for stored in self.blocks:
            stored[overwritten] = stored[source]
        blocks, offsets = step.blocks.to(keys.device), step.offsets.to(keys.device)
        for stored, new in zip(self.blocks, (keys, values), strict=True):
            stored[blocks, :, offsets] = new


# --- planning ------------------------------------------------------------------------------------------------------


def plan_step(
    chunks: Sequence[Chunk],
    caches: dict[int, LayerCache],
    prefix: int,
    num_blocks: int,
    moves: tuple[list[int], list[int]],
    device: torch.device,
) -> Step:
    """The step that computes these chunks, those of one token first; `prefix` is the common prefix's length."""
    fields = [(chunk.position, chunk.shared, len(chunk.tokens)) for chunk in chunks]
    positions, shared, lengths = torch.tensor(fields).unbind(1)  # (chunks,) each
    ends = lengths.cumsum(0)
    tables = [torch.tensor(chunk.blocks) for chunk in chunks]
    table = pad_sequence(tables, batch_first=True, padding_value=-1)  # (chunks, most blocks)
    chunk_of = torch.arange(len(chunks)).repeat_interleave(lengths)  # (tokens,)
    positions = positions[chunk_of] + torch.arange(len(chunk_of)) - (ends - lengths)[chunk_of]
    in_blocks = positions - shared[chunk_of]  # (tokens,) index of each among the tokens in its slot's blocks
    rows = sum(1 for _ in takewhile(lambda chunk: len(chunk.tokens) == 1, chunks))
    decode = _plan_decode(tables[:rows], in_blocks, shared, prefix, device) if rows else None
    prefills = []
    for number in range(rows, len(chunks)):
        length, end = len(chunks[number].tokens), int(ends[number])
        mask = torch.ones(length, chunks[number].position + length, dtype=torch.bool, device=device)
        mask = mask.tril(chunks[number].position)
        prefills.append(PrefillChunk(slice(end - length, end), chunks[number].shared, tables[number].to(device), mask))
    return Step(
        caches,
        positions.to(device),
        table[chunk_of, in_blocks // BLOCK].to(device),
        (in_blocks % BLOCK).to(device),
        ends - 1,
        num_blocks,
        torch.tensor(moves, dtype=torch.long, device=device),
        decode,
        prefills,
    )


def _plan_decode(
    tables: list[torch.Tensor], in_blocks: torch.Tensor, shared: torch.Tensor, prefix: int, device: torch.device
) -> DecodeBatch:
    """For rows with these blocks, whose tokens are the `in_blocks`-th there and attend to `shared` prefix tokens."""
    lengths = torch.tensor([len(table) for table in tables])
    blocks, starts = torch.cat(tables), lengths.cumsum(0) - lengths
    row = torch.zeros(int(blocks.max()) + 1, dtype=torch.long)
    row[blocks] = torch.arange(len(tables)).repeat_interleave(lengths)
    first = torch.zeros_like(row)  # index of each block's first token among those in its slot's blocks
    first[blocks] = BLOCK * (torch.arange(len(blocks)) - starts.repeat_interleave(lengths))
    hidden = (
        torch.arange(prefix) >= shared[: len(tables), None],
        first[:, None] + torch.arange(BLOCK) > in_blocks[row][:, None],
    )
    masks = [torch.zeros(one.shape).masked_fill_(one, -torch.inf) for one in hidden]
    return DecodeBatch(*(one.to(device) for one in (*masks, row, blocks, starts)))


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
    cache = step.caches[module.layer_idx]
    cache.write(keys, values, step)
    outputs = [_attend_prefill(queries, cache, chunk) for chunk in step.prefills]
    if step.decode:
        outputs.insert(0, _attend_decode(queries[: len(step.decode.starts)], cache, step.decode))
    return torch.cat(outputs)[None], None


def _attend_prefill(queries: torch.Tensor, cache: LayerCache, chunk: PrefillChunk) -> torch.Tensor:
    """Attention of a chunk's tokens: (tokens, heads, size)."""
    blocks, mask = chunk.blocks.to(queries.device), chunk.mask.to(queries.device)

    def whole(prefix: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """Keys or values of the prefix and the blocks: (1, heads, tokens, size)."""
        own = stored[blocks].transpose(0, 1).flatten(1, 2)
        tokens = torch.cat([prefix[:, : chunk.shared], own], 1)[:, : mask.shape[1]]
        # Not by `enable_gqa`: with a mask, a GPU would then take torch's slow way, which holds all scores.
        return tokens[:, None].expand(-1, queries.shape[1] // len(tokens), -1, -1).flatten(0, 1)[None]

    keys, values = map(whole, cache.prefix, cache.blocks)
    query = queries[chunk.tokens].transpose(0, 1)[None]
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)
    return output[0].transpose(0, 1)


def _attend_decode(queries: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
    """Attention of single tokens: (rows, heads, size). In half precision scores are rounded, as by eager attention."""
    batch = DecodeBatch(*(one.to(queries.device) for one in batch))
    row = batch.row
    keys, values = (stored[: len(row)] for stored in cache.blocks)  # (used blocks, kv heads, BLOCK, size)
    prefix_keys, prefix_values = cache.prefix
    rows, kv_heads, size = len(queries), keys.shape[1], keys.shape[3]

    def scores(products: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return products.float().add_(mask[:, None, None])

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
