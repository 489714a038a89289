"""A pretend GPU: tensors on a device of their own, with real numbers, on any machine.

    with PretendGPU() as gpu:
        model = gpu.move(model)                 # its parameters and buffers, in place
        logits = model(ids.to(DEVICE)).logits
    to_cpu(logits)                              # to compare

Each tensor holds a CPU tensor, which computes. CPU operands beside the device's are refused, but for single numbers
and indices. Import it at the top of a test file: autograd looks for devices once, at its first backward pass.
"""

import contextlib

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
COPIES = {"_to_copy", "copy_", "copy"}


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return False  # nobody takes it by himself


class _Module(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        return False


backend_registration._setup_privateuseone_for_python_backend("pretend", backend_module=_Module(), hook=_Hook())
DEVICE = torch.device("pretend", 0)


class PretendTensor(torch.Tensor):
    """A tensor on DEVICE; `held` has its numbers, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, **layout, device=DEVICE)

    def __init__(self, held: torch.Tensor):
        self.held = held

    def __repr__(self) -> str:
        return f"PretendTensor({self.held})"

    def tolist(self):
        """Not by way of the dispatcher, as it is on a GPU."""
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


class PretendGPU(TorchDispatchMode):
    """Makes what is created on DEVICE pretend tensors. The dispatcher enters it again, for parts of functions."""

    entered: list["PretendGPU"] = []

    def __enter__(self):
        self.entered.append(self)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=DEVICE) is made on the CPU and uploaded
        return super().__enter__()

    def __exit__(self, *exception):
        self.entered.pop()
        torch._C._set_only_lift_cpu_tensors(bool(self.entered))
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})

    @staticmethod
    def move(module: torch.nn.Module) -> torch.nn.Module:
        """Put the parameters and buffers of a module on DEVICE, tied ones once."""
        moved: dict[torch.Tensor, torch.Tensor] = {}  # tensors are equal as keys only if they are the same
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and tensor not in moved:
                        copy = PretendTensor(tensor.detach().clone())
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        moved[tensor] = torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
                    tensors[name] = moved.get(tensor)
        return module


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor of either device."""
    return tensor.held if isinstance(tensor, PretendTensor) else tensor


def _wrap(value):
    return PretendTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, PretendTensor) else value


def _held(value):
    if isinstance(value, torch.device) and value.type == DEVICE.type:
        return torch.device("cpu")
    return to_cpu(value) if isinstance(value, torch.Tensor) else value


def _dispatch(func, args, kwargs):
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):  # in inference mode
        with PretendGPU.entered[-1] if PretendGPU.entered else contextlib.nullcontext():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    device = kwargs.get("device")
    target = None if device is None else torch.device(device).type
    if target != DEVICE.type and not any(isinstance(each, PretendTensor) for each in tensors):
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    for tensor in tensors if name not in COPIES else ():
        index = name in INDEXED and tensor is not args[0] and tensor.dtype in (torch.int64, torch.bool)
        if tensor.dim() and not isinstance(tensor, PretendTensor) and not index:
            raise RuntimeError(f"{func}: a CPU tensor {tuple(tensor.shape)} beside tensors on {DEVICE}")
    result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if target == "cpu" or name == "copy_" and not isinstance(args[0], PretendTensor):
        return args[0] if name == "copy_" else result
    result = tree_map(_wrap, result)
    if func._schema.is_mutable or func.is_view:
        return return_and_correct_aliasing(func, args, kwargs, result)
    return result
