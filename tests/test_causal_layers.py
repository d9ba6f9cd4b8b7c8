"""Drafters whose slots see no later slot of their block, in sliding layers or in all."""

import pytest
import torch
from stubs import BLOCK, LAYER_TYPES, WINDOW, decode, greedy, make_drafter, make_target
from test_drafter import PROMPT, check_incremental_calls, inputs, run, shaken


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("context", [1, 6, 8, 20])
@pytest.mark.parametrize("causal", ["sliding", "all"])
def test_causal_layers_equal_a_dense_mask(target, causal, context, attention):
    """A causal window holds `sliding_window` keys, the slot's own included."""
    shape = {"layer_types": LAYER_TYPES["mixed"], "sliding_window": WINDOW, "causal_layers": causal}
    drafter = shaken(make_drafter(target, **shape))
    drafter.set_attn_implementation(attention)
    distance = torch.arange(context, context + BLOCK)[:, None] - torch.arange(context + BLOCK)[None]
    hidden = {"sliding_attention": (distance < 0) | (distance >= WINDOW), "full_attention": distance < 0}
    if causal == "sliding":
        hidden["full_attention"] = torch.zeros_like(distance, dtype=torch.bool)
    low = torch.finfo(torch.float32).min
    masks = {kind: torch.zeros(1, 1, *distance.shape).masked_fill(where, low) for kind, where in hidden.items()}
    actual = run(drafter, **inputs(context))
    torch.testing.assert_close(actual, run(drafter, **inputs(context), attention_mask=masks), atol=1e-5, rtol=1e-5)
    both_ways = make_drafter(target, **{**shape, "causal_layers": "none"})
    both_ways.load_state_dict(drafter.state_dict())
    assert not torch.allclose(actual, run(both_ways, **inputs(context)), atol=1e-3)


@pytest.mark.parametrize("causal", ["sliding", "all"])
@pytest.mark.parametrize("cuts", [(0, 20), (0, 3, 4, 12, 20), tuple(range(21))], ids=str)
def test_causal_layers_with_a_cache_equal_one_call(target, causal, cuts):
    shape = {"layer_types": LAYER_TYPES["mixed"], "sliding_window": WINDOW, "causal_layers": causal}
    drafter = shaken(make_drafter(target, **shape))
    check_incremental_calls(drafter, cuts)


def test_unknown_causal_layers_raise(target):
    with pytest.raises(ValueError, match=r"`causal_layers` is 'some'"):
        make_drafter(target, causal_layers="some")


@pytest.mark.parametrize("causal", ["sliding", "all"])
def test_decoding_equals_greedy(target, causal):
    drafter = make_drafter(target, layer_types=LAYER_TYPES["mixed"], sliding_window=WINDOW, causal_layers=causal)
    assert decode(target, drafter, PROMPT, max_new_tokens=24).tolist() == greedy(target, PROMPT, 24).tolist()
