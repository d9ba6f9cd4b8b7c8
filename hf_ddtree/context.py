"""What a drafter that reads the target's hidden states is told. Leaf module: torch only."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Context:
    """The tokens committed since the drafter was last asked, all but the last of each row.

    Attributes:
        hidden_states: [rows, tokens, taps * hidden] the tapped layers' outputs, concatenated.
        positions: [rows, tokens] their positions, padding not counted.
        lengths: per row, how many of them are its own; what is beyond means nothing.
    """

    hidden_states: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]

    def keep(self, rows: list[int]) -> "Context":
        """Those rows alone."""
        return Context(self.hidden_states[rows], self.positions[rows], [self.lengths[row] for row in rows])

    def padded(self, tokens: int) -> "Context":
        """The same with further columns that are nobody's, `tokens` in all."""
        more = tokens - self.positions.shape[1]
        if more <= 0:
            return self
        hidden_states = torch.nn.functional.pad(self.hidden_states, (0, 0, 0, more))
        return Context(hidden_states, torch.nn.functional.pad(self.positions, (0, more)), self.lengths)

    def cut(self, lengths: list[int]) -> "Context":
        """At most so many tokens of each row."""
        return Context(self.hidden_states, self.positions, list(map(min, self.lengths, lengths)))

    def followed_by(self, later: "Context") -> "Context":
        """Both, one after the other in each row."""
        lengths = [ours + theirs for ours, theirs in zip(self.lengths, later.lengths, strict=True)]
        return Context(
            self._joined(self.hidden_states, later.hidden_states, later.lengths),
            self._joined(self.positions, later.positions, later.lengths),
            lengths,
        )

    def _joined(self, ours: torch.Tensor, theirs: torch.Tensor, their_lengths: list[int]) -> torch.Tensor:
        longest = max(a + b for a, b in zip(self.lengths, their_lengths, strict=True))
        joined = ours.new_zeros(len(ours), longest, *ours.shape[2:])
        for row, (first, second) in enumerate(zip(self.lengths, their_lengths, strict=True)):
            joined[row, :first] = ours[row, :first]
            joined[row, first : first + second] = theirs[row, :second]
        return joined
