"""The kinds of attention layers a model has, and a tree forward's mask for each of them."""

from typing import Any

import torch
from transformers import PreTrainedModel

from .masks import MaskBuffer
from .tree_cache import TreeCache


class TreeMasks:
    """The masks of a model's forwards over trees, kept from one to the next.

    Attributes:
        types: the kind of each layer, as transformers calls them.
        window: of the sliding ones.
        buffers: by kind.
    """

    def __init__(self, model: PreTrainedModel):
        text_config = model.config.get_text_config(decoder=True)
        self.types = layer_types(text_config)
        self.window: int | None = getattr(text_config, "sliding_window", None)
        self.buffers = {
            kind: MaskBuffer(model.dtype, self.window if kind == "sliding_attention" else None)
            for kind in dict.fromkeys(self.types)
        }

    def write(
        self, trees: TreeCache, prompt_mask: torch.Tensor | None, appended: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """A mask per kind of layer; a single tensor where the model has one kind only.

        Args:
            trees: the model's cache, which this forward is planned on.
            prompt_mask: [rows, prompt], 0 = padding; None where there is none.
            appended, places: as in `slot_mask`, of everything that came after what is committed.
        """
        masks = {}
        for kind, buffer in self.buffers.items():
            layer = trees.layers[self.types.index(kind)]
            shown = layer.view_of(trees.width, appended)
            masks[kind] = buffer.write(trees.ends, prompt_mask, appended, places, shown)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def forget(self) -> None:
        """Rows have changed."""
        for buffer in self.buffers.values():
            buffer.forget()


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
