"""train.py as its user sees it: recorded runs, ways to train that must agree, checkpoints, refusals."""

import json
import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import peft
import pytest
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard
from conftest import GOLDEN, ROOT, build_llama, build_tokenizer, load_golden
from helpers import Fork, call, contents, copy_model, finish, flags_of, reset_process, run_ranks, write_rows
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_pt_utils import BatchRebalanceSampler

import arguments
import train
import trainers
from tools.common import checkpoints, models
from tools.common.adapters import add_lora
from tools.common.errors import UserError
from tools.common.files import read_json, write_json
from tools.common.models import load_model, load_tokenizer

RUNS = load_golden("train_run.json")["runs"]
ROWS = load_golden("train_data.json")
GAME = {"query": "q", "target": "t", "reward": 1.0}


def flags(output, settings: dict, **changes) -> list[str]:
    settings = {"allow_negative_rewards": True} | settings | changes  # rows here have negative rewards
    return flags_of({"output_dir": output} | settings)


def run(output, settings: dict, **changes) -> list[dict]:
    """Train in this process; return what was logged at each step."""
    printed = call(train.main, *flags(output, settings, **changes)).output.splitlines()
    steps = steps_of(output)
    losses = f"loss {steps[0]['loss']:.3f} at the first and {steps[-1]['loss']:.3f} at the last"
    assert printed[-1] == f"trained {len(steps)} steps, {losses}"
    return steps


def refused(output, settings: dict, message: str, **changes) -> None:
    """Start train.py in this process; it must end with this message and status 2, and leave no model."""
    errors = call(train.main, *flags(output, settings, **changes), status=2).errors
    assert re.search(message, errors.splitlines()[-1]), errors[-2000:]


def launch(output, settings: dict) -> list[dict]:
    """Train in two processes; return what was logged at each step."""
    printed = run_ranks(["train.py", *flags(output, settings)])
    assert "`torch.distributed." not in printed  # ZeRO-3 would print one for each parameter and micro-batch
    return steps_of(output)


def steps_of(output) -> list[dict]:
    history = read_json(Path(output) / "trainer_state.json")["log_history"]
    return [entry for entry in history if "loss" in entry]


def losses_of(steps: list[dict]) -> list[float]:
    return [step["loss"] for step in steps]


def assert_same_curve(steps: list[dict], expected: list[dict]) -> None:
    for name in ("loss", "grad_norm"):
        values, wanted = ([step[name] for step in each] for each in (steps, expected))
        assert_close(values, wanted, rtol=1e-4, atol=1e-5)


