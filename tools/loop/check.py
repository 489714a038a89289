"""Checks before the first stage: files, words, prompts, stages' flags, and what `auto` means on this machine.

A child process queries the GPUs and builds the arguments of both trainings, because a process that has touched a GPU
holds some of its memory and passes what torch and DeepSpeed set in the environment on to its children.
"""

import dataclasses
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tools.common.errors import UserError, require, user_errors
from tools.common.files import ROOT, data_folder, read_json, read_records, read_words
from tools.common.flags import parse_flags
from tools.common.models import load_tokenizer, model_folder, special_texts
from tools.common.ranks import check_gpus
from tools.common.records import files_setting, rows_record
from tools.common.rowformats import read_row
from tools.controls import CONTROLS, Draw
from tools.games import prompts
from tools.games.flags import GameChoice
from tools.games.game import Game
from tools.loop.settings import NONE, OWN, TABLES, TRAININGS, Loop, is_finished, nearest, parser_of, words_of_epoch

ROWS = ("train_data_path", "eval_data_path", "sft_data_path")  # may name data sets of the hub
RELEASED = "data/released_prompts.json"
MAKE_RELEASED = f", made by python -m tools.prepare_data prompts --release data/released_utils.py --output {RELEASED}"
logger = logging.getLogger(__name__)


# Settings, files and rows.


def check_inputs(loop: Loop) -> list[str]:
    """Check what no program checks at its own start. Returns an epoch's words in the order of their games."""
    play = {stage: loop.of(stage) for stage in TABLES}["play"]  # parse all tables first
    check_limits(loop)
    if errors := [*missing_files(loop), *missing_packages(loop)]:
        raise UserError("; ".join(errors))
    game = GameChoice(game=play.game, game_options=play.game_options).load_game()
    check_rows(loop, game)
    check_control(loop)
    check_sft_rows(loop.first_player, loop.of("rewards").sft_data_path, play.trust_remote_code)
    check_layout(loop, game)
    for _, path in loop.of("match").words or ():
        read_words(path, game.check_task)
    return words_of_epoch(loop, game.check_task)


def check_limits(loop: Loop) -> None:
    if loop.seed + loop.epochs >= 2**32:  # numpy takes no larger seed
        raise UserError(f"seed={loop.seed}: seed + epochs, the last epoch's seed, must be below {2**32}")
    if loop.machines > 1 and loop.rendezvous == OWN["rendezvous"].default:
        raise UserError(f"machines={loop.machines} needs rendezvous=HOST:PORT, the address of machine 0")
    if loop.machine >= loop.machines:
        raise UserError(f"machine={loop.machine}: machines={loop.machines}, and the first is machine 0")


def missing_files(loop: Loop) -> Iterator[str]:
    """A phrase for each missing input file of any stage, even one that would start hours later."""
    paths = [loop.words, loop.first_episodes, None if loop.deepspeed == NONE else loop.deepspeed]
    # Any other name may be on the hub, even if it looks like a path.
    paths += [name for name in (loop.model, loop.imitation_model) if name and name.startswith(("/", "."))]
    rows = []
    for stage, table in TABLES.items():
        if stage == "imitation" and loop.imitation_model:
            continue
        for name in table.inputs:
            value = getattr(loop.of(stage), name)
            named = value if isinstance(value, list) else [value]
            (rows if name in ROWS else paths).extend(each[-1] if isinstance(each, tuple) else each for each in named)
    for path in dict.fromkeys(path for path in paths if path and not os.path.exists(path)):
        yield f"{path}: no such file{MAKE_RELEASED if RELEASED in path else ''}"
    for path in dict.fromkeys(path for path in rows if path and not os.path.exists(path)):
        try:
            data_folder(path)
        except UserError as error:
            yield str(error)


def missing_packages(loop: Loop) -> Iterator[str]:
    # `lm_eval` names the harness's command, which may be installed in another environment.
    if "tasks" in loop.tables["reasoning"] and "lm_eval" not in loop.tables["reasoning"]:
        try:
            require("lm_eval", "lm-eval==0.4.13")
        except UserError as error:
            yield str(error)


def check_rows(loop: Loop, game: Game) -> None:
    """UserError for rows that training would refuse, and for games in which belief is undefined."""
    rewards, training = loop.of("rewards"), loop.of("training")
    negative = rewards.losers or rewards.ties
    if negative and not training.detach_kl and not training.allow_negative_rewards:
        raise UserError("[rewards] losers and ties give negative rewards, which need training.detach_kl=True")
    if "games" in loop.tables["belief"]:
        if game.answer(game.example_task) is None:
            raise UserError(f"[belief] {game.title} has no message that names a secret; unset belief.games")
        if loop.of("play").thinking:
            raise UserError("[belief] does not support thinking; unset belief.games or thinking")


