"""The walk: which path of a tree the target takes. Leaf module: torch only.

At each node the target's own choice is made exactly as plain decoding makes it; if a child carries that token the walk
steps into it, else the token ends the round. Exact for any tree; proof in docs/losslessness.md.
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


class Walk:
    """Follows the target's choices from the root of a one-row tree for as long as the tree has them.

    `step` is called once per emitted token, in order, so that whatever keeps state beside it (logits processors,
    stopping criteria, a random generator) sees what it would see in plain decoding.

    Attributes:
        node: the last accepted one, after which the next choice is made.
        goes_on: whether the tree has the last choice, so that there is a next one to make.
        finished: the text ended with the last token.
    """

    def __init__(self, tree: Tree):
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        self.children: dict[tuple[int, int], int] = {}
        for node in range(1, len(tokens)):
            self.children.setdefault((parents[node], tokens[node]), node)  # of equal siblings the better one
        self.path: list[int] = [0]
        self.tokens: list[int] = []
        self.goes_on, self.finished = True, False

    @property
    def node(self) -> int:
        return self.path[-1]

    def step(self, token: int, finished: bool) -> None:
        """Takes the target's choice after `node`, and whether the text ends with it."""
        if self.finished:
            return
        self.tokens.append(token)
        child = self.children.get((self.node, token))
        self.finished, self.goes_on = finished, not finished and child is not None
        if child is not None and not finished:
            self.path.append(child)

    @property
    def accepted(self) -> Accepted:
        """What was walked: a node that no choice was made after yet is the next root."""
        return Accepted(self.path[: len(self.tokens)], self.tokens, self.finished)


def walk(tree: Tree, choose: Choose) -> Accepted:
    """A whole walk over a one-row tree; `choose` is called once per emitted token, in order."""
    steps = Walk(tree)
    while steps.goes_on:
        steps.step(*choose(steps.node))
    return steps.accepted


def walk_at_once(tree: Tree, choices: torch.Tensor, max_depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same walk for trees whose every node's choice is known: fixed shapes, no loop over nodes, nothing copied to
    the host.

    Args:
        choices: [batch, nodes] the target's choice after each node.
        max_depth: no node of the tree is deeper.

    Returns:
        Two times [batch, max_depth + 1], index d for depth d: the accepted node, and the choice there; -1 past the end.
        The last choice is the bonus token.
    """
    accepted = tree.tokens == choices.gather(1, tree.parents)  # [batch, nodes]
    accepted[:, 0] = True
    jump = tree.parents
    for _ in range(max_depth.bit_length()):  # pointer doubling: at last every node knows all its ancestors
        accepted = accepted & accepted.gather(1, jump)
        jump = jump.gather(1, jump)
    nodes = torch.arange(tree.num_nodes, device=tree.tokens.device).expand_as(tree.tokens)
    path = nodes.new_full((len(nodes), max_depth + 1), -1)
    path = path.scatter_reduce(1, tree.depths, torch.where(accepted, nodes, -1), "amax")
    return path, torch.where(path >= 0, choices.gather(1, path.clamp(min=0)), -1)
