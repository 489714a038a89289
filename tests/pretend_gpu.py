"""A pretend GPU: tensors on a device of their own, with real numbers, on any machine.

    with PretendGPU() as gpu:
        model = gpu.move(model)                 # its parameters and buffers, in place
        logits = model(ids.to(DEVICE)).logits
        logits.sum().backward()
    gpu.launches                                # kernels by name
    gpu.waits                                   # where Python had to wait for the GPU: .item(), nonzero, a copy back
    gpu.uploads                                 # copies from the host
    to_cpu(logits)                              # to compare, uncounted

Each tensor holds a CPU tensor, which computes. What a GPU refuses is refused: CPU operands beside the device's, but
for single numbers, and indices, which are uploaded. It cannot know memory, streams, what a kernel demands of its
inputs, NCCL, or code that asks for "cuda". Import it at the top of a test file: autograd looks for devices once, at
its first backward pass.
"""

import contextlib
from collections import Counter

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
OF_UNKNOWN_SIZE = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
COPIES = {"_to_copy", "copy_", "copy"}
NO_KERNEL = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "empty", "empty_like", "empty_strided"}


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
    """Makes what is created on DEVICE pretend tensors, and counts what they do."""

    counting: "PretendGPU | None" = None

    def __init__(self):
        super().__init__()
        self._outside: list = []
        self.reset()

    def reset(self) -> None:
        """Count from 0."""
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []
        self.uploads: list[str] = []

    def __enter__(self):
        self._outside.append((PretendGPU.counting, torch._C._only_lift_cpu_tensors()))
        PretendGPU.counting = self
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=DEVICE) is made on the CPU and uploaded
        return super().__enter__()

    def __exit__(self, *exception):
        PretendGPU.counting, lifted = self._outside.pop()
        torch._C._set_only_lift_cpu_tensors(lifted)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})

    @staticmethod
    def move(module: torch.nn.Module) -> torch.nn.Module:
        """Put the parameters and buffers of a module on DEVICE, tied ones once."""
        moved: dict[int, torch.Tensor] = {}

        def pretend(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                copy = PretendTensor(tensor.detach().clone())
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                moved[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
            return moved[id(tensor)]

        originals = [*module.parameters(), *module.buffers()]  # kept, so that ids stay theirs
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                tensors.update({name: pretend(each) for name, each in tensors.items() if each is not None})
        del originals
        return module


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor of either device; nothing is counted."""
    return tensor.held if isinstance(tensor, PretendTensor) else tensor


def _wrap(value):
    return PretendTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, PretendTensor) else value


def _held(value):
    if isinstance(value, torch.device) and value.type == DEVICE.type:
        return torch.device("cpu")
    return to_cpu(value) if isinstance(value, torch.Tensor) else value


def _dispatch(func, args, kwargs):
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):  # in inference mode
        with PretendGPU.counting or contextlib.nullcontext():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    there = [each for each in tensors if isinstance(each, PretendTensor)]
    device = kwargs.get("device")
    target = None if device is None else torch.device(device).type
    if not there and target != DEVICE.type:
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    _refuse_mixing(func, name, args, tensors)
    result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    _count(func, name, args, tensors, there, target, result)
    if target == "cpu" or name == "copy_" and not isinstance(args[0], PretendTensor):
        return args[0] if name == "copy_" else result
    result = tree_map(_wrap, result)
    if func._schema.is_mutable or func.is_view:
        return return_and_correct_aliasing(func, args, kwargs, result)
    return result


def _refuse_mixing(func, name: str, args, tensors) -> None:
    if name in COPIES:
        return
    for tensor in tensors:
        index = name in INDEXED and tensor is not args[0] and tensor.dtype in (torch.int64, torch.bool)
        if tensor.dim() and not isinstance(tensor, PretendTensor) and not index:
            raise RuntimeError(f"{func}: a CPU tensor {tuple(tensor.shape)} beside tensors on {DEVICE}")


def _count(func, name: str, args, tensors, there, target, result) -> None:
    gpu = PretendGPU.counting
    if gpu is None:
        return
    shapes = " ".join(str(tuple(tensor.shape)) for tensor in tensors)
    to_host = there and (target == "cpu" or name == "copy_" and not isinstance(args[0], PretendTensor))
    from_host = name in COPIES and len(there) < len(tensors) or name in INDEXED and len(there) < len(tensors)
    masked = name in INDEXED and any(tensor.dtype == torch.bool for tensor in tensors[1:])
    number = result is not None and not any(isinstance(each, torch.Tensor) for each in tree_leaves(result))
    if to_host or masked or number or name in OF_UNKNOWN_SIZE:
        gpu.waits.append(f"{name} {shapes}")
    elif from_host:
        gpu.uploads.append(f"{name} {shapes}")
    if not (to_host or from_host or func.is_view or name in NO_KERNEL):
        gpu.launches[name] += 1
