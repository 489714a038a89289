"""A model's linear layers on a CPU: by oneDNN, from a copy of the weights in its own order.

Torch's plain product orders the weights anew each time: on one thread 25 rows take a quarter longer, 200 an eighth.
"""

from functools import partial

import psutil
import torch

ROWS = 64  # that the order of the copies is best for
MEMORY_SHARE = 0.1  # of the free memory, for the copies


def pack_weights(model) -> None:
    """Give the linear layers in float32 on the CPU their second copies, where memory allows."""
    layers = [layer for layer in model.modules() if _can_pack(layer)]
    size = sum(layer.weight.nbytes for layer in layers)
    if not torch.backends.mkldnn.is_available() or size > MEMORY_SHARE * psutil.virtual_memory().available:
        return
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        layer.forward = partial(_product, packed=packed, bias=layer.bias)


def _can_pack(layer) -> bool:
    """No layer of a class of its own, nor one whose forward was replaced: by this, or by hooks that move weights."""
    plain = type(layer) is torch.nn.Linear and "forward" not in vars(layer)
    return plain and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


def _product(rows: torch.Tensor, *, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
