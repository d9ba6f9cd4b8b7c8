"""From the drafter's output to a tree, and the routes that a drafter is used by."""

import pytest
import torch
from stubs import (
    BLOCK,
    HIDDEN,
    LAYER_TYPES,
    WINDOW,
    decode,
    greedy,
    make_context,
    make_drafter,
    make_request,
    make_stub,
    make_target,
    make_tokenizer,
)
from transformers import GenerationConfig, pipeline
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_ddtree import DDTreeCandidateGenerator, DDTreeConfig
from hf_ddtree.tree import build_tree, top_marginals

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


def context_of(length, start=0):
    return make_context(torch.randn(1, length, 2 * HIDDEN, generator=torch.Generator().manual_seed(length)), start)


@pytest.mark.parametrize("max_depth", [1, 4, 7, 20])
def test_fault_39_slot_k_fills_depth_k(max_depth):
    target = make_target("qwen3")
    drafter = make_drafter(target)
    target.lm_head.weight.data = torch.eye(64, HIDDEN)
    slots = torch.eye(HIDDEN)[None, 10 : 10 + BLOCK]  # slot k says token 10 + k
    drafter.forward = lambda **_: BaseModelOutputWithPast(last_hidden_state=9 * slots)
    generator = DDTreeCandidateGenerator(drafter, target, DDTreeConfig())
    logits = generator.draft(make_request(torch.tensor([[3]]), context_of(4), max_depth)).logits
    assert logits.shape == (1, min(max_depth, BLOCK - 1), 64)
    assert logits[0].argmax(-1).tolist() == [10 + depth for depth in range(1, min(max_depth, BLOCK - 1) + 1)]


NOTHING = {"no depth": (12, 8, 0), "no budget": (0, 8, 5), "block of the anchor alone": (12, 1, 5)}


@pytest.mark.parametrize("budget, block_size, max_depth", NOTHING.values(), ids=NOTHING)
def test_nothing_to_draft(target, budget, block_size, max_depth):
    """Then the drafter does not even run, and the tree is the root alone."""
    drafter = make_drafter(target)
    drafter.forward = None
    config = DDTreeConfig(tree_budget=budget, draft_block_size=block_size)
    generator = DDTreeCandidateGenerator(drafter, target, config)
    assert generator.draft(make_request(PROMPT, context_of(4), max_depth)) is None
    tree = generator.get_candidates(PROMPT, context_of(4), max_depth)
    assert tree.tokens.tolist() == [[10]] and tree.depths.tolist() == [[0]]


SHAPES = {"defaults": ({}, 12), "top_k=2": ({"tree_top_k": 2}, 2), "chain": ({"tree_shape": "chain"}, 1)}


@pytest.mark.parametrize("fields, top_k", SHAPES.values(), ids=SHAPES)
def test_get_candidates_is_draft_and_search(target, fields, top_k):
    """The best-first tree of the draft's own log-probabilities, round after round."""
    drafter, config = make_drafter(target), DDTreeConfig(tree_budget=12, draft_text_weight=0, **fields)
    whole, parts = (DDTreeCandidateGenerator(drafter, target, config) for _ in range(2))
    for context in (context_of(9), context_of(3, start=9)):
        tree = whole.get_candidates(PROMPT, context, max_depth=5)
        logits = parts.draft(make_request(PROMPT, context, max_depth=5)).logits
        assert logits.shape == (1, 5, 64)
        other = build_tree(PROMPT[:, -1:], top_marginals(logits, top_k), 12)
        assert tree.num_nodes == (6 if top_k == 1 else 13) and tree.tokens[0, 0] == PROMPT[0, -1]
        for field in ("tokens", "parents", "depths", "scores"):
            assert torch.equal(getattr(tree, field), getattr(other, field))


@torch.no_grad()
def test_draft_logits_go_through_the_targets_softcap():
    plain, capped = make_target("gemma3"), make_target("gemma3", final_logit_softcapping=2.0)
    before, after = (
        DDTreeCandidateGenerator(make_drafter(model), model, DDTreeConfig()).draft_block(PROMPT[:, -1:], context_of(6))[
            0
        ]
        for model in (plain, capped)
    )
    torch.testing.assert_close(after, 2.0 * torch.tanh(before / 2.0))
    assert float(before.abs().max()) > 2.0


# Routes


@pytest.mark.parametrize("layers", LAYER_TYPES.values(), ids=LAYER_TYPES)
def test_upstream_chain_takes_the_drafter(target, layers):
    drafter = make_drafter(target, layer_types=layers, sliding_window=WINDOW)
    tokens = greedy(target, PROMPT, 16, assistant_model=drafter, speculation_type="dflash")
    assert tokens.tolist() == greedy(target, PROMPT, 16).tolist()


def test_reloaded_by_the_base_class_the_config_runs_the_upstream_chain(target, tmp_path):
    DDTreeConfig(do_sample=False, max_new_tokens=16).save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    tokens = target.generate(PROMPT, assistant_model=make_drafter(target), generation_config=config)
    assert tokens.tolist() == greedy(target, PROMPT, 16).tolist()


DTYPES = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize("target_dtype, drafter_dtype", DTYPES, ids=["bf16 drafter", "bf16 target", "both bf16"])
def test_fault_47_mixed_dtypes(target_dtype, drafter_dtype):
    target = make_target("qwen3", seed=10).to(target_dtype)
    drafter = make_drafter(target).to(drafter_dtype)
    tokens = decode(target, drafter, PROMPT, max_new_tokens=16)
    assert tokens.shape[1] == PROMPT.shape[1] + 16 and drafter.dtype == drafter_dtype
    # In 16 bit a near-tie may flip between a tree forward and a single step, so only float32 must be equal.
    compared = 16 if target_dtype == torch.float32 else 1
    assert tokens[:, : PROMPT.shape[1] + compared].tolist() == greedy(target, PROMPT, compared).tolist()


@pytest.mark.parametrize("token", ["generated", "prompt"])
def test_fault_13_mask_id_is_an_ordinary_token(target, token):
    reference = greedy(target, PROMPT, 16)
    mask_id = int(reference[0, PROMPT.shape[1] + 3] if token == "generated" else PROMPT[0, 4])
    drafter = make_stub(target, "oracle-1", reference[0], mask_token_id=mask_id)
    assert decode(target, drafter, PROMPT, max_new_tokens=16).tolist() == reference.tolist()


@pytest.mark.parametrize("given", ["at construction", "per call"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_pipeline(target, sampling, given):
    drafter = make_drafter(target, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    config = DDTreeConfig(max_new_tokens=8, **({} if sampling else {"do_sample": False}))
    options = {"assistant_model": drafter, "generation_config": config}
    tokenizer = make_tokenizer()
    build, call = (options, {}) if given == "at construction" else ({}, options)
    with pytest.MonkeyPatch.context() as patch:
        rounds = []
        real = DDTreeCandidateGenerator.draft
        patch.setattr(DDTreeCandidateGenerator, "draft", lambda *args, **kw: (rounds.append(1), real(*args, **kw))[1])
        pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, **build)
        (answer,) = pipe("themoresthat", **call)
    assert rounds and answer["generated_text"].startswith("themoresthat")
    if not sampling:
        ids = tokenizer("themoresthat", return_tensors="pt").input_ids
        assert answer["generated_text"] == tokenizer.decode(greedy(target, ids, 8)[0], skip_special_tokens=True)
