"""What a round's build is made of: counts of the running text, the transition's table, depths known to the host."""

from itertools import pairwise

import pytest
import torch
from stubs import VOCAB, make_drafter, make_target

from hf_ddtree.drafting.corrections import transition_logits
from hf_ddtree.drafting.pair_table import FILLED, PairTable, can_tabulate, tabulated_logits
from hf_ddtree.drafting.paths import tree_of_paths
from hf_ddtree.drafting.running_text import TEXT_WINDOW, running_text_correction
from hf_ddtree.tree import Marginals, Tree, build_tree_by_heap, build_tree_by_level, root_tree


def counted(text, parents, children):
    """log(1 + pairs) + 2 log(1 + triples) by looking through the text for every pair."""
    text = text[-TEXT_WINDOW:]
    pairs, triples = list(pairwise(text)), list(zip(text, text[1:], text[2:], strict=False))
    depth, k = len(children), len(children[0])
    score = torch.zeros(depth, k, k)
    for index in range(depth):
        for i, parent in enumerate(parents[index]):
            for j, child in enumerate(children[index]):
                score[index, i, j] = torch.tensor(1.0 + pairs.count((parent, child))).log()
                if index < 2 and len(text) > 1:
                    known = triples.count((text[index - 2], parent, child))
                    score[index, i, j] += 2 * torch.tensor(1.0 + known).log()
    return score


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_running_text_equals_counting(seed, depth):
    """Of rows of different lengths, down to one token and beyond the window."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 5, (length,), generator=generator) for length in (1, 2, 3, 40, TEXT_WINDOW + 9)]
    order = [torch.stack([torch.randperm(7, generator=generator)[:4] for _ in range(depth)]) for _ in texts]
    children = torch.stack(order)
    roots = torch.stack([text[-1:] for text in texts])[:, None].expand(-1, 1, 4)
    parents = torch.cat([roots, children[:, :-1]], dim=1)
    found = running_text_correction(texts, 0.5)(parents, children)
    for row, text in enumerate(texts):
        expected = counted(text.tolist(), parents[row].tolist(), children[row].tolist())
        torch.testing.assert_close(found[row], 0.5 * expected)


@torch.no_grad()
def test_pair_table_equals_the_transition():
    """Also for tokens that it has met, and for more new ones than it learns at once."""
    target = make_target("llama", initializer_range=0.2)
    drafter = make_drafter(target, transition_rank=6)
    torch.nn.init.normal_(drafter.transition.up_proj.weight, generator=torch.Generator().manual_seed(2))
    assert can_tabulate(drafter, target)
    generator = torch.Generator().manual_seed(3)
    for count in (3, 3, FILLED, 5):
        table = tabulated_logits(drafter, target)
        states = torch.randn(4, 1, 32, generator=generator)
        parents, children = torch.randint(0, VOCAB, (2, 4, count), generator=generator)
        expected = transition_logits(drafter, target, states, parents, children)
        torch.testing.assert_close(table(states, parents, children), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_pair_table_is_kept_until_weights_change():
    target = make_target("llama")
    drafter = make_drafter(target, transition_rank=6)
    table = PairTable.of(drafter, target)
    assert PairTable.of(drafter, target) is table
    weights = [drafter.transition.up_proj.weight, target.lm_head.weight, target.get_input_embeddings().weight]
    for weight in weights:
        weight.mul_(2)
        assert PairTable.of(drafter, target) is not table
        table = PairTable.of(drafter, target)
    with torch.inference_mode():
        table = PairTable.of(make_drafter(target, transition_rank=6), target)
    table.before[0] = 1  # in a call outside that mode


@torch.no_grad()
def test_softcapped_logits_have_no_table():
    target = make_target("gemma3", final_logit_softcapping=2.0)
    assert not can_tabulate(make_drafter(target, transition_rank=6), target)


def test_trees_know_their_depth(monkeypatch):
    """No look at the depths, which would wait for an accelerator; trees of four tensors are looked at."""
    roots = torch.tensor([[7]])
    marginals = Marginals(torch.arange(6).view(1, 3, 2), torch.tensor([[[-0.1, -3.0]] * 3]))
    trees = [build(roots, marginals, 5) for build in (build_tree_by_heap, build_tree_by_level)]
    trees += [tree_of_paths(roots, [[[1, 2, 3]]], 5), root_tree(roots)]
    plain = [Tree(tree.tokens, tree.parents, tree.depths, tree.scores) for tree in trees]
    expected = [(tree.ancestors(), tree.path_tokens()) for tree in plain]
    monkeypatch.setattr(torch.Tensor, "max", None)
    for tree, (ancestors, paths) in zip(trees, expected, strict=True):
        for part in (tree, tree.row(0), tree.first(tree.num_nodes)):
            assert torch.equal(part.ancestors(), ancestors)
            assert torch.equal(part.path_tokens(), paths)
