"""`tree_budget="auto"`: each round verifies as many nodes as pay, by what forwards cost here and what they bring.

A round of n nodes brings E(n) tokens and takes time D + V(n), where D does not depend on n. The sequence of choices
with most tokens per second maximises E(n) - r V(n) in each round, where r is the tokens per second that it reaches
itself (Dinkelbach's method for ratios, https://doi.org/10.1287/mnsc.13.7.492). E(n) is a prefix sum over the best-first
order, corrected by what was really accepted at each depth; V was measured (verify_times.py); r is what rounds reach.
"""

from collections import defaultdict
from copy import deepcopy
from weakref import WeakKeyDictionary

import torch

from .acceptance import Accepted
from .configuration import MOST_NODES
from .tree import Tree
from .verify_times import VerifyTimes

FEWEST_BUILT = 16  # nodes that are looked at, at least
MEMORY = 0.95  # what a round's figures count for a round later
DOUBT = 8.0  # expected hits of a depth before its own record outweighs the drafter's word
RESTS = (4, 64)  # rounds decoded plainly where drafts don't pay, the first time and at most
TRIAL = 8  # rounds with drafts between two rests
PAYS = 0.97  # of plain decoding's speed; what is slower rests, and what is nearer may be noise


# By target, then rows and kind of drafter: what the last call had learnt when it ended.
LEARNT: "WeakKeyDictionary[torch.nn.Module, dict[tuple[int, str], AutoBudget]]" = WeakKeyDictionary()


class AutoBudget:
    """Chooses the nodes of a call's rounds.

    Args:
        times: what a target forward takes, by its tokens.
        rows: of the batch.

    Attributes:
        most: nodes that are worth building in the coming round.
        rests: whether the coming round is better decoded plainly.
    """

    def __init__(self, times: VerifyTimes, rows: int):
        self.times = times
        self.most = 32
        self.peak = 32.0  # of the nodes chosen lately
        self.tokens, self.seconds = float(rows), times(rows)  # of rounds with drafts, older ones weigh less
        self.verified, self.predicted = times(rows), times(rows)  # seconds of forwards, as they took and as expected
        self.hits: defaultdict[int, float] = defaultdict(float)  # by depth, nodes accepted
        self.expected: defaultdict[int, float] = defaultdict(float)  # and what the drafter gave for them
        self.resting, self.next_rest, self.tried = 0, RESTS[0], 0
        self.chosen = torch.zeros(0), torch.zeros(0, dtype=torch.int64)  # chances and depths of the round's nodes

    @classmethod
    def recall(cls, target: torch.nn.Module, drafter: str, times: VerifyTimes, rows: int) -> "AutoBudget":
        """One that goes on from what the last call with this target and kind of drafter had learnt."""
        kept = LEARNT.get(target, {}).get((rows, drafter))
        if kept is None:
            return cls(times, rows)
        again = deepcopy(kept)
        again.times, again.resting, again.tried = times, 0, 0
        return again

    def keep(self, target: torch.nn.Module, drafter: str, rows: int) -> None:
        """For `recall`."""
        LEARNT.setdefault(target, {})[rows, drafter] = self

    @property
    def rests(self) -> bool:
        return self.resting > 0

    def choose(self, tree: Tree) -> int:
        """How many of the tree's nodes to verify, the root included."""
        rows, nodes = tree.tokens.shape
        scores, depths = torch.stack([tree.scores, tree.depths.double()]).cpu()  # one copy to the host
        weight = torch.tensor([self._trust(depth) for depth in range(tree.max_depth + 1)], dtype=torch.float64)
        chances = (scores.exp() * weight[depths.long()]).clamp(max=1.0)
        gains = chances[:, 1:].sum(0).cumsum(0).tolist()
        rate, slowness = self.tokens / self.seconds, self.verified / self.predicted
        values = [-rate * slowness * self.times(rows)]
        for count, gain in enumerate(gains, start=2):
            values.append(gain - rate * slowness * self.times(rows * count))
        best = max(range(nodes), key=values.__getitem__)
        self.peak = max(best, 0.9 * self.peak)
        self.most = min(MOST_NODES, max(FEWEST_BUILT, int(1.5 * self.peak)))
        self.chosen = scores[:, 1 : best + 1].exp().flatten(), depths[:, 1 : best + 1].long().flatten()
        return best + 1

    def learn(self, tree: Tree, accepted: list[Accepted], seconds: float, verify_seconds: float) -> None:
        """What came of a round that was drafted for.

        Args:
            seconds: of the whole round. verify_seconds: of its target forward; 0 where that is not known.
        """
        self.tokens = MEMORY * self.tokens + sum(len(each.tokens) for each in accepted)
        self.seconds = MEMORY * self.seconds + seconds
        if verify_seconds:
            self.verified = MEMORY * self.verified + verify_seconds
            self.predicted = MEMORY * self.predicted + self.times(tree.tokens.numel())
        self._count_hits(accepted)
        self.tried += 1
        plain = len(accepted), self.times(len(accepted)) * self.verified / self.predicted
        if self.tried >= TRIAL and self.tokens / self.seconds < PAYS * plain[0] / plain[1]:
            self.resting, self.next_rest = self.next_rest, min(2 * self.next_rest, RESTS[1])
            self.tokens, self.seconds = plain  # what comes after the rest is judged afresh
            self.tried = 0
        elif self.tried >= 2 * TRIAL:
            self.next_rest = RESTS[0]

    def rested(self) -> None:
        """A round was decoded plainly."""
        self.resting = max(0, self.resting - 1)

    def _trust(self, depth: int) -> float:
        """How much more often than the drafter says its nodes of a depth are accepted."""
        return (self.hits[depth] + DOUBT) / (self.expected[depth] + DOUBT)

    def _count_hits(self, accepted: list[Accepted]) -> None:
        for counts in (self.hits, self.expected):
            for depth in counts:
                counts[depth] *= MEMORY
        for each in accepted:
            for depth in range(1, len(each.path)):
                self.hits[depth] += 1
        for chance, depth in zip(*(each.tolist() for each in self.chosen), strict=True):
            self.expected[depth] += chance
