"""Players behind an OpenAI-compatible server, as the command line names and sets them up: `openai:MODEL`.

The players themselves are in tools/players/server.py, which needs the package openai; nothing here does.
"""

import argparse
import importlib.util
import os
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from utils import parse_bool

PREFIX = "openai:"
COMPLETIONS, CHAT = "completions", "chat"
KEY_VARIABLE, URL_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
INSTALL = 'pip install "openai>=3.54,<4"'
FOR_SERVERS_ONLY = ("openai_base_url", "max_total_tokens", "price_in", "price_out", "dry_run")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Declare how players openai:MODEL are reached, asked and paid."""
    add = parser.add_argument
    add("--openai_api", choices=(COMPLETIONS, CHAT), default=COMPLETIONS, help="endpoint of players openai:MODEL")
    add(
        "--openai_base_url",
        nargs="+",
        metavar="URL",
        help=f"of the servers, such as http://host:8000/v1; the games are dealt out to them; {URL_VARIABLE} if unset",
    )
    add(
        "--openai_extra_sampling",
        type=parse_bool,
        default=False,
        help="True: send --top_k and --min_new_tokens too; vLLM and SGLang know them, OpenAI refuses them",
    )
    add("--openai_retries", type=int, default=10, help="how often a reply is asked for again after a fault")
    add("--openai_timeout", type=float, default=600, help="seconds to wait for a reply before asking again")
    add("--max_concurrency", type=int, default=64, help="requests in flight, to all servers; of each process")
    add("--max_total_tokens", type=int, help="begin no game that would probably bring the servers' tokens above this")
    add("--price_in", type=float, help="of a million prompt tokens, for the cost estimate")
    add("--price_out", type=float, help="of a million completion tokens")
    add(
        "--dry_run",
        nargs="?",
        type=parse_bool,
        const=True,
        default=False,
        help="only say how many calls and tokens the games will take, and what they cost",
    )


def server_flag_problems(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """What is wrong with the flags of `add_server_flags` and these names of players, a phrase each."""
    servers = [name for name in names if is_server(name)]
    if not servers:
        given = [f"--{flag}" for flag in FOR_SERVERS_ONLY if vars(args)[flag] not in (None, False)]
        return [f"{', '.join(given)}: only for players {PREFIX}MODEL, and there is none"] if given else []
    problems = [f"{name!r} names no model; expected {PREFIX}MODEL" for name in servers if not model_of(name)]
    problems += _numbers_out_of_range(args)
    if args.chat_template:
        problems.append("--chat_template True is for model folders; servers have their own with --openai_api chat")
    if (args.price_in is None) != (args.price_out is None):
        problems.append("--price_in and --price_out go together")
    if args.min_new_tokens and not args.openai_extra_sampling:
        problems.append("--min_new_tokens is for servers that know min_tokens: --openai_extra_sampling True sends it")
    problems += [problem for url in base_urls(args) if (problem := _url_problem(url))]
    if not args.dry_run:
        if not base_urls(args) and not os.environ.get(KEY_VARIABLE):
            problems.append(f"{PREFIX}MODEL needs {KEY_VARIABLE} for OpenAI itself, or --openai_base_url of a server")
        if importlib.util.find_spec("openai") is None:
            problems.append(f"{PREFIX}MODEL needs a package: {INSTALL}")
    return problems


def _url_problem(url: str) -> str | None:
    parts = urlsplit(url)
    if "@" in parts.netloc:  # what stands before it is not shown
        return f"a base URL holds a user or a password; a key is taken from {KEY_VARIABLE} only"
    if parts.scheme not in ("http", "https") or not re.fullmatch(
        r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?", parts.netloc
    ):
        return f"{url!r} is no base URL; expected something like http://host:8000/v1"
    return None


def _numbers_out_of_range(args: argparse.Namespace) -> list[str]:
    least = {"openai_retries": 0, "max_concurrency": 1, "max_total_tokens": 1, "price_in": 0, "price_out": 0}
    values = vars(args)
    problems = [
        f"--{name} is {values[name]}; it must be at least {minimum}"
        for name, minimum in least.items()
        if values[name] is not None and not values[name] >= minimum
    ]
    if not args.openai_timeout > 0:
        problems.append(f"--openai_timeout is {args.openai_timeout}; it must be above 0")
    return problems


def is_server(name: str) -> bool:
    """Whether a player's name asks for a server."""
    return name.startswith(PREFIX)


def model_of(name: str) -> str:
    """What the server calls the model of a player."""
    return name.removeprefix(PREFIX)


def base_urls(args: argparse.Namespace) -> list[str]:
    """Of the servers; empty: OpenAI's own."""
    return args.openai_base_url or os.environ.get(URL_VARIABLE, "").split()


def server_setting(name: str, args: argparse.Namespace) -> dict:
    """A player as `EpisodeFiles` compares it: servers may move, and their key is nobody's business."""
    return {"path": name, "api": args.openai_api, "extra_sampling": args.openai_extra_sampling}
