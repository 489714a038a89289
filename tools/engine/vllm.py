"""vLLM in this process (`--engine vllm`): requests are token ids with a seed, replies are token ids."""

import functools
import importlib.util
import logging
import os
import shlex
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tools.common.errors import UserError
from tools.common.models import from_folder, load_tokenizer
from tools.common.ranks import LAUNCHER_VARIABLES, check_gpus
from tools.engine.flags import AUTO, GENERATE, SLOTS, VLLM, EngineFlags
from tools.players.player import Reply

if TYPE_CHECKING:
    from tools.engine.local import Prompt, StartEngine  # import torch

logger = logging.getLogger(__name__)
INSTALL = "pip install -r requirements.txt vllm==0.32.0"
PROMPTS_AT_ONCE = 256  # default of --per_device_eval_batch_size
MEMORY_SHARE = 0.9  # of a GPU's memory, for all models on it
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0: no child process, which makes scheduling deterministic
# Defaults of environment variables that vLLM reads.
VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# Prefixes of variables to hide from vLLM: torchrun's, because it would join torchrun's store as a rank, and expandable
# segments, which the loop sets for training and which break vLLM's all-reduce over several GPUs.
HIDDEN = ("TORCHELASTIC_", "PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC")


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


@functools.cache
def claim_gpus(number: int) -> None:
    """Restrict this process to its own `number` GPUs, and set the variables that vLLM reads at import."""
    import torch

    os.environ.update(VARIABLES | dict(os.environ) | {IN_PROCESS: "0"})
    # Unlike is_available, device_count does not initialize CUDA, which would fix the GPUs that this process sees.
    numbers = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")
    if torch.cuda.device_count():  # vLLM also runs on CPUs
        check_gpus(len(gpus), number)
    first = number * int(os.environ.get("LOCAL_RANK", 0))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + number])


class VLLMEngine:
    """vLLM's LLMEngine for `size` requests at once; `models` engines share this process's GPUs."""

    name = VLLM
    size_limits_games = True

    def __init__(self, folder: Path, flags: EngineFlags, size: int, models: int):
        if not has_vllm():
            raise UserError(f"--engine {VLLM} needs a package: {INSTALL}")
        claim_gpus(flags.tensor_parallel_size)
        from transformers import AutoConfig, GenerationConfig

        from tools.engine.local import Codec

        code = {"trust_remote_code": flags.trust_remote_code}
        config = from_folder(AutoConfig, folder, **code)
        generation = GenerationConfig.from_model_config(config)
        if (folder / "generation_config.json").exists():
            generation = GenerationConfig.from_pretrained(folder)
        self.codec = Codec(load_tokenizer(str(folder), **code), flags, generation)
        self.size = size
        # vLLM's `auto` would run a float32 model in half precision
        dtype = flags.dtype or str(config.dtype or config.get_text_config().dtype or AUTO).removeprefix("torch.")
        self.computes_in = f"in {dtype}"
        self.llm = _start(_arguments(folder, flags, size, models, dtype))
        self.waiting: deque[tuple] = deque()  # arguments of `add_request`
        self.prompt_cut: dict[str, bool] = {}

    @classmethod
    @contextmanager
    def loaded(cls, folder: Path, flags: EngineFlags, models: int) -> Iterator["StartEngine"]:
        """The engine of this model, which holds its memory until the block ends and ignores the limit on games."""
        engine = cls(folder, flags, flags.per_device_eval_batch_size or PROMPTS_AT_ONCE, models)
        yield lambda limit: engine
        engine.end()

    def start(self, request: int, prompt: "Prompt") -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids, self.prompt_cut[str(request)] = self.codec.encode(prompt.text)
        sampling = self.codec.sampling
        drawing = {**sampling.drawing(), "seed": prompt.seed} if sampling.do_sample else {"temperature": 0}
        params = SamplingParams(
            **drawing,
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            stop_token_ids=self.codec.stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.waiting.append((str(request), {"prompt_token_ids": ids}, params))

    def run(self) -> list[tuple[int, Reply]]:
        while self.waiting:
            self.llm.add_request(*self.waiting.popleft())
        replies = []
        while not replies:
            for output in self.llm.step():
                if output.finished:
                    ids = output.outputs[0].token_ids
                    prompt_cut = self.prompt_cut.pop(output.request_id)
                    replies.append((int(output.request_id), self.codec.decode(list(ids), prompt_cut=prompt_cut)))
        return replies

    def end(self) -> None:
        self.llm.engine_core.shutdown()
        del self.llm


def _arguments(folder: Path, flags: EngineFlags, size: int, models: int, dtype: str) -> list[str]:
    """Flags of `vllm serve`. The user's come last and so override ours."""
    # --generation-config vllm: ignore sampling parameters in the model folder
    argv = ["--model", str(folder), "--generation-config", "vllm", "--max-model-len", str(flags.max_length)]
    argv += ["--dtype", dtype, "--gpu-memory-utilization", f"{MEMORY_SHARE / models:.3f}"]
    # tokens per step bound the memory of activations
    argv += ["--max-num-seqs", str(size), "--max-num-batched-tokens", "8192"]
    # safetensors only: pickled weights could run code
    argv += ["--tensor-parallel-size", str(flags.tensor_parallel_size), "--load-format", "safetensors"]
    argv += ["--disable-log-stats", "--no-use-tqdm-on-load"]
    argv += ["--language-model-only"]  # a trained multimodal model has no image processor
    if flags.trust_remote_code:
        argv.append("--trust-remote-code")
    # A second engine in this process deletes the first one's CUDA graphs, whose replies are then nonsense.
    if models > 1 and flags.tensor_parallel_size == 1:
        argv.append("--enforce-eager")
    return [*argv, *shlex.split(flags.vllm_args)]


def _start(argv: list[str]):
    """Start an LLMEngine with these flags of `vllm serve`, without the launcher's environment variables.

    If that fails, the traceback is logged and a UserError names the other engines. Even `--engine auto` does not fall
    back to them, because much slower play should be the user's choice.
    """
    names = [name for name in os.environ if name in LAUNCHER_VARIABLES or name.startswith(HIDDEN)]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        from vllm import EngineArgs, LLMEngine
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False))
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(argv)))
    except Exception as error:
        logger.exception("vLLM did not start")
        first_line = str(error).strip().partition("\n")[0]
        why = f"{type(error).__name__}: {first_line}"
        raise UserError(f"vLLM did not start ({why}); use --engine {SLOTS} or {GENERATE} instead") from error
    finally:
        os.environ.update(hidden)
