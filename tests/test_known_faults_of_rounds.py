"""More of the known public faults: precisions, rounds of trees against chains."""

import pytest
import torch
from stubs import decode, greedy, make_drafter, make_target

from hf_ddtree.benchmark import race
from hf_ddtree.rules import WalkRule

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [1, 50, 4, 4, 33, 21, 60, 2, 9, 17]])
NEW = 24


@pytest.mark.parametrize("drafter_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fault_46_47_drafters_of_another_precision_draft_as_well(target_dtype, drafter_dtype):
    target = make_target("qwen3").to(target_dtype)
    plain = greedy(target, PROMPT, NEW)
    for drafter in (make_drafter(target).to(drafter_dtype), make_target("qwen3").to(drafter_dtype)):
        result = decode(target, drafter, PROMPT, max_new_tokens=NEW, return_dict_in_generate=True)
        assert result.sequences.shape == plain.shape and drafter.dtype == drafter_dtype
        for prompt, *texts in zip(PROMPT, result.sequences[:, 10:], plain[:, 10:], strict=True):
            difference = race.first_difference(target, prompt[None], *(text.tolist() for text in texts))
            assert difference is None or difference.gap <= 4 * difference.rounding
    assert result.mean_acceptance_length > 3  # the target in another precision drafts well: nothing overflowed


def test_fault_50_no_round_of_trees_accepts_less_than_a_chain_from_there(monkeypatch):
    """Each round against a new call, a chain's, on the text so far: what trees left in the caches would show."""
    target = make_target("qwen3")
    drafter, spines, build = make_drafter(target, seed=9), [], WalkRule.build

    def recording(self, roots, drafted, budget=None):
        tree = build(self, roots, drafted, budget)
        parents, spine = tree.parents[0].tolist(), [0]
        while spine[-1] in parents[1:]:
            spine.append(parents.index(spine[-1], 1))  # the best child comes first
        spines.append(len(spine))
        return tree

    def lengths(ids, count, budget, **shape):
        options = {"draft_text_weight": 0.0, "return_dict_in_generate": True, "tree_budget": budget, **shape}
        return decode(target, drafter, ids, max_new_tokens=count, **options)

    with monkeypatch.context() as patched:
        patched.setattr(WalkRule, "build", recording)
        tree = lengths(PROMPT[:1], 60, 64)
    committed, chains = PROMPT.shape[1], []
    for accepted, spine in zip(tree.acceptance_lengths[1:], spines[1:], strict=True):
        chain = lengths(tree.sequences[:, :committed], PROMPT.shape[1] + 60 - committed, 7, tree_top_k=1)
        chains.append(min([*chain.acceptance_lengths, 1][1], spine))
        assert accepted >= chains[-1]
        committed += accepted
    assert sum(chains) > 1.15 * len(chains)  # the chain is right now and then, or this would say nothing
