"""The losses: recorded numbers, numbers worked by hand, and gradients."""

import math

import pytest
import torch
from conftest import GOLDEN, load_golden
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from trainers import label_logprob, offline_po_loss, sequence_logprob, sft_kl_loss, sft_loss

RECORDED = load_golden("losses.json")
# Batch 9 has a row without labels: NaN in the release, an error when rows are loaded here.
BATCHES = [batch for batch in RECORDED["batches"] if batch["id"] != 9]


def by_id(batch):
    return f"{batch['id']}-{batch['note']}"


@pytest.fixture(scope="module")
def models():
    folders = (GOLDEN / "tiny_policy", GOLDEN / "tiny_ref")
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


def as_tensors(batch) -> dict:
    dtypes = {"input_ids": torch.long, "labels": torch.long}
    return {name: torch.tensor(x, dtype=dtypes.get(name, torch.float32)) for name, x in batch["inputs"].items()}


def method_losses(logprob, ref_logprob, inputs) -> dict:
    imitation, self_play = (
        {name.removeprefix("lm_"): value for name, value in RECORDED["coefficients"][method].items()}
        for method in ("SFTwithKL", "OfflinePO")
    )
    columns = [inputs[name] for name in ("rewards", "weights", "sft_mask")]
    return {
        "SFTwithKL": sft_kl_loss(logprob, ref_logprob, inputs["weights"], **imitation)[0],
        "OfflinePO": offline_po_loss(logprob, ref_logprob, *columns, **self_play)[0],
    }


def release_share(batch) -> torch.Tensor:
    """The release divides by all labels; a label at the start of a row is predicted by nothing, and left out here."""
    return torch.tensor(batch["n_label_tokens_after_shift"]) / torch.tensor(batch["n_label_tokens"])


@pytest.mark.parametrize("batch", BATCHES, ids=by_id)
def test_logprobs_equal_the_recorded_ones(models, batch):
    inputs = as_tensors(batch)
    for model, name in zip(models, ("policy_logprob", "ref_logprob"), strict=True):
        with torch.no_grad():
            narrowed = label_logprob(model, model, inputs)
            logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            whole = sequence_logprob(logits, inputs["labels"])
        for logprob in (narrowed, whole):
            assert_close(logprob * release_share(batch), torch.tensor(batch[name]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["SFTwithKL", "OfflinePO"])
@pytest.mark.parametrize("batch", BATCHES, ids=by_id)
def test_losses_and_gradients_equal_the_recorded_ones(models, batch, method):
    policy, reference = models
    inputs, share = as_tensors(batch), release_share(batch)
    policy.zero_grad(set_to_none=True)
    with torch.no_grad():
        ref_logprob = label_logprob(reference, reference, inputs) * share
    loss = method_losses(label_logprob(policy, policy, inputs) * share, ref_logprob, inputs)[method]
    loss.backward()
    assert_close(loss.item(), batch[method]["loss"], rtol=1e-5, atol=0)
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert_close(norm, batch[method]["grad_norm"], rtol=1e-5, atol=0)
    for entry, expected in zip(RECORDED["grad_entries"], batch[method]["grad_entries"], strict=True):
        value = gradients[entry["param"]].flatten()[entry["flat_index"]].item()
        assert_close(value, expected, rtol=1e-4, atol=1e-7)


# By hand.


def tensor(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_means_are_over_labels_shifted_by_one_and_over_tokens():
    logits = torch.log(torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]]))  # (1, 3, 2)
    labels = torch.tensor([[0, 1, 0]])  # the first label is predicted by nothing
    expected = (math.log(0.5) + math.log(0.25)) / 2  # label 1 from position 0, label 0 from position 1
    assert_close(sequence_logprob(logits, labels), torch.tensor([expected]))
    assert_close(sft_loss(tensor(-1.0, -2.0), torch.tensor([1, 3]), 4).item(), (1.0 + 6.0) / 4)  # a mean over tokens


def test_sft_kl_loss_and_gradient_by_hand():
    logprob, ref, weights = tensor(-1.0, -2.0, grad=True), tensor(-1.5, -1.0), tensor(2.0, 0.5)
    loss, metrics = sft_kl_loss(logprob, ref, weights, kl_coeff=0.1)
    kl = [math.exp(-1) * 0.5, math.exp(-2) * -1.0]
    assert_close(loss.item(), (2 * (1 + 0.1 * kl[0]) + 0.5 * (2 + 0.1 * kl[1])) / 2)
    loss.backward()
    # d/dl of -l + beta exp(l) (l - l_ref) is -1 + beta exp(l) (1 + l - l_ref)
    slopes = [-1 + 0.1 * math.exp(-1) * 1.5, -1 + 0.1 * math.exp(-2) * 0.0]
    assert_close(logprob.grad, tensor(2 * slopes[0] / 2, 0.5 * slopes[1] / 2))
    assert_close(metrics["log_ratio"], (tensor(-0.5)[0], tensor(2.0)[0]))  # (sum, rows)
    assert_close(metrics["kl"], (tensor(sum(kl))[0], tensor(2.0)[0]))
    assert_close(metrics["sft_loss"].item(), (2 * 1 + 0.5 * 2) / 2)


def offline(logprob, ref, rewards, weights=None, sft=None, **changes):
    settings = {"kl_coeff": 0.2, "sft_coeff": 0.5, "clip_range": 0.2} | changes
    ones = torch.ones_like(rewards)
    weights, sft = ones if weights is None else weights, 0 * ones if sft is None else sft
    return offline_po_loss(logprob, ref, rewards, weights, sft, **settings)


