"""vLLM in this process (`--engine vllm`), and what `--engine auto` means.

vLLM gets token ids and a seed for each request, and returns token ids. On one GPU, or on CPUs, it starts no process.
With `--tensor_parallel_size` above 1 it starts a worker for each GPU, which ends with this process.
"""

import contextlib
import functools
import gc
import importlib.util
import json
import logging
import os
import shlex
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tools.flags import flag
from tools.players.player import LENGTH, STOP, Reply
from utils import LAUNCHER_VARIABLES, UserError, too_small

if TYPE_CHECKING:
    from tools.engine.model import ModelTokens  # brings torch, which the flags do without

AUTO, VLLM = "auto", "vllm"  # values of --engine
INSTALL = "pip install -r requirements.txt vllm==0.32.0"
MEMORY_SHARE = 0.9  # of a GPU's memory is for the models on it
CPU_TOKENS = 4096  # tokens that a step computes at most on a CPU, if prompts are not longer
# Variables that vLLM reads. They keep the values that the user has given them, but for the first.
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0: the engine runs in this process
VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
VARIABLES |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}  # standard output is for the program's results
# vLLM must not take this process for a rank of its own, nor its store for torchrun's. With expandable segments, which
# the loop sets for training, vLLM's all-reduce over several GPUs fails.
HIDDEN = ("TORCHELASTIC_", "PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC")
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class VLLMFlags:
    """The flags of `--engine vllm`."""

    tensor_parallel_size: int = flag("GPUs of each process with vLLM; start (GPUs / this) processes", default=1)
    vllm_args: str = flag("more flags of `vllm serve`: --vllm_args='--enforce-eager --kv-cache-dtype fp8'", default="")

    def vllm_problems(self, engine: str) -> list[str]:
        """The problems of these flags, a phrase each."""
        if engine not in (AUTO, VLLM):
            unset = vars(VLLMFlags())
            given = [f"--{name}" for name, value in unset.items() if getattr(self, name) != value]
            return [f"{', '.join(given)}: only for --engine {VLLM}"] if given else []
        problems = too_small(self, tensor_parallel_size=1)
        try:
            shlex.split(self.vllm_args)
        except ValueError as error:
            problems.append(f"--vllm_args {self.vllm_args!r} cannot be split into words ({error})")
        if engine == VLLM and not has_vllm():
            problems.append(f"--engine {VLLM} needs a package: {INSTALL}")
        return problems

    def load_vllm(
        self,
        folder: Path,
        tokens: "ModelTokens",
        *,
        dtype: str | None = None,
        sequences: int = 256,
        models: int = 1,
        trust_remote_code: bool = False,
    ) -> "VLLMEngine":
        """An engine with the model of a folder.

        `dtype` None: the one in the model's config. `sequences`: most replies at once. `models`: number of engines
        that share the GPUs of this process. Raises UserError for an unknown flag, or if vLLM cannot run the model.
        """
        if not any(folder.glob("*.safetensors")):
            raise UserError(f"{folder}: no weights in .safetensors form; convert them with save_pretrained")
        gpus, length = claim_gpus(self.tensor_parallel_size), tokens.sampling.max_length
        words = ["--model", str(folder), "--generation-config", "vllm", "--max-model-len", str(length)]
        words += ["--dtype", dtype or _dtype(folder)]
        words += ["--max-num-seqs", str(sequences), "--tensor-parallel-size", str(self.tensor_parallel_size)]
        words += ["--disable-log-stats", "--no-use-tqdm-on-load", *["--trust-remote-code"] * trust_remote_code]
        if gpus:
            words += ["--gpu-memory-utilization", f"{MEMORY_SHARE / models:.3f}"]
        else:  # on a CPU, vLLM 0.32 dies if the request has a seed and its prompt is computed in parts
            words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(length, CPU_TOKENS))]
        with without_launcher():
            return VLLMEngine(folder, [*words, *shlex.split(self.vllm_args)], tokens)


def has_vllm() -> bool:
    """Whether the package vllm is installed."""
    return importlib.util.find_spec("vllm") is not None


