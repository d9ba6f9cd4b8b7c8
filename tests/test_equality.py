"""Tokens equal plain greedy `generate`, for every family, stub drafter, budget and length."""

import pytest
import torch
from stubs import FAMILIES, STUBS, make_drafter, make_stub, make_target

from hf_ddtree import DDTreeConfig

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8]])
LENGTHS = (1, 2, 3, 7, 8, 9, 17, 40)


def plain(target, ids, new_tokens, **kwargs):
    return target.generate(ids, do_sample=False, max_new_tokens=new_tokens, **kwargs)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    target = make_target(request.param)
    return target, plain(target, PROMPT, 48)


@pytest.mark.parametrize("budget", [0, 1, 7, 32, 128])
@pytest.mark.parametrize("stub", STUBS)
def test_equals_plain_generate(family, stub, budget):
    target, reference = family
    drafter = make_stub(target, stub, reference[0])
    for new_tokens in LENGTHS:
        config = DDTreeConfig(tree_budget=budget, max_new_tokens=new_tokens, do_sample=False)
        tokens = target.generate(PROMPT, assistant_model=drafter, generation_config=config)
        assert tokens.tolist() == reference[:, : PROMPT.shape[1] + new_tokens].tolist()
