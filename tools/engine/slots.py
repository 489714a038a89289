"""Answers prompts with a model of this process, computing each token once and never waiting for the slowest reply.

Every game has a slot, where the keys and values of its last prompt and reply stay. The next prompt of the game,
whichever side it is for, begins with the same rules and history: only what differs is computed. What all prompts begin
with is computed and held once for all games. A step takes one token of every reply in the making and the tokens of
prompts that are new; a reply that has ended makes room at once.

(By chat templates the two sides' prompts share the rules only, and a game that meets no idle slot of its own starts
from them too: that costs time and changes nothing.)

The model is transformers' own; only its attention function is replaced, by that of tools/engine/attention.py.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from os.path import commonprefix

import torch
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tools.engine.attention import ATTENTION, Layer, Part, Pool, PrefixStep, Step, plan_step
from tools.engine.model import LocalModel
from tools.players.player import Reply, Sampling
from utils import warn_once

PROMPT_TOKENS = 2048  # of prompts in a step at most: bounds the memory of activations when many are new


@dataclass
class Request:
    """A prompt of a game, and its reply as far as it goes."""

    number: int
    prompt: str
    game: int
    reply: list[int] = field(default_factory=list)  # token ids
    prompt_cut: bool = False


@dataclass
class Slot:
    """One game's place: the tokens whose keys and values it holds, and the request that it is working on."""

    ids: list[int] = field(default_factory=list)  # held; the first `shared` of them are the common prefix's
    shared: int = 0
    blocks: list[int] = field(default_factory=list)  # where they are held, apart from the common prefix's
    pending: list[int] = field(default_factory=list)  # tokens to be fed; the last one's logits are drawn from
    request: Request | None = None  # None: idle

    def place(self, request: Request, ids: list[int], prefix: list[int]) -> None:
        """Work on a request: hold on to what its prompt `ids` share with what is held here or in the prefix."""
        most = len(ids) - 1  # one token is fed at least, for its logits
        kept, of_prefix = min(num_common(self.ids, ids), most), min(num_common(prefix, ids), most)
        if kept <= max(self.shared, of_prefix):  # nothing of the slot's own, which begins at `shared`, is of use
            kept = self.shared = of_prefix
        self.ids, self.pending, self.request = ids[:kept], ids[kept:], request

    def feed(self, tokens: list[int]) -> None:
        """Note that the keys and values of pending tokens are held now."""
        self.ids += tokens
        del self.pending[: len(tokens)]


