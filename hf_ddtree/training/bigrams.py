"""`hf-ddtree table`: a bigram table from text, which makes any drafter's trees path-conditional."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..drafting.corrections import BigramTable

PRIOR = 8.0  # what the vocabulary's distribution weighs against the parent's counts, in tokens


def count_bigrams(texts: Iterable[torch.Tensor], vocab_size: int, prior: float = PRIOR) -> BigramTable:
    """Counts neighbouring tokens of `texts` [length] int64 each.

    Raises:
        ValueError: no text has two tokens.
    """
    pairs = [text[:-1] * vocab_size + text[1:] for text in texts if len(text) > 1]
    if not pairs:
        raise ValueError("`--data` holds no text of two tokens or more; give more text.")
    keys, counts = torch.cat(pairs).unique(return_counts=True)
    parent, child = keys // vocab_size, keys % vocab_size
    after = torch.zeros(vocab_size, dtype=torch.float64).scatter_add_(0, parent, counts.double())
    before = torch.zeros(vocab_size, dtype=torch.float64).scatter_add_(0, child, counts.double())
    background = before[child] / counts.sum()
    values = ((counts + prior * background) / (after[parent] + prior) / background).log()
    parents = after.nonzero()[:, 0]
    unseen = (prior / (after[parents] + prior)).log()
    return BigramTable(keys, values.float(), parents, unseen.float(), vocab_size)


def save_table(table: BigramTable, path: Path) -> None:
    """Writes a safetensors file; values in half precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "keys": table.keys,
        "values": table.values.half(),
        "parents": table.parents,
        "unseen": table.unseen.half(),
    }
    save_file(tensors, path, metadata={"vocab_size": str(table.vocab_size)})
