"""train.py as its user sees it: recorded runs, equalities between ways to train, checkpoints, bad input."""

import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import GOLDEN, ROOT, build_llama, load_golden
from forks import KILL, python
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
import trainers
import utils

RUNS = load_golden("train_run.json")["runs"]
ROWS = load_golden("train_data.json")


def flags_of(output, settings: dict) -> list[str]:
    """The command line of settings; the cache stands beside the output."""
    flags = ["--output_dir", str(output), "--cache_dir", str(Path(output).parent / "cache")]
    for name, value in settings.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return flags


def mark(checkpoint: Path) -> None:
    """Write down that a checkpoint folder is whole, as the trainer does."""
    utils.write_json(checkpoint / utils.COMPLETE, utils.checksums(checkpoint))


def run(output, settings: dict, **changes) -> list[dict]:
    """Call train.py in this process; what it logged, a dict each step."""
    if trainer := train.set_up(flags_of(output, settings | changes)):
        train.run(trainer)
    return steps_of(output)


def start(output, processes: int, settings: dict, executable: str | None = None) -> subprocess.Popen:
    """Start train.py under torchrun, in a process group of its own."""
    command = [executable or python(), "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.Popen(
        [*command, "--monitor_interval=0.1", "train.py", *flags_of(output, settings)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def launch(output, processes: int, settings: dict, executable: str | None = None) -> list[dict]:
    """Run train.py under torchrun; what it logged, a dict each step."""
    process = start(output, processes, settings, executable)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return steps_of(output)


def steps_of(output) -> list[dict]:
    history = json.loads((Path(output) / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


def curve(steps: list[dict]) -> list[list[float]]:
    return [[step["loss"], step["grad_norm"], 1e3 * step["learning_rate"]] for step in steps]


def write_rows(path, rows) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def recorded_settings(name: str, tmp_path) -> dict:
    """The flags of a recorded run, its rows in the recorded order."""
    recorded = RUNS[name]["args"]
    unused = {"warmup_ratio", "warmup_steps", "optim", "logging_nan_inf_filter", "dataloader_drop_last"}
    if recorded["train_method"] != "OfflinePO":
        unused |= {"lm_sft_coeff", "clip_range"}
    if recorded["train_method"] == "SFT":
        unused |= {"lm_kl_coeff", "ref_model_name_or_path"}
    settings = {key: value for key, value in recorded.items() if key not in unused}
    for key in ("model_name_or_path", "ref_model_name_or_path"):
        if key in settings:
            settings[key] = GOLDEN / settings[key]
    by_id = {row["query_id"]: row for row in ROWS}
    order = [by_id[i] for batch in RUNS[name]["micro_batches_query_ids"] for i in batch]
    path = write_rows(tmp_path / f"{name}.jsonl", order)
    return settings | {
        "train_data_path": path,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
    }


# --- recorded runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def released_divisor(monkeypatch):
    """The release's mean over one token more in the one row that the cut makes start at a label (Deviations)."""
    ours = trainers.label_logprob

    def as_released(model, module, batch, **how):
        labels = batch["labels"] != -100
        return ours(model, module, batch, **how) * labels[:, 1:].sum(1) / labels.sum(1)

    monkeypatch.setattr(trainers, "label_logprob", as_released)


@pytest.mark.parametrize("name", ["sft_plain", "sft_kl_other_ref", "offline_po_other_ref"])
def test_a_whole_run_equals_the_recorded_one(name, tmp_path, request):
    if name != "sft_plain":  # plain SFT in the release is the Trainer's own, which counts right
        request.getfixturevalue("released_divisor")
    settings = recorded_settings(name, tmp_path)
    steps = run(tmp_path / "out", settings)
    recorded = RUNS[name]
    assert_close([step["loss"] for step in steps], recorded["micro_losses"], rtol=1e-4, atol=1e-5)
    assert_close([step["grad_norm"] for step in steps], recorded["grad_norm_before_clipping"], rtol=1e-4, atol=0)
    assert [step["learning_rate"] for step in steps] == recorded["learning_rate_logged_after_step"]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    start = load_file(GOLDEN / "tiny_policy" / "model.safetensors")
    for entry in recorded["final"]["entries"]:
        assert_close(
            weights[entry["param"]].flatten()[entry["flat_index"]].item(), entry["value"], rtol=1e-4, atol=1e-6
        )
    norm = torch.stack([tensor.norm() for tensor in weights.values()]).norm().item()
    moved = torch.stack([(weights[key] - start[key]).norm() for key in start]).norm().item()
    assert_close([norm, moved], [recorded["final"]["param_norm"], recorded["final"]["update_norm"]], rtol=1e-4, atol=0)


def test_where_the_recorded_run_turned_into_nan_rows_are_named_or_dropped(tmp_path):
    settings = recorded_settings("offline_po_right_trunc_nan", tmp_path)
    with pytest.raises(
        ValueError, match=r"\.jsonl:\d+: no token of the target is left to learn from at max_length 32"
    ):
        run(tmp_path / "out", settings)
    steps = run(tmp_path / "out", settings, drop_unscored_rows=True)
    assert all(np.isfinite(step["loss"]) and np.isfinite(step["grad_norm"]) for step in steps)


# --- the same step, however it is dealt out ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed_rows(tmp_path_factory) -> str:
    """64 rows of game and SFT kind in no regular order, of 10 to 70 tokens."""
    return write_rows(tmp_path_factory.mktemp("rows") / "mixed.jsonl", make_rows(64))


def make_rows(count: int) -> list[dict]:
    rng = random.Random(0)
    rows = []
    for index in range(count):
        row = {
            "query": "ask " * rng.randint(2, 12),
            "target": "say " * rng.randint(1, 6),
            "weight": rng.uniform(0.5, 2),
        }
        if rng.random() < 0.3:
            row |= {"type": "sft"}
        else:
            row |= {"reward": rng.uniform(-0.5, 1), "role": ["attacker", "defender"][index % 2]}
        rows.append(row)
    return rows


def offline_po(rows: str, model: str, reference: str, **changes) -> dict:
    return {
        "train_method": "OfflinePO",
        "model_name_or_path": model,
        "ref_model_name_or_path": reference,
        "train_data_path": rows,
        "max_length": 128,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-5,  # Adam divides rounding errors by gradients near zero
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "train_sampling_strategy": "sequential",
        "loss_normalization": "step",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | changes


def assert_same_training(steps, output, expected_steps, expected_output, start, tolerance=1e-4):
    """Equal curves and final weights; every parameter moved; the saved weights load and give the same logits."""
    assert_close(curve(steps), curve(expected_steps), rtol=tolerance, atol=tolerance / 10)
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (output, expected_output, start)]
    saved, expected, before = [dict(model.named_parameters()) for model in models]
    for name, weights in saved.items():
        assert_close(weights, expected[name], rtol=tolerance, atol=tolerance / 10, msg=lambda m, n=name: f"{n}: {m}")
        assert not torch.equal(weights, before[name]), f"{name} did not move"
    tokens = torch.arange(10, 40).unsqueeze(0)
    with torch.no_grad():
        assert_close(models[0](tokens).logits, models[1](tokens).logits, rtol=1e-3, atol=1e-3)
    assert AutoTokenizer.from_pretrained(output).eos_token == "</s>"


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory, mixed_rows, tiny_model, other_model) -> dict:
    """Four steps of eight rows in one process, against another reference model and against the start itself."""
    outputs = {}
    for reference in (other_model, tiny_model):
        output = tmp_path_factory.mktemp("plain") / "out"
        outputs[reference] = (run(output, offline_po(mixed_rows, tiny_model, reference)), output)
    return outputs


def test_accumulation_changes_nothing_under_step_normalization(
    tmp_path, plain_runs, mixed_rows, tiny_model, other_model
):
    settings = offline_po(mixed_rows, tiny_model, other_model, per_device_train_batch_size=2)
    steps = run(tmp_path / "out", settings, gradient_accumulation_steps=4)
    expected, output = plain_runs[other_model]
    assert_same_training(steps, tmp_path / "out", expected, output, tiny_model)


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_dealt_out_by_length_make_the_same_steps(tmp_path, tiny_model, other_model, processes):
    """Each step has the rows that a shuffle with the same seed puts together, whatever micro-batch they are in."""
    rows = make_rows(80)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(7)).tolist()
    path, shuffled = write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", [rows[i] for i in order])
    settings = offline_po(path, tiny_model, other_model, max_steps=10, learning_rate=1e-4, seed=7)
    plain = run(tmp_path / "plain", settings | {"train_data_path": shuffled})
    dealt_out = {
        "train_sampling_strategy": "batch_rebalance",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4 // processes,
    }
    steps = launch(tmp_path / "dealt", processes, settings | dealt_out)
    assert_close(curve(steps), curve(plain), rtol=1e-4, atol=1e-5)
    assert len(steps) == 10


@pytest.mark.parametrize("method", ["SFT", "SFTwithKL", "OfflinePO"])
def test_accumulation_changes_nothing_with_equal_mixes(tmp_path, tiny_model, other_model, method):
    rows = [row for pair in zip(make_rows(80), make_rows(80)[::-1], strict=True) for row in pair]
    kinds = [[row for row in rows if ("type" in row) == sft] for sft in (True, False)]
    path = write_rows(tmp_path / "rows.jsonl", [row for pair in zip(*kinds, strict=False) for row in pair][:32])
    settings = offline_po(path, tiny_model, other_model, train_method=method, per_device_train_batch_size=4)
    del settings["loss_normalization"]
    if method == "SFT":
        del settings["ref_model_name_or_path"]
    whole = run(tmp_path / "4x1", settings)
    split = run(tmp_path / "2x2", settings | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2})
    assert_same_training(split, tmp_path / "2x2", whole, tmp_path / "4x1", tiny_model)


@pytest.mark.parametrize(
    ("config", "ref_logprobs", "own_start"),
    [
        (None, "precompute", False),
        ("zero2.json", "precompute", False),
        ("zero3.json", "online", False),
        ("default_offload_opt_param.json", "precompute", True),
    ],
)
def test_two_processes_train_as_one(
    tmp_path, plain_runs, mixed_rows, tiny_model, other_model, config, ref_logprobs, own_start
):
    reference = tiny_model if own_start else other_model
    settings = offline_po(mixed_rows, tiny_model, reference, per_device_train_batch_size=2, ref_logprobs=ref_logprobs)
    if config:
        settings["deepspeed"] = ROOT / "configs" / config
    steps = launch(tmp_path / "out", 2, settings | {"gradient_accumulation_steps": 2})
    expected, output = plain_runs[reference]
    assert_same_training(steps, tmp_path / "out", expected, output, tiny_model)


def test_deepspeed_in_bf16_loads_and_saves_bf16_and_keeps_rewards_and_logprobs_in_fp32(
    tmp_path, plain_runs, mixed_rows, tiny_model
):
    settings = offline_po(mixed_rows, tiny_model, tiny_model, deepspeed=ROOT / "configs" / "zero2.json", bf16=True)
    steps = launch(tmp_path / "out", 1, settings)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    expected, _ = plain_runs[tiny_model]
    assert_close([step["loss"] for step in steps], [step["loss"] for step in expected], rtol=0.02, atol=0.02)
    rewards = [step["reward_attacker"] for step in steps]
    assert_close(rewards, [step["reward_attacker"] for step in expected], rtol=1e-6, atol=0)
    assert abs(steps[0]["log_ratio"]) < 0.02


AS_WITH_A_GPU = """import sys, arguments, train
arguments.SPAGArguments._settle_without_gpu = lambda self: None  # use_cpu stays unset
train.main(sys.argv[1:])"""


@pytest.mark.parametrize("program", [["-c", AS_WITH_A_GPU], ["train.py"]])
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]])
def test_one_process_under_deepspeed_takes_no_launcher(
    tmp_path, plain_runs, mixed_rows, tiny_model, other_model, program, launcher
):
    """By the Trainer's own way to a device, and by ours on a CPU."""
    settings = offline_po(mixed_rows, tiny_model, other_model, deepspeed=ROOT / "configs" / "zero2.json")
    if launcher and program[0] == "-c":  # torchrun starts files
        program = [str(tmp_path / "program.py")]
        Path(program[0]).write_text(AS_WITH_A_GPU)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [python(), *launcher, *program, *flags_of(tmp_path / "out", settings)]
    finished = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    expected, output = plain_runs[other_model]
    assert_same_training(steps_of(tmp_path / "out"), tmp_path / "out", expected, output, tiny_model)


