"""4D attention masks where each row of a batch has its own number of cached keys. Leaf module: torch only.

A key or query has a *place*: its number in its row's sequence, padding counted. Cached keys stand at their slot's
number; slots at or past the row's end hold nothing.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cached:
    """What a layer has cached.

    Attributes:
        visible: [rows, slots] bool: False = padding, or nothing of this row.
        first: the place of slot 0, where a layer has dropped what no window reaches.
    """

    visible: torch.Tensor
    first: int = 0


def visible_slots(ends: torch.Tensor, width: int, prompt_mask: torch.Tensor | None) -> torch.Tensor:
    """[rows, width] bool: which slots hold a token of their row.

    Args:
        ends: [rows] int64, one past each row's last slot.
        prompt_mask: [rows, prompt], 0 = padding; None where there is none.
    """
    visible = torch.arange(width, device=ends.device) < ends[:, None]
    if prompt_mask is not None:
        length = min(prompt_mask.shape[1], width)
        visible[:, :length] &= prompt_mask[:, :length].to(ends.device).bool()
    return visible


def slot_mask(
    cached: Cached,
    appended: torch.Tensor,
    places: torch.Tensor,
    dtype: torch.dtype,
    window: int | None = None,
) -> torch.Tensor:
    """Additive mask [rows, 1, queries, slots + keys]: 0 = visible, the dtype's minimum = hidden.

    Additive and in the model's dtype, because eager attention *adds* the mask: a bool one would silently be wrong.

    Args:
        appended: [rows, queries, keys] bool, which of the forward's own keys each query sees; its queries are the last.
        places: [rows, keys] of those keys.
        window: where the layer has one, a query sees keys fewer than this many places before it.
    """
    queries = appended.shape[1]
    visible = torch.cat([cached.visible[:, None].expand(-1, queries, -1), appended], dim=2)
    if window is not None:
        slots = cached.first + torch.arange(cached.visible.shape[1], device=places.device)
        key_places = torch.cat([slots.expand(len(places), -1), places], dim=1)
        visible = visible & (places[:, -queries:, None] - key_places[:, None] < window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
