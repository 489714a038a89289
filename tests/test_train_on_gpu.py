"""Training on a pretend GPU: the numbers of the CPU, and no mixing of devices."""

import pytest
import torch
from helpers import reset_process, write_rows
from pretend_gpu import DEVICE, PretendGPU, to_cpu
from test_train import flags, make_rows, offline_po, sft
from torch.testing import assert_close

import train
from arguments import parse_arguments


def one_step(words: list[str], gpu: PretendGPU | None) -> tuple:
    """A reference pass and an optimizer step of two micro-batches: its losses, gradients, and what is logged."""
    trainer = train.set_up(parse_arguments(words))
    if gpu:
        gpu.move(trainer.model)
        trainer.args.__dict__["_setup_devices"] = DEVICE
    rows, collate = trainer.train_dataset, trainer.data_collator
    if trainer.args.ref_model_name_or_path:
        collate.tables["ref_logprobs"] = trainer.compute_reference(rows)
    trainer.state.max_steps = 1
    batches = iter([collate([rows[start + index] for index in range(4)]) for start in (0, 4)])
    batches, counts = trainer.get_batch_samples(batches, 2, trainer.args.device)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    losses = [to_cpu(trainer.training_step(trainer.model_wrapped, batch, counts)) for batch in batches]
    torch.optim.AdamW(trainer.model.parameters(), lr=1e-3).step()
    logs = trainer.metrics.take(trainer.accelerator)
    del logs["tokens_per_second"]
    reset_process()
    return losses, {name: to_cpu(weights.grad) for name, weights in trainer.model.named_parameters()}, logs


@pytest.mark.parametrize("method", ["SFT", "SFTwithKL", "OfflinePO"])
@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_a_step_is_that_of_the_cpu(tmp_path, tiny_model, method, padding_side):
    path = write_rows(tmp_path / "rows.jsonl", make_rows(16))
    settings = sft(path, tiny_model) if method == "SFT" else offline_po(path, tiny_model, tiny_model)
    words = flags(tmp_path / "out", settings, train_method=method, padding_side=padding_side)
    losses, gradients, logs = one_step(words, None)
    with PretendGPU() as gpu:
        gpu_losses, gpu_gradients, gpu_logs = one_step(words, gpu)
    assert_close(gpu_losses, losses)
    assert_close(gpu_gradients, gradients, rtol=1e-4, atol=1e-6)  # not weights: Adam magnifies rounding
    assert gpu_logs == pytest.approx(logs, rel=1e-4, abs=1e-5)
