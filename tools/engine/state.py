"""Torch's process-wide state that engines change: random generators, matmul precision, cuDNN attention."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TorchState:
    """The engines' state of torch: random generators, and matmul precision ("highest", or "high" for TF32)."""

    def __init__(self, seed: int = 0, precision: str = "highest"):
        self.seed = seed
        self.precision = precision
        self.rng_states: dict[torch.device, torch.Tensor] = {}  # by device, after the last use

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use this state within the block, and restore the caller's afterwards."""
        generators = _generators()
        callers = [generator.get_state() for generator in generators]
        cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
        with _precision(self.precision):
            for generator in generators:
                if generator.device in self.rng_states:
                    generator.set_state(self.rng_states[generator.device])
                else:
                    generator.manual_seed(self.seed)
            try:
                yield
            finally:
                self.rng_states = {generator.device: generator.get_state() for generator in generators}
                for generator, state in zip(generators, callers, strict=True):
                    generator.set_state(state)
                torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)


def _generators() -> list[torch.Generator]:
    """The global generators of the CPU and of this thread's GPU, if CUDA has started."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


@contextmanager
def _precision(precision: str) -> Iterator[None]:
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    callers = [backend.fp32_precision for backend in backends]
    try:
        callers_name = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller set the precision of a single backend, which this API cannot express
        callers_name = "highest"
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(callers_name)
        for backend, value in zip(backends, callers, strict=True):
            backend.fp32_precision = value
