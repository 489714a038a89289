"""The settings of the loop: read, filled in, checked and recorded. GPUs are pretended."""

import dataclasses
import errno
import fcntl
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import build_tokenizer, load_chat_template
from helpers import ROOT, call, copy_model, finish, words_of
from helpers import start as start_program

from arguments import build_parser
from tools import run_spag
from tools.common.errors import UserError
from tools.common.files import read_json, write_json
from tools.common.models import load_tokenizer
from tools.common.records import files_setting
from tools.common.rowformats import alpaca_to_row
from tools.games import load_game
from tools.games.chat import ChatTemplate
from tools.games.prompts import load_templates, training_prompt
from tools.loop import check, settings
from tools.loop.settings import DEFAULTS, OWN, SHARED, TABLES, TRAININGS, flags_of, read_file, read_loop, write_record
from tools.loop.stages import hold_lock
from tools.run_spag import Step

BECAME = {"processes": 1, "precision": "fp32", "deepspeed": "none", "gradient_checkpointing": False}
SETTLED = {"processes": 1, "precision": "fp32", "deepspeed": "none", "gradient_checkpointing": "False"}


@pytest.fixture
def needed(tmp_path, tiny_model) -> dict:
    (tmp_path / "words.txt").write_text("art\nmusic\nbridge\n")
    return SETTLED | {"model": tiny_model, "words": tmp_path / "words.txt", "output": tmp_path / "out"}


@pytest.fixture
def gpus(monkeypatch):
    """Pretend so many GPUs of this memory; with `bf16` False, PyTorch emulates it on them."""

    def pretend(number: int, gib: int = 0, *, bf16: bool = True):
        card = types.SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)

    return pretend


@pytest.fixture
def start(tmp_path, needed, monkeypatch):
    """Begin a loop: the settings of its record, and what it said; or what is printed, where it is refused.

    `ask` answers in this process, and no stage runs.
    """

    def ask(loop, steps):
        became = check.answer(loop)
        if not torch.cuda.device_count():  # a pretended GPU can hold nothing
            check.check_commands(filled := dataclasses.replace(loop, **became), steps(filled))
        return became

    monkeypatch.setattr(run_spag, "ask", ask)
    monkeypatch.setattr(run_spag, "run", lambda *_: None)
    stages = types.SimpleNamespace(lock=None)
    monkeypatch.setattr(run_spag, "Stages", lambda output, machine: stages)

    def run(*words, status: int = 0, **changes):
        done = call(run_spag.main, *words_of(needed | changes), *words, status=status)
        run.said = done.output
        if stages.lock is not None:  # the end of a process would close it
            os.close(stages.lock)
            stages.lock = None
        if status:
            return done.errors
        return read_json(Path((needed | changes)["output"], "settings.json"))["settings"]

    return run


# Reading.


def test_of_files_and_words_the_last_one_counts_and_a_table_counts_more_than_what_is_above_it(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "ROOT", Path("/My Drive/spag"))
    monkeypatch.setenv("HOME", "/home/me")
    windows = '\ufefftop_k = 8\r\nwords = "a #b"\r\nmodel = "run#3" # "x"\r\nlearning_rate = 1e-3\r\n'
    windows += 'prompt_templates = "$ROOT/a"\r\n[training]\r\nlearning_rate = 3e-4\r\nlm_sft_coeff = ""\r\n'
    windows += '[match]\r\nwords = ["a=~/a b.txt", "$ROOT/c.txt"]\r\nseeds = [0, 1]\r\n'
    (tmp_path / "my.toml").write_bytes(windows.encode())
    words = ["seed=6", "top_k=7", f"{tmp_path}/my.toml\r", "seed=7\r", "play.top_k=9", "output=~/out"]
    loop = read_loop(words)
    assert (loop.seed, loop.words, loop.model, loop.output) == (7, "a #b", "run#3", "/home/me/out")
    assert [loop.tables[stage].get("top_k") for stage in ("play", "match", "rewards")] == ["9", "8", None]
    assert loop.tables["imitation"]["learning_rate"] == "1e-3" and loop.tables["training"]["learning_rate"] == "3e-4"
    assert "lm_sft_coeff" not in loop.tables["training"]  # an empty text takes a setting back
    assert loop.tables["play"]["prompt_templates"] == loop.tables["belief"]["prompt_templates"] == "/My Drive/spag/a"
    assert loop.tables["match"]["words"] == ["a=/home/me/a b.txt", "/My Drive/spag/c.txt"]
    assert loop.of("match").seeds == [0, 1] and loop.of("play").top_k == 9


def test_on_the_command_line_a_value_is_toml_or_a_text(needed):
    words = words_of(needed) + ['match.words=["a b.txt", "c=d.txt"]', "words=d e.txt", "play.vllm_args=--x 1 --y 2"]
    words += ["learning_rate=1e-5", "report=false", "detach_kl=True", "chat_template=True", "match.seeds=3", "seed=07"]
    loop = read_loop([*words, 'imitation.train_data_path="x y.json"', "training.lr_scheduler_kwargs={}", "top_k="])
    assert loop.tables["match"]["words"] == ["a b.txt", "c=d.txt"] and loop.words == "d e.txt"
    assert loop.of("imitation").train_data_path == ["x y.json"] and loop.of("match").seeds == [3] and loop.seed == 7
    assert loop.of("play").vllm_args == "--x 1 --y 2" and loop.report is False and loop.of("play").top_k == 50
    assert loop.of("imitation").learning_rate == loop.of("training").learning_rate == 1e-5
    assert loop.of("training").detach_kl and loop.tables["training"]["lr_scheduler_kwargs"] == "{}"


