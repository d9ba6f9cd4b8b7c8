"""The drafter model: its config and checkpoint layouts, its forward and its cache."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from stubs import BLOCK, HIDDEN, LAYER_TYPES, WINDOW, decode, greedy, make_drafter, make_target
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from hf_ddtree import DFlashConfig, DFlashDraftModel
from hf_ddtree.models.dflash import MASK_CACHE_NAME

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
    },
}


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


@torch.no_grad()
def shaken(model):
    """Random weights everywhere, so that norms are not ones and no two tensors could be exchanged unseen."""
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model.eval()


def inputs(context, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "noise_embeds": torch.randn(1, BLOCK, HIDDEN, generator=generator),
        "context_hidden_states": torch.randn(1, context, 2 * HIDDEN, generator=generator),
    }


@torch.no_grad()
def run(model, **call):
    return model(**call).last_hidden_state


# Config layouts

SHAPE = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DRAFT = {"block_size": 8, "mask_token_id": 5, "target_layer_ids": [0, 2]}
LAYOUTS = {
    "nested": {"dflash_config": DRAFT},
    "top level": DRAFT,
    "published": {"block_size": 8, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]}},
    "both equal": {**DRAFT, "dflash_config": DRAFT},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_fault_38_layouts(layout):
    config = DFlashConfig(**SHAPE, **layout)
    assert {name: getattr(config, name) for name in DRAFT} == DRAFT


@pytest.mark.parametrize("name, other", [("block_size", 16), ("mask_token_id", 6), ("target_layer_ids", [0, 1])])
def test_fault_38_contradicting_layouts_raise(name, other):
    with pytest.raises(ValueError, match=f"`{name}` is .* and .* in its `dflash_config`"):
        DFlashConfig(**SHAPE, **DRAFT, dflash_config={**DRAFT, name: other})


@pytest.mark.parametrize("name", DRAFT)
def test_fault_37_missing_field_is_named(name):
    with pytest.raises(ValueError, match=f"no `{name}`"):
        DFlashConfig(**SHAPE, **{**DRAFT, name: None})


BAD = {
    "mask id beyond the vocabulary": ("mask_token_id", 64),
    "negative mask id": ("mask_token_id", -1),
    "empty block": ("block_size", 0),
    "no taps": ("target_layer_ids", []),
    "tap twice": ("target_layer_ids", [1, 1]),
    "negative tap": ("target_layer_ids", [-1, 1]),
    "tap beyond the target": ("target_layer_ids", [0, 4]),
}


@pytest.mark.parametrize("name, value", BAD.values(), ids=BAD)
def test_fault_37_41_field_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is ") as error:
        DFlashConfig(**SHAPE, **{**DRAFT, "num_target_layers": 4, name: value})
    assert str(value) in str(error.value)


def test_fault_42_sliding_layers_need_a_window():
    with pytest.raises(ValueError, match="sliding_window"):
        DFlashConfig(**SHAPE, **DRAFT, layer_types=LAYER_TYPES["mixed"], sliding_window=None)


# Checkpoints


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("layers", LAYER_TYPES.values(), ids=LAYER_TYPES)
def test_round_trip_in_the_published_layout(target, tmp_path, layers, rope):
    drafter = shaken(make_drafter(target, layer_types=layers, sliding_window=WINDOW, rope_parameters=rope))
    drafter.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "qwen3" and written["architectures"] == ["DFlashDraftModel"]
    assert written["dflash_config"] == {"mask_token_id": 5, "target_layer_ids": [0, 2]}
    assert written["block_size"] == BLOCK

    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.config.layer_types == layers and loaded.config.rope_parameters == drafter.config.rope_parameters
    assert torch.equal(run(loaded, **inputs(20)), run(drafter, **inputs(20)))


def test_published_rope_fields_of_transformers_4(target, tmp_path):
    drafter = make_drafter(target, rope_parameters=ROPES["yarn"])
    drafter.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    del written["rope_parameters"]
    assert written["rope_theta"] == 5000.0 and written["rope_scaling"]["attention_factor"] == 1.3
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, **inputs(20)), run(drafter, **inputs(20)))


@pytest.fixture
def make_assistant(tmp_path):
    """The library's own drafter class, with a checkpoint of it in `tmp_path`."""

    def make(layers, rope):
        config = MuseGlimmerAssistantConfig(
            **{name: value for name, value in SHAPE.items() if name != "vocab_size"},
            **DRAFT,
            intermediate_size=48,
            head_dim=8,
            layer_types=layers,
            sliding_window=WINDOW,
            rope_parameters=rope,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        assistant = shaken(MuseGlimmerAssistantModel(config))
        assistant.save_pretrained(tmp_path)
        return assistant

    return make


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("layers", LAYER_TYPES.values(), ids=LAYER_TYPES)
def test_the_librarys_assistant_layout(make_assistant, tmp_path, layers, rope):
    assistant = make_assistant(layers, rope)
    drafter = DFlashDraftModel.from_pretrained(tmp_path)
    for context in (6, 20):
        caches = DFlashCache(config=assistant.config), DFlashCache(config=drafter.config)
        outputs = []
        for model, cache in zip((assistant, drafter), caches, strict=True):
            cache.set_previous_accepted_tokens(context)
            outputs.append(run(model, **inputs(context), **{MASK_CACHE_NAME: cache}))
        assert torch.equal(*outputs)

    again = tmp_path / "again"
    drafter.save_pretrained(again)
    names = set(load_file(again / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight"} <= names
    assert names == set(drafter.state_dict())
    assert torch.equal(run(DFlashDraftModel.from_pretrained(again), **inputs(20)), run(drafter, **inputs(20)))


def test_the_librarys_assistant_drafts_for_a_target(target, make_assistant, tmp_path):
    """Its config has no vocabulary size: the target's counts."""
    make_assistant(LAYER_TYPES["sliding"], ROPES["default"])
    drafter = DFlashDraftModel.from_pretrained(tmp_path)
    assert decode(target, drafter, PROMPT, max_new_tokens=12).tolist() == greedy(target, PROMPT, 12).tolist()


def test_the_librarys_assistant_may_have_a_mask_id_of_a_large_vocabulary(make_assistant, tmp_path):
    """The published assistant masks with id 201818."""
    make_assistant(LAYER_TYPES["sliding"], ROPES["default"])
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "mask_token_id": 201818}))
    assert DFlashDraftModel.from_pretrained(tmp_path).config.mask_token_id == 201818