def check_control(loop: Loop) -> None:
    """UserError for a control whose rows the settings do not provide."""
    rewards = loop.of("rewards")
    if loop.control == "cloning" and (rewards.losers or rewards.ties):
        raise UserError("control=cloning imitates winners; unset rewards.losers and rewards.ties")
    if not loop.plays_games and not loop.like:
        raise UserError(f"control={loop.control} needs like=DIR, the run whose rows it uses")


def check_sft_rows(model: str, path: str | None, trust_remote_code: bool) -> None:
    """UserError for unreadable SFT rows and for `messages` without a chat template, before hours of play.

    Rows that a template rejects are found only in training.
    """
    rows = read_records(path, read_row) if path else []
    if not any("messages" in row for row in rows):
        return
    if not load_tokenizer(model, trust_remote_code=trust_remote_code).chat_template:
        raise UserError(f"{path}: messages need a chat template, which the tokenizer of {model} lacks")


def check_layout(loop: Loop, game: Game) -> None:
    """UserError if imitation rows and play differ in prompts or chat template.

    The model would meet prompts in play that it has not learned to answer. A record beside the rows names their
    layout. Rows of games without a record must contain one of play's rule texts, unless imitation has finished.
    """
    play = loop.of("play")
    prompt_file = play.prompt_templates or game.prompt_file
    templates = prompts.load_templates(prompt_file, game)
    runs_code = all(loop.of(stage).trust_remote_code for stage in ("play", "rewards"))
    tokenizer = load_tokenizer(loop.first_player, trust_remote_code=runs_code)
    prompts.check_special_texts(game, templates, special_texts(tokenizer))
    chat = template_digest(tokenizer, loop.first_player, play.thinking) if play.chat_template else None
    if loop.imitation_model:  # its training rows are unknown
        return
    foreign = []  # rows without a layout: other people's, or made by tools/controls.py
    for path in loop.of("imitation").train_data_path or ():
        record = rows_record(path)
        made = read_json(record)["settings"] if record.is_file() else {}
        if "prompt_templates" not in made:
            foreign.append(path)
            continue
        of_play = (chat, play.thinking, files_setting(prompt_file)["sha256"])
        if (made["chat_template"], bool(made.get("thinking")), made["prompt_templates"]["sha256"]) != of_play:
            how = f"chat template, thinking or prompts differ from play's ({loop.model}, {prompt_file})"
            raise UserError(f"{path}: {how}")
    if foreign and not is_finished(Path(loop.output, "imitation", "model")):
        check_rules(foreign, templates, prompt_file)


def check_rules(paths: Iterable[str], templates: prompts.Templates, prompt_file: str | Path) -> None:
    """UserError for rows of games that contain none of play's rule texts; a warning for rows without games."""
    rows = bare([read_records(path) for path in paths])
    # The first prompt of every game contains this text, in the authors' rows too.
    if bare(prompts.NO_HISTORY) not in rows:
        logger.warning("%s: no record says how these rows were made; check that their prompts are play's", paths)
        return
    for rule in templates[prompts.RULES]:
        if all(bare(part) in rows for part in prompts.SLOT.split(rule)[::2]):
            return
    remedy = f"set prompt_templates={RELEASED}{MAKE_RELEASED}; otherwise make rows with tools/assign_rewards.py"
    rules = f"these games contain none of play's rule texts ({prompt_file})"
    raise UserError(f"{' '.join(paths)}: {rules}; for the authors' rows {remedy}")


def template_digest(tokenizer, model: str, thinking: bool) -> str:
    """A chat template's digest, as recorded with rows. UserError if play or rows cannot use the template."""
    from tools.games.chat import ChatTemplate  # imports transformers

    return ChatTemplate(tokenizer, model, thinking).sha256


def bare(value) -> str:
    """A string or list as JSON without whitespace and without its outer quotes or brackets.

    A bare rule text is a substring of bare rows that contain it, because JSON escapes both in the same way and
    differences in whitespace vanish.
    """
    text = json.dumps(value, ensure_ascii=False).replace("\\n", " ")
    return "".join(text.split())[1:-1]


# The machine, in the child.


