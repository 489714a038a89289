"""Paged attention for the slot engine: one forward pass over the new tokens of many games, without padding.

The prefix that all prompts share is stored once. The keys and values of the tokens after it lie in blocks of BLOCK
tokens, as in vLLM (Kwon et al. 2023, arXiv 2309.06180), so that short games beside long ones cost neither memory nor
time. A `Plan` lays out a forward pass. The attention function at the end of this file follows it; it is registered
with transformers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

ATTENTION = "spag_paged"  # name of the attention function in transformers
BLOCK = 32  # tokens


def num_blocks_for(tokens: int) -> int:
    """Number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK)


@dataclass(eq=False)
class Slot:
    """The tokens of one game. Keys and values of the first ones are cached; a step computes those of the next ones."""

    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_prefix_tokens: int = 0  # of the cached tokens, those stored in the common prefix; the others lie in blocks
    block_table: list[int] = field(default_factory=list)  # numbers of the blocks, in the order of the tokens
    num_new_tokens: int = 0  # tokens that the next step computes
    request: Any = None  # None: the slot is idle
    game: int | None = None

    @property
    def new_positions(self) -> range:
        """Positions of the new tokens, from the beginning of the prompt."""
        return range(self.num_cached_tokens, self.num_cached_tokens + self.num_new_tokens)

    @property
    def num_block_tokens(self) -> int:
        """Tokens that the blocks must hold, the new ones included."""
        return self.new_positions.stop - self.num_prefix_tokens

    @property
    def is_complete(self) -> bool:
        """Whether no tokens are left to compute after the new ones, so that the next token can be sampled."""
        return self.new_positions.stop == len(self.token_ids)


class BlockManager:
    """Gives blocks to slots, by number."""

    def __init__(self):
        self.num_blocks = 0  # free blocks included
        self.free: list[int] = []

    @property
    def num_used(self) -> int:
        """Number of blocks that slots hold."""
        return self.num_blocks - len(self.free)

    def resize(self, block_table: list[int], tokens: int) -> None:
        """Allocate or free blocks at the end of a block table until it just holds `tokens` tokens."""
        count = num_blocks_for(tokens)
        while len(block_table) > count:
            self.free.append(block_table.pop())
        while len(block_table) < count:
            if not self.free:
                self.free.append(self.num_blocks)
                self.num_blocks += 1
            block_table.append(self.free.pop())

    def compact(self, busy: list[list[int]], idle: list[list[int]]) -> tuple[list[int], list[int]]:
        """Renumber the blocks so that those of busy slots come first: a step then reads them without a copy.

        Takes the block tables of busy and idle slots. Returns (targets, sources): the content of block sources[i] has
        to move to block targets[i].
        """
        used = {block for table in busy for block in table}
        high = [block for block in used if block >= len(used)]
        low = [block for block in range(len(used)) if block not in used]
        exchanged = dict(zip(high + low, low + high, strict=True))
        if exchanged:
            for blocks in (*busy, *idle, self.free):
                blocks[:] = [exchanged.get(block, block) for block in blocks]
        return low + high, high + low

    def drop_free(self) -> None:
        """Forget the free blocks. The used ones must come first."""
        self.num_blocks, self.free = self.num_used, []


