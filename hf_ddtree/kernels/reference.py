"""Tree attention as loops: slow, plain torch, and the specification of every faster way to compute it."""

import torch


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parents: list[int], scale: float
) -> torch.Tensor:
    """Attention of each tree node to the whole prefix, its ancestors and itself, and to nothing else.

    Args:
        query: [heads, nodes, head_dim].
        key, value: [kv_heads, prefix + nodes, head_dim]; each kv head serves `heads / kv_heads` query heads in turn.
        parents: per node its parent; the root, node 0, is its own.
        scale: factor of the dot products.

    Returns:
        [heads, nodes, head_dim], in the query's dtype; computed in float64.
    """
    heads, nodes, _ = query.shape
    group = heads // key.shape[0]
    prefix = key.shape[1] - nodes
    output = torch.empty_like(query)
    for head in range(heads):
        keys, values = key[head // group].double(), value[head // group].double()
        for node in range(nodes):
            visible = list(range(prefix))
            ancestor = node
            while ancestor != parents[ancestor]:
                visible.append(prefix + ancestor)
                ancestor = parents[ancestor]
            visible.append(prefix)  # the root
            scores = keys[visible] @ query[head, node].double() * scale
            output[head, node] = (scores.softmax(0) @ values[visible]).to(query.dtype)
    return output
