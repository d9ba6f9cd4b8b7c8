"""The walk: which path of a tree the target takes. Leaf module: torch only.

Sample-and-match: at each node the target's own choice is made exactly as plain decoding makes it; if a child carries
that token the walk steps into it, else the token ends the round. Exact for any tree built without looking at the
choices; proof in docs/losslessness.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .tree import Tree

# Given a node, the target's choice after the tokens emitted so far, and whether generation ends with it.
Choose = Callable[[int], tuple[int, bool]]


@dataclass(frozen=True)
class Accepted:
    """What a round commits.

    Attributes:
        path: accepted nodes from the root down; their keys and values stay in the cache.
        tokens: the tokens emitted, one per node of `path`; the last is the bonus token, the next root.
        finished: generation ends with the last token.
    """

    path: list[int]
    tokens: list[int]
    finished: bool


def walk(tree: Tree, choose: Choose) -> Accepted:
    """Follows the target's choices from the root of a one-row tree for as long as the tree has them.

    `choose` is called once per emitted token, in order, so that whatever keeps state in it (logits processors,
    stopping criteria, a random generator) sees what it would see in plain decoding.
    """
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(tokens)):
        children.setdefault((parents[node], tokens[node]), node)  # of equal siblings the better one

    path, emitted, finished = [0], [], False
    while True:
        token, finished = choose(path[-1])
        emitted.append(token)
        child = children.get((path[-1], token))
        if finished or child is None:
            return Accepted(path, emitted, finished)
        path.append(child)


def greedy_token(scores: torch.Tensor) -> int:
    """The best token of `scores` [1, vocab]."""
    return int(scores.argmax(dim=-1))


def sampled_token(scores: torch.Tensor) -> int:
    """One draw from `scores` [1, vocab], from torch's default generator and by the same call as plain `generate`.

    Plain decoding draws once per token and in the same order, so the same seed gives the same text.
    """
    probabilities = torch.nn.functional.softmax(scores, dim=-1)
    return int(torch.multinomial(probabilities, num_samples=1))
