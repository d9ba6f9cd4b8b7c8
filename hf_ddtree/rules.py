"""Acceptance rules: how a round's tree is made from the draft logits, and which path of it is committed."""

from typing import Protocol

import torch

from .acceptance import Accepted, walk, walk_at_once
from .configuration import DDTreeConfig
from .drafting.draft import Draft
from .emission import Emission
from .noise import NoiseRows, stream_key, uniform_noise
from .processors import BY_ROW, BY_SEQUENCE, CONTEXT_FREE, outside, process_tree
from .rejection import block_verification, draw, draw_without_replacement, recursive_rejection
from .tree import Marginals, Tree, build_tree, root_tree

# How often a node's draft of each rank is the one accepted; shapes the tree of recursive rejection. Measured with the
# demo's drafter at temperatures 0.7 and 1.0 over 717 nodes of held-out text; the last three are extrapolated.
RANK_CHANCES = (0.32, 0.12, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)


class AcceptanceRule(Protocol):
    """What the decoding loop asks of a rule."""

    def build(self, root_tokens: torch.Tensor, draft: Draft | None) -> Tree:
        """The round's tree; the root alone where nothing was drafted."""
        ...

    def accept(self, tree: Tree, logits: torch.Tensor) -> Accepted:
        """Emits the round's tokens, given the target's logits [1, nodes, vocab]."""
        ...


def make_rule(config: DDTreeConfig, emission: Emission, stream: tuple[int, int] | None) -> AcceptanceRule:
    """The rule that `config.acceptance` names.

    Args:
        stream: seed and sequence id of the noise; None = greedy.

    Raises:
        ValueError: the rule's conditions are not met.
    """
    if config.acceptance == "walk":
        return WalkRule(config, emission, stream)
    return RejectionRule(config, emission, stream)


class WalkRule:
    """The target's own choice at every node, argmax(scores + keyed noise), followed for as long as the tree has it.

    Which text results depends on the target and the seed alone. The draft sees the same noise, so it proposes what the
    target's noise favours (coupled drafting); that changes how often it is right, not what is emitted.
    """

    def __init__(self, config: DDTreeConfig, emission: Emission, stream: tuple[int, int] | None):
        self.config, self.emission = config, emission
        self.noise = None if stream is None else NoiseRows(*stream)
        self.ordered = outside(emission.processors, CONTEXT_FREE, BY_ROW)
        self.depth = 0  # of the tree built last, at most

    def build(self, root_tokens: torch.Tensor, draft: Draft | None) -> Tree:
        """The best-first tree of the draft under the noise that the target will choose by."""
        self.depth = 0 if draft is None else draft.logits.shape[1]
        if draft is None:
            return root_tree(root_tokens)
        noise = None
        if self.noise is not None and (scale := self.config.noise_scale) > 0:
            rows = self.noise(self.emission.position, self.depth, like=draft.logits)
            noise = scale * self.config.sampling_temperature * torch.stack(rows).float()
        return build_tree(root_tokens, draft.marginals(self.config, noise), self.config.tree_budget)

    def accept(self, tree: Tree, logits: torch.Tensor) -> Accepted:
        """Node after node where that is cheaper or a processor must see tokens in order; else all nodes at once."""
        logits = logits.to(self.emission.ids.device)
        if logits.device.type == "cpu" or self.ordered:
            return self.accept_in_order(tree, logits)
        return self.accept_at_once(tree, logits)

    def accept_in_order(self, tree: Tree, logits: torch.Tensor) -> Accepted:
        """Calls the processors once per emitted token, on the ids before it: right for every processor there is."""
        emission = self.emission

        def choose(node: int) -> tuple[int, bool]:
            raw = logits[:, node].to(torch.float32, copy=True)
            kept = raw if emission.raw_logits is None else raw.clone()
            scores = emission.processors(emission.ids, raw)
            rows = None if self.noise is None else self.noise(emission.position, 1, like=scores)[0]
            token = int(_choices(scores, rows))
            return token, emission.emit(token, kept, scores)

        return walk(tree, choose)

    def accept_at_once(self, tree: Tree, logits: torch.Tensor) -> Accepted:
        """All nodes' choices and the path on the device, then one copy to the host."""
        raw = logits[0].float()
        scores = process_tree(self.emission.processors, self.emission.ids, tree, raw.clone())
        rows = None
        if self.noise is not None:
            rows = torch.stack(self.noise(self.emission.position, self.depth + 1, like=scores))[tree.depths[0]]
        path, tokens = walk_at_once(tree, _choices(scores, rows)[None], self.depth)
        nodes, chosen = torch.cat([path, tokens]).tolist()
        length = sum(node >= 0 for node in nodes)
        return self.emission.emit_path(nodes[:length], chosen[:length], raw, scores)