# --- the reference -------------------------------------------------------------------------------------------------


def count_loads(monkeypatch) -> list[str]:
    loaded = []
    original = train.load_model
    monkeypatch.setattr(train, "load_model", lambda name, args: loaded.append(name) or original(name, args))
    return loaded


def test_a_reference_that_is_the_start_is_never_loaded_and_starts_at_ratio_one(
    tmp_path, monkeypatch, mixed_rows, tiny_model
):
    loaded = count_loads(monkeypatch)
    steps = run(tmp_path / "out", offline_po(mixed_rows, tiny_model, tiny_model))
    assert loaded == [tiny_model]
    assert abs(steps[0]["log_ratio"]) < 1e-6 and abs(steps[0]["ratio_max"] - 1) < 2e-6
    assert abs(steps[-1]["log_ratio"]) > 1e-3


def test_a_copy_of_the_start_is_known_by_its_content(tmp_path, monkeypatch, mixed_rows, tiny_model):
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    loaded = count_loads(monkeypatch)
    run(tmp_path / "out", offline_po(mixed_rows, tiny_model, copy))
    assert loaded == [tiny_model]


@pytest.mark.parametrize("method", ["SFTwithKL", "OfflinePO"])
def test_online_and_precomputed_references_give_the_same_curve(tmp_path, mixed_rows, tiny_model, other_model, method):
    settings = offline_po(mixed_rows, tiny_model, other_model, train_method=method)
    precomputed, online = (run(tmp_path / mode, settings, ref_logprobs=mode) for mode in ("precompute", "online"))
    assert_close(curve(online), curve(precomputed), rtol=1e-5, atol=1e-5)


