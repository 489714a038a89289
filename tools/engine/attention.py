"""Attention for tools/engine/slots.py: tokens of many games in one row without padding, keys and values in blocks.

What all games begin with, the common prefix, is held once. What follows in a game lies in blocks of BLOCK tokens, as
in vLLM (Kwon et al. 2023, arXiv 2309.06180), so that short games beside long ones take neither memory nor time for
padding. `plan_step` says which tokens of a step go where; the attention function that transformers is given here reads
that, and needs nothing but torch's own operations.
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

ATTENTION = "spag_paged"  # name of the attention function, for transformers
BLOCK = 32  # tokens


class Pool:
    """Hands out blocks by their numbers: the lowest free one first, so that those in use lie close together."""

    def __init__(self):
        self.size = 0  # blocks that were ever in use
        self.free: list[int] = []  # a heap

    def fit(self, blocks: list[int], tokens: int) -> None:
        """Add to a slot's blocks, or take the last ones back, until they just hold so many tokens."""
        count = -(-tokens // BLOCK)
        while len(blocks) > count:
            heapq.heappush(self.free, blocks.pop())
        while len(blocks) < count:
            if not self.free:
                self.free.append(self.size)
                self.size += 1
            blocks.append(heapq.heappop(self.free))

    def bring_forward(self, busy: list[list[int]], idle: list[list[int]]) -> tuple[list[int], list[int]]:
        """Exchange numbers so that the busy slots' blocks are the first ones, which a step reads without a copy.

        Returns which blocks are to be overwritten by which.
        """
        used = {block for blocks in busy for block in blocks}
        high = [block for block in used if block >= len(used)]
        low = [block for block in range(len(used)) if block not in used]
        exchanged = dict(zip(high + low, low + high, strict=True))
        for blocks in (*busy, *idle, self.free) if exchanged else ():
            blocks[:] = [exchanged.get(block, block) for block in blocks]
        heapq.heapify(self.free)
        return low + high, high + low


class Part(NamedTuple):
    """Consecutive tokens that a slot feeds in a step."""

    slot: int
    tokens: list[int]
    position: int  # of the first token
    shared: int  # tokens of the common prefix that the slot builds on; its own begin at this position
    blocks: list[int]  # where its own are, with room for these


class Singles(NamedTuple):
    """Parts of one token, the first of a step, which attend together: each of the first blocks is read once."""

    prefix_mask: torch.Tensor  # (rows, prefix), added to scores: -inf for what a token must not see
    mask: torch.Tensor  # (first blocks, BLOCK), the same of its own blocks
    row: torch.Tensor  # (first blocks,) whose each is; for those of other slots any
    blocks: torch.Tensor  # (blocks,) those of the rows, row by row
    starts: torch.Tensor  # (rows,) where in `blocks` each row's begin

    def reduce(self, of_blocks: torch.Tensor, how: str) -> torch.Tensor:
        """The "sum" or "max" of what belongs to each row's blocks: (first blocks, ...) to (rows, ...)."""
        reduced = F.embedding_bag(self.blocks, of_blocks.flatten(1), self.starts, mode=how)
        return reduced.unflatten(1, of_blocks.shape[1:])


@dataclass
class Prompt:
    """A part of several tokens."""

    tokens: slice  # which of the step
    shared: int
    blocks: torch.Tensor  # (blocks,)
    seen: torch.Tensor  # (tokens, shared + own tokens so far) what each token sees


@dataclass
class Step:
    """Where the tokens of one forward pass go, and what they attend to."""

    layers: dict[int, "Layer"]
    positions: torch.Tensor  # (tokens,) in their prompts
    blocks: torch.Tensor  # (tokens,) where their keys and values go
    offsets: torch.Tensor  # (tokens,) in the block
    ends: torch.Tensor  # (parts,) the last token of each, on the CPU
    pool_size: int  # blocks that there must be
    moves: torch.Tensor  # (2, blocks) those that are overwritten first, and by which
    singles: Singles | None
    prompts: list[Prompt]
    attended: set[int] = field(default_factory=set)  # layers that have


@dataclass
class PrefixStep:
    """A forward pass over the common prefix itself. No tuple: hooks of accelerate would hand on a copy of one."""

    layers: dict[int, "Layer"]
    attended: set[int] = field(default_factory=set)


class Layer:
    """Keys and values of one layer: (kv heads, prefix, size) and (blocks, kv heads, BLOCK, size) each."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        """From (kv heads, prefix, size) each."""
        # Copies: views would keep all that these are views of in memory.
        self.prefix = tuple(one.clone(memory_format=torch.contiguous_format) for one in (keys, values))
        self.size = 0  # blocks that were ever in use; those after them are not initialized
        self.blocks = self._room(0)

    def _room(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(one.new_empty(size, one.shape[0], BLOCK, one.shape[2]) for one in self.prefix)

    def grow(self, size: int) -> None:
        """Have room for so many blocks, the new ones of zeros."""
        if size > len(self.blocks[0]):
            spare = size if self.blocks[0].device.type == "cpu" else size // 4  # a CPU's is free until it is written
            larger = self._room(size + spare)
            for new, old in zip(larger, self.blocks, strict=True):
                new[: self.size] = old[: self.size]
            self.blocks = larger
        for stored in self.blocks:
            stored[self.size : size] = 0
        self.size = size

    def write(self, keys: torch.Tensor, values: torch.Tensor, step: Step) -> None:
        """Store (tokens, kv heads, size) each at their places."""
        self.grow(step.pool_size)
        overwritten, by = step.moves.to(keys.device)
        for stored in self.blocks:
            stored[overwritten] = stored[by]
        blocks, offsets = step.blocks.to(keys.device), step.offsets.to(keys.device)
        for stored, new in zip(self.blocks, (keys, values), strict=True):
            stored[blocks, :, offsets] = new


def plan_step(
    parts: Sequence[Part],
    layers: dict[int, Layer],
    prefix: int,
    pool_size: int,
    moves: tuple[list[int], list[int]],
    device: torch.device,
) -> Step:
    """The step in which these parts follow each other, after a common prefix of so many tokens."""
    fields = [(part.position, part.shared, len(part.tokens)) for part in parts]
    positions, shared, lengths = torch.tensor(fields).unbind(1)  # (parts,) each
    ends = lengths.cumsum(0)
    tables = [torch.tensor(part.blocks) for part in parts]
    table = pad_sequence(tables, batch_first=True, padding_value=-1)  # (parts, most blocks)
    part_of = torch.arange(len(parts)).repeat_interleave(lengths)  # (tokens,)
    positions = positions[part_of] + torch.arange(len(part_of)) - (ends - lengths)[part_of]
    own = positions - shared[part_of]  # (tokens,) own tokens of the slot before each
    num_singles = sum(1 for _ in takewhile(lambda part: len(part.tokens) == 1, parts))
    singles = _plan_singles(tables[:num_singles], own, shared, prefix, device) if num_singles else None
    prompts = []
    for number in range(num_singles, len(parts)):
        length, end = len(parts[number].tokens), int(ends[number])
        all_seen = torch.ones(length, parts[number].position + length, dtype=torch.bool, device=device)
        seen = all_seen.tril(parts[number].position)
        prompts.append(Prompt(slice(end - length, end), parts[number].shared, tables[number].to(device), seen))
    return Step(
        layers,
        positions.to(device),
        table[part_of, own // BLOCK].to(device),
        (own % BLOCK).to(device),
        ends - 1,
        pool_size,
        torch.tensor(moves, dtype=torch.long, device=device),
        singles,
        prompts,
    )


def _plan_singles(
    tables: list[torch.Tensor], own: torch.Tensor, shared: torch.Tensor, prefix: int, device: torch.device
) -> Singles:
    """For tokens that have so many `own` before them and see so many `shared` ones."""
    lengths = torch.tensor([len(table) for table in tables])
    blocks, starts = torch.cat(tables), lengths.cumsum(0) - lengths
    row = torch.zeros(int(blocks.max()) + 1, dtype=torch.long)
    row[blocks] = torch.arange(len(tables)).repeat_interleave(lengths)
    first = torch.zeros_like(row)  # the first token of each block, counted in its slot's own
    first[blocks] = BLOCK * (torch.arange(len(blocks)) - starts.repeat_interleave(lengths))
    hidden = (
        torch.arange(prefix) >= shared[: len(tables), None],
        first[:, None] + torch.arange(BLOCK) > own[row][:, None],
    )
    masks = [torch.zeros(one.shape).masked_fill_(one, -torch.inf) for one in hidden]
    return Singles(*(one.to(device) for one in (*masks, row, blocks, starts)))


def _attend(module, query, key, value, attention_mask, scaling, step: Step | PrefixStep, **kwargs):
    """The attention function: (1, heads, tokens, size) each to (1, tokens, heads, size), None."""
    if module.layer_idx in step.attended:
        raise RuntimeError("this model attends twice in a layer, which this engine cannot do; --engine generate can")
    step.attended.add(module.layer_idx)
    if isinstance(step, PrefixStep):
        step.layers[module.layer_idx] = Layer(key[0], value[0])
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query * scaling, key, value))
    if module.layer_idx not in step.layers:  # there is no common prefix
        step.layers[module.layer_idx] = Layer(key[0, :, :0], value[0, :, :0])
    layer = step.layers[module.layer_idx]
    layer.write(keys, values, step)
    outputs = [_attend_prompt(queries, layer, prompt) for prompt in step.prompts]
    if step.singles:
        outputs.insert(0, _attend_singles(queries[: len(step.singles.starts)], layer, step.singles))
    return torch.cat(outputs)[None], None


def _attend_prompt(queries: torch.Tensor, layer: Layer, prompt: Prompt) -> torch.Tensor:
    """Attention of a prompt's tokens: (tokens, heads, size)."""
    blocks, seen = prompt.blocks.to(queries.device), prompt.seen.to(queries.device)

    def whole(prefix: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """Keys or values of the prefix and of its own: (1, heads, tokens, size)."""
        own = stored[blocks].transpose(0, 1).flatten(1, 2)
        tokens = torch.cat([prefix[:, : prompt.shared], own], 1)[:, : seen.shape[1]]
        # Not by `enable_gqa`: with a mask, a GPU would then take torch's slow way, which holds all scores.
        return tokens[:, None].expand(-1, queries.shape[1] // len(tokens), -1, -1).flatten(0, 1)[None]

    keys, values = map(whole, layer.prefix, layer.blocks)
    query = queries[prompt.tokens].transpose(0, 1)[None]
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=1.0)
    return output[0].transpose(0, 1)


def _attend_singles(queries: torch.Tensor, layer: Layer, singles: Singles) -> torch.Tensor:
    """Attention of single tokens: (rows, heads, size). In half precision scores are rounded, as by eager attention."""
    singles = Singles(*(one.to(queries.device) for one in singles))
    row = singles.row
    keys, values = (stored[: len(row)] for stored in layer.blocks)  # (first blocks, kv heads, BLOCK, size)
    prefix_keys, prefix_values = layer.prefix
    rows, kv_heads, size = len(queries), keys.shape[1], keys.shape[3]

    def scores(products: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return products.float().add_(mask[:, None, None])

    grouped = queries.view(rows, kv_heads, -1, size)  # heads that share keys and values side by side
    to_prefix = grouped.transpose(0, 1).flatten(1, 2) @ prefix_keys.mT  # (kv heads, rows x share, prefix)
    to_prefix = scores(to_prefix.unflatten(1, (rows, -1)).transpose(0, 1), singles.prefix_mask)
    to_blocks = scores(grouped.index_select(0, row) @ keys.mT, singles.mask)  # (first blocks, kv heads, share, BLOCK)
    # Softmax over both, by each token's highest score and the sum of its weights: (rows, kv heads, share, 1) each.
    highest = singles.reduce(to_blocks.amax(-1, keepdim=True), "max")
    if prefix_keys.shape[1]:
        highest = torch.maximum(highest, to_prefix.amax(-1, keepdim=True))
    to_prefix, to_blocks = to_prefix.sub_(highest).exp_(), to_blocks.sub_(highest[row]).exp_()
    sums = to_prefix.sum(-1, keepdim=True) + singles.reduce(to_blocks.sum(-1, keepdim=True), "sum")
    of_prefix = to_prefix.div_(sums).to(queries.dtype).transpose(0, 1).flatten(1, 2) @ prefix_values
    of_blocks = singles.reduce(to_blocks.div_(sums[row]).to(queries.dtype) @ values, "sum")
    return (of_prefix.unflatten(1, (rows, -1)).transpose(0, 1) + of_blocks).flatten(1, 2)


AttentionInterface.register(ATTENTION, _attend)
