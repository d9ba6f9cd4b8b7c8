"""Draft trees: the data structure, and best-first builders over per-depth marginals.

DDTree, https://arxiv.org/abs/2604.12989: from one distribution per depth, the tree of the `budget` most probable
prefixes. The builders also take distributions that depend on the parent's token. Leaf module: torch only.
"""

import heapq
from dataclasses import dataclass, field, replace
from operator import itemgetter

import torch

LARGEST_CORRECTION = 1e4  # beyond it sums of log-probabilities would lose what tells siblings apart


@dataclass(frozen=True)
class Marginals:
    """Per-depth draft distributions, cut to their best tokens; depth d is index d - 1.

    Attributes:
        tokens: [batch, depth, top_k] int64, most probable first.
        log_probs: [batch, depth, top_k] float32, normalised over the full vocabulary, descending.
        conditional: [batch, depth, top_k, top_k] float32, or None where depths are independent. Entry [b, d, i, j] is
            the log-probability of token j at index d after token i at index d - 1; the root is token 0 of index -1.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    conditional: torch.Tensor | None = None

    def after(self, index: int, ranks: torch.Tensor) -> torch.Tensor:
        """[batch, n, top_k] log-probabilities of the tokens at `index` after parents of `ranks` [batch, n]."""
        if self.conditional is None:
            return self.log_probs[:, index, None].expand(-1, ranks.shape[1], -1)
        return self.conditional[:, index].gather(1, ranks[..., None].expand(-1, -1, self.log_probs.shape[-1]))


@dataclass(frozen=True)
class Tree:
    """A draft tree, nodes in best-first order: node 0 is the root, parents come before children.

    Attributes:
        tokens: [batch, nodes] int64; the root's is the last committed token.
        parents: [batch, nodes] int64; the root's is 0.
        depths: [batch, nodes] int64; the root's is 0.
        scores: [batch, nodes] float64, log-probability of the path under the marginals; the root's is 0.
        depth_bound: no node is deeper; None = not known, and looking it up waits for an accelerator.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    depth_bound: int | None = field(default=None, kw_only=True)

    @property
    def max_depth(self) -> int:
        """`depth_bound`, or the depth of the deepest node where that is not known."""
        return int(self.depths.max()) if self.depth_bound is None else self.depth_bound

    @property
    def num_nodes(self) -> int:
        """Nodes including the root."""
        return self.tokens.shape[1]

    def row(self, index: int) -> "Tree":
        """The tree of one row."""
        return self._part(slice(index, index + 1), slice(None))

    def first(self, nodes: int) -> "Tree":
        """The best nodes alone; a tree too, since parents come before children."""
        return self._part(slice(None), slice(nodes))

    def _part(self, rows: slice, nodes: slice) -> "Tree":
        fields = (each[rows, nodes] for each in (self.tokens, self.parents, self.depths, self.scores))
        return Tree(*fields, depth_bound=self.depth_bound)

    def padded(self, nodes: int) -> "Tree":
        """With twins of the root, up to so many nodes in all; for forwards, whose outputs for them nobody looks at."""
        more = nodes - self.num_nodes
        if more <= 0:
            return self
        tokens = torch.cat([self.tokens, self.tokens[:, :1].expand(-1, more)], dim=1)
        parents, depths = (torch.nn.functional.pad(each, (0, more)) for each in (self.parents, self.depths))
        scores = torch.nn.functional.pad(self.scores, (0, more))
        return Tree(tokens, parents, depths, scores, depth_bound=self.depth_bound)

    def ancestors(self) -> torch.Tensor:
        """[batch, nodes, nodes] bool: entry [b, i, j] is true when node j is node i or one of its ancestors.

        Pointer doubling: after step s every row knows its nearest 2^s ancestors.
        """
        batch, nodes = self.tokens.shape
        visible = torch.eye(nodes, dtype=torch.bool, device=self.tokens.device).repeat(batch, 1, 1)
        jump = self.parents
        reached = 1
        while reached <= self.max_depth:
            visible = visible | visible.gather(1, jump[..., None].expand(-1, -1, nodes))
            jump = jump.gather(1, jump)
            reached *= 2
        return visible

    def path_tokens(self) -> torch.Tensor:
        """[batch, nodes, max_depth] tokens on the way to each node, its own included, the root's left out; 0 beyond."""
        on_path = torch.where(self.ancestors(), self.tokens[:, None], 0)
        depths = self.depths[:, None].expand_as(on_path)
        by_depth = on_path.new_zeros(*self.tokens.shape, self.max_depth + 1)
        return by_depth.scatter_add_(2, depths, on_path)[:, :, 1:]