def test_bf16_autocast_starts_near_ratio_one(tmp_path, mixed_rows, tiny_model):
    steps = run(tmp_path / "out", offline_po(mixed_rows, tiny_model, tiny_model, bf16=True))
    assert abs(steps[0]["log_ratio"]) < 0.01
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_stored_logprobs_are_reused_and_never_stale(tmp_path, monkeypatch, mixed_rows, tiny_model, other_model):
    reference = shutil.copytree(other_model, tmp_path / "reference")
    settings = offline_po(mixed_rows, tiny_model, str(reference))
    first = run(tmp_path / "first", settings)

    def refuse(*_):
        raise AssertionError("computed anew")

    monkeypatch.setattr(trainers.SPAGTrainer, "_reference_pass", refuse)
    assert curve(run(tmp_path / "second", settings)) == curve(first)
    changes = [{"max_length": 40}, {"bf16": True}, {"attn_implementation": "eager"}, {"truncation_side": "right"}]
    changes.append({"train_data_path": write_rows(tmp_path / "rows.jsonl", make_rows(65))})
    for number, change in enumerate(changes):
        with pytest.raises(AssertionError, match="computed anew"):
            run(tmp_path / f"changed{number}", settings | change)
    weights = load_file(reference / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, reference / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="computed anew"):
        run(tmp_path / "changed", settings)


