"""Tokens equal plain greedy `generate`, for every family, stub drafter, budget and length."""

import pytest
import torch
from stubs import CORE_FAMILIES, STUBS, make_stub, make_target

from hf_ddtree import DDTreeConfig

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8]])
BUDGETS = (0, 1, 7, 32, 128)


def plain(target, ids, new_tokens, **kwargs):
    return target.generate(ids, do_sample=False, max_new_tokens=new_tokens, **kwargs)


@pytest.fixture(scope="module", params=CORE_FAMILIES)
def family(request):
    target = make_target(request.param)
    return target, plain(target, PROMPT, 48)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("stub", STUBS)
def test_equals_plain_generate(family, stub, budget):
    target, reference = family
    drafter = make_stub(target, stub, reference[0])
    # Over the five budgets every length from 1 to 40 has its turn.
    for new_tokens in range(1 + BUDGETS.index(budget), 41, len(BUDGETS)):
        config = DDTreeConfig(tree_budget=budget, max_new_tokens=new_tokens, do_sample=False)
        tokens = target.generate(PROMPT, assistant_model=drafter, generation_config=config)
        assert tokens.tolist() == reference[:, : PROMPT.shape[1] + new_tokens].tolist()
