"""What sampling is compared with: plain decoding with the keyed noise, and exact laws of tiny targets."""

import itertools
from collections.abc import Callable, Sequence

import torch
from stubs import make_drafter, make_stub
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_ddtree import DDTreeConfig, DFlashDraftModel, plain_sampling_processors

BEFORE_NOISE = (
    *("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    "watermarking_config",
)


def sampled(
    target: PreTrainedModel,
    ids: torch.Tensor | None,
    new_tokens: int,
    seed: int | list[int] = 0,
    around: tuple[Sequence[LogitsProcessor], Sequence[LogitsProcessor]] = ((), ()),
    **fields: object,
):
    """Stock greedy decoding with the warpers among `fields` and the keyed noise as logits processors.

    Args:
        around: processors to put before the warpers, where `generate` puts the user's, and those to put between the
            warpers and the noise.
        fields: warpers and a watermark go into the processors, everything else to `generate`.
    """
    warping = {name: fields.pop(name) for name in BEFORE_NOISE if name in fields}
    config = DDTreeConfig(do_sample=True, seed=seed, **warping)
    mask = None if ids is None else fields.get("attention_mask")  # a prompt of embeddings has no positions to count
    *warpers, noise = plain_sampling_processors(target, config, mask)
    before, after = around
    processors = LogitsProcessorList([*before, *warpers, *after, noise])
    return target.generate(ids, do_sample=False, max_new_tokens=new_tokens, logits_processor=processors, **fields)


def drafter_of(target: PreTrainedModel, kind: str, reference: torch.Tensor) -> DFlashDraftModel:
    """The stub drafter `kind`, or a random real one for "real"."""
    return make_drafter(target) if kind == "real" else make_stub(target, kind, reference)


class Recorder(LogitsProcessor):
    """Keeps the ids and scores of every call."""

    def __init__(self):
        self.ids, self.scores = [], []

    def __call__(self, input_ids, scores):
        assert scores.shape[0] == 1 and scores.dtype == torch.float32
        self.ids.append(input_ids.tolist())
        self.scores.append(scores.clone())
        return scores


def exact_law(following: Callable[[torch.Tensor], torch.Tensor], vocab: int, steps: int) -> torch.Tensor:
    """[vocab] * steps float64 probabilities of the next `steps` tokens.

    Args:
        following: given [rows, length] tokens, for all texts of one length, the next token's probabilities.
    """
    law = torch.ones(1, dtype=torch.float64)
    for length in range(steps):
        texts = torch.tensor(list(itertools.product(range(vocab), repeat=length)), dtype=torch.int64)  # [1, 0] at first
        law = (law[:, None] * following(texts).double()).flatten()
    return law.view([vocab] * steps)


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Pearson's chi-square; cells that expect fewer than five are pooled, and impossible ones must be empty."""
    assert not bool(counts[law == 0].any())
    expected = law * counts.sum()
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    return float(torch.special.gammaincc((kept.sum().double() - 1) / 2, statistic / 2))
