"""Caches that trees grow on: rows of their own lengths in preallocated buffers, and a commit that moves little.

A slot is a place along the sequence axis. Row b's committed tokens stand in slots [0, ends[b]); a forward appends its
nodes at the same slots in all rows, past the longest; a commit moves the accepted ones down to their row's end. So a
batch stays rectangular and no context is copied, whatever each row accepts.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import Cache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.modeling_outputs import ModelOutput

# The forward argument and output field: `cache` from transformers 5.24 on, `past_key_values` before.
CACHE_NAMES = ("cache", "past_key_values")
SUPPORTED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
# What layers that share another's keys and values have in the cache; transformers 5.17 has nothing there.
PLACEHOLDER = getattr(cache_utils, "DummyLayer", ())


def cache_name(target: PreTrainedModel) -> str:
    """What the target's forward calls its cache; the other name would be ignored without a word.

    Raises:
        ValueError: it takes none.
    """
    parameters = inspect.signature(target.forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise ValueError(
        f"{type(target).__name__}'s forward takes no cache; DDTree decoding needs one. Use another target."
    )


def output_cache(outputs: ModelOutput) -> Cache | None:
    """The cache of a forward's outputs, under either name; None if it returned none."""
    return next((outputs[name] for name in CACHE_NAMES if name in outputs), None)


def is_callers(cache: Cache) -> bool:
    """Whether `generate` was given the cache; before transformers 5.24 nobody can tell, so it may have been."""
    return getattr(cache, "_is_user_defined", Version(transformers.__version__) < Version("5.24"))


def checked_cache(cache: Cache | None) -> Cache:
    """The cache, if trees can grow on it.

    Raises:
        ValueError: no cache, or one with layers whose entries cannot be picked one by one (quantised, recurrent,
            indexed).
    """
    layers = [layer for layer in getattr(cache, "layers", []) if not isinstance(layer, PLACEHOLDER)]
    kinds = {type(layer).__name__ for layer in layers if type(layer) not in SUPPORTED_LAYERS}
    if not isinstance(cache, Cache) or kinds:
        what = f"layers of type {sorted(kinds)}" if kinds else f"type {type(cache).__name__}"
        raise ValueError(
            f"`cache`, the target's or the one given, has {what}: entries of rejected nodes can't be taken out of it. "
            "Use a model whose layers all are full or sliding attention, with a dynamic or static cache."
        )
    return cache


