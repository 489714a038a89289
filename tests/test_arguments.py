"""Settings: the published command lines, old flags, refusals, and what makes a run another one."""

import json
import re
import sys
from dataclasses import fields

import huggingface_hub
import pytest
import torch
from conftest import ROOT

from arguments import SPAGArguments, build_parser, parse_arguments
from tools.common.errors import UserError
from tools.common.files import write_json
from tools.common.records import differences
from trainers import TRAIN_METHODS

README = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
TRAINING = [line.partition(" train.py ")[2] for line in README.splitlines() if line.startswith("torchrun ")]
IMITATION, SELF_PLAY = (next(line for line in TRAINING if name in line) for name in ("_gpt4.json", "OfflinePO"))


@pytest.fixture
def given(tmp_path, tiny_model):
    """Turns a published command line into one whose files exist. DeepSpeed would start a process group here."""
    (tmp_path / "rows.json").write_text(json.dumps([{"query": "q", "target": "t"}]))

    def replace(command: str) -> list[str]:
        for flag, value in (("train_data_path", tmp_path / "rows.json"), ("output_dir", tmp_path / "out")):
            command = re.sub(rf"--{flag} \S+", f"--{flag} {value}", command)
        command = command.replace("--deepspeed configs/default_offload_opt_param.json", "")
        return [tiny_model if word == "M" else word for word in command.split()]

    return replace


def minimal(given, *more: str, method: str = "SFT") -> list[str]:
    reference = "--ref_model_name_or_path M" if TRAIN_METHODS[method].compared_kinds else ""
    command = f"--output_dir DIR --model_name_or_path M --train_method {method} --train_data_path D {reference}"
    return [*given(command), *more]


def test_the_published_command_lines_are_accepted_and_mean_what_they_meant(given):
    args = parse_arguments(given(IMITATION))
    assert (args.train_method, args.lm_kl_coeff, args.loss_normalization) == ("SFTwithKL", 0.1, "micro_batch")
    assert (args.learning_rate, args.warmup_steps, args.lr_scheduler_type) == (5e-6, 0.03, "cosine")
    assert (args.eval_strategy, args.save_strategy, args.seed, args.max_grad_norm) == ("no", "epoch", 42, 1.0)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.weight_decay) == (0.9, 0.999, 1e-8, 0.0)
    args = parse_arguments(given(SELF_PLAY))
    assert (args.train_method, args.lm_kl_coeff, args.lm_sft_coeff, args.clip_range) == ("OfflinePO", 0.2, 0.5, 0.2)
    assert args.detach_kl is False
    args = parse_arguments(minimal(given, "--use_cpu", "True", "--tf32", "True"))
    assert args.tf32 is None and args.use_cpu


def test_help_tells_the_defaults_of_each_method_and_begins_with_the_required_flags():
    text = " ".join(build_parser().format_help().split())
    for line in ("(default: SFTwithKL 0.1, OfflinePO 0.2", "(default: OfflinePO 0.5", "(default: OfflinePO False"):
        assert line in text
    assert "default: None" not in text
    text = text.partition(" options: ")[2]
    required, own, of_the_trainer = (text.index(f"--{name} ") for name in ("output_dir", "lora_merge", "adam_beta1"))
    assert required < own < of_the_trainer


@pytest.mark.parametrize("words", ["--detach_kl", "--detach_kl true", "--detach_kl False"])
def test_a_boolean_flag_may_stand_alone(given, words):
    value = not words.endswith("False")
    args = parse_arguments(minimal(given, *words.split(), "--bf16", "--use_cpu", method="OfflinePO"))
    assert (args.detach_kl, args.bf16, args.use_cpu) == (value, True, True)


def test_flags_of_older_transformers_keep_their_meaning(given):
    for flags, warmup in (("--warmup_ratio=0.1", 0.1), ("--warmup_ratio 0.1 --warmup_steps 5", 5)):
        for strategy in ("--evaluation_strategy=epoch", "--evaluation_strategy epoch"):
            args = parse_arguments(minimal(given, *flags.split(), *strategy.split(), "--eval_data_path", "rows.json"))
            assert (args.warmup_steps, args.eval_strategy) == (warmup, "epoch")


BEST = "--load_best_model_at_end True --eval_data_path rows.json --eval_strategy steps --save_strategy steps"


