"""Acceptance rules: how a round's trees are made from the draft logits, and which paths of them are committed."""

from dataclasses import replace
from typing import Protocol

import torch

from .acceptance import Accepted, Walk, walk_at_once
from .configuration import DDTreeConfig
from .drafting.draft import Draft
from .emission import Emission, Emissions
from .noise import NoiseRows, row_streams, stream_key, uniform_noise
from .processors import BY_ROW, BY_SEQUENCE, CONTEXT_FREE, outside, process_tree
from .rejection import block_verification, draw, draw_without_replacement, recursive_rejection
from .tree import Marginals, Tree, build_tree, root_tree

# How often a node's draft of each rank is the one accepted; shapes the tree of recursive rejection. Measured with the
# demo's drafter at temperatures 0.7 and 1.0 over 717 nodes of held-out text; the last three are extrapolated.
RANK_CHANCES = (0.32, 0.12, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)


class AcceptanceRule(Protocol):
    """What the decoding loop asks of a rule."""

    def noise(self, depth: int, like: torch.Tensor) -> torch.Tensor | None:
        """What the draft should add to its logits `like` [live rows, depth, vocab]; None = nothing."""
        ...

    def build(self, root_tokens: torch.Tensor, drafted: Draft | Tree | None, budget: int | None = None) -> Tree:
        """The round's trees, one per live row; the roots alone where nothing was drafted.

        Args:
            budget: nodes below a root, at most; None = the config's.
        """
        ...

    def cut(self, tree: Tree, nodes: int) -> Tree:
        """A smaller tree in place of one that is too large: at most that many nodes."""
        ...

    def accept(self, tree: Tree, logits: torch.Tensor) -> list[Accepted]:
        """Emits the round's tokens, given the target's logits [live rows, nodes, vocab]."""
        ...


def make_rule(config: DDTreeConfig, emissions: Emissions, seed: int | list[int] | None) -> AcceptanceRule:
    """The rule that `config.acceptance` names.

    Args:
        seed: of the noise, one or one per row; None = greedy.

    Raises:
        ValueError: the rule's conditions are not met.
    """
    streams = None if seed is None else row_streams(seed, len(emissions.live))
    if config.acceptance == "walk":
        return WalkRule(config, emissions, streams)
    return RejectionRules(config, emissions, streams)


