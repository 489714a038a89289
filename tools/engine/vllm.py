"""vLLM servers that this process starts and ends: `--engine vllm`.

vLLM pins other versions of most packages, so it has an environment of its own. This program starts vLLM's executable
and talks to it over HTTP on loopback. A program with `VLLMFlags` among its flags calls

    with flags.vllm_server(folder, max_length=2048, dtype="float32") as server:
        ...  # it answers at server.url (.../v1) to server.key (Authorization: Bearer KEY) and the model server.model
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.engine import supervise
from tools.flags import flag
from tools.players.player import PlayerUnusable
from tools.players.server import INSTALL
from utils import UserError, plain_environment, shown, too_small

AUTO, VLLM = "auto", "vllm"  # values of --engine
HOST = "127.0.0.1"
VARIABLE = "VLLM"  # the environment variable that names vLLM's executable; unset: vllm on the PATH
MEMORY_SHARE = 0.9  # of a GPU's memory is for the vLLM servers on it
LOOK_EVERY = 0.5  # seconds between two attempts to reach a server that is starting
SHOWN_LINES = 40  # lines of a server's output that are shown when it has ended
CPU_TOKENS = 4096  # tokens that a server without GPUs computes at once
OURS = ("--host", "--port", "--api-key", "--served-model-name")  # flags of the server that only this program may set
# Beginnings of variables that the server does not get. (The loop sets PyTorch's allocator to expandable segments, with
# which vLLM's own all-reduce over several GPUs fails.)
HIDDEN = ("TORCHELASTIC_", "PYTHONPATH", "PYTHONHOME", "OPENAI_API_KEY", "PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC")
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class VLLMFlags:
    """The flags of `--engine vllm`."""

    tensor_parallel_size: int = flag("GPUs of each vLLM server; start (GPUs / this number) processes", default=1)
    vllm_args: str = flag("more flags of `vllm serve`: --vllm_args='--enforce-eager --kv-cache-dtype fp8'", default="")

    def vllm_problems(self, engine: str) -> list[str]:
        """The problems of these flags, a phrase each."""
        if engine not in (AUTO, VLLM):
            unset = vars(VLLMFlags())
            given = [f"--{name}" for name, value in unset.items() if getattr(self, name) != value]
            return [f"{', '.join(given)}: only for --engine {VLLM}"] if given else []
        problems = too_small(self, tensor_parallel_size=1)
        try:
            taken = [word for word in shlex.split(self.vllm_args) if word.split("=")[0].replace("_", "-") in OURS]
            problems += [f"--vllm_args: {word} is set by this program" for word in taken]
        except ValueError as error:
            problems.append(f"--vllm_args {self.vllm_args!r} cannot be split into words ({error})")
        if engine == VLLM and (missing := self.vllm_missing()):
            problems.append(f"--engine {VLLM}: {missing}")
        return problems

    def vllm_missing(self) -> str | None:
        """Why vLLM cannot be started, or None."""
        if find_vllm() is None:
            return f"there is no {os.environ.get(VARIABLE) or 'vllm'!r} to run; set the variable {VARIABLE} to a path"
        if importlib.util.find_spec("openai") is None:
            return f"it needs a package: {INSTALL}"
        return None

    def choose_engine(self) -> str:
        """The meaning of `--engine auto`: vLLM where there are a GPU and a vLLM, else `auto`. Logs the choice."""
        import torch

        missing = "there is no GPU" if not torch.cuda.is_available() else self.vllm_missing()
        if missing:
            logger.info("--engine auto: our own engine, since vLLM cannot be used (%s)", missing)
            return AUTO
        logger.info("--engine auto: %s (%s)", VLLM, find_vllm())
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
        most replies at once (None: vLLM chooses). `models`: number of servers that share the GPUs of this process.
        Raises UserError without vLLM, and for weights that are not in .safetensors files.
        """
        if not any(folder.glob("*.safetensors")):
            raise UserError(f"{folder}: no weights in .safetensors form; convert them with save_pretrained")
        words = ["--generation-config", "vllm", "--max-model-len", str(max_length), "--dtype", dtype or _dtype(folder)]
        words += ["--max-num-seqs", str(sequences)] if sequences else []
        words += ["--trust-remote-code"] if trust_remote_code else []
        gpus = own_gpus(self.tensor_parallel_size)
        if gpus:
            words += ["--gpu-memory-utilization", f"{MEMORY_SHARE / models:.3f}"]
        else:  # on a CPU, vLLM 0.32 dies if the request has a seed and its prompt is computed in parts
            words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(max_length, CPU_TOKENS))]
        if self.tensor_parallel_size > 1:
            words += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        executable = find_vllm()
        if executable is None:
            raise UserError(f"--engine {VLLM}: {self.vllm_missing()}")
        return VLLMServer(folder, executable, [*words, *shlex.split(self.vllm_args)], gpus)


