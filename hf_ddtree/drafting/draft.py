"""What one drafter forward says about the coming tokens, and the distributions that a tree is built from."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..configuration import DDTreeConfig
from ..models.dflash import DFlashDraftModel
from ..tree import Marginals, condition, top_marginals

# Given the parents [rows, depth, k] and their possible children [rows, depth, k], what being after a parent adds to the
# draft logit of a child, [rows, depth, k, k]. At the first depth all parents are the root.
Correction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Fewer candidates than this leave a correction too little to choose from where the budget is small. Where it is larger,
# half of it: at budget 64 the whole of it accepts 1% more and takes 1 ms more of a round of 67 (2-core EPYC, SmolLM2).
CORRECTED_CANDIDATES = 32


@dataclass(frozen=True)
class Draft:
    """Drafts for the tokens after each row's root.

    Attributes:
        roots: [rows, 1] the last committed tokens.
        logits: [rows, depth, vocab], each depth by itself.
        corrections: what is known of a token after its parent; none where depths are taken for independent.
        temperatures: [depths, 1] calibrated temperature of each depth's logits, of `depth` depths at least; None = 1.
    """

    roots: torch.Tensor
    logits: torch.Tensor
    corrections: tuple[Correction, ...] = ()
    temperatures: torch.Tensor | None = None

    def cut(self, depth: int) -> "Draft":
        """The same without what is deeper than `depth`."""
        if depth >= self.logits.shape[1]:
            return self
        return replace(self, logits=self.logits[:, :depth])

    def of_vocabulary(self, size: int) -> "Draft":
        """The same without the ids from `size` on, which the target has no embedding for."""
        if size >= self.logits.shape[2]:
            return self
        return replace(self, logits=self.logits[..., :size])

    def row(self, index: int) -> "Draft":
        """One row's logits; what is known of a token after its parent is left out."""
        rows = slice(index, index + 1)
        return Draft(self.roots[rows], self.logits[rows], temperatures=self.temperatures)

    def marginals(
        self, config: DDTreeConfig, noise: torch.Tensor | None = None, budget: int | None = None
    ) -> Marginals:
        """The candidates of each depth and their log-probabilities under (logits + noise + correction) / temperature.

        Without noise the temperature is by default the calibrated one of each depth, which was fitted so.

        Args:
            budget: nodes of the tree that is to be made of them; None = the config's.
            noise: [rows, depth, vocab] the target's sampling noise, scaled as logits; None = none.
        """
        logits = self.logits if noise is None else self.logits.float() + noise
        uniform = min(max(config.tree_temperature, 1e-30), 1e30)  # what float32 can divide by
        temperature = torch.full((logits.shape[1], 1), uniform, device=logits.device)  # float32, and so all below
        if config.draft_temperature is None and noise is None and self.temperatures is not None:
            temperature = self.temperatures[: logits.shape[1]].to(logits.device)
        candidates = config.candidates(config.most_nodes if budget is None else budget)
        if self.corrections and config.tree_top_k is None:
            candidates = max(candidates // 2, CORRECTED_CANDIDATES)
        marginals = top_marginals(logits, candidates, temperature)
        if not self.corrections or marginals.tokens.shape[1] == 0:
            return marginals
        children = marginals.tokens
        first = self.roots[:, None].expand(-1, 1, children.shape[2])
        parents = torch.cat([first, children[:, :-1]], dim=1)
        total = sum(correction(parents, children) for correction in self.corrections)
        return condition(marginals, total / temperature[..., None])


def calibrated_temperatures(drafter: DFlashDraftModel, device: torch.device) -> torch.Tensor | None:
    """[block_size - 1, 1] the drafter's calibration, as `Draft.temperatures`; None = it has none."""
    fitted = drafter.config.depth_temperatures
    return None if fitted is None else torch.tensor(fitted, device=device)[:, None]
