"""What the decoding loop asks of a drafter. Subclass `Drafter` to bring your own: docs/drafters.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..context import Context
from ..tree import Tree
from .draft import Draft

# Given a depth and draft logits [rows, depth, vocab], what to add to them so that the draft prefers what the target's
# sampling noise will prefer; None where there is nothing to add.
Noise = Callable[[int, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Request:
    """A round's question: what may come after these texts?

    Attributes:
        texts: per row its committed ids [length] int64, padding left out; the last is the root.
        context: the target's hidden states of the tokens committed since the last `draft`, roots left out; empty for
            drafters without `target_layer_ids`.
        max_depth: drafts deeper than this are of no use; at least 1.
        budget: nodes a row that are of use; more are cut off.
        noise: see `Noise`. Ignoring it costs acceptance when sampling, nothing else.
    """

    texts: list[torch.Tensor]
    context: Context
    max_depth: int
    noise: Noise
    budget: int = 32

    @property
    def roots(self) -> torch.Tensor:
        """[rows, 1] the texts' last tokens."""
        return torch.stack([text[-1:] for text in self.texts])


def device_of(model: PreTrainedModel, otherwise: torch.device) -> torch.device:
    """Where a model's inputs go; `otherwise` where accelerate moves its weights in and out, and inputs with them."""
    return otherwise if model.device.type == "meta" else model.device


class Drafter:
    """Base class of drafters; an instance of it goes to `generate` as `assistant_model`.

    A drafter can be wrong, slow or broken: the text does not change, only the time it takes. One object serves one call
    of `generate` at a time.

    Attributes:
        target_layer_ids: target layers whose outputs `Request.context` should have; none for most drafters.
        gives_logits: whether `draft` returns a `Draft`, which the classical acceptance rules need.
    """

    target_layer_ids: Sequence[int] = ()
    gives_logits = False

    def start(self, target: PreTrainedModel, config: DDTreeConfig, rows: int) -> None:
        """Called before the first forward of each `generate`; forget the last call's texts here.

        Raises:
            ValueError: drafter, target and config do not fit.
        """

    def draft(self, request: Request) -> Draft | Tree | None:
        """Drafts for all rows.

        Returns:
            Logits per depth as a `Draft`, of which best-first search makes trees; or trees of the drafter's own, whose
            roots are `request.roots` (`tree_of_paths` makes them from lists of tokens); or None for nothing.
        """
        raise NotImplementedError

    def keep(self, rows: list[int]) -> None:
        """Called when texts have ended: from now on the rows are these of the former ones, in this order."""

    def leave(self, pending: Context | None) -> Any:
        """Called at the end with what was not drafted from; returns what `resume` needs if a call goes on from here."""
        return None

    def resume(self, left: Any, lengths: list[int]) -> Context | None:
        """Called before the first forward of a call that goes on from a cache.

        Args:
            left: by the drafter of the call that filled the cache.
            lengths: per row, tokens in the cache, padding not counted.

        Returns:
            The context that is still to be told.
        """
        return None
