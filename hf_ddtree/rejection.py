"""Classical acceptance rules, for drafts that were drawn: accepted by probabilities, not by equality. Leaf: torch only.

All work on rows at once with fixed shapes and without host synchronisation, in float64, from uniform numbers that they
are given. A rule is exact only if each draft was drawn from the very `q` it is given and nothing was reordered since.
"""

import torch


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens drawn in proportion to `weights` [..., vocab] by inverting the distribution at `uniforms` [...] in [0, 1).

    Never a token of weight 0, unless all are: where rounding of the sum hits one, the likeliest token is taken.
    """
    cumulative = weights.cumsum(-1)
    tokens = torch.searchsorted(cumulative, uniforms[..., None] * cumulative[..., -1:], right=True)
    tokens = tokens.clamp(max=weights.shape[-1] - 1)
    hit = weights.gather(-1, tokens) > 0
    return torch.where(hit, tokens, weights.argmax(-1, keepdim=True))[..., 0]


def draw_without_replacement(q: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[..., count] distinct tokens in the order drawn, each from `q` [..., vocab] less those before it.

    Where `q` has fewer tokens of positive weight than `uniforms` [..., count] has columns, the rest are any tokens; the
    rules pass over them.
    """
    tokens = []
    for column in uniforms.unbind(-1):
        tokens.append(draw(q, column))
        q = _without(q, tokens[-1])
    return torch.stack(tokens, dim=-1)


def recursive_rejection(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, children: torch.Tensor, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tests a node's children in the order they were drawn; on a chain this is token-wise rejection.

    A child x is accepted with probability min(1, P(x) / Q(x)); after a rejection P becomes the normalised (P - Q)+ and
    Q the normalised Q without x. Sources: https://arxiv.org/abs/2211.17192 (chain), https://arxiv.org/abs/2402.12374
    (without replacement).

    Args:
        p: [rows, nodes, vocab] target distribution after each node.
        q: [rows, depth, vocab] what the drafts of each depth were drawn from, without replacement.
        tokens: [rows, nodes]; the root's does not matter.
        children: [nodes, ranks] the child of each node that holds the depth's draft of that rank, -1 where there is
            none; no rank without those before it. Which there are must have been settled before the drafts were drawn.
        coins: [rows, depth, ranks] uniform numbers.

    Returns:
        [rows, depth + 1] the accepted nodes from the root (0) down, -1 past the end, and [rows, vocab] the weights to
        draw the bonus token from.
    """
    rows = torch.arange(len(p), device=p.device)
    cursor = torch.zeros_like(rows)
    alive = torch.ones_like(rows, dtype=torch.bool)
    path, weights = [cursor], p[:, 0]
    for depth in range(q.shape[1]):
        target, draft, node = p[rows, cursor], q[:, depth], cursor
        stepped = ~alive
        for rank in range(children.shape[1]):
            child = children[cursor, rank]
            token = tokens[rows, child.clamp(min=0)]
            chance = draft[rows, token]
            tested = ~stepped & (child >= 0) & (chance > 0)
            accepted = tested & (coins[:, depth, rank] * chance < target[rows, token])
            rejected = (tested & ~accepted)[:, None]
            target = torch.where(rejected, _residual(target, draft), target)
            draft = torch.where(rejected, _normalised(_without(draft, token)), draft)
            node = torch.where(accepted, child, node)
            stepped = stepped | accepted
        weights = torch.where((alive & ~stepped)[:, None], target, weights)
        alive, cursor = alive & stepped, node
        path.append(torch.where(alive, node, -1))
        weights = torch.where(alive[:, None], p[rows, cursor], weights)
    return torch.stack(path, dim=1), weights


def block_verification(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts the longest prefix of a chain that passes, even past tokens that fail.

    Prefix i passes with probability h_i = S_i / (S_i + 1 - w_i), where w_i = min(1, w_(i-1) p_i / q_i) and S_i is the
    mass of (w_i p - q)+ at the next position; the whole chain with h = w. Source: https://arxiv.org/abs/2403.10444.

    Args:
        p: [rows, depth + 1, vocab] target distribution after each node of the chain, the root first.
        q: [rows, depth, vocab] what each draft was drawn from.
        tokens: [rows, depth + 1]; the root's does not matter.
        coins: [rows, depth] uniform numbers.

    Returns:
        As `recursive_rejection`.
    """
    depth = q.shape[1]
    ratio = torch.ones_like(p[:, 0, 0])  # w: how much of the drafted prefix's probability the target can use
    length = torch.zeros_like(tokens[:, 0])
    weights = p[:, 0] if depth == 0 else _positive_part(p[:, 0] - q[:, 0], p[:, 0])
    for i in range(1, depth + 1):
        token = tokens[:, i, None]
        chance, wanted = q[:, i - 1].gather(1, token)[:, 0], p[:, i - 1].gather(1, token)[:, 0]
        ratio = (ratio * wanted / chance).clamp(max=1.0)
        left = p[:, i] if i == depth else (ratio[:, None] * p[:, i] - q[:, i]).clamp(min=0.0)
        mass = left.sum(-1)
        passes = ratio if i == depth else torch.where(ratio < 1, mass / (mass + 1 - ratio), 1.0)
        accepted = coins[:, i - 1] < passes
        length = torch.where(accepted, i, length)
        weights = torch.where(accepted[:, None], _positive_part(left, p[:, i]), weights)
    nodes = torch.arange(depth + 1, device=p.device)
    return torch.where(nodes <= length[:, None], nodes, -1), weights


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The normalised (p - q)+."""
    return _normalised(_positive_part(p - q, p))


def _positive_part(weights: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """The positive part of `weights`; `otherwise` where nothing is left, which happens by rounding only."""
    positive = weights.clamp(min=0.0)
    return torch.where(positive.sum(-1, keepdim=True) > 0, positive, otherwise)


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _without(q: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return q.scatter(-1, token[..., None], 0.0)