class WalkRule:
    """The target's own choice at every node, argmax(scores + keyed noise), followed for as long as the tree has it.

    Which text results depends on the target and the seed alone. The draft sees the same noise, so it proposes what the
    target's noise favours (coupled drafting); that changes how often it is right, not what is emitted.
    """

    def __init__(self, config: DDTreeConfig, emissions: Emissions, streams: list[tuple[int, int]] | None):
        self.config, self.emissions = config, emissions
        rows = list(emissions.live)
        self.noises = {row: NoiseRows(*stream) for row, stream in zip(rows, streams or [], strict=bool(streams))}
        processors = emissions.groups[0].processors
        self.depth = 0  # of the trees built last, at most
        self.in_order = bool(outside(processors, CONTEXT_FREE, BY_ROW)) or len(emissions.groups[0].ended) > 1

    def noise(self, depth: int, like: torch.Tensor) -> torch.Tensor | None:
        """The coming positions' own noise, scaled as logits; None for greedy decoding and uncoupled drafts."""
        if not self.noises or not (scale := self.config.noise_scale):
            return None
        rows = [torch.stack(self._noise(row, depth, like)) for row in self.emissions.live]
        return scale * self.config.sampling_temperature * torch.stack(rows).float()

    def build(self, root_tokens: torch.Tensor, drafted: Draft | Tree | None, budget: int | None = None) -> Tree:
        """The best-first trees of the draft under the noise that the target will choose by."""
        self.depth = 0
        if drafted is None:
            return root_tree(root_tokens)
        if isinstance(drafted, Tree):
            self.depth = drafted.max_depth
            return drafted
        self.depth = drafted.logits.shape[1]
        noise = self.noise(drafted.logits.shape[1], drafted.logits)
        budget = self.config.most_nodes if budget is None else budget
        return build_tree(root_tokens, drafted.marginals(self.config, noise, budget), budget)

    def cut(self, tree: Tree, nodes: int) -> Tree:
        """The best nodes."""
        return tree.first(nodes)

    def accept(self, tree: Tree, logits: torch.Tensor) -> list[Accepted]:
        """Node after node where that is cheaper or a processor must see tokens in order; else all nodes at once."""
        logits = logits.to(tree.tokens.device)
        if logits.device.type == "cpu" or self.in_order:
            return self.accept_in_order(tree, logits)
        return self.accept_at_once(tree, logits)

    def accept_in_order(self, tree: Tree, logits: torch.Tensor) -> list[Accepted]:
        """Calls the processors once per emitted token, on the ids before it: right for every processor there is."""
        accepted: list[Accepted] = []
        for group, rows in self._live_groups():
            place = len(accepted)
            walks = {row: Walk(tree.row(place + index)) for index, row in enumerate(rows)}
            while all(walk.goes_on for walk in walks.values() if not walk.finished):
                raw = torch.zeros(len(group.ended), logits.shape[-1], device=logits.device)  # rows that ended stay 0
                for index, (row, walk) in enumerate(walks.items()):
                    raw[row] = logits[place + index, walk.node]
                kept = raw if group.raw_logits is None else raw.clone()
                scores = group.processors(group.ids, raw)
                tokens = self._choices(group, scores)
                group.emit(tokens, kept, scores)
                for row, walk in walks.items():
                    walk.step(tokens[row], group.ended[row])
                if all(walk.finished for walk in walks.values()):
                    break
            accepted.extend(walk.accepted for walk in walks.values())
        return accepted

    def accept_at_once(self, tree: Tree, logits: torch.Tensor) -> list[Accepted]:
        """All nodes' choices and the paths on the device, then one copy to the host; each row is a group of its own."""
        depth = self.depth
        raws, processed, choices = [], [], []
        for index, (group, row) in enumerate(self.emissions.live):
            raw = logits[index].float()
            scores = process_tree(group.processors, group.ids, tree.row(index), raw.clone())
            noise = None
            if self.noises:
                rows = torch.stack(self._noise((group, row), depth + 1, scores))
                noise = rows[tree.depths[index]]
            raws.append(raw)
            processed.append(scores)
            choices.append(_choices(scores, noise))
        path, tokens = walk_at_once(tree, torch.stack(choices), depth)
        accepted = []
        for index, (nodes, chosen) in enumerate(torch.stack([path, tokens], dim=1).tolist()):
            length = sum(node >= 0 for node in nodes)
            group, _ = self.emissions.live[index]
            accepted.append(group.emit_path(nodes[:length], chosen[:length], raws[index], processed[index]))
        return accepted

    def _live_groups(self) -> list[tuple[Emission, list[int]]]:
        """Each group with its live rows, in the order of the trees."""
        groups: dict[int, tuple[Emission, list[int]]] = {}
        for group, row in self.emissions.live:
            groups.setdefault(id(group), (group, []))[1].append(row)
        return list(groups.values())

    def _choices(self, group: Emission, scores: torch.Tensor) -> list[int]:
        """A token for each row of the group."""
        if not self.noises:
            return _choices(scores, None).tolist()
        rows = [self._noise((group, row), 1, scores)[0] for row in range(len(scores))]
        return _choices(scores, torch.stack(rows)).tolist()

    def _noise(self, row: tuple[Emission, int], count: int, like: torch.Tensor) -> list[torch.Tensor]:
        group, index = row
        return self.noises[row](group.position(index), count, like=like)


