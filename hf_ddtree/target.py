"""The target's side of a round: prefill, the tree forward, and the commit to its cache."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.modeling_outputs import ModelOutput

from .acceptance import Accepted
from .cache import cache_name, checked_cache, compact, output_cache, prefix_length
from .masks import tree_mask
from .tree import Tree

# Kept by `Target` itself, or meaningful for the prompt only.
HANDLED_KWARGS = {
    *("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "inputs_embeds"),
    *("output_hidden_states", "output_attentions", "token_type_ids", "mm_token_type_ids", "input_ids"),
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
}
TAPS_BY_LIST = Version(transformers.__version__) >= Version("5.24")
SUPPORTED_ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class Context:
    """What the drafter learns from a round: the tokens committed by it, all but the last.

    Attributes:
        hidden_states: [1, tokens, taps * hidden] the tapped layers' outputs, concatenated.
        positions: [1, tokens] their positions, padding not counted.
    """

    hidden_states: torch.Tensor
    positions: torch.Tensor


class Target:
    """The target model with its cache, which after every commit holds all committed tokens but the last.

    Args:
        model: the model that `generate` was called on.
        model_kwargs: as `generate` prepared them.
        target_layer_ids: layers whose outputs the drafter reads.
    """

    def __init__(self, model: PreTrainedModel, model_kwargs: dict[str, Any], target_layer_ids: list[int]):
        self.model, self.target_layer_ids = model, target_layer_ids
        self.cache_name = cache_name(model)
        self.has_router = "output_router_logits" in inspect.signature(model.forward).parameters
        self.kwargs = dict(model_kwargs)
        self.cache = checked_cache(model_kwargs.get(self.cache_name))
        text_config = model.config.get_text_config(decoder=True)
        self.layer_types = _layer_types(text_config)
        self.sliding_window = getattr(text_config, "sliding_window", None)

    @property
    def output_hidden_states(self) -> list[int] | bool:
        """Only the tapped layers; all before transformers 5.24: given a list, 5.17 returns one layer too far."""
        return [layer + 1 for layer in self.target_layer_ids] if TAPS_BY_LIST else True

    def prefill(self, input_ids: torch.Tensor, generation_config: GenerationConfig) -> ModelOutput:
        """The library's own prefill; its logits are those of a tree of the root alone, the prompt's last token."""
        kwargs = {**self.kwargs, "output_hidden_states": self.output_hidden_states}
        outputs = self.model._prefill(input_ids, generation_config, kwargs)
        filled = output_cache(outputs)
        if filled is None or filled is not self.cache or filled.get_seq_length() == 0:
            raise RuntimeError(
                f"{type(self.model).__name__} did not fill the cache it was given; trees need one it fills."
            )
        return outputs

    def verify(self, tree: Tree) -> ModelOutput:
        """One forward over all nodes; logits [1, nodes, vocab] and the tapped hidden states of every node."""
        positions = self.kwargs["position_ids"][..., -1:] + tree.depths  # the root stands at the last position
        inputs = {key: value for key, value in self.kwargs.items() if key not in HANDLED_KWARGS}
        inputs[self.cache_name] = self.cache
        if (types := self.kwargs.get("token_type_ids")) is not None:  # new tokens are of the last one's type
            inputs["token_type_ids"] = types[:, -1:].expand(-1, tree.num_nodes)
        if self.has_router:
            inputs["output_router_logits"] = False  # its loss would read the tree mask as a padding mask
        return self.model(
            input_ids=tree.tokens,
            attention_mask=self._masks(tree),
            position_ids=positions,
            use_cache=True,
            output_hidden_states=self.output_hidden_states,
            return_dict=True,
            **inputs,
        )

    @contextmanager
    def undoing(self, tree: Tree) -> Iterator[None]:
        """Takes the tree's nodes but the root out of the cache if the block raises: the caller may own the cache."""
        try:
            yield
        except BaseException:
            compact(self.cache, tree.num_nodes, [0])
            raise

    def commit(self, outputs: ModelOutput, num_nodes: int, accepted: Accepted) -> Context:
        """Compacts the cache to the accepted path and advances mask and positions; returns the drafter's news.

        Args:
            outputs: of the prefill (`num_nodes` 1: the root; the prompt before it stays whole) or of `verify`.
        """
        compact(self.cache, num_nodes, accepted.path)
        taps = [outputs.hidden_states[layer + 1] for layer in self.target_layer_ids]
        device = taps[0].device
        before = taps[0].shape[1] - num_nodes  # tokens of the prompt before the root, 0 after the prefill
        rows = torch.cat([torch.arange(before), before + torch.tensor(accepted.path)]).to(device)
        mask = self.kwargs.get("attention_mask")
        if before and mask is not None:  # left padding is none of the drafter's business
            rows = rows[mask[0, -len(rows) :].to(device).bool()]
        hidden_states = torch.cat([tap.to(device)[:, rows] for tap in taps], dim=-1)

        last = self.kwargs["position_ids"].reshape(-1)[-1] + len(accepted.path) - 1
        self.kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.kwargs, num_new_tokens=len(accepted.path)
        )
        positions = torch.arange(1 - len(rows), 1, device=last.device)[None] + last
        return Context(hidden_states, positions)

    def _masks(self, tree: Tree) -> torch.Tensor | dict[str, torch.Tensor]:
        """A mask per kind of attention layer; a single tensor where the model has one kind only."""
        masks = {}
        for kind in set(self.layer_types):
            layer = self.layer_types.index(kind)
            prefix = prefix_length(self.cache, layer)
            mask = self.kwargs.get("attention_mask")  # [1, committed], the root last
            visible = torch.ones(1, prefix, dtype=torch.bool) if mask is None else mask[:, :-1][:, -prefix:].bool()
            window = self.sliding_window if kind == "sliding_attention" else None
            masks[kind] = tree_mask(tree, visible.to(tree.tokens.device), self.model.dtype, window)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def check_target(model: PreTrainedModel) -> None:
    """Refuses, before the first forward, targets whose tree forward would be wrong.

    Raises:
        ValueError: recurrent state, encoder-decoder, an attention backend that cannot take the mask, layers of
            another kind than full and sliding attention, or a forward without positions or cache.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; DDTree decoding works with decoder-only models.")
    if model._is_stateful:
        raise ValueError(
            f"{name} keeps a recurrent state, which can't go back to a branch; use an attention-only target."
        )
    text_config = model.config.get_text_config(decoder=True)
    strange = set(_layer_types(text_config)) - {"full_attention", "sliding_attention"}
    if strange:
        raise ValueError(
            f"{name} has layers of type {sorted(strange)}; DDTree decoding can mask and roll back full and sliding "
            "attention layers only. Use another target."
        )
    attention = text_config._attn_implementation
    if attention not in SUPPORTED_ATTENTION:
        raise ValueError(
            f"`attn_implementation` is {attention!r}, which can't take a tree mask; call "
            f"`model.set_attn_implementation('sdpa')` (supported: {', '.join(SUPPORTED_ATTENTION)})."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(text_config, "alibi", False):
        raise ValueError(f"{name} takes no `position_ids`; siblings share a position, so trees need them.")
    cache_name(model)


def check_rope(model: PreTrainedModel, end: int) -> None:
    """Refuses positions at which RoPE frequencies depend on the greatest position in a forward: a tree's is ahead.

    Args:
        end: one past the last position that the call may reach.
    """
    text_config = model.config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else filter(None, rope.values()):
        kind = parameters.get("rope_type", "default")
        limit = {
            "dynamic": text_config.max_position_embeddings,  # new frequencies at every length beyond
            "longrope": parameters.get("original_max_position_embeddings"),  # other frequencies beyond
        }.get(kind)
        if limit is not None and limit < end:
            raise ValueError(
                f"`max_new_tokens` or `max_length` lets positions reach {end}, and the target's {kind} RoPE changes "
                f"its frequencies beyond {limit}, which a tree would reach too early; lower it by {end - limit}."
            )


def _layer_types(text_config: Any) -> list[str]:
    """The kind of each attention layer, as `DynamicCache(config)` decides it; GPT-Neo has a list of its own."""
    if "local" in (kinds := getattr(text_config, "attention_layers", None) or []):
        return list(kinds)
    if (layer_types := getattr(text_config, "layer_types", None)) is not None:
        return list(layer_types)
    if getattr(text_config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = "sliding_attention" if getattr(text_config, "sliding_window", None) is not None else "full_attention"
    return [kind] * text_config.num_hidden_layers
