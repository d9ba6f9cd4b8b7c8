"""Keyed noise: against a pure-Python hash and exact logarithms, bit by bit in every shape, and by chi-square tests.

Each chi-square test has a false-alarm rate of `ALPHA`; its seeds are fixed, so one that has passed passes again.
"""

import decimal
import functools
import math

import pytest
import torch

from hf_ddtree import noise
from hf_ddtree.noise import NoiseRows, gumbel_noise, row_streams, stream_key, uniform_noise

ALPHA, GAMMA = 1e-6, 0x9E3779B97F4A7C15
SEEDS = [0, 1, -1, -5, 1234567, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 3**100, -(7**60)]
POSITIONS, TOKENS = [0, 1, 2, 4095, 2**31, 2**40 + 3], [0, 1, 2, 63, 151_935, 2**31 - 1, 2**45]
LOWEST, HIGHEST = 2.0**-53, 1 - 2.0**-53


def finalise(z):
    """The finaliser of splitmix64 on Python integers, https://doi.org/10.1145/2714064.2660195, figure 16."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)


def step(key, part):
    return finalise((key + (part + 1) * GAMMA) & (2**64 - 1))


def reference_key(*path):
    return functools.reduce(step, path, len(path))


def reference_uniform(key, position, token):
    return ((step(step(key, position), token) >> 11) | 1) / 2**53


def exact_log(x):
    return decimal.Decimal(x).ln(decimal.Context(prec=50))


# The numbers themselves


def test_hash_equals_published_values():
    """The first outputs of splitmix64 seeded with 0, as published with the xoshiro generators."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [finalise(index * GAMMA % 2**64) for index in (1, 2, 3)] == published
    assert [noise._mix_int(index * GAMMA % 2**64) for index in (1, 2, 3)] == published


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_equal_the_reference(seed):
    assert stream_key(seed) == reference_key(seed)
    for sequence in (0, 1, 2**63, -3):
        assert stream_key(seed, sequence) == reference_key(seed, sequence)
        assert stream_key(seed, sequence, 1) == reference_key(seed, sequence, 1)


@pytest.mark.parametrize("tail", [(), (1,)], ids=["walk", "rejection"])
def test_keys_differ(tail):
    paths = [(seed, sequence, *tail) for seed in range(-40, 40) for sequence in range(-2, 20)]
    assert len({stream_key(*path) for path in paths}) == len(paths)


@pytest.mark.parametrize("seed", [0, -1, 5])
def test_no_key_of_a_rejection_rule_is_one_of_a_walk(seed):
    walks = {stream_key(other, sequence) for other in range(-20, 20) for sequence in range(20)}
    assert walks.isdisjoint(stream_key(seed, sequence, 1) for sequence in range(20))


@pytest.mark.parametrize("seed", SEEDS)
def test_uniforms_equal_the_reference(seed):
    key = stream_key(seed, 2)
    actual = uniform_noise(key, torch.tensor(POSITIONS), torch.tensor(TOKENS))
    assert actual.dtype == torch.float64
    assert actual.tolist() == [[reference_uniform(key, at, token) for token in TOKENS] for at in POSITIONS]


@pytest.mark.parametrize("seed", SEEDS)
def test_gumbel_equals_the_logarithms(seed):
    """Within 2e-13 of exact and of `math.log`: both logs have a relative error of 4e-14 at most."""
    key = stream_key(seed)
    actual = gumbel_noise(key, torch.tensor(POSITIONS), torch.tensor(TOKENS)).flatten().tolist()
    uniforms = uniform_noise(key, torch.tensor(POSITIONS), torch.tensor(TOKENS)).flatten().tolist()
    for value, u in zip(actual, uniforms, strict=True):
        assert value == pytest.approx(-math.log(-math.log(u)), rel=1e-13, abs=1e-13)
        assert value == pytest.approx(float(-exact_log(-exact_log(u))), rel=1e-13, abs=1e-13)


def log_inputs():
    """Log-spaced over the normal numbers, ever closer to 1 from both sides, around the edges of the reduced range."""
    spaced = [2.0**exponent * factor for exponent in range(-1022, 1023, 7) for factor in (1.0, 1.2345, 1.987)]
    near_one = [1 + sign * 2.0**-k for sign in (-1, 1) for k in range(2, 53)] + [HIGHEST]
    edges = [2.0**exponent * math.sqrt(2) * (1 + ulp * 2.0**-52) for exponent in (-2, -1, 0) for ulp in range(-3, 4)]
    dense = torch.linspace(0.3, 3.0, 1501, dtype=torch.float64).tolist()
    return [*spaced, *near_one, *edges, *dense, LOWEST]


