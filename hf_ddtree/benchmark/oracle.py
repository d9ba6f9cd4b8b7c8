"""A drafter that knows the text, and is right for as long as it was told to be; it costs what a real one costs."""

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..drafting import DDTreeCandidateGenerator, Draft, Drafter, Request
from ..models import DFlashDraftModel
from .building import SPREAD
from .shapes import spread


class Oracle(Drafter):
    """Runs a DFlash drafter and puts the text into its logits, as far as a drawn length.

    The true tokens of the first depths become the likeliest by far, the one after them impossible, and the rest stays
    what the drafter said. The length is drawn for each place of the text, so it is the same for every mode, budget and
    repeat; tokens a round are `acceptance` in the mean, unless the budget is smaller than the depth.

    Args:
        drafter: whose forward is run.
        text: [length] the target's own greedy text, prompt included.
        acceptance: tokens per round, the target's own included; from 1 to the drafter's block size.

    Raises:
        ValueError: no such acceptance can be reached.
    """

    gives_logits = True

    def __init__(self, drafter: DFlashDraftModel, text: torch.Tensor, acceptance: float):
        self.drafter, self.text = drafter, text
        self.target_layer_ids = drafter.config.target_layer_ids or ()
        self.depth = drafter.config.block_size - 1
        if not 1 <= acceptance <= self.depth + 1:
            raise ValueError(
                f"`--acceptance {acceptance}` can't be had of blocks of {self.depth + 1}; set 1 to {self.depth + 1}."
            )
        chance = torch.full((len(text), self.depth), (acceptance - 1) / self.depth)
        self.lengths = torch.bernoulli(chance, generator=torch.Generator().manual_seed(0)).sum(1).int().tolist()
        self.real: DDTreeCandidateGenerator
        self.written = torch.empty(0)  # [depth + 1, 1] logits of the true tokens, and of the one after them

    def start(self, target: PreTrainedModel, config: DDTreeConfig, rows: int) -> None:
        """A drafter's cache for this call."""
        if rows != 1:
            raise ValueError(f"an oracle knows one text, and the batch has {rows} rows.")
        self.real = DDTreeCandidateGenerator(self.drafter, target, config, rows)
        head = target.get_output_embeddings().weight
        # Of as many normal numbers the greatest is about there, and 6 / temperature more leaves the others 1/400.
        likely = spread(target) * (math.sqrt(2 * math.log(len(head))) + 6 / SPREAD)
        values = torch.tensor([likely] * self.depth + [-math.inf], dtype=head.dtype)
        self.written, self.text = values[:, None].to(head.device), self.text.to(head.device)

    def draft(self, request: Request) -> Draft | None:
        """The drafter's logits with the text in them."""
        draft = self.real.draft(request)
        if draft is None:
            return None
        committed = request.texts[0].shape[0]
        depth = min(draft.logits.shape[1], len(self.text) - committed)
        length = min(self.lengths[committed - 1], depth)
        touched = min(length + 1, depth)  # the one after the true ones, too, if it is drafted at all
        if touched > 0:
            true = self.text[committed : committed + touched, None]
            first = self.depth - length
            draft.logits[0, :touched].scatter_(1, true, self.written[first : first + touched])
        return draft

    def leave(self, pending: Any) -> None:
        """Each call starts anew."""


def temperature_for(target: PreTrainedModel) -> float:
    """Of drafts, with which random logits are as sure of themselves as a drafter's are."""
    return spread(target) / SPREAD