class RejectionRule:
    """The classical rules: drafts are drawn from the drafter's distributions and accepted by their probabilities.

    For comparison and research. The law of the text is the target's, as with the walk, but which text a seed gives
    depends on drafter and tree. p is the target after all processors, q the drafter at `draft_temperature`.
    """

    def __init__(self, config: DDTreeConfig, emission: Emission, stream: tuple[int, int] | None):
        name = config.acceptance
        if stream is None:
            raise ValueError(
                f"`acceptance={name!r}` draws its drafts and `do_sample` is False; set `do_sample=True`, or leave "
                '`acceptance` at "walk".'
            )
        if unknown := outside(emission.processors, CONTEXT_FREE, BY_ROW, BY_SEQUENCE):
            raise ValueError(
                f"`acceptance={name!r}` processes the logits of tokens that may never be emitted, which "
                f'{", ".join(unknown)} may not allow; leave `acceptance` at "walk", or leave the processor out.'
            )
        self.config, self.emission = config, emission
        self.key = stream_key(*stream, 1)  # longer than the walk's, so another stream
        self.children = torch.empty(0)  # [nodes, ranks] of the round's tree
        self.q = torch.empty(0)  # [1, depth, vocab] what its drafts were drawn from

    def build(self, root_tokens: torch.Tensor, draft: Draft | None) -> Tree:
        """A tree whose shape is settled before its tokens are drawn, each depth's without replacement."""
        depth = 0 if draft is None else draft.logits.shape[1]
        shape, self.children = shape_by_rank(depth, self.config.tree_budget, self._ranks(), root_tokens.device)
        if draft is None:
            self.q = torch.empty(1, 0, 1, device=root_tokens.device)
            return root_tree(root_tokens)
        deepest = int(shape.depths.max())
        q = (draft.logits[:, :deepest].double() / self.config.tree_temperature).softmax(-1)
        broken = q.isnan().any(-1)  # a drafter's NaN or infinity: drafts drawn evenly are as good
        self.q = _even_where(broken, q)
        drafts = draw_without_replacement(self.q, self._uniforms()[0])[0]  # [depth, ranks]
        tokens = drafts[shape.depths[:, 1:] - 1, shape.tokens[:, 1:]]
        return Tree(torch.cat([root_tokens, tokens], dim=1), shape.parents, shape.depths, shape.scores)

    def accept(self, tree: Tree, logits: torch.Tensor) -> Accepted:
        """All nodes' distributions and the path on the device, then one copy to the host."""
        raw = logits[0].to(self.emission.ids.device, torch.float32)
        scores = process_tree(self.emission.processors, self.emission.ids, tree, raw.clone())
        p = scores.double().softmax(-1)[None]
        empty = p.isnan().any(-1)  # nothing to choose from, which is no matter after a token that ends generation
        p = _even_where(empty, p)
        _, coins, last = self._uniforms()
        if self.config.acceptance == "block":
            path, weights = block_verification(p, self.q, tree.tokens, coins[..., 0])
        else:
            path, weights = recursive_rejection(p, self.q, tree.tokens, self.children, coins)
        depth = torch.arange(path.shape[1], device=path.device)
        last_depth = path.argmax(1, keepdim=True)  # node numbers rise along a path
        steps = tree.tokens.gather(1, path.roll(-1, 1).clamp(min=0))  # each node's child on the path
        chosen = torch.where(depth == last_depth, draw(weights, last)[:, None], steps)
        chosen = torch.where(empty.gather(1, path.clamp(min=0)), -1, chosen)
        nodes, tokens = torch.cat([path, chosen]).tolist()
        length = sum(node >= 0 for node in nodes)
        return self.emission.emit_path(nodes[:length], tokens[:length], raw, scores)

    def _ranks(self) -> int:
        return min(self.config.candidates_per_depth, len(RANK_CHANCES))

    def _uniforms(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This round's numbers: [1, depth, ranks] for drafts, as many for coins, and [1] for the bonus token.

        Keyed by the position that the round starts at, which no other round does.
        """
        depth, ranks, device = self.q.shape[1], self._ranks(), self.q.device
        position = torch.full((), self.emission.position, device=device)
        numbers = uniform_noise(self.key, position, torch.arange(2 * depth * ranks + 1, device=device))
        drafts, coins = numbers[:-1].view(2, 1, depth, ranks)
        return drafts, coins, numbers[-1:]


def shape_by_rank(depth: int, budget: int, ranks: int, device: torch.device) -> tuple[Tree, torch.Tensor]:
    """The best-first tree if the draft of rank r were right with `RANK_CHANCES[r]` at every depth.

    Returns:
        The tree, with ranks for tokens, and [nodes, ranks] each node's child of each rank, -1 where it has none.
    """
    root = torch.zeros(1, 1, dtype=torch.int64, device=device)
    order = torch.arange(ranks, device=device).expand(1, depth, -1)
    chances = torch.tensor(RANK_CHANCES[:ranks], device=device).log().expand(1, depth, -1)
    tree = build_tree(root, Marginals(order, chances), budget)
    children = torch.full((tree.num_nodes, ranks), -1, device=device)
    children[tree.parents[0, 1:], tree.tokens[0, 1:]] = torch.arange(1, tree.num_nodes, device=device)
    return tree, children


def _even_where(rows: torch.Tensor, distributions: torch.Tensor) -> torch.Tensor:
    return torch.where(rows[..., None], 1 / distributions.shape[-1], distributions)


def _choices(scores: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """The token chosen from each row of scores [rows, vocab]; -1 where sampling has nothing to choose from."""
    if noise is None:
        return scores.argmax(-1)
    best, tokens = (scores.double() + noise).max(-1)
    return torch.where(best > -torch.inf, tokens, -1)