def test_logarithm_is_accurate():
    """The relative error is below 4e-14, near 1 too, where the logarithm is near 0."""
    inputs = [x for x in log_inputs() if x != 1]
    actual = noise._log(torch.tensor(inputs, dtype=torch.float64)).tolist()
    for x, value in zip(inputs, actual, strict=True):
        assert value == pytest.approx(float(exact_log(x)), rel=4e-14, abs=0)
        assert value == pytest.approx(math.log(x), rel=4e-14, abs=0)
    assert noise._log(torch.ones(1, dtype=torch.float64)).item() == 0


# Bounds


@pytest.mark.parametrize("bits, uniform", [(0, LOWEST), (-1, HIGHEST), (-(2**63), 0.5 + 2.0**-53)])
def test_extreme_bits_give_neither_zero_nor_one(monkeypatch, bits, uniform):
    """All bits 0, all 1, and the sign bit alone."""
    monkeypatch.setattr(noise, "_mix", lambda numbers: torch.full_like(numbers, bits))
    at = torch.zeros(1, dtype=torch.int64)
    assert uniform_noise(0, at, at).item() == uniform
    gumbel = gumbel_noise(0, at, at).item()
    assert gumbel == pytest.approx(-math.log(-math.log(uniform)), rel=1e-13)
    assert -3.7 < gumbel < 36.8


def test_a_large_sample_stays_inside_the_bounds():
    positions, tokens = torch.arange(8), torch.arange(2**17)
    uniforms = uniform_noise(stream_key(5), positions, tokens)
    numerators = (uniforms * 2.0**53).long()
    assert bool((numerators % 2 == 1).all()) and bool((numerators.double() / 2.0**53 == uniforms).all())
    assert 0 < float(uniforms.min()) < 2.0**-16 and 1 - 2.0**-16 < float(uniforms.max()) < 1
    gumbel = gumbel_noise(stream_key(5), positions, tokens)
    assert -3.7 < float(gumbel.min()) < -2 and 11 < float(gumbel.max()) < 36.8


# The same bits in whatever shape


KEY = stream_key(-9, 4)
TABLE_POSITIONS, TABLE_TOKENS = torch.arange(100, 112), torch.arange(203)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int64), b.contiguous().view(torch.int64))


@pytest.fixture(scope="module", params=[uniform_noise, gumbel_noise], ids=["uniform", "gumbel"])
def made(request):
    """The function and its [12, 203] table."""
    return request.param, request.param(KEY, TABLE_POSITIONS, TABLE_TOKENS)


def test_rows_and_columns_alone_equal_the_table(made):
    function, table = made
    for index, position in enumerate(TABLE_POSITIONS):
        assert same_bits(function(KEY, position, TABLE_TOKENS), table[index])
        assert same_bits(function(KEY, position[None], TABLE_TOKENS[:7]), table[index : index + 1, :7])
    for width in range(1, 70):  # every remainder of a vector register
        assert same_bits(function(KEY, TABLE_POSITIONS[:2], TABLE_TOKENS[:width]), table[:2, :width])
    assert same_bits(function(KEY, TABLE_POSITIONS, TABLE_TOKENS[17]), table[:, 17])
    assert function(KEY, TABLE_POSITIONS, TABLE_TOKENS[:0]).shape == (12, 0)


def test_one_number_alone_equals_the_table(made):
    function, table = made
    assert same_bits(function(KEY, TABLE_POSITIONS[3], TABLE_TOKENS[17]), table[3, 17])


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_shards_of_the_vocabulary_equal_the_table(made, shards):
    function, table = made
    parts = [function(KEY, TABLE_POSITIONS, part) for part in TABLE_TOKENS.chunk(shards)]
    assert same_bits(torch.cat(parts, dim=1), table)


