"""The DFlash drafter: block diffusion over a target's hidden states (https://arxiv.org/abs/2602.06036, section 3)."""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, Cache, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DFlashCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import logging

from .dflash_config import CAUSAL_LAYER_TYPES, DFlashConfig
from .layouts import TENSOR_NAMES, target_copies
from .transition import Transition

logger = logging.get_logger(__name__)

# Mask functions call the cache `cache` from transformers 5.24 on, `past_key_values` before.
MASK_CACHE_NAME = "cache" if "cache" in inspect.signature(create_bidirectional_mask).parameters else "past_key_values"


class DFlashAttention(nn.Module):
    """Queries from the noise block; keys and values from [cached context, new context, noise block]."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.is_causal = config.layer_types[layer_idx] in CAUSAL_LAYER_TYPES[config.causal_layers]
        self.sliding_window = config.sliding_window if sliding else None

        query_size, kv_size = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [batch, block, hidden]
        context: torch.Tensor,  # [batch, new_context, hidden]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos, sin of [new_context + block] positions
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        batch, block, _ = hidden_states.shape
        keys_and_values = torch.cat([context, hidden_states], dim=1)  # [batch, new_context + block, hidden]

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(batch, projected.shape[1], -1, self.head_dim)

        query = self.q_norm(heads(self.q_proj(hidden_states))).transpose(1, 2)
        key = self.k_norm(heads(self.k_proj(keys_and_values))).transpose(1, 2)
        value = heads(self.v_proj(keys_and_values)).transpose(1, 2)

        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        query = query * cos[..., -block:, :] + rotate_half(query) * sin[..., -block:, :]
        key = key * cos + rotate_half(key) * sin
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        options = {"dropout": 0.0, "scaling": self.scaling, "sliding_window": self.sliding_window}
        output, _ = attention(self, query, key, value, attention_mask, **options)
        return self.o_proj(output.reshape(batch, block, -1))


class DFlashDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **attention_inputs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **attention_inputs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashDraftModel(PreTrainedModel):
    """Block-diffusion drafter; parameter names are those of the published checkpoints.

    It has no embedding and no head: the target's own are used for the noise block and for the logits. The context
    (the target's tapped hidden states) enters each layer's keys and values only, so a cache that keeps it encodes
    every committed token exactly once.
    """

    config_class = DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    input_modalities = ("text",)
    supports_gradient_checkpointing = True
    _no_split_modules = ("DFlashDecoderLayer",)
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        taps = config.target_layer_ids or []
        self.fc = nn.Linear(len(taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        rank = config.transition_rank
        self.transition = Transition(config.hidden_size, rank, config.rms_norm_eps) if rank else None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if self.transition is not None and module is self.transition.up_proj:
            init.zeros_(module.weight)  # changes nothing until it is trained

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a checkpoint in any layout of docs/interchange.md, without remote code.

        Raises:
            ValueError: the config lacks a field or has one that is not honoured (see `DFlashConfig`), or the checkpoint
                lacks a tensor or has one that is not the drafter's.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("key_mapping", TENSOR_NAMES)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        random = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
        if random:
            raise ValueError(
                f"`{pretrained_model_name_or_path}` lacks the drafter tensors {random}, or has them in another shape; "
                "they would be random. Check that the checkpoint is complete and that its config fits it."
            )
        if copies := target_copies(info["unexpected_keys"]):
            logger.warning(f"Not used: {copies}. Drafts go through the target's own embedding and head.")
        model._weight_conversions = None  # `save_pretrained` would undo the renaming; it must write the published names
        return (model, info) if wants_info else model

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Denoises one block.

        Args:
            noise_embeds: [batch, block, hidden]; the target's embeddings of the anchor token and of mask tokens.
            context_hidden_states: [batch, new_context, taps * hidden]; the tapped hidden states of the tokens
                committed since the last call, which are not in `cache` yet.
            attention_mask: [batch, cached + new_context + block], 1 = real token; or an additive mask
                [batch, 1, block, keys], or a dict of them by layer type; None where all is visible.
            position_ids: [batch, new_context + block]; by default they continue from the cache.
            cache: a `DFlashCache`; the caller crops the noise block off it after the call.
            kwargs: `past_key_values`, the name transformers before 5.24 calls the cache by.

        Returns:
            `last_hidden_state` [batch, block, hidden]: slot k > 0 goes through the target's head to give the
            distribution of the k-th token after the anchor; slot 0 is unused.
        """
        cache = kwargs.get("past_key_values") if cache is None else cache
        context = self.hidden_norm(self.fc(context_hidden_states.to(self.dtype)))
        hidden_states = noise_embeds.to(context.dtype)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            length = context.shape[1] + hidden_states.shape[1]
            position_ids = torch.arange(past, past + length, device=hidden_states.device)[None]

        masks = self._layer_masks(hidden_states, context.shape[1], attention_mask, cache)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer, layer_type in zip(self.layers, self.config.layer_types or [], strict=True):
            hidden_states = layer(
                hidden_states,
                context=context,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                cache=cache,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))

    def _layer_masks(
        self,
        hidden_states: torch.Tensor,
        new_context: int,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
        cache: Cache | None,
    ) -> dict[str, torch.Tensor | None]:
        """One mask per layer type, by the library's mask functions unless the caller brought them."""
        if isinstance(attention_mask, dict):
            return dict(attention_mask)
        if cache is None:  # the mask functions read key lengths off a cache
            cache = DFlashCache(config=self.config)
            cache.set_previous_accepted_tokens(new_context)
        inputs = {
            "config": self.config,
            "inputs_embeds": hidden_states,
            "attention_mask": attention_mask,
            MASK_CACHE_NAME: cache,
        }
        makers = {"full_attention": (create_causal_mask, create_bidirectional_mask)}
        if self.config.sliding_window:
            makers["sliding_attention"] = (create_sliding_window_causal_mask, create_bidirectional_sliding_window_mask)
        causal = CAUSAL_LAYER_TYPES[self.config.causal_layers]
        return {kind: pair[kind not in causal](**inputs) for kind, pair in makers.items()}


def noise_embeddings(embedding: Any, noise_ids: torch.Tensor) -> torch.Tensor:
    """The target's embeddings of `noise_ids`, without the norm that some embeddings apply: drafters are trained so.

    Args:
        embedding: the target's input embedding; called as a module, so that hooks and quantised layers work.
    """
    if not hasattr(embedding, "embed_norm"):
        return embedding(noise_ids)
    if embedding.weight.device.type != "meta":
        return nn.Embedding.forward(embedding, noise_ids)
    # accelerate has moved the weight away: it is there during a call of the module, whose norm is given what we want.
    given, thread = [], threading.get_ident()

    def keep(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if threading.get_ident() == thread:  # another thread may generate with the same model
            given.append(inputs[0])

    handle = embedding.embed_norm.register_forward_pre_hook(keep)
    try:
        embedding(noise_ids)
    finally:
        handle.remove()
    return given[0]


AutoModel.register(DFlashConfig, DFlashDraftModel, exist_ok=True)
