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

import math
from collections import deque
from dataclasses import dataclass, field
from os.path import commonprefix

import torch
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tools.engine.attention import (
    ATTENTION,
    BLOCK,
    BlockManager,
    Chunk,
    LayerCache,
    PrefixStep,
    Step,
    num_blocks_for,
    upload,
)
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


@dataclass
class Slot:
    """A game's cached tokens and its running request."""

    ids: list[int] = field(default_factory=list)  # cached tokens; the first `shared` lie in the common prefix
    shared: int = 0
    blocks: list[int] = field(default_factory=list)  # of the cached tokens after the common prefix
    pending: list[int] = field(default_factory=list)  # tokens to compute; the logits of the last give the next token
    request: Request | None = None  # None: idle

    def start(self, request: Request, prefix: list[int]) -> None:
        """Begin a request: reuse the longest cached prefix of its tokens, the slot's own or the common one."""
        ids = request.ids + request.reply
        most = len(ids) - 1  # the last token is computed in any case, for its logits
        own, common = min(num_common(self.ids, ids), most), min(num_common(prefix, ids), most)
        if own <= max(self.shared, common):  # none of the slot's own blocks, which begin at `shared`, is of use
            own = self.shared = common
        self.ids, self.pending, self.request = ids[:own], ids[own:], request

    def advance(self, tokens: list[int]) -> None:
        """Move computed tokens from pending to cached."""
        self.ids += tokens
        del self.pending[: len(tokens)]


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
        self.waiting: deque[Request] = deque()
        self.counts = Counts()
        self.slots = [Slot() for _ in range(slots)]
        self.unused = self.slots[::-1]
        self.idle: dict[int, Slot] = {}  # with the caches of games that wait for the other side or are over, by game
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
        finished: list[tuple[int, Reply]] = []
        out_of_memory = False
        while not finished:
            try:
                if out_of_memory:  # not in the handler, whose traceback keeps tensors alive
                    self._shrink()
                self._admit()
                finished = self._step()
                out_of_memory = False
            except torch.OutOfMemoryError:
                if len(self._busy()) <= 1:
                    raise
                out_of_memory = True
        return finished

    def _busy(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.request]

    # --- from requests to slots

    def _admit(self) -> None:
        """Give waiting requests slots: the slot of the same game first, then others while the replies still fit."""
        # Requests with a slot of their own go first, so that no other takes it.
        requests = sorted(self.waiting, key=lambda request: request.game not in self.idle)
        requests = requests[: len(self.unused) + len(self.idle)]
        if requests and not self.caches:
            self._compute_prefix([self._encode(request) for request in requests])
        busy = self._busy() if requests else []
        free = self.fitting - sum(self._likely_blocks(len(slot.ids) + len(slot.pending), slot.shared) for slot in busy)
        for request in requests:
            ids = self._encode(request) + request.reply
            free -= self._likely_blocks(len(ids), num_common(self.prefix, ids))
            if request.game in self.idle:
                slot = self.idle.pop(request.game)
            elif free < 0 and busy:
                break
            else:
                slot = self.unused.pop() if self.unused else self.idle.pop(next(iter(self.idle)))
            slot.start(request, self.prefix)
            self.block_manager.resize(slot.blocks, len(slot.ids) - slot.shared)
            self.waiting.remove(request)  # only now: the prefix may have run out of memory
            busy.append(slot)

    def _encode(self, request: Request) -> list[int]:
        if not request.ids:
            request.ids, request.prompt_cut = self.local.encode(request.prompt)
        return request.ids

    def _likely_blocks(self, tokens: int, shared: int) -> int:
        """Blocks of a slot with so many tokens at the end of its reply, if that is as long as those before."""
        counts, longest = self.counts, self.local.sampling.max_new_tokens
        reply = counts.new_tokens // counts.prompts if counts.prompts else longest
        return num_blocks_for(tokens - shared + reply)

    def _compute_prefix(self, prompts: list[list[int]]) -> None:
        """Compute the prefix that the first prompts have in common."""
        common = commonprefix(prompts)  # works on lists as on strings
        self.prefix = common[: min(map(len, prompts)) - 1]
        if self.prefix:
            lists = (self.prefix, range(len(self.prefix)), [0])
            tokens, positions, end = upload(lists, self.model.device)
            self._forward(tokens, positions, end, PrefixStep(self.caches))
            self.counts.prefill_tokens += len(self.prefix)
        self.counts.prefix_tokens = len(self.prefix)

    # --- a step

    def _step(self) -> list[tuple[int, Reply]]:
        """Compute pending tokens and sample a token for every slot without any left; returns the replies that end."""
        chunks = self._schedule()
        for cache in self.caches.values():
            cache.grow(self.block_manager.num_blocks, self.most_blocks)
        self._compact()
        step = Step(chunks, self.caches, len(self.prefix), self.block_manager.num_blocks)
        plan = step.on(self.model.device)
        logits = self._forward(plan.tokens, plan.positions, plan.ends, step)
        for chunk in chunks:
            slot = self.slots[chunk.slot]
            decoded = len(chunk.tokens) == 1 and slot.request.reply
            self.counts.prefill_tokens += 0 if decoded else len(chunk.tokens)
            slot.advance(chunk.tokens)
        self.counts.steps += 1
        self.counts.at_once = max(self.counts.at_once, len(chunks))
        complete = [self.slots[chunk.slot] for chunk in chunks if chunk.complete]
        return self._sample(complete, logits) if complete else []

    def _schedule(self) -> list[Chunk]:
        """The chunks of a step: one token of every running reply, then prompts up to PREFILL_TOKENS."""
        while True:
            busy = sorted((len(slot.pending), number) for number, slot in enumerate(self.slots) if slot.request)
            budget, planned = len(busy) + PREFILL_TOKENS, []
            for num_pending, number in busy:
                if tokens := min(num_pending, budget):
                    planned.append((self.slots[number], tokens, number))
                    budget -= tokens
            if self._have_room([(slot, tokens) for slot, tokens, _ in planned]):
                break
        chunks = []
        for slot, tokens, number in planned:
            self.block_manager.resize(slot.blocks, len(slot.ids) - slot.shared + tokens)
            complete = tokens == len(slot.pending)
            chunks.append(Chunk(number, slot.pending[:tokens], len(slot.ids), slot.shared, slot.blocks, complete))
        return chunks

    def _have_room(self, planned: list[tuple[Slot, int]]) -> bool:
        """Whether so many more tokens of each slot fit; makes room by idle caches, else parks a request if it can."""
        more = sum(num_blocks_for(len(slot.ids) - slot.shared + tokens) - len(slot.blocks) for slot, tokens in planned)
        while self.idle and self.block_manager.used + more > self.fitting:
            self._clear(self.idle.pop(next(iter(self.idle))))
        busy = self._busy()
        if self.block_manager.used + more <= self.fitting or len(busy) == 1:
            return True
        self._park(busy)
        return False

    def _park(self, busy: list[Slot]) -> None:
        """Let one of these requests wait, that with the fewest tokens to compute again."""
        slot = min(busy, key=lambda slot: len(slot.blocks))
        busy.remove(slot)
        self.waiting.appendleft(slot.request)
        self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        self.block_manager.resize(slot.blocks, 0)
        slot.ids, slot.pending, slot.shared, slot.request = [], [], 0, None
        self.unused.append(slot)

    def _compact(self) -> None:
        busy, idle = ([slot.blocks for slot in self.slots if bool(slot.request) is kind] for kind in (True, False))
        moves = self.block_manager.compact(busy, idle)
        if moves[0] and self.caches:
            overwritten, source = upload(moves, self.model.device)
            for cache in self.caches.values():
                cache.moves.append((overwritten, source))

    def _shrink(self) -> None:
        """After the device ran out of memory: park requests until the caches need an eighth less; free the rest."""
        torch.cuda.empty_cache()
        for game in list(self.idle):
            self._clear(self.idle.pop(game))
        busy, self.fitting = self._busy(), min(self.fitting, self.block_manager.used) * 7 // 8
        running = len(busy)
        for slot in busy:  # the new blocks of the step that failed hold nothing, and may not exist in all layers
            self.block_manager.resize(slot.blocks, len(slot.ids) - slot.shared)
        while len(busy) > 1 and (len(busy) == running or self.block_manager.used > self.fitting):
            self._park(busy)
        warn_on_rank_0("out of memory with %d replies at a time; %d wait", running, running - len(busy))
        self._compact()
        self.block_manager.forget_free()
        for cache in self.caches.values():
            cache.shrink(self.block_manager.num_blocks)
        torch.cuda.empty_cache()

    def _forward(self, tokens, positions, ends, step: Step | PrefixStep) -> torch.Tensor:
        """Logits of the tokens at `ends`, in float32: (ends, vocabulary)."""

        def select(module, args):  # not by `logits_to_keep`, which must be where the last layer is
            return args[0][:, ends.to(args[0].device)], *args[1:]

        handle = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            output = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, step=step)
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
        self.idle[request.game] = slot
        self.fitting = min(self.most_blocks, self.fitting * RECOVERY)
        self.counts.prompts += 1
        self.counts.prompt_tokens += len(request.ids)
        self.counts.new_tokens += len(request.reply)
        return request.number, self.local.decode(request.reply, request.prompt_cut)


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


def num_common(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix."""
    return len(commonprefix([one, other]))


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