def test_permuted_and_strided_tokens_equal_the_table(made):
    function, table = made
    order = torch.randperm(203, generator=torch.Generator().manual_seed(1))
    assert same_bits(function(KEY, TABLE_POSITIONS, order), table[:, order])
    assert same_bits(function(KEY, TABLE_POSITIONS, TABLE_TOKENS[::3]), table[:, ::3])
    assert same_bits(function(KEY, TABLE_POSITIONS[::5], TABLE_TOKENS), table[::5])
    square = TABLE_TOKENS[:196].view(14, 14)
    assert same_bits(function(KEY, TABLE_POSITIONS, square.T), table[:, :196].view(12, 14, 14).mT)
    assert same_bits(function(KEY, TABLE_POSITIONS.view(3, 4).T, TABLE_TOKENS), table.view(3, 4, 203).transpose(0, 1))
    assert same_bits(function(KEY, TABLE_POSITIONS, TABLE_TOKENS[5].expand(9)), table[:, [5] * 9])


def test_inputs_are_left_alone(made):
    function, _ = made
    positions, tokens = TABLE_POSITIONS.clone(), TABLE_TOKENS.clone()
    function(KEY, positions, tokens)
    assert torch.equal(positions, TABLE_POSITIONS) and torch.equal(tokens, TABLE_TOKENS)


def test_cached_rows_equal_the_noise():
    rows = NoiseRows(seed=11, sequence=3)
    like = torch.zeros(1, 1, 203)
    for start, count in [(0, 1), (0, 5), (2, 5), (3, 1), (3, 9), (3, 2), (40, 3), (41, 2), (1, 3)]:
        actual = rows(start, count, like)
        assert len(actual) == count
        expected = gumbel_noise(stream_key(11, 3), torch.arange(start, start + count), TABLE_TOKENS)
        assert same_bits(torch.stack(actual), expected)


def test_rows_are_computed_once_and_forgotten_when_passed():
    rows = NoiseRows(seed=0)
    first = rows(0, 6, torch.zeros(8))
    second = rows(2, 6, torch.zeros(8))
    assert all(a is b for a, b in zip(first[2:], second[:4], strict=True))
    assert sorted(position for position, _ in rows.rows) == [2, 3, 4, 5, 6, 7]
    assert rows(7, 1, torch.zeros(9))[0].shape == (9,) and {position for position, _ in rows.rows} == {7}
    assert rows(2, 1, torch.zeros(8))[0] is not first[2]


def test_row_streams():
    assert row_streams(7, 3) == [(7, 0), (7, 1), (7, 2)]
    assert row_streams([5, 7, 5], 3) == [(5, 0), (7, 0), (5, 0)]
    assert row_streams((-1,), 1) == [(-1, 0)]
    for seeds in ([1, 2], [1, 2, 3, 4], []):
        with pytest.raises(ValueError, match=rf"`seed` has {len(seeds)} entries for 3 sequences"):
            row_streams(seeds, 3)


# Chi-square


LOGITS = torch.tensor([1.5, 0.0, -1.0, 0.7, -3.0], dtype=torch.float64)
LAW = LOGITS.softmax(-1)
DRAWS = 2**18


def p_value(counts, law):
    """Pearson's chi-square; every cell must expect at least five."""
    counts, law = counts.double().flatten(), law.double().flatten()
    expected = law * counts.sum()
    assert float(expected.min()) >= 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((len(law) - 1) / torch.tensor(2.0, dtype=torch.float64), statistic / 2))


def choices(key, positions=None, make=gumbel_noise):
    """The token sampled at each of `DRAWS` positions."""
    positions = torch.arange(DRAWS) if positions is None else positions
    return (LOGITS + make(key, positions, torch.arange(5))).argmax(-1)


def pair_p_value(a, b, law=LAW):
    """Of pairs (a, b) of classes, whether they are independent with `law` each."""
    size = len(law)
    return p_value(torch.bincount(a * size + b, minlength=size * size), torch.outer(law, law))


def bins(uniforms, count=8):
    return (uniforms * count).long().flatten()


def uniform_law(count):
    return torch.full((count,), 1 / count, dtype=torch.float64)


def test_margins_of_uniforms():
    uniforms = uniform_noise(stream_key(1), torch.arange(16), torch.arange(2**14))
    assert p_value(torch.bincount(bins(uniforms, 256), minlength=256), uniform_law(256)) > ALPHA


@pytest.mark.parametrize("seed", [0, 1, 2**40, -1])
def test_choices_follow_the_softmax(seed):
    assert p_value(torch.bincount(choices(stream_key(seed)), minlength=5), LAW) > ALPHA


def test_neighbouring_positions_are_independent():
    chosen = choices(stream_key(3))
    assert pair_p_value(chosen[::2], chosen[1::2]) > ALPHA
    for lag in (2, 8, 16, 64):
        first, second = chosen.view(-1, 2, lag).unbind(1)
        assert pair_p_value(first.flatten(), second.flatten()) > ALPHA / 4


