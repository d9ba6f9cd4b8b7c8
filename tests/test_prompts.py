"""Prompts of unusual length and form, given caches, and positions whose encoding depends on the length."""

import pytest
import torch
from stubs import STUBS, decode, greedy, make_drafter, make_stub, make_target
from transformers import DynamicCache

from hf_ddtree import DDTreeConfig
from hf_ddtree.cache import cache_name, output_cache

LONG = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8, 17, 23, 50, 6, 33, 20, 11, 48, 29, 4]])
FAMILIES = ("qwen3", "qwen3-sliding", "gemma3", "deepseek_v3")


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("family", FAMILIES)
def test_fault_36_short_prompts(family, length):
    target = make_target(family)
    drafter = make_drafter(target)
    prompts = torch.randint(2, 64, (2, length), generator=torch.Generator().manual_seed(length))
    for prompt in (prompts[:1], prompts[1:]):
        tokens = decode(target, drafter, prompt, max_new_tokens=12)
        assert tokens.tolist() == greedy(target, prompt, 12).tolist()


def test_no_prompt_at_all():
    target = make_target("qwen3")
    config = DDTreeConfig(do_sample=False, max_new_tokens=8)
    tokens = target.generate(assistant_model=make_drafter(target), generation_config=config)
    assert tokens.tolist() == target.generate(do_sample=False, max_new_tokens=8).tolist()


@pytest.mark.parametrize("with_ids", [False, True], ids=["embeddings", "embeddings and ids"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-sliding"])
def test_prompt_as_embeddings(family, with_ids):
    target = make_target(family)
    inputs = {"inputs_embeds": target.get_input_embeddings()(LONG), **({"input_ids": LONG} if with_ids else {})}
    config = DDTreeConfig(do_sample=False, max_new_tokens=12)
    tokens = target.generate(**inputs, assistant_model=make_drafter(target), generation_config=config)
    assert tokens.tolist() == target.generate(**inputs, do_sample=False, max_new_tokens=12).tolist()
    assert tokens.shape[1] == 12 + (LONG.shape[1] if with_ids else 0)


@pytest.mark.parametrize("kept", [1, 10, 19])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_fault_31_given_cache_of_a_part_of_the_prompt(family, kept):
    target = make_target(family)
    reference = greedy(target, LONG, 20)
    with torch.no_grad():
        cache = output_cache(target(LONG[:, :kept], use_cache=True))
    drafter = make_stub(target, "oracle-2", reference[0])
    tokens = decode(target, drafter, LONG, max_new_tokens=20, **{cache_name(target): cache})
    assert tokens.tolist() == reference.tolist()


@pytest.mark.parametrize("family", ["qwen3-sliding", "mistral", "gemma3"])
def test_given_cache_that_keeps_what_slides_out_of_the_window(family):
    target = make_target(family)
    reference = greedy(target, LONG, 20)
    drafter = make_stub(target, "oracle-2", reference[0])
    tokens = decode(target, drafter, LONG, max_new_tokens=20, **{cache_name(target): DynamicCache()})
    assert tokens.tolist() == reference.tolist()


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_position_ids_of_the_user(family):
    target = make_target(family)
    positions = {"position_ids": torch.arange(5, 25)[None]}
    reference = greedy(target, LONG, 12, **positions)
    config = DDTreeConfig(do_sample=False, max_new_tokens=12)
    stub = make_stub(target, "oracle-2", reference[0])
    tokens = target.generate(LONG, assistant_model=stub, generation_config=config, **positions)
    assert tokens.tolist() == reference.tolist()


# Rope types; the original length is 16.

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
# Phi-3 drops its cache when a plain decoding step crosses the original length.
PHI3 = {"model_type": "phi3", "original_max_position_embeddings": 16, "max_position_embeddings": 64}
ROPES = {
    "yarn": {"rope_parameters": YARN, "max_position_embeddings": 16},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
    "longrope": {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16}},
    "longrope phi3": {"rope_parameters": LONGROPE, **PHI3},
}
for fields in ROPES.values():
    fields["rope_parameters"]["rope_theta"] = 1e4
LENGTHS = {"before": (4, 5), "up to": (4, 12), "across": (10, 14), "beyond": (20, 12)}


@pytest.mark.parametrize("prompt, new_tokens", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("rope", ROPES)
def test_fault_56_rope_that_changes_with_the_length(rope, prompt, new_tokens):
    """Equal to plain decoding; refused before the first forward where a tree would meet other frequencies."""
    refused = rope != "yarn" and prompt + new_tokens > 16
    target = make_target("llama", **ROPES[rope])
    reference = greedy(target, LONG[:, :prompt], new_tokens)
    for kind in STUBS:
        forwards = []
        hook = target.register_forward_pre_hook(lambda *_, seen=forwards: seen.append(1))
        try:
            drafter = make_stub(target, kind, reference[0])
            tokens = decode(target, drafter, LONG[:, :prompt], max_new_tokens=new_tokens)
            assert tokens.tolist() == reference.tolist() and not refused
        except ValueError as refusal:
            assert "RoPE" in str(refusal) and not forwards and refused
        finally:
            hook.remove()