def ask(loop: Loop, plan: Callable[[Loop], Iterable]) -> dict:
    """What `auto` means on this machine. UserError for a command of the plan that its program would refuse.

    Forking is safe because this process has not touched a GPU, and fast because it has imported transformers.
    """
    forked = multiprocessing.get_context("fork")
    # Ctrl-C just ends the child.
    with ProcessPoolExecutor(1, forked, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as child:
        return child.submit(_answer_and_check, loop, plan).result()


def _answer_and_check(loop: Loop, plan: Callable[[Loop], Iterable]) -> dict:
    became = answer(loop)
    loop = dataclasses.replace(loop, **became)
    check_commands(loop, plan(loop))
    return became


def answer(loop: Loop) -> dict:
    """Values for `auto` settings. UserError for GPUs that are unusable, too few, or too small for a match."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus and not torch.cuda.is_available():
        raise UserError("PyTorch cannot use the GPUs; is the driver too old? CUDA_VISIBLE_DEVICES= hides them")
    # GPUs before Ampere and most CPUs emulate bf16, which is slow.
    if gpus:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = torch.cpu._is_avx512_bf16_supported()
    chosen = {
        "processes": gpus or 1,
        "precision": "bf16" if has_bf16 else "fp16" if gpus else "fp32",
        "gradient_checkpointing": gpus > 0,
        "deepspeed": NONE,
    }
    chosen |= {name: getattr(loop, name) for name in chosen if getattr(loop, name) is not None}
    if gpus:
        check_gpus(gpus, processes=chosen["processes"])
        memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
        if loop.deepspeed is None:
            chosen["deepspeed"] = choose_deepspeed(loop, chosen["processes"] * loop.machines, memory)
        if "words" in loop.tables["match"]:
            check_match(loop, chosen["precision"], memory)
    return chosen


def choose_deepspeed(loop: Loop, gpus: int, memory: int) -> str:
    """The first strategy that fits GPUs with `memory` bytes: none, ZeRO-2, ZeRO-3, or offload to the CPU.

    Estimated in bytes per parameter, not measured on a GPU: weights, gradients and Adam in fp32, and half-precision
    copies. If all trainings use LoRA: frozen half-precision weights, and adapters with 1% of the parameters; then
    ZeRO-2 would not help, because it shards only the state of trained parameters. A separate reference model and
    activations are not counted.
    """
    # 18 = 4 weights + 4 gradients + 8 Adam + 2 copies. DDP's buckets add 4 bytes of gradients: 22. ZeRO-2 shards 16
    # (fp32 gradients, weights and Adam) and keeps 4 (half-precision weights and gradients). ZeRO-3 shards all 20.
    ways = {NONE: 18 if gpus == 1 else 22, "configs/zero2.json": 4 + 16 / gpus, "configs/zero3.json": 20 / gpus}
    if all("lora_rank" in loop.tables[stage] for stage in (TRAININGS if loop.imitates else ["training"])):
        ways = {NONE: 2.2, "configs/zero3.json": 2.2 / gpus}
    parameters = count_parameters(loop.model)
    for way, bytes_of_one in ways.items():
        if bytes_of_one * parameters <= 0.85 * memory:  # the rest is for activations
            return way if way == NONE else str(ROOT / way)
    return str(ROOT / "configs/default_offload_opt_param.json")


def check_match(loop: Loop, precision: str, memory: int) -> None:
    """UserError if two models do not fit together on the GPUs of one process."""
    models = 2 * count_parameters(loop.model) * (4 if precision == "fp32" else 2)  # bytes of weights
    room = 0.9 * loop.of("match").tensor_parallel_size * memory  # vLLM's share of a GPU
    if models > room:
        sizes = f"{models / 2**30:.0f} GiB, but only {room / 2**30:.0f} GiB are available"
        raise UserError(f"match.words: the two models of a match need {sizes}; match.words= skips matches")


def count_parameters(model: str) -> float:
    """A model's parameter count, from the size of its safetensors."""
    folder = model_folder(model)
    config = read_json(folder / "config.json")
    bytes_of_one = 4 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors")) / bytes_of_one


def check_training(loop: Loop, stage: str, argv: list[str], *, layers: bool) -> None:
    """Build a training's arguments as train.py will. UserError for what train.py would refuse.

    With `layers`, also find LoRA's layers in the model. A DeepSpeed file is not checked, because its numbers depend on
    the launch.
    """
    import arguments

    with user_errors(f"[{stage}]", UserError):
        given = arguments.build_parser().parse_args(argv)
        arguments.check_flags(given)
        args = arguments.SPAGArguments(**vars(given) | {"deepspeed": None})
        if args.eval_data_path:
            for path in args.eval_data_path:
                read_records(path, read_row)
        if layers and (args.lora_rank or args.attn_implementation):
            from tools.common.adapters import check_model  # imports torch

            check_model(loop.model if stage == "imitation" else loop.first_player, args)


def check_commands(loop: Loop, plan: Iterable) -> None:
    """Parse every command with its program's parser, hours before it may run. UserError also for a wrong `until`."""
    seen = set()
    names = []
    controls = CONTROLS | {"draw": Draw}
    for step in plan:
        names.append(step.name)
        if step.program == "tools/controls.py":
            with user_errors(f"control={step.argv[0]}", UserError):
                parse_flags(controls[step.argv[0]], step.argv[1:], description="")
        elif step.stage is None:
            continue
        elif flags := TABLES[step.stage].flags:
            with user_errors(f"[{step.stage}]", UserError):
                flags(**vars(parser_of(step.stage).parse_args(step.argv)))
        else:
            check_training(loop, step.stage, step.argv, layers=step.stage not in seen)
        seen.add(step.stage)
    if loop.until and loop.until not in names:
        raise UserError(f"until={loop.until}: no such stage{nearest(loop.until, names)} (epochs={loop.epochs})")
