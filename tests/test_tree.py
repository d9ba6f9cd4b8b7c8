"""The tree structure, its builders, its mask and the walk, against hand-written and brute-force references."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stubs import tree_mask

from hf_ddtree.acceptance import walk
from hf_ddtree.masks import Cached, slot_mask, visible_slots
from hf_ddtree.tree import (
    Marginals,
    Tree,
    build_tree,
    build_tree_by_heap,
    build_tree_by_level,
    root_tree,
    top_marginals,
)

BUILDERS = {"heap": build_tree_by_heap, "level": build_tree_by_level}
ROOT = 9


def make_tree(tokens, parents, depths):
    rows = [torch.tensor([field]) for field in (tokens, parents, depths)]
    return Tree(*rows, scores=torch.zeros(1, len(tokens), dtype=torch.float64))


#          0
#        / | \
#       1  2  6
#      / \  \
#     3   5  4
TREE = make_tree(tokens=[9, 1, 2, 3, 4, 5, 6], parents=[0, 0, 0, 1, 2, 1, 0], depths=[0, 1, 1, 2, 2, 2, 1])
ANCESTORS = [
    [1, 0, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0, 0],
    [1, 1, 0, 1, 0, 0, 0],
    [1, 0, 1, 0, 1, 0, 0],
    [1, 1, 0, 0, 0, 1, 0],
    [1, 0, 0, 0, 0, 0, 1],
]


def test_ancestors_by_hand():
    assert TREE.ancestors()[0].int().tolist() == ANCESTORS


def test_ancestors_of_a_long_chain():
    length = 40
    chain = make_tree(list(range(length)), [0, *range(length - 1)], list(range(length)))
    assert torch.equal(chain.ancestors()[0], torch.ones(length, length).tril().bool())


def visible_columns(mask):
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(mask.dtype).min}
    return (mask[0, 0] == 0).int().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_mask_with_left_padding(dtype):
    mask = tree_mask(TREE, torch.tensor([[False, True, True]]), dtype)
    assert mask.shape == (1, 1, 7, 10) and mask.dtype == dtype
    assert visible_columns(mask) == [[0, 1, 1, *row] for row in ANCESTORS]


def test_mask_with_sliding_window():
    """Window 3, root at position 0: depth 0 sees from -2 on, depth 1 from -1 on, depth 2 from 0 (the root) on."""
    prefix_of_depth = {0: [1, 1], 1: [0, 1], 2: [0, 0]}
    mask = tree_mask(TREE, torch.ones(1, 2, dtype=torch.bool), torch.float32, window=3)
    expected = [[*prefix_of_depth[depth], *row] for depth, row in zip(TREE.depths[0].tolist(), ANCESTORS, strict=True)]
    assert visible_columns(mask) == expected


def test_mask_with_window_smaller_than_the_tree():
    mask = tree_mask(TREE, torch.ones(1, 2, dtype=torch.bool), torch.float32, window=2)
    assert visible_columns(mask)[3] == [0, 0, 0, 1, 0, 1, 0, 0, 0]  # node 3 at depth 2: its parent and itself


def test_mask_with_padding_and_window():
    padded = torch.tensor([[True, False]])  # the mask marks the nearer key, so the window shows what is left
    mask = tree_mask(TREE, padded, torch.float32, window=3)
    assert [row[:2] for row in visible_columns(mask)] == [[1, 0]] + [[0, 0]] * 6


def test_slots_of_rows_of_their_own_lengths():
    """A slot is visible if it lies before its row's end and the prompt's mask, where it reaches, does not hide it."""
    prompt = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert visible_slots(torch.tensor([2, 4]), 4, prompt).int().tolist() == [[0, 1, 0, 0], [1, 1, 0, 1]]
    assert visible_slots(torch.tensor([2, 4]), 4, None).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("window, seen", [(None, [[1, 1, 0, 0], [1, 1, 1, 1]]), (2, [[0, 1, 0, 0], [0, 0, 0, 1]])])
def test_mask_of_rows_of_their_own_lengths(window, seen):
    """Each root stands at its row's end; a layer that has dropped its first slots has the other columns' mask."""
    ends = torch.tensor([2, 4])
    visible, places = visible_slots(ends, 4, None), ends[:, None] + TREE.depths
    appended = TREE.ancestors().expand(2, -1, -1)
    mask = slot_mask(Cached(visible), appended, places, torch.float32, window)
    assert mask.shape == (2, 1, 7, 11)
    assert (mask[:, 0, 0, :4] == 0).int().tolist() == seen
    for row, end in enumerate(ends.tolist()):
        alone = tree_mask(TREE, torch.ones(1, end, dtype=torch.bool), torch.float32, window)
        assert torch.equal(mask[row, 0, :, :end], alone[0, 0, :, :end])
        assert torch.equal(mask[row, 0, :, 4:], alone[0, 0, :, end:])
        assert bool((mask[row, 0, :, end:4] < 0).all())
    later = slot_mask(Cached(visible[:, 1:], first=1), appended, places, torch.float32, window)
    assert torch.equal(later, mask[..., 1:])


# Builders against brute force


def brute_force(marginals, row, budget):
    """All prefixes as (tokens, score), best first, ties by rank tuple; cut to the budget."""
    log_probs = marginals.log_probs[row].double()
    depths, width = log_probs.shape
    prefixes = []
    for depth in range(1, depths + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            score = 0.0
            for level, rank in enumerate(ranks):
                score += float(log_probs[level, rank])
            prefixes.append((-score, ranks))
    prefixes.sort()
    return [
        (tuple(int(marginals.tokens[row, level, rank]) for level, rank in enumerate(ranks)), -negative)
        for negative, ranks in prefixes[:budget]
    ]


def paths(tree, row):
    """Per drafted node its root-to-node tokens and its score."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    of_node = [()]
    for node in range(1, len(tokens)):
        of_node.append((*of_node[parents[node]], tokens[node]))
    return list(zip(of_node[1:], tree.scores[row, 1:].tolist(), strict=True))


