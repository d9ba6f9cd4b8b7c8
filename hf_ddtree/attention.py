"""The kinds of attention layers a model has, and a tree forward's mask for each of them."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .cache import TreeCache
from .masks import Cached, slot_mask


@dataclass(frozen=True)
class LayerKinds:
    """A model's attention layers.

    Attributes:
        types: of each layer, as transformers calls them.
        window: of the sliding ones.
        dtype: of the model, and so of its masks.
    """

    types: list[str]
    window: int | None
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LayerKinds":
        """The kinds of `model`'s layers."""
        text_config = model.config.get_text_config(decoder=True)
        return cls(layer_types(text_config), getattr(text_config, "sliding_window", None), model.dtype)

    def masks(
        self, trees: TreeCache, visible: torch.Tensor, appended: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """A mask per kind of layer; a single tensor where the model has one kind only.

        Args:
            trees: the model's cache.
            visible: [rows, slots] which of its committed slots may be seen.
            appended, places: as in `slot_mask`, of everything that came after them.
        """
        masks = {}
        for kind in set(self.types):
            first = trees.layers[self.types.index(kind)].first
            window = self.window if kind == "sliding_attention" else None
            masks[kind] = slot_mask(Cached(visible[:, first:], first), appended, places, self.dtype, window)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def layer_types(text_config: Any) -> list[str]:
    """The kind of each attention layer, as `DynamicCache(config)` decides it; GPT-Neo has a list of its own."""
    if "local" in (kinds := getattr(text_config, "attention_layers", None) or []):
        return list(kinds)
    if (types := getattr(text_config, "layer_types", None)) is not None:
        return list(types)
    if getattr(text_config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = "sliding_attention" if getattr(text_config, "sliding_window", None) is not None else "full_attention"
    return [kind] * text_config.num_hidden_layers