def test_what_stages_share_reaches_each_that_has_the_flag(needed):
    loop = read_loop(
        [*words_of(needed), "chat_template=true", "thinking=true", "max_turns=2", "game=twenty_questions"]
    )
    having = {name: [stage for stage in TABLES if loop.tables[stage].get(name)] for name in SHARED}
    assert having["game"] == ["play", "rewards", "match", "belief"] and having["max_turns"] == ["play", "match"]
    assert having["chat_template"] == ["play", "rewards", "match", "belief", "reasoning"]
    assert having["thinking"] == ["play", "rewards", "match"]


def test_a_new_lora_rank_brings_its_learning_rate_and_one_that_goes_the_papers(needed):
    def rates(*words) -> list[str]:
        loop = read_loop([*words_of(needed), *words])
        return [loop.tables[stage]["learning_rate"] for stage in ("imitation", "training")]

    assert rates() == ["5e-6", "2e-6"]
    assert rates("lora_rank=4") == ["1e-4", "1e-4"] and rates("training.lora_rank=4") == ["5e-6", "1e-4"]
    assert rates("lora_rank=4", "training.learning_rate=2e-6") == ["1e-4", "2e-6"]
    assert rates("lora_rank=4", "lora_rank=") == ["5e-6", "2e-6"]


@pytest.mark.parametrize("name", ["llama2_7b", "qwen3_4b", "qwen15", "tiny", "english"])
def test_the_files_of_settings_are_read_by_the_stages_parsers(name, needed):
    loop = read_loop([*words_of(needed), f"{ROOT}/configs/{name}.toml"])
    assert [loop.of(stage) for stage in TABLES]


@pytest.mark.parametrize("name", ["qwen3_4b", "tiny"])
def test_micro_batches_of_like_lengths_leave_the_loss_a_mean_over_the_step(needed, name):
    loop = read_loop([*words_of(needed), f"{ROOT}/configs/{name}.toml"])
    for table in map(loop.of, TRAININGS):
        assert table.loss_normalization == "step" and table.train_sampling_strategy == "batch_rebalance"
        assert loop.global_batch % (2 * table.per_device_train_batch_size) == 0


def test_help_shows_every_setting_of_the_loop_and_how_to_see_the_flags_and_imports_neither_torch_nor_transformers():
    code = "import sys; from tools import run_spag; sys.argv = ['run_spag.py', '--help']; run_spag.main()\n"
    code += "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, own in OWN.items():
        assert f"  {name} " in done.stdout and own.metadata["help"] in done.stdout
    assert all(f"python {table.program} --help" in done.stdout for table in TABLES.values())


def test_a_stage_takes_every_flag_of_its_program_that_the_loop_does_not_set():
    assert flags_of("training") == {action.dest for action in build_parser()._actions} - {"help"}
    for stage, table in TABLES.items():
        assert {*table.set_by_loop, *table.inputs} <= flags_of(stage)


# Refusals.


