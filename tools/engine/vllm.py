"""vLLM servers that this process starts, waits for and ends: `--engine vllm`.

vLLM pins other versions of most packages, so it has an environment of its own. This program starts its executable and
talks to it over HTTP on loopback. A program has `VLLMFlags` among its flags and calls

    with flags.vllm_server(folder, max_length=2048, dtype="float32") as server:
        ...  # now it answers: server.url (.../v1), server.key (Authorization: Bearer KEY), server.model (in requests)
"""

import contextlib
import functools
import http.client
import importlib.util
import json
import logging
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.engine import supervise
from tools.flags import flag
from tools.players.player import PlayerUnusable
from tools.players.server_flags import INSTALL
from utils import UserError, plain_environment, shown, too_small

AUTO, VLLM = "auto", "vllm"  # values of --engine
HOST = "127.0.0.1"
VARIABLE = "VLLM"  # the environment variable that names the executable
LOOK_EVERY, TELL_EVERY = 0.5, 30  # seconds between looks and between lines of the log, while a server starts
TAIL_LINES, SHOWN_LINES = 500, 15  # lines at the end of a server's output: searched for an error, and shown
CPU_TOKENS = 4096  # tokens that a server without GPUs computes at once
OURS = ("--host", "--port", "--api-key", "--served-model-name")  # flags of the server that only this program may set
# What the server's environment must not have, besides what plain_environment leaves out. The loop sets the allocator
# of PyTorch to expandable segments, with which vLLM's own all-reduce over several GPUs fails.
HIDDEN = ("TORCHELASTIC_", "PYTHONPATH", "PYTHONHOME", "OPENAI_API_KEY", "PYTORCH_CUDA_ALLOC_CONF")
HIDDEN += ("PYTORCH_ALLOC_CONF",)
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class VLLMFlags:
    """How vLLM servers are started."""

    vllm: str | None = flag(
        f"vLLM's executable, from its own environment; unset: the variable {VARIABLE}, else vllm on the PATH",
        default=None,
        metavar="PATH",
    )
    tensor_parallel_size: int = flag("GPUs of each vLLM server; start GPUs / this number of processes", default=1)
    vllm_memory: float = flag("share of a GPU's memory that the vLLM servers on it take", default=0.9)
    vllm_args: str = flag("more flags of `vllm serve`: --vllm_args='--enforce-eager --kv-cache-dtype fp8'", default="")

    def vllm_problems(self, engine: str) -> list[str]:
        """What is wrong with these flags, one phrase for each problem."""
        if engine not in (AUTO, VLLM):
            unset = vars(VLLMFlags())
            given = [f"--{name}" for name, value in unset.items() if getattr(self, name) != value]
            return [f"{', '.join(given)}: only for --engine {VLLM}"] if given else []
        problems = too_small(self, tensor_parallel_size=1)
        if not 0 < self.vllm_memory <= 1:
            problems.append(f"--vllm_memory is {self.vllm_memory}; it must be above 0 and at most 1")
        try:
            taken = [word for word in shlex.split(self.vllm_args) if word.split("=")[0].replace("_", "-") in OURS]
            problems += [f"--vllm_args: {word} is set by this program" for word in taken]
        except ValueError as error:
            problems.append(f"--vllm_args {self.vllm_args!r} cannot be split into words ({error})")
        if engine == VLLM and (missing := self.vllm_missing()):
            problems.append(f"--engine {VLLM}: {missing}")
        return problems

    def vllm_missing(self) -> str | None:
        """Why vLLM cannot be started; None if no reason is known."""
        if self._executable() is None:
            return f"there is no {self._name()!r} to run; name it by --vllm PATH or the variable {VARIABLE}"
        if importlib.util.find_spec("openai") is None:
            return f"it needs a package: {INSTALL}"
        return None

    def choose_engine(self, engine: str) -> str:
        """Turns `auto` into vLLM where there are a GPU and a vLLM, and logs the choice. Other engines stay."""
        if engine != AUTO:
            return engine
        missing = "there is no GPU" if not torch.cuda.is_available() else self.vllm_missing()
        if missing:
            logger.info("--engine auto: this project's own engine, without vLLM (%s)", missing)
            return AUTO
        logger.info("--engine auto: %s (%s)", VLLM, self._executable())
        return VLLM

    def vllm_server(
        self,
        folder: Path,
        *,
        max_length: int,
        dtype: str | None = None,
        sequences: int | None = None,
        models: int = 1,
        trust_remote_code: bool = False,
    ) -> "VLLMServer":
        """A server for a model folder, not yet started.

        `max_length`: tokens of prompt and reply together. `dtype` None: the one in the model's config. `sequences`:
        most replies at once (None: vLLM chooses). `models`: how many servers share the GPUs of this process.
        """
        words = ["--generation-config", "vllm", "--max-model-len", str(max_length), "--dtype", dtype or _dtype(folder)]
        words += ["--max-num-seqs", str(sequences)] if sequences else []
        words += ["--trust-remote-code"] if trust_remote_code else []
        gpus = own_gpus(self.tensor_parallel_size)
        if gpus:
            words += ["--gpu-memory-utilization", f"{self.vllm_memory / models:.3f}"]
        else:  # on a CPU, vLLM 0.32 dies when it computes the prompt of a request with a seed in parts
            words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(max_length, CPU_TOKENS))]
        if self.tensor_parallel_size > 1:
            words += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        executable = self._executable()
        if executable is None:
            raise UserError(f"--engine {VLLM}: {self.vllm_missing()}")
        return VLLMServer(folder, executable, [*words, *shlex.split(self.vllm_args)], gpus)

    def _name(self) -> str:
        return self.vllm or os.environ.get(VARIABLE) or "vllm"

    def _executable(self) -> str | None:
        found = shutil.which(self._name())
        return os.path.abspath(found) if found else None


