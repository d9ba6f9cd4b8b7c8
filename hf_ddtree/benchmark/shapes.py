"""Targets and drafters with the shape of known models and random weights, made where they will run."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..models import DFlashConfig, DFlashDraftModel

# Of the residual stream's first entries where texts shall be clear: they outweigh what 36 random layers add to them.
CLEAR = 16.0


@dataclass(frozen=True)
class Shape:
    """What a target and its drafter are made of.

    Attributes:
        target, drafter: fields of their configs; the drafter's width, vocabulary and mask token are the target's.
        clear: see `follow_on`.
    """

    target: dict[str, Any]
    drafter: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    clear: bool = True


_PLAIN_ENDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
QWEN3_8B = Shape(
    target={
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    drafter={
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "block_size": 16,
        "target_layer_ids": [1, 9, 17, 25, 33],
    },
)
# Layers as Kimi K2's, but 4 of 61, and 64 experts of 384: the whole does not fit one GPU. One layer is dense, as there.
KIMI = Shape(
    target={
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "num_mtp_layers": 0,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "rope_parameters": _YARN,
    },
    drafter={
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 18432,
        "block_size": 8,
        "target_layer_ids": [0, 1, 2, 3],
    },
)
TINY = Shape(
    target={
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": 256,
        "initializer_range": 0.5,
    },
    drafter={
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "block_size": 8,
        "target_layer_ids": [0, 2],
        "initializer_range": 0.3,
    },
    dtype=torch.float32,
    clear=False,
)
SHAPES = {"qwen3-8b": QWEN3_8B, "kimi": KIMI, "tiny": TINY}


def make_models(shape: Shape, device: torch.device) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """Target and drafter, the same each time on one kind of device."""
    torch.manual_seed(0)
    fields = {"max_position_embeddings": 4096, **_PLAIN_ENDS, **shape.target}
    config = AutoConfig.for_model(**fields)
    tied_to = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    tied_to |= {"mask_token_id": config.vocab_size - 1, "num_target_layers": config.num_hidden_layers}
    with _made_on(device, shape.dtype):
        target = AutoModelForCausalLM.from_config(config, dtype=shape.dtype).eval()
        drafter = DFlashDraftModel(DFlashConfig(**tied_to, **shape.drafter)).eval()
    if shape.clear:
        follow_on(target)
    return target, drafter


@torch.no_grad()
def follow_on(target: PreTrainedModel) -> None:
    """Makes token t + 1 follow t by a margin that no rounding reaches.

    Under random weights one choice in ten is so near a tie that in 16 bit another order of summation turns it. Texts of
    two ways to run a forward would part there, which says nothing about either, and an oracle would know only one.
    What is lost: the text says little about attention. Whether that is right is for float32 and small models to show.
    """
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    embedding.normal_(std=CLEAR)
    torch.mul(embedding.roll(1, 0), target.config.initializer_range / CLEAR, out=head)
    head[0] = (
        0.0  # nothing follows the last token, which drafters have for a mask: all drafts would be of its successor
    )


def spread(target: PreTrainedModel) -> float:
    """The standard deviation of logits of a random state after a norm."""
    head = target.get_output_embeddings().weight.detach()
    return float(head[1:1024].float().std()) * math.sqrt(head.shape[1])


@contextmanager
def _made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """New tensors are made on `device`, in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
