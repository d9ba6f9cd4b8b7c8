"""Tiny random configs of the target families, and prompts with images and videos for those that take them."""

import torch

VOCAB, HIDDEN, LAYERS = 64, 32, 4
IMAGE, VIDEO, VISION_START, VISION_END = 60, 61, 62, 63  # placeholder tokens

# The large init spreads the logits, so that greedy ties do not occur.
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
_LATENT = {
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
del _LATENT["head_dim"]
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}

FAMILIES: dict[str, dict] = {
    "llama": {"model_type": "llama", **_COMMON},
    "qwen2": {"model_type": "qwen2", **_COMMON},
    "qwen3": {"model_type": "qwen3", **_COMMON},
    "qwen3-sliding": {"model_type": "qwen3", "use_sliding_window": True, **_COMMON, **_MIXED},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **_COMMON,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 8, **_COMMON},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **_COMMON,
        **_MIXED,
    },
    "gemma2": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 5.0,
        **_COMMON,
        **_MIXED,
    },
    "gemma3": {"model_type": "gemma3_text", **_COMMON, **_MIXED},
    "gemma3-images": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "query_pre_attn_scalar": 8, **_COMMON, **_MIXED},
        "vision_config": {**_VISION, "image_size": 8, "patch_size": 2},
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
        "image_token_index": IMAGE,
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_END,
        "initializer_range": 0.5,
        "eos_token_id": None,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT},
    "kimi_k25": {
        "model_type": "kimi_k25",
        "text_config": {"model_type": "deepseek_v3", **_LATENT},
        "vision_config": {**_VISION, "patch_size": 2, "pos_emb_height": 2, "pos_emb_width": 2},
        "projection_hidden_size": 16,
        "tie_word_embeddings": False,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text", "rope_parameters": _MROPE, **_COMMON},
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "patch_size": 2,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.5,
        },
        "tie_word_embeddings": False,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    },
}
# One of each kind of attention and cache, for suites too long to run with all.
CORE_FAMILIES = ("llama", "qwen3", "qwen3-sliding", "mistral", "gpt_oss", "gemma3", "deepseek_v3", "kimi_k25")
IMAGE_FAMILIES = ("gemma3-images", "kimi_k25", "qwen3_vl")
PIXEL_INPUTS = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
_MEDIA = {  # what follows a grid in names: images and videos
    "image": ("pixel_values", "image_grid_thw", IMAGE, 1),
    "video": ("pixel_values_videos", "video_grid_thw", VIDEO, 2),
}


def media_prompt(family: str, kind: str = "image", seed: int = 0) -> dict[str, torch.Tensor]:
    """A prompt of one row with an image, or a video of two frames, between words: what `generate` takes.

    An image or a frame has 4 x 4 patches, which become four tokens; Kimi pools a video over time.

    Args:
        kind: "image" or "video"; Gemma takes no videos.
    """
    generator = torch.Generator().manual_seed(seed)
    pixels_name, grid_name, placeholder, modality = _MEDIA[kind]
    frames = 2 if kind == "video" else 1
    one = [VISION_START, *[placeholder] * 4, VISION_END]
    media = one if family == "kimi_k25" else [token for frame in range(frames) for token in (20 + frame, *one)]
    ids = torch.tensor([[7, 3, 44, *media, 12, 9, 30]])
    types = modality * (ids == placeholder).long()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "gemma3-images":
        return {**inputs, "token_type_ids": types, "pixel_values": torch.randn(1, 3, 8, 8, generator=generator)}
    patch = (3, 2, 2) if family == "kimi_k25" else (3 * 2 * 2 * 2,)  # Qwen's patches are two frames deep
    inputs[pixels_name] = torch.randn(frames * 16, *patch, generator=generator)
    inputs[grid_name] = torch.tensor([[frames, 4, 4]])
    if family == "qwen3_vl":
        inputs["mm_token_type_ids"] = types
    return inputs