def tied_marginals(seed, batch=2, depth=3, width=3):
    """Log-probabilities in halves, so that sums are exact and tie often; every token has its own number."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randint(-5, 1, (batch, depth, width), generator=generator).sort(-1, descending=True).values / 2
    return Marginals(torch.arange(batch * depth * width).view(batch, depth, width), log_probs)


def roots(batch):
    return torch.full((batch, 1), ROOT)


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("seed", range(12))
def test_fault_51_set_and_order_equal_brute_force(kind, seed):
    marginals = tied_marginals(seed)
    for budget in (1, 2, 3, 4, 5, 6, 7, 10, 20, 39, 200):
        tree = BUILDERS[kind](roots(2), marginals, budget)
        for row in range(2):
            assert paths(tree, row) == brute_force(marginals, row, budget)


@pytest.mark.parametrize("kind", BUILDERS)
def test_fault_51_tie_between_children_of_unequal_parents(kind):
    """Node 18 ties with nine children of a better parent; its rank tuple (0, 1, 0) is the least."""
    rows = [[-1, -1.5] + [-99] * 8, [-1, -2] + [-99] * 8, [-1] + [-1.5] * 9]
    marginals = Marginals(torch.arange(30).view(1, 3, 10), torch.tensor([rows]))
    tree = BUILDERS[kind](roots(1), marginals, budget=18)
    assert paths(tree, 0) == brute_force(marginals, 0, 18)
    assert paths(tree, 0)[-1] == ((0, 11, 20), -4.0)


@pytest.mark.parametrize("kind", BUILDERS)
def test_fault_52_exact_ties_go_by_rank_tuple(kind):
    marginals = top_marginals(torch.zeros(1, 3, 3), top_k=2)
    tree = BUILDERS[kind](roots(1), marginals, budget=6)
    a, b, *_ = marginals.tokens[0, 0].tolist()
    first, second = marginals.tokens[0, 1].tolist()
    assert [path for path, _ in paths(tree, 0)] == [(a,), (b,), (a, first), (a, second), (b, first), (b, second)]


@pytest.mark.parametrize("kind", BUILDERS)
def test_fault_52_certain_tokens_keep_parents_first(kind):
    logits = torch.full((1, 4, 6), -1e4)
    logits[..., 2] = 1e4
    tree = BUILDERS[kind](roots(1), top_marginals(logits, 6), budget=6)
    assert tree.tokens[0].tolist()[:5] == [ROOT, 2, 2, 2, 2]
    assert_well_formed(tree, 6)


def assert_well_formed(tree, budget):
    assert tree.num_nodes <= budget + 1
    for row in range(tree.tokens.shape[0]):
        tokens, parents, depths = (field[row].tolist() for field in (tree.tokens, tree.parents, tree.depths))
        assert (tokens[0], parents[0], depths[0], float(tree.scores[row, 0])) == (ROOT, 0, 0, 0.0)
        drafted = range(1, len(tokens))
        assert all(0 <= parents[node] < node for node in drafted)
        assert all(depths[node] == depths[parents[node]] + 1 for node in drafted)
        assert len({(parents[node], tokens[node]) for node in drafted}) == len(drafted)
    assert torch.equal(tree.ancestors().sum(-1), tree.depths + 1)
    scores = tree.scores[:, 1:]
    assert bool((scores[:, :-1] >= scores[:, 1:]).all())


# Rounded values tie often; the specials make a whole depth worthless or one token impossible.
LOGIT = st.one_of(
    st.integers(-6, 6).map(lambda n: n / 2),
    st.floats(-30, 30, width=32),
    st.sampled_from([float("-inf"), float("nan")]),
)


@st.composite
def logits_and_limits(draw):
    batch, depth, vocab = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    count = batch * depth * vocab
    value = draw(st.sampled_from([LOGIT, st.integers(0, 1).map(float)]))
    values = draw(st.lists(value, min_size=count, max_size=count))
    logits = torch.tensor(values).view(batch, depth, vocab)
    return logits, draw(st.integers(1, 8)), draw(st.sampled_from([0, 1, 2, 5, 13, 64, 4000]))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(logits_and_limits())
def test_fault_51_52_heap_and_level_builders_agree(case):
    logits, top_k, budget = case
    marginals = top_marginals(logits, top_k)
    root = roots(logits.shape[0])
    tree = build_tree(root, marginals, budget)
    assert_well_formed(tree, budget)
    if budget == 0:
        assert tree.num_nodes == 1
        return
    by_level = build_tree_by_level(root, marginals, budget)
    for field in ("tokens", "parents", "depths", "scores"):
        assert torch.equal(getattr(tree, field), getattr(by_level, field)), field
    width = min(top_k, logits.shape[-1])
    everything = sum(width**depth for depth in range(1, logits.shape[1] + 1))
    assert tree.num_nodes == 1 + min(budget, everything)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(logits_and_limits())
def test_marginals_are_normalised_over_the_vocabulary(case):
    logits, top_k, _ = case
    marginals = top_marginals(logits, top_k)
    assert bool((marginals.log_probs <= 0).all()) and not bool(marginals.log_probs.isnan().any())
    assert bool((marginals.log_probs[..., :-1] >= marginals.log_probs[..., 1:]).all())
    usable = logits.isfinite().any(-1) & ~logits.isnan().any(-1)
    expected = logits.log_softmax(-1).gather(-1, marginals.tokens)
    lowest = torch.finfo(torch.float32).min  # an impossible token may have this instead of -inf
    actual, expected = marginals.log_probs[usable].clamp(min=lowest), expected[usable].clamp(lowest, 0.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert bool((marginals.log_probs[~usable] == -torch.inf).all())


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_no_depth_gives_the_root_alone(build):
    empty = Marginals(torch.zeros(1, 0, 3, dtype=torch.int64), torch.zeros(1, 0, 3))
    assert build_tree(roots(1), empty, 5).num_nodes == 1


@pytest.mark.parametrize("kind", BUILDERS)
def test_fault_52_nan_depth_is_drafted_last(kind):
    logits = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0))
    logits[0, 1, 4] = torch.nan
    tree = BUILDERS[kind](roots(1), top_marginals(logits, 6), budget=6)
    assert tree.depths[0].tolist() == [0] + [1] * 6


# The walk


def follow(tree, choices, stop_at=None):
    """Walks with a scripted target; returns what was accepted and the nodes it was asked at."""
    asked = []

    def choose(node):
        asked.append(node)
        return choices[len(asked) - 1], len(asked) == stop_at

    return walk(tree, choose), asked


WALKS = {
    "not in the tree": ([50], None, [0], [50], False),
    "a grandchild's token at the root": ([3], None, [0], [3], False),
    "one level": ([2, 50], None, [0, 2], [2, 50], False),
    "to a leaf": ([1, 5, 50], None, [0, 1, 5], [1, 5, 50], False),
    "a leaf at depth 1": ([6, 1], None, [0, 6], [6, 1], False),
    "stop at the root": ([1, 5, 50], 1, [0], [1], True),
    "stop in the middle": ([1, 5, 50], 2, [0, 1], [1, 5], True),
    "stop on the bonus token": ([1, 5, 50], 3, [0, 1, 5], [1, 5, 50], True),
}


@pytest.mark.parametrize("choices, stop_at, path, tokens, finished", WALKS.values(), ids=WALKS)
def test_walk(choices, stop_at, path, tokens, finished):
    accepted, asked = follow(TREE, choices, stop_at)
    assert (accepted.path, accepted.tokens, accepted.finished) == (path, tokens, finished)
    assert asked == path


def test_walk_takes_the_better_of_equal_siblings():
    tree = make_tree(tokens=[9, 4, 4, 7], parents=[0, 0, 0, 1], depths=[0, 1, 1, 2])
    accepted, _ = follow(tree, [4, 7, 1])
    assert accepted.path == [0, 1, 3] and accepted.tokens == [4, 7, 1]


def test_walk_of_the_root_alone():
    accepted, asked = follow(root_tree(torch.tensor([[ROOT]])), [3])
    assert (accepted.path, accepted.tokens, asked) == ([0], [3], [0])
