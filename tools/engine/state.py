"""What engines change of torch in the whole process. Whoever calls `spag.play` gets it back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TorchState:
    """The state of torch with which engines compute: random numbers of their own, and a precision of products.

    `precision` is "highest" or "high", as torch.set_float32_matmul_precision takes it. "high" is TF32.
    """

    def __init__(self, seed: int = 0, precision: str = "highest"):
        self.seed = seed
        self.precision = precision
        self.rng_states: dict[torch.device, torch.Tensor] = {}  # after the last use, by device

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this block torch has our state. After it torch has the caller's: seed, precision, cuDNN attention."""
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
    """The global generators of the CPU and of this thread's GPU. A GPU that is not in use yet is left alone."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


@contextmanager
def _precision(precision: str) -> Iterator[None]:
    """Compute float32 products in this precision, and afterwards in the caller's."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    callers = [backend.fp32_precision for backend in backends]
    try:
        callers_name = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller has set the precision of one backend, for which there is no such name
        callers_name = "highest"
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(callers_name)
        for backend, value in zip(backends, callers, strict=True):
            backend.fp32_precision = value
