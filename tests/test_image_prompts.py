"""Prompts with images and videos: tokens equal plain `generate`, pixels are read once, positions are three numbers."""

import pytest
import torch
import transformers
from families import PIXEL_INPUTS, media_prompt
from packaging.version import Version
from stubs import STUBS, StubGenerator, make_stub, make_target

from hf_ddtree import DDTreeConfig
from hf_ddtree.drafting import make

NEW = 24
PROMPTS = [
    ("gemma3-images", "image"),
    ("kimi_k25", "image"),
    ("kimi_k25", "video"),
    ("qwen3_vl", "image"),
    ("qwen3_vl", "video"),
]


@pytest.fixture(scope="module", params=PROMPTS, ids="-".join)
def case(request):
    family, kind = request.param
    if request.param == ("kimi_k25", "video") and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("transformers 5.17 splits Kimi's videos by frames, which the model has pooled, and fails")
    target, inputs = make_target(family), media_prompt(family, kind)
    return target, inputs, plain(target, inputs), plain(target, media_prompt(family, kind, seed=1))


def plain(target, inputs):
    return target.generate(**inputs, do_sample=False, max_new_tokens=NEW)


def tree(target, inputs, stub, **fields):
    config = DDTreeConfig(**{"do_sample": False, "max_new_tokens": NEW, "tree_budget": 16, **fields})
    return target.generate(**inputs, assistant_model=stub, generation_config=config)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("stub", STUBS)
def test_fault_54_equals_plain_generate(case, stub, attention):
    target, inputs, reference, of_other_pixels = case
    target.set_attn_implementation(attention)
    assert not torch.equal(reference, of_other_pixels)  # the model does look
    for budget in (0, 7, 32):
        drafter = make_stub(target, stub, reference[0])
        assert tree(target, inputs, drafter, tree_budget=budget).tolist() == reference.tolist()


def test_a_perfect_drafter_is_believed(case):
    """The stub counts tokens by the drafter's positions, so they are those of the text, images or not."""
    target, inputs, reference, _ = case
    result = tree(target, inputs, make_stub(target, "oracle-1", reference[0]), return_dict_in_generate=True)
    assert result.rounds < NEW / 2


def forwards_of(target, inputs, stub):
    """What the target's and its vision tower's forwards were given: names, positions; how often the tower ran."""
    calls, towers = [], []

    def record(module, args, kwargs):
        given = {name for name, value in kwargs.items() if value is not None}
        calls.append((given, kwargs["position_ids"], kwargs.get("mm_encoder_outputs")))

    tower = next(module for name, module in target.named_modules() if name.endswith(("vision_tower", "visual")))
    handles = [
        target.register_forward_pre_hook(record, with_kwargs=True),
        tower.register_forward_pre_hook(lambda module, args: towers.append(1)),
    ]
    try:
        tree(target, inputs, stub)
    finally:
        for handle in handles:
            handle.remove()
    return calls, len(towers)


def test_fault_54_pixels_are_read_in_the_prefill_only(case):
    target, inputs, reference, _ = case
    calls, tower_runs = forwards_of(target, inputs, make_stub(target, "oracle-2", reference[0]))
    assert tower_runs == 1
    for given, _, encoded in calls[1:]:
        assert not given & {*PIXEL_INPUTS, "mm_token_type_ids"}
        assert not encoded


def test_fault_55_nodes_add_their_depth_to_all_rows_of_the_position(case, monkeypatch):
    target, inputs, reference, _ = case
    contexts = []

    class Recording(StubGenerator):
        def draft_block(self, root_tokens, context):
            contexts.append(context)
            return super().draft_block(root_tokens, context)

    monkeypatch.setattr(make, "DDTreeCandidateGenerator", Recording)
    calls, _ = forwards_of(target, inputs, make_stub(target, "oracle-2", reference[0]))
    length = inputs["input_ids"].shape[1]
    last = calls[0][1][..., -1:]
    for _, positions, _ in calls[1:]:
        depths = positions - positions[..., :1]
        assert (depths == depths.reshape(-1, depths.shape[-1])[0]).all()
        assert depths.max() > 0 or positions.shape[-1] == 1
        assert (positions[..., :1] > last).all() and ((positions[..., :1] - last).unique().numel() == 1)
    # The drafter's are a row of numbers that count the text's tokens.
    positions = torch.cat([context.positions for context in contexts], dim=1)
    assert positions.tolist() == [list(range(positions.shape[1]))]
    assert positions.shape[1] >= length
