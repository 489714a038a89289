"""Paged attention for the slot engine: one forward pass over the new tokens of many slots, without padding.

Keys and values of the common prefix are stored once, all others in blocks. A `Step` says where the keys and values of
each new token go and which tokens it attends to.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, takewhile

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from tools.engine.scheduler import BLOCK, Slot

ATTENTION = "spag_paged"


class LayerCache:
    """Keys and values of a layer: `prefix` (2, kv heads, tokens, size), `blocks` (2, blocks, kv heads, size, BLOCK).

    Tokens are the last dimension of `blocks`, which makes products with single queries up to twice as fast on a CPU.
    """

    def __init__(self, keys: torch.Tensor, num_blocks: int):
        """An empty cache with the shape, dtype and device of `keys` (1, kv heads, tokens, size)."""
        self.prefix = keys.new_zeros(2, keys.shape[1], 0, keys.shape[3])
        self.blocks = keys.new_zeros(2, num_blocks, keys.shape[1], keys.shape[3], BLOCK)

    def set_prefix(self, tokens: int) -> None:
        """Move the first `tokens` tokens of the blocks to the prefix, and drop all blocks."""
        self.prefix = self.tokens_in(slice(None))[:, :, :tokens].clone()
        self.blocks = self.blocks[:, :0].clone()

    def tokens_in(self, blocks: torch.Tensor | slice) -> torch.Tensor:
        """Keys and values of all tokens in these blocks: (2, kv heads, tokens, size)."""
        return self.blocks[:, blocks].permute(0, 2, 1, 4, 3).flatten(2, 3)

    def grow(self, num_blocks: int, limit: float) -> None:
        """Grow to at least `num_blocks` blocks, and up to `limit` by a quarter more, because growing copies."""
        old = self.blocks
        if num_blocks > old.shape[1]:
            more = max(num_blocks, int(min(num_blocks + num_blocks // 4, limit)))
            self.blocks = old.new_zeros(2, more, *old.shape[2:])  # zeros, because masked positions could hold NaN
            self.blocks[:, : old.shape[1]] = old

    def move_blocks(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        self.blocks.index_copy_(1, targets, self.blocks[:, sources])

    def write(self, keys: torch.Tensor, values: torch.Tensor, step: "Step") -> None:
        """Store the keys and values of a step: (1, kv heads, tokens, size) each."""
        blocks, offsets = step.slot_mapping
        self.blocks[:, blocks, :, :, offsets] = torch.cat([keys, values]).permute(2, 0, 1, 3)


class DecodeBatch:
    """Slots with one new token each, whose attention is computed together.

    In shapes, `slots` counts the slots of this batch, `used blocks` all blocks up to the highest one they use.
    """

    def __init__(self, slots: Sequence[Slot], prefix_length: int, device: torch.device):
        self.size = len(slots)
        num_used = 1 + max(max(slot.block_table) for slot in slots)
        # by used block: the index of its slot, and the offset of the last token to attend to
        owners = [0] * num_used
        last_offsets = [0] * num_used
        for number, slot in enumerate(slots):
            for block in slot.block_table:
                owners[block] = number
                last_offsets[block] = BLOCK - 1
            last_offsets[slot.block_table[-1]] = (slot.num_block_tokens - 1) % BLOCK
        self.owners = _indices(owners, device)  # (used blocks,); 0 for blocks of slots outside this batch
        # all block tables concatenated, and where each begins
        self.block_tables = _indices([block for slot in slots for block in slot.block_table], device)
        starts = accumulate((len(slot.block_table) for slot in slots[:-1]), initial=0)
        self.table_starts = _indices(list(starts), device)  # (slots,)
        # masks are added to attention scores: 0 where a token is attended to, else -inf
        self.block_mask = _mask(last_offsets, BLOCK, device)  # (used blocks, BLOCK)
        lengths = [slot.num_prefix_tokens for slot in slots]
        self.prefix_mask = None  # (slots, prefix) if some slots use only part of the common prefix
        if min(lengths) < prefix_length:
            self.prefix_mask = _mask([length - 1 for length in lengths], prefix_length, device)

    def reduce(self, values: torch.Tensor, mode: str) -> torch.Tensor:
        """Reduce (used blocks, ...) to (slots, ...), by "sum" or "max" over the blocks of each slot."""
        reduced = F.embedding_bag(self.block_tables, values.flatten(1), self.table_starts, mode=mode)
        return reduced.unflatten(1, values.shape[1:])


class PrefillChunk:
    """A slot with several new tokens, ending at index `end` of the step's tokens."""

    def __init__(self, slot: Slot, end: int, device: torch.device):
        self.tokens = slice(end - slot.num_new_tokens, end)
        self.num_prefix_tokens = slot.num_prefix_tokens
        self.num_block_tokens = slot.num_block_tokens
        self.block_table = _indices(slot.block_table, device)
        visible = torch.ones(slot.num_new_tokens, slot.new_positions.stop, dtype=torch.bool, device=device)
        self.mask = visible.tril(slot.num_cached_tokens)  # (new tokens, cached + new tokens); True: attends


