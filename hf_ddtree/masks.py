"""4D attention masks of a verify forward: every node sees the committed prefix, its ancestors and itself."""

import torch

from .tree import Tree


def tree_mask(
    tree: Tree, prefix_visible: torch.Tensor, dtype: torch.dtype, sliding_window: int | None = None
) -> torch.Tensor:
    """Additive mask [batch, 1, nodes, prefix + nodes]: 0 = visible, the dtype's minimum = hidden.

    Additive and in the model's dtype, because eager attention *adds* the mask: a bool one would silently be wrong.

    Args:
        prefix_visible: [batch, prefix] bool, for the cached keys that the layer returns: False = padding.
        sliding_window: where the layer has one, a node sees keys fewer than this many positions before it; the cached
            keys are then the last `prefix` committed positions.
    """
    batch, prefix = prefix_visible.shape
    nodes = tree.num_nodes
    visible = torch.cat([prefix_visible[:, None].expand(-1, nodes, -1), tree.ancestors()], dim=2)
    if sliding_window is not None:
        # Positions relative to the root: the prefix ends at -1, node n stands at its depth.
        before = torch.arange(-prefix, 0, device=tree.depths.device).expand(batch, -1)
        key_positions = torch.cat([before, tree.depths], dim=1)
        visible = visible & (tree.depths[:, :, None] - key_positions[:, None] < sliding_window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