@pytest.mark.parametrize(
    ("method", "flags", "message"),
    [
        ("SFT", "--ref_model_name_or_path M", "--ref_model_name_or_path is not used by SFT"),
        ("SFTwithKL", "--detach_kl True", "--detach_kl is not used by SFTwithKL"),
        ("SFTwithKL", "--label_smoothing_factor 0.1", "--label_smoothing_factor is not used by SFTwithKL"),
        ("OfflinePO", "--ref_model_name_or_path=", "--ref_model_name_or_path is missing: OfflinePO needs a"),
        ("OfflinePO", "--train_sampling_strategy batch_rebalance", "needs --loss_normalization step"),
        ("OfflinePO", "--lora_alpha 8", "--lora_alpha is not used without --lora_rank"),
        ("OfflinePO", "--lora_rank 8 --ref_model_name_or_path ./x", "the reference is the model without its adapters"),
        ("SFT", "--resume_from_checkpoint elsewhere", "only from checkpoints in --output_dir"),
        ("SFT", "--max_steps 0", "there would be no steps"),
        ("SFT", "--num_train_epochs 0", "there would be no steps"),
        ("SFT", "--bf16 True --fp16 True", "the Trainer's flags: At most one of fp16 and bf16"),
        ("SFT", "--deepspeed own.json", "own.json: 'scheduler' would override --lr_scheduler_type"),
        ("SFT", "--deepspeed adam.json --optim adafactor", "adam.json: 'optimizer' would override --optim"),
        ("SFT", "--deepspeed adam.json --optim_args fused=False", "adam.json: 'optimizer' would override --optim"),
        ("SFT", "--deepspeed zero3.json", "zero3.json: .*stage3_gather_16bit_weights_on_model_save"),
        ("SFT", "--lora_rank 0", "lora_rank is 0; it must be at least 1"),
        ("SFT", "--auto_find_batch_size True", "--auto_find_batch_size would silently use fewer rows"),
        ("SFT", '--accelerator_config {"dispatch_batches":true}', "--accelerator_config would change the batches"),
        ("SFT", "--learning_rate inf", "--learning_rate inf: must be finite and at least 0"),
        ("SFT", "--learning_rate nan", "--learning_rate nan: "),
        ("SFT", "--learning_rate=-1e-5", "--learning_rate -1e-05: "),
        ("SFT", "--warmup_ratio 3", "warmup_ratio is 3.0; it must be at most 1"),
        ("SFT", "--max_length 0", "max_length is 0; it must be at least 1"),
        ("SFT", "--train_sampling_strategy group_by_length", "group_by_length: .* batch_rebalance"),
        ("SFT", "--lora_rank 8 --push_to_hub True", "--push_to_hub: the adapters' base"),
        ("SFT", "--use_liger_kernel True", "pip install liger-kernel"),
        ("SFT", f"{BEST} --eval_steps 2 --save_steps 4", r"set --eval_steps \(2.*\) and --save_steps \(4.*\) to"),
        ("SFT", f"{BEST} --eval_steps 0.1 --save_steps 0.2", r"set --eval_steps \(0.1\) and --save_steps \(0.2\) to"),
        ("SFT", "--deepspeed unclipped.json", "unclipped.json: gradient_clipping missing"),
        ("SFT", "--deepspeed undecayed.json", "undecayed.json: optimizer.params.weight_decay missing"),
        ("SFT", "--deepspeed adam.json", "adam.json: .*betas, .*eps, .*lr, .*weight_decay missing"),
    ],
)
def test_what_would_train_something_else_is_an_error(given, method, flags, message, tmp_path):
    write_json(tmp_path / "own.json", {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}})
    write_json(tmp_path / "zero3.json", {"zero_optimization": {"stage": 3}})
    write_json(tmp_path / "adam.json", {"optimizer": {"type": "AdamW"}, "gradient_clipping": "auto"})
    write_json(tmp_path / "unclipped.json", {"zero_optimization": {"stage": 2}})
    params = {"lr": "auto", "betas": "auto", "eps": "auto"}
    write_json(tmp_path / "undecayed.json", {"gradient_clipping": 1, "optimizer": {"type": "Adam", "params": params}})
    words = given(re.sub(r"\w+\.json", lambda name: str(tmp_path / name[0]), flags))
    with pytest.raises(UserError, match=message):
        parse_arguments(minimal(given, *words, method=method))


def test_deepspeed_of_accelerate_that_the_flags_do_not_name_is_refused(given, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match="ACCELERATE_USE_DEEPSPEED is true.* --deepspeed FILE"):
        parse_arguments(minimal(given))


