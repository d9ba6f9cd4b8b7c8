"""Trees of guessed continuations: which prefixes they have, in which order, and what fills uneven rows."""

import math
import random

import pytest
import torch

from hf_ddtree.acceptance import walk, walk_at_once
from hf_ddtree.drafting import tree_of_paths
from hf_ddtree.tree import check_trees

VOCAB = 7
ROOTS = torch.tensor([[3]])


def prefixes_of(tree, row=0):
    """{prefix: score} in the order of the nodes, the root left out; twins once."""
    paths = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[int(tree.parents[row, node])], int(tree.tokens[row, node])))
    return {path: float(tree.scores[row, node]) for node, path in enumerate(paths) if node}


def random_paths(rng, count, longest=5):
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(0, longest))] for _ in range(count)]


def random_weights(rng, paths):
    return [sorted((rng.choice([0.0, 0.5, 1.0, rng.random()]) for _ in path), reverse=True) for path in paths]


def test_by_hand():
    tree = tree_of_paths(ROOTS, [[[1, 2, 3], [1, 4], [5], [6]]], budget=5)
    assert tree.tokens.tolist() == [[3, 1, 2, 3, 4, 5]]
    assert tree.parents.tolist() == [[0, 0, 1, 2, 1, 0]]
    assert tree.depths.tolist() == [[0, 1, 2, 3, 2, 1]]


def test_weighted_by_hand():
    paths = [[[1, 2, 3], [4, 5], [4, 6]]]
    tree = tree_of_paths(ROOTS, paths, 4, weights=[[[0.5, 0.4, 0.1], [0.3, 0.1], [0.3, 0.2]]])
    assert list(prefixes_of(tree)) == [(4,), (1,), (1, 2), (4, 6)]
    assert tree.scores[0].exp().tolist() == pytest.approx([1, 0.6, 0.5, 0.4, 0.2])


@pytest.mark.parametrize("count", [0, 1, 3, 20, 2000])
@pytest.mark.parametrize("seed", range(5))
def test_nodes_are_taken_in_the_order_of_the_paths(seed, count):
    """With 2000 paths the last ones' weights are 0 in floating point, and the order stays."""
    rng = random.Random(seed)
    paths = random_paths(rng, count)
    expected = list(dict.fromkeys(tuple(path[:depth]) for path in paths for depth in range(1, len(path) + 1)))
    for budget in (0, 1, 5, 10**6):
        tree = tree_of_paths(ROOTS, [paths], budget)
        check_trees(tree, ROOTS, VOCAB)
        assert list(prefixes_of(tree)) == expected[:budget]


@pytest.mark.parametrize("least", [0.0, 0.6])
@pytest.mark.parametrize("seed", range(40))
def test_the_heaviest_prefixes_are_taken(seed, least):
    rng = random.Random(seed)
    paths = random_paths(rng, rng.randint(0, 12))
    weights, budget = random_weights(rng, paths), rng.randint(0, 12)
    sums = {}
    for path, of_tokens in zip(paths, weights, strict=True):
        for depth, weight in enumerate(of_tokens, start=1):
            sums[tuple(path[:depth])] = sums.get(tuple(path[:depth]), 0.0) + weight
    tree = tree_of_paths(ROOTS, [paths], budget, [weights], least)
    check_trees(tree, ROOTS, VOCAB)
    found = prefixes_of(tree)
    assert len(found) == tree.num_nodes - 1
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for prefix, score in found.items():
        assert math.exp(score) == pytest.approx(sums.pop(prefix)) and math.exp(score) >= least - 1e-9
    left = [weight for weight in sums.values() if weight >= least]
    assert not left or (len(found) == budget and math.exp(min(found.values(), default=99.0)) >= max(left) - 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_filled_with_twins_that_change_nothing(seed):
    rng = random.Random(seed)
    roots = torch.tensor([[rng.randrange(VOCAB)] for _ in range(4)])
    paths = [[[1]][:count] + random_paths(rng, count) for count in (0, 1, 6, 12)]
    tree = tree_of_paths(roots, paths, budget=20)
    check_trees(tree, roots, VOCAB)
    choices = torch.randint(VOCAB, tree.tokens.shape, generator=torch.Generator().manual_seed(seed))
    for row in range(1, 4):
        alone = tree_of_paths(roots[row : row + 1], [paths[row]], budget=20)
        assert prefixes_of(tree, row) == prefixes_of(alone)
        assert tree.row(row).first(alone.num_nodes).tokens.tolist() == alone.tokens.tolist()
    path, tokens = walk_at_once(tree, choices, int(tree.depths.max()))
    for row in range(4):
        accepted = walk(tree.row(row), lambda node, row=row: (int(choices[row, node]), False))
        length = int((path[row] >= 0).sum())
        # Of twins one way takes the first and the other the last, so only what is chosen after them may differ.
        assert length == len(accepted.path) and tokens[row, : length - 1].tolist() == accepted.tokens[:-1]


@pytest.mark.parametrize("paths", [[[], []], [[[]], []]], ids=["no paths", "empty paths"])
def test_no_paths_at_all(paths):
    tree = tree_of_paths(torch.tensor([[3], [6]]), paths, budget=4)
    assert tree.tokens.tolist() == [[3], [6]] and tree.scores.tolist() == [[0], [0]]


def test_a_row_of_the_root_alone_repeats_the_root():
    roots = torch.tensor([[3], [6]])
    tree = tree_of_paths(roots, [[[1, 2]], []], budget=4)
    check_trees(tree, roots, VOCAB)
    assert tree.tokens[1].tolist() == [6, 6, 6] and tree.depths[1].tolist() == [0, 1, 1]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_outside_the_vocabulary_are_not_hidden(token):
    with pytest.raises(ValueError, match="a token is not in"):
        check_trees(tree_of_paths(ROOTS, [[[1, token]]], budget=4), ROOTS, VOCAB)
