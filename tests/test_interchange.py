"""Drafter checkpoints of other projects: their layouts by hand, read as the same drafter, refused, and written.

The layouts are facts about those projects; docs/interchange.md names the sources.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from stubs import BLOCK, HIDDEN, LAYER_TYPES, WINDOW, decode, greedy, make_drafter, make_target
from test_drafter import PROMPT, ROPES, inputs, run, shaken
from transformers import MuseGlimmerAssistantModel, Qwen3Config
from transformers.cache_utils import DFlashCache

from hf_ddtree import DFlashConfig, DFlashDraftModel
from hf_ddtree.interchange import export_drafter
from hf_ddtree.models.dflash import MASK_CACHE_NAME

# Shape of `make_drafter`'s drafters.
SHAPE = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
SLIDING = {"layer_types": LAYER_TYPES["mixed"], "sliding_window": WINDOW, "use_sliding_window": True}
SPECFORGE = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]},
    "num_target_layers": 4,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False,
    **SHAPE,
}
PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "is_causal": False,
    "dflash_config": {"block_size": BLOCK, "mask_token_id": 5, "target_layer_ids": [0, 2]},
    "num_target_layers": 4,
    **SHAPE,
    **ROPE,
}
# The layer config leaves out Qwen3's defaults: here the epsilon, the positions and the layer types.
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
        "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        **{name: SHAPE[name] for name in SHAPE if name not in ("rms_norm_eps", "max_position_embeddings")},
        **ROPE,
        "model_type": "qwen3",
        "tie_word_embeddings": False,
    },
    "draft_vocab_size": 64,
    "block_size": BLOCK,
    "mask_token_id": 5,
    "aux_hidden_state_layer_ids": [1, 3],
    "target_hidden_size": None,
    "sliding_window_non_causal": False,
    "projector_type": "dflash",
    "pure_draft_prefix_len": 1,
    "emb_dim": 256,
    "shift_label": False,
    "sample_from_anchor": False,
}
ASSISTANT = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "block_size": BLOCK,
    "mask_token_id": 5,
    "target_layer_ids": [0, 2],
    "layer_types": ["full_attention"] * 2,
    "sliding_window": WINDOW,
    **SHAPE,
    **ROPE,
}
ENCODER = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


@pytest.fixture(scope="module")
def drafter(target):
    return shaken(make_drafter(target, num_target_layers=4, **ROPE))


def write(folder, config, tensors):
    """A checkpoint folder of clones, which may share no memory."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors_of(drafter, layout, target=None):
    """The drafter's tensors under another project's names, with what it saves beside them."""
    own = drafter.state_dict()
    if layout == "assistant":
        return {ENCODER.get(name, name): tensor for name, tensor in own.items()}
    if layout == "prefixed":
        return {f"model.{name}": tensor for name, tensor in own.items()}
    if layout == "older speculators":
        norm, head = target.model.norm.weight.data, target.lm_head.weight.data
        copies = {"embed_tokens.weight": target.model.embed_tokens.weight.data, "lm_head.weight": head}
        return {**own, **copies, "verifier_norm.weight": norm}
    return own


CHECKPOINTS = {
    "published": PUBLISHED,
    "specforge": SPECFORGE,
    "prefixed": PUBLISHED,
    "speculators": SPECULATORS,
    "older speculators": SPECULATORS,
    "assistant": ASSISTANT,
}


# Reading


@pytest.mark.parametrize("layout", CHECKPOINTS)
def test_every_layout_is_the_same_drafter(target, drafter, tmp_path, layout):
    write(tmp_path, CHECKPOINTS[layout], tensors_of(drafter, layout, target))
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, **inputs(20)), run(drafter, **inputs(20)))
    for name in ("block_size", "mask_token_id", "target_layer_ids", "vocab_size", "layer_types", "rope_parameters"):
        assert getattr(loaded.config, name) == getattr(drafter.config, name)
    assert decode(target, loaded, PROMPT, max_new_tokens=12).tolist() == greedy(target, PROMPT, 12).tolist()