class LayerCache:
    """Keys and values of a layer: `prefix` (2, kv heads, tokens, size), `blocks` (2, blocks, kv heads, size, BLOCK).

    The tokens of a block are the last dimension: on a CPU, products with single queries are up to twice as fast so.
    """

    def __init__(self, keys: torch.Tensor, num_blocks: int):
        """An empty cache for (1, kv heads, tokens, size) keys such as these."""
        self.prefix = keys.new_zeros(2, keys.shape[1], 0, keys.shape[3])
        self.blocks = keys.new_zeros(2, num_blocks, keys.shape[1], keys.shape[3], BLOCK)
        self.moves: list[tuple[torch.Tensor, torch.Tensor]] = []  # (targets, sources) of blocks still to be moved

    def set_prefix(self, tokens: int) -> None:
        """Make the first tokens of the blocks the common prefix, and drop the blocks."""
        self.prefix = self.tokens_of(slice(None))[:, :, :tokens].clone()
        self.shrink(0)

    def tokens_of(self, blocks: torch.Tensor | slice) -> torch.Tensor:
        """Keys and values of all tokens of some blocks: (2, kv heads, tokens, size)."""
        return self.blocks[:, blocks].permute(0, 2, 1, 4, 3).flatten(2, 3)

    def grow(self, num_blocks: int, limit: float) -> None:
        """Grow to `num_blocks` blocks, and by a quarter more if `limit` allows it."""
        old = self.blocks
        if num_blocks > old.shape[1]:
            more = max(num_blocks, int(min(num_blocks + num_blocks // 4, limit)))
            self.blocks = old.new_zeros(2, more, *old.shape[2:])  # masked positions would otherwise hold NaN
            self.blocks[:, : old.shape[1]] = old

    def shrink(self, num_blocks: int) -> None:
        """Keep only the first `num_blocks` blocks."""
        self.move_blocks()
        if num_blocks < self.blocks.shape[1]:
            self.blocks = self.blocks[:, :num_blocks].clone()

    def move_blocks(self) -> None:
        """Carry out `moves`. A move that runs out of memory stays in the list."""
        while self.moves:
            targets, sources = (blocks.to(self.blocks.device) for blocks in self.moves[0])
            moved = self.blocks[:, sources]
            self.blocks.index_copy_(1, targets, moved)  # takes no memory, so a move is never half done
            del self.moves[0]

    def write(self, keys: torch.Tensor, values: torch.Tensor, plan: "Plan") -> None:
        """Store the step's keys and values, (1, kv heads, tokens, size) each."""
        self.move_blocks()
        self.blocks[:, plan.blocks, :, :, plan.offsets] = torch.cat([keys, values]).permute(2, 0, 1, 3)


# Planning.


class DecodeBatch:
    """Slots with one new token each. They attend together, to the first `used blocks` blocks of the cache."""

    def __init__(self, slots: Sequence[Slot], prefix_length: int, device: torch.device):
        self.size = len(slots)
        num_used = 1 + max(max(slot.block_table) for slot in slots)
        owners, last_offsets = [0] * num_used, [0] * num_used  # of each block: whose it is, and its last visible token
        for number, slot in enumerate(slots):
            for block in slot.block_table:
                owners[block], last_offsets[block] = number, BLOCK - 1
            last_offsets[slot.block_table[-1]] = (slot.num_block_tokens - 1) % BLOCK
        self.owners = _indices(owners, device)  # (used blocks,); 0 for blocks of slots that prefill
        # The block tables one after the other, and where each begins.
        self.block_tables = _indices([block for slot in slots for block in slot.block_table], device)
        starts = accumulate((len(slot.block_table) for slot in slots[:-1]), initial=0)
        self.table_starts = _indices(list(starts), device)  # (slots,)
        # Masks are added to scores: 0 where a token attends, else -inf.
        self.block_mask = _mask(last_offsets, BLOCK, device)  # (used blocks, BLOCK)
        lengths = [slot.num_prefix_tokens for slot in slots]
        self.prefix_mask = None  # or (slots, prefix), if some slots share only a part of the prefix
        if min(lengths) < prefix_length:
            self.prefix_mask = _mask([length - 1 for length in lengths], prefix_length, device)

    def reduce(self, values: torch.Tensor, mode: str) -> torch.Tensor:
        """The "sum" or "max" over the blocks of each slot: (used blocks, ...) to (slots, ...)."""
        reduced = F.embedding_bag(self.block_tables, values.flatten(1), self.table_starts, mode=mode)
        return reduced.unflatten(1, values.shape[1:])


class PrefillChunk:
    """A slot with several new tokens, which end at `end` among those of the step."""

    def __init__(self, slot: Slot, end: int, device: torch.device):
        self.tokens = slice(end - slot.num_new_tokens, end)
        self.num_prefix_tokens, self.num_block_tokens = slot.num_prefix_tokens, slot.num_block_tokens
        self.block_table = _indices(slot.block_table, device)
        visible = torch.ones(slot.num_new_tokens, slot.new_positions.stop, dtype=torch.bool, device=device)
        self.mask = visible.tril(slot.num_cached_tokens)  # (new tokens, cached + new tokens), True: attends


class Plan:
    """The inputs of a forward pass, where its keys and values are stored, and what each token attends to."""

    def __init__(self, slots: Sequence[Slot], prefix_length: int, device: torch.device):
        """Over the new tokens of these slots; slots with a single one must come first."""
        new = [(slot, position) for slot in slots for position in slot.new_positions]
        self.input_ids = _indices([slot.token_ids[position] for slot, position in new], device)  # (tokens,)
        self.positions = _indices([position for _, position in new], device)  # (tokens,)
        # The slot mapping: the block of each token, and its place in the block.
        places = [(slot, position - slot.num_prefix_tokens) for slot, position in new]
        self.blocks = _indices([slot.block_table[place // BLOCK] for slot, place in places], device)  # (tokens,)
        self.offsets = _indices([place % BLOCK for _, place in places], device)  # (tokens,)
        ends = list(accumulate(slot.num_new_tokens for slot in slots))
        sampled = [end - 1 for slot, end in zip(slots, ends, strict=True) if slot.is_complete]
        self.logit_indices = _indices(sampled, device)  # tokens after which a token is sampled
        decodes = list(takewhile(lambda slot: slot.num_new_tokens == 1, slots))
        self.decodes = DecodeBatch(decodes, prefix_length, device) if decodes else None
        prefills = list(zip(slots, ends, strict=True))[len(decodes) :]
        self.prefills = [PrefillChunk(slot, end, device) for slot, end in prefills]


class Step:
    """A forward pass, as the attention function sees it. (No tuple or dict: accelerate's hooks would copy those.)"""

    def __init__(self, slots: Sequence[Slot], prefix_length: int, caches: dict[int, LayerCache]):
        self.slots, self.prefix_length = slots, prefix_length
        self.caches = caches  # by layer; the first step adds them
        self.plans: dict[torch.device, Plan] = {}  # a model may be spread over several devices
        self.layers_done: set[int] = set()

    def plan(self, device: torch.device) -> Plan:
        """The plan, with its tensors on this device."""
        if device not in self.plans:
            self.plans[device] = Plan(self.slots, self.prefix_length, device)
        return self.plans[device]


def _indices(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=device)


def _mask(last: Sequence[int], size: int, device: torch.device) -> torch.Tensor:
    """(rows, size) mask: 0 up to place last[i] of row i, -inf after it."""
    return torch.where(torch.arange(size, device=device) > _indices(last, device)[:, None], -math.inf, 0.0)


# Attention.


def _attend(module, query, key, value, attention_mask, scaling, step: Step, **kwargs):
    """The attention function: (1, heads, tokens, size) each to (1, tokens, heads, size), None."""
    layer = module.layer_idx
    if layer in step.layers_done:
        raise RuntimeError("this model attends twice in a layer, which this engine cannot do; --engine generate can")
    step.layers_done.add(layer)
    if layer not in step.caches:
        step.caches[layer] = LayerCache(key, 1 + max(max(slot.block_table) for slot in step.slots))
    cache, plan = step.caches[layer], step.plan(query.device)
    cache.write(key, value, plan)
    queries = query[0].transpose(0, 1) * scaling  # (tokens, heads, size)
    outputs = [_attend_prefill(queries, cache, chunk) for chunk in plan.prefills]
    if plan.decodes:
        outputs.insert(0, _attend_decode(queries[: plan.decodes.size], cache, plan.decodes))
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[None], None


def _attend_prefill(queries: torch.Tensor, cache: LayerCache, chunk: PrefillChunk) -> torch.Tensor:
    """Attention of a chunk's tokens: (new tokens, heads, size)."""
    own = cache.tokens_of(chunk.block_table)[:, :, : chunk.num_block_tokens]
    visible = torch.cat([cache.prefix[:, :, : chunk.num_prefix_tokens], own], 2)  # (2, kv heads, tokens, size)
    # Heads are repeated here because `enable_gqa` with a mask makes torch hold all scores on a GPU.
    share = queries.shape[1] // visible.shape[1]
    keys, values = visible[:, :, None].expand(-1, -1, share, -1, -1).flatten(1, 2)[:, None]
    query = queries[chunk.tokens].transpose(0, 1)[None]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=chunk.mask, scale=1.0)[0].transpose(0, 1)


def _attend_decode(queries: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
    """Attention of single tokens: (slots, heads, size). Half precision rounds scores, as in eager attention."""
    owners, (prefix_keys, prefix_values) = batch.owners, cache.prefix
    keys, values = cache.blocks[:, : len(owners)]  # (used blocks, kv heads, size, BLOCK)
    kv_heads = keys.shape[1]
    grouped = queries.unflatten(1, (kv_heads, -1))  # (slots, kv heads, share, size): heads with the same keys
    to_prefix = grouped.transpose(0, 1).flatten(1, 2) @ prefix_keys.mT  # (kv heads, slots x share, prefix)
    to_prefix = to_prefix.float().unflatten(1, (batch.size, -1)).transpose(0, 1)
    if batch.prefix_mask is not None:
        to_prefix.add_(batch.prefix_mask[:, None, None])
    to_blocks = (grouped.index_select(0, owners) @ keys).float()  # (used blocks, kv heads, share, BLOCK)
    to_blocks.add_(batch.block_mask[:, None, None])
    # Softmax over prefix and blocks, from each slot's highest score and sum of weights, (slots, kv heads, share, 1).
    highest = batch.reduce(to_blocks.amax(-1, keepdim=True), "max")
    if prefix_keys.shape[1]:
        highest = torch.maximum(highest, to_prefix.amax(-1, keepdim=True))
    to_prefix, to_blocks = to_prefix.sub_(highest).exp_(), to_blocks.sub_(highest[owners]).exp_()
    sums = to_prefix.sum(-1, keepdim=True) + batch.reduce(to_blocks.sum(-1, keepdim=True), "sum")
    from_prefix = to_prefix.div_(sums).to(queries.dtype).transpose(0, 1).flatten(1, 2) @ prefix_values
    from_blocks = batch.reduce(to_blocks.div_(sums[owners]).to(queries.dtype) @ values.mT, "sum")
    return (from_prefix.unflatten(1, (batch.size, -1)).transpose(0, 1) + from_blocks).flatten(1, 2)


AttentionInterface.register(ATTENTION, _attend)
