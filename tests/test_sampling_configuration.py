"""Settings of sampling: refused by name, value and remedy where they make no sense, saved and loaded otherwise."""

import json

import pytest
import torch
from stubs import decode, greedy, make_drafter, make_target
from transformers import GenerationConfig

from hf_ddtree import DDTreeConfig

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target)


# field -> (values out of range, what the message suggests)
OUT_OF_RANGE = {
    "temperature": ((-1, -1.0, 0, 0.0, 1e-40, float("nan"), float("inf"), "1", True), "do_sample=False"),
    "top_k": ((-1, 2.5, "5", True), "integer of at least 0"),
    "top_h": ((0, -0.1, 2, float("nan")), "above 0"),
    "top_p": ((2, -0.1, 1.5, float("nan"), "0.9"), "between 0 and 1"),
    "min_p": ((2, -0.1, float("nan")), "between 0 and 1"),
    "typical_p": ((0, 0.0, 2, -0.5, float("nan")), "above 0"),
    "epsilon_cutoff": ((-0.1, 1.5), "between 0 (off) and 1"),
    "eta_cutoff": ((-0.1, 1.5), "between 0 (off) and 1"),
    "acceptance": (("exact", "", 1), "'walk', 'token', 'block', 'recursive'"),
    "tree_shape": (("star", "Chain", True), "'best_first', 'chain'"),
    "seed": (("7", 1.5, True, [1.5], [True], ["7"], [1, None], [], {"seed": 1}), "integer"),
    "draft_noise_scale": ((-1, -0.5, float("nan"), float("inf"), "1", True), "0 (no coupling)"),
    "draft_temperature": ((0, 0.0, -1, float("nan"), float("inf"), "1", True), "above 0"),
}
WRONG = [(name, value, remedy) for name, (values, remedy) in OUT_OF_RANGE.items() for value in values]
IDS = [f"{name}={value!r}" for name, value, _ in WRONG]


@pytest.mark.parametrize("name, value, remedy", WRONG, ids=IDS)
def test_fault_23_refused_by_the_config(name, value, remedy):
    with pytest.raises(ValueError) as error:
        DDTreeConfig(do_sample=True, **{name: value})
    assert f"`{name}` is {value!r};" in str(error.value) and remedy in str(error.value)


@pytest.mark.parametrize("name, value, remedy", WRONG, ids=IDS)
def test_fault_23_refused_as_a_keyword_before_any_forward(target, drafter, name, value, remedy):
    config, forwards = DDTreeConfig(do_sample=True, max_new_tokens=4), []
    hook = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError) as error:
        target.generate(PROMPT, assistant_model=drafter, generation_config=config, **{name: value})
    hook.remove()
    assert not forwards
    assert f"`{name}` is {value!r};" in str(error.value) and remedy in str(error.value)


IN_RANGE = {
    "temperature": (1e-4, 1, 1.0, 2, 3.5, 1e4),
    "top_k": (0, 1, 10**6),
    "top_h": (0.5, 1.0),
    "top_p": (0, 0.0, 1, 1.0, 0.5),
    "min_p": (0, 1, 0.5),
    "typical_p": (1, 1.0, 0.5),
    "epsilon_cutoff": (0, 0.5),
    "eta_cutoff": (0, 0.5),
    "seed": (0, -3, 2**80, [4], (4,)),
    "draft_noise_scale": (0, 0.0, 1, 7.5),
    "draft_temperature": (0.01, 1, 50.0),
    "tree_shape": ("best_first", "chain"),
    "acceptance": ("walk", "recursive"),
}
RIGHT = [(name, value) for name, values in IN_RANGE.items() for value in values]


@pytest.mark.parametrize("name, value", RIGHT, ids=[f"{name}={value!r}" for name, value in RIGHT])
def test_values_in_range_work(target, drafter, name, value):
    fields = {"do_sample": True, "max_new_tokens": 4, "seed": 1}
    tokens = decode(target, drafter, PROMPT, **{**fields, name: value})
    config = DDTreeConfig(**fields)
    as_keyword = target.generate(PROMPT, assistant_model=drafter, generation_config=config, **{name: value})
    assert tokens.shape == as_keyword.shape == (1, PROMPT.shape[1] + 4)
    if name != "acceptance":  # whose texts depend on the tree, here of another budget
        assert tokens.tolist() == as_keyword.tolist()


