"""CUDA graphs without CUDA: operations recorded with the very tensors they met, run again on these alone.

As with CUDA's, a replay knows no Python: numbers are what they were, tensors are where they were, and outputs are the
same tensors each time. Whatever waits for the host can't be recorded.
"""

from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


class FakeGraph:
    """A `Graph` of a CPU. `made` are all there are."""

    made: ClassVar[list["FakeGraph"]] = []

    def __init__(self):
        self.calls, self.replays = [], 0
        self.made.append(self)

    def record(self, function):
        with Recorder(self.calls):
            outputs = function()
        for *_, fresh in self.calls:  # a capture runs nothing
            for tensor in fresh:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        return outputs

    def replay(self):
        self.replays += 1
        for function, args, kwargs, fresh in self.calls:
            outputs = tensors_of(function(*args, **kwargs))
            for own, new in zip(fresh, outputs, strict=bool(fresh)):
                own.copy_(new)


class Recorder(TorchDispatchMode):
    """Notes each operation, what it was given, and which new tensors came of it."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in HOST:
            raise RuntimeError(f"{function} waits for the host, which no graph can")
        outputs = function(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of((args, kwargs))}
        made = tensors_of(outputs)
        fresh = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in known]
        assert not fresh or len(fresh) == len(made)
        self.calls.append((function, args, kwargs or {}, fresh))
        return outputs


def tensors_of(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