class SlotEngine:
    """Continuous batching with kept keys and values, over `slots` games at a time.

    For models that `can_hold` accepts. When the device's memory runs out, it goes on with half the slots.
    """

    def __init__(self, local: LocalModel, slots: int):
        self.local, self.model = local, local.model
        self.model.set_attn_implementation(ATTENTION)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and every prompt has its own
        self.warp = _warpers(local.sampling)
        self.waiting: deque[Request] = deque()
        self.counts = Counter()  # prefill: tokens computed for prompts; steps
        self._empty(slots)

    def _empty(self, slots: int) -> None:
        self.slots = [Slot() for _ in range(slots)]
        self.idle: dict[object, int] = {f"unused {number}": number for number in range(slots)}  # by game, oldest first
        self.prefix: list[int] = []
        self.layers: dict[int, Layer] = {}
        self.pool = Pool()

    def start(self, request: int, prompt: str, *, game: int) -> None:
        """Note a request; its prompt is expected to begin as earlier ones of this `game` did."""
        self.waiting.append(Request(request, prompt, game))

    @torch.inference_mode()
    def run(self) -> list[tuple[int, Reply]]:
        """Step until at least one reply has ended; those that have, as (request, reply)."""
        finished: list[tuple[int, Reply]] = []
        while not finished:
            try:
                self._admit()
                finished = self._step()
                continue
            except torch.OutOfMemoryError:
                if len(self.slots) == 1:
                    raise
            self._shrink()  # outside the handler, whose traceback keeps tensors alive
        return finished

    def _shrink(self) -> None:
        """Go on with half the slots; replies in the making are continued, with all that they need computed anew."""
        warn_once("out of memory with %d games at a time; going on with half as many", len(self.slots))
        self.waiting.extendleft(slot.request for slot in reversed(self.slots) if slot.request)
        self._empty(len(self.slots) // 2)
        torch.cuda.empty_cache()

    # --- from requests to slots

    def _admit(self) -> None:
        """Give requests their slots: each that of its game if there is one, else that idle for longest."""
        # Those with a slot of their own first, so that no other takes it.
        requests = sorted(self.waiting, key=lambda request: request.game not in self.idle)[: len(self.idle)]
        if not requests:
            return
        encoded = {}
        for request in requests:
            ids, request.prompt_cut = self.local.encode(request.prompt)
            encoded[request.number] = ids + request.reply
        if not self.layers:
            self._hold_prefix(list(encoded.values()))
        for request in requests:
            game = request.game if request.game in self.idle else next(iter(self.idle))
            slot = self.slots[self.idle.pop(game)]
            slot.place(request, encoded[request.number], self.prefix)
            self.pool.fit(slot.blocks, len(slot.ids) - slot.shared)
            self.waiting.remove(request)  # not before memory has sufficed for the prefix

    def _hold_prefix(self, prompts: list[list[int]]) -> None:
        """Compute what all of the first prompts begin with."""
        common = commonprefix(prompts)  # works on lists as on strings
        self.prefix = common[: min(map(len, prompts)) - 1]
        if self.prefix:
            self._forward(self.prefix, torch.arange(len(self.prefix)), PrefixStep(self.layers), torch.tensor([0]))
            self.counts["prefill"] += len(self.prefix)

    # --- a step

    def _step(self) -> list[tuple[int, Reply]]:
        """Feed pending tokens, and draw the next token of each reply of which all is fed; the replies that end."""
        parts = self._parts()
        busy, idle = ([slot.blocks for slot in self.slots if bool(slot.request) is kind] for kind in (True, False))
        moves = self.pool.bring_forward(busy, idle)
        step = plan_step(parts, self.layers, len(self.prefix), self.pool.size, moves, self.model.device)
        complete = [number for number, part in enumerate(parts) if len(part.tokens) == self._pending(part)]
        tokens = [token for part in parts for token in part.tokens]
        logits = self._forward(tokens, step.positions, step, step.ends[complete])
        for part in parts:
            slot = self.slots[part.slot]
            self.counts["prefill"] += 0 if slot.request.reply else len(part.tokens)
            slot.feed(part.tokens)
        self.counts["steps"] += 1
        return self._draw([parts[number].slot for number in complete], logits) if complete else []

    def _pending(self, part: Part) -> int:
        return len(self.slots[part.slot].pending)

    def _parts(self) -> list[Part]:
        """Replies in the making first: they never wait for prompts, which may take several steps."""
        busy = sorted((len(slot.pending), number) for number, slot in enumerate(self.slots) if slot.request)
        room, parts = len(busy) + PROMPT_TOKENS, []
        for _, number in busy:
            slot = self.slots[number]
            tokens = slot.pending[:room]
            room -= len(tokens)
            if tokens:
                self.pool.fit(slot.blocks, len(slot.ids) - slot.shared + len(tokens))
                parts.append(Part(number, tokens, len(slot.ids), slot.shared, slot.blocks))
        return parts

    def _forward(self, tokens: list[int], positions: torch.Tensor, step: Step | PrefixStep, ends: torch.Tensor):
        """Logits at these places, in float32: (places, vocabulary)."""
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

    def _draw(self, numbers: list[int], logits: torch.Tensor) -> list[tuple[int, Reply]]:
        """Draw a token for each of these slots; the replies that have ended by it."""
        sampling, stop_ids = self.local.sampling, self.local.stop_ids
        replies = [self.slots[number].request.reply for number in numbers]
        young = [row for row, reply in enumerate(replies) if len(reply) < sampling.min_new_tokens]
        if young and stop_ids:
            logits[torch.tensor(young)[:, None], torch.tensor(stop_ids)] = -torch.inf
        if sampling.do_sample:
            drawn = draw(self.warp(None, logits).softmax(-1)).tolist()
            if max(drawn) == logits.shape[-1]:
                raise RuntimeError("the model's logits are no numbers; if it runs in float16, try --bf16 True")
        else:
            drawn = logits.argmax(-1).tolist()
        finished = []
        for number, reply, token in zip(numbers, replies, drawn, strict=True):
            reply.append(token)
            if token in stop_ids or len(reply) == sampling.max_new_tokens:
                finished.append(self._finish(number))
            else:
                self.slots[number].pending = [token]
        return finished

    def _finish(self, number: int) -> tuple[int, Reply]:
        request = self.slots[number].request
        self.slots[number].request = None
        self.idle[request.game] = number
        return request.number, self.local.decode(request.reply, request.prompt_cut)


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """One index a row, by the row's (n, choices) probabilities; the number of choices where they are no numbers.

    Takes one random number a row, where torch.multinomial takes one for each choice, which is slow on a CPU.
    """
    if probabilities.device.type == "mps":  # has no float64
        probabilities = probabilities.cpu()
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]
    # The first place whose sum is larger: never one of probability 0.
    return torch.searchsorted(sums, drawn, right=True)[:, 0]


def num_common(one: list[int], other: list[int]) -> int:
    """How many tokens two lists have in common from their beginning on."""
    return len(commonprefix([one, other]))


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """What `generate` does to logits before it draws, in its order."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def can_hold(model, max_length: int) -> bool:
    """Whether every layer of a model attends to all earlier tokens, by way of transformers' attention interface.

    Not where keys and values differ in size, nor with positions whose rotation depends on the longest of a batch.
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
