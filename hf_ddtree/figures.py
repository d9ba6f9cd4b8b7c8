"""Counts and stage times of a call."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils import logging

from .acceptance import Accepted
from .emission import Emissions
from .tree import Tree

logger = logging.get_logger(__name__)
STAGES = ("draft", "build", "verify", "accept", "commit")


class Figures:
    """What `DDTreeOutput` says about a call.

    Args:
        emissions: whose rows are counted.
        device: whose queue to drain at the end of each stage; None = never wait for it.
    """

    def __init__(self, emissions: Emissions, device: torch.device | None):
        self.emissions, self.device = emissions, device
        self.seconds = dict.fromkeys(("prefill", *STAGES), 0.0)
        self.of_row: dict[tuple, list[int]] = {row: [] for row in emissions.live}
        self.rows = len(emissions.live)
        self.rounds = self.verified_nodes = 0
        self.budgets: list[int] = []
        self.chains: torch.Tensor | int = 0  # rounds whose trees were chains; stays on the device until the end
        self.fallbacks: Counter[str] = Counter()
        self.broken: torch.Tensor | int = 0  # rounds with NaN in the draft; stays on the device until the end

    @property
    def acceptance_lengths(self) -> list[list[int]]:
        """Per row, the tokens committed by each round."""
        return list(self.of_row.values())

    @property
    def fallback_rounds(self) -> dict[str, int]:
        """Rounds by what was wrong with them; warns of NaN, which is counted on the device until now."""
        if (rounds := int(self.broken)) and "nan" not in self.fallbacks:
            self.fall_back(
                "nan", f"{rounds} drafts had NaN in them, whose trees are of no use. The text is unaffected."
            )
            self.fallbacks["nan"] = rounds
        return dict(self.fallbacks)

    @property
    def shapes(self) -> dict[str, int]:
        """Rounds by the shape of their trees, the prefill left out."""
        drafted, chains = sum(nodes > 0 for nodes in self.budgets), int(self.chains)
        return {"plain": max(self.rounds - 1 - drafted, 0), "chain": chains, "tree": drafted - chains}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of the block to stage `name`."""
        started = time.perf_counter()
        yield
        if self.device is not None and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.seconds[name] += time.perf_counter() - started

    def count(self, tree: Tree, accepted: list[Accepted]) -> None:
        """Counts one committed round, before ended rows are dropped."""
        self.rounds += 1
        self.verified_nodes += tree.tokens.numel() - len(accepted)
        self.budgets.append(tree.num_nodes - 1)
        if tree.num_nodes > 1:
            order = torch.arange(tree.num_nodes - 1, device=tree.parents.device)
            self.chains = self.chains + (tree.parents[:, 1:] == order).all()
        for row, each in zip(self.emissions.live, accepted, strict=True):
            self.of_row[row].append(len(each.tokens))

    def fall_back(self, cause: str, message: str) -> None:
        """Counts a round that is decoded otherwise than asked; warns the first time."""
        if not self.fallbacks[cause]:
            logger.warning(message)
        self.fallbacks[cause] += 1
