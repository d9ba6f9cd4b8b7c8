"""Accelerators without an accelerator: tensors that say they are on `away:N`, keep their data on the CPU, and raise
where an operation would meet tensors of several devices. Importing it changes the whole process.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("away")
torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` is made on the CPU and then moved

aten, CPU = torch.ops.aten, torch.device("cpu")
MOVES = (aten.copy_.default, aten._to_copy.default)
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
TO_HOST = Counter()  # copies to the CPU, each of which waits for the accelerator, by operation


class Away(torch.Tensor):
    """A tensor on a fake device."""

    @staticmethod
    def __new__(cls, data, device):
        layout = {"strides": data.stride(), "storage_offset": data.storage_offset(), "dtype": data.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, device=device, **layout)

    def __init__(self, data, device):
        self.held = data

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def tolist(self):
        TO_HOST["tolist"] += 1
        return self.held.tolist()


class Devices(TorchDispatchMode):
    """Where tensors may be made on fake devices, and operations over the CPU's own are checked too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def on(tensor, device):
    """The tensor's data on `device`."""
    data, device = getattr(tensor, "held", tensor), torch.device(device)
    return data if device == CPU else Away(data, device)


def move(model, device):
    """Puts a model's weights on `device`, in place."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(on(weight.detach(), device), requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else on(buffer, device)


def run(function, args, kwargs):
    """An operation on the one device that its tensors are on; a number of the CPU goes with any, as in torch."""
    met = _devices((args, kwargs))
    if function in INDEXING:  # indices of the CPU do, too
        met = _devices((args[0], args[2:3])) | (_devices(args[1]) - {CPU})
    if len(met) > 1 and function not in MOVES:
        raise RuntimeError(f"{function} over tensors of {sorted(map(str, met))}")
    device = args[0].device if function in MOVES else next(iter(met), CPU)
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        device = CPU if device.type == "cpu" else torch.device(device.type, device.index or 0)
        kwargs = {**kwargs, "device": CPU}
    if met - {CPU} and (device == CPU or function is aten._local_scalar_dense.default):
        TO_HOST[str(function)] += 1
    out = function(*tree_map_only(Away, _held, args), **tree_map_only(Away, _held, kwargs))
    first = next(iter(function._schema.arguments), None)
    if first is not None and first.alias_info is not None and first.alias_info.is_write:
        return args[0]
    return out if device == CPU else tree_map_only(torch.Tensor, lambda made: on(made, device), out)


def _devices(values):
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return {each.device for each in tensors if each.dim() or each.device != CPU}


def _held(tensor):
    return tensor.held
