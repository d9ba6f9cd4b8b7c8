"""What the text so far says of a token after its parent: how often one followed the other."""

import torch

from .draft import Correction

TEXT_WINDOW = 4096  # tokens; bounds what finding the candidates among them costs each round


def running_text_correction(texts: list[torch.Tensor], weight: float) -> Correction:
    """What the last `TEXT_WINDOW` tokens of each row say: `weight` * (log(1 + pairs) + 2 log(1 + triples)).

    Pairs count how often the child followed the parent, triples how often it followed the parent and the token before
    that, which is committed text for the first two depths; deeper it depends on the path and is left out.

    The text's tokens are looked for among the candidates, not the k x k pairs of candidates in the text: there are
    fewer of them, and nothing has to be sorted or kept between rounds.

    Args:
        texts: per row [length] prompt and output so far, the root last.
    """
    texts = [ids[-TEXT_WINDOW:] for ids in texts]

    def correct(parents: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
        longest = max(map(len, texts))
        ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=-1) for row in texts])
        slots = _pair_slots(ids, parents, children)  # [rows, depth, longest - 1]
        score = _count(slots, children.shape[2]).log1p_()
        if longest > 1:
            before = ids[:, -2:, None][:, : slots.shape[1]]  # the tokens before the first two depths' parents
            follows = ids[:, None, :-2] == before  # [rows, 2, longest - 2]
            triples = torch.where(follows, slots[:, :2, 1:], -1)
            score[:, :2] += 2 * _count(triples, children.shape[2]).log1p_()
        score[:, 0] = score[:, 0, :1]  # all parents are the root there, and the first of them was found
        return score.mul_(weight)

    return correct


def _pair_slots(ids: torch.Tensor, parents: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
    """[rows, depth, n - 1]: which entry of [k, k] each pair of neighbours in `ids` [rows, n] is; -1 = none."""
    depth, k = children.shape[1:]
    ranks = _rank(ids, torch.cat([parents, children], dim=1))
    parent, child = ranks[:, :depth, :-1], ranks[:, depth:, 1:]
    return torch.where((parent >= 0) & (child >= 0), parent * k + child, -1)


def _rank(ids: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """[rows, depth, n]: where each of `ids` [rows, n] is first among `candidates` [rows, depth, k]; -1 = nowhere."""
    ordered, ranks = candidates.sort(dim=-1, stable=True)
    wanted = ids[:, None].repeat(1, candidates.shape[1], 1)
    place = torch.searchsorted(ordered, wanted).clamp_(max=candidates.shape[2] - 1)
    return torch.where(ordered.gather(2, place) == wanted, ranks.gather(2, place), -1)


def _count(slots: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, depth, k, k] float32: how often each entry is in `slots` [rows, depth, n]; -1 counts nowhere."""
    counts = torch.zeros(*slots.shape[:2], k * k + 1, device=slots.device)
    counts.scatter_add_(2, slots.where(slots >= 0, k * k), torch.ones((), device=slots.device).expand_as(slots))
    return counts[..., :-1].unflatten(2, (k, k))