@pytest.mark.parametrize(
    "word, error",
    [
        ("epocs=2", "epocs: neither a setting of the loop nor a flag of a stage; did you mean epochs?"),
        ("play.temprature=2", "no flag of tools/play_llm_game.py; did you mean temperature?"),
        ("mach.words=x", "there is no table [mach]; did you mean match?"),
        ("TEMPERATURE=0.7", "TEMPERATURE: neither"),
        ("play.output_dir=x", "play.output_dir: the loop sets this flag"),
        ("output_dir=x", "output_dir: the loop sets this flag"),
        ("model_name_or_path=x", "the loop sets this flag"),
        ("training.train_data_path=x", "the loop sets this flag"),
        ("belief.max_length=3", "the loop sets this flag"),
        ("bf16=true", "bf16: set by `precision`"),
        ("play.dtype=float16", "play.dtype: set by `precision`"),
        ("model=", "model=... is missing"),
        ("output=$HOME/x", "output: $HOME is not expanded; write the path, ~ or $ROOT"),
        ("words=${HOME}/x", "words: ${HOME} is not expanded"),
        ("match.words=$(date)", "match.words: $(date) is not expanded"),
        ("seed=4294967293", "seed=4294967293: "),  # 3 epochs
        ("seed=-1", "seed is -1; it must be at least 0"),
        ("epochs=two", "epochs: invalid int value: 'two'"),
        ("max_words=0", "max_words is 0; it must be at least 1"),
        ("processes=two", "processes: invalid int value: 'two'"),
        ("chat_template=yes", "[play]: argument --chat_template: expected True or False, got 'yes'"),
        ("detach_kl=maybe", "[imitation]: argument --detach_kl"),
        ("report=no", "report: expected True or False, got 'no'"),
        ("gradient_checkpointing=x", "gradient_checkpointing: expected True or False, got 'x'"),
        ("precision=bf8", "precision: invalid choice: 'bf8'"),
        ("control=coin", "control: invalid choice: 'coin'"),
        ("control=silent", "control=silent needs like"),
        ("control=sft", "control=sft needs like"),
        ("control=cloning & training.lm_sft_coeff=0", "control=cloning: sft_coeff is 0.0; it must be above 0"),
        ("control=cloning & rewards.losers=0.5 & training.detach_kl=true", "control=cloning imitates winners"),
        ("until=epoch1_pay", "until=epoch1_pay: no such stage; did you mean epoch1_play?"),
        ("until=epoch9_play", "until=epoch9_play: no such stage"),
        ("machine=1", "machine=1: machines=1"),
        ("prompt_templates=data/released_prompts.json", "no such file, made by python -m tools.prepare_data prompts"),
        ("match.words=held=/dev/null", "/dev/null: no words"),
        ("game_options=match", "match is ''"),
        ("global_batch=31", "global_batch=31 must be a multiple of processes x machines x training.per_device_train"),
        ("max_new_tokens=2048", "[play]: --max_length must be above --max_new_tokens"),
        ("play.tensor_parallel_size=2", "must be a multiple of play.tensor_parallel_size, 2"),
        ("training.per_device_train_batch_size=0", " x training.per_device_train_batch_size, 0"),
        ("training.lm_kl_coeff=o.2", "[training]: argument --lm_kl_coeff"),
        ("training.learning_rate=1e", "[training]: argument --learning_rate"),
        ("training.num_train_epochs=0", "[training]: there would be no steps"),
        ("training.label_smoothing_factor=0.1", "[training]: --label_smoothing_factor is not used"),
        ("training.seed=1", "training.seed: the loop sets this flag"),
        ("play.temperature=0", "[play]: temperature is 0.0; it must be above 0"),
        ("play.engine=vlm", "[play]: argument --engine: invalid choice: 'vlm'"),
        ("match.games_per_word=0 & match.words=words.txt", "[match]: games_per_word is 0; it must be at least 1"),
        ("match.seeds=0 1", "[match]: argument --seeds: invalid int value: '0 1'"),
        ("match.words=all=/dev/null", "/dev/null: no words"),
        ("reasoning.tasks=ARC-c,PIQA", "'ARC-c,PIQA' is a list or a pattern"),
        ("rewards.decay_weight=1.5", "decay_weight is 1.5"),
        ("rewards.losers=0.5", "training.detach_kl=True"),
        ("rewards.ties=0.25", "training.detach_kl=True"),
        ("training.hub_token=hf_mine", "export HF_TOKEN=..."),
        ("push_to_hub_token=hf_mine", "export HF_TOKEN=..."),
        ("prompt_templates=/dev/null", "/dev/null: not JSON"),
        (f"game={ROOT}/tests/graded_game.py:Picky", "words.txt:1: "),
        (f"game={ROOT}/tests/graded_game.py:Divide & belief.games=words.txt", "Divide has no message that names a"),
        ("nothing.toml", "nothing.toml"),
        ("./a=b.toml", "./a=b.toml"),
        ("output=$ROOTS/x", "output: $ROOTS is not expanded"),
        ("machines=2", "machines=2 needs rendezvous=HOST:PORT"),
        ("match.tensor_parallel_size=0", "[match]: tensor_parallel_size is 0; it must be at least 1"),
        *(
            (f"{table}.{name}=x", f"{table}.{name}: all stages share {name}; set it above the tables")
            for table, name in [("play", "game"), ("rewards", "thinking"), ("match", "chat_template")]
            + [("match", "max_turns"), ("belief", "prompt_templates"), ("play", "game_options")]
        ),
        ("max_turns=0", "max_turns is 0; it must be at least 1"),
        ("training.max_length=0", "[training]: max_length is 0; it must be at least 1"),
        ("training.eval_data_path=nothing.json", "nothing.json: no such file"),
        ("imitation_model=/nothing", "/nothing: no such file"),
        ("prompt_templates=/nothing.json", "/nothing.json: no such file"),
        ("belief.candidates=/nothing.txt", "/nothing.txt: no such file"),
        ("deepspeed=nothing.json", "nothing.json: no such file"),
        ("like=nothing", "nothing/settings.json: no such file"),
    ],
)
def test_what_would_fail_hours_later_or_be_wrong_is_refused(start, tmp_path, monkeypatch, word, error):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    errors = start(*word.split(" & "), status=2)
    assert error in errors and len(errors.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text, error",
    [
        ("seed = 1\nseed = 2", "not TOML: "),
        ("[matches]\nseeds = 1", "matches: there is no table [matches]; did you mean match?"),
        ("[play.more]\nseed = 1", "play.more"),
        ("epochs = 2.5", "epochs: invalid int value: '2.5'"),
        ('words = ["a", "b"]', "words: takes one value"),
        ('output = "$HOME/x"', "output: $HOME is not expanded; write the path, ~ or $ROOT"),
        ("play = 3", "play is a table; write [play] with its keys below"),
        ("[training]\nlr_scheduler_kwargs = {num_cycles = 1}", "lr_scheduler_kwargs: write it as a JSON string"),
        ("[imitation]\nlora_rank = [1, 2]", "[imitation]: unrecognized arguments: 2"),
    ],
)
def test_a_file_that_cannot_be_read_names_its_setting(start, tmp_path, text, error):
    (tmp_path / "wrong.toml").write_text(text)
    errors = start(tmp_path / "wrong.toml", status=2)
    assert error in errors and len(errors.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.fixture
def chat_model(tmp_path) -> Path:
    """A folder of a tokenizer with a chat template, which the checks read."""
    tokenizer = build_tokenizer("<|im_start|>", "<|im_end|>", chat_template=load_chat_template("chatml"))
    tokenizer.save_pretrained(tmp_path / "model")
    write_json(tmp_path / "model/config.json", {"model_type": "llama"})
    return tmp_path / "model"


BAD_ROWS = "bad.json"
TRAINING_MISTAKES = [
    "report_to=wandb",
    "lr_scheduler_type=cosine_with_min_lr",
    "lr_scheduler_kwargs=x",
    'lr_scheduler_kwargs={"foo": 1}',
    "learning_rate=-1e-5",
    "learning_rate=nan",
    "attn_implementation=flash_attention_2",
    "attn_implementation=sdp",
    "lora_rank=4 & training.lora_target_modules=q_prj",
    "lora_rank=4 & training.lora_dropout=1.5",
    "lora_rank=-4",
    "optim=galore_adamw & training.optim_target_modules=all-linear",
    "optim=adamw_bnb_8bit",
    "adam_beta2=2",
    f"eval_data_path={BAD_ROWS}",
    "eval_strategy=epoch",
    "load_best_model_at_end=true",
    "save_strategy=best",
    "save_steps=2.5",
    "logging_steps=0",
    "warmup_ratio=-0.5",
    "accelerator_config=x",
    "torch_compile_backend=x",
    "gradient_checkpointing_kwargs=x",
    "push_to_hub=true",
    "per_device_eval_batch_size=0",
    "dataloader_num_workers=-1",
    "neftune_noise_alpha=-1",
    "train_sampling_strategy=group_by_length",
]


@pytest.mark.parametrize("mistake", TRAINING_MISTAKES)
def test_what_train_py_refuses_is_refused_before_play(start, tmp_path, monkeypatch, mistake):
    """By train.py's own code, which makes the arguments of both trainings."""
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / BAD_ROWS, [{"query": "no target"}])
    errors = start(*f"training.{mistake}".split(" & "), status=2)
    assert "error: [training]: " in errors and len(errors.splitlines()) == 1 and not (tmp_path / "out").exists()


