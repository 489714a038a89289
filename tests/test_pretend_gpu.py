"""The pretend GPU computes what the CPU does, refuses what a GPU refuses, and counts."""

import copy

import pytest
import torch
from conftest import build_llama
from pretend_gpu import DEVICE, PretendGPU, to_cpu
from torch.testing import assert_close


def test_a_model_and_its_gradients_are_those_of_the_cpu():
    model = build_llama(0, 300)
    ids = torch.arange(10, 40).view(2, 15)
    logits = model(ids).logits
    with PretendGPU() as gpu:
        moved = gpu.move(copy.deepcopy(model))
        there = moved(ids.to(DEVICE)).logits
        there.square().mean().backward()
    logits.square().mean().backward()
    assert there.device == DEVICE and gpu.launches["mm"] > 10 and gpu.waits == []
    assert_close(to_cpu(there), logits)
    for ours, theirs in zip(moved.parameters(), model.parameters(), strict=True):
        assert_close(to_cpu(ours.grad), theirs.grad)


@pytest.mark.parametrize("inference", [False, True])
def test_what_makes_python_wait_is_counted_and_what_does_not_is_not(inference):
    with PretendGPU() as gpu, torch.inference_mode(inference):
        numbers = torch.arange(6.0, device=DEVICE).view(2, 3)
        numbers[0] += 1
        numbers[:, 1].mul_(torch.tensor(2.0))  # a single number needs no copy
        numbers.masked_fill_(numbers > 100, 0.0)
        assert gpu.waits == gpu.uploads == []
        for wait in (
            lambda: numbers.sum().item(),
            lambda: numbers.tolist(),
            lambda: numbers.cpu(),
            lambda: bool((numbers > 2).any()),
            lambda: numbers[numbers > 2],
            lambda: (numbers > 2).nonzero(),
            lambda: torch.equal(numbers, numbers),
        ):
            gpu.reset()
            wait()
            assert len(gpu.waits) == 1, gpu.waits
        gpu.reset()
        index = torch.tensor([1, 0], device=DEVICE)
        numbers[torch.tensor([0, 1])], numbers[index]
        numbers.copy_(torch.ones(2, 3))
        assert len(gpu.uploads) == 3 and gpu.waits == []
    assert to_cpu(numbers).tolist() == [[1.0] * 3] * 2


def test_mixing_devices_is_refused_and_nobody_takes_it_for_a_real_one():
    with PretendGPU(), pytest.raises(RuntimeError, match="a CPU tensor .3,. beside tensors on pretend:0"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    assert not torch.accelerator.is_available()
