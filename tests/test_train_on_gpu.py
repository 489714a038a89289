"""Training on a pretend GPU: the numbers of the CPU, no mixing of devices, and how often Python waits for the GPU."""

import numpy as np
import pytest
import torch
from helpers import reset_process
from pretend_gpu import DEVICE, PretendGPU, to_cpu
from test_train import flags, make_rows, offline_po, sft, write_rows
from torch.testing import assert_close

import train
from arguments import parse_arguments
from dataloaders import SPAGCollator


class Steps:
    """A reference pass, two micro-batches of an optimizer step, and what is logged."""

    def __init__(self, trainer, gpu: PretendGPU | None):
        self.trainer, self.gpu, self.seen = trainer, gpu, {}
        if gpu:
            gpu.move(trainer.model)
            trainer.args.__dict__["_setup_devices"] = DEVICE
        rows = trainer.train_dataset
        collate = SPAGCollator(trainer.processing_class)
        if trainer.args.ref_model_name_or_path:
            self.reference = rows.ref_logprobs = self.count("reference", lambda: self.reference_pass(rows))
        batches = iter([collate([rows[start + index] for index in range(4)]) for start in (0, 4)])
        trainer.state.max_steps = 1
        batches, counts = self.count("counts", lambda: trainer.get_batch_samples(batches, 2, trainer.args.device))
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        self.losses = [
            self.count(f"step {number}", lambda b=batch: trainer.training_step(trainer.model_wrapped, b, counts))
            for number, batch in enumerate(batches)
        ]
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
        self.count("optimizer", optimizer.step)
        self.logs = self.count("logs", lambda: trainer.metrics.take(trainer.accelerator))
        self.gradients = {name: to_cpu(weights.grad) for name, weights in trainer.model.named_parameters()}
        reset_process()

    def reference_pass(self, rows) -> np.ndarray:
        with self.trainer._reference_model() as (model, module):
            return self.trainer._reference_pass(rows, model, module)

    def count(self, name: str, work):
        """Do some work, and note when Python waited for the GPU and what was uploaded."""
        if not self.gpu:
            return work()
        self.gpu.reset()
        result = work()
        self.seen[name] = (self.gpu.waits, self.gpu.uploads)
        return result


@pytest.mark.parametrize("method", ["SFT", "SFTwithKL", "OfflinePO"])
@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_a_step_is_that_of_the_cpu_and_only_transformers_waits(tmp_path, tiny_model, method, padding_side):
    path = write_rows(tmp_path / "rows.jsonl", make_rows(16))
    settings = sft(path, tiny_model) if method == "SFT" else offline_po(path, tiny_model, tiny_model)
    settings |= {"train_method": method, "padding_side": padding_side}
    on_cpu = Steps(train.set_up(parse_arguments(flags(tmp_path / "cpu", settings))), None)
    with PretendGPU() as gpu:
        on_gpu = Steps(train.set_up(parse_arguments(flags(tmp_path / "gpu", settings))), gpu)
    assert_close([to_cpu(loss) for loss in on_gpu.losses], on_cpu.losses)
    assert_close(on_gpu.gradients, on_cpu.gradients, rtol=1e-4, atol=1e-6)  # not weights: Adam magnifies rounding
    measured = {"tokens_per_second"}
    assert on_gpu.logs.keys() == on_cpu.logs.keys() >= measured
    for name in on_gpu.logs.keys() - measured:
        assert on_gpu.logs[name] == pytest.approx(on_cpu.logs[name], rel=1e-4, abs=1e-5), name
    of_a_forward = 1 if padding_side == "right" else 2  # transformers looks at positions, and at a mask
    seen = on_gpu.seen
    for step in ("step 0", "step 1"):
        waits, uploads = seen[step]
        assert len(waits) <= of_a_forward and len(uploads) <= 9
    assert seen["counts"] == ([], ["_to_copy (3,)"]) and seen["optimizer"] == ([], [])
    assert len(seen["logs"][0]) == 1 and seen["logs"][1] == []
    if method != "SFT":
        assert_close(on_gpu.reference, on_cpu.reference, rtol=1e-5, atol=1e-6)
        assert len(seen["reference"][0]) <= 2 * of_a_forward + 1  # two batches, and the result