class Step:
    """A forward pass over the new tokens of `slots`. Slots with one new token must come first."""

    def __init__(self, slots: Sequence[Slot], prefix_length: int, caches: dict[int, LayerCache], device: torch.device):
        self.caches = caches  # by layer; filled by the first forward pass
        self.num_blocks = 1 + max(max(slot.block_table) for slot in slots)
        self.layers_done: set[int] = set()
        new = [(slot, position) for slot in slots for position in slot.new_positions]
        self.input_ids = _indices([slot.token_ids[position] for slot, position in new], device)  # (tokens,)
        self.positions = _indices([position for _, position in new], device)  # (tokens,)
        stored = [(slot, position - slot.num_prefix_tokens) for slot, position in new]
        blocks = _indices([slot.block_table[index // BLOCK] for slot, index in stored], device)
        offsets = _indices([index % BLOCK for _, index in stored], device)
        self.slot_mapping = blocks, offsets  # (tokens,) each: the block of a new token, and its offset there
        ends = list(accumulate(slot.num_new_tokens for slot in slots))
        sampled = [end - 1 for slot, end in zip(slots, ends, strict=True) if slot.is_complete]
        self.logit_indices = _indices(sampled, device)  # (complete slots,): tokens whose logits are needed
        decodes = list(takewhile(lambda slot: slot.num_new_tokens == 1, slots))
        self.decodes = DecodeBatch(decodes, prefix_length, device) if decodes else None
        prefills = list(zip(slots, ends, strict=True))[len(decodes) :]
        self.prefills = [PrefillChunk(slot, end, device) for slot, end in prefills]


def _indices(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=device)


def _mask(last: Sequence[int], size: int, device: torch.device) -> torch.Tensor:
    """(rows, size) mask: row i is 0 up to column last[i], then -inf."""
    return torch.where(torch.arange(size, device=device) > _indices(last, device)[:, None], -math.inf, 0.0)


class UnknownAttention(RuntimeError):
    """The model's attention is not the one that `_attend` computes."""


def _attend(module, query, key, value, attention_mask, scaling, step: Step | None = None, **kwargs):
    """Attention for transformers' interface. `query`, `key`, `value`: (1, heads, tokens, size).

    Returns (1, tokens, heads, size) and no weights.
    """
    layer = module.layer_idx
    if step is None:
        raise UnknownAttention("this model does not pass keyword arguments on to its attention")
    if attention_mask is not None:
        raise UnknownAttention("this model adds a mask of its own to its scores")
    if kwargs.get("s_aux") is not None:
        raise UnknownAttention("this model has attention sinks")
    if layer in step.layers_done:
        raise UnknownAttention("this model attends twice in a layer")
    step.layers_done.add(layer)
    if layer not in step.caches:
        step.caches[layer] = LayerCache(key, step.num_blocks)
    cache = step.caches[layer]
    cache.write(key, value, step)
    queries = query[0].transpose(0, 1) * scaling  # (tokens, heads, size)
    outputs = [_attend_prefill(queries, cache, chunk) for chunk in step.prefills]
    if step.decodes:
        outputs.insert(0, _attend_decode(queries[: step.decodes.size], cache, step.decodes))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output.contiguous()[None], None  # contiguous because some models call `view`


def _attend_prefill(queries: torch.Tensor, cache: LayerCache, chunk: PrefillChunk) -> torch.Tensor:
    """Attention of a chunk's tokens: (new tokens, heads, size)."""
    in_blocks = cache.tokens_in(chunk.block_table)[:, :, : chunk.num_block_tokens]
    visible = torch.cat([cache.prefix[:, :, : chunk.num_prefix_tokens], in_blocks], 2)  # (2, kv heads, tokens, size)
    # Heads are repeated here because `enable_gqa` with a mask makes torch materialize all scores on a GPU.
    heads_per_key = queries.shape[1] // visible.shape[1]
    keys, values = visible.repeat_interleave(heads_per_key, dim=1).unsqueeze(1)  # (1, heads, tokens, size) each
    query = queries[chunk.tokens].transpose(0, 1)[None]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=chunk.mask, scale=1.0)[0].transpose(0, 1)


def _attend_decode(queries: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
    """Attention of single tokens: (slots, heads, size). Rounds to half precision where eager attention does.

    `scaled_dot_product_attention` would need padded keys in one tensor, and so a copy of the common prefix and of all
    blocks in every step.
    """
    owners = batch.owners
    prefix_keys, prefix_values = cache.prefix
    keys, values = cache.blocks[:, : len(owners)]  # (used blocks, kv heads, size, BLOCK)
    kv_heads = keys.shape[1]
    grouped = queries.unflatten(1, (kv_heads, -1))  # (slots, kv heads, group, size); a group of heads shares a key
    to_prefix = grouped.transpose(0, 1).flatten(1, 2) @ prefix_keys.mT  # (kv heads, slots x group, prefix)
    to_prefix = to_prefix.float().unflatten(1, (batch.size, -1)).transpose(0, 1)
    if batch.prefix_mask is not None:
        to_prefix.add_(batch.prefix_mask[:, None, None])
    to_blocks = (grouped.index_select(0, owners) @ keys).float()  # (used blocks, kv heads, group, BLOCK)
    to_blocks.add_(batch.block_mask[:, None, None])
    # Softmax over prefix and blocks together. `highest` and `sums`: (slots, kv heads, group, 1).
    highest = batch.reduce(to_blocks.amax(-1, keepdim=True), "max")
    if prefix_keys.shape[1]:
        highest = torch.maximum(highest, to_prefix.amax(-1, keepdim=True))
    to_prefix = to_prefix.sub_(highest).exp_()
    to_blocks = to_blocks.sub_(highest[owners]).exp_()
    sums = to_prefix.sum(-1, keepdim=True) + batch.reduce(to_blocks.sum(-1, keepdim=True), "sum")
    prefix_weights = to_prefix.div_(sums).to(queries.dtype)  # (slots, kv heads, group, prefix)
    block_weights = to_blocks.div_(sums[owners]).to(queries.dtype)  # (used blocks, kv heads, group, BLOCK)
    from_prefix = prefix_weights.transpose(0, 1).flatten(1, 2) @ prefix_values  # (kv heads, slots x group, size)
    from_prefix = from_prefix.unflatten(1, (batch.size, -1)).transpose(0, 1)
    from_blocks = batch.reduce(block_weights @ values.mT, "sum")
    return (from_prefix + from_blocks).flatten(1, 2)


AttentionInterface.register(ATTENTION, _attend)
