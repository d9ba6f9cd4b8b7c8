"""Means over texts that differ in length, with their standard errors; texts are the independent units.

The standard error of a single text is unknown: None.
"""

import statistics
from collections.abc import Sequence


def ratio_of_sums(totals: Sequence[float], counts: Sequence[float]) -> tuple[float, float | None]:
    """sum(totals) / sum(counts) and its standard error, by linearisation."""
    if sum(counts) == 0:
        raise ValueError("No text was longer than one token, so nothing can be measured; raise `--max-new-tokens`.")
    mean = sum(totals) / sum(counts)
    return mean, _standard_error(_shares(totals, counts), mean)


def quotient(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, float | None]:
    """The quotient of two such means, each given as (totals, counts) over the same texts, and its standard error."""
    value = ratio_of_sums(*ours)[0] / ratio_of_sums(*theirs)[0]
    return value, _standard_error([a - b for a, b in zip(_shares(*ours), _shares(*theirs), strict=True)], value)


def _shares(totals: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Each text's share in the relative error of sum(totals) / sum(counts)."""
    mean = sum(totals) / sum(counts)
    return [(total - mean * count) / sum(totals) for total, count in zip(totals, counts, strict=True)]


def _standard_error(shares: list[float], value: float) -> float | None:
    return value * statistics.stdev(shares) * len(shares) ** 0.5 if len(shares) > 1 else None


def with_error(value: float, error: float | None) -> str:
    """For tables: `1.23 ±0.04`."""
    return f"{value:.2f} ±" + ("?   " if error is None else f"{error:.2f}")


def rounded(value: float | None) -> float | None:
    """To three places, for JSON."""
    return None if value is None else round(value, 3)
