"""Times of single rounds and tokens. Forwards that are replayed run no hooks, so these are around what replays them."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..compiled import Forwards
from ..figures import STAGES, Figures
from ..target import Target
from .meters import wait_for

SETTLING = 3  # rounds or tokens at the start, in which kernels are chosen and caches grow
FORWARDS = ("target", "drafter")


@dataclass
class Round:
    """One round, from its draft to its commit.

    Attributes:
        seconds: by stage. forwards: seconds by "target" and "drafter"; empty if they were not waited for.
        replays: forwards that were a graph's.
    """

    started: float
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    forwards: dict[str, float] = field(default_factory=dict)
    replays: int = 0
    ended: float = 0.0

    @property
    def replayed(self) -> bool:
        """Whether both forwards were a graph's."""
        return self.replays == len(FORWARDS)


class Stopwatch:
    """Inside a `with` block, times the rounds of the one call that is made there.

    Args:
        device: whose queue is drained around forwards, so that their times are exact; None = never wait for it.

    Attributes:
        rounds: all that ended with a commit and were followed by another.
    """

    def __init__(self, device: torch.device | None):
        self.device = device
        self.rounds: list[Round] = []
        self.originals: tuple[Callable[..., Any], Callable[..., Any]]

    def __enter__(self) -> "Stopwatch":
        stage, run = self.originals = Figures.stage, Forwards.run

        @contextmanager
        def timed_stage(figures: Figures, name: str) -> Iterator[None]:
            if name == "draft":
                self._begin()
            started = time.perf_counter()
            with stage(figures, name):
                yield
            if self.rounds:
                self.rounds[-1].seconds[name] += time.perf_counter() - started

        def timed_run(forwards: Forwards, function: Callable[..., Any], *inputs: Any) -> Any:
            name = "target" if isinstance(getattr(function, "__self__", None), Target) else "drafter"
            return self._run(name, forwards, lambda: run(forwards, function, *inputs))

        Figures.stage, Forwards.run = timed_stage, timed_run  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        Figures.stage, Forwards.run = self.originals  # type: ignore[method-assign]
        self.rounds = self.rounds[:-1]  # the last one's end was not seen

    def steady(self) -> list[Round]:
        """Rounds as they are once all is chosen and recorded: where any were replayed, only those."""
        later = self.rounds[SETTLING:]
        return [each for each in later if each.replayed] or later

    def _begin(self) -> None:
        now = time.perf_counter()
        if self.rounds:
            self.rounds[-1].ended = now
        self.rounds.append(Round(now))

    def _run(self, name: str, forwards: Forwards, run: Callable[[], Any]) -> Any:
        if self.device is not None:
            wait_for(self.device)
        started, replays = time.perf_counter(), forwards.replays
        outputs = run()
        if self.device is not None:
            wait_for(self.device)
        if self.rounds:
            current = self.rounds[-1]
            current.replays += forwards.replays - replays
            if self.device is not None:
                current.forwards[name] = current.forwards.get(name, 0.0) + time.perf_counter() - started
        return outputs


class TokenClock(BaseStreamer):
    """When each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token, or first the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""

    def median_ms(self) -> float:
        """Between two tokens, without the prefill and the first ones."""
        times = self.times[1 + SETTLING :]
        return median_ms([after - before for before, after in pairwise(times)])


def median_ms(seconds: list[float]) -> float:
    """In milliseconds; 0 of none."""
    return 1000 * statistics.median(seconds) if seconds else 0.0