# What the defaults mean

DEFAULTS = {
    "walk": ({}, 0.9, 1.0),
    "walk at T=2": ({"do_sample": True, "temperature": 2.0}, 0.9, 1.0),
    "token": ({"do_sample": True, "temperature": 2.0, "acceptance": "token", "tree_shape": "chain"}, 0.0, 2.0),
    "block": ({"do_sample": True, "temperature": 0.5, "acceptance": "block", "tree_shape": "chain"}, 0.0, 0.5),
    "recursive": ({"do_sample": True, "acceptance": "recursive"}, 0.0, 1.0),
    "set": ({"draft_noise_scale": 0, "draft_temperature": 3}, 0, 3),
    "recursive, set": ({"acceptance": "recursive", "do_sample": True, "draft_temperature": 0.7}, 0.0, 0.7),
}


@pytest.mark.parametrize("fields, scale, temperature", DEFAULTS.values(), ids=DEFAULTS)
def test_defaults_by_rule(fields, scale, temperature):
    config = DDTreeConfig(**fields)
    assert (config.noise_scale, config.tree_temperature) == (scale, temperature)
    assert config.draft_noise_scale == fields.get("draft_noise_scale")


def test_temperature_of_sampling():
    assert DDTreeConfig(do_sample=False, temperature=0.5).sampling_temperature == 0
    assert DDTreeConfig(do_sample=True).sampling_temperature == 1
    assert DDTreeConfig(do_sample=True, temperature=0.5).sampling_temperature == 0.5


WIDTHS = {
    "defaults": ({}, 32),
    "top_k": ({"tree_top_k": 5}, 5),
    "budget below top_k": ({"tree_top_k": 50, "tree_budget": 8}, 8),
    "chain": ({"tree_shape": "chain", "tree_top_k": 5}, 1),
    "no budget": ({"tree_budget": 0}, 1),
}


@pytest.mark.parametrize("fields, width", WIDTHS.values(), ids=WIDTHS)
def test_candidates_per_depth(fields, width):
    assert (config := DDTreeConfig(**fields)).candidates(config.most_nodes) == width


# Round trips

SAVED = {
    "tree and seed": {"tree_shape": "chain", "seed": 2**70, "draft_noise_scale": 0.5, "draft_temperature": 0.25},
    "rule and seeds": {"acceptance": "recursive", "seed": [5, -7, 2**70], "do_sample": True},
    "chain rule": {"acceptance": "block", "tree_shape": "chain", "do_sample": True, "temperature": 0.6, "top_p": 0.9},
    "zeros": {"seed": 0, "draft_noise_scale": 0, "tree_budget": 0},
    "defaults": {"seed": None, "draft_noise_scale": None, "draft_temperature": None, "acceptance": "walk"},
}


@pytest.mark.parametrize("reader", [DDTreeConfig, GenerationConfig], ids=["ours", "base"])
@pytest.mark.parametrize("fields", SAVED.values(), ids=SAVED)
def test_save_and_load(tmp_path, fields, reader):
    config = DDTreeConfig(**fields)
    config.save_pretrained(tmp_path)
    json.loads((tmp_path / "generation_config.json").read_text())
    loaded = reader.from_pretrained(tmp_path)
    assert type(loaded) is reader
    assert {name: getattr(loaded, name) for name in fields} == fields
    assert loaded.to_dict() == config.to_dict()


def test_a_loaded_seed_gives_the_same_text(target, drafter, tmp_path):
    config = DDTreeConfig(do_sample=True, seed=[12], temperature=2.0, max_new_tokens=12)
    config.save_pretrained(tmp_path)
    first, second = (
        target.generate(PROMPT, assistant_model=drafter, generation_config=each).tolist()
        for each in (config, DDTreeConfig.from_pretrained(tmp_path))
    )
    assert first == second != greedy(target, PROMPT, 12).tolist()


MISSPELT = {"seeds": "seed", "draft_noise": "draft_noise_scale", "acceptence": "acceptance", "tree_shap": "tree_shape"}


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_fields_are_refused(target, drafter, name):
    with pytest.raises(ValueError, match=f"`{name}` is no field.*`{MISSPELT[name]}`"):
        DDTreeConfig(**{name: 1})
    with pytest.raises(ValueError, match=name):
        target.generate(PROMPT, assistant_model=drafter, generation_config=DDTreeConfig(), **{name: 1})
