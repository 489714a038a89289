"""Players behind an OpenAI-compatible server, as the command line names and sets them up: `openai:MODEL`.

The players themselves are in tools/players/server.py, which needs the package openai; nothing here does.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from tools.flags import flag
from utils import too_small

PREFIX = "openai:"
COMPLETIONS, CHAT = "completions", "chat"
KEY_VARIABLE, URL_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
INSTALL = 'pip install "openai>=3.54,<4"'
NEEDS_IDS = "is for model folders; servers have their own with --openai_api chat, or take it with --openai_tokenizer"
NEEDS_EXTRA = "is for servers that know min_tokens: --openai_extra_sampling True sends it"
NO_KEY = "holds a blank, a line end or a character that is not ASCII: set it again"
FOR_SERVERS_ONLY = ("openai_base_url", "openai_tokenizer", "max_total_tokens", "price_in", "price_out", "dry_run")


@dataclass(kw_only=True)
class ServerFlags:
    """How players openai:MODEL are reached, asked and paid."""

    openai_api: str = flag("endpoint of players openai:MODEL", default=COMPLETIONS, choices=(COMPLETIONS, CHAT))
    openai_base_url: list[str] = flag(
        f"of each server, such as http://host:8000/v1; unset: {URL_VARIABLE}, else OpenAI's", default=[], metavar="URL"
    )
    openai_extra_sampling: bool = flag(
        "True: send --top_k and --min_new_tokens too; vLLM and SGLang know them, OpenAI refuses them", default=False
    )
    openai_tokenizer: str | None = flag(
        "for vLLM and SGLang: send prompts as token ids of this model's tokenizer, cut and ended as in local play",
        default=None,
        metavar="MODEL",
    )
    openai_retries: int = flag("how often a reply is asked for again after a fault", default=10)
    openai_timeout: float = flag("seconds that a request may take before it is asked again", default=600)
    max_concurrency: int = flag("requests in flight, to all servers; of each process", default=64)
    max_total_tokens: int | None = flag("begin no game that would probably bring the tokens above it", default=None)
    price_in: float | None = flag("of a million prompt tokens, for the cost estimate", default=None)
    price_out: float | None = flag("of a million completion tokens", default=None)
    dry_run: bool = flag("only say what the games will take and cost", default=False, nargs="?", const=True)

    def server_problems(self, names: Sequence[str], *, chat_template: bool, min_new_tokens: int) -> list[str]:
        """What is wrong with these flags for players of these names, a phrase each."""
        servers = [name for name in names if is_server(name)]
        if not servers:
            given = [f"--{name}" for name in FOR_SERVERS_ONLY if getattr(self, name)]
            return [f"{', '.join(given)}: only for players {PREFIX}MODEL, and there is none"] if given else []
        problems = [f"{name!r} names no model; expected {PREFIX}MODEL" for name in servers if not model_of(name)]
        problems += too_small(self, openai_retries=0, max_concurrency=1, max_total_tokens=1, price_in=0, price_out=0)
        problems += filter(None, map(_url_problem, self.base_urls()))
        ids, key = self.openai_tokenizer, os.environ.get(KEY_VARIABLE, "")
        reachable = self.dry_run or self.base_urls() or key
        wrong = [
            (not self.openai_timeout > 0, f"--openai_timeout is {self.openai_timeout}; it must be above 0"),
            (ids and self.openai_api == CHAT, f"--openai_tokenizer sends token ids: not to --openai_api {CHAT}"),
            (chat_template and not ids, f"--chat_template True {NEEDS_IDS}"),
            ((self.price_in is None) != (self.price_out is None), "--price_in and --price_out go together"),
            (min_new_tokens and not (ids or self.openai_extra_sampling), f"--min_new_tokens {NEEDS_EXTRA}"),
            (not re.fullmatch("[!-~]*", key), f"{KEY_VARIABLE} {NO_KEY}"),
            (not reachable, f"{PREFIX}MODEL needs {KEY_VARIABLE} for OpenAI itself, or --openai_base_url of a server"),
            (not self.dry_run and not find_spec("openai"), f"{PREFIX}MODEL needs a package: {INSTALL}"),
        ]
        return problems + [phrase for holds, phrase in wrong if holds]

    def base_urls(self) -> list[str]:
        """Of the servers; empty: OpenAI's own."""
        return self.openai_base_url or os.environ.get(URL_VARIABLE, "").split()

    def server_setting(self, name: str) -> dict:
        """A player as runs are compared by it: servers may move, and their key is nobody's business."""
        setting = {"path": name, "api": self.openai_api, "extra_sampling": self.openai_extra_sampling}
        return setting | ({"tokenizer": self.openai_tokenizer} if self.openai_tokenizer else {})


def _url_problem(url: str) -> str | None:
    if "@" in url:  # what stands before it is not shown
        return f"a base URL holds a user or a password; a key is taken from {KEY_VARIABLE} only"
    if not re.fullmatch(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/\S*)?", url):
        return f"{url!r} is no base URL; expected something like http://host:8000/v1"
    return None


def is_server(name: str) -> bool:
    return name.startswith(PREFIX)


def model_of(name: str) -> str:
    return name.removeprefix(PREFIX)