@pytest.mark.parametrize("name", ["hidden_norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_fault_45_missing_tensor_is_named(target, tmp_path, name):
    make_drafter(target).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name):
        DFlashDraftModel.from_pretrained(tmp_path)


# The forward


@torch.no_grad()
def test_fault_45_every_parameter_matters(target):
    drafter = make_drafter(target)
    before = run(drafter, **inputs(10))
    for name, parameter in drafter.named_parameters():
        kept = parameter.clone()
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        assert not torch.allclose(run(drafter, **inputs(10)), before, atol=1e-4), name
        parameter.copy_(kept)
    assert torch.equal(run(drafter, **inputs(10)), before)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("context", [6, 8, 20])
def test_fault_42_sliding_layers_equal_a_dense_mask(target, context, attention):
    """Drafting windows are bidirectional and include the key at exactly `sliding_window` positions."""
    drafter = make_drafter(target, layer_types=LAYER_TYPES["mixed"], sliding_window=WINDOW)
    drafter.set_attn_implementation(attention)
    keys, queries = torch.arange(context + BLOCK), torch.arange(context, context + BLOCK)
    hidden = (queries[:, None] - keys[None]).abs() > WINDOW
    everything = torch.zeros(1, 1, BLOCK, context + BLOCK)
    windowed = everything.masked_fill(hidden, torch.finfo(torch.float32).min)
    masks = {"full_attention": everything, "sliding_attention": windowed}
    actual = run(drafter, **inputs(context))
    torch.testing.assert_close(actual, run(drafter, **inputs(context), attention_mask=masks), atol=1e-5, rtol=1e-5)
    unwindowed = run(drafter, **inputs(context), attention_mask=dict.fromkeys(masks, everything))
    assert not torch.allclose(actual, unwindowed, atol=1e-3)


def check_incremental_calls(drafter, cuts):
    """Calls with a cache give what one call without it gives, at every cut of the context."""
    cache = DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    whole = inputs(20)
    for start, end in itertools.pairwise(cuts):
        if start:
            cache.crop(-BLOCK)
        cache.set_previous_accepted_tokens(end - start)
        part = {**whole, "context_hidden_states": whole["context_hidden_states"][:, start:end]}
        positions = torch.arange(start, end + BLOCK)[None]
        output = run(drafter, **part, position_ids=positions, **{MASK_CACHE_NAME: cache})
        upto = {**whole, "context_hidden_states": whole["context_hidden_states"][:, :end]}
        torch.testing.assert_close(output, run(drafter, **upto), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", LAYER_TYPES.values(), ids=LAYER_TYPES)
@pytest.mark.parametrize("cuts", [(0, 20), (0, 3, 4, 12, 20), (0, 8, 9, 16, 20), tuple(range(21))], ids=str)
def test_incremental_calls_equal_one_call_without_cache(target, layers, cuts):
    drafter = make_drafter(target, layer_types=layers, sliding_window=WINDOW)
    check_incremental_calls(drafter, cuts)
