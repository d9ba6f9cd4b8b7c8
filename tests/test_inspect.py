"""What `describe` says of a folder: out of its config and the headers of its tensors, without loading them."""

import json

import pytest
import torch
from safetensors.torch import save_file
from stubs import LAYER_TYPES, WINDOW, make_drafter, make_target
from test_interchange import ASSISTANT, PUBLISHED, ROPE, SLIDING, SPECULATORS, tensors_of, write

import hf_ddtree.interchange as interchange
from hf_ddtree import DFlashDraftModel
from hf_ddtree.interchange import describe, export_drafter


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target, num_target_layers=4, **ROPE)


def rows(text):
    """The lines of a description, by their label."""
    return {line[:12].strip(): line[13:] for line in text.splitlines()}


def test_published(target, drafter, tmp_path):
    write(tmp_path, PUBLISHED, drafter.to(torch.bfloat16).state_dict())
    count = sum(parameter.numel() for parameter in drafter.parameters())
    assert rows(describe(tmp_path, target.config)) == {
        "layout": "published (z-lab, SGLang, vLLM, SpecForge)",
        "block": "8 slots, the anchor one of them: drafts 7 tokens deep",
        "layers": "2 (2 full_attention), hidden size 32",
        "taps": "outputs of the target's layers 0, 2 (the first is 0)",
        "mask token": "5",
        "transition": "none",
        "calibration": "none",
        "weights": f"{count:,} parameters, {2 * count / 1e6:,.1f} MB, BF16",
        "made for": "layers 4, vocabulary 64, hidden size 32",
        "fits": "yes, qwen3",
    }
    drafter.float()


def test_speculators(target, drafter, tmp_path):
    """Taps are said as this package counts them; copies of the target are said to be unused and not counted."""
    layers = {**SPECULATORS["transformer_layer_config"], **SLIDING}
    write(
        tmp_path, {**SPECULATORS, "transformer_layer_config": layers}, tensors_of(drafter, "older speculators", target)
    )
    said = rows(describe(tmp_path))
    assert said["layout"].startswith("speculators")
    assert said["taps"].startswith("outputs of the target's layers 0, 2 ")
    assert said["layers"] == f"2 (1 sliding_attention, window {WINDOW}, causal, 1 full_attention), hidden size 32"
    assert said["made for"] == "some/target: layers not said, vocabulary 64, hidden size 32"
    assert said["weights"].startswith(f"{sum(parameter.numel() for parameter in drafter.parameters()):,} parameters")
    assert said["not used"].startswith("embed_tokens.weight, lm_head.weight, verifier_norm.weight: ")
    assert "fits" not in said and "incomplete" not in said


def test_assistant_with_its_own_tensor_names(drafter, tmp_path):
    write(tmp_path, ASSISTANT, tensors_of(drafter, "assistant"))
    said = rows(describe(tmp_path))
    assert said["layout"].startswith("assistant") and "incomplete" not in said and "not used" not in said
    assert said["made for"] == "layers not said, vocabulary 64, hidden size 32"


@pytest.mark.parametrize("layout", ["published", "assistant", "speculators"])
def test_exports_differ_in_their_layout_only(target, drafter, tmp_path, layout):
    drafter.save_pretrained(tmp_path / "source")
    export_drafter(tmp_path / "source", tmp_path / "out", layout)
    before, after = (rows(describe(tmp_path / name, target.config)) for name in ("source", "out"))
    assert after.pop("layout").startswith(layout) and before.pop("layout").startswith("published")
    assert before == after


def test_transition_and_calibration(target, tmp_path):
    temperatures = [1.0, 1.25, 1.5, 1.5, 1.5, 2.0, 2.0]
    make_drafter(target, transition_rank=4, depth_temperatures=temperatures).save_pretrained(tmp_path)
    said = rows(describe(tmp_path, target.config))
    assert said["transition"] == "path-conditional, rank 4"
    assert said["calibration"] == "1, 1.25, 1.5, 1.5, 1.5, 2, 2 by depth"
    assert said["fits"] == "yes, qwen3" and "incomplete" not in said


@pytest.mark.parametrize("layout", ["published", "assistant", "speculators"])
def test_exports_leave_the_transition_out(target, tmp_path, layout):
    """Other engines do not know it."""
    drafter = make_drafter(target, transition_rank=4, depth_temperatures=[1.5] * 7)
    drafter.save_pretrained(tmp_path / "ours")
    exported = DFlashDraftModel.from_pretrained(export_drafter(tmp_path / "ours", tmp_path / "theirs", layout))
    assert exported.transition is None and exported.config.depth_temperatures is None
    kept = {name: tensor for name, tensor in drafter.state_dict().items() if not name.startswith("transition")}
    assert kept.keys() == exported.state_dict().keys()
    assert all(torch.equal(tensor, exported.state_dict()[name]) for name, tensor in kept.items())


@pytest.mark.parametrize("layout", ["published", "assistant", "speculators"])
def test_calibration_goes_along_in_every_layout(target, tmp_path, layout):
    temperatures = [1.0, 1.25, 1.5, 1.5, 1.5, 2.0, 2.0]
    make_drafter(target, depth_temperatures=temperatures).save_pretrained(tmp_path / "source")
    out = export_drafter(tmp_path / "source", tmp_path / "out", layout)
    assert DFlashDraftModel.from_pretrained(out).config.depth_temperatures == temperatures


def test_sharded_weights_are_summed(drafter, tmp_path):
    write(tmp_path, PUBLISHED, {})
    (tmp_path / "model.safetensors").unlink()
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    for i in range(2):
        part = dict(list(tensors.items())[i::2])
        save_file(part, tmp_path / f"model-0000{i + 1}-of-00002.safetensors")
    said = rows(describe(tmp_path))
    assert said["weights"].startswith(f"{sum(tensor.numel() for tensor in tensors.values()):,} parameters")
    assert said["weights"].endswith("F32") and "incomplete" not in said


