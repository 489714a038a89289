"""The slot engine: continuous batching over games, with the keys and values of each game kept between its prompts.

Every game has a slot that caches its last prompt and reply. The game's next prompt, for either role, begins with the
same rules and history, so that only the tokens after them are computed. The prefix of all prompts is computed and
stored once. A step decodes one token of every running reply and prefills new prompts; a finished reply frees its slot
at once.

(With chat templates the prompts of the two roles share the rules only, and a game that finds no slot of its own starts
from the common prefix: slower, with the same replies.)

The model is transformers' own; only its attention function is replaced, by the one in tools/engine/attention.py.
"""

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

from tools.engine.attention import ATTENTION, BlockManager, Chunk, LayerCache, PrefixStep, Step, plan_step
from tools.engine.model import Counts, LocalModel
from tools.players.player import Reply, Sampling
from utils import warn_on_rank_0

PREFILL_TOKENS = 2048  # of prompts in a step at most: bounds the memory of activations


@dataclass
class Request:
    """A prompt of a game and its reply so far."""

    number: int
    prompt: str
    game: int
    limit: int  # tokens of the reply at most
    reply: list[int] = field(default_factory=list)  # token ids
    prompt_tokens: int = 0
    prompt_cut: bool = False


@dataclass
class Slot:
    """A game's cached tokens and its running request."""

    ids: list[int] = field(default_factory=list)  # cached tokens; the first `shared` lie in the common prefix
    shared: int = 0
    blocks: list[int] = field(default_factory=list)  # of the cached tokens after the common prefix
    pending: list[int] = field(default_factory=list)  # tokens to compute; the logits of the last give the next token
    request: Request | None = None  # None: idle

    def start(self, request: Request, ids: list[int], prefix: list[int]) -> None:
        """Begin a request: reuse the longest cached prefix of its tokens, the slot's own or the common one."""
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
    """Continuous batching over `slots` games at a time, for models that `can_hold` accepts.

    When the device runs out of memory, the slots are halved.
    """

    def __init__(self, local: LocalModel, slots: int):
        self.local, self.model = local, local.model
        self.model.set_attn_implementation(ATTENTION)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and every prompt has its own
        self.warp = _warpers(local.sampling)
        self.waiting: deque[Request] = deque()
        self.counts = Counts()
        self._reset(slots)

    @property
    def batch_size(self) -> int:
        """Games at a time."""
        return len(self.slots)

    def _reset(self, slots: int) -> None:
        self.slots = [Slot() for _ in range(slots)]
        self.idle: dict[object, int] = {f"unused {number}": number for number in range(slots)}  # by game, oldest first
        self.prefix: list[int] = []
        self.caches: dict[int, LayerCache] = {}  # by layer
        self.block_manager = BlockManager()

    def start(self, request: int, prompt: str, *, game: int, limit: int | None = None) -> None:
        """Queue a request; its prompt is expected to begin as earlier ones of this `game` did."""
        self.waiting.append(Request(request, prompt, game, limit or self.local.sampling.max_new_tokens))

    @torch.inference_mode()
    def run(self) -> list[tuple[int, Reply]]:
        """Step until at least one reply has ended: (request, reply) pairs."""
        finished: list[tuple[int, Reply]] = []
        while not finished:
            try:
                self._admit()
                finished = self._step()
                continue
            except torch.OutOfMemoryError:
                if len(self.slots) == 1:
                    raise
            self._halve()  # outside the handler, whose traceback keeps tensors alive
        return finished

    def _halve(self) -> None:
        """Go on with half the slots; running replies continue, with their caches recomputed."""
        warn_on_rank_0("out of memory with %d games at a time; going on with half as many", len(self.slots))
        self.waiting.extendleft(slot.request for slot in reversed(self.slots) if slot.request)
        self._reset(len(self.slots) // 2)
        torch.cuda.empty_cache()

    # --- from requests to slots

    def _admit(self) -> None:
        """Give waiting requests idle slots: the slot of the same game if there is one, else the longest idle."""
        # Requests with a slot of their own go first, so that no other takes it.
        requests = sorted(self.waiting, key=lambda request: request.game not in self.idle)[: len(self.idle)]
        if not requests:
            return
        encoded = {}
        for request in requests:
            ids, request.prompt_cut = self.local.encode(request.prompt)
            request.prompt_tokens = len(ids)
            encoded[request.number] = ids + request.reply
        if not self.caches:
            self._compute_prefix(list(encoded.values()))
        for request in requests:
            game = request.game if request.game in self.idle else next(iter(self.idle))
            slot = self.slots[self.idle.pop(game)]
            slot.start(request, encoded[request.number], self.prefix)
            self.block_manager.resize(slot.blocks, len(slot.ids) - slot.shared)
            self.waiting.remove(request)  # only now: the prefix may have run out of memory

    def _compute_prefix(self, prompts: list[list[int]]) -> None:
        """Compute the prefix that the first prompts have in common."""
        common = commonprefix(prompts)  # works on lists as on strings
        self.prefix = common[: min(map(len, prompts)) - 1]
        if self.prefix:
            self._forward(self.prefix, torch.arange(len(self.prefix)), PrefixStep(self.caches), torch.tensor([0]))
            self.counts.prefill_tokens += len(self.prefix)
        self.counts.prefix_tokens = len(self.prefix)

    # --- a step

    def _step(self) -> list[tuple[int, Reply]]:
        """Compute pending tokens and sample a token for every slot without any left; returns the replies that end."""
        chunks = self._schedule()
        busy, idle = ([slot.blocks for slot in self.slots if bool(slot.request) is kind] for kind in (True, False))
        moves = self.block_manager.compact(busy, idle)
        num_blocks, device = self.block_manager.num_blocks, self.model.device
        step = plan_step(chunks, self.caches, len(self.prefix), num_blocks, moves, device)
        complete = [number for number, chunk in enumerate(chunks) if chunk.complete]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        logits = self._forward(tokens, step.positions, step, step.ends[complete])
        for chunk in chunks:
            slot = self.slots[chunk.slot]
            self.counts.prefill_tokens += 0 if slot.request.reply else len(chunk.tokens)
            slot.advance(chunk.tokens)
        self.counts.steps += 1
        return self._sample([chunks[number].slot for number in complete], logits) if complete else []

    def _schedule(self) -> list[Chunk]:
        """The chunks of a step: one token of every running reply, then prompts up to PREFILL_TOKENS."""
        busy = sorted((len(slot.pending), number) for number, slot in enumerate(self.slots) if slot.request)
        budget, chunks = len(busy) + PREFILL_TOKENS, []
        for num_pending, number in busy:
            slot = self.slots[number]
            tokens = slot.pending[:budget]
            budget -= len(tokens)
            if tokens:
                self.block_manager.resize(slot.blocks, len(slot.ids) - slot.shared + len(tokens))
                complete = len(tokens) == num_pending
                chunks.append(Chunk(number, tokens, len(slot.ids), slot.shared, slot.blocks, complete))
        return chunks

    def _forward(self, tokens: list[int], positions: torch.Tensor, step: Step | PrefixStep, ends: torch.Tensor):
        """Logits of the tokens at `ends`, in float32: (ends, vocabulary)."""
        device = self.model.device

        def select(module, args):  # not by `logits_to_keep`, which must be where the last layer is
            return args[0][:, ends.to(args[0].device)], *args[1:]

        handle = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            output = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=positions[None].to(device),
                use_cache=False,
                step=step,
            )
        finally:
            handle.remove()
        return output.logits[0].float()

    def _sample(self, numbers: list[int], logits: torch.Tensor) -> list[tuple[int, Reply]]:
        """Sample a token for each of these slots from (slots, vocabulary) logits; the replies that end with it."""
        sampling, stop_ids = self.local.sampling, self.local.stop_ids
        requests = [self.slots[number].request for number in numbers]
        too_short = [row for row, request in enumerate(requests) if len(request.reply) < sampling.min_new_tokens]
        if too_short and stop_ids:
            logits[torch.tensor(too_short)[:, None], torch.tensor(stop_ids)] = -torch.inf
        if sampling.do_sample:
            sampled = draw(self.warp(None, logits).softmax(-1)).tolist()
            if max(sampled) == logits.shape[-1]:
                raise RuntimeError("the model's logits are no numbers; if it runs in float16, try --bf16 True")
        else:
            sampled = logits.argmax(-1).tolist()
        finished = []
        for number, request, token in zip(numbers, requests, sampled, strict=True):
            request.reply.append(token)
            if token in stop_ids or len(request.reply) == request.limit:
                finished.append(self._finish(number))
            else:
                self.slots[number].pending = [token]
        return finished

    def _finish(self, number: int) -> tuple[int, Reply]:
        request = self.slots[number].request
        self.slots[number].request = None
        self.idle[request.game] = number
        self.counts.prompts += 1
        self.counts.prompt_tokens += request.prompt_tokens
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