def with_a_wrong_rate(loop):
    for step in run_spag.steps(loop):
        more = ["--warmup_ratio", "7"] if step.name == "epoch3_train" else []
        yield dataclasses.replace(step, argv=[*step.argv, *more])


def with_a_wrong_draw(loop):
    yield Step(what="draw", program="tools/controls.py", argv=["draw", "--number", "8"])


@pytest.mark.parametrize("steps, told", [(with_a_wrong_rate, "warmup_ratio"), (with_a_wrong_draw, "--rows")])
def test_what_programs_refuse_in_a_script_s_steps_is_refused_before_play(start, needed, steps, told, tmp_path):
    """`start` lets `ask` answer in this process."""
    errors = call(functools.partial(run_spag.main, steps), *words_of(needed), status=2).errors
    assert told in errors and len(errors.splitlines()) == 1 and not (tmp_path / "out/settings.json").exists()


def test_all_files_and_packages_that_are_missing_are_named_at_once(start, monkeypatch):
    names = ("rewards.sft_data_path", "words", "prompt_templates", "first_episodes", "belief.games")
    missing = {name: f"{name}.json" for name in names}
    missing |= {"match.words": '["e=E1", "E2"]', "imitation.train_data_path": '["I1", "I2"]'}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    errors = start("reasoning.tasks=PIQA", status=2, **missing)
    wanted = [f"{name}.json" for name in names] + ["E1", "E2", "I1", "I2"]
    assert len(errors.splitlines()) == 1 and [name for name in wanted if f"{name}: no" not in errors] == []
    assert "lm_eval is missing: pip install lm-eval" in errors


def test_sft_rows_may_be_a_data_set_of_the_hub(start, monkeypatch, tmp_path):
    write_json(tmp_path / "set/train.json", [{"prompt": "Hi", "answer": "Ho"}])
    for module in ("records.data_folder", "files.data_folder"):
        monkeypatch.setattr(f"tools.common.{module}", lambda name: tmp_path / "set")
    monkeypatch.setattr("tools.loop.check.data_folder", lambda name: tmp_path / "set")
    assert start(**{"rewards.sft_data_path": "owner/name"})["rewards.sft_data_path"] == "owner/name"


def test_a_pad_token_that_is_a_word_of_the_game_is_refused_at_the_start(start, tiny_model, tmp_path):
    model = copy_model(tiny_model, tmp_path / "model")
    config = read_json(model / "tokenizer_config.json")
    write_json(model / "tokenizer_config.json", config | {"pad_token": "!"})
    assert "the game uses '!', a special token" in start(status=2, model=model)


