"""Linear layers on a CPU by oneDNN, with weights that are stored in the order that oneDNN computes in.

torch's own product reorders them at every call. With few rows, as in play, that can take longer than the product.
"""

from functools import partial

import psutil
import torch

ROWS = 64  # number of rows for which oneDNN chooses the order
MEMORY_SHARE = 0.1  # share of the free memory that the reordered copies may take


def pack_weights(model) -> None:
    """Let float32 linear layers on the CPU compute with reordered copies of their weights, if these fit in memory."""
    layers = [layer for layer in model.modules() if _can_pack(layer)]
    size = sum(layer.weight.nbytes for layer in layers)
    if not torch.backends.mkldnn.is_available() or size > MEMORY_SHARE * psutil.virtual_memory().available:
        return
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        layer.forward = partial(_product, packed=packed, bias=layer.bias)


def _can_pack(layer) -> bool:
    """Not for subclasses, nor for layers whose forward was replaced, for example by hooks that move weights."""
    plain = type(layer) is torch.nn.Linear and "forward" not in vars(layer)
    return plain and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


def _product(rows: torch.Tensor, *, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