# --- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.kills
def test_a_run_killed_at_random_moments_and_resumed_equals_an_uninterrupted_one(tmp_path, tiny_model):
    path = write_rows(tmp_path / "rows.jsonl", make_rows(800))
    settings = offline_po(path, tiny_model, tiny_model, max_steps=80, train_sampling_strategy="random")
    settings |= {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 2}
    expected = run(tmp_path / "whole", settings)
    output, kills = tmp_path / "killed", 0
    command = [python(), "train.py", *flags_of(output, settings)]
    for threshold in (4, 16):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(step >= threshold for step in checkpoints(output)):
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.2))
        process.send_signal(KILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 1
    half_written = output / "checkpoint-79"
    half_written.mkdir()
    (half_written / "trainer_state.json").write_text("{")
    steps = run(output, settings, resume_from_checkpoint=True)
    assert [step["step"] for step in steps] == list(range(1, 81))
    assert_same_training(steps, output, expected, tmp_path / "whole", tiny_model, tolerance=1e-6)
    assert utils.is_complete(output / "checkpoint-80") and (output / "train_results.json").is_file()


@pytest.mark.kills
def test_a_deepspeed_launch_killed_after_a_checkpoint_resumes_to_the_same_end(
    tmp_path, plain_runs, mixed_rows, tiny_model, other_model
):
    settings = offline_po(mixed_rows, tiny_model, other_model, per_device_train_batch_size=4)
    settings |= {"deepspeed": ROOT / "configs" / "zero3.json", "save_strategy": "steps", "save_steps": 1}
    output = tmp_path / "out"
    process = start(output, 2, settings)
    while process.poll() is None and not utils.is_complete(output / "checkpoint-1"):
        time.sleep(0.02)
    assert process.poll() is None
    subprocess.run(["pkill", "-KILL", "-f", str(output)], check=True)  # the launcher and both ranks
    process.communicate()
    steps = launch(output, 2, settings)
    expected, plain_output = plain_runs[other_model]
    assert_same_training(steps, output, expected, plain_output, tiny_model)


def checkpoints(output: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in output.glob("checkpoint-*")]


def test_a_resumed_run_reads_the_reference_from_its_own_path(tmp_path, mixed_rows, tiny_model):
    """Resuming from a later checkpoint with the cache damaged: the reference is still the start."""
    settings = offline_po(mixed_rows, tiny_model, tiny_model, save_strategy="steps", save_steps=2)
    expected = run(tmp_path / "out", settings)
    (tmp_path / "out" / "train_results.json").unlink()
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    (stored,) = (tmp_path / "cache" / "ref_logprobs").iterdir()
    stored.write_bytes(stored.read_bytes()[:-1])
    steps = run(tmp_path / "out", settings, resume_from_checkpoint=tmp_path / "out" / "checkpoint-2")
    assert_close(curve(steps), curve(expected), rtol=1e-5, atol=1e-6)


def test_rewriting_a_checkpoint_takes_back_its_mark_and_half_written_ones_never_crowd_out_whole_ones(
    tmp_path, monkeypatch, mixed_rows, tiny_model
):
    settings = offline_po(mixed_rows, tiny_model, tiny_model, save_strategy="steps", save_steps=2, save_total_limit=2)
    run(tmp_path / "out", settings)
    assert checkpoints(tmp_path / "out") and utils.is_complete(tmp_path / "out" / "checkpoint-4")

    def stop(*_):
        raise KeyboardInterrupt

    (tmp_path / "out" / "train_results.json").unlink()
    with open(tmp_path / "out" / "checkpoint-4" / "model.safetensors", "ab") as file:
        file.truncate(5)  # the next launch writes it anew, with the same sizes
    with monkeypatch.context() as patch:
        patch.setattr(trainers.SPAGTrainer, "_save_optimizer_and_scheduler", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out", settings)
    assert utils.last_complete_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
    (tmp_path / "out" / "checkpoint-9").mkdir()
    run(tmp_path / "out", settings | {"save_total_limit": 1, "resume_from_checkpoint": True})
    assert checkpoints(tmp_path / "out") == [4] and utils.is_complete(tmp_path / "out" / "checkpoint-4")
    (tmp_path / "out" / "checkpoint-4" / "optimizer.pt").unlink()
    assert not utils.is_complete(tmp_path / "out" / "checkpoint-4")


def test_what_cannot_be_resumed_says_so(tmp_path, mixed_rows, tiny_model):
    settings = offline_po(mixed_rows, tiny_model, tiny_model, save_strategy="steps", save_steps=2)
    run(tmp_path / "out", settings | {"save_only_model": True})
    (tmp_path / "out" / "train_results.json").unlink()
    with pytest.raises(ValueError, match="saved without its optimizer.*--overwrite_output_dir True to start anew"):
        run(tmp_path / "out", settings, resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="--resume_from_checkpoint nowhere: not a whole checkpoint folder"):
        run(tmp_path / "other", settings, resume_from_checkpoint="nowhere")
    assert not (tmp_path / "other").exists()
    run(tmp_path / "out", settings, overwrite_output_dir=True)
    with pytest.raises(ValueError, match="train_method: OfflinePO then, SFTwithKL now"):
        run(tmp_path / "out", settings | {"train_method": "SFTwithKL"}, resume_from_checkpoint="true")


@pytest.mark.parametrize(
    ("saved", "deepspeed", "message"),
    [
        (["global_step3/mp_rank_00_model_states.pt"], False, "saved with --deepspeed; continue it so"),
        (["optimizer.pt"], True, "saved without --deepspeed; continue it so"),
        (
            ["global_step3/0_optim_states.pt", "global_step3/1_optim_states.pt"],
            True,
            "saved it for 2 .*continue with 2",
        ),
        (["optimizer.pt"], False, None),
        (["global_step3/0_optim_states.pt"], True, None),
        (["global_step3/mp_rank_00_model_states.pt"], True, None),  # no ZeRO
    ],
)
def test_a_checkpoint_without_this_launchs_kind_of_optimizer_state_is_refused(
    tmp_path, mixed_rows, tiny_model, saved, deepspeed, message
):
    settings = offline_po(mixed_rows, tiny_model, tiny_model)
    if deepspeed:
        settings["deepspeed"] = ROOT / "configs" / "zero2.json"
    output = train.Output(train.parse_arguments(flags_of(tmp_path / "out", settings)))
    checkpoint = tmp_path / "out" / "checkpoint-3"
    for name in saved:
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).touch()
    mark(checkpoint)
    output.settings.write(output.args.same_run)
    if message is None:
        assert output.claim() and output.args.resume_from_checkpoint == str(checkpoint)
        return
    with pytest.raises(ValueError, match=f"checkpoint-3: .*{message}.*; other settings"):
        output.claim()
    assert not list((tmp_path / "out").glob(".*"))


def test_a_named_checkpoint_is_continued_from_only_while_it_is_the_furthest(tmp_path, mixed_rows, tiny_model):
    """The same command, started again, does not take back what the launch before it did."""
    settings = offline_po(mixed_rows, tiny_model, tiny_model)

    def chosen(folder: str, named: Path) -> str:
        flags = flags_of(tmp_path / folder, settings | {"resume_from_checkpoint": named})
        output = train.Output(train.parse_arguments(flags))
        output.settings.write(output.args.same_run)
        assert output.claim()
        return output.args.resume_from_checkpoint

    def save(folder: str, step: int) -> Path:
        checkpoint = tmp_path / folder / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "optimizer.pt").touch()
        utils.write_json(checkpoint / "trainer_state.json", {"global_step": step})
        mark(checkpoint)
        return checkpoint

    other = save("other", 10)
    utils.write_json(
        tmp_path / "other" / "settings.json",
        {"settings": train.parse_arguments(flags_of(tmp_path / "other", settings)).same_run},
    )
    assert chosen("out", other) == str(other)
    save("out", 9)
    assert chosen("out", other) == str(other)
    last = save("out", 11)
    assert chosen("out", other) == str(last)
    assert chosen("out", tmp_path / "out" / "checkpoint-9") == str(last)
    assert chosen("out", tmp_path / "out" / "checkpoint-8") == str(last)  # deleted when later ones were there


