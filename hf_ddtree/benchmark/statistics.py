"""Means over calls that differ in length, with their standard errors; calls are the independent units."""

import statistics
from collections.abc import Sequence


def ratio_of_sums(totals: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """sum(totals) / sum(counts) and its standard error, by linearisation (NaN for a single call)."""
    mean = sum(totals) / sum(counts)
    return mean, _standard_error(_shares(totals, counts), mean)


def quotient(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, float]:
    """The quotient of two such means, each given as (totals, counts) over the same calls, and its standard error."""
    value = ratio_of_sums(*ours)[0] / ratio_of_sums(*theirs)[0]
    return value, _standard_error([a - b for a, b in zip(_shares(*ours), _shares(*theirs), strict=True)], value)


def _shares(totals: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Each call's share in the relative error of sum(totals) / sum(counts)."""
    mean = sum(totals) / sum(counts)
    return [(total - mean * count) / sum(totals) for total, count in zip(totals, counts, strict=True)]


def _standard_error(shares: list[float], value: float) -> float:
    return value * statistics.stdev(shares) * len(shares) ** 0.5 if len(shares) > 1 else float("nan")
