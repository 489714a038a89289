"""vLLM in this process (`--engine vllm`).

vLLM gets token ids and a seed for each request, and returns token ids. On one GPU, or on CPUs, it starts no process.
With `--tensor_parallel_size` above 1 it starts a worker for each GPU, which ends with this process.
"""

import contextlib
import functools
import importlib.util
import os
import shlex
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.flags import flag
from tools.players.player import LENGTH, STOP, Reply, Sampling
from utils import LAUNCHER_VARIABLES, UserError, end_with_error, load_tokenizer

if TYPE_CHECKING:
    from tools.engine.local import ModelTokens  # brings torch, which the flags do without

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


@dataclass(kw_only=True)
class VLLMFlags:
    """The flags of `--engine vllm`."""

    tensor_parallel_size: int = flag("GPUs of each process with vLLM; start (GPUs / this) processes", default=1)
    vllm_args: str = flag("more flags of `vllm serve`: --vllm_args='--enforce-eager --kv-cache-dtype fp8'", default="")


def has_vllm() -> bool:
    """Whether the package vllm is installed."""
    return importlib.util.find_spec("vllm") is not None


@functools.cache
def claim_gpus(number: int) -> list[str]:
    """Limit this process, once, to its `number` GPUs, as CUDA_VISIBLE_DEVICES names them; [] without GPUs.

    Also sets the variables that vLLM reads. Must be called before vLLM is imported. Raises UserError if there are too
    few GPUs for all processes of this machine.
    """
    import torch

    os.environ.update(VARIABLES | dict(os.environ) | {IN_PROCESS: "0"})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Unlike torch.cuda.is_available, device_count does not start CUDA, which fixes the GPUs that a process sees.
    names = [str(gpu) for gpu in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    names = [name.strip() for name in names if name.strip()]
    if not names:
        return []
    process = int(os.environ.get("LOCAL_RANK", 0))
    gpus = names[process * number : (process + 1) * number]
    if len(gpus) < number:
        raise UserError(
            f"process {process} of this machine has no {number} GPUs of its own; there are {len(names)}: start "
            f"GPUs / --tensor_parallel_size processes"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return gpus


@contextlib.contextmanager
def without_launcher() -> Iterator[None]:
    """Hide the launcher's variables from vLLM."""
    names = [name for name in os.environ if name in LAUNCHER_VARIABLES or name.startswith(HIDDEN)]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


class VLLMEngine:
    """Answers requests with vLLM's LLMEngine.

    `size`: most replies at once. `models`: number of engines that share the GPUs of this process. `dtype` None: the
    one in the model's config.
    """

    keeps_games = True

    def __init__(
        self,
        folder: Path,
        flags: VLLMFlags,
        sampling: Sampling,
        size: int = 256,
        *,
        models: int = 1,
        dtype: str | None = None,
        trust_remote_code: bool = False,
    ):
        if not has_vllm():
            raise UserError(f"--engine {VLLM} needs a package: {INSTALL}")
        if not any(folder.glob("*.safetensors")):  # vLLM would take pickled weights
            raise UserError(f"{folder}: no weights in .safetensors form; convert them with save_pretrained")
        self.size = size
        gpus = claim_gpus(flags.tensor_parallel_size)
        self.tokens, stored_dtype = _read_tokens(folder, sampling, trust_remote_code)
        words = ["--model", str(folder), "--generation-config", "vllm", "--max-model-len", str(sampling.max_length)]
        words += ["--dtype", dtype or stored_dtype]  # vLLM's `auto` would compute a float32 model in half precision
        words += ["--max-num-seqs", str(size), "--tensor-parallel-size", str(flags.tensor_parallel_size)]
        words += ["--disable-log-stats", "--no-use-tqdm-on-load", *["--trust-remote-code"] * trust_remote_code]
        if gpus:
            words += ["--gpu-memory-utilization", f"{MEMORY_SHARE / models:.3f}"]
        else:  # on a CPU, vLLM 0.32 dies if the request has a seed and its prompt is computed in parts
            step_tokens = max(sampling.max_length, CPU_TOKENS)
            words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(step_tokens)]
        with without_launcher():
            self.llm = _start([*words, *shlex.split(flags.vllm_args)])
        self.waiting: deque[tuple[int, str, int, int]] = deque()  # (request, prompt, most tokens of the reply, seed)
        self.prompt_cut: dict[str, bool] = {}  # of the requests that vLLM has

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

    def end(self) -> None:
        """Free the memory of the model and its cache. The engine cannot be used any more."""
        self.llm.engine_core.shutdown()
        del self.llm

    def _add(self, request: int, prompt: str, limit: int, seed: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids, self.prompt_cut[str(request)] = self.tokens.encode(prompt)
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

    def _read(self, output) -> Reply:
        (completion,) = output.outputs
        if completion.finish_reason not in (STOP, LENGTH):
            raise RuntimeError(f"vLLM broke off a reply: {completion.finish_reason}")
        return self.tokens.decode(list(completion.token_ids), self.prompt_cut.pop(output.request_id))


def _read_tokens(folder: Path, sampling: Sampling, trust_remote_code: bool) -> tuple["ModelTokens", str]:
    """A model's tokenizer with its end tokens, and the type of its weights by torch's name."""
    from transformers import AutoConfig, GenerationConfig

    from tools.engine.local import ModelTokens

    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # the folder has no generation_config.json
        generation = GenerationConfig.from_model_config(config)
    dtype = config.dtype or config.get_text_config().dtype or AUTO
    return ModelTokens(tokenizer, sampling, generation), str(dtype).removeprefix("torch.")


def _start(words: list[str]):
    """An LLMEngine with these flags of `vllm serve`."""
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False, allow_abbrev=False))
    parser.error = lambda message: end_with_error(f"--vllm_args: {message}")  # vLLM would list its 200 flags
    arguments = EngineArgs.from_cli_args(parser.parse_args(words))
    # The context is that of vllm.LLM, which has the largest batches.
    return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