def check_trees(tree: Tree, roots: torch.Tensor, vocab_size: int) -> None:
    """Raises ValueError unless it is a tree per root that a forward can take; for trees that a drafter made itself."""
    tokens, parents, depths = tree.tokens, tree.parents, tree.depths
    if any(each.dtype != torch.int64 for each in (tokens, parents, depths)) or tree.scores.shape != tokens.shape:
        raise ValueError("tokens, parents and depths must be int64, and scores of their shape")
    if tokens.shape != parents.shape or tokens.shape != depths.shape or tokens.shape[:1] != roots.shape[:1]:
        raise ValueError(f"tokens, parents and depths are {[list(each.shape) for each in (tokens, parents, depths)]}")
    nodes = torch.arange(tokens.shape[1], device=parents.device)
    if not torch.equal(tokens[:, :1], roots) or bool((parents[:, :1] != 0).any()):
        raise ValueError("node 0 of a row is not its root")
    if bool((parents[:, 1:] >= nodes[1:]).any()) or bool((parents < 0).any()):
        raise ValueError("a node comes before its parent")
    if not torch.equal(depths[:, 1:], depths.gather(1, parents)[:, 1:] + 1) or bool((depths[:, 0] != 0).any()):
        raise ValueError("a depth is not its parent's plus one")
    if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
        raise ValueError(f"a token is not in 0..{vocab_size - 1}")


def root_tree(tokens: torch.Tensor) -> Tree:
    """A tree of the root alone, whose token is `tokens` [batch, 1]."""
    zeros = torch.zeros_like(tokens)
    return Tree(tokens, zeros, zeros, zeros.double(), depth_bound=0)


def top_marginals(logits: torch.Tensor, top_k: int, temperature: torch.Tensor | None = None) -> Marginals:
    """Cuts draft logits [batch, depth, vocab] to the `top_k` best tokens of each depth.

    Log-probabilities are float32 and normalised over the full vocabulary. A depth with a NaN gets -inf throughout: its
    nodes are drafted last and can only cost time.

    Args:
        temperature: [depth, 1] float32, which the logits are divided by; None = 1.
    """
    if logits.device.type == "cpu" and len(logits) > 1:
        # A row of 7 x 49k fits into a core's cache: 0.4 ms each, where eight at once take 1.2 ms each (2-core EPYC).
        rows = [top_marginals(row[None], top_k, temperature) for row in logits]
        return Marginals(torch.cat([row.tokens for row in rows]), torch.cat([row.log_probs for row in rows]))
    logits = logits.float() if temperature is None else logits / temperature
    tokens = logits.topk(min(top_k, logits.shape[-1]), dim=-1).indices
    log_probs = logits.log_softmax(-1).gather(-1, tokens)  # half the time of logsumexp on a CPU
    # Rounding may leave a certain token a hair above 0, which would rank a child before its parent.
    return Marginals(tokens, log_probs.nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf).clamp(max=0.0))