def test_fsdp_that_would_save_no_model_is_refused(given, monkeypatch):
    no_model = "FSDP with state_dict_type SHARDED_STATE_DICT would save no model"
    parse_arguments(minimal(given, "--fsdp", "--fsdp_config", '{"state_dict_type": "FULL_STATE_DICT"}'))
    with pytest.raises(UserError, match=no_model):
        parse_arguments(minimal(given, "--fsdp", "--fsdp_config", '{"state_dict_type": "SHARDED_STATE_DICT"}'))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    parse_arguments(minimal(given))
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    with pytest.raises(UserError, match=f"ACCELERATE_USE_FSDP is true: {no_model}"):
        parse_arguments(minimal(given))


def test_a_precision_of_accelerate_that_the_flags_do_not_say_is_refused(given, monkeypatch):
    for of_accelerate, flags, named in (
        ("bf16", [], "--bf16 True"),
        ("fp16", ["--bf16", "True"], "--fp16 True"),
        ("fp8", [], "--mixed_precision no"),
    ):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", of_accelerate)
        with pytest.raises(UserError, match=f"ACCELERATE_MIXED_PRECISION is {of_accelerate}.*{named}"):
            parse_arguments(minimal(given, *flags))
    for of_accelerate, flags in (("no", []), ("no", ["--bf16", "True"]), ("bf16", ["--bf16", "True"])):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", of_accelerate)
        parse_arguments(minimal(given, *flags, "--use_cpu", "True"))


def test_a_missing_package_is_named_with_the_command_that_installs_it(given, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="peft is missing: pip install peft"):
        parse_arguments(minimal(given, "--lora_rank", "8"))


@pytest.mark.parametrize(
    ("flags", "different"),
    [
        ("--per_device_train_batch_size 1 --gradient_accumulation_steps 8 --loss_normalization step", []),
        ("--per_device_train_batch_size 1 --gradient_accumulation_steps 8", ["per_device_train_batch_size"]),
        ("--gradient_accumulation_steps 2", ["rows_per_step"]),
        ("--save_steps 7 --logging_steps 3 --gradient_checkpointing True --dataloader_num_workers 1", []),
        ("--lm_kl_coeff 0.3 --max_length 99 --warmup_ratio 0.1", ["max_length", "warmup_steps", "lm_kl_coeff"]),
    ],
)
def test_what_makes_a_run_another_one(given, flags, different):
    normalization = ["--loss_normalization", "step"] if flags.endswith("step") else []
    then = parse_arguments(minimal(given, *normalization, method="OfflinePO")).run_settings
    now = parse_arguments(minimal(given, *flags.split(), method="OfflinePO")).run_settings
    assert {phrase.split(":")[0] for phrase in differences(then, now)} == set(different)
    assert differences(then, then | {"eval_data_path": "x"}) and differences(then | {"eval_data_path": "x"}, then)


def test_a_flag_that_is_newer_than_a_finished_training_leaves_it_as_it_is(given):
    """At its default, which None is not."""
    now = parse_arguments(minimal(given, method="OfflinePO"))
    then = {name: value for name, value in now.run_settings.items() if name not in ("clip_range", "max_length")}
    assert differences(then, now.run_settings, now.defaults) == []
    changed = parse_arguments(minimal(given, "--clip_range", "0.3", method="OfflinePO"))
    assert differences(then, changed.run_settings, changed.defaults) == ["clip_range: 0.2 then, 0.3 now"]


def test_a_token_of_the_hub_goes_to_the_environment_and_no_other_flag_holds_one(given):
    args = parse_arguments(minimal(given, "--hub_token", "hf_mine"))
    assert args.hub_token is None and huggingface_hub.get_token() == "hf_mine"
    assert [each.name for each in fields(SPAGArguments) if each.name.endswith("_token")] == ["hub_token"]


def test_a_warm_up_over_all_steps_is_one(given):
    assert parse_arguments(minimal(given, "--warmup_ratio", "1.0")).get_warmup_steps(7) == 7


def test_weights_are_whole_without_deepspeed_and_lora(given):
    assert parse_arguments(minimal(given, "--bf16", "True", "--use_cpu", "True")).weights_dtype is torch.float32


def test_a_flag_of_a_method_is_told_and_recorded_where_the_method_uses_it(given):
    """The Trainer of a method is the only place that names its flags."""
    assert "lm_kl_coeff" in parse_arguments(minimal(given, method="SFTwithKL")).run_settings
    assert "lm_kl_coeff" not in parse_arguments(minimal(given)).run_settings
    for name, method in TRAIN_METHODS.items():
        for flag, field in method.flags.items():
            default, text = field.default, field.metadata["help"]
            (action,) = [action for action in build_parser()._actions if action.dest == flag]
            assert text in action.help and f"{name} {default}" in action.help
            assert getattr(parse_arguments(minimal(given, method=name)), flag) == default
