"""Trees of guessed continuations, for drafters that know texts rather than distributions."""

from collections.abc import Sequence
from math import inf, log

import torch

from ..tree import Tree

Row = list[tuple[int, int, int, float]]  # nodes as (token, parent, depth, score), the root left out


def tree_of_paths(
    roots: torch.Tensor,
    paths: Sequence[Sequence[Sequence[int]]],
    budget: int,
    weights: Sequence[Sequence[Sequence[float]]] | None = None,
    least: float = 0.0,
) -> Tree:
    """Trees of guessed continuations, joined where they begin alike.

    Args:
        roots: [rows, 1].
        paths: per row, continuations as token ids, the most promising first.
        budget: nodes per row at most, the root left out.
        weights: shaped as `paths`, never growing along a path. A node weighs what the paths through it do there, and
            nodes are taken from the heaviest down. None: a path outweighs all that come after it, so that nodes are
            taken in the order of the paths.
        least: nodes that weigh less are left out.

    Returns:
        Trees of as many nodes in all rows; a node's score is the logarithm of its weight. Rows that have fewer are
        filled with twins of their last node, which add nothing; a row of the root alone with the root's own token.
    """
    if weights is None:
        weights = [[[2.0 ** -(rank + 1)] * len(path) for rank, path in enumerate(row)] for row in paths]
    rows = [_heaviest(*row, budget, least) for row in zip(paths, weights, strict=True)]
    size = max(map(len, rows))
    nodes = []
    for root, row in zip(roots[:, 0].tolist(), rows, strict=True):
        last = row[-1] if row else (root, 0, 1, -inf)
        nodes.append([(root, 0, 0, 0.0), *row, *[last] * (size - len(row))])
    tokens, parents, depths = (
        torch.tensor([[node[field] for node in row] for row in nodes], device=roots.device) for field in range(3)
    )
    scores = torch.tensor([[node[3] for node in row] for row in nodes], dtype=torch.float64, device=roots.device)
    return Tree(tokens, parents, depths, scores, depth_bound=max(node[2] for row in nodes for node in row))


def _heaviest(paths: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], budget: int, least: float) -> Row:
    """The heaviest prefixes of the paths, best first.

    A child's weight is a sum over fewer and no greater terms, added in the same order, so that rounding can't lift it
    above its parent's; and since nodes are made from the root down, a stable sort puts parents before children.
    """
    tokens, parents, depths, sums = [-1], [0], [0], [inf]
    children: dict[tuple[int, int], int] = {}
    for path, of_tokens in zip(paths, weights, strict=True):
        node = 0
        for token, weight in zip(path, of_tokens, strict=True):
            child = children.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
                sums.append(0.0)
            sums[child] += weight
            node = child
    heavy = [node for node in range(1, len(tokens)) if sums[node] >= least]
    kept = sorted(heavy, key=lambda node: -sums[node])[:budget]
    place = {node: index for index, node in enumerate([0, *kept])}
    return [
        (tokens[node], place[parents[node]], depths[node], log(sums[node]) if sums[node] else -inf) for node in kept
    ]
