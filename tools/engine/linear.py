"""Linear layers on a CPU with weights packed in oneDNN's own layout.

torch repacks the weights at every call, which for the few rows of play can take longer than the product itself.
"""

from functools import partial

import psutil
import torch

ROWS = 64  # number of rows for which oneDNN chooses the layout
MEMORY_SHARE = 0.1  # of free memory, for the packed copies


def pack_weights(model) -> None:
    """Let float32 linear layers on the CPU use packed copies of their weights, if these fit in memory."""
    layers = [layer for layer in model.modules() if _can_pack(layer)]
    size = sum(layer.weight.nbytes for layer in layers)
    if not torch.backends.mkldnn.is_available() or size > MEMORY_SHARE * psutil.virtual_memory().available:
        return
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        layer.forward = partial(_product, packed=packed, bias=layer.bias)


def _can_pack(layer) -> bool:
    """False for subclasses and for layers whose forward was replaced, for example by hooks that move weights."""
    plain = type(layer) is torch.nn.Linear and "forward" not in vars(layer)
    return plain and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


def _product(rows: torch.Tensor, *, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
