"""Positions are those that the model's forward gets in `generate`, which may not be those `generate` prepared."""

import pytest
import torch
from families import FAMILIES, HIDDEN, IMAGE
from stubs import decode, greedy, make_drafter, make_stub
from transformers import AutoConfig, AutoModelForImageTextToText

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8]])

_TEXT = {name: value for name, value in FAMILIES["llama"].items() if name != "model_type"}
_VISION = FAMILIES["gemma3-images"]["vision_config"]
_GEMMA = {"model_type": "gemma", "hidden_activation": "gelu", **_TEXT}


def build(model_type: str, **fields: object) -> torch.nn.Module:
    """A tiny random target."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, eos_token_id=None, **fields)
    return AutoModelForImageTextToText.from_config(config).eval()


def test_positions_that_count_from_one():
    """PaliGemma's."""
    vision = {"model_type": "siglip_vision_model", "projection_dim": HIDDEN, **_VISION}
    target = build("paligemma", text_config=_GEMMA, vision_config=vision, image_token_id=IMAGE, projection_dim=HIDDEN)
    reference = greedy(target, PROMPT, 24)
    for kind in ("oracle-1", "oracle-2", "anti", "rand"):
        stub = make_stub(target, kind, reference[0])
        assert decode(target, stub, PROMPT, max_new_tokens=24).tolist() == reference.tolist()


def test_models_that_count_positions_themselves_are_refused():
    """Kosmos-2's `prepare_inputs_for_generation` takes the positions out, and the model counts from its padding id."""
    text = {"layers": 4, "embed_dim": HIDDEN, "ffn_dim": 64, "attention_heads": 4, "vocab_size": 64}
    target = build("kosmos-2.5", text_config=text, vision_config={**_VISION, "patch_embed_hidden_size": 12})
    forwards = []
    target.register_forward_pre_hook(lambda module, inputs: forwards.append(1))
    with pytest.raises(ValueError, match="Kosmos2_5ForConditionalGeneration is given no `position_ids`"):
        decode(target, make_drafter(target), PROMPT, max_new_tokens=4)
    assert not forwards