class RejectionRules:
    """A `RejectionRule` for each row.

    Raises:
        ValueError: greedy decoding, or processors or criteria that a rule which looks ahead may not call.
    """

    def __init__(self, config: DDTreeConfig, emissions: Emissions, streams: list[tuple[int, int]] | None):
        name = config.acceptance
        if streams is None:
            raise ValueError(
                f"`acceptance={name!r}` draws its drafts and `do_sample` is False; set `do_sample=True`, or leave "
                '`acceptance` at "walk".'
            )
        if unknown := outside(emissions.groups[0].processors, CONTEXT_FREE, BY_ROW, BY_SEQUENCE):
            raise ValueError(
                f"`acceptance={name!r}` processes the logits of tokens that may never be emitted, which "
                f'{", ".join(unknown)} may not allow; leave `acceptance` at "walk", or leave the processor out.'
            )
        if len(emissions.groups[0].ended) > 1:
            raise ValueError(
                f"`acceptance={name!r}` lets rows of a batch go their own ways, which a custom criterion, or a "
                'stop without `eos_token_id`, does not allow; leave `acceptance` at "walk", or generate row by row.'
            )
        self.emissions = emissions
        self.rules = {
            id(row[0]): RejectionRule(config, row[0], stream)
            for row, stream in zip(emissions.live, streams, strict=True)
        }

    def noise(self, depth: int, like: torch.Tensor) -> None:
        """None: the drafts of these rules must not know the target's noise."""

    def build(self, root_tokens: torch.Tensor, drafted: Draft | Tree | None, budget: int | None = None) -> Tree:
        """Each row's tree, all of one shape."""
        if isinstance(drafted, Tree):
            raise TypeError("a drafter that gives trees has no distributions to draw drafts from")
        trees = [
            rule.build(root_tokens[row : row + 1], None if drafted is None else drafted.row(row))
            for row, rule in enumerate(self._live())
        ]
        fields = ((tree.tokens, tree.parents, tree.depths, tree.scores) for tree in trees)
        return Tree(*map(torch.cat, zip(*fields, strict=True)), depth_bound=max(tree.max_depth for tree in trees))

    def cut(self, tree: Tree, nodes: int) -> Tree:
        """The roots alone: these rules judge the tree that was drawn."""
        return tree if tree.num_nodes <= nodes else self.build(tree.tokens[:, :1], None)

    def accept(self, tree: Tree, logits: torch.Tensor) -> list[Accepted]:
        """Each row by its own rule."""
        return [rule.accept(tree.row(row), logits[row : row + 1]) for row, rule in enumerate(self._live())]

    def _live(self) -> list["RejectionRule"]:
        return [self.rules[id(group)] for group, _ in self.emissions.live]


class RejectionRule:
    """The classical rules: drafts are drawn from the drafter's distributions and accepted by their probabilities.

    For comparison and research. The law of the text is the target's, as with the walk, but which text a seed gives
    depends on drafter and tree. p is the target after all processors, q the drafter at `draft_temperature`.
    """

    def __init__(self, config: DDTreeConfig, emission: Emission, stream: tuple[int, int]):
        self.config, self.emission = config, emission
        self.key = stream_key(*stream, 1)  # longer than the walk's, so another stream
        self.children = torch.empty(0)  # [nodes, ranks] of the round's tree
        self.q = torch.empty(0)  # [1, depth, vocab] what its drafts were drawn from

    def build(self, root_tokens: torch.Tensor, draft: Draft | None) -> Tree:
        """A tree whose shape is settled before its tokens are drawn, each depth's without replacement."""
        depth = 0 if draft is None else draft.logits.shape[1]
        shape, self.children = shape_by_rank(depth, self.config.most_nodes, self._ranks(), root_tokens.device)
        if draft is None:
            self.q = torch.empty(1, 0, 1, device=root_tokens.device)
            return root_tree(root_tokens)
        deepest = shape.max_depth
        q = (draft.logits[:, :deepest].double() / self.config.tree_temperature).softmax(-1)
        broken = q.isnan().any(-1)  # a drafter's NaN or infinity: drafts drawn evenly are as good
        self.q = _even_where(broken, q)
        drafts = draw_without_replacement(self.q, self._uniforms()[0])[0]  # [depth, ranks]
        tokens = drafts[shape.depths[:, 1:] - 1, shape.tokens[:, 1:]]
        return replace(shape, tokens=torch.cat([root_tokens, tokens], dim=1))

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
        return min(self.config.candidates(self.config.most_nodes), len(RANK_CHANCES))

    def _uniforms(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This round's numbers: [1, depth, ranks] for drafts, as many for coins, and [1] for the bonus token.

        Keyed by the position that the round starts at, which no other round does.
        """
        depth, ranks, device = self.q.shape[1], self._ranks(), self.q.device
        position = torch.full((), self.emission.position(0), device=device)
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
