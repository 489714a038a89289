"""Attention for tools/engine.py: tokens of many games in one row without padding, keys and values in a slot a game.

What all games begin with, the common prefix, is held once; a slot holds what follows in its game. `plan_step` says
which tokens of a step go where; the attention function that transformers is given here reads that.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

ATTENTION = "spag_slots"  # name of the attention function, for transformers
GROWTH = 64  # columns by which the slots grow


class Part(NamedTuple):
    """Consecutive tokens that a slot feeds in a step."""

    slot: int
    tokens: list[int]
    position: int  # of the first token
    shared: int  # tokens of the common prefix that the slot builds on; its own begin at this position


@dataclass
class Group:
    """Parts of about equal length, short ones padded: their queries share a product."""

    rows: torch.Tensor | slice  # (rows,) their slots; a slice stands for all
    tokens: torch.Tensor  # (rows, longest) which tokens of the step
    hidden: torch.Tensor  # (rows, longest, prefix + width) what each must not see


@dataclass
class Step:
    """Where the tokens of one forward pass go, and what they attend to."""

    layers: dict[int, "Layer"]
    positions: torch.Tensor  # (tokens,) in their prompts
    slots: torch.Tensor  # (tokens,) the slot of each
    columns: torch.Tensor  # (tokens,) the place in it
    ends: torch.Tensor  # (parts,) the last token of each
    num_slots: int
    width: int  # columns in use, after this step
    groups: list[Group]
    order: torch.Tensor  # (tokens,) where each stands among the rows x longest places of all groups


@dataclass
class PrefixStep:
    """A forward pass over the common prefix itself. No tuple: hooks of accelerate would hand on a copy of one."""

    layers: dict[int, "Layer"]


class Layer:
    """Keys and values of one layer: (kv heads, prefix, size) and (slots, kv heads, columns, size) each."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        """From (kv heads, prefix, size) each."""
        self.prefix = keys.contiguous(), values.contiguous()
        self.slots: tuple[torch.Tensor, ...] = ()

    def write(self, keys: torch.Tensor, values: torch.Tensor, step: Step) -> None:
        """Store (tokens, kv heads, size) each at their places; the slots grow as needed."""
        if not self.slots or self.slots[0].shape[2] < step.width:
            columns = -(-step.width // GROWTH) * GROWTH
            grown = tuple(new.new_zeros(step.num_slots, new.shape[1], columns, new.shape[2]) for new in (keys, values))
            for old, new in zip(self.slots, grown, strict=False):  # there are none at first
                new[:, :, : old.shape[2]] = old
            self.slots = grown
        slots, columns = step.slots.to(keys.device), step.columns.to(keys.device)
        for stored, new in zip(self.slots, (keys, values), strict=True):
            stored[slots, :, columns] = new


def plan_step(
    parts: Sequence[Part], layers: dict[int, Layer], prefix: int, num_slots: int, device: torch.device
) -> Step:
    """The step in which these parts follow each other, after a common prefix of so many tokens."""
    fields = [(part.slot, part.position, part.shared, len(part.tokens)) for part in parts]
    slots, positions, shared, lengths = torch.tensor(fields).unbind(1)  # (parts,) each
    columns = positions - shared
    width = int((columns + lengths).max())
    alike = defaultdict(list)
    for number, part in enumerate(parts):
        alike[(len(part.tokens) - 1).bit_length()].append(number)
    part_of = torch.arange(len(parts)).repeat_interleave(lengths)  # (tokens,)
    offsets = lengths.cumsum(0) - lengths
    in_part = torch.arange(len(part_of)) - offsets[part_of]
    groups, first_places, places = [], torch.empty_like(lengths), 0
    for numbers in map(torch.tensor, alike.values()):
        longest = int(lengths[numbers].max())
        rows: torch.Tensor | slice = slots[numbers].to(device)
        row_of_part, part_of_row = torch.arange(len(numbers)), numbers
        if longest == 1 and 2 * len(numbers) > num_slots:
            # All slots, whose keys and values need no copy then. Idle ones take part 0's place; nobody reads theirs.
            rows, row_of_part = slice(None), slots[numbers]
            part_of_row = torch.zeros(num_slots, dtype=torch.long).scatter(0, row_of_part, numbers)
        first_places[numbers] = places + row_of_part * longest
        places += len(part_of_row) * longest
        within = torch.arange(longest).minimum(lengths[part_of_row, None] - 1)  # padding repeats a part's last token
        hidden_prefix = (torch.arange(prefix) >= shared[part_of_row, None])[:, None].expand(-1, longest, -1)
        hidden_slot = torch.arange(width) > (columns[part_of_row, None] + within)[..., None]
        hidden = torch.cat([hidden_prefix, hidden_slot], -1)
        groups.append(Group(rows, (offsets[part_of_row, None] + within).to(device), hidden.to(device)))
    return Step(
        layers,
        (positions[part_of] + in_part).to(device),
        slots[part_of].to(device),
        (columns[part_of] + in_part).to(device),
        (offsets + lengths - 1).to(device),
        num_slots,
        width,
        groups,
        (first_places[part_of] + in_part).to(device),
    )


def _attend(module, query, key, value, attention_mask, scaling, step: Step | PrefixStep, **kwargs):
    """The attention function: (1, heads, tokens, size) each to (1, tokens, heads, size), None."""
    if isinstance(step, PrefixStep):
        step.layers[module.layer_idx] = Layer(key[0], value[0])
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query * scaling, key, value))
    if module.layer_idx not in step.layers:  # there is no common prefix
        step.layers[module.layer_idx] = Layer(key[0, :, :0], value[0, :, :0])
    layer = step.layers[module.layer_idx]
    layer.write(keys, values, step)
    places = torch.cat([_attend_group(queries, layer, group, step.width) for group in step.groups])
    return places[step.order.to(places.device)][None], None


def _attend_group(queries: torch.Tensor, layer: Layer, group: Group, width: int) -> torch.Tensor:
    """Attention of a group over the common prefix and its own slots: (rows x longest, heads, size)."""
    at = group.rows if isinstance(group.rows, slice) else group.rows.to(queries.device)
    keys, values = (stored[at, :, :width] for stored in layer.slots)  # (rows, kv heads, width, size)
    prefix_keys, prefix_values = layer.prefix
    (rows, longest), (kv_heads, prefix, size) = group.tokens.shape, prefix_keys.shape
    # Heads that share keys and values side by side: (kv heads, rows, longest, share, size)
    grouped = queries[group.tokens.to(queries.device)].view(rows, longest, kv_heads, -1, size).permute(2, 0, 1, 3, 4)
    share = grouped.shape[3]
    to_prefix = grouped.reshape(kv_heads, -1, size) @ prefix_keys.mT
    to_slot = grouped.transpose(0, 1).reshape(rows, kv_heads, -1, size) @ keys.mT
    to_prefix = to_prefix.view(kv_heads, rows, longest, share, prefix).transpose(0, 1)
    scores = torch.cat([to_prefix, to_slot.view(rows, kv_heads, longest, share, width)], -1).float()
    hidden = group.hidden.to(scores.device)[:, None, :, None]
    weights = scores.masked_fill_(hidden, torch.finfo(scores.dtype).min).softmax(-1).to(queries.dtype)
    of_prefix = weights[..., :prefix].transpose(0, 1).reshape(kv_heads, rows * longest * share, prefix) @ prefix_values
    of_slot = weights[..., prefix:].reshape(rows, kv_heads, -1, width) @ values
    of_prefix = of_prefix.view(kv_heads, rows, longest, share, size).transpose(0, 1)
    output = of_prefix + of_slot.view(rows, kv_heads, longest, share, size)
    return output.transpose(1, 2).reshape(rows * longest, -1, size)


AttentionInterface.register(ATTENTION, _attend)
