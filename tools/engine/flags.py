"""The flags of models in this process, and the table of engines. No torch."""

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
    path: str  # module:Class of an Engine, imported when a model is loaded, because it imports torch
    help: str


ENGINES = {  # values of --engine
    SLOTS: EngineEntry("tools.engine.slots:SlotEngine", "continuous batching with kept keys and values"),
    GENERATE: EngineEntry("tools.engine.generate:BatchEngine", "batches of transformers' generate"),
    VLLM: EngineEntry("tools.engine.vllm:VLLMEngine", "vLLM in this process"),
    AUTO: EngineEntry(
        "tools.engine.slots:AutoEngine",
        "vllm if there are a GPU and the package vllm, else slots if the engine can compute the model's attention, "
        "else generate",
    ),
}
DTYPES = ("bfloat16", "float16", "float32")  # by torch's names


@dataclass(kw_only=True)
class ModelFlags(FlagGroup):
    dtype: str | None = flag(
        "type of the models' numbers; unset: the one in each model's config", default=None, choices=DTYPES
    )
    bf16: bool = flag("True: the same as --dtype bfloat16", default=False, compared=False)
    fp16: bool = flag("True: the same as --dtype float16", default=False, compared=False)
    trust_remote_code: bool = flag("True: run Python code that comes with a model", default=False, compared=False)

    def __post_init__(self):
        super().__post_init__()
        asked = {"--dtype": self.dtype, "--bf16": self.bf16 and "bfloat16", "--fp16": self.fp16 and "float16"}
        asked = {name: dtype for name, dtype in asked.items() if dtype}
        if len(set(asked.values())) > 1:
            raise UserError(f"{' and '.join(asked)} ask for different types; give one of them")
        self.dtype = next(iter(asked.values()), None)


@dataclass(kw_only=True)
class EngineFlags(ModelFlags, Sampling):
    """How replies are computed.

    A run may continue with another engine, for example on another machine: engines sample from the same probabilities,
    up to rounding, and the record notes which engines have played.
    """

    tf32: bool = flag("True: compute float32 products in TF32 on GPUs that can", default=False)

    engine: str = flag(
        "; ".join(f"{name}: {entry.help}" for name, entry in ENGINES.items()),
        default=AUTO,
        choices=tuple(ENGINES),
        machine=True,
    )
    per_device_eval_batch_size: int | None = flag(
        "prompts at once; unset: by memory (generate: 32, vllm: 256)", default=None, at_least=1, machine=True
    )
    tensor_parallel_size: int = flag(
        "GPUs of each process with vLLM; start (GPUs / this) processes", default=1, at_least=1, machine=True
    )
    vllm_args: str = flag("more flags of `vllm serve`: --vllm_args='--enforce-eager --kv-cache-dtype fp8'", default="")