class TreeLayer(DynamicLayer):
    """A cache layer whose keys and values [rows, heads, slots, dim] are views of buffers that have room to grow.

    Args:
        sliding_window: slots that no row's window reaches are dropped; None = all are kept.
        limit: slots that will ever be needed, so that buffers need not grow beyond; None = unknown.

    Attributes:
        first: the number of the first slot that is kept.
        rows: how many of the buffers' rows, from the first on, take part.
    """

    def __init__(self, sliding_window: int | None = None, limit: int | None = None):
        super().__init__()
        self.is_sliding = sliding_window is not None
        self.sliding_window, self.limit = sliding_window, limit
        self.buffers: list[torch.Tensor] = []
        self.first = self.begin = self.length = self.rows = 0  # begin: where in the buffers slot `first` is

    def fill(self, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        """Takes over cached keys and values, without a copy until they grow."""
        self.buffers, self.first, self.begin = [keys, values], first, 0
        self.rows, self.length = keys.shape[0], keys.shape[-2]
        self.device, self.is_initialized = keys.device, True
        self._show()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states [rows, heads, new, dim]; returns all keys and values."""
        if not self.is_initialized:
            self.fill(key_states[..., :0, :], value_states[..., :0, :], first=0)
        new = key_states.shape[-2]
        self._reserve(new)
        end = self.begin + self.length
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, end : end + new] = states
        self.length += new
        self._show()
        return self.keys, self.values

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies slots `sources` [rows, n] to `targets` [rows, n], each row's own; reads all before it writes any."""
        shift = self.begin - self.first
        sources, targets = (slots.to(self.keys.device) + shift for slots in (sources, targets))
        rows = torch.arange(self.rows, device=sources.device)[:, None]
        for buffer in self.buffers:
            buffer[rows, :, targets] = buffer[rows, :, sources]

    def crop_to(self, end: int, shortest: int) -> None:
        """Drops slots from `end` on, and those that no window reaches any more.

        Args:
            shortest: the end of the shortest row.
        """
        if self.sliding_window is not None:
            dropped = max(shortest - self.sliding_window + 1 - self.first, 0)
            self.first, self.begin, self.length = self.first + dropped, self.begin + dropped, self.length - dropped
        self.length = end - self.first
        self._show()

    def reorder(self, order: torch.Tensor, rows: int) -> None:
        """Puts the buffers' rows into `order`; the first `rows` take part from now on."""
        self.buffers = [buffer.index_select(0, order.to(buffer.device)) for buffer in self.buffers]
        self.rows = rows
        self._show()

    def offload(self) -> None:
        """Moves the buffers to the CPU, as `Cache` asks of offloaded layers after each use."""
        self.buffers = [buffer.to("cpu", non_blocking=True) for buffer in self.buffers]
        self._show()

    def prefetch(self) -> None:
        """Moves them back before the next use."""
        self.buffers = [buffer.to(self.device, non_blocking=True) for buffer in self.buffers]
        self._show()

    def get_seq_length(self) -> int:
        """Slots up to the longest row's end."""
        return self.first + self.length

    def _show(self) -> None:
        end = self.begin + self.length
        self.keys, self.values = (buffer[: self.rows, :, self.begin : end] for buffer in self.buffers)

    def _reserve(self, new: int) -> None:
        """Makes room for `new` slots. A buffer grows to twice its use, so that each token is copied about once."""
        needed = self.length + new
        if self.begin + needed <= self.buffers[0].shape[-2]:
            return
        capacity = needed + max(self.length, 64)
        if self.limit is not None:
            capacity = max(needed, min(capacity, self.limit + new))
        grown = []
        for buffer in self.buffers:
            old = buffer[:, :, self.begin : self.begin + self.length]
            # Zeros, since rows that have ended are not written: a hidden NaN would still make attention NaN.
            larger = old.new_zeros(*old.shape[:2], capacity, old.shape[-1])
            larger[:, :, : self.length] = old
            grown.append(larger)
        self.buffers, self.begin = grown, 0


class TreeCache:
    """Rows of their own lengths over the `TreeLayer`s of a library cache.

    Args:
        layers: all at the same slots.
        rows: of the batch.
        end: committed slots of every row.

    Attributes:
        ends: [live rows] int64 on the CPU, one past each row's last committed slot.
        order: which row of the batch each of the buffers' rows is; the first `len(ends)` are live.
    """

    def __init__(self, layers: list[TreeLayer], rows: int, end: int = 0):
        self.layers = layers
        self.ends = torch.full((rows,), end)
        self.all_ends = self.ends.clone()  # by row of the batch, those that have ended too
        self.order = list(range(rows))

    @property
    def width(self) -> int:
        """Slots up to the longest row's end, of those that have ended too."""
        return int(self.all_ends.max())

    def commit(self, paths: list[list[int]]) -> None:
        """Keeps, of what the last forward appended, each row's path.

        Args:
            paths: per live row, indices into what was appended, ascending.
        """
        start, lengths = self.width, torch.tensor([len(path) for path in paths])
        longest = int(lengths.max())
        targets = self.ends[:, None] + torch.arange(longest)
        sources = targets.clone()  # where a path is shorter, a slot is copied onto itself
        for row, path in enumerate(paths):
            sources[row, : len(path)] = start + torch.tensor(path)
        if not torch.equal(sources, targets):
            for layer in self._used():
                layer.move(sources, targets)
        self.ends = self.ends + lengths
        self.all_ends = self.all_ends.clone()
        self.all_ends[self.order[: len(self.ends)]] = self.ends
        self.rollback()

    def rollback(self) -> None:
        """Drops what is not committed: the rest of a tree, or what a forward that failed left behind."""
        for layer in self._used():
            layer.crop_to(self.width, int(self.all_ends.min()))

    def keep(self, staying: list[int]) -> None:
        """Goes on with the live rows `staying`; the others stay in the buffers, untouched.

        Copies the buffers once, which happens as often as rows end.
        """
        live = len(self.ends)
        moved = [*staying, *(row for row in range(live) if row not in staying), *range(live, len(self.order))]
        self._reorder(moved, len(staying))
        self.order = [self.order[row] for row in moved]
        self.ends = self.ends[staying]

    def drop_others(self, staying: list[int]) -> None:
        """Goes on with the live rows `staying`, as a batch of those alone."""
        self._reorder(staying, len(staying))
        self.order = list(range(len(staying)))
        self.ends = self.all_ends = self.ends[staying]
        self.rollback()

    def keep_all(self) -> None:
        """Makes all rows of the batch live again, in their own order."""
        if len(self.ends) < len(self.order):
            self._reorder(sorted(range(len(self.order)), key=self.order.__getitem__), len(self.order))
        self.order, self.ends = sorted(self.order), self.all_ends.clone()
        self.rollback()

    def _reorder(self, order: list[int], rows: int) -> None:
        for layer in self._used():
            layer.reorder(torch.tensor(order), rows)

    def _used(self) -> Iterator[TreeLayer]:
        return (layer for layer in self.layers if isinstance(layer, TreeLayer) and layer.is_initialized)


def check_room(cache: Cache, slots: int) -> None:
    """Raises ValueError if a static cache can't hold the tokens of a call.

    Args:
        slots: that the call may commit in all.
    """
    for layer in cache.layers:
        if isinstance(layer, StaticLayer) and not layer.is_sliding and layer.max_cache_len < slots:
            raise ValueError(
                f"`max_cache_len` of the static cache is {layer.max_cache_len} and the call may fill {slots}; give a "
                "larger cache, or lower `max_new_tokens` or `max_length`."
            )


@contextmanager
def growing_trees(cache: Cache, rows: int, window: int | None, limit: int) -> Iterator[TreeCache]:
    """Puts tree layers in the place of a cache's own, which at the end hold what was committed.

    The cache has been filled with the prompt; its last token is a root, which the first commit is about.

    Args:
        window: of the model's sliding layers.
        limit: slots that will ever be committed.
    """
    originals, filled = list(cache.layers), int(cache.get_seq_length())
    trees = TreeCache([_tree_layer(layer, filled, window, limit) for layer in originals], rows, filled - 1)
    cache.layers = trees.layers
    try:
        yield trees
    finally:
        trees.keep_all()
        for original, layer in zip(originals, trees.layers, strict=True):
            if layer is not original and layer.is_initialized:
                _give_back(original, layer, trees.width)
        cache.layers = originals


def _tree_layer(original: Any, end: int, window: int | None, limit: int) -> Any:
    """The tree layer in a cache layer's place; a placeholder stays."""
    if isinstance(original, PLACEHOLDER):
        return original
    layer = TreeLayer(window if original.is_sliding else None, limit)
    if original.is_initialized:  # one that shares another's keys and values never is
        stored = end if isinstance(original, StaticLayer) else original.keys.shape[-2]
        stored = min(stored, original.keys.shape[-2])
        layer.fill(original.keys[..., :stored, :], original.values[..., :stored, :], first=end - stored)
    return layer


def _trimmed(states: torch.Tensor) -> torch.Tensor:
    """The states, copied where the buffer behind them is a quarter larger: the cache may be kept, copied and saved."""
    held, shown = states.untyped_storage().nbytes(), states.numel() * states.element_size()
    return states.clone() if held > 1.25 * shown else states


def _give_back(original: CacheLayerMixin, layer: TreeLayer, end: int) -> None:
    keys, values = layer.keys, layer.values
    if not isinstance(original, StaticLayer):
        if isinstance(original, DynamicSlidingWindowLayer):
            keys, values = (states[..., -original.sliding_window + 1 :, :] for states in (keys, values))
            original.cumulative_length = end
        original.keys, original.values = _trimmed(keys), _trimmed(values)
        return
    stored = min(end, original.max_cache_len)  # the last slots, newest last
    held = min(stored, keys.shape[-2])  # a window's oldest slot is never read again and may be gone
    for own, states in ((original.keys, keys), (original.values, values)):
        own[..., stored - held : stored, :] = states[..., keys.shape[-2] - held :, :]
    original.cumulative_length.fill_(stored)
    if isinstance(original, StaticSlidingWindowLayer):
        original.cumulative_length_int = end
