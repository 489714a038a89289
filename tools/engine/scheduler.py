"""The slot engine's scheduler: assigns slots to requests and cache blocks to slots, and chooses each step's tokens.

A slot keeps the keys and values of its game's last prompt and reply, in blocks of BLOCK tokens as in vLLM (Kwon et al.
2023, arXiv 2309.06180), so that a short game does not take the memory and time of a long one. The scheduler handles
block indices only, not their content.
"""

from collections import deque
from dataclasses import dataclass, field
from os.path import commonprefix

BLOCK = 32  # tokens per block; larger blocks waste more memory, smaller ones make longer block tables
PREFILL_TOKENS = 2048  # most prompt tokens in a step; bounds the memory of activations


def num_blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


@dataclass(eq=False)
class Request:
    number: int
    prompt_ids: list[int]
    game: int
    prompt_cut: bool
    reply: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Slot:
    """One game's tokens: cached ones, then pending ones, the first of which are the next step's new tokens."""

    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_prefix_tokens: int = 0  # cached tokens stored in the common prefix; the others are in blocks
    block_table: list[int] = field(default_factory=list)  # indices of the blocks, in the order of the tokens
    num_new_tokens: int = 0
    request: Request | None = None  # None: the slot is idle
    game: int | None = None  # None: the slot is empty

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_cached_tokens

    @property
    def new_positions(self) -> range:
        return range(self.num_cached_tokens, self.num_cached_tokens + self.num_new_tokens)

    @property
    def num_block_tokens(self) -> int:
        """Cached and new tokens that are in blocks after the step, that is, without the common prefix."""
        return self.new_positions.stop - self.num_prefix_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the step computes all pending tokens, so that the next token can be sampled."""
        return self.new_positions.stop == len(self.token_ids)


class BlockManager:
    """Allocates blocks, identified by indices from 0."""

    def __init__(self):
        self.num_blocks = 0  # used and free blocks
        self.free: list[int] = []

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self.free)

    def resize(self, block_table: list[int], tokens: int) -> None:
        """Allocate or free blocks at the end of a block table, so that it holds `tokens` tokens."""
        count = num_blocks_for(tokens)
        while len(block_table) > count:
            self.free.append(block_table.pop())
        while len(block_table) < count:
            if not self.free:
                self.free.append(self.num_blocks)
                self.num_blocks += 1
            block_table.append(self.free.pop())

    def compact(self, busy: list[list[int]], idle: list[list[int]]) -> tuple[list[int], list[int]]:
        """Renumber blocks so that busy slots have the lowest ones, which a step can then read without a copy.

        `busy` and `idle` are block tables, changed in place. Returns (targets, sources): the content of block
        sources[i] must move to block targets[i].
        """
        used = {block for table in busy for block in table}
        high = [block for block in used if block >= len(used)]
        low = [block for block in range(len(used)) if block not in used]
        exchanged = dict(zip(high + low, low + high, strict=True))
        if exchanged:
            for blocks in (*busy, *idle, self.free):
                blocks[:] = [exchanged.get(block, block) for block in blocks]
        return low + high, high + low


class Scheduler:
    """Gives slots to requests (`admit`), and chooses the tokens of each step (`schedule`).

    A request is admitted if its prompt and a reply of mean length fit in `block_limit` blocks. When the cache is full,
    the requests cheapest to recompute are preempted: they lose their keys and values but keep their sampled tokens, in
    `Request.reply`. A request that runs alone may exceed `block_limit`.
    """

    def __init__(self, slots: int, *, block_limit: float, max_new_tokens: int):
        self.slots = [Slot() for _ in range(slots)]
        self.block_limit = block_limit
        self.max_new_tokens = max_new_tokens
        self.waiting: deque[Request] = deque()
        self.idle = self.slots.copy()  # slots without a request, in the order in which they are reused
        self.prefix: list[int] = []  # token ids of the common prefix
        self.block_manager = BlockManager()
        self.num_replies = self.num_reply_tokens = 0  # of finished replies

    @property
    def busy(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.request]

    def common_prefix(self) -> list[int]:
        """The tokens that all prompts of the first requests begin with."""
        first = list(self.waiting)[: len(self.slots)]
        return list(commonprefix([request.prompt_ids[:-1] for request in first]))

    def admit(self) -> None:
        """Give waiting requests their game's idle slot, or any other while all expected replies fit in the cache."""
        if not self.waiting:
            return
        slot_of_game = {slot.game: slot for slot in self.idle}
        # requests whose game has an idle slot come first, so that no other request takes it
        requests = sorted(self.waiting, key=lambda request: request.game not in slot_of_game)[: len(self.idle)]
        expected = [self._expected_blocks(len(slot.token_ids) - slot.num_prefix_tokens) for slot in self.busy]
        free = self.block_limit - sum(expected)
        for request in requests:
            token_ids = request.prompt_ids + request.reply
            prefix_tokens = _num_common(self.prefix, token_ids)
            free -= self._expected_blocks(len(token_ids) - prefix_tokens)
            slot = slot_of_game.pop(request.game, None)
            if slot is None:
                if free < 0 and len(self.idle) < len(self.slots):
                    break
                slot = self.idle[0]
            self._assign(slot, request, token_ids, prefix_tokens)

    def _assign(self, slot: Slot, request: Request, token_ids: list[int], prefix_tokens: int) -> None:
        cached = _num_common(slot.token_ids, token_ids)
        if cached <= max(slot.num_prefix_tokens, prefix_tokens):  # the common prefix serves as well
            cached = slot.num_prefix_tokens = prefix_tokens
        slot.token_ids = token_ids
        slot.num_cached_tokens = cached
        slot.request = request
        slot.game = request.game
        self.block_manager.resize(slot.block_table, cached - slot.num_prefix_tokens)
        self.idle.remove(slot)
        self.waiting.remove(request)

    def _expected_blocks(self, tokens: int) -> int:
        """Blocks for `tokens` tokens and a reply of mean length (maximum length until a reply has ended)."""
        if not self.num_replies:
            return num_blocks_for(tokens + self.max_new_tokens)
        return num_blocks_for(tokens + self.num_reply_tokens // self.num_replies)

    def schedule(self) -> tuple[list[Slot], tuple[list[int], list[int]]]:
        """Choose the new tokens: one of every running reply, and at most PREFILL_TOKENS of prompts.

        Returns the slots with new tokens, fewest pending tokens first, and the block moves (targets, sources) to make
        before the step.
        """
        while True:
            slots = sorted(self.busy, key=lambda slot: slot.num_pending_tokens)
            budget = len(slots) + PREFILL_TOKENS
            for slot in slots:
                slot.num_new_tokens = min(slot.num_pending_tokens, budget)
                budget -= slot.num_new_tokens
            if self._make_room(slots):
                break
        for slot in slots:
            self.block_manager.resize(slot.block_table, slot.num_block_tokens)
        idle = [slot.block_table for slot in self.idle]
        moves = self.block_manager.compact([slot.block_table for slot in self.busy], idle)
        return [slot for slot in slots if slot.num_new_tokens], moves

    def _make_room(self, slots: list[Slot]) -> bool:
        """Clear idle slots until the new tokens fit. If they never do, preempt one of `slots` and return False."""
        more = sum(num_blocks_for(slot.num_block_tokens) - len(slot.block_table) for slot in slots)
        for slot in self.idle:
            if self.block_manager.num_used + more > self.block_limit:
                self._clear(slot)
        if self.block_manager.num_used + more <= self.block_limit or len(slots) == 1:
            return True
        self._preempt(min(slots, key=lambda slot: len(slot.block_table)))  # the cheapest to recompute
        return False

    def _preempt(self, slot: Slot) -> None:
        self.waiting.appendleft(slot.request)
        self.idle.insert(0, slot)
        self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        self.block_manager.resize(slot.block_table, 0)
        slot.token_ids = []
        slot.num_cached_tokens = 0
        slot.num_prefix_tokens = 0
        slot.request = slot.game = None

    def finish(self, slot: Slot) -> None:
        """Mark a slot whose reply has ended as idle. It keeps the game's cache until the memory is needed."""
        self.num_replies += 1
        self.num_reply_tokens += len(slot.request.reply)
        slot.request = None
        self.idle.append(slot)


def _num_common(cached: list[int], token_ids: list[int]) -> int:
    """Length of the common beginning, excluding the last token, whose logits must be computed."""
    return len(commonprefix([cached, token_ids[:-1]]))  # works on lists, too