def test_a_checkpoint_that_lost_a_file_or_its_end_is_not_whole(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"12345")
    assert not utils.is_complete(folder)
    mark(folder)
    assert utils.is_complete(folder) and utils.last_complete_checkpoint(tmp_path) == str(folder)
    (folder / "model.safetensors").write_bytes(b"123")
    assert not utils.is_complete(folder) and utils.last_complete_checkpoint(tmp_path) is None


def test_a_flipped_bit_in_a_checkpoint_is_seen_and_the_one_before_is_taken(tmp_path, caplog, mixed_rows, tiny_model):
    settings = offline_po(mixed_rows, tiny_model, tiny_model, save_strategy="steps", save_steps=2)
    output = tmp_path / "out"
    expected = run(output, settings)
    (output / "train_results.json").unlink()
    caplog.set_level(logging.INFO)
    damaged = output / "checkpoint-4" / "optimizer.pt"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:])
    assert utils.is_complete(output / "checkpoint-4") and not utils.is_undamaged(output / "checkpoint-4")
    with pytest.raises(ValueError, match="checkpoint-4: not a whole checkpoint folder"):
        run(tmp_path / "other", settings, resume_from_checkpoint=output / "checkpoint-4")
    steps = run(output, settings)
    assert (
        caplog.text.count("checkpoint-4/optimizer.pt: damaged, not what was written; its checkpoint is passed o") == 1
    )
    assert f"continuing after step 2 of 4: {output}/checkpoint-2" in caplog.text
    assert_close(curve(steps), curve(expected), rtol=1e-5, atol=1e-6)


def test_each_rank_sums_what_it_writes_and_marks_of_an_earlier_version_hold(tmp_path):
    names = ["model.safetensors", "rng_state_0.pth", "rng_state_1.pth", "global_step4/zero_pp_rank_1_mp_rank_00_x.pt"]
    names.append("global_step4/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    sums = [utils.checksums(tmp_path, of_rank=rank) for rank in (0, 1)]
    assert [sorted(of_rank) for of_rank in sums] == [sorted([*names[:2], names[4]]), sorted(names[2:4])]
    assert sums[0] | sums[1] == utils.checksums(tmp_path)
    utils.write_json(tmp_path / utils.COMPLETE, {name: len(name) for name in names})
    assert utils.is_complete(tmp_path) and utils.is_undamaged(tmp_path)


def contents(folder: Path) -> dict:
    """Every file and folder, with its content; locks, which opening them here would end, by name."""
    return {
        path: path.read_bytes() if path.is_file() and path.suffix != ".lock" else None for path in folder.rglob("*")
    }


def files_of(folder: Path) -> list[Path]:
    """All that is in a folder but locks."""
    return [path for path in folder.rglob("*") if path.suffix != ".lock"]


@pytest.mark.parametrize("resume", [{}, {"resume_from_checkpoint": True}, {"resume_from_checkpoint": "lost"}])
def test_a_finished_run_is_left_as_it_is_and_one_with_other_settings_is_refused(
    tmp_path, capsys, monkeypatch, mixed_rows, tiny_model, resume
):
    settings = offline_po(mixed_rows, tiny_model, tiny_model, save_strategy="steps", save_steps=2)
    run(tmp_path / "out", settings)
    before, loaded = contents(tmp_path / "out"), count_loads(monkeypatch)
    capsys.readouterr()
    run(tmp_path / "out", settings | resume | {"logging_steps": 2, "dataloader_num_workers": 1})
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: all is there\n"
    made_with = tmp_path / "out" / "settings.json"
    text = made_with.read_text()
    made_with.write_text(text.replace('"weights": "float32"', '"weights": "half"'))  # with DeepSpeed, on other GPUs
    run(tmp_path / "out", settings)
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: all is there\n" and made_with.read_text() != text
    made_with.write_text(text)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(65))
    for change, message in (
        ({"learning_rate": 2e-3}, "learning_rate: 0.001 then, 0.002 now"),
        (
            {"max_steps": -1, "num_train_epochs": 2},
            "max_steps: 4 then, -1 now; num_train_epochs: None then, 2.*more epo",
        ),
        ({"per_device_train_batch_size": 4}, "rows_per_step: 8 then, 4 now"),
        ({"train_data_path": rows}, r"train_data_path: .* then, .*rows.jsonl \(sha256 \w{8}\) now"),
    ):
        with pytest.raises(
            ValueError, match=f"settings.json: made with other settings .{message}.*--overwrite_output"
        ):
            run(tmp_path / "out", settings | resume | change)
    assert not loaded and contents(tmp_path / "out") == before


def test_overwriting_starts_anew_but_not_when_the_launch_is_started_again(
    tmp_path, monkeypatch, mixed_rows, tiny_model
):
    settings = offline_po(mixed_rows, tiny_model, tiny_model, save_strategy="steps", save_steps=2)
    run(tmp_path / "out", settings)
    shorter = settings | {"max_steps": 2, "overwrite_output_dir": True}
    with monkeypatch.context() as patch:
        patch.setattr(trainers.SPAGTrainer, "train", lambda *_, **__: sys.exit("killed"))
        with pytest.raises(SystemExit):
            run(tmp_path / "out", shorter)
    assert not (tmp_path / "out" / "train_results.json").exists() and not checkpoints(tmp_path / "out")
    steps = run(tmp_path / "out", shorter)
    assert len(steps) == 2 and sorted(checkpoints(tmp_path / "out")) == [2]
    before = contents(tmp_path / "out")
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            run(tmp_path / "out", shorter)
    assert contents(tmp_path / "out") == before
    run(tmp_path / "out", shorter)
    assert contents(tmp_path / "out") != before