@pytest.mark.parametrize(
    ("reward", "log_ratio", "released", "detached"),
    [
        (0.3, 0.0, -(0.3 - 0.2), -0.3),  # at ratio 1: -(R - beta), and -R
        (-1.0, 0.0, 1.0 + 0.2, 1.0),
        (-1.0, -1.0, 0.2 * 0.8, 0.0),  # below 1 - eps: +beta (1 - eps), and flat
        (-1.0, -4.9, 0.2 * 0.8, 0.0),
        (-1.0, -6.0, 0.0, -0.2 * math.exp(-6)),  # A is beta: r (beta - A), and -A r
        (1.0, 1.0, 0.2 * 1.2, 0.0),  # above 1 + eps
    ],
)
def test_slopes_past_the_clip_are_flat_only_if_the_kl_is_detached(reward, log_ratio, released, detached):
    for detach_kl, slope in ((False, released), (True, detached)):
        logprob = tensor(log_ratio, grad=True)
        loss, _ = offline(logprob, tensor(0.0), tensor(reward), detach_kl=detach_kl)
        loss.backward()
        assert_close(logprob.grad.item(), slope)


def test_clipping_stops_the_ratio_where_it_would_gain_and_not_where_it_loses():
    up, down = math.log(1.5), math.log(0.5)
    for log_ratio, reward, factor in [(up, 1.0, 1.2), (up, -1.0, 1.5), (down, 1.0, 0.5), (down, -1.0, 0.8)]:
        logprob = tensor(log_ratio, grad=True)
        loss, metrics = offline(logprob, tensor(0.0), tensor(reward), kl_coeff=0.0)
        loss.backward()
        assert_close(loss.item(), -reward * factor)
        clipped = factor in (1.2, 0.8)
        assert_close(logprob.grad.item(), 0.0 if clipped else -reward * factor)
        assert metrics["clip_fraction"] == (clipped, 1)


def test_game_and_sft_rows_are_averaged_apart_and_weighted():
    logprob = tensor(-1.0, -1.0, -2.0, grad=True)
    weights = tensor(2.0, 1.0, 3.0)
    loss, metrics = offline(logprob, tensor(-1.0, -1.0, 0.0), tensor(1.0, 0.5, 9.0), weights, tensor(0, 0, 1))
    assert_close(loss.item(), -(2 * 1.0 + 1 * 0.5) / 2 + 0.5 * (2.0 * 3.0) / 1)
    loss.backward()
    assert_close(logprob.grad, tensor(-2 * 0.8 / 2, -1 * 0.3 / 2, -0.5 * 3.0))
    assert_close(metrics["policy_loss"].item(), -1.25)
    assert_close(metrics["sft_loss"].item(), 6.0)


def test_a_missing_kind_of_rows_contributes_nothing_and_no_nan():
    loss, metrics = offline(tensor(-1.0, grad=True), tensor(-1.0), tensor(1.0), sft=tensor(1.0))
    assert_close(loss.item(), 0.5 * 1.0)
    assert metrics["policy_loss"] == 0 and metrics["ratio_max"] == (0, 0)
    logprob = tensor(-1.0, grad=True)
    loss, metrics = offline(logprob, tensor(-1.0), tensor(1.0), sft=tensor(0.0))
    loss.backward()
    assert_close(loss.item(), -1.0)
    assert logprob.grad.isfinite().all() and metrics["sft_loss"] == 0


def test_given_counts_divide_instead_of_the_batchs_own():
    rows = (tensor(-1.0, -2.0), tensor(-1.0, -1.0), tensor(1.0, 1.0))
    loss, metrics = offline(*rows, sft=tensor(0.0, 1.0), num_game_rows=4.0, num_sft_rows=8.0)
    assert_close(loss.item(), -1.0 / 4 + 0.5 * 2.0 / 8)
    assert_close([metrics["policy_loss"].item(), metrics["sft_loss"].item()], [-1.0 / 4, 2.0 / 8])
    loss, _ = sft_kl_loss(rows[0], rows[0], rows[2], kl_coeff=0.1, num_rows=6.0)
    assert_close(loss.item(), 3.0 / 6)


# Logits only where a label is scored.

SIZES = {"vocab_size": 977, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DENSE = SIZES | {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS = {
    "llama": LlamaConfig(**DENSE),
    "qwen2": Qwen2Config(**DENSE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**DENSE),
    "gpt2": GPT2Config(vocab_size=977, n_embd=16, n_layer=2, n_head=2, **NO_DROPOUT),
}


def ragged_batch(pad_left: bool) -> dict:
    """Three rows of 40, 25 and 9 tokens whose last 3, 10 and 1 are scored."""
    torch.manual_seed(0)
    batch = {name: torch.zeros(3, 40, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((3, 40), -100)
    for row, (length, scored) in enumerate([(40, 3), (25, 10), (9, 1)]):
        end = 40 if pad_left else length
        batch["input_ids"][row, end - length : end] = torch.randint(1, 977, (length,))
        batch["attention_mask"][row, end - length : end] = 1
        batch["labels"][row, end - scored : end] = batch["input_ids"][row, end - scored : end]
    return batch


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation's result had."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_narrowed_logits_give_the_same_numbers_and_never_the_whole_tensor(name, checkpointing):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(MODELS[name]).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    batch = ragged_batch(pad_left=False)
    with LargestTensor() as largest:
        narrowed = label_logprob(model, model, batch, pads_left=False)
        narrowed.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    whole = sequence_logprob(model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"])
    whole.sum().backward()
    assert_close(narrowed, whole, rtol=1e-6, atol=1e-6)
    assert_close(narrowed, label_logprob(model, model, ragged_batch(pad_left=True)), rtol=1e-5, atol=1e-6)
    assert_close(gradients, [parameter.grad for parameter in model.parameters()], rtol=1e-4, atol=1e-6)
    assert largest.elements < 3 * 40 * 977 / 2