def make_rows(count: int) -> list[dict]:
    """Rows of game and SFT kind in no regular order, of 10 to 70 tokens."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        texts = {"query": "ask " * rng.randint(2, 12), "target": "say " * rng.randint(1, 6)}
        weight = {"weight": rng.uniform(0.5, 2)}
        kind = {"type": "sft"} if rng.random() < 0.3 else {"reward": rng.uniform(-0.5, 1)}
        rows.append(texts | weight | kind)
    return rows


def offline_po(rows: str, model, reference, **changes) -> dict:
    settings = {"train_method": "OfflinePO", "model_name_or_path": model, "ref_model_name_or_path": reference}
    settings |= {"train_data_path": rows, "max_length": 128, "per_device_train_batch_size": 8, "max_steps": 4}
    settings |= {"learning_rate": 1e-3, "adam_epsilon": 1e-5}  # Adam divides rounding errors by gradients near zero
    settings |= {"train_sampling_strategy": "sequential", "loss_normalization": "step", "logging_steps": 1}
    return settings | {"save_strategy": "no", "report_to": "none", "disable_tqdm": True} | changes


def sft(rows: str, model, **changes) -> dict:
    settings = offline_po(rows, model, None, train_method="SFT", **changes)
    del settings["ref_model_name_or_path"], settings["loss_normalization"]
    return settings


@pytest.fixture(scope="module")
def mixed_rows(tmp_path_factory) -> str:
    return write_rows(tmp_path_factory.mktemp("rows") / "mixed.jsonl", make_rows(64))


def recorded_settings(name: str, tmp_path) -> dict:
    """The flags of a recorded run, its rows in the recorded order."""
    recorded = RUNS[name]["args"]
    unused = {"warmup_ratio", "warmup_steps", "optim", "logging_nan_inf_filter", "dataloader_drop_last"}
    if recorded["train_method"] != "OfflinePO":
        unused |= {"lm_sft_coeff", "clip_range"}
    if recorded["train_method"] == "SFT":
        unused |= {"lm_kl_coeff", "ref_model_name_or_path"}
    settings = {key: value for key, value in recorded.items() if key not in unused}
    for key in {"model_name_or_path", "ref_model_name_or_path"} & settings.keys():
        settings[key] = GOLDEN / settings[key]
    by_id = {row["query_id"]: row for row in ROWS}
    order = [by_id[i] for batch in RUNS[name]["micro_batches_query_ids"] for i in batch]
    settings |= {"train_data_path": write_rows(tmp_path / f"{name}.jsonl", order), "logging_steps": 1}
    return settings | {"train_sampling_strategy": "sequential", "save_strategy": "no", "report_to": "none"}


def released_score(trainer, logits, batch):
    """The release divides by one token more in the one row that the cut makes start at a label (Deviations)."""
    labels = batch["labels"] != -100
    means = trainers.row_means(trainers.scored_logprob(logits, batch), batch)
    return {"logprobs": means * labels[:, 1:].sum(1) / labels.sum(1)}


@pytest.mark.parametrize("name", ["sft_plain", "sft_kl_other_ref", "offline_po_other_ref"])
def test_a_whole_run_equals_the_recorded_one(name, tmp_path, monkeypatch):
    if name != "sft_plain":  # the release's plain SFT is the Trainer's own, which counts tokens as we do
        monkeypatch.setattr(trainers.SPAGTrainer, "score", released_score)
    steps = run(tmp_path / "out", recorded_settings(name, tmp_path))
    recorded = RUNS[name]
    assert_close(losses_of(steps), recorded["micro_losses"], rtol=1e-4, atol=1e-5)
    assert_close([step["grad_norm"] for step in steps], recorded["grad_norm_before_clipping"], rtol=1e-4, atol=0)
    assert [step["learning_rate"] for step in steps] == recorded["learning_rate_logged_after_step"]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(GOLDEN / "tiny_policy" / "model.safetensors")
    for entry in recorded["final"]["entries"]:
        value = weights[entry["param"]].flatten()[entry["flat_index"]].item()
        assert_close(value, entry["value"], rtol=1e-4, atol=1e-6)
    norm = torch.stack([tensor.norm() for tensor in weights.values()]).norm().item()
    moved = torch.stack([(weights[key] - before[key]).norm() for key in before]).norm().item()
    assert_close([norm, moved], [recorded["final"]["param_norm"], recorded["final"]["update_norm"]], rtol=1e-4, atol=0)


def assert_same_training(steps, output, expected_steps, expected_output, before):
    """Curves and final weights are equal, every parameter moved, and the saved model and tokenizer load."""
    assert_same_curve(steps, expected_steps)
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (output, expected_output, before)]
    for weights, expected, start_weights in zip(*(model.parameters() for model in models), strict=True):
        assert_close(weights, expected, rtol=1e-4, atol=1e-5)
        assert not torch.equal(weights, start_weights)
    assert AutoTokenizer.from_pretrained(output).eos_token == "</s>"


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory, mixed_rows, tiny_model, other_model) -> dict:
    """Four steps of eight rows in one process, against another reference model and against the start itself."""
    outputs = {}
    for reference in (other_model, tiny_model):
        output = tmp_path_factory.mktemp("plain") / "out"
        outputs[reference] = (run(output, offline_po(mixed_rows, tiny_model, reference)), output)
    return outputs


def test_rows_dealt_out_by_length_make_the_same_steps(tmp_path, tiny_model, other_model):
    """Each step of an epoch has the rows that a shuffle with the same seed puts together, in any micro-batch.

    So each row is seen once, also those of the last step, which is a short one.
    """
    rows = make_rows(85)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(7)).tolist()
    path, shuffled = write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", [rows[i] for i in order])
    settings = offline_po(path, tiny_model, other_model, max_steps=11, learning_rate=1e-4, seed=7)
    plain = run(tmp_path / "plain", settings | {"train_data_path": shuffled})
    settings |= {"train_sampling_strategy": "batch_rebalance", "per_device_train_batch_size": 2}
    steps = launch(tmp_path / "dealt", settings | {"gradient_accumulation_steps": 2})
    assert_same_curve(steps, plain)
    assert len(steps) == 11


@pytest.mark.parametrize("data_seed, seed", [(None, 7), (0, 0)])
def test_a_run_that_continues_in_its_second_epoch_deals_out_the_rows_of_that_epoch(data_seed, seed):
    """With several processes the Trainer does not reach the sampler."""
    sampler = BatchRebalanceSampler([1, 2], 2, dp_size=2, grad_accum=1)
    loader = SimpleNamespace(batch_sampler=BatchSamplerShard(sampler, num_processes=2))
    run, args = SimpleNamespace(epoch=1.4), SimpleNamespace(seed=7, data_seed=data_seed)
    trainers.RebalancedEpochs().on_epoch_begin(args, run, None, train_dataloader=loader)
    assert (sampler.epoch, sampler.seed) == (1, seed)


@pytest.mark.parametrize("method", ["SFT", "SFTwithKL", "OfflinePO"])
def test_accumulation_changes_nothing_with_equal_mixes(tmp_path, tiny_model, other_model, method):
    kinds = [[row for row in make_rows(160) if ("type" in row) == is_sft] for is_sft in (True, False)]
    path = write_rows(tmp_path / "rows.jsonl", [row for pair in zip(*kinds, strict=False) for row in pair][:32])
    if method == "SFT":
        settings = sft(path, tiny_model)
    else:
        settings = offline_po(path, tiny_model, other_model, train_method=method, loss_normalization=None)
    whole = run(tmp_path / "4x1", settings, per_device_train_batch_size=4)
    split = run(tmp_path / "2x2", settings, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert_same_training(split, tmp_path / "2x2", whole, tmp_path / "4x1", tiny_model)


@pytest.mark.parametrize("config", [None, "zero3.json", "default_offload_opt_param.json"])
def test_two_processes_train_as_one(tmp_path, plain_runs, mixed_rows, tiny_model, other_model, config):
    """With offload the model is its own reference, as in the paper; otherwise another is. ZeRO-2: test_kills.py."""
    if config:
        pytest.importorskip("deepspeed")  # for Linux
    reference = tiny_model if config == "default_offload_opt_param.json" else other_model
    settings = offline_po(mixed_rows, tiny_model, reference, per_device_train_batch_size=2)
    settings |= {"gradient_accumulation_steps": 2, "deepspeed": config and ROOT / "configs" / config}
    steps = launch(tmp_path / "out", settings)
    expected, output = plain_runs[reference]
    assert_same_training(steps, tmp_path / "out", expected, output, tiny_model)


def test_deepspeed_in_bf16_saves_bf16_and_keeps_logprobs_in_fp32(tmp_path, plain_runs, mixed_rows, tiny_model):
    """In one process, which needs no launcher."""
    pytest.importorskip("deepspeed")
    settings = offline_po(mixed_rows, tiny_model, tiny_model, deepspeed=ROOT / "configs" / "zero2.json", bf16=True)
    finish(Fork(["train.py", *flags(tmp_path / "out", settings)]))
    steps = steps_of(tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert_close(losses_of(steps), losses_of(plain_runs[tiny_model][0]), rtol=0.02, atol=0.02)
    assert abs(steps[0]["log_ratio"]) < 0.02


def test_neither_the_side_of_the_padding_nor_detaching_changes_a_loss(tmp_path, tiny_model, other_model, mixed_rows):
    settings = offline_po(mixed_rows, tiny_model, other_model, max_steps=1)
    (plain,), (left,) = (run(tmp_path / side, settings, padding_side=side) for side in ("right", "left"))
    assert_close([left["loss"], left["grad_norm"]], [plain["loss"], plain["grad_norm"]], rtol=1e-4, atol=1e-5)
    (detached,) = run(tmp_path / "detached", settings, detach_kl=True)
    assert detached["loss"] == pytest.approx(plain["loss"])
    assert detached["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)
    saved, before = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "right", tiny_model))
    assert (saved.model_max_length, saved.truncation_side) == (before.model_max_length, before.truncation_side)


@pytest.fixture
def loaded(monkeypatch) -> list[str]:
    """The models that train.py loads, by name."""
    names, original = [], load_model
    monkeypatch.setattr(models, "load_model", lambda name, **how: names.append(name) or original(name, **how))
    return names


def test_a_reference_equal_to_the_start_is_never_loaded_and_none_has_dropout(tmp_path, loaded, mixed_rows, tiny_model):
    copy = copy_model(tiny_model, tmp_path / "copy")  # known by its content
    steps = run(tmp_path / "out", offline_po(mixed_rows, tiny_model, copy))
    assert abs(steps[0]["log_ratio"]) < 1e-6 and abs(steps[0]["ratio_max"] - 1) < 2e-6
    assert abs(steps[-1]["log_ratio"]) > 1e-3 and loaded == [tiny_model]
    copy_model(tiny_model, copy, attention_dropout=0.5)  # of no effect in eval mode
    assert_same_curve(run(tmp_path / "dropout", offline_po(mixed_rows, tiny_model, copy)), steps)
    assert loaded[1:] == [tiny_model, str(copy)]


class Stopped(BaseException):
    """The end of a run by a kill, as far as this process can have one."""


def stop(*_, **__):
    raise Stopped


@pytest.fixture
def stopped(tmp_path, mixed_rows, tiny_model, monkeypatch) -> tuple[Path, dict]:
    """A run with two checkpoints that was stopped before its end, and its settings."""
    settings = offline_po(mixed_rows, tiny_model, tiny_model, save_strategy="steps", save_steps=2)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(trainers.SPAGTrainer, "save_state", stop)
        run(tmp_path / "stopped", settings)
    return tmp_path / "stopped", settings


def test_a_resumed_run_equals_an_uninterrupted_one_and_asks_the_reference_no_second_time(
    stopped, plain_runs, tiny_model, tmp_path
):
    """A file of reference numbers that are 1 too large shows who reads it."""
    output, settings = stopped
    files = "delete in .*stopped: checkpoint-2 checkpoint-4 model.safetensors settings.json"
    refused(output, settings, f"learning_rate: 0.001 then, 0.002 now.*{files}", learning_rate=2e-3)
    numbers = np.load(output / "ref_logprobs.npy")
    assert numbers.shape == (64,)
    shutil.rmtree(output / "checkpoint-4")
    shifted = shutil.copytree(output, tmp_path / "shifted")
    np.save(shifted / "ref_logprobs.npy", numbers + 1)
    begun_anew = shutil.copytree(shifted, tmp_path / "anew")
    for path in (*begun_anew.glob("checkpoint-*"), *begun_anew.glob("*.safetensors")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    expected = plain_runs[tiny_model][0]
    assert run(shifted, settings)[-1]["log_ratio"] < expected[-1]["log_ratio"] - 0.9
    assert abs(run(begun_anew, settings | {"max_length": 40})[0]["log_ratio"]) < 1e-6
    scratch = train.scratch_folder(SimpleNamespace(output_dir=output))
    scratch.mkdir(parents=True)
    (scratch / "rows_from_0.arrow").write_text("half a file, of a killed start")
    assert_same_curve(run(output, settings), expected)
    assert not list(output.glob("*.npy")) and not (output / train.SCRATCH).exists()


class ByToken(trainers.OfflinePOTrainer):
    """OfflinePO with a ratio for each token; a game row's cost is the mean over its tokens."""

    scores_tokens = True

    def method_loss(self, batch, denominators):
        flags, num_tokens = self.args, trainers.num_scored(batch)
        of_games = batch["game_mask"].bool().repeat_interleave(num_tokens)
        log_ratio = torch.where(of_games, batch["logprobs"] - batch["ref_logprobs"], 0.0)  # (scored tokens,)
        ratio = log_ratio.exp()
        clipped_ratio = ratio.clamp(1 - flags.clip_range, 1 + flags.clip_range)
        rewards = batch["rewards"].repeat_interleave(num_tokens)
        advantage = rewards - flags.lm_kl_coeff * (log_ratio.detach() if flags.detach_kl else log_ratio)
        gains = trainers.row_means(torch.minimum(advantage * ratio, advantage * clipped_ratio), batch)
        logprobs = trainers.row_means(batch["logprobs"], batch)
        game_costs = -gains * batch["weights"] * batch["game_mask"]
        sft_costs = -logprobs * batch["weights"] * batch["sft_mask"]
        policy_loss = trainers.divide(game_costs.sum(), denominators["game_rows"])
        sft_loss = trainers.divide(sft_costs.sum(), denominators["sft_rows"])
        metrics = {"log_ratio": trainers.over_rows(trainers.row_means(log_ratio, batch), batch["game_mask"])}
        return policy_loss + flags.lm_sft_coeff * sft_loss, metrics