def test_a_checkpoint_of_another_run_and_a_run_of_an_earlier_version_are_refused(tmp_path, mixed_rows, tiny_model):
    settings = offline_po(mixed_rows, tiny_model, tiny_model, save_strategy="steps", save_steps=2)
    run(tmp_path / "out", settings)
    other = {"learning_rate": 2e-3, "resume_from_checkpoint": tmp_path / "out" / "checkpoint-2"}
    with pytest.raises(ValueError, match="out/settings.json: made with other settings .learning_rate"):
        run(tmp_path / "other", settings | other)
    assert not (tmp_path / "other").exists()
    saved = json.loads((tmp_path / "out" / "settings.json").read_text())
    del saved["settings"]
    utils.write_json(tmp_path / "out" / "settings.json", saved)
    with pytest.raises(ValueError, match="settings.json: not the settings of a run, or of an earlier version"):
        run(tmp_path / "out", settings)
    (tmp_path / "out" / "settings.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-2: no settings.json beside it says how it was made"):
        run(tmp_path / "out", settings)


def test_a_second_start_into_one_folder_is_refused_and_has_written_nothing(tmp_path, mixed_rows, tiny_model):
    settings = offline_po(mixed_rows, tiny_model, tiny_model)
    trainer = train.set_up(flags_of(tmp_path / "out", settings))
    before = contents(tmp_path / "out")
    command = [python(), "train.py", *flags_of(tmp_path / "out", settings | {"learning_rate": 1})]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 2 and "another process is writing to this run; end that one first" in second.stderr
    assert contents(tmp_path / "out") == before
    train.run(trainer)
    assert [path.name for path in (tmp_path / "out").glob(".*")] == [".settings.lock"]