def test_layers_of_another_model_type_keep_its_defaults(tmp_path):
    """LLaMA's configs have no `head_dim` of their own and another epsilon than Qwen3's."""
    layers = {name: SHAPE[name] for name in SHAPE if name not in ("head_dim", "rms_norm_eps")}
    config = {**SPECULATORS, "transformer_layer_config": {**layers, "model_type": "llama"}}
    loaded = DFlashConfig.from_pretrained(write(tmp_path, config, {}))
    assert (loaded.head_dim, loaded.rms_norm_eps) == (HIDDEN // 4, 1e-6)


def test_defaults_that_the_layer_config_leaves_out_are_qwen3s(tmp_path):
    config = {**SPECULATORS, "transformer_layer_config": {"hidden_size": HIDDEN}, "draft_vocab_size": 151936}
    loaded, default = DFlashConfig.from_pretrained(write(tmp_path, config, {})), Qwen3Config()
    for name in ("vocab_size", "num_attention_heads", "head_dim", "intermediate_size", "num_hidden_layers"):
        assert getattr(loaded, name) == getattr(default, name)


def test_copies_of_the_target_are_said_to_be_unused(target, drafter, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("hf_ddtree.models.dflash.logger.warning", said.append)
    write(tmp_path, SPECULATORS, tensors_of(drafter, "older speculators", target))
    DFlashDraftModel.from_pretrained(tmp_path)
    assert len(said) == 1 and all(name in said[0] for name in ("embed_tokens", "lm_head", "verifier_norm"))


# Causal layers: `causal_layers` is what the checkpoint says, and is honoured.

CAUSAL = {
    "published, unsaid": ({**SPECFORGE, **SLIDING}, "sliding"),
    "published, null": ({**PUBLISHED, **SLIDING, "is_causal": None}, "sliding"),
    "published, no": ({**PUBLISHED, **SLIDING}, "none"),
    "published, yes": ({**PUBLISHED, **SLIDING, "is_causal": True}, "all"),
    "published, nested no": (
        {**SPECFORGE, **SLIDING, "dflash_config": {**SPECFORGE["dflash_config"], "causal": False}},
        "none",
    ),
    "published, top level first": (
        {**PUBLISHED, **SLIDING, "dflash_config": {**PUBLISHED["dflash_config"], "causal": True}},
        "none",
    ),
    "speculators, causal": (SPECULATORS, "sliding"),
    "speculators, both ways": ({**SPECULATORS, "sliding_window_non_causal": True}, "none"),
    "speculators, unsaid": (
        {name: value for name, value in SPECULATORS.items() if name != "sliding_window_non_causal"},
        "none",
    ),
    "assistant": ({**ASSISTANT, "layer_types": LAYER_TYPES["mixed"]}, "none"),
}


@pytest.mark.parametrize("config, causal", CAUSAL.values(), ids=CAUSAL)
def test_causal_layers_are_read(tmp_path, config, causal):
    assert DFlashConfig.from_pretrained(write(tmp_path, config, {})).causal_layers == causal


# Refusals


def nested(**fields):
    return {**SPECFORGE, "dflash_config": {**SPECFORGE["dflash_config"], **fields}}


REFUSED = {
    "domino": (nested(projector_type="domino"), "`projector_type` 'domino'"),
    "domino of speculators": ({**SPECULATORS, "projector_type": "domino"}, "`projector_type` 'domino'"),
    "dflash2's selector": (nested(selector_rank=256, selector_top_k=16), "`selector_rank` 256"),
    "dflash2's convolutions": (nested(conv_kernel_size=2), "`conv_kernel_size` 2"),
    "dflash2": ({**SPECFORGE, "architectures": ["DFlash2DraftModel"]}, "`architectures` .'DFlash2DraftModel'"),
    "dspark of speculators": ({**SPECULATORS, "speculators_model_type": "dspark"}, "`speculators_model_type` 'dspark'"),
    "eagle3": ({"speculators_model_type": "eagle3"}, "`speculators_model_type` 'eagle3'"),
    "markov head": ({**SPECFORGE, "markov_rank": 256}, "`markov_rank` 256"),
    "anchor drafts": ({**SPECULATORS, "sample_from_anchor": True}, "`sample_from_anchor` True"),
    "shifted": (nested(shift_label=True), "`shift_label` True"),
    "latent attention": (nested(attention_mode="mla"), "`attention_mode` 'mla'"),
    "mixed attention": (nested(attention_modes=["gqa", "kda"]), "`attention_modes` .'gqa', 'kda'."),
    "sinks": (nested(attention_sink_bias=True), "`attention_sink_bias` True"),
    "unlisted windows": (nested(use_swa=True), "`use_swa` True"),
    "own embedding": ({**SPECFORGE, "has_embed_tokens": True}, "`has_embed_tokens` True"),
    "interleaved rotary": ({**SPECFORGE, "is_neox_style": False}, "`is_neox_style` False"),
    "unknown mask": ({**SPECFORGE, "is_causal": "half"}, "`is_causal` 'half'"),
    "reduced vocabulary": ({**SPECULATORS, "draft_vocab_size": 32}, "`draft_vocab_size` 32 and `vocab_size` 64"),
    "reduced vocabulary, published": ({**SPECFORGE, "draft_vocab_size": 32}, "`draft_vocab_size` 32"),
    "wider target": ({**SPECULATORS, "target_hidden_size": 128}, "`target_hidden_size` 128 and `hidden_size` 32"),
    "embedding tapped": (
        {**SPECULATORS, "aux_hidden_state_layer_ids": [0, 3]},
        "`aux_hidden_state_layer_ids` is .0, 3",
    ),
    "taps unsaid": ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "no `target_layer_ids`"),
    "mask unsaid": (nested(mask_token_id=None), "no `mask_token_id`"),
    "nested not an object": ({**SPECFORGE, "dflash_config": [1]}, "`dflash_config` is .1."),
    "a language model": ({**SHAPE, "model_type": "llama"}, "`model_type` 'llama'.* lacks `block_size`"),
}


@pytest.mark.parametrize("config, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_honoured_is_refused_by_name(drafter, tmp_path, config, message):
    write(tmp_path, config, drafter.state_dict())
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["prefix_gru.weight_ih_l0", "layers.0.attention_conv.base_kernel", "d2t"])
def test_tensors_of_other_drafters_are_refused(drafter, tmp_path, name):
    write(tmp_path, SPECFORGE, {**drafter.state_dict(), name: torch.zeros(3)})
    with pytest.raises(ValueError, match=name):
        DFlashDraftModel.from_pretrained(tmp_path)


# Writing


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("layers", ["full", "mixed"])
@pytest.mark.parametrize("layout", ["published", "assistant", "speculators"])
def test_round_trip(target, tmp_path, layout, layers, rope):
    source, out = tmp_path / "source", tmp_path / "out"
    shape = {"layer_types": LAYER_TYPES[layers], "sliding_window": WINDOW, "rope_parameters": rope}
    drafter = shaken(make_drafter(target, **shape))
    drafter.save_pretrained(source)
    assert export_drafter(source, out, layout) == out
    again = DFlashDraftModel.from_pretrained(out)
    assert torch.equal(run(again, **inputs(20)), run(drafter, **inputs(20)))
    assert again.dtype == drafter.dtype
    written = DFlashDraftModel.from_pretrained(export_drafter(out, tmp_path / "back", "published")).config.to_dict()
    expected = DFlashConfig.from_pretrained(source).to_dict()
    unlike = {name for name in expected if expected[name] != written.get(name)}
    assert unlike <= {"_name_or_path", "transformers_version", "initializer_range", "use_cache", "max_window_layers"}


def test_exported_assistant_is_the_librarys(target, drafter, tmp_path):
    write(tmp_path / "source", PUBLISHED, drafter.state_dict())
    export_drafter(tmp_path / "source", tmp_path / "out", "assistant")
    assistant = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "out").eval()
    cache = DFlashCache(config=assistant.config)
    cache.set_previous_accepted_tokens(20)
    assert torch.equal(run(assistant, **inputs(20), **{MASK_CACHE_NAME: cache}), run(drafter, **inputs(20)))