def find_vllm() -> str | None:
    """The path of vLLM's executable, or None."""
    found = shutil.which(os.environ.get(VARIABLE) or "vllm")
    return os.path.abspath(found) if found else None


def own_gpus(number: int) -> list[str]:
    """The `number` GPUs of this process, as CUDA_VISIBLE_DEVICES names them; [] on a machine without GPUs.

    Raises UserError if there are too few GPUs for all processes of this machine.
    """
    import torch

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
    """A socket that keeps a free port for a vLLM server, which can listen on it all the same.

    Without it two servers might choose the same port. Both would start, and each would get requests of the other.
    """
    reserved = socket.socket()
    reserved.bind((HOST, 0))
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    return reserved


def _dtype(folder: Path) -> str:
    """The type in a model's config. (vLLM's `auto` would compute a float32 model in half precision.)"""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        if name := part.get("dtype") or part.get("torch_dtype"):
            return name
    return "auto"


class VLLMServer:
    """`vllm serve` for one model folder, as long as the `with` block runs.

    A supervisor (supervise.py) ends the server with all its processes when this process ends, in whatever way. The
    server gets its key through the environment, so that no list of processes shows it.
    """

    def __init__(self, folder: Path, executable: str, arguments: Sequence[str], gpus: Sequence[str] = ()):
        self.folder, self.executable, self.arguments, self.gpus = folder.resolve(), executable, arguments, gpus
        self.key, self.model = secrets.token_hex(16), f"spag-{secrets.token_hex(4)}"  # unknown to other servers
        self.reserved = reserve_port()
        self.port = self.reserved.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}/v1"
        self.process: subprocess.Popen | None = None

    def __exit__(self, *_) -> None:
        self.end()

    def start(self) -> "VLLMServer":
        """Start the server and wait until it answers. Raises UserError if it ends instead."""
        try:
            self._launch()
            logger.info("%s: vLLM is starting (its output: %s)", self.folder, self.log)
            self._wait()
        except BaseException:
            self.end()
            raise
        return self

    __enter__ = start

    def check(self) -> None:
        """Raise PlayerUnusable if the server has ended."""
        if self.process.poll() is not None:
            raise PlayerUnusable(self.death)

    def end(self) -> None:
        """End the server with all its processes, which frees their GPU memory."""
        if self.process is None:
            return
        died = self.process.poll() is not None
        self.process.stdin.close()
        self.reserved.close()
        try:
            self.process.wait(timeout=3 * supervise.GRACE)
        except subprocess.TimeoutExpired:
            logger.warning("%s: processes of its vLLM cannot be ended", self.folder)
        if (self.process.returncode or 0) < 0:  # the supervisor was killed
            supervise.end_session(self.process.pid)
        if not died:
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
        started = time.monotonic()
        while self.process.poll() is None:
            if self._answers():
                logger.info("%s: vLLM answers after %.0f s", self.folder, time.monotonic() - started)
                return
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
        """How the server ended, in one line. The first use logs the last lines of its output."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        logger.error("%s: the last lines of its vLLM:\n%s", self.folder, "\n".join(map(shown, lines)))
        return f"{self.folder}: its vLLM has ended with status {self.process.returncode} (its output: {self.log})"
