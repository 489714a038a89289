"""The flags of models in this process. No torch."""

from dataclasses import dataclass

from tools.flags import flag
from tools.players.player import Sampling

AUTO, VLLM, SLOTS, GENERATE = "auto", "vllm", "slots", "generate"  # values of --engine


@dataclass(kw_only=True)
class ModelFlags:
    bf16: bool = flag("True: bfloat16 instead of the type in the model's config", default=False)
    trust_remote_code: bool = flag("True: run Python code that comes with a model", default=False)


@dataclass(kw_only=True)
class EngineFlags(ModelFlags, Sampling):
    """Games depend on Sampling, the types of numbers, and vllm_args; the rest is how this machine computes."""

    fp16: bool = flag("True: float16 instead of the type in the model's config", default=False)
    tf32: bool = flag("True: compute float32 products in TF32 on GPUs that can", default=False)

    engine: str = flag(
        "slots: continuous batching with kept keys and values; generate: batches of transformers' generate; vllm: "
        "vLLM in this process; auto: vllm if there are a GPU and the package vllm, else slots if the "
        "engine can compute the model's attention, else generate",
        default=AUTO,
        choices=(AUTO, VLLM, SLOTS, GENERATE),
    )
    per_device_eval_batch_size: int | None = flag(
        "prompts at once; unset: by memory (generate: 32, vllm: 256)", default=None, at_least=1
    )
    tensor_parallel_size: int = flag("GPUs of each process with vLLM; start (GPUs / this) processes", default=1)
    vllm_args: str = flag("more flags of `vllm serve`: --vllm_args='--enforce-eager --kv-cache-dtype fp8'", default="")

    def dtype(self) -> str | None:
        """The type of models on this machine, by torch's name; None: the one in each model's config."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else None
