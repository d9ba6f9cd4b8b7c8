"""The dense-mask route agrees with the looped specification of tree attention."""

import pytest
import torch
from stubs import tree_mask

from hf_ddtree.kernels.reference import tree_attention
from hf_ddtree.tree import Tree

PARENTS = [0, 0, 0, 1, 1, 3, 2]
DEPTHS = [0, 1, 1, 2, 2, 3, 2]


@pytest.mark.parametrize("prefix", [1, 5, 63])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_masked_sdpa_equals_the_loops(prefix, kv_heads):
    generator = torch.Generator().manual_seed(prefix)
    query = torch.randn(4, 7, 8, generator=generator)
    key, value = (torch.randn(kv_heads, prefix + 7, 8, generator=generator) for _ in range(2))
    tree = Tree(torch.zeros(1, 7, dtype=torch.long), torch.tensor([PARENTS]), torch.tensor([DEPTHS]), torch.zeros(1, 7))
    mask = tree_mask(tree, torch.ones(1, prefix, dtype=torch.bool), torch.float32)
    dense = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(dense[0], tree_attention(query, key, value, PARENTS, scale=0.3))