def own_gpus(number: int) -> list[str]:
    """The `number` GPUs of this process, as CUDA_VISIBLE_DEVICES names them; none on a machine without GPUs.

    Raises UserError if there are too few for all processes of this machine.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu) for gpu in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    names = [name.strip() for name in names if name.strip()]
    if not names:
        return []
    process = int(os.environ.get("LOCAL_RANK", 0))
    own = names[process * number : (process + 1) * number]
    if len(own) < number:
        raise UserError(
            f"process {process} of this machine has no {number} GPUs of its own; there are {len(names)}: start "
            f"GPUs / --tensor_parallel_size processes"
        )
    return own


def reserve_port() -> socket.socket:
    """A socket on a free port, which no other program is then given. A server that reuses addresses can listen on it.

    (Two vLLM servers on the same port would both start, and each would get some of the other's requests.)
    """
    reserved = socket.socket()
    reserved.bind((HOST, 0))
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    return reserved


def _dtype(folder: Path) -> str:
    """The type in a model's config. (vLLM's own choice for float32 would be half precision.)"""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for place in (config, config.get("text_config") or {}):
        if name := place.get("dtype") or place.get("torch_dtype"):
            return name
    return "auto"


class VLLMServer:
    """`vllm serve` for one model folder, as long as the `with` block runs.

    A supervisor ends the server with all its processes when this process ends, however it ends. The key goes through
    the environment, so that no list of processes shows it.
    """

    def __init__(self, folder: Path, executable: str, arguments: Sequence[str], gpus: Sequence[str] = ()):
        self.folder, self.executable, self.arguments, self.gpus = folder.resolve(), executable, arguments, gpus
        self.key, self.model = secrets.token_hex(16), f"spag-{secrets.token_hex(4)}"  # no other server knows them
        self.reserved = reserve_port()
        self.port = self.reserved.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}/v1"
        self.process: subprocess.Popen | None = None

    def __exit__(self, *_) -> None:
        self.end()

    def start(self) -> "VLLMServer":
        """Start it and wait until it answers. UserError if it ends instead; its last lines are logged before."""
        logger.info("%s: vLLM is starting", self.folder)
        try:
            self._launch()
            self._wait()
        except BaseException:
            self.end()
            raise
        return self

    __enter__ = start

    def check(self) -> None:
        """PlayerUnusable if the server has ended; its last lines are logged before."""
        if self.process.poll() is not None:
            raise PlayerUnusable(self.death)

    def end(self) -> None:
        """End it with all its processes; GPU memory is free then."""
        if self.process is None:
            return
        self.process.stdin.close()
        self.reserved.close()
        try:
            self.process.wait(timeout=3 * supervise.GRACE)
        except subprocess.TimeoutExpired:
            logger.warning("%s: processes of its vLLM cannot be ended", self.folder)
        if (self.process.returncode or 0) < 0:  # the supervisor was killed
            supervise.end_session(self.process.pid)
        if "death" not in vars(self):  # then nobody was told of its output
            self.log.unlink(missing_ok=True)

    def _launch(self) -> None:
        command = [sys.executable, "-IS", supervise.__file__, self.executable, "serve", str(self.folder)]
        command += ["--served-model-name", self.model, "--host", HOST, "--port", str(self.port)]
        command += ["--uvicorn-log-level", "warning", *self.arguments]  # no line for each request
        with tempfile.NamedTemporaryFile(prefix="vllm-", suffix=".log", delete=False) as output:
            self.log = Path(output.name)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,  # torchrun kills process groups: the supervisor must outlive its rank
            )

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in plain_environment().items() if not name.startswith(HIDDEN)}
        path = f"{os.path.dirname(self.executable)}{os.pathsep}{kept.get('PATH', '')}"  # tools that compile kernels
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        return {"VLLM_NO_USAGE_STATS": "1"} | kept | gpus | {"PATH": path, "VLLM_API_KEY": self.key}

    def _wait(self) -> None:
        """Return as soon as it answers; UserError if it ends."""
        started = told = time.monotonic()
        while self.process.poll() is None:
            now = time.monotonic()
            if self._answers():
                logger.info("%s: vLLM answers after %.0f s", self.folder, now - started)
                return
            if now - told > TELL_EVERY:
                told = now
                logger.info("%s: vLLM is starting, %.0f s: %s", self.folder, now - started, "".join(self._tail()[-1:]))
            time.sleep(LOOK_EVERY)
        raise UserError(f"{self.death}; --engine slots plays without vLLM")

    def _answers(self) -> bool:
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=10)) as connection:
            try:
                connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {self.key}"})
                response = connection.getresponse()
                return response.status == 200 and self.model.encode() in response.read()
            except (OSError, http.client.HTTPException):
                return False

    @functools.cached_property
    def death(self) -> str:
        """How it ended. Logs the end of its output up to the last error, once; the file with its output is kept."""
        lines = self._tail()
        end = max((at + 1 for at, line in enumerate(lines) if "error" in line.lower()), default=len(lines))
        logger.error("%s: the last lines of its vLLM:\n%s", self.folder, "\n".join(lines[:end][-SHOWN_LINES:]))
        return f"{self.folder}: its vLLM has ended with status {self.process.returncode} (its output: {self.log})"

    def _tail(self) -> list[str]:
        """The last lines of its output, without control characters."""
        with open(self.log, encoding="utf-8", errors="replace") as output:
            lines = deque((line.rstrip("\n") for line in output if line.strip()), TAIL_LINES)
        return [shown(line) for line in lines]