def test_exported_speculators_config(drafter, tmp_path):
    write(tmp_path / "source", {**PUBLISHED, **SLIDING}, drafter.state_dict())
    out = export_drafter(tmp_path / "source", tmp_path / "out", "speculators", "some/target")
    written = json.loads((out / "config.json").read_text())
    expected = {**SPECULATORS, "sliding_window_non_causal": True}
    for name in ("speculators_model_type", "draft_vocab_size", "block_size", "mask_token_id"):
        assert written[name] == expected[name]
    assert written["aux_hidden_state_layer_ids"] == [1, 3] and written["sliding_window_non_causal"] is True
    assert written["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert written["speculators_config"]["proposal_methods"] == expected["speculators_config"]["proposal_methods"]
    layers = written["transformer_layer_config"]
    assert {name: layers[name] for name in SHAPE} == SHAPE and layers["layer_types"] == LAYER_TYPES["mixed"]
    assert set(load_file(out / "model.safetensors")) == set(drafter.state_dict())


@pytest.mark.parametrize("causal", ["none", "sliding", "all"])
def test_published_layout_says_which_layers_are_causal(target, tmp_path, causal):
    """z-lab's model and vLLM take a sliding layer for causal where nothing is said."""
    make_drafter(target, causal_layers=causal).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["is_causal"] is {"none": False, "sliding": None, "all": True}[causal]
    assert "causal_layers" not in written
    assert DFlashConfig.from_pretrained(tmp_path).causal_layers == causal


@pytest.mark.parametrize(
    "config, layout, message",
    [
        ({**PUBLISHED, **SLIDING, "is_causal": None}, "assistant", "`is_causal` None"),
        ({**PUBLISHED, "is_causal": True}, "assistant", "`is_causal` True"),
        ({**PUBLISHED, "is_causal": True}, "speculators", "`is_causal` True"),
        ({**PUBLISHED, "attention_bias": True}, "assistant", "`attention_bias` True"),
        ({**PUBLISHED, "vocab_size": None}, "speculators", "`vocab_size` None"),
        (PUBLISHED, "eagle", "`layout` is 'eagle'"),
    ],
)
def test_what_a_layout_can_not_carry_is_refused(drafter, tmp_path, config, layout, message):
    write(tmp_path / "source", config, drafter.state_dict())
    with pytest.raises(ValueError, match=message):
        export_drafter(tmp_path / "source", tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_not_overwritten(drafter, tmp_path):
    folder = write(tmp_path, PUBLISHED, drafter.state_dict())
    with pytest.raises(ValueError, match=r"`out` is .*holds something"):
        export_drafter(folder, folder, "published")
