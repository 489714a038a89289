"""Products of few rows with a model's weights, on a CPU: by oneDNN, from a copy of the weights in its own order.

Torch's plain product orders the weights anew each time. A step of 2 to 64 games took a fifth longer by it.
"""

from functools import partial

import psutil
import torch
from torch.nn import functional as F

MOST_ROWS = 64  # above, the plain product is as fast
MEMORY_SHARE = 0.1  # of the free memory, for the copies


def pack_weights(model) -> None:
    """Give the linear layers in float32 on the CPU their second copies, where memory allows."""
    layers = [layer for layer in model.modules() if _can_pack(layer)]
    size = sum(layer.weight.nbytes for layer in layers)
    if not torch.backends.mkldnn.is_available() or size > MEMORY_SHARE * psutil.virtual_memory().available:
        return
    for layer in layers:
        weight = layer.weight.detach()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, MOST_ROWS)
        layer.forward = partial(_product, weight=weight, bias=layer.bias, packed=packed)


def _can_pack(layer) -> bool:
    """No layer of a class of its own, nor one whose forward was replaced: by this, or by hooks that move weights."""
    plain = type(layer) is torch.nn.Linear and "forward" not in vars(layer)
    return plain and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


def _product(rows: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor | None, packed: torch.Tensor):
    if rows.numel() > MOST_ROWS * rows.shape[-1]:
        return F.linear(rows, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