def test_a_loss_by_token_is_a_few_lines_and_continues_with_its_reference(
    tmp_path, tiny_model, other_model, monkeypatch
):
    """Rows of one scored token cost what they cost by row."""
    one_token = [GAME | {"query": "q" * n, "target": "", "reward": n / 20} for n in range(1, 17)]
    sft_rows = [{"query": "q" * n, "target": "", "type": "sft"} for n in range(4)]
    rows = write_rows(tmp_path / "one.jsonl", one_token + sft_rows)
    settings = offline_po(rows, tiny_model, other_model, max_steps=2, learning_rate=0.01)
    by_row = run(tmp_path / "by_row", settings)
    monkeypatch.setitem(trainers.TRAIN_METHODS, "OfflinePO", ByToken)
    assert_same_curve(run(tmp_path / "one", settings), by_row)
    more = [row | {"target": "t" * n} for n, row in enumerate(one_token)]  # 1 to 16 tokens with EOS
    settings |= {"train_data_path": write_rows(tmp_path / "more.jsonl", more), "max_steps": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2, "dataloader_num_workers": 1}
    whole = run(tmp_path / "whole", settings)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(trainers.SPAGTrainer, "save_state", stop)
        run(tmp_path / "stopped", settings)
    shutil.rmtree(tmp_path / "stopped/checkpoint-4")
    assert np.load(tmp_path / "stopped/ref_logprobs.npy").shape == (sum(range(1, 17)),)
    monkeypatch.setattr(ByToken, "compute_reference", None)
    assert_same_curve(run(tmp_path / "stopped", settings), whole)


