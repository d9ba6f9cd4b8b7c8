"""A drafter that starts from its target's last layers, so that training begins near a working model."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.dflash import DFlashDecoderLayer, DFlashDraftModel
from ..models.dflash_config import DFlashConfig


def drafter_from_target(
    target: PreTrainedModel, num_layers: int, block_size: int, mask_token_id: int, target_layer_ids: list[int] | None
) -> DFlashDraftModel:
    """Builds a drafter of the target's own shape, its layers copied from the target's last `num_layers`.

    The context projection starts by passing the last tap through; put that tap just below the copied layers.
    Made for targets with llama-like layers (q/k/v/o, gated MLP, two norms).

    Raises:
        ValueError: `num_layers` or `block_size` is out of range.

    Args:
        target_layer_ids: by default four taps, evenly spaced and ending just below the copied layers.
    """
    source = target.config
    if not 1 <= num_layers < source.num_hidden_layers:
        raise ValueError(f"`--layers` is {num_layers}; the target lets it be 1 to {source.num_hidden_layers - 1}.")
    if block_size < 2:
        raise ValueError(f"`--block-size` is {block_size}; the anchor and one drafted token make at least 2.")
    below = source.num_hidden_layers - num_layers - 1
    taps = target_layer_ids or sorted({round(below * fraction / 4) for fraction in (1, 2, 3, 4)})
    config = DFlashConfig(
        **{name: getattr(source, name) for name in SHARED_FIELDS},
        head_dim=target.base_model.layers[0].self_attn.head_dim,
        attention_bias=target.base_model.layers[0].self_attn.q_proj.bias is not None,
        num_hidden_layers=num_layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        num_target_layers=source.num_hidden_layers,
    )
    drafter = DFlashDraftModel(config).float()
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
        for layer, original in zip(drafter.layers, target.base_model.layers[-num_layers:], strict=True):
            _copy_layer(layer, original)
        drafter.norm.weight.copy_(target.base_model.norm.weight)
    return drafter


SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def _copy_layer(layer: DFlashDecoderLayer, original: Any) -> None:
    """Copies a target layer, with its input norm's scale folded into q, k and v.

    The drafter's context meets k and v without that norm's scale, so the scale has to live in the projections.
    """
    scale = original.input_layernorm.weight
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name).weight.copy_(getattr(original.self_attn, name).weight * scale)
    layer.self_attn.o_proj.weight.copy_(original.self_attn.o_proj.weight)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        if (bias := getattr(layer.self_attn, name).bias) is not None:
            from_target = getattr(original.self_attn, name).bias
            bias.zero_() if from_target is None else bias.copy_(from_target)
    layer.mlp.load_state_dict(original.mlp.state_dict())
    layer.post_attention_layernorm.weight.copy_(original.post_attention_layernorm.weight)
    # The target has no QK norm; unit-scale weights would flatten its attention. 2 per side: scores of spread ~4.
    layer.self_attn.q_norm.weight.fill_(2.0)
    layer.self_attn.k_norm.weight.fill_(2.0)
