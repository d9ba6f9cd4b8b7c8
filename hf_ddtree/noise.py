"""Keyed noise: uniform and Gumbel numbers as a pure function of seed, sequence, position and token. Leaf: torch only.

A counter-based integer hash, the finaliser of splitmix64 (https://doi.org/10.1145/2714064.2660195), gives each token of
each position an odd multiple of 2^-53 as its uniform number; the Gumbel transform uses additions, multiplications and
divisions only, which IEEE 754 rounds alike everywhere. So the numbers have the same bits on every device and in any
shape that they are asked for in.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, splitmix64's increment
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # the float64 nearest to the square root of a half
LOG_TERMS = 7  # of the series of log; relative error 3e-14, measured


def stream_key(*path: int) -> int:
    """A 64-bit key from a path of integers, taken modulo 2^64: `(seed, sequence)` for the choices of a sequence."""
    key = len(path)
    for part in path:
        key = _mix_int((key + (part + 1) * STEP) % 2**64)
    return key


def uniform_noise(key: int, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[*positions, *tokens] float64 uniform numbers, odd multiples of 2^-53: neither 0 nor 1.

    Args:
        key: as `stream_key` gives it.
        positions: int64, absolute.
        tokens: int64 token ids; any part of the vocabulary.
    """
    rows = _mix((positions + 1) * _signed(STEP) + _signed(key))
    bits = _mix((tokens + 1) * _signed(STEP) + rows.reshape((*positions.shape, *[1] * tokens.dim())))
    return bits.bitwise_right_shift_(11).bitwise_or_(1).bitwise_and_(2**53 - 1).double().mul_(2.0**-53)


def gumbel_noise(key: int, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[*positions, *tokens] float64 standard Gumbel numbers, -log(-log u), from -3.7 to 36.8; see `uniform_noise`."""
    return _log(_log(uniform_noise(key, positions, tokens)).neg_()).neg_()


class NoiseRows:
    """The Gumbel rows of one sequence's positions, each computed once and kept until its position is emitted.

    Args:
        seed, sequence: what names the sequence's stream.
    """

    def __init__(self, seed: int, sequence: int = 0):
        self.key = stream_key(seed, sequence)
        self.rows: dict[tuple[int, int], torch.Tensor] = {}  # (position, vocab) -> row

    def __call__(self, start: int, count: int, like: torch.Tensor) -> list[torch.Tensor]:
        """`count` rows, [vocab] float64 each, from position `start` on, for scores `like` [..., vocab].

        Earlier rows are forgotten. Row by row, because a row of 49k tokens fits into a core's cache (0.7 ms) where
        seven at once do not (1.0 ms each, one core of an AMD EPYC).
        """
        vocab = like.shape[-1]
        self.rows = {key: row for key, row in self.rows.items() if key[0] >= start}
        for position in range(start, start + count):
            if (position, vocab) not in self.rows:
                tokens = torch.arange(vocab, device=like.device)
                self.rows[position, vocab] = gumbel_noise(self.key, torch.full_like(tokens[0], position), tokens)
        return [self.rows[position, vocab] for position in range(start, start + count)]


def row_streams(seed: int | Sequence[int], rows: int) -> list[tuple[int, int]]:
    """(seed, sequence) of each row of a batch.

    Under one seed the row's index tells rows apart; with a list, one seed per row, a row is what it would be alone.
    """
    if isinstance(seed, int):
        return [(seed, row) for row in range(rows)]
    if len(seed) != rows:
        raise ValueError(f"`seed` has {len(seed)} entries for {rows} sequences; give one seed, or one per sequence.")
    return [(each, 0) for each in seed]


def check_seed(seed: Any) -> None:
    """Raises ValueError unless it is an integer or a list of at least one."""
    entries = seed if isinstance(seed, list | tuple) else [seed]
    if not entries or not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
        raise ValueError(f"`seed` is {seed!r}; it must be an integer, or a list of integers, one per sequence.")


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value


def _mix_int(bits: int) -> int:
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        bits = (bits ^ bits >> shift) * multiplier % 2**64
    return bits ^ bits >> 31


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """`_mix_int` on int64, in place; a shift to the right brings the sign in, so it is masked out."""
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        _xor_shift(bits, shift).mul_(_signed(multiplier))
    return _xor_shift(bits, 31)


def _xor_shift(bits: torch.Tensor, shift: int) -> torch.Tensor:
    return bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (64 - shift) - 1))


def _log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal float64, by 2 atanh((m - 1) / (m + 1)) with m in [sqrt 0.5, sqrt 2)."""
    bits = x.view(torch.int64)
    exponent = (bits - SQRT_HALF_BITS) >> 52
    mantissa = (bits - (exponent << 52)).view(torch.float64)
    ratio = (mantissa - 1).div_(mantissa + 1)
    square = ratio * ratio
    series = torch.full_like(square, 2 / (2 * LOG_TERMS + 1))
    for term in range(LOG_TERMS - 1, -1, -1):
        series.mul_(square).add_(2 / (2 * term + 1))
    return series.mul_(ratio).add_(exponent.double().mul_(math.log(2)))