@pytest.mark.parametrize("seed", [0, 41, -1, 2**63 - 1])
def test_neighbouring_seeds_and_sequences_are_independent(seed):
    """At the same position, and at the next position under the one before: seed and position do not just add up."""
    chosen = choices(stream_key(seed, 0))
    for path in ((seed + 1, 0), (seed, 1), (seed, 0, 1)):
        other = choices(stream_key(*path))
        assert pair_p_value(chosen, other) > ALPHA / 6
        assert pair_p_value(chosen[1:], other[:-1]) > ALPHA / 6


@pytest.mark.parametrize("path", [lambda n: (n, 0), lambda n: (0, n)], ids=["seeds", "sequences"])
def test_many_seeds_at_one_position(path):
    """A position's token under successive seeds is as good as under successive positions."""
    position = torch.tensor([17])
    chosen = torch.cat([choices(stream_key(*path(n)), position) for n in range(2**12)])
    assert p_value(torch.bincount(chosen, minlength=5), LAW) > ALPHA / 2
    law = torch.stack([LAW[0], 1 - LAW[0]])  # two classes: with so few pairs the rare tokens expect less than five
    other = (chosen != 0).long()
    assert pair_p_value(other[::2], other[1::2], law) > ALPHA / 2


@pytest.mark.parametrize("power", range(0, 44, 3))
def test_tokens_a_power_of_two_apart_are_independent(power):
    """Power 0: neighbouring tokens. Others: the same place in shards of that size."""
    tokens = torch.arange(2**12)
    tokens = tokens + tokens.bitwise_right_shift(power).bitwise_left_shift(power)  # bit `power` is clear
    first, second = (bins(uniform_noise(stream_key(power), torch.arange(16), t)) for t in (tokens, tokens + 2**power))
    assert pair_p_value(first, second, uniform_law(8)) > ALPHA


def test_low_and_high_bits_are_uniform():
    """All 52 free bits; the lowest of the 53 is set to keep 0 away."""
    uniforms = uniform_noise(stream_key(8), torch.arange(16), torch.arange(2**14)).flatten()
    bits = (uniforms * 2.0**53).long()
    for shift in (1, 9, 17, 25, 33, 41, 45):  # eight bits at a time
        assert p_value(torch.bincount((bits >> shift) & 255, minlength=256), uniform_law(256)) > ALPHA / 7
    low, high = (bits >> 1) & 15, bits >> 49
    assert pair_p_value(low, high, uniform_law(16)) > ALPHA


# What the chi-square tests must see


def test_noise_without_the_position_is_caught():
    chosen = choices(stream_key(3), make=lambda key, at, tokens: gumbel_noise(key, at.clamp(max=0), tokens))
    assert p_value(torch.bincount(chosen, minlength=5), LAW) < ALPHA
    halved = choices(stream_key(3), make=lambda key, at, tokens: gumbel_noise(key, at // 2, tokens))
    assert p_value(torch.bincount(halved[::2], minlength=5), LAW) > ALPHA  # right at each position, yet in pairs:
    assert pair_p_value(halved[::2], halved[1::2]) < ALPHA


def test_noise_without_the_seed_is_caught():
    """Keyed without it, and keyed by its sum with the position."""
    blind = [choices(stream_key(0 * seed)) for seed in (41, 42)]
    assert pair_p_value(*blind) < ALPHA
    first, second = (choices(stream_key(0), torch.arange(DRAWS) + seed) for seed in (41, 42))
    assert pair_p_value(first, second) > ALPHA  # right at equal positions, yet one apart:
    assert pair_p_value(first[1:], second[:-1]) < ALPHA


@pytest.mark.parametrize("highest", [2.0, 4.0])
def test_clipped_tail_is_caught(highest):
    chosen = choices(stream_key(0), make=lambda *args: gumbel_noise(*args).clamp(max=highest))
    assert p_value(torch.bincount(chosen, minlength=5), LAW) < ALPHA


def test_coarse_uniforms_are_caught():
    """24 bits, as float32 gives them."""
    uniforms = uniform_noise(stream_key(8), torch.arange(16), torch.arange(2**14)).flatten()
    coarse = (uniforms * 2.0**24).long() << 29
    assert p_value(torch.bincount((coarse >> 9) & 255, minlength=256), uniform_law(256)) < ALPHA