def test_a_run_continued_without_its_reference_numbers_computes_them_from_the_reference(
    stopped, plain_runs, tiny_model
):
    output, settings = stopped
    (output / "ref_logprobs.npy").unlink()
    shutil.rmtree(output / "checkpoint-4")
    assert_same_curve(run(output, settings), plain_runs[tiny_model][0])


def test_only_complete_checkpoints_are_continued_and_others_do_not_crowd_them_out(stopped, monkeypatch):
    output, settings = stopped
    second, last = output / "checkpoint-2", output / "checkpoint-4"

    def continued() -> str | None:
        return checkpoints.last_checkpoint(output, deepspeed=False)

    assert continued() == str(last) and (last / "complete").read_bytes() == b""
    (last / "optimizer.pt").unlink()  # as with --save_only_model
    assert continued() == str(second)
    with pytest.raises(UserError, match="another --deepspeed"):
        checkpoints.last_checkpoint(output, deepspeed=True)
    shutil.rmtree(last)
    with monkeypatch.context() as patch, pytest.raises(Stopped):  # stopped while it writes it again
        patch.setattr(torch, "save", stop)  # of the optimizer
        run(output, settings)
    assert last.is_dir() and continued() == str(second)
    shutil.copytree(second, output / "checkpoint-10")
    shutil.copytree(second, output / "checkpoint-10-backup")
    assert continued().endswith("-10")
    shutil.rmtree(output / "checkpoint-10")
    shutil.rmtree(output / "checkpoint-10-backup")
    (output / "checkpoint-9").mkdir()
    run(output, settings, save_total_limit=1)
    assert continued() == str(last) and [path.name for path in output.glob("checkpoint-*")] == [last.name]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning_and_the_others_are_deleted(
    tmp_path, mixed_rows, tiny_model, monkeypatch
):
    """As on NFS, where files that another program reads stay in their folder."""

    def busy(path, **options):
        if Path(path).name in ("checkpoint-1", "checkpoint-9"):
            raise OSError("Directory not empty: '.nfs0001'")
        rmdir(path, **options)

    rmdir, output = os.rmdir, tmp_path / "out"
    monkeypatch.setattr(os, "rmdir", busy)
    settings = sft(mixed_rows, tiny_model, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=4)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(trainers.SPAGTrainer, "training_step", stop)
        run(output, settings)
    for step in (8, 9):  # of a killed launch
        (output / f"checkpoint-{step}").mkdir()
    printed = call(train.main, *flags(output, settings)).errors
    for name in ("checkpoint-1", "checkpoint-9"):
        assert re.search(f"WARNING .*{name}: .*could not delete .*Directory not empty", printed)
    assert sorted(path.name[-1] for path in output.glob("checkpoint-*")) == ["1", "4", "9"]
    assert read_json(output / "settings.json")["finished"]


