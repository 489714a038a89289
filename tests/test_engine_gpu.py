"""The slot engine on the pretend GPU: the CPU's numbers, without mixing devices."""

import pytest
import torch
from pretend_gpu import DEVICE, PretendGPU, to_cpu
from test_engine import answer, conversation, llama, sampling
from torch.testing import assert_close

from tools.engine.scheduler import BLOCK
from tools.engine.slots import SlotEngine


class WatchedEngine(SlotEngine):
    """Keeps all logits."""

    def _sample(self, slots, logits):
        self.logits = [*getattr(self, "logits", []), to_cpu(logits).clone()]
        return super()._sample(slots, logits)


@pytest.mark.parametrize("do_sample, blocks", [(False, None), (True, None), (True, 8)])
def test_replies_are_those_of_the_cpu(do_sample, blocks):
    gpu, engines, replies = PretendGPU(), [], []
    for on_gpu in (False, True):
        local = llama(sampling(do_sample=do_sample))
        local.cache_tokens = blocks and blocks * BLOCK
        if on_gpu:
            local.model = gpu.move(local.model)
        engines.append(WatchedEngine(local, 4))
        torch.manual_seed(1)
        with gpu:  # computes what is on its device
            replies.append([answer(engines[-1], prompts) for prompts in conversation(games=5, turns=4)])
    assert replies[0] == replies[1]
    here, there = engines
    assert len(here.logits) == len(there.logits) > 20
    for ours, theirs in zip(here.logits, there.logits, strict=True):
        assert_close(theirs, ours)
    assert there.caches[0].blocks.device == DEVICE
