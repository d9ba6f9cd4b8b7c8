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


def visible_slots(ends: torch.Tensor, width: int, prompt_mask: torch.Tensor | None, first: int = 0) -> torch.Tensor:
    """[rows, width - first] bool: which of the slots from `first` on hold a token of their row.

    Args:
        ends: [rows] int64, one past each row's last slot.
        prompt_mask: [rows, prompt], 0 = padding; None where there is none.
    """
    visible = torch.arange(first, width, device=ends.device) < ends[:, None]
    if prompt_mask is not None and first < prompt_mask.shape[1]:
        prompt = prompt_mask[:, first:width].to(ends.device).bool()
        visible[:, : prompt.shape[1]] &= prompt
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


class MaskBuffer:
    """The mask of one kind of layer, kept from round to round: only what a round changes is written.

    Args:
        dtype, window: as in `slot_mask`.

    Attributes:
        mask: [rows, 1, queries, columns], of which a forward sees a part.
        settled: columns from the first on that are final, since all rows have committed them.
    """

    def __init__(self, dtype: torch.dtype, window: int | None):
        self.dtype, self.window = dtype, window
        self.mask = torch.empty(0, 1, 0, 0, dtype=dtype)
        self.settled = 0

    def write(
        self,
        ends: torch.Tensor,
        prompt_mask: torch.Tensor | None,
        appended: torch.Tensor,
        places: torch.Tensor,
        shown: tuple[int, int, int],
    ) -> torch.Tensor:
        """[rows, 1, queries, columns] additive, a view of `mask`.

        Args:
            ends: [rows] int64 on the CPU. prompt_mask: as in `visible_slots`.
            appended, places: as in `slot_mask`.
            shown: the layer's columns: the place of the first, how many there are, and where the appended ones begin.
        """
        rows, queries, keys = appended.shape
        origin, columns, start = shown
        self._make_room(rows, queries, columns, appended.device)
        fresh = 0 if self.window is not None else min(self.settled, start)
        visible = visible_slots(ends.to(appended.device), origin + start, prompt_mask, origin + fresh)
        part = slot_mask(Cached(visible, origin + fresh), appended, places, self.dtype, self.window)
        self.mask[:, :, :queries, fresh : start + keys] = part
        self.mask[:, :, :queries, start + keys : columns] = torch.finfo(self.dtype).min
        settled = min(int(ends.min()) - origin, start)
        if settled > fresh:  # queries that this forward does not have, for one that has them
            self.mask[:, :, queries:, fresh:settled] = part[:, :, :1, : settled - fresh]
        self.settled = settled
        return self.mask[:, :, :queries, :columns]

    def forget(self) -> None:
        """Writes everything anew the next time: rows have changed."""
        self.mask, self.settled = self.mask[:0], 0

    def _make_room(self, rows: int, queries: int, columns: int, device: torch.device) -> None:
        """A larger mask where this one is too small; columns grow to half as many again, so that few are made."""
        mask = self.mask
        if rows == mask.shape[0] and queries <= mask.shape[2] and columns <= mask.shape[3] and device == mask.device:
            return
        if columns > mask.shape[3] or rows != mask.shape[0]:
            columns = -(-(columns + columns // 2) // 16) * 16
        shape = rows, 1, max(queries, mask.shape[2]), max(columns, mask.shape[3])
        self.mask, self.settled = torch.zeros(shape, dtype=self.dtype, device=device), 0