def test_what_does_not_load_is_said(drafter, tmp_path):
    tensors = dict(drafter.state_dict())
    del tensors["hidden_norm.weight"]
    write(tmp_path, PUBLISHED, {**tensors, "norm.weight": torch.ones(3)})
    said = rows(describe(tmp_path))["incomplete"]
    assert "hidden_norm.weight" in said and " norm.weight" in said and "layers" not in said


def test_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert rows(describe(tmp_path))["weights"] == "none in safetensors files here"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_size": 64}, "`hidden_size` is 32 and the target's is 64"),
        ({"vocab_size": 128}, "`vocab_size` is 64 and the target's is 128"),
        ({"num_hidden_layers": 6}, "`num_target_layers` is 4 and the target's is 6"),
    ],
)
def test_a_target_that_it_does_not_fit(target, tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    other = type(target.config)(**{**target.config.to_dict(), "layer_types": None, **fields})
    said = rows(describe(tmp_path, other))["fits"]
    assert said.startswith("no. ") and message in said


def test_a_target_with_a_text_part(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert rows(describe(tmp_path, make_target("kimi_k25").config))["fits"] == "yes, kimi_k25"


def test_a_target_is_no_drafter(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`model_type` 'qwen3', `architectures` .'Qwen3ForCausalLM'.") as error:
        describe(tmp_path)
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        assert f"`{name}`" in str(error.value)


def test_a_drafter_of_another_kind(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SPECULATORS, "speculators_model_type": "eagle3"}))
    with pytest.raises(ValueError, match="`speculators_model_type` 'eagle3'"):
        describe(tmp_path)


def test_tensors_of_a_drafter_of_another_kind(drafter, tmp_path):
    write(tmp_path, PUBLISHED, {**drafter.state_dict(), "markov_head.markov_w1.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match="markov_head"):
        describe(tmp_path)


def test_other_tables_in_the_folder_are_left_alone(drafter, tmp_path):
    write(tmp_path, PUBLISHED, drafter.state_dict())
    before = describe(tmp_path)
    save_file({"keys": torch.arange(3)}, tmp_path / "table.safetensors")
    assert describe(tmp_path) == before


def test_the_index_says_which_files_there_are(drafter, tmp_path):
    write(tmp_path, PUBLISHED, {})
    (tmp_path / "model.safetensors").unlink()
    save_file({name: tensor.clone() for name, tensor in drafter.state_dict().items()}, tmp_path / "part.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(drafter.state_dict(), "part.safetensors")}))
    assert "incomplete" not in rows(describe(tmp_path)) and "F32" in rows(describe(tmp_path))["weights"]
    (tmp_path / "part.safetensors").unlink()
    with pytest.raises(ValueError, match=r"part\.safetensors can't be read"):
        describe(tmp_path)
    for content in ('{"weight_map": ', "[1]", '{"weight_map": 3}'):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"index\.json .*get the checkpoint again"):
            describe(tmp_path)


def test_torn_weights_are_named(tmp_path):
    write(tmp_path, PUBLISHED, {})
    (tmp_path / "model.safetensors").write_bytes(b"half a")
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read.*get the checkpoint again"):
        describe(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "3", "null", '{"a": ', ""])
def test_a_config_that_is_no_object(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json (holds a|is torn).*get the checkpoint again"):
        describe(tmp_path)


NO_LAYERS = {name: value for name, value in ASSISTANT.items() if name not in ("num_hidden_layers", "layer_types")}
ODD = {
    "no layers": (NO_LAYERS, "`num_hidden_layers` None"),
    "no layers but their types": ({**NO_LAYERS, "layer_types": ["full_attention"]}, "`num_hidden_layers` None"),
    "layers in letters": ({**ASSISTANT, "num_hidden_layers": "two"}, "`num_hidden_layers` 'two'"),
    "size in letters": ({**PUBLISHED, "hidden_size": "much"}, "hidden_size"),
    "layers as text": ({**SPECULATORS, "transformer_layer_config": "some"}, "not understood"),
    "ids as text": ({**SPECULATORS, "aux_hidden_state_layer_ids": "some"}, "not understood"),
}


@pytest.mark.parametrize("config, named", ODD.values(), ids=ODD)
def test_an_odd_config_is_refused_by_name(config, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (describe, lambda folder: export_drafter(folder, tmp_path / "out", "published")):
        with pytest.raises(ValueError, match=named):
            read(tmp_path)


def test_a_name_on_the_hub(drafter, tmp_path, monkeypatch):
    write(tmp_path, PUBLISHED, drafter.state_dict())
    asked = []
    fetch = lambda name, allow_patterns: asked.append((name, allow_patterns)) or str(tmp_path)  # noqa: E731
    monkeypatch.setattr(interchange, "snapshot_download", fetch)
    assert describe("some/drafter") == describe(tmp_path)
    assert asked == [("some/drafter", ["config.json", "model*.safetensors", "model.safetensors.index.json"])]


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("bad name")])
def test_a_name_that_the_hub_does_not_give(error, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(interchange, "snapshot_download", fail)
    with pytest.raises(ValueError, match=f"'some/drafter' is no folder here.*{error}"):
        describe("some/drafter")


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        describe(tmp_path)


def test_weights_stay_on_disk(drafter, tmp_path, monkeypatch):
    write(tmp_path, {**PUBLISHED, **SLIDING, "layer_types": LAYER_TYPES["mixed"]}, drafter.state_dict())

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(DFlashDraftModel, "from_pretrained", refuse)
    describe(tmp_path)
