"""What the strategy asks of a transformers cache: its argument's name, recording, and compaction after a round."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import ModelOutput

# The forward argument and output field: `cache` from transformers 5.24 on, `past_key_values` before.
CACHE_NAMES = ("cache", "past_key_values")


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


def output_cache(outputs: ModelOutput) -> DynamicCache | None:
    """The cache of a forward's outputs, under either name; None if it returned none."""
    return next((outputs[name] for name in CACHE_NAMES if name in outputs), None)


def checked_cache(cache: Cache | None) -> DynamicCache:
    """The cache, if it can be compacted.

    Raises:
        ValueError: no cache, or one with layers whose entries cannot be picked one by one (static, quantised,
            offloaded, recurrent, indexed).
    """
    supported = (DynamicLayer, DynamicSlidingWindowLayer)
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", []) if type(layer) not in supported}
    if not isinstance(cache, DynamicCache) or kinds or getattr(cache, "offloading", False):
        what = f"layers of type {sorted(kinds)}" if kinds else f"type {type(cache).__name__}"
        raise ValueError(
            f"`cache`, the target's or the one given, has {what}: entries of rejected nodes can't be taken out of it. "
            "Use a model whose layers all are full or sliding attention, with the default `DynamicCache`."
        )
    return cache


@contextmanager
def recording(cache: DynamicCache) -> Iterator[None]:
    """Makes sliding layers keep what a tree pass pushes out of their window; they are as before at the end."""
    sliding = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    before = [layer.record_past for layer in sliding]
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer, record_past in zip(sliding, before, strict=True):
            layer.record_past = record_past


def compact(cache: DynamicCache, num_nodes: int, path: list[int]) -> None:
    """Keeps the prefix and the nodes on the accepted path, in place; `num_nodes` is what the last forward appended.

    Sliding layers are also trimmed to the keys that the next round can see. Latent (MLA) layers hold their two latents
    where others hold keys and values, so the same gather serves them.

    Args:
        path: node indices from the root down; row `n` of the tree part becomes row `path.index(n)`.
    """
    for layer in cache.layers:
        if not layer.is_initialized:  # a layer that shares another one's keys and values
            continue
        layer.keys = _keep(layer.keys, num_nodes, path)
        layer.values = _keep(layer.values, num_nodes, path)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length += len(path) - num_nodes
            layer.crop(0)


def _keep(states: torch.Tensor, num_nodes: int, path: list[int]) -> torch.Tensor:
    """Rows [0, prefix) and prefix + path of `states` [batch, heads, prefix + nodes, dim]."""
    prefix = states.shape[-2] - num_nodes
    if path != list(range(len(path))):
        # The gather reads all rows before any is written; a path only moves rows towards the front.
        index = torch.tensor(path, device=states.device) + prefix
        states[..., prefix : prefix + len(path), :] = states.index_select(-2, index)
    return states[..., : prefix + len(path), :]


def prefix_length(cache: DynamicCache, layer: int) -> int:
    """Cached keys that layer number `layer` hands to attention, before a forward's own."""
    return cache.layers[layer].keys.shape[-2]