def condition(marginals: Marginals, corrections: torch.Tensor) -> Marginals:
    """Makes every depth depend on the parent's token, within the depth's own candidates and their total probability.

    Args:
        corrections: [batch, depth, top_k, top_k], laid out as `Marginals.conditional`; added to the log-probabilities
            of the children, at most `LARGEST_CORRECTION` either way. A NaN counts as no correction.
    """
    corrections = corrections.float().nan_to_num(nan=0.0).clamp_(-LARGEST_CORRECTION, LARGEST_CORRECTION)
    log_probs = marginals.log_probs[:, :, None]
    total = log_probs.logsumexp(-1, keepdim=True)  # [batch, depth, 1, 1]
    conditional = corrections.add_(log_probs).log_softmax(-1).add_(total)
    conditional = conditional.nan_to_num_(nan=-torch.inf, neginf=-torch.inf).clamp_(max=0.0)
    return replace(marginals, conditional=conditional)


def build_tree(root_tokens: torch.Tensor, marginals: Marginals, budget: int) -> Tree:
    """The tree of the `budget` most probable prefixes below `root_tokens` [batch, 1]; ties go to the lower rank tuple.

    On a CPU by the heap, elsewhere level by level, which needs no copy to the host; both give the same tree, bit for
    bit. Fewer nodes result where the marginals allow fewer.
    """
    if budget == 0 or marginals.tokens.shape[1] == 0:
        return root_tree(root_tokens)
    build = build_tree_by_heap if root_tokens.device.type == "cpu" else build_tree_by_level
    return build(root_tokens, marginals, budget)


def build_tree_by_heap(root_tokens: torch.Tensor, marginals: Marginals, budget: int) -> Tree:
    """Algorithm 1 of the paper: pop the best prefix, push its next sibling and its first child."""
    roots = root_tokens[:, 0].tolist()
    rows = [_grow_row(marginals, row, root, budget) for row, root in enumerate(roots)]
    tokens, parents, depths, scores = (list(column) for column in zip(*rows, strict=True))
    return Tree(
        tokens=torch.tensor(tokens, device=root_tokens.device),
        parents=torch.tensor(parents, device=root_tokens.device),
        depths=torch.tensor(depths, device=root_tokens.device),
        scores=torch.tensor(scores, dtype=torch.float64, device=root_tokens.device),
        depth_bound=max(map(max, depths)),
    )


