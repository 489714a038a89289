"""Flags of models that run in this process, and the table of engines. No torch."""

from dataclasses import dataclass
from typing import NamedTuple

from tools.common.errors import UserError
from tools.common.flags import FlagGroup, flag
from tools.players.player import Sampling

AUTO = "auto"
SLOTS = "slots"
GENERATE = "generate"
VLLM = "vllm"


class EngineEntry(NamedTuple):
    path: str  # module:Class of an Engine, imported only when a model is loaded, because it imports torch
    help: str


ENGINES = {  # values of --engine
    SLOTS: EngineEntry("tools.engine.slots:SlotEngine", "continuous batching that keeps each game's keys and values"),
    GENERATE: EngineEntry("tools.engine.generate:BatchEngine", "batches of transformers' generate"),
    VLLM: EngineEntry("tools.engine.vllm:VLLMEngine", "vLLM in this process"),
    AUTO: EngineEntry(
        "tools.engine.slots:AutoEngine",
        "vllm if there is a GPU and vllm is installed, else slots if it supports the model's attention, else generate",
    ),
}
DTYPES = ("bfloat16", "float16", "float32")  # torch's names


@dataclass(kw_only=True)
class ModelFlags(FlagGroup):
    dtype: str | None = flag("dtype of the models; unset: as in each model's config", default=None, choices=DTYPES)
    bf16: bool = flag("same as --dtype bfloat16", default=False, compared=False)
    fp16: bool = flag("same as --dtype float16", default=False, compared=False)
    trust_remote_code: bool = flag("run Python code that comes with a model", default=False, compared=False)

    def __post_init__(self):
        super().__post_init__()
        asked = {"--dtype": self.dtype, "--bf16": self.bf16 and "bfloat16", "--fp16": self.fp16 and "float16"}
        asked = {name: dtype for name, dtype in asked.items() if dtype}
        if len(set(asked.values())) > 1:
            raise UserError(f"{' and '.join(asked)} ask for different dtypes; use one of them")
        self.dtype = next(iter(asked.values()), None)


@dataclass(kw_only=True)
class EngineFlags(ModelFlags, Sampling):
    """How replies are computed.

    A run may continue with another engine, for example on another machine, because all engines sample from the same
    probabilities up to rounding. The record notes which ones have played.
    """

    tf32: bool = flag("compute float32 matrix products in TF32 on GPUs that support it", default=False)

    engine: str = flag(
        "; ".join(f"{name}: {entry.help}" for name, entry in ENGINES.items()),
        default=AUTO,
        choices=tuple(ENGINES),
        machine=True,
    )
    per_device_eval_batch_size: int | None = flag(
        "prompts at once; unset: chosen by memory (generate: 32, vllm: 256)", default=None, at_least=1, machine=True
    )
    tensor_parallel_size: int = flag(
        "with vLLM, GPUs per process; start (GPUs / this) processes", default=1, at_least=1, machine=True
    )
    vllm_args: str = flag(
        "further flags of `vllm serve`, such as --vllm_args='--enforce-eager --kv-cache-dtype fp8'", default=""
    )
