"""Forwards without Python in between: CUDA graphs that are replayed, or what torch.compile makes of a model.

Both want few shapes and tensors that stay where they are; `Forwards.fixed` says so to those who make the inputs.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
from transformers.utils import logging

from .fingerprint import fingerprint

logger = logging.get_logger(__name__)
MODES = ("auto", "off", "graphs", "inductor")
# Of models that were compiled on a CPU, the fingerprint of the weights: the compiler keeps copies of their values.
FROZEN: WeakKeyDictionary[torch.nn.Module, tuple] = WeakKeyDictionary()
MOST_GRAPHS = 32  # per call; each holds its activations' memory, though all share one pool


class Graph(Protocol):
    """What a device offers: kernels recorded once, launched again on the same memory."""

    def record(self, function: Callable[[], Any]) -> Any:
        """Records the function's kernels; its outputs, which `replay` fills."""
        ...

    def replay(self) -> None:
        """Runs what was recorded."""
        ...


class CudaGraph:
    """A graph of CUDA's; those of one device share their memory, because only one runs at a time."""

    recorded: weakref.WeakSet["CudaGraph"] = weakref.WeakSet()

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.device = torch.cuda.current_device()

    def record(self, function: Callable[[], Any]) -> Any:
        """See `Graph`."""
        # Of a graph that is still there: torch refuses to capture into a pool whose graphs are all gone, as they are
        # after a call of `generate` (https://github.com/vllm-project/vllm/issues/28426).
        pools = (other.graph.pool() for other in list(self.recorded) if other.device == self.device)
        # "thread_local": another thread's allocations are none of this capture's business.
        with torch.cuda.graph(self.graph, pool=next(pools, None), capture_error_mode="thread_local"):
            outputs = function()
        self.recorded.add(self)
        return outputs

    def replay(self) -> None:
        """See `Graph`."""
        self.graph.replay()


GRAPHS: dict[str, type] = {"cuda": CudaGraph}  # by device type


class Forwards:
    """Runs a call's forwards as `DDTreeConfig.compile` asks. One that can't be compiled runs as it is, with a warning.

    Args:
        mode: of `MODES`; "auto" is "graphs" where the device has them, else "off".
        device: of the model.
    """

    def __init__(self, mode: str, device: torch.device):
        if mode == "auto":
            mode = "graphs" if device.type in GRAPHS else "off"
        if mode == "graphs" and device.type not in GRAPHS:
            logger.warning_once(
                f'`compile="graphs"`: there are none on {device.type}, so forwards run as they are. Set '
                '`compile="auto"`, or "inductor" to compile them.'
            )
            mode = "off"
        self.mode, self.device = mode, device
        self.graphs: dict[tuple, Recorded | None] = {}
        self.anchors: tuple[int, ...] = ()
        self.replays = 0
        self.checked: list[torch.nn.Module] = []  # whose weights are those that were compiled

    @property
    def fixed(self) -> bool:
        """Whether shapes should be few, and buffers shown whole."""
        return self.mode != "off"

    def bucket(self, tokens: int) -> int:
        """How many tokens a forward over `tokens` should have: with graphs one of few numbers; compilers make other
        code for a single one.
        """
        if self.mode != "graphs":
            return max(tokens, 2) if self.mode == "inductor" else tokens
        step = 1 << max((tokens - 1).bit_length() - 3, 0)  # at most a quarter more than asked
        return -(-tokens // step) * step

    def run(self, function: Callable[..., Any], inputs: dict[str, Any], anchors: Sequence[torch.Tensor]) -> Any:
        """function(**inputs), whose outputs are good until the next run.

        Args:
            function: works on its inputs' tensors and on `anchors`, and on no number that changes from call to call.
            inputs: tensors, nested in dicts and lists; anything else must be hashable and is part of the shape.
            anchors: what it writes to besides. Where they have been replaced nothing recorded is used any more.
        """
        if self.mode == "inductor":  # it makes new code for other strides
            inputs = tree_map_only(torch.Tensor, torch.Tensor.contiguous, inputs)
        if self.mode != "graphs":
            return function(**inputs)
        addresses = tuple(tensor.data_ptr() for tensor in anchors)
        if addresses != self.anchors:
            self.graphs, self.anchors = {}, addresses
        leaves, spec = tree_flatten(inputs)
        key = function.__qualname__, spec, tuple(map(_shape, leaves))
        if key not in self.graphs:  # run once as it is: kernels are chosen and workspaces made at a first run
            if len(self.graphs) < MOST_GRAPHS:
                self.graphs[key] = None
            return function(**inputs)
        if self.graphs[key] is None:
            try:
                self.graphs[key] = Recorded.of(GRAPHS[self.device.type](), function, leaves, spec)
            except Exception as error:
                self._give_up("recorded as a graph", error)
                return function(**inputs)
        self.replays += 1
        return self.graphs[key](leaves)  # type: ignore[misc]

    def compiled(self, model: torch.nn.Module) -> Callable[..., Any]:
        """The model, or in mode "inductor" what torch.compile makes of its forward."""
        if self.mode != "inductor":
            return model
        if self.device.type == "cpu" and model not in self.checked:
            _forget_changed(model)
            self.checked.append(model)
        return lambda **inputs: self._call_compiled(model, inputs)

    def _call_compiled(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        if self.mode == "off":  # it failed before
            return model(**inputs)
        try:
            with _frozen() if self.device.type == "cpu" else nullcontext():
                return _compiled_call()(model, inputs)
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            self._give_up("compiled", error)
            return model(**inputs)

    def _give_up(self, what: str, error: Exception) -> None:
        self.mode, self.graphs = "off", {}
        logger.warning(
            f"A forward can't be {what} ({error!r}): forwards run as they are for the rest of this call. The text does "
            'not change, only the speed. Set `compile="off"` to leave it out.'
        )


@dataclass
class Recorded:
    """A graph with the tensors that it reads and fills.

    Attributes:
        leaves: the inputs it was recorded with; tensors among them are where it looks for later ones.
        outputs: nested tensors, filled by each replay.
    """

    graph: Graph
    leaves: list[Any]
    outputs: Any

    @classmethod
    def of(cls, graph: Graph, function: Callable[..., Any], leaves: list[Any], spec: TreeSpec) -> "Recorded":
        """Records `function` on copies of the inputs, so that nobody else writes to what the graph reads."""
        own = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return cls(graph, own, graph.record(lambda: function(**tree_unflatten(own, spec))))

    def __call__(self, leaves: list[Any]) -> Any:
        """The outputs for other inputs of the same shapes."""
        for own, given in zip(self.leaves, leaves, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given)
        self.graph.replay()
        return self.outputs


def _forget_changed(model: torch.nn.Module) -> None:
    """Has the model compiled anew if its weights are others than those that were laid out."""
    weights = fingerprint((*model.parameters(), *model.buffers()))
    if FROZEN.setdefault(model, weights) != weights:
        FROZEN[model] = weights
        torch._dynamo.reset_code(_call.__code__)


def _call(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


@cache
def _compiled_call() -> Callable[[torch.nn.Module, dict[str, Any]], Any]:
    """One for the process: the compiler keeps what it made by model, as long as the model is there."""
    return torch.compile(_call, dynamic=True)


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def _frozen() -> Any:
    """Lets the compiler lay the weights out as the CPU's matrix products want them; costs their memory once more.

    Measured on 2 cores of an EPYC, SmolLM2-135M in bfloat16, 9 tokens, one thread: 43 ms as it is, 38 ms compiled,
    27 ms compiled so.
    """
    from torch._inductor import config

    return config.patch(freezing=True)
