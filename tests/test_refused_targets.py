"""Targets whose layers can't go back to a branch, or can't tell siblings apart, are refused before any forward."""

import pytest
import torch
from families import FAMILIES, HIDDEN
from stubs import decode, make_drafter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8]])

_COMMON = {name: value for name, value in FAMILIES["qwen3_moe"].items() if name not in ("model_type", "head_dim")}
_LATENT = {name: value for name, value in FAMILIES["deepseek_v3"].items() if name != "model_type"}
_INDEXED = {**_LATENT, "head_dim": 4, "index_topk": 6, "index_head_dim": 8, "index_n_heads": 2}
_HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_HALF_CONV = {"layer_types": ["conv", "full_attention"] * 2}
_MAMBA = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8, "time_step_rank": 4}
_IN_LAYERS = {"mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_chunk_size": 8, "mamba_dt_rank": 4}
_GATED_DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    **_HALF_LINEAR,
}
_HYBRID = {"layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4}

# By model type, what differs from `_COMMON`.
RECURRENT: dict[str, dict] = {
    "bailing_hybrid": {**_LATENT, "head_dim": 4, "layer_group_size": 2, "num_local_experts": 4},
    "bamba": {"attn_layer_indices": [1, 3], **_IN_LAYERS},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 1, **_IN_LAYERS},
    "falcon_mamba": _MAMBA,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, **_IN_LAYERS, "num_local_experts": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, **_IN_LAYERS},
    "kimi_linear": {**_LATENT, **_HALF_LINEAR, "linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4},
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    "olmo_hybrid": {**_GATED_DELTA},
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_next": _GATED_DELTA,
    "recurrent_gemma": {"lru_width": HIDDEN, "attention_window_size": 8},
    "rwkv": {"attention_hidden_size": HIDDEN, "context_length": 64},
    "xlstm": {"num_heads": 2, "chunk_size": 8},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 2, **_HYBRID},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8, "adapter_rank": 4, "chunk_size": 8, **_HYBRID},
}
LAYERS: dict[str, dict] = {
    "axk2": _INDEXED,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "hy_v4": {**_INDEXED, "hc_mult": 2},
    "lfm2": _HALF_CONV,
    "lfm2_moe": {**_HALF_CONV, "num_dense_layers": 2},
    "llama4_text": {"intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 8},
    "minimax": {**_HALF_LINEAR, "num_local_experts": 4, "block_size": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "num_local_experts": 4,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 16,
        "index_head_dim": 8,
        "head_dim": 8,
        "rotary_dim": 4,
    },
}
POSITIONLESS: dict[str, dict] = {
    "bloom": {"n_layer": 4, "n_head": 4},
    "falcon": {"alibi": True},
    "mpt": {"d_model": HIDDEN, "n_layers": 4, "n_heads": 4, "use_cache": True},
}
REASONS = {"recurrent state": RECURRENT, "layers of type": LAYERS, "takes no `position_ids`": POSITIONLESS}
CASES = [(reason, kind, fields) for reason, kinds in REASONS.items() for kind, fields in kinds.items()]


def tiny(model_type: str, fields: dict) -> PreTrainedModel:
    """A tiny random target; older versions of transformers lack some."""
    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {model_type}")
    config = AutoConfig.for_model(model_type, **{**_COMMON, **fields})
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    assert size < 1e6, f"{model_type} is not tiny: {size} weights"
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("reason, model_type, fields", CASES, ids=[kind for _, kind, _ in CASES])
def test_fault_18_is_refused_by_name_before_any_forward(reason, model_type, fields):
    target = tiny(model_type, fields)
    forwards = []
    for module in target.modules():
        module.register_forward_pre_hook(lambda module, inputs: forwards.append(type(module).__name__))
    with pytest.raises(ValueError, match=reason) as error:
        decode(target, make_drafter(target), PROMPT, max_new_tokens=4)
    assert type(target).__name__ in str(error.value)
    assert not forwards


@pytest.mark.parametrize("attention", ["flex_attention"])
def test_fault_21_attention_that_cannot_take_a_tree_mask_is_refused(attention):
    """Compiled flex attention under a mask of numbers corrupts a CPU's heap (torch 2.13)."""
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES["llama"])).eval()
    target.set_attn_implementation(attention)
    with pytest.raises(ValueError, match=rf"`attn_implementation` is '{attention}'"):
        decode(target, make_drafter(target), PROMPT, max_new_tokens=4)