@pytest.mark.parametrize(
    "limit, best, deleted",
    [(None, None, [10]), (1, None, [10, 2, 4]), (2, None, [10, 2]), (1, 2, [10, 4]), (2, 4, [10, 2]), (4, 2, [10])],
)
def test_beyond_the_limit_all_checkpoints_but_the_last_and_the_best_are_deleted(tmp_path, limit, best, deleted):
    for step in (2, 4, 6, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}/complete").touch()
    old = checkpoints.old_checkpoints(tmp_path, limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert [path.name for path in old] == [f"checkpoint-{step}" for step in deleted]


@pytest.mark.parametrize("deepspeed, of_state, foreign", [(True, "global_step2", "optimizer.pt"),
                                                           (False, "optimizer.pt", "global_step2")])  # fmt: skip
def test_a_checkpoint_without_the_state_that_this_start_continues_is_refused(tmp_path, deepspeed, of_state, foreign):
    """The Trainer would go on with a new optimizer, and say nothing."""
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    for name in ("complete", foreign):
        (checkpoint / name).touch()
    with pytest.raises(UserError, match="made with another --deepspeed or lack an optimizer"):
        checkpoints.last_checkpoint(tmp_path, deepspeed=deepspeed)
    (checkpoint / of_state).touch()
    assert checkpoints.last_checkpoint(tmp_path, deepspeed=deepspeed) == str(checkpoint)


def test_a_start_that_shall_not_continue_is_refused_where_there_are_checkpoints(stopped, plain_runs, tiny_model):
    output, settings = stopped
    before = contents(output)
    refused(output, settings, "delete them: checkpoint-2 checkpoint-4$", resume_from_checkpoint=False)
    assert contents(output) == before
    shutil.rmtree(output / "checkpoint-4")
    (output / "checkpoint-2").rename(output / "kept-2")
    steps = run(output, settings, resume_from_checkpoint=False)
    assert_same_curve(steps, plain_runs[tiny_model][0])


LORA_MISTAKES = [
    ({"lora_target_modules": ["typo"]}, "--lora_target_modules: no layer is called typo"),
    ({"lora_target_modules": ["q_proj", "typo"]}, "no layer is called typo"),
    ({"lora_target_modules": ["q_proj,v_proj"]}, "no layer is called q_proj,v_proj"),
    ({"lora_target_modules": ["all"]}, "no layer is called all"),
    ({"lora_target_modules": ["norm"]}, "--lora.*LlamaRMSNorm.* is not supported"),
    ({"lora_rank": -1}, "lora_rank is -1; it must be at least 1"),
    ({"lora_dropout": 1.5}, "lora_dropout is 1.5; it must be below 1"),
]


@pytest.mark.parametrize("changes, message", LORA_MISTAKES, ids=str)
def test_a_mistake_in_loras_flags_is_one_line(tmp_path, mixed_rows, tiny_model, changes, message):
    refused(tmp_path / "out", sft(mixed_rows, tiny_model, lora_rank=4) | changes, message)


def test_adapters_on_tied_embeddings_are_refused(tmp_path, mixed_rows, tiny_model):
    tied = copy_model(tiny_model, tmp_path / "tied", tie_word_embeddings=True)
    settings = sft(mixed_rows, tied, lora_rank=4, max_steps=1)
    for layer in ("embed_tokens", "lm_head"):
        targets = {"lora_target_modules": ["q_proj", layer]}
        refused(tmp_path / "out", settings | targets, "are tied to its output layer")
    run(tmp_path / "out", settings)


TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
SMALL = TINY | {"num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize(
    "kind, config, adapted",
    [
        ("llama", SMALL, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("mixtral", SMALL | {"num_key_value_heads": 2}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_by_default_all_linear_layers_get_adapters(kind, config, adapted):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    plain = {"model_name_or_path": "M", "deepspeed": None, "bf16": False, "fp16": False}
    args = SimpleNamespace(lora_rank=4, **plain, **arguments.LORA_ARGUMENTS)
    model = add_lora(model, args)
    assert adapted <= {name.split(".")[-2] for name, _ in model.named_modules() if name.endswith("lora_A")}
    assert model(torch.arange(5).unsqueeze(0)).logits.shape == (1, 5, 64)


def test_lora_trains_adapters_against_the_model_without_them(tmp_path, loaded, mixed_rows, tiny_model):
    settings = offline_po(mixed_rows, tiny_model, None, lora_rank=4, lora_merge=True, learning_rate=0.02)
    settings["save_strategy"] = "epoch"
    steps = run(tmp_path / "out", settings, lora_alpha=6, gradient_checkpointing=True)
    adapter = read_json(tmp_path / "out/adapter_config.json")
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 6)
    assert loaded == [tiny_model] * 2  # once to train, once to merge
    assert abs(steps[0]["log_ratio"]) < 1e-6 and abs(steps[-1]["log_ratio"]) > 1e-3
    with pytest.raises(UserError, match="adapter_config.json.* merged/ .* --lora_merge True"):
        load_model(tmp_path / "out")
    merged, base = (load_model(each) for each in (tmp_path / "out/merged", tiny_model))
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    with torch.no_grad():
        logits = [model(torch.arange(10, 40).unsqueeze(0)).logits for model in (merged, adapted)]
    assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "merged").eos_token == "</s>"
    modes = {path.stat().st_mode for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert len(modes) == 1  # others may read the weights too


@pytest.mark.parametrize("config", [None, "zero3.json"])
def test_lora_loads_its_frozen_base_in_bf16(tmp_path, mixed_rows, tiny_model, config):
    if config:
        pytest.importorskip("deepspeed")
    settings = offline_po(mixed_rows, tiny_model, tiny_model, lora_rank=4, lora_merge=True, learning_rate=0.02)
    plain = run(tmp_path / "fp32", settings)
    settings |= {"bf16": True, "per_device_train_batch_size": 4, "deepspeed": config and ROOT / "configs" / config}
    steps = launch(tmp_path / "out", settings)
    assert abs(steps[0]["log_ratio"]) < 1e-4 and steps[0]["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert_close(losses_of(steps), losses_of(plain), rtol=0.03, atol=0.03)
    merged = load_file(tmp_path / "out" / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


def test_under_autocast_adapters_read_their_inputs_without_a_copy_in_fp32_and_losses_are_equal(
    tmp_path, mixed_rows, tiny_model, monkeypatch
):
    layer = peft.tuners.tuners_utils.BaseTunerLayer
    as_trained = layer._cast_input_dtype
    dtypes = set()

    def noting(self, inputs, dtype):
        kept = as_trained(self, inputs, dtype)
        dtypes.add(kept.dtype)
        return kept

    settings = offline_po(mixed_rows, tiny_model, None, lora_rank=4, bf16=True, learning_rate=0.02)
    monkeypatch.setattr(layer, "_cast_input_dtype", noting)
    kept = run(tmp_path / "kept", settings)
    monkeypatch.setattr(layer, "_cast_input_dtype", lambda self, inputs, dtype: inputs.to(dtype))
    copied = run(tmp_path / "copied", settings)
    assert dtypes == {torch.bfloat16}
    assert losses_of(kept) == losses_of(copied) and len(set(losses_of(kept))) == 4


@pytest.mark.parametrize("method", [offline_po, sft])
def test_the_loss_of_an_evaluation_in_any_batches_is_a_training_step_s(tmp_path, tiny_model, other_model, method):
    rows = sorted(make_rows(20), key=lambda row: row.get("type", ""))  # games first, as assign_rewards writes them
    path = write_rows(tmp_path / "rows.jsonl", rows)
    models = (tiny_model, other_model) if method is offline_po else (tiny_model,)
    settings = method(path, *models, eval_data_path=path, max_steps=1, learning_rate=0)
    batches = {"per_device_train_batch_size": 20, "per_device_eval_batch_size": 3, "dataloader_drop_last": True}
    (step,) = run(tmp_path / "out", settings, **batches)
    results = read_json(tmp_path / "out" / "eval_results.json")
    assert results["eval_loss"] == pytest.approx(step["loss"], rel=1e-5)


@pytest.mark.parametrize("method, batch_size", [(offline_po, 3), (offline_po, 32), (sft, 8)])
def test_the_loss_of_an_evaluation_in_two_processes_is_that_of_one(
    tmp_path, tiny_model, other_model, method, batch_size
):
    """accelerate fills the last batches of 21 rows with the first ones: a whole batch, a part of one, or both."""
    rows = sorted(make_rows(21), key=lambda row: row.get("type", ""))
    path = write_rows(tmp_path / "rows.jsonl", rows)
    models = (tiny_model, other_model) if method is offline_po else (tiny_model,)
    settings = method(path, *models, eval_data_path=path, max_steps=1, learning_rate=0)
    run(tmp_path / "one", settings, per_device_eval_batch_size=21)
    launch(tmp_path / "two", settings | {"per_device_eval_batch_size": batch_size})
    one, two = (read_json(tmp_path / name / "eval_results.json")["eval_loss"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("normalization", ["micro_batch", "step"])
def test_the_parts_of_the_loss_add_up_and_ratios_are_means_over_rows(tmp_path, tiny_model, other_model, normalization):
    """Micro-batches of two game rows, and of a game row and an SFT row: a mean over micro-batches would be wrong."""
    rows = [GAME, GAME, {"query": "q", "target": "tt", "reward": -1.0}, {"query": "q", "target": "t", "type": "sft"}]
    settings = offline_po(write_rows(tmp_path / "rows.jsonl", rows), tiny_model, other_model, max_steps=1)
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0}
    (step,) = run(tmp_path / "out", settings, loss_normalization=normalization)
    assert step["loss"] == pytest.approx(step["policy_loss"] + 0.5 * step["sft_loss"], rel=1e-5)
    mean = (2 * step["log_ratio_positive"] + step["log_ratio_negative"]) / 3
    assert step["log_ratio"] == pytest.approx(mean, rel=1e-5) and step["ratio_max"] >= step["ratio"]
    (whole,) = run(tmp_path / "whole", settings, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    assert step["log_ratio"] == pytest.approx(whole["log_ratio"], rel=1e-5)


def test_a_generation_config_that_transformers_refuses_to_save_loses_no_training(tmp_path, mixed_rows, tiny_model):
    """Copies of Llama-2 have a temperature without do_sample; the Trainer changes their PAD, and saving validates."""
    folder = copy_model(tiny_model, tmp_path / "model")
    write_json(folder / "generation_config.json", {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2})
    run(tmp_path / "out", sft(mixed_rows, folder, max_steps=1))
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6


@pytest.fixture
def hub_model(tmp_path, tiny_model, monkeypatch) -> str:
    """The name of the tiny model in a pretended cache of the hub."""
    folder = tmp_path / "hub/models--me--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0123")
    shutil.copytree(tiny_model, folder / "snapshots/0123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return "me/tiny"


CARD = ["base_model: me/tiny\n", "Base model: `me/tiny`", "Method: OfflinePO (", "lm_kl_coeff 0.2", "clip_range 0.2"]
CARD += ["reference `me/tiny`", "`rows.json`: 4 rows of games, 4 SFT rows", "2404.10642", "- spag\n", "- OfflinePO\n"]


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_cards_and_adapters_say_what_is_true_and_name_no_folder_of_this_machine(tmp_path, hub_model, lora_rank):
    rows = write_rows(tmp_path / "rows.json", [GAME, {"query": "q", "target": "t", "type": "sft"}] * 4)
    reference = None if lora_rank else hub_model
    lora = {"lora_rank": lora_rank, "lora_merge": True if lora_rank else None}
    run(tmp_path / "out", offline_po(rows, hub_model, reference, max_steps=1, learning_rate=0.0, **lora))
    cards = [path.read_text() for path in (tmp_path / "out").rglob("README.md")]
    assert len(cards) == (2 if lora_rank else 1)  # of the adapters and of the merged model
    for card in cards:
        for text in CARD:
            assert text in card, text
        assert str(tmp_path) not in card
    if lora_rank:
        adapter = read_json(tmp_path / "out/adapter_config.json")
        assert adapter["base_model_name_or_path"] == hub_model


def test_a_card_of_a_model_from_a_folder_calls_it_by_its_name_alone(tmp_path, tiny_model):
    rows = write_rows(tmp_path / "rows.json", [{"query": "q", "target": "t"}] * 8)
    run(tmp_path / "out", sft(rows, tiny_model, max_steps=1))
    card = (tmp_path / "out/README.md").read_text()
    assert "`rows.json`: 8 rows\n" in card and "Method: SFT\n" in card
    assert f"Base model: `{Path(tiny_model).name}`" in card and "base_model:" not in card
    assert str(Path(tiny_model).parent) not in card


def test_adapters_name_their_base_as_it_was_given_so_that_peft_loads_them(tmp_path, mixed_rows, tiny_model):
    run(tmp_path / "out", sft(mixed_rows, tiny_model, lora_rank=4, max_steps=1))
    assert read_json(tmp_path / "out/adapter_config.json")["base_model_name_or_path"] == tiny_model
    assert peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_model_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path, mixed_rows, tiny_model, monkeypatch):
    monkeypatch.setattr(transformers.GenerationConfig, "save_pretrained", stop)
    monkeypatch.setattr(trainers.SPAGTrainer, "training_step", None)
    with pytest.raises(Stopped):
        run(tmp_path / "out", sft(mixed_rows, tiny_model))


def test_no_file_and_no_log_of_a_training_holds_a_token_of_the_hub(tmp_path, mixed_rows, tiny_model):
    settings = sft(mixed_rows, tiny_model, max_steps=1, save_strategy="epoch", hub_token="hf_mine")
    printed = call(train.main, *flags(tmp_path / "out", settings))
    assert "hf_mine" not in printed.output + printed.errors
    assert not [path for path, text in contents(tmp_path / "out").items() if b"hf_mine" in text]


@pytest.fixture
def gemma(tmp_path) -> Path:
    """A multimodal model."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = shape | {"vocab_size": 260, "head_dim": 8, "num_key_value_heads": 1}, shape | {"image_size": 28}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    config.update({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    for part in (AutoModelForCausalLM.from_config(config), build_tokenizer()):
        part.save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


@pytest.mark.parametrize("model", ["tiny_model", "gemma"])
def test_frequencies_of_rope_that_were_rounded_are_computed_anew(model, request, monkeypatch):
    def rounded(*values, **options):
        loaded = load(*values, **options)
        for module in loaded[0].modules():
            if "Rotary" in type(module).__name__:
                module.to(torch.bfloat16)
        return loaded

    name, load = str(request.getfixturevalue(model)), AutoModelForCausalLM.from_pretrained
    expected = dict(load(name).named_buffers())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", rounded)
    buffers = dict(models.load_for_training(name, dtype=torch.float32).named_buffers())
    assert any("inv_freq" in name for name in buffers)
    assert_close(buffers, expected, rtol=0, atol=0)


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_of_a_multimodal_model_the_text_part_alone_is_trained(tmp_path, gemma, mixed_rows, lora_rank):
    """DDP waits for a gradient of each weight that is trained."""
    settings = sft(mixed_rows, gemma, max_steps=1, lora_rank=lora_rank)
    trainer = train.set_up(arguments.parse_arguments(flags(tmp_path / "out", settings)))
    trained = {name for name, weights in trainer.model.named_parameters() if weights.requires_grad}
    train.run(trainer)
    reset_process()
    names = {name for name, _ in trainer.model.named_parameters() if "language_model" in name}
    assert trained == {name for name in names if not lora_rank or "lora_" in name} != set()


BAD_TRAINING = {
    "3 rows, which --dataloader_drop_last drops": (
        [GAME] * 3,
        {"dataloader_drop_last": True},
        "a batch has 8",
        {"per_device_train_batch_size": 3},
    ),
    "only SFT rows": ([GAME | {"type": "sft"}] * 8, {}, "--allow_no_game_rows True", {"allow_no_game_rows": True}),
    "4 rows have negative rewards": (
        [GAME, GAME | {"reward": -1.0}] * 4,
        {"allow_negative_rewards": None},
        "log-ratio runs away.*--allow_negative_rewards True",
        {"detach_kl": True},
    ),
    "the learning rate is 0 at every step: 8 rows": (
        [GAME] * 8,
        {"max_steps": 1, "warmup_ratio": 0.03},
        "--warmup_steps 0",
        {"learning_rate": 0},
    ),
}


@pytest.mark.parametrize("problem", BAD_TRAINING)
def test_a_training_that_would_ruin_the_model_or_change_nothing_is_refused(tmp_path, tiny_model, problem):
    rows, changes, remedy, meant = BAD_TRAINING[problem]
    settings = offline_po(write_rows(tmp_path / "rows.jsonl", rows), tiny_model, tiny_model, **changes)
    refused(tmp_path / "out", settings, f"{problem}.*{remedy}")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert run(tmp_path / "out", settings | meant)


CHAT = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
TALK = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "t"}]}
NO_GAME_ROWS = {
    "messages with a reward": (TALK | {"reward": 1.0, "type": "game"}, "'reward' beside 'messages' or Alpaca's"),
    "Alpaca with a reward": ({"instruction": "q", "output": "t", "reward": 1.0}, "'reward' beside 'messages' or Alp"),
    "no reward": ({"query": "q", "target": "t"}, "no 'reward'"),
    "a reward of null": (GAME | {"reward": None}, "no 'reward'"),
    "rewards in the place of reward": ({"query": "q", "target": "t", "rewards": 1.0}, "no 'reward'"),
    "SFT in capitals": (GAME | {"type": "SFT"}, """'type' is 'SFT'.*"type": "sft\""""),
}


@pytest.mark.parametrize("data", ["train_data_path", "eval_data_path"])
@pytest.mark.parametrize("case", NO_GAME_ROWS)
def test_offline_po_takes_no_row_for_a_won_game_unless_the_row_says_so(tmp_path, tiny_model, case, data):
    row, message = NO_GAME_ROWS[case]
    model = copy_model(tiny_model, tmp_path / "model")
    build_tokenizer("<|im_end|>", chat_template=CHAT).save_pretrained(model)
    settings = offline_po(write_rows(tmp_path / "good.jsonl", [GAME] * 8), model, model)
    settings[data] = write_rows(tmp_path / "rows.jsonl", [GAME, {"query": "q", "target": "t", "type": "sft"}, row])
    refused(tmp_path / "out", settings, rf"rows\.jsonl: row 3: {message}")


def test_offline_po_needs_no_reward_of_messages_and_alpaca_rows_and_names_unknown_types(tmp_path, caplog):
    tokenizer = build_tokenizer("<|im_end|>", chat_template=CHAT)
    alpaca = {"instruction": "q", "output": "t"}
    path = write_rows(tmp_path / "rows.jsonl", [TALK, alpaca, GAME | {"type": "debate"}, GAME])
    args = SimpleNamespace(train_method="OfflinePO", output_dir=tmp_path)
    rows = train.read_rows([path], args, tokenizer, len(tokenizer))
    assert rows["kind"][:] == ["sft", "sft", "game", "game"]
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage().endswith("trained on as rows of games: debate")


@pytest.mark.parametrize("method", ["SFT", "SFTwithKL"])
def test_methods_that_imitate_refuse_rewards_below_0(tmp_path, tiny_model, method):
    rows = write_rows(tmp_path / "rows.jsonl", [GAME, GAME | {"reward": -1.0}] * 4)
    settings = sft(rows, tiny_model) | {"train_method": method, "allow_negative_rewards": None}
    settings |= {"ref_model_name_or_path": tiny_model} if method == "SFTwithKL" else {}
    refused(tmp_path / "out", settings, f"4 rows have negative rewards. {method} .*OfflinePO.*--allow_negative_rew")
    assert run(tmp_path / "out", settings | {"allow_negative_rewards": True})


def test_offline_po_refuses_sft_rows_with_rewards_below_0_which_it_would_imitate(tmp_path, tiny_model):
    rows = write_rows(tmp_path / "rows.jsonl", [GAME, GAME | {"reward": -1.0, "type": "sft"}] * 4)
    settings = offline_po(rows, tiny_model, tiny_model, allow_negative_rewards=None, detach_kl=True)
    refused(tmp_path / "out", settings, "4 SFT rows have negative rewards. OfflinePO would imitate them")


def test_what_is_uploaded_holds_no_rows(tmp_path, mixed_rows, tiny_model, monkeypatch):
    uploaded = []

    def upload(folder_path, ignore_patterns=(), **_):
        names = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        uploaded.extend(filter_repo_objects(names, ignore_patterns=ignore_patterns))

    made = SimpleNamespace(repo_id="me/model")
    hub = SimpleNamespace(upload_folder=upload, create_repo=lambda *_, **__: made)
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    run(tmp_path / "out", sft(mixed_rows, tiny_model, push_to_hub=True, hub_token="hf_secret", max_steps=1))
    assert "model.safetensors" in uploaded and not [name for name in uploaded if "arrow" in name]


def test_sft_leaves_out_rows_of_weight_0_and_says_that_other_weights_count_as_1(tmp_path, tiny_model):
    rows = [{"query": "q", "target": "a", "weight": 0.0}, {"query": "q", "target": "b", "weight": 3.0}]
    weighted = sft(write_rows(tmp_path / "weighted.jsonl", [*rows * 4, *rows[1:]]), tiny_model)
    printed = call(train.main, *flags(tmp_path / "weighted", weighted)).errors
    (warning,) = [line for line in printed.splitlines() if "SFT ignores weights" in line]
    assert "9 rows" in warning and "weight 0 (4 rows)" in warning and "SFTwithKL" in warning
    plain = sft(write_rows(tmp_path / "plain.jsonl", [{"query": "q", "target": "b"}] * 5), tiny_model)
    assert_same_curve(steps_of(tmp_path / "weighted"), run(tmp_path / "plain", plain))
    only_0 = write_rows(tmp_path / "only_0.jsonl", rows[:1] * 8)
    refused(tmp_path / "only_0", sft(only_0, tiny_model), "all rows have weight 0")


class Unweighted(trainers.SFTwithKLTrainer):
    reads_weights = False


def test_rows_of_training_and_evaluation_never_share_a_reference_number(
    tmp_path, tiny_model, other_model, monkeypatch
):
    """Dropped rows of weight 0 leave gaps in the training rows' indices."""
    monkeypatch.setitem(trainers.TRAIN_METHODS, "SFTwithKL", Unweighted)
    rows = [{"query": "q", "target": "t" * n, "weight": float(n % 2)} for n in range(1, 17)]
    of_evaluation = write_rows(tmp_path / "eval.jsonl", [{"query": "a", "target": "b" * n} for n in range(1, 9)])
    curves = []
    for name, kept in (("all", rows), ("kept", rows[::2])):
        path = write_rows(tmp_path / f"{name}.jsonl", kept)
        settings = offline_po(path, tiny_model, other_model, train_method="SFTwithKL", eval_data_path=of_evaluation)
        curves.append(run(tmp_path / name, settings, max_steps=1))
    assert_same_curve(*curves)


def test_self_play_on_sft_rows_alone_loads_no_reference(tmp_path, loaded, tiny_model, other_model):
    rows = write_rows(tmp_path / "rows.jsonl", [GAME | {"type": "sft"}] * 8)
    run(tmp_path / "out", offline_po(rows, tiny_model, other_model, allow_no_game_rows=True))
    assert loaded == [tiny_model]


def test_models_that_cannot_be_compared_or_lack_weights_are_refused(tmp_path, mixed_rows, tiny_model):
    build_llama(0, vocab_size=300).save_pretrained(tmp_path / "larger")
    refused(tmp_path / "out", offline_po(mixed_rows, tiny_model, tmp_path / "larger"), "different vocabularies")
    layerless = copy_model(tiny_model, tmp_path / "layerless")
    weights = load_file(layerless / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, layerless / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path / "out", sft(mixed_rows, layerless), "layerless: weights are missing .model.norm.weight")


def test_a_maximum_length_beyond_the_positions_is_one_warning(tmp_path):
    for part in (build_llama(0, 260, max_position_embeddings=64), build_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [GAME] * 8)
    errors = call(train.main, *flags(tmp_path / "out", sft(rows, tmp_path / "model", max_steps=1))).errors
    assert len(re.findall("WARNING --max_length 128 .* 64 positions", errors)) == 1


@pytest.mark.parametrize(
    "changes, message",
    [({"eval_strategy": "epoch"}, "need --eval_data_path"), ({"optim": "galore_adamw"}, "You need to install")],
)
def test_what_the_trainer_refuses_is_one_line(tmp_path, mixed_rows, tiny_model, changes, message):
    refused(tmp_path / "out", sft(mixed_rows, tiny_model), message, **changes)


def test_a_padding_token_that_the_model_lacks_is_not_written_into_its_configuration(tmp_path, mixed_rows, tiny_model):
    folder, tokenizer = copy_model(tiny_model, tmp_path / "model"), build_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    first = run(tmp_path / "out", sft(mixed_rows, folder, max_steps=1))
    assert_same_curve(first, run(tmp_path / "same", sft(mixed_rows, tiny_model, max_steps=1)))
    run(tmp_path / "second", sft(mixed_rows, tmp_path / "out", max_steps=1))


@pytest.mark.parametrize("logging_steps, save_steps", [(1, 3), (100, 3), (100, 9)])
def test_a_loss_that_is_not_finite_stops_training_and_saves_no_model(
    tmp_path, mixed_rows, tiny_model, logging_steps, save_steps
):
    settings = sft(mixed_rows, tiny_model, learning_rate=1e30, max_steps=4, logging_steps=logging_steps)
    settings |= {"save_strategy": "steps", "save_steps": save_steps}
    for _ in range(2):
        refused(tmp_path / "out", settings, "the loss was NaN or infinite at or before step [234]; no model is saved")
    assert not list((tmp_path / "out").glob("**/*.safetensors"))


def test_weights_that_the_last_step_made_infinite_are_not_saved(tmp_path, tiny_model):
    """The loss of the last step was finite; no later one looks at its weights."""
    rows = write_rows(tmp_path / "rows.jsonl", [GAME | {"weight": 1e9}] * 8)
    changes = {"max_steps": 1, "optim": "sgd", "learning_rate": 3e38, "max_grad_norm": 0}
    settings = offline_po(rows, tiny_model, tiny_model, **changes)
    refused(tmp_path / "out", settings, "weights are NaN or infinite after step 1; no model is saved")
    assert not list((tmp_path / "out").glob("**/*.safetensors"))


def test_mistral_common_beside_transformers_changes_no_token(tmp_path, monkeypatch, tokenizer):
    """transformers would read tekken.json, if it is there, by mistral-common instead of tokenizer.json."""
    tokenizer.save_pretrained(tmp_path)
    transformers.MistralConfig().save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    auto = transformers.models.auto.tokenization_auto
    monkeypatch.setitem(auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    monkeypatch.setattr(transformers.integrations.mistral.tokenizer, "is_mistral_common_available", lambda: True)
    assert auto._use_mistral_format(str(tmp_path))  # the pretence works
    assert load_tokenizer(str(tmp_path))("[INST] hé").input_ids == tokenizer("[INST] hé").input_ids
