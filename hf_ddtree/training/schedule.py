"""How far a training run is, by steps or by wall time, and the learning rate that goes with it."""

import math
from dataclasses import dataclass

WARM_STEPS = 50
FLOOR = 0.01  # of the peak, at the end


@dataclass
class Schedule:
    """Cosine from `peak` to a hundredth of it, after 50 steps of warming up.

    Attributes:
        peak: learning rate.
        steps: the run's length in optimiser steps; None = by wall time.
        minutes: the run's length in minutes of training steps, evaluation and saving left out.
        step, elapsed: where the run is; seconds.
    """

    peak: float
    steps: int | None
    minutes: float | None
    step: int = 0
    elapsed: float = 0.0

    @property
    def progress(self) -> float:
        """0 to 1."""
        if self.steps is not None:
            return min(1.0, self.step / self.steps)
        return min(1.0, self.elapsed / (60 * (self.minutes or 0.0))) if self.minutes else 1.0

    @property
    def learning_rate(self) -> float:
        """Of the step to come."""
        warm = min(1.0, (self.step + 1) / WARM_STEPS)
        return self.peak * warm * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * self.progress)))