def _grow_row(
    marginals: Marginals, row: int, root: int, budget: int
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Tokens, parents, depths and scores of one row's nodes. Scores add up in double precision."""
    tokens = marginals.tokens[row].tolist()
    children = _Children(marginals, row)
    node_tokens, parents, depths, scores = [root], [0], [0], [0.0]
    # (-score, rank tuple, place among siblings, parent's node index, parent's score). Rank tuples are unique, so later
    # fields never compare.
    rank, log_prob = children.best(0, 0, 0.0)
    heap: list[tuple[float, tuple[int, ...], int, int, float]] = [(-log_prob, (rank,), 0, 0, 0.0)]
    while heap and len(scores) <= budget:
        negative_score, ranks, place, parent, parent_score = heapq.heappop(heap)
        depth, score = len(ranks), -negative_score
        node_tokens.append(tokens[depth - 1][ranks[-1]])
        parents.append(parent)
        depths.append(depth)
        scores.append(score)
        siblings = children.ordered(depth - 1, ranks[-2] if depth > 1 else 0, parent_score)
        if place + 1 < len(siblings):
            rank, log_prob = siblings[place + 1]
            heapq.heappush(heap, (-(parent_score + log_prob), (*ranks[:-1], rank), place + 1, parent, parent_score))
        if depth < len(tokens):
            rank, log_prob = children.best(depth, ranks[-1], score)
            heapq.heappush(heap, (-(score + log_prob), (*ranks, rank), 0, len(scores) - 1, score))
    return node_tokens, parents, depths, scores


class _Children:
    """The children of one row's nodes as (rank, log-probability), by their depth's index, their parent's rank and its
    score. Below an impossible parent all scores tie, so the order is by rank.

    Every node asks for its best child, but only parents for all of theirs, 20 of 64 nodes: sorting those in Python
    takes 0.2 ms, and all 449 rows at once by torch 1.2 ms (64 candidates, one core of an AMD EPYC).
    """

    def __init__(self, marginals: Marginals, row: int):
        self.independent = [list(enumerate(log_probs)) for log_probs in marginals.log_probs[row].tolist()]
        self.conditional = None if marginals.conditional is None else marginals.conditional[row]
        self.sorted: dict[tuple[int, int], list[tuple[int, float]]] = {}
        if self.conditional is not None:
            log_probs, ranks = self.conditional.max(-1)  # of equal ones the first
            self.log_probs, self.ranks = log_probs.tolist(), ranks.tolist()

    def best(self, index: int, rank: int, score: float) -> tuple[int, float]:
        """The first of `ordered`."""
        if self.conditional is None or score == -torch.inf:
            return self.independent[index][0]
        return self.ranks[index][rank], self.log_probs[index][rank]

    def ordered(self, index: int, rank: int, score: float) -> list[tuple[int, float]]:
        """All of them, best first."""
        if self.conditional is None or score == -torch.inf:
            return self.independent[index]
        if (index, rank) not in self.sorted:
            log_probs = self.conditional[index, rank].tolist()
            self.sorted[index, rank] = sorted(enumerate(log_probs), key=itemgetter(1), reverse=True)  # ties by rank
        return self.sorted[index, rank]


def build_tree_by_level(root_tokens: torch.Tensor, marginals: Marginals, budget: int) -> Tree:
    """The same tree without a heap: a node among the `budget` best has all its ancestors among them, so it is exact to
    keep the best `budget` of each depth and then the best `budget` of all.
    """
    batch, max_depth, top_k = marginals.tokens.shape
    device = root_tokens.device
    scores = torch.zeros(batch, 1, dtype=torch.float64, device=device)
    ranks = torch.full((batch, 1, max_depth), -1, device=device)  # rank tuples, -1 past their end
    rank = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # of each of the level's nodes at its own depth
    previous_start, start = 0, 0  # where the parents' level and this level begin among all candidates
    levels = []
    for depth in range(max_depth):
        # Children come in rank-tuple order, so a stable sort settles ties by rank tuple.
        children = (scores[:, :, None] + marginals.after(depth, rank).double()).flatten(1)
        kept = children.argsort(dim=1, descending=True, stable=True)[:, :budget].sort(dim=1).values
        scores, parent, rank = children.gather(1, kept), kept // top_k, kept % top_k
        ranks = ranks.gather(1, parent[..., None].expand(-1, -1, max_depth))
        ranks[:, :, depth] = rank
        token = marginals.tokens[:, depth].gather(1, rank)
        levels.append((token, previous_start + parent, torch.full_like(rank, depth + 1), scores, ranks))
        previous_start, start = start, start + kept.shape[1]

    token, parent, depths, scores, ranks = (torch.cat(column, dim=1) for column in zip(*levels, strict=True))
    order = _best_first_order(scores, ranks)[:, :budget]
    node_of = torch.zeros_like(token)  # candidate -> node
    node_of.scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=device).expand(batch, -1))
    depths = depths.gather(1, order)
    root = root_tree(root_tokens)
    parent = torch.where(depths > 1, node_of.gather(1, parent.gather(1, order)), 0)
    below = (token.gather(1, order), parent, depths, scores.gather(1, order))
    above = (root.tokens, root.parents, root.depths, root.scores)
    return Tree(*(torch.cat(pair, dim=1) for pair in zip(above, below, strict=True)), depth_bound=max_depth)


def _best_first_order(scores: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Sorts nodes by descending `scores` [batch, n], ties by rank tuple [batch, n, depth], prefixes first."""
    order = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    for column in reversed(range(ranks.shape[2])):  # stable sorts, least significant key first
        order = order.gather(1, ranks[..., column].gather(1, order).argsort(dim=1, stable=True))
    return order.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True))
