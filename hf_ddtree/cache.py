"""The library's caches at both ends of a call: which ones trees can grow on, lent to the rounds and given back."""

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

from .tree_cache import TreeCache, TreeLayer

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
    layers = [_tree_layer(layer, filled, window, limit) for layer in originals]
    trees = TreeCache(layers, rows, filled - 1, offloaded=cache.offloading)
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
