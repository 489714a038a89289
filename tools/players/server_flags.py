"""The flags of players `openai:MODEL`, whose model is behind an OpenAI-compatible server. No openai."""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.flags import flag
from utils import too_small

SERVER = "openai:"  # begins the name of a player behind a server
COMPLETIONS, CHAT = "completions", "chat"
KEY_VARIABLE, URL_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
INSTALL = 'pip install "openai>=3.54,<4"'


@dataclass(kw_only=True)
class ServerFlags:
    """The flags of players openai:MODEL."""

    openai_api: str = flag("endpoint of players openai:MODEL", default=COMPLETIONS, choices=(COMPLETIONS, CHAT))
    openai_base_url: str | None = flag(
        f"the server, such as http://host:8000/v1; unset: {URL_VARIABLE}, else OpenAI's own",
        default=None,
        metavar="URL",
    )
    openai_extra_sampling: bool = flag(
        "True: send --top_k and --min_new_tokens too; vLLM and SGLang know them, OpenAI refuses them", default=False
    )
    openai_tokenizer: str | None = flag(
        "for vLLM and SGLang: send prompts as token ids of this model's tokenizer, cut and ended as in local play",
        default=None,
        metavar="MODEL",
    )
    openai_retries: int = flag("how many times a failed request is repeated", default=10)
    openai_timeout: float = flag("seconds without an answer after which a request has failed", default=600)
    max_concurrency: int = flag("requests of each process to the server at once", default=64)
    max_total_tokens: int | None = flag("begin no game once the server has counted this many tokens", default=None)

    def server_problems(self, names: Sequence[str], *, chat_template: bool, min_new_tokens: int) -> list[str]:
        """The problems of these flags for players of these names, a phrase each."""
        if not any(map(is_server, names)):
            return []
        problems = too_small(self, openai_retries=0, max_concurrency=1, max_total_tokens=1)
        url = self.openai_base_url or os.environ.get(URL_VARIABLE, "")
        ids, key = self.openai_tokenizer, os.environ.get(KEY_VARIABLE, "")
        if importlib.util.find_spec("openai") is None:
            problems.append(f"{SERVER}MODEL needs a package: {INSTALL}")
        if ids and self.openai_api == CHAT:
            problems.append(f"--openai_tokenizer sends token ids, which --openai_api {CHAT} does not take")
        if chat_template and not ids:
            problems.append(f"--chat_template True needs --openai_tokenizer; or use --openai_api {CHAT}")
        if min_new_tokens and not (ids or self.openai_extra_sampling):
            problems.append("--min_new_tokens needs a server that knows min_tokens, and --openai_extra_sampling True")
        if url and not re.fullmatch(r"https?://[^\s@/]+(/\S*)?", url):  # not shown: it may hold a password
            problems.append("--openai_base_url must look like http://host:8000/v1, without user and password")
        if not re.fullmatch("[!-~]*", key):
            problems.append(f"{KEY_VARIABLE} holds a blank, a line end or a character that is not ASCII: set it again")
        if not (url or key):
            problems.append(f"{SERVER}MODEL needs {KEY_VARIABLE} for OpenAI itself, or --openai_base_url of a server")
        return problems

    def server_setting(self, name: str) -> dict:
        """What the settings file of a run says of a player. The server's URL is not part of it, so it may change."""
        setting = {"path": name, "api": self.openai_api, "extra_sampling": self.openai_extra_sampling}
        return setting | ({"tokenizer": self.openai_tokenizer} if self.openai_tokenizer else {})


@dataclass
class ServerUse:
    """What this process has used of servers since it started."""

    tokens: int = 0
    limit: float = math.inf  # no game begins once so many tokens are used
    answered: bool = False  # whether any request has succeeded

    @property
    def used_up(self) -> bool:
        return self.tokens >= self.limit


def is_server(name: str) -> bool:
    """Whether a player is a model behind a server."""
    return name.startswith(SERVER)