def choose_engine() -> str:
    """What `--engine auto` means: vLLM where there are a GPU and the package vllm, else `auto`. Logs the choice."""
    import torch

    # Unlike torch.cuda.is_available, device_count does not start CUDA, which fixes the GPUs that a process sees.
    missing = "there is no GPU" if not torch.cuda.device_count() else "" if has_vllm() else f"it needs {INSTALL}"
    logger.info("--engine auto: %s", f"our own engine, since vLLM cannot be used ({missing})" if missing else VLLM)
    return AUTO if missing else VLLM


@functools.cache
def claim_gpus(number: int) -> list[str]:
    """Limit this process, once, to its `number` GPUs, as CUDA_VISIBLE_DEVICES names them; [] without GPUs.

    Also sets the variables that vLLM reads. Must be called before vLLM is imported. Raises UserError if there are too
    few GPUs for all processes of this machine.
    """
    import torch

    os.environ.update(VARIABLES | dict(os.environ) | {IN_PROCESS: "0"})
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
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return own


@contextlib.contextmanager
def without_launcher() -> Iterator[None]:
    """Hide the launcher's variables from vLLM."""
    names = [name for name in os.environ if name in LAUNCHER_VARIABLES or name.startswith(HIDDEN)]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _dtype(folder: Path) -> str:
    """The type in a model's config. (vLLM's `auto` would compute a float32 model in half precision.)"""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        if name := part.get("dtype") or part.get("torch_dtype"):
            return name
    return "auto"


class VLLMEngine:
    """Answers requests with vLLM's LLMEngine, made with the flags `words` of `vllm serve`."""

    ended = 0  # engines of this process that have ended

    def __init__(self, folder: Path, words: list[str], tokens: "ModelTokens"):
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from tools.engine.model import describe

        def refuse(message: str) -> NoReturn:
            raise UserError(f"--vllm_args: {message}")

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False, allow_abbrev=False))
        parser.error = refuse
        arguments = EngineArgs.from_cli_args(parser.parse_args(words))
        try:  # the context is that of vllm.LLM, which has the largest batches
            self.llm = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        except Exception as error:  # each kind of model and of lacking memory fails in its own way
            hint = "vLLM may keep memory of the models before: the same command goes on in a new process"
            hint = hint if VLLMEngine.ended else "--engine slots plays without vLLM"
            raise UserError(f"{folder}: vLLM cannot run it ({describe(error)}); {hint}") from error
        self.tokens = tokens
        self.waiting: deque[tuple[int, str, int, int]] = deque()  # (request, prompt, most tokens of the reply, seed)
        self.running: dict[str, bool] = {}  # requests that vLLM has, and whether their prompts were cut

    def start(self, request: int, prompt: str, *, game: int, limit: int | None = None, seed: int = 0) -> None:
        """Queue a request. `limit`: most tokens of the reply (None: --max_new_tokens). `game` is not used."""
        self.waiting.append((request, prompt, limit or self.tokens.sampling.max_new_tokens, seed))

    def run(self) -> list[tuple[int, Reply]]:
        """Compute until at least one reply has ended. Returns the (request, reply) pairs of the replies that ended."""
        while self.waiting:
            self._add(*self.waiting.popleft())
        while not (finished := [output for output in self.llm.step() if output.finished]):
            pass
        return [(int(output.request_id), self._read(output)) for output in finished]

    def drop_requests(self) -> None:
        """Forget all requests, those of games that were given up."""
        self.waiting.clear()
        self.llm.abort_request(list(self.running))
        self.running.clear()

    def end(self) -> None:
        """Free the memory of the model and its cache. The engine cannot be used any more."""
        import torch

        self.drop_requests()
        self.llm.engine_core.shutdown()
        del self.llm
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no GPU
        VLLMEngine.ended += 1

    def _add(self, request: int, prompt: str, limit: int, seed: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids, cut = self.tokens.encode(prompt)
        sampling = self.tokens.sampling
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "seed": seed}
        params = SamplingParams(
            **(drawn if sampling.do_sample else {"temperature": 0}),
            max_tokens=limit,
            min_tokens=min(sampling.min_new_tokens, limit),
            stop_token_ids=self.tokens.stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.llm.add_request(str(request), {"prompt_token_ids": ids}, params)
        self.running[str(request)] = cut

    def _read(self, output) -> Reply:
        (completion,) = output.outputs
        if completion.finish_reason not in (STOP, LENGTH):
            raise RuntimeError(f"vLLM broke off a reply: {completion.finish_reason}")
        return self.tokens.decode(list(completion.token_ids), self.running.pop(output.request_id))
