"""A drafter of its target's shape, begun from the target's last layers where those are of the drafter's kind."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration import DDTreeConfig
from ..drafting.dflash import check_drafter
from ..models.dflash import DFlashDecoderLayer, DFlashDraftModel
from ..models.dflash_config import DFlashConfig

TAPS = 4
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def drafter_from_target(target: PreTrainedModel, num_layers: int, **fields: Any) -> DFlashDraftModel:
    """Builds a drafter in float32.

    Where the target's layers are llama-like (q/k/v/o, gated MLP, two norms) its last `num_layers` are copied, and the
    context projection passes the last tap through, so that training begins near a working model. Else it begins random.

    Args:
        num_layers: of the drafter.
        fields: of `DFlashConfig`: `block_size` and `mask_token_id` at least; `target_layer_ids` None means four taps,
            evenly spaced and ending just below the last `num_layers` layers.

    Raises:
        ValueError: a shape is out of range.
    """
    source = target.config.get_text_config(decoder=True)
    depth = source.num_hidden_layers
    if not 1 <= num_layers < depth:
        raise ValueError(f"`--layers` is {num_layers}; the target lets it be 1 to {depth - 1}.")
    if (block_size := fields["block_size"]) < 2:
        raise ValueError(f"`--block-size` is {block_size}; the anchor and one drafted token make at least 2.")
    below = depth - num_layers - 1
    taps = fields.pop("target_layer_ids", None) or sorted({round(below * (i + 1) / TAPS) for i in range(TAPS)})
    if min(taps) < 0 or max(taps) >= depth or len(set(taps)) < len(taps):
        raise ValueError(f"`--target-layer-ids` is {taps}; the target has layers 0..{depth - 1}, each taken once.")
    config = DFlashConfig(
        **{name: getattr(source, name) for name in SHARED_FIELDS if hasattr(source, name)},
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        attention_bias=_has_bias(target),
        rope_parameters=_rope(source),
        num_hidden_layers=num_layers,
        num_target_layers=depth,
        target_layer_ids=taps,
        **fields,
    )
    drafter = DFlashDraftModel(config).float()
    layers = list(target.get_decoder().layers)[-num_layers:]
    if all(_is_alike(layer, original) for layer, original in zip(drafter.layers, layers, strict=True)):
        _start_from(drafter, target, layers)
    return drafter


def drafter_from_checkpoint(folder: str, target: PreTrainedModel, transition_rank: int) -> DFlashDraftModel:
    """A trained drafter in float32, to be trained further; a transition of another rank is begun anew.

    Raises:
        ValueError: it is of another target, or has causal layers, which training does not know.
    """
    drafter = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    check_drafter(drafter, target, DDTreeConfig())
    config = drafter.config
    if config.causal_layers != "none":
        raise ValueError(
            f"`--start-from {folder}` has causal layers ({config.causal_layers!r}), which can't be trained."
        )
    config.depth_temperatures = None
    config.vocab_size = config.vocab_size or target.config.get_text_config(decoder=True).vocab_size
    if transition_rank != config.transition_rank:
        config.transition_rank = transition_rank
        drafter.transition = DFlashDraftModel(config).transition
    return drafter


def choose_mask_token(tokenizer: PreTrainedTokenizerBase, counts: torch.Tensor) -> int:
    """The id that stands for "to be drafted": one that the text does not use.

    Args:
        counts: [vocab] how often each id occurs in the data.

    Returns:
        The tokenizer's mask token, else the first special token that never occurs and ends nothing, else the rarest id,
        of equals the last.
    """
    ending = {tokenizer.eos_token_id, tokenizer.bos_token_id, None}
    candidates = [tokenizer.mask_token_id, *sorted(tokenizer.all_special_ids)]
    free = [token for token in candidates if token not in ending and token < len(counts) and counts[token] == 0]
    return free[0] if free else len(counts) - 1 - int(counts.flip(0).argmin())


def _has_bias(target: PreTrainedModel) -> bool:
    attention = getattr(target.get_decoder().layers[0], "self_attn", None)
    return getattr(getattr(attention, "q_proj", None), "bias", None) is not None


def _rope(source: Any) -> dict[str, Any]:
    """The target's RoPE parameters; those of its full attention where it has several."""
    rope = dict(source.rope_parameters or {})
    return rope if "rope_theta" in rope else dict(rope.get("full_attention") or {"rope_theta": 10000.0})


def _is_alike(layer: DFlashDecoderLayer, original: nn.Module) -> bool:
    """Whether every tensor that is copied has the same shape in the target's layer."""
    theirs = {name: tensor.shape for name, tensor in original.named_parameters()}
    return all(
        theirs.get(name) == tensor.shape
        for name, tensor in layer.named_parameters()
        if name.endswith("weight") and not name.endswith(("q_norm.weight", "k_norm.weight"))
    )


@torch.no_grad()
def _start_from(drafter: DFlashDraftModel, target: PreTrainedModel, layers: list[nn.Module]) -> None:
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -drafter.config.hidden_size :] = torch.eye(drafter.config.hidden_size)
    for layer, original in zip(drafter.layers, layers, strict=True):
        _copy_layer(layer, original)
    drafter.norm.weight.copy_(target.get_decoder().norm.weight)


def _copy_layer(layer: Any, original: Any) -> None:
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
