"""A drafter of its target's shape, begun from the target's last layers where those are of the drafter's kind."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration import DDTreeConfig
from ..drafting.dflash import check_drafter
from ..models.dflash import DFlashDraftModel
from ..models.dflash_config import DFlashConfig

TAPS = 4
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
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

    Where the target's layers are those of llama or Qwen3 (q/k/v/o, gated SiLU MLP, two norms) its last `num_layers`
    are copied, and the context projection passes the last tap through, so that training begins near a working model.
    Else it begins random.

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
    heads = source.num_attention_heads
    shape = {
        "intermediate_size": 4 * source.hidden_size,
        "num_key_value_heads": heads,
        **{name: value for name in SHARED_FIELDS if (value := getattr(source, name, None)) is not None},
    }
    layers = list(getattr(target.get_decoder(), "layers", []))[-num_layers:]
    config = DFlashConfig(
        **shape,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // heads,
        attention_bias=any(name.endswith("q_proj.bias") for layer in layers for name, _ in layer.named_parameters()),
        rope_parameters=_rope(source),
        num_hidden_layers=num_layers,
        num_target_layers=depth,
        target_layer_ids=taps,
        **fields,
    )
    drafter = DFlashDraftModel(config).float()
    if layers and _config_is_alike(source) and all(map(_is_alike, drafter.layers, layers)):
        _start_from(drafter, target, layers)
    return drafter


def drafter_from_checkpoint(folder: str, target: PreTrainedModel, transition_rank: int) -> DFlashDraftModel:
    """A trained drafter in float32, to be trained further; a transition of another rank is begun anew.

    Raises:
        ValueError: it is of another target.
    """
    drafter = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    check_drafter(drafter, target, DDTreeConfig())
    config = drafter.config
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


def _rope(source: Any) -> dict[str, Any]:
    """The target's RoPE, over whole heads, which is all a drafter knows; plain where its kind depends on the length."""
    rope = dict(getattr(source, "rope_parameters", None) or {})
    rope = rope if "rope_type" in rope or "rope_theta" in rope else dict(rope.get("full_attention") or {})
    rope.pop("partial_rotary_factor", None)
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        rope = {"rope_theta": rope.get("rope_theta")}
    return {**rope, "rope_theta": rope.get("rope_theta") or 10000.0}


def _config_is_alike(source: Any) -> bool:
    """Whether the target's layers compute what the drafter's do, as far as its config says."""
    rope = getattr(source, "rope_parameters", None) or {}
    partial = rope.get("partial_rotary_factor") or getattr(source, "partial_rotary_factor", None) or 1.0
    return getattr(source, "hidden_act", None) == "silu" and partial == 1.0


def _is_alike(layer: nn.Module, original: nn.Module) -> bool:
    """Whether a target's layer has the drafter's parameters, QK norms left out, and norms of the same kind."""
    ours, theirs = ({n: p.shape for n, p in each.named_parameters()} for each in (layer, original))
    for name in QK_NORMS:
        ours.pop(name), theirs.pop(name, None)
    biases = {name for name in ours if name.endswith("o_proj.bias")} - theirs.keys()  # Qwen2 has none there
    return {n: s for n, s in ours.items() if n not in biases} == theirs and all(
        _scales_by_its_weight(getattr(original, name)) for name in ("input_layernorm", "post_attention_layernorm")
    )


@torch.no_grad()
def _scales_by_its_weight(norm: Any) -> bool:
    """Whether a norm is RMSNorm times its weight; Gemma's is times one more."""
    probe = torch.linspace(-2, 3, norm.weight.shape[0], device=norm.weight.device, dtype=torch.float32)
    expected = nn.functional.rms_norm(probe, probe.shape, eps=1e-6) * norm.weight.float()
    return torch.allclose(norm(probe.to(norm.weight.dtype)).float(), expected, atol=0.05, rtol=0.05)


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
    for name in ("q_norm", "k_norm"):
        ours, theirs = getattr(layer.self_attn, name).weight, getattr(original.self_attn, name, None)
        if theirs is not None and theirs.weight.shape == ours.shape:
            ours.copy_(theirs.weight)
        else:  # unit scale would flatten the attention; 2 per side: scores of spread ~4
            ours.fill_(2.0)