@pytest.mark.kills
def test_no_worker_of_a_killed_run_lives_on_and_the_same_command_continues(tmp_path, tiny_model):
    path = write_rows(tmp_path / "rows.jsonl", make_rows(64))
    settings = offline_po(path, tiny_model, tiny_model, train_method="SFT", dataloader_num_workers=2, max_steps=12)
    del settings["ref_model_name_or_path"], settings["loss_normalization"]
    command = [sys.executable, "train.py", *flags_of(tmp_path / "out", settings)]
    process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(process.children(recursive=True)) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.suspend()
    workers = process.children(recursive=True)
    process.kill()
    assert not psutil.wait_procs([process, *workers], timeout=10)[1]
    finished = subprocess.run([python(), *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert len(steps_of(tmp_path / "out")) == 12


# --- LoRA ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref_logprobs", ["precompute", "online"])
def test_lora_trains_adapters_against_the_model_without_them(
    tmp_path, monkeypatch, mixed_rows, tiny_model, ref_logprobs
):
    peft = pytest.importorskip("peft")
    loaded = count_loads(monkeypatch)
    settings = offline_po(mixed_rows, tiny_model, tiny_model, ref_logprobs=ref_logprobs, lora_rank=4, lora_merge=True)
    settings |= {"learning_rate": 0.02, "gradient_checkpointing": True}
    steps = run(tmp_path / "out", settings)
    assert loaded == [tiny_model] * 2  # once to train, once to merge
    assert abs(steps[0]["log_ratio"]) < 1e-6 and abs(steps[-1]["log_ratio"]) > 1e-3
    tokens = torch.arange(10, 40).unsqueeze(0)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        before = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out")(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")(tokens).logits
    assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
    assert (adapted - before).abs().max() > 1e-3


@pytest.mark.parametrize("config", [None, "zero3.json"])
def test_lora_loads_its_frozen_base_in_bf16(tmp_path, mixed_rows, tiny_model, config):
    pytest.importorskip("peft")
    settings = offline_po(mixed_rows, tiny_model, tiny_model, lora_rank=4, lora_merge=True, learning_rate=0.02)
    plain = run(tmp_path / "fp32", settings)
    if config:
        steps = launch(tmp_path / "out", 1, settings | {"bf16": True, "deepspeed": ROOT / "configs" / config})
    else:
        trainer = train.set_up(flags_of(tmp_path / "out", settings | {"bf16": True}))
        dtypes = {name: weights.dtype for name, weights in trainer.model.named_parameters()}
        assert all(dtypes[name] == (torch.float32 if "lora_" in name else torch.bfloat16) for name in dtypes)
        train.run(trainer)
        steps = steps_of(tmp_path / "out")
    assert abs(steps[0]["log_ratio"]) < 1e-6 and steps[0]["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert_close([step["loss"] for step in steps], [step["loss"] for step in plain], rtol=0.03, atol=0.03)
    merged = load_file(tmp_path / "out" / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


def test_lora_under_zero_3_with_two_processes_trains_as_in_one(tmp_path, mixed_rows, tiny_model):
    pytest.importorskip("peft")
    settings = offline_po(mixed_rows, tiny_model, tiny_model, lora_rank=4, gradient_checkpointing=True)
    expected = run(tmp_path / "one", settings)
    settings |= {"per_device_train_batch_size": 4, "deepspeed": ROOT / "configs" / "zero3.json"}
    assert_close(curve(launch(tmp_path / "two", 2, settings)), curve(expected), rtol=1e-4, atol=1e-5)
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert_close(two, one, rtol=1e-4, atol=1e-5)


# --- what a run leaves and shows -----------------------------------------------------------------------------------


def test_metrics_evaluation_and_settings_are_written(tmp_path, mixed_rows, tiny_model, other_model, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    settings = offline_po(mixed_rows, tiny_model, other_model, eval_data_path=mixed_rows, evaluation_strategy="steps")
    steps = run(tmp_path / "out", settings | {"report_to": "tensorboard", "eval_steps": 2})
    always = {"loss", "grad_norm", "learning_rate", "log_ratio", "ratio", "ratio_max", "clip_fraction", "policy_loss"}
    always |= {"sft_loss", "reward_attacker", "reward_defender", "tokens_per_second", "peak_memory_gib"}
    assert all(always <= step.keys() for step in steps)
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["rows"] == 64 and history[0]["rows_truncated"] == 0
    evaluations = [entry for entry in history if "eval_loss" in entry]
    assert len(evaluations) == 3 and evaluations[0]["eval_loss"] != evaluations[1]["eval_loss"]
    assert {"eval_log_ratio", "eval_reward_attacker"} <= evaluations[0].keys()
    assert list((tmp_path / "events").rglob("events.out.tfevents*"))
    saved = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert saved["arguments"]["lm_kl_coeff"] == 0.2 and saved["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("method", ["SFT", "OfflinePO"])
def test_the_evaluation_loss_does_not_depend_on_the_batch_size(tmp_path, tiny_model, other_model, method):
    rows = sorted(make_rows(20), key=lambda row: "type" in row)  # batches of one kind
    path = write_rows(tmp_path / "rows.jsonl", rows)
    settings = offline_po(path, tiny_model, other_model, train_method=method, eval_data_path=path, max_steps=1)
    if method == "SFT":
        del settings["ref_model_name_or_path"], settings["loss_normalization"]
    settings |= {"per_device_train_batch_size": 20, "learning_rate": 0}
    losses = []
    for size in (3, 20):
        (step,) = run(tmp_path / str(size), settings, per_device_eval_batch_size=size)
        losses.append(json.loads((tmp_path / str(size) / "eval_results.json").read_text())["eval_loss"])
    assert_close(losses, [step["loss"]] * 2, rtol=1e-5, atol=1e-6)


def test_show_examples_prints_rows_and_trains_nothing(tmp_path, capsys, tiny_model, other_model):
    row = {"query": "a question", "target": "an answer", "weight": 0.5, "reward": 0.25, "role": "attacker"}
    path = write_rows(tmp_path / "rows.jsonl", [row, {"prompt": "p", "answer": "a", "type": "sft"}, row])
    with pytest.raises(FileNotFoundError):  # no trainer_state.json
        run(tmp_path / "out", offline_po(path, tiny_model, other_model), show_examples=2)
    printed = capsys.readouterr().out
    assert "[[<s>a question]]an answer</s>" in printed and "[[<s>p]]a</s>" in printed
    assert printed.count("--- row") == 2
    assert re.search(r"game, weight 0.5, reward 0.25, reference log-probability -\d+\.\d+", printed)


def test_a_finished_training_says_what_came_of_it(tmp_path, capsys, mixed_rows, tiny_model):
    settings = offline_po(mixed_rows, tiny_model, tiny_model, save_strategy="epoch")
    steps = run(tmp_path / "out", settings)
    first, last = (f"{steps[place]['loss']:.4g}" for place in (0, -1))
    sft = sum("type" in row for row in make_rows(64))
    line, left = capsys.readouterr().out.splitlines()[-2:]
    assert line.startswith(
        f"{tmp_path}/out: OfflinePO of 64 rows ({sft} of them SFT), 4 steps, loss {first} -> {last}"
    )
    assert left.startswith(f"{tmp_path}/out/checkpoint-4: 0.0 GB of model and optimizer states that this run no lon")


# --- what would succeed and teach nothing --------------------------------------------------------------------------


def test_self_play_on_sft_rows_alone_is_refused_unless_it_is_meant(tmp_path, tiny_model):
    path = write_rows(tmp_path / "rows.jsonl", [row | {"type": "sft"} for row in make_rows(16)])
    settings = offline_po(path, tiny_model, tiny_model, max_steps=1)
    with pytest.raises(ValueError, match="rows.jsonl: SFT rows alone.*--allow_no_game_rows True"):
        run(tmp_path / "out", settings)
    assert files_of(tmp_path / "out") == []
    assert len(run(tmp_path / "out", settings, allow_no_game_rows=True)) == 1


def test_a_training_whose_every_step_has_a_learning_rate_of_0_ends_before_the_first_one(tmp_path, tiny_model):
    path = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    settings = offline_po(path, tiny_model, tiny_model, max_steps=-1, num_train_epochs=1, warmup_ratio=0.03)
    settings |= {"lr_scheduler_type": "cosine"}
    message = "the learning rate is 0 at every step: 8 rows, 8 a step, make one step, and warm-up takes it; use more"
    with pytest.raises(utils.RunError, match=message):
        run(tmp_path / "out", settings)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert len(run(tmp_path / "out", settings, warmup_ratio=0, overwrite_output_dir=True)) == 1


def test_rows_that_lose_nearly_all_are_told_and_refused_where_they_are_most(tmp_path, caplog, tiny_model):
    rows = [{"query": "ask", "target": "say " * length, "role": "attacker"} for length in (1, 2, 3, 100)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    settings = offline_po(path, tiny_model, tiny_model, max_steps=1, max_length=30)
    run(tmp_path / "few", settings)
    assert "rows.jsonl: 1 rows (25%) lose more than nine tenths of their tokens, or of their target's" in caplog.text
    write_rows(tmp_path / "rows.jsonl", rows + rows[3:] * 3)
    with pytest.raises(
        ValueError, match="57% of the rows lose .* at --max_length 30; use a larger one, or --allow_cu"
    ):
        run(tmp_path / "most", settings)
    assert len(run(tmp_path / "most", settings, allow_cuts=True)) == 1


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"query": "a", "target": "b"}\n{"query": ', r"rows\.jsonl:2: not a JSON object"),
        ('[{"query": "a", "target": "b"}, {"query"', r"rows\.jsonl:1: .*cut off"),
        ('{"query": "a", "target": null}\n', "'target' must be a text"),
        ("", "the file is empty"),
    ],
)
def test_bad_rows_are_found_before_any_model_is_loaded(tmp_path, monkeypatch, tiny_model, text, message):
    loaded = count_loads(monkeypatch)
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", offline_po(str(path), tiny_model, tiny_model))
    assert not loaded and files_of(tmp_path / "out") == []


def test_a_reference_with_another_vocabulary_is_refused_before_any_model_is_loaded(
    tmp_path, monkeypatch, mixed_rows, tiny_model
):
    loaded = count_loads(monkeypatch)
    build_llama(0, vocab_size=300).save_pretrained(tmp_path / "reference")
    with pytest.raises(ValueError, match="different vocabularies"):
        run(tmp_path / "out", offline_po(mixed_rows, tiny_model, tmp_path / "reference"))
    assert not loaded


def test_model_folders_without_all_that_is_needed_are_refused(tmp_path, mixed_rows, tiny_model):
    def broken(name: str, *remove: str) -> Path:
        folder = shutil.copytree(tiny_model, tmp_path / name)
        for file in remove:
            (folder / file).unlink()
        return folder

    weights = load_file(Path(tiny_model) / "model.safetensors")
    del weights["model.norm.weight"]
    layerless = broken("layerless")
    save_file(weights, layerless / "model.safetensors", metadata={"format": "pt"})
    cut_off = broken("cut_off")
    (cut_off / "model.safetensors").write_bytes((cut_off / "model.safetensors").read_bytes()[:5000])
    no_tokenizer = broken("no_tokenizer", "tokenizer.json", "tokenizer_config.json")
    for model, reference, message in [
        (tiny_model, broken("weightless", "model.safetensors"), "weightless: no weights as safetensors"),
        (no_tokenizer, tiny_model, "no_tokenizer: Tokenizer cannot be loaded"),
        (layerless, tiny_model, "layerless: weights are missing .model.norm.weight."),
        (cut_off, tiny_model, "cut_off: ModelForCausalLM cannot be loaded"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "out", offline_po(mixed_rows, model, reference))
    assert files_of(tmp_path / "out") == []


def test_a_loss_that_is_no_number_stops_training(tmp_path, tiny_model):
    rows = [{"query": "q", "target": "t", "reward": 3e38, "weight": 3e38}] * 8
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match="the loss of step 1 is .*; training stops here"):
        run(tmp_path / "out", offline_po(path, tiny_model, tiny_model))
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_reference_with_other_tokens_under_the_same_number_is_refused(tmp_path, mixed_rows, tiny_model, other_model):
    reference = Path(shutil.copytree(other_model, tmp_path / "reference"))
    text = (reference / "tokenizer.json").read_text(encoding="utf-8")
    swapped = text.replace('"a": 68', '"a": 0').replace('"b": 69', '"b": 68').replace('"a": 0', '"a": 69')
    assert swapped != text
    (reference / "tokenizer.json").write_text(swapped, encoding="utf-8")
    with pytest.raises(ValueError, match="reference has another tokenizer"):
        run(tmp_path / "out", offline_po(mixed_rows, tiny_model, reference))


def test_bad_input_ends_the_program_with_its_message_and_status_2(tmp_path):
    command = [
        python(),
        "train.py",
        "--train_method",
        "DPO",
        "--output_dir",
        str(tmp_path / "out"),
        "--clip",
        "1",
    ]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert "--train_method DPO is unknown; it is one of SFT, SFTwithKL, OfflinePO" in finished.stderr
    assert "unknown flag --clip; did you mean --clip_range?" in finished.stderr


OWN_TOKENIZER = """
import os
from transformers import PreTrainedTokenizer

open(os.environ["TRACE"], "a").write("run")

class OwnTokenizer(PreTrainedTokenizer):  # asks for what it sets later, as Baichuan2's does
    def __init__(self, **settings):
        super().__init__(**settings)
        self.words = {"a": 0}

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return dict(self.words)
"""


def test_code_that_comes_with_a_model_runs_on_request_only_and_its_failure_takes_a_line(
    tmp_path, mixed_rows, tiny_model, monkeypatch
):
    """Of the reference too; nobody is asked at the terminal."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "own"))
    (folder / "tokenizer.json").unlink()
    (folder / "own.py").write_text(OWN_TOKENIZER)
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    utils.write_json(folder / "tokenizer_config.json", own)
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))

    def ask(*_):
        raise AssertionError("asked at the terminal")

    monkeypatch.setattr("builtins.input", ask)
    for model, reference in ((folder, tiny_model), (tiny_model, folder)):
        with pytest.raises(ValueError, match="own: Tokenizer .*it brings its own code; --trust_remote_code True runs"):
            run(tmp_path / "out", offline_po(mixed_rows, model, reference))
    assert not (tmp_path / "trace").exists()
    with pytest.raises(ValueError, match="own: Tokenizer cannot be loaded .AttributeError: .*another transformers"):
        run(tmp_path / "out", offline_po(mixed_rows, folder, folder), trust_remote_code=True)
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"model": 5}', '{"model": {"type": "BPE", "vocab": []}}'])
def test_a_broken_tokenizer_takes_a_line(tmp_path, mixed_rows, tiny_model, text):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "broken"))
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match="broken: Tokenizer cannot be loaded") as caught:
        run(tmp_path / "out", offline_po(mixed_rows, folder, folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:626] . PytorchStreamWriter failed writing file data/7"),
    ],
)
def test_a_full_disk_ends_training_with_a_line(tmp_path, monkeypatch, capsys, mixed_rows, tiny_model, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(trainers.SPAGTrainer, "_save_checkpoint", fail)
    trainer = train.set_up(flags_of(tmp_path / "out", offline_po(mixed_rows, tiny_model, tiny_model, save_steps=1)))
    trainer.args.save_strategy = "steps"
    with pytest.raises(SystemExit) as ended:
        utils.run_program(lambda: train.run(trainer), expected=utils.RunError)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: [Errno 28] No space left on device: '{tmp_path}/out'\n")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_on_a_gpu_follows_the_curve_of_the_cpu(tmp_path, mixed_rows, tiny_model, other_model):
    settings = offline_po(mixed_rows, tiny_model, other_model)
    on_gpu = run(tmp_path / "gpu", settings, tf32=False)
    on_cpu = run(tmp_path / "cpu", settings, use_cpu=True)
    assert_close(curve(on_gpu), curve(on_cpu), rtol=1e-3, atol=1e-3)