def test_unusable_gpus_and_messages_without_a_template_are_refused(start, tiny_model, tmp_path, monkeypatch):
    write_json(tmp_path / "sft.json", [{"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}])
    assert "need a chat template" in start(
        status=2, model=tiny_model, **{"rewards.sft_data_path": tmp_path / "sft.json"}
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as the driver counts them, even one that is too old
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "PyTorch cannot use the GPUs" in start("processes=auto", status=2)


# The machine.


@pytest.fixture
def large_model(tmp_path) -> Path:
    """A folder of 6.7 billion parameters in bfloat16, all holes, and a copy that does not count."""
    write_json(tmp_path / "large/config.json", {"dtype": "bfloat16"})
    build_tokenizer().save_pretrained(tmp_path / "large")
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        with open(tmp_path / "large" / name, "wb") as file:
            file.truncate(6_700_000_000)
    return tmp_path / "large"


@pytest.mark.parametrize(
    "number, gib, bf16, lora, expected",
    [
        (0, 0, False, "", [1, "fp32", False, "none"]),
        (1, 80, False, "", [1, "fp16", True, "default_offload_opt_param.json"]),  # where PyTorch emulates bf16
        (1, 24, True, "4", [1, "bf16", True, "none"]),
        (1, 141, True, "", [1, "bf16", True, "none"]),
        (8, 80, True, "", [8, "bf16", True, "zero2.json"]),
        (8, 24, True, "", [8, "bf16", True, "zero3.json"]),
    ],
)
def test_automatic_settings_follow_the_gpus_and_what_fits(gpus, large_model, number, gib, bf16, lora, expected):
    gpus(number, gib, bf16=bf16)
    chosen = check.answer(read_loop([f"model={large_model}", "words=w", "output=o", f"lora_rank={lora}"]))
    chosen["deepspeed"] = Path(chosen["deepspeed"]).name
    names = ("processes", "precision", "gradient_checkpointing", "deepspeed")
    assert [chosen[name] for name in names] == expected


@pytest.mark.parametrize(
    "imitation, ranks, expected",
    [
        ("imitation.train_data_path=rows.json", "lora_rank=4", "none"),
        ("imitation.train_data_path=rows.json", "training.lora_rank=4", "default_offload_opt_param.json"),
        ("imitation_model=folder", "training.lora_rank=4", "none"),
    ],
)
def test_memory_is_that_of_adapters_if_each_training_that_runs_has_them(gpus, large_model, imitation, ranks, expected):
    gpus(1, 24)
    loop = read_loop([f"model={large_model}", "words=w", "output=o", imitation, ranks])
    assert Path(check.answer(loop)["deepspeed"]).name == expected


def test_more_processes_than_gpus_and_a_match_that_does_not_fit_are_refused(start, gpus, large_model, tmp_path):
    changes = {"model": large_model, "match.words": tmp_path / "words.txt", "processes": 4, "precision": "bf16"}
    gpus(2, 80)
    assert "4 processes on this machine need 4 GPUs, but it has 2" in start(**changes, status=2)
    gpus(4, 27)  # two models of 12.5 GiB, and 24.3 GiB for them
    assert "match.words= skips" in start(**changes, status=2)
    start("match.words=", **changes)
    start("match.tensor_parallel_size=2", **changes)
    gpus(4, 28)
    start(**changes)
    assert "match.words= skips" in start(**changes | {"output": tmp_path / "o", "precision": "fp32"}, status=2)
    gpus(0)
    start(**changes)


def test_the_process_of_the_loop_asks_no_gpu_and_begins_no_training(needed, tiny_model, tmp_path):
    """Whatever would initialize CUDA, torch.distributed or DeepSpeed ends the process; its child may."""
    code = """import os, sys, torch
import arguments
from tools import run_spag
def guard(place, name, loop=os.getpid()):
    allowed = getattr(place, name)
    def guarded(*args, **options):
        return os._exit(7) if os.getpid() == loop else allowed(*args, **options)
    setattr(place, name, guarded)
for name in ("_lazy_init", "device_count", "is_available"):
    guard(torch.cuda, name)
guard(torch.distributed, "init_process_group")
guard(arguments.SPAGArguments, "__post_init__")
before = dict(os.environ)
run_spag.main()
assert "deepspeed" not in sys.modules and dict(os.environ) == before
"""
    words = words_of(needed | {"model": tiny_model, "processes": "auto", "precision": "auto", "deepspeed": "auto"})
    (tmp_path / "guarded.py").write_text(code, encoding="utf-8")
    assert "epoch3_train: " in finish(start_program([sys.executable, tmp_path / "guarded.py", *words, "check=true"]))


# A run like another.

BOTH = ["imitation", "games"]


@pytest.fixture
def run(needed, tmp_path) -> Path:
    """The output of a run with imitation and the games of epoch 1."""
    run = tmp_path / "spag"
    write_json(tmp_path / "rows.json", [{"query": "Say: ", "target": "Hi"}])
    words = {"output": run, "imitation.train_data_path": tmp_path / "rows.json", "until": "epoch1_play"}
    words |= {"control": "cloning", "temperature": 0.5, "training.lm_kl_coeff": 0.3, "play.engine": "generate"}
    words |= {"training.per_device_train_batch_size": 4, "lora_rank": 4, "precision": "auto"}
    write_record(read_loop(words_of(needed | words)), BECAME, ["art", "music", "bridge"])
    write_json(run / "imitation/model/settings.json", {"finished": True})
    copy_model(needed["model"], run / "imitation/model/merged")
    write_json(run / "epoch1/episodes/imitation_sampling_words_results.json", [])
    return run


def kept(run: Path, *words: str) -> list[str]:
    """Which of imitation and games of epoch 1 a run keeps that is like `run`."""
    loop = read_loop([f"like={run}", "output=mine", *words])
    return [name for name, value in (("imitation", loop.imitation_model), ("games", loop.first_episodes)) if value]


def test_like_takes_the_settings_of_another_run_but_not_how_far_it_ran(run):
    loop = read_loop([f"like={run}", "training.lm_kl_coeff=0.4", "output=mine"])
    assert loop.imitation_model == f"{run}/imitation/model/merged"
    assert loop.first_episodes == f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
    assert (loop.of("play").temperature, loop.of("training").lm_kl_coeff) == (0.5, 0.4)
    assert (loop.until, loop.control, loop.output) == (None, None, "mine")
    assert (loop.processes, loop.deepspeed) == (1, "none")  # as they were given
    assert loop.precision == "fp32"  # what `auto` became there: with another one the two runs would not compare
    assert loop.of("play").engine == "generate" and loop.of("training").per_device_train_batch_size == 4


@pytest.mark.parametrize(
    "change",
    ["precision=fp32", "training.lora_rank=", "epochs=9", "global_batch=64", "save_strategy=no", "control=sft"]
    + ["training.lm_kl_coeff=1", "lora_rank=4", "match.seeds=[0, 1]", "temperature=0.50", "play.engine=slots"],
)
def test_what_decides_neither_about_imitation_nor_about_games_keeps_both(run, change):
    assert kept(run, change) == BOTH


@pytest.mark.parametrize(
    "change", ["play.temperature=0.8", "max_words=2", "games_per_word=2", "seed=1", "words=x.txt"]
)
def test_a_change_of_the_games_is_refused_until_something_takes_their_place(run, change):
    name = change.partition("=")[0]
    with pytest.raises(UserError, match=rf"a changed {name}(, words)?; add first_episodes= \("):
        kept(run, change)
    assert kept(run, change, "first_episodes=") == ["imitation"] and kept(run, change, "first_episodes=x.json") == BOTH


@pytest.mark.parametrize(
    "change",
    ["model=x", "game=twenty_questions", "prompt_templates=x.json", "chat_template=true", "thinking=true"]
    + ["max_turns=3", "precision=bf16", "imitation.learning_rate=1", "max_length=900", "lora_rank=8"],
)
def test_a_change_of_imitation_is_refused_until_both_parts_are_given(run, change):
    for given in ([], ["imitation_model="], ["first_episodes="]):
        with pytest.raises(
            UserError, match="add (imitation_model=|first_episodes=|imitation_model= first_episodes=) "
        ):
            kept(run, change, *given)
    assert kept(run, change, "imitation_model=", "first_episodes=") == []
    assert kept(run, change, "imitation_model=a", "first_episodes=") == ["imitation"]


def test_a_word_list_edited_since_is_a_change_of_the_games(run, needed):
    Path(needed["words"]).write_text("art\nmusic\nriver\n")
    with pytest.raises(UserError, match="a changed words; add first_episodes= "):
        kept(run)
    assert kept(run, "first_episodes=") == ["imitation"]


def test_prompts_or_a_game_edited_since_are_a_change_of_imitation(needed, tmp_path):
    shutil.copy(ROOT / "configs/prompts/english.json", prompts := tmp_path / "prompts.json")
    shutil.copy(ROOT / "tests/graded_game.py", game := tmp_path / "mine.py")
    run = tmp_path / "spag"
    for file, choice in ((prompts, {"prompt_templates": prompts}), (game, {"game": f"{game}:Picky"})):
        write_record(read_loop(words_of(needed | choice | {"output": run})), BECAME, ["art", "music", "bridge"])
        assert kept(run) == []
        file.write_text(file.read_text() + "\n")
        with pytest.raises(UserError, match="a changed (prompt_templates|game_file); add imitation_model= "):
            kept(run)


def test_another_imitation_model_needs_a_word_about_the_games(run):
    with pytest.raises(UserError, match="a changed imitation_model; add first_episodes="):
        kept(run, "imitation_model=other")
    assert kept(run, "imitation_model=other", "first_episodes=x.json") == BOTH


def test_a_run_that_has_begun_continues_although_the_one_that_it_is_like_went_on(run, start, tmp_path):
    games = run / "epoch1/episodes/imitation_sampling_words_results.json"
    games.rename(tmp_path / "later.json")
    before = start(f"like={run}")
    (tmp_path / "out/epoch1/episodes").mkdir(parents=True)
    (tmp_path / "out/epoch1/episodes/imitation_sampling_words_rank0.jsonl").touch()
    (tmp_path / "later.json").rename(games)
    record = read_json(run / "settings.json")
    record["settings"] |= {"epochs": "9", "rewards.decay_weight": "0.5"}
    write_json(run / "settings.json", record)
    assert start(f"like={run}") == before
    assert "epochs" not in start(f"like={run.parent}/./{run.name}/")
    assert start(f"like={run}", output=tmp_path / "other")["epochs"] == "9"


def test_a_run_that_was_moved_with_its_data_inside_can_be_like(run, tmp_path, needed):
    (tmp_path / "rows.json").rename(run / "rows.json")
    words = needed | {"output": run, "imitation.train_data_path": run / "rows.json"}
    write_record(read_loop(words_of(words)), BECAME, ["art", "music", "bridge"])
    run.rename(tmp_path / "moved")
    loop = read_loop([f"like={tmp_path}/moved", "output=mine"])
    assert loop.of("imitation").train_data_path == [f"{tmp_path}/moved/rows.json"]


def test_a_run_like_one_that_stopped_after_imitation_plays_epoch_1_itself(run):
    (run / "epoch1/episodes/imitation_sampling_words_results.json").unlink()
    assert kept(run) == kept(run, "max_words=2") == ["imitation"]


def test_like_needs_an_imitation_that_has_ended_and_a_record_of_this_loop(run):
    write_json(run / "imitation/model/settings.json", {"finished": False})
    with pytest.raises(UserError, match="its imitation is unfinished"):
        read_loop([f"like={run}", "output=mine"])
    write_json(run / "settings.json", {"settings": {"MODEL": "m", "OUTPUT": "x"}})
    with pytest.raises(UserError, match="written by an older version"):
        read_loop([f"like={run}", "output=mine"])


@pytest.mark.parametrize("control", ["sft", "silent"])
def test_a_control_needs_rows_of_as_many_epochs(run, start, needed, control):
    write_json(run / "epoch1/rows/rows.json", [])
    sft = f"rewards.sft_data_path={run.parent}/rows.json"
    errors = start(f"like={run}", f"control={control}", "epochs=3", sft, status=2)
    assert f"control={control}: {run}/epoch2/rows/rows.json is missing" in errors
    start(f"like={run}", f"control={control}", "epochs=1", sft)
    start(f"like={run}", f"control={control}", "epochs=2", "until=epoch2_play", sft)  # before its rows are needed


# The layout of imitation's rows.


def test_rows_of_imitation_must_have_the_layout_of_play(start, tmp_path, chat_model):
    numbers = iter(range(100))

    def begin(*words, status: int = 0, **changes):
        data = {"imitation.train_data_path": tmp_path / "rows.json", "output": tmp_path / f"out{next(numbers)}"}
        return start(*words, status=status, **data, **changes)

    def layout(prompts: str, chat_template: str | None = None) -> None:
        made = {"chat_template": chat_template, "prompt_templates": {"path": "x", "sha256": prompts}}
        write_json(tmp_path / "rows.json_rewards_settings.json", {"settings": made})

    write_json(tmp_path / "rows.json", [{"query": "Say: ", "target": "Hi"}])
    own = files_setting(load_game().prompt_file)["sha256"]
    layout(own)
    begin()
    assert "differ from play's" in begin("thinking=True", "rewards.training_prompt=play", status=2)
    layout("0")
    assert "differ from play's" in begin(status=2)
    layout(own, "1")
    assert "differ from play's" in begin(status=2)
    in_chat = {"model": chat_model, "chat_template": "True"}
    layout(own, ChatTemplate(load_tokenizer(str(chat_model)), "model").sha256)
    begin(**in_chat)
    layout(own, "of another model")
    assert "differ from play's" in begin(status=2, **in_chat)
    write_json(tmp_path / "rows.json_rewards_settings.json", {"settings": {}})  # of tools/controls.py
    begin()


@pytest.fixture
def foreign(tmp_path):
    """Files of rows without a record: begins of games by our rules, the same by others' rules, and SFT rows."""
    game = load_game()
    templates, rng = load_templates(game.prompt_file, game), random.Random(0)
    begins = [training_prompt(game, [], "art", 5, rng=rng, templates=templates) for _ in range(20)]
    others = [begin.replace("defender", "guesser") for begin in begins]
    question = alpaca_to_row({"instruction": "Write a number.", "output": "1"})
    files = {
        "sft": [question],
        "ours": [{"query": begin.strip().replace("\n", ""), "target": "Hi"} for begin in begins],  # in a template
        "others": [{"prompt": begin, "answer": "Hi"} for begin in others],
        "messages": [{"messages": [{"role": "user", "content": begin}]} for begin in others],
        "mixture": [question] * 52_000 + [{"instruction": begin, "output": "Hi"} for begin in others],
    }
    for name, rows in files.items():
        write_json(tmp_path / f"{name}.json", rows)
    return lambda *names: {"imitation.train_data_path": json.dumps([str(tmp_path / f"{name}.json") for name in names])}


def test_a_model_without_a_chat_template_is_refused_before_its_imitation(start, foreign, tiny_model):
    errors = start(status=2, model=tiny_model, chat_template="true", **foreign("sft"))
    assert "chat template" in errors


def test_rows_are_in_the_template_of_the_imitation_model_that_plays(needed, chat_model, tiny_model):
    settings = {"model": tiny_model, "imitation_model": chat_model, "chat_template": "true", "check": "true"}
    printed = call(run_spag.main, *words_of(needed | settings)).output
    assert f"--tokenizer {chat_model}" in printed and f"--tokenizer {tiny_model}" not in printed


@pytest.mark.parametrize("names", [["others"], ["messages"], ["sft", "others"], ["mixture"]])
def test_games_without_a_rule_of_play_are_no_rows_of_imitation(start, foreign, names):
    errors = start(status=2, **foreign(*names))
    assert "prompt_templates=data/released_prompts.json" in errors and "tools/assign_rewards.py" in errors


def test_other_rows_of_imitation_pass_and_those_that_are_trained_on_already(start, foreign, tiny_model, tmp_path):
    for number, names in enumerate((["sft"], ["sft", "ours"], ["others", "ours"])):
        start(**foreign(*names), output=tmp_path / f"out{number}")
    start(**foreign("others"), imitation_model=tiny_model, output=tmp_path / "like")  # as `like` sets it
    start(**foreign("sft"))
    (tmp_path / "others.json").rename(tmp_path / "sft.json")
    record = tmp_path / "out/imitation/model/settings.json"
    write_json(record, {"finished": False})
    assert "none of play's rule texts" in start(status=2, **foreign("sft"))
    write_json(record, {"finished": True})
    start(**foreign("sft"))


# The record.


def test_play_gets_the_first_words_so_many_times(start, tmp_path):
    start(max_words=2, games_per_word=2)
    assert (tmp_path / "out/words.txt").read_text().split() == ["art", "music"] * 2
    (tmp_path / "words.txt").rename(tmp_path / "all.txt")  # no name for a list of a match, but there is none
    start(words=tmp_path / "all.txt", output=tmp_path / "other")


def test_once_a_stage_has_begun_settings_that_change_results_are_refused(start, tmp_path):
    start(seed=9, **{"imitation.learning_rate": "5E-06", "training.lm_kl_coeff": ".5"})
    before = start()  # nothing is there yet
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    errors = start(status=2, seed=7, **{"training.lm_kl_coeff": "0.3"})
    assert "seed: 42 then, 7 now" in errors and "training.lm_kl_coeff: 0.2 then, 0.3 now" in errors
    assert f"like={tmp_path}/out" in errors and len(errors.splitlines()) == 1
    assert read_json(tmp_path / "out/settings.json")["settings"] == before
    same = {"imitation.learning_rate": "5E-06", "imitation.max_grad_norm": "1.00", "top_p": "1"}  # their defaults
    assert start(**same).keys() == {*before, "play.top_p", "match.top_p", "imitation.max_grad_norm"}
    free = {"processes": 2, "save_strategy": "no", "epochs": 5, "match.seeds": "[0, 1]", "match_every": 2}
    start(**free, **{"dataloader_num_workers": 2, "play.concurrent_games": 3, "report": "false"})
    for name, value in (("max_words", 2), ("max_turns", 3), ("control", "cloning"), ("precision", "bf16")):
        assert f"{name}: " in start(status=2, **{name: value})
    errors = start(status=2, **{"training.per_device_train_batch_size": 1})  # over which the loss is averaged
    assert "training.per_device_train_batch_size: 2 then, 1 now" in errors


def test_under_step_the_micro_batch_may_change_and_a_new_flag_is_no_other_setting(start, tmp_path):
    start(loss_normalization="step")
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    start(loss_normalization="step", per_device_train_batch_size=1)
    record = read_json(tmp_path / "out/settings.json")
    del record["settings"]["training.clip_range"]  # as if the flag were newer than this run
    write_json(tmp_path / "out/settings.json", record)
    start(loss_normalization="step")


def test_the_record_holds_what_was_given_and_what_it_became(start, tmp_path):
    given = start(precision="auto", processes="auto")
    assert (given["precision"], given["processes"]) == ("auto", "auto")
    became = read_json(tmp_path / "out/settings.json")["became"]
    assert became["precision"] in ("bf16", "fp32") and became["processes"] == 1
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    start(precision=became["precision"], processes=1)


def test_a_prompt_file_may_be_renamed(start, tmp_path):
    """Programs compare its content."""
    for name in ("a.json", "b.json"):
        shutil.copy(ROOT / "configs/prompts/english.json", tmp_path / name)
    start(prompt_templates=tmp_path / "a.json")
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    start(prompt_templates=tmp_path / "b.json")


def test_a_seed_of_0_is_a_seed(start, tmp_path):
    start(seed=0)
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    start(seed=0)
    assert "seed: 0 then, 42 now" in start(status=2)


def test_one_value_of_several_is_the_same_in_a_file_and_on_the_command_line(start, tmp_path):
    write_json(tmp_path / "rows.json", [{"query": "Say: ", "target": "Hi"}])
    (tmp_path / "rows.toml").write_text(f'[imitation]\ntrain_data_path = "{tmp_path}/rows.json"\n')
    start(tmp_path / "rows.toml")
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    start(f"imitation.train_data_path={tmp_path}/rows.json")


def test_a_training_that_left_nothing_may_begin_again_with_other_settings(start, tmp_path):
    start()
    write_json(tmp_path / "out/imitation/model/settings.json", {"finished": False})
    start(**{"imitation.lm_kl_coeff": "0.3"})


def test_another_word_list_is_refused_once_games_are_played_and_the_played_one_stays(start, tmp_path):
    start()
    (tmp_path / "out/epoch1/episodes").mkdir(parents=True)
    (tmp_path / "out/epoch1/episodes/imitation_sampling_words_rank0.jsonl").touch()
    start()
    (tmp_path / "words.txt").write_text("art\nriver\n")
    errors = start(status=2)
    assert "differs from OUTPUT/words.txt" in errors and "restore the list or " in errors
    assert (tmp_path / "out/words.txt").read_text().split() == ["art", "music", "bridge"]


def test_an_output_of_the_shells_loop_is_refused(start, tmp_path):
    write_json(tmp_path / "out/settings.json", {"settings": {"MODEL": "m"}})
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    assert "written by an older version" in start(status=2)


def test_a_copied_output_continues_from_another_clone(start, tmp_path, monkeypatch):
    """Settings name files of OUTPUT and of the project relative to them; programs compare the content of files."""

    def inside(name: str) -> dict:
        return {"output": tmp_path / name, "imitation.train_data_path": f"{tmp_path / name}/rows.json"}

    write_json(tmp_path / "out/rows.json", [{"query": "Say: ", "target": "Hi"}])
    prompts = "prompt_templates=$ROOT/configs/prompts/taboo.json"
    before = start(prompts, **inside("out"))
    assert before["imitation.train_data_path"] == "$OUTPUT/rows.json"
    assert before["prompt_templates"] == "$ROOT/configs/prompts/taboo.json"
    write_json(tmp_path / "out/imitation/model/train_results.json", {})
    (tmp_path / "out").rename(tmp_path / "moved")
    shutil.copytree(ROOT / "configs/prompts", tmp_path / "clone/configs/prompts")
    shutil.copy(ROOT / "configs/default.toml", tmp_path / "clone/configs")
    monkeypatch.setattr(settings, "ROOT", tmp_path / "clone")
    after = start(prompts, **inside("moved"))
    assert {**after, "output": before["output"]} == before


def test_one_loop_has_the_lock_and_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def has_no_locks(number, how):
        raise OSError(errno.ENOTSUP, "not supported")

    assert hold_lock(tmp_path) is not None
    with pytest.raises(UserError, match="another loop is running here"):
        hold_lock(tmp_path)
    monkeypatch.setattr(fcntl, "flock", has_no_locks)
    assert hold_lock(tmp_path / "other") is None and "has no locks" in caplog.text


def test_the_papers_values_have_a_meaning_each():
    """Names that say it themselves aside."""
    lines = [line for line in DEFAULTS.read_text().splitlines() if " = " in line and not line.startswith("#")]
    plain = ("padding_side", "lr_scheduler_type", "weight_decay", "train_method", "logging_steps")
    assert [line for line in lines if "#" not in line and not line.startswith(plain)] == []
    assert read_file(DEFAULTS)["play.temperature"] == "1.2" and read_file(DEFAULTS)["training.lm_kl_coeff"] == "0.2"
