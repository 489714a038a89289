"""The flags of play that every program has that plays: declared, checked, and turned into settings."""

import argparse
import hashlib
import math

import torch

from tools.games import taboo
from tools.players.player import SAMPLING, TESTING
from utils import parse_bool, warn_once

AUTO, SLOTS, GENERATE = "auto", "slots", "generate"


def add_game_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what games depend on besides players, words and seed: the flags of `game_rules`."""
    add = parser.add_argument
    add("--task_type", choices=(SAMPLING, TESTING), default=SAMPLING, help="draw tokens, or take the likeliest")
    add("--taboo_max_turns", type=int, default=5, help="turns of a game; a turn is a message of each player")
    add("--match", choices=taboo.MATCHES, default=taboo.SUBSTRING, help="find the target word inside others, or not")
    add("--prompt_templates", default=str(taboo.DEFAULT_TEMPLATES), help="file of prompts")
    add("--chat_template", type=parse_bool, default=False, help="True: prompts by the tokenizers' own chat templates")
    add("--max_length", type=int, default=2048, help="tokens of prompt and reply; longer prompts lose their beginning")
    add("--max_new_tokens", type=int, default=256, help="tokens of a reply at most")
    add("--min_new_tokens", type=int, default=0, help="tokens of a reply at least")
    add("--temperature", type=float, default=1.2, help="of sampling")
    add("--top_k", type=int, default=50, help="sample from the likeliest so many tokens; 0: from all")
    add("--top_p", type=float, default=1.0, help="sample from the likeliest tokens of this total probability")
    add("--bf16", type=parse_bool, default=False, help="True: bfloat16 instead of the type in the model's config")
    add("--fp16", type=parse_bool, default=False, help="True: float16 instead of the type in the model's config")


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Declare how games are played on this machine and what is shown of them."""
    add = parser.add_argument
    add(
        "--engine",
        choices=(AUTO, SLOTS, GENERATE),
        default=AUTO,
        help="slots: keys and values of a game are kept, and replies do not wait for each other; generate: whole "
        "batches by plain generate; auto: slots wherever the model's attention allows",
    )
    add("--per_device_eval_batch_size", type=int, help="prompts answered at once; chosen from memory if unset")
    add("--concurrent_games", type=int, help="games alive at once; a batch for each model if unset")
    add("--tf32", type=parse_bool, default=False, help="True: TF32 for float32 products, on GPUs that have it")
    add("--device_map", help="auto: spread each model over all GPUs, with one process per machine")
    add("--trust_remote_code", type=parse_bool, default=False, help="True: run code that comes with a model")
    add("--logging_steps", type=int, default=10, help="show and log a game every so many batches; 0: none")


def flag_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the flags of `add_game_flags` and `add_machine_flags`, a phrase each."""
    problems = too_small(args, taboo_max_turns=1, max_new_tokens=1, min_new_tokens=0, top_k=0, logging_steps=0)
    problems += too_small(args, per_device_eval_batch_size=1, concurrent_games=1)
    if args.max_length <= args.max_new_tokens:
        problems.append(
            f"--max_length {args.max_length} leaves no room for a prompt: it must be larger than "
            f"--max_new_tokens {args.max_new_tokens}"
        )
    if args.min_new_tokens > args.max_new_tokens:
        problems.append(f"--min_new_tokens {args.min_new_tokens} is above --max_new_tokens {args.max_new_tokens}")
    if not 0 < args.temperature < math.inf:
        problems.append(f"--temperature is {args.temperature}; it must be above 0 (--task_type {TESTING} is greedy)")
    if not 0 < args.top_p <= 1:
        problems.append(f"--top_p is {args.top_p}; it must be above 0 and at most 1")
    if args.bf16 and args.fp16:
        problems.append("--bf16 and --fp16 exclude each other")
    return problems


def too_small(args: argparse.Namespace, **least: int) -> list[str]:
    """One phrase for each of these flags that is set to less than its least value."""
    values = vars(args)
    return [
        f"--{name} is {values[name]}; it must be at least {minimum}"
        for name, minimum in least.items()
        if values[name] is not None and values[name] < minimum
    ]


def words_setting(path: str, words: list[str]) -> dict[str, str]:
    """A word list as `EpisodeFiles` compares it."""
    return {"path": path, "sha256": hashlib.sha256("\n".join(words).encode()).hexdigest()}


def game_rules(args: argparse.Namespace, templates: taboo.Templates) -> dict:
    """The settings of `add_game_flags`; of the prompts, what they say."""
    names = ("task_type", "taboo_max_turns", "match", "max_length", "max_new_tokens", "min_new_tokens")
    names += ("temperature", "top_k", "top_p", "bf16", "fp16")
    prompts = {"path": args.prompt_templates, "sha256": taboo.templates_digest(templates)}
    # Not named when it is off: runs that were begun before there was such a flag go on.
    chat = {"chat_template": True} if args.chat_template else {}
    return {"prompt_templates": prompts, **{name: getattr(args, name) for name in names}, **chat}


def set_precision(args: argparse.Namespace) -> None:
    """Use TF32 for float32 products if the flags say so."""
    if args.tf32 and not torch.cuda.is_available():
        warn_once("--tf32 True has no effect: there is no GPU")
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
