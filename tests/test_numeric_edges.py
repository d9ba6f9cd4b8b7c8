"""Sampling at the edges of its numbers: infinite and NaN scores, extreme settings, 16-bit targets."""

import pytest
import torch
from keyed import drafter_of, sampled
from stubs import decode, greedy, make_drafter, make_stub, make_target
from transformers import LogitsProcessor, LogitsProcessorList

from hf_ddtree.noise import gumbel_noise, stream_key
from hf_ddtree.rules import WalkRule

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])
START = PROMPT.shape[1]
NEW = 16
KINDS = ("oracle-1", "oracle-2", "anti", "rand", "real")
SAMPLING = {"do_sample": True, "seed": 3, "max_new_tokens": NEW}
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
WAYS = ("accept_in_order", "accept_at_once")
# Every way to accept: the walk's two, whatever the device, and the classical rules.
CHAIN = {"tree_shape": "chain"}
RULES = {
    **{way: {} for way in WAYS},
    "token": {"acceptance": "token", **CHAIN},
    "block": {"acceptance": "block", **CHAIN},
    "recursive": {"acceptance": "recursive"},
}


@pytest.fixture(scope="module")
def soft():
    """A target with flat distributions, so that sampling is not greedy in disguise."""
    return make_target("qwen3", seed=10, initializer_range=0.2)


@pytest.fixture(params=RULES)
def rule(request, monkeypatch):
    if request.param in WAYS:
        monkeypatch.setattr(WalkRule, "accept", getattr(WalkRule, request.param))
    return RULES[request.param]


# Distributions of one token

ONE = {
    "top_k=1": {"top_k": 1},
    "top_p=0": {"top_p": 0.0},
    "min_p=1": {"min_p": 1.0},
    "T=1e-4": {"temperature": 1e-4},
    "T=1e-30": {"temperature": 1e-30},
    "top_k=1 T=1e4": {"temperature": 1e4, "top_k": 1},
}


@pytest.mark.parametrize("settings", ONE.values(), ids=ONE)
def test_fault_09_11_a_single_candidate_is_greedy(soft, rule, settings):
    reference = greedy(soft, PROMPT, NEW)
    for kind in ("oracle-1", "rand", "real"):
        drafter = drafter_of(soft, kind, reference[0])
        assert decode(soft, drafter, PROMPT, **SAMPLING, **settings, **rule).tolist() == reference.tolist()
    assert decode(soft, drafter, PROMPT, **SAMPLING, **rule).tolist() != reference.tolist()


def test_one_finite_token_per_row(soft, rule):
    others = [token for token in range(64) if token != 21]
    for kind in ("oracle-1", "rand"):
        drafter = make_stub(soft, kind, torch.tensor([*PROMPT[0].tolist(), *[21] * NEW]))
        result = decode(soft, drafter, PROMPT, **SAMPLING, **OUTPUTS, suppress_tokens=others, **rule)
        assert result.sequences[0, START:].tolist() == [21] * NEW
        assert all(scores.isfinite().nonzero().tolist() == [[0, 21]] for scores in result.scores)


class Ladder(LogitsProcessor):
    """Leaves one token more with every call, the others at -inf."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(-1, torch.arange(input_ids.shape[1] - START + 1, 64), -torch.inf)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_mostly_minus_infinity(soft, kind):
    expected = sampled(soft, PROMPT, NEW, seed=3, around=([Ladder()], ()), temperature=2.0)
    assert all(token <= place for place, token in enumerate(expected[0, START:].tolist()))
    drafter, processors = drafter_of(soft, kind, expected[0]), LogitsProcessorList([Ladder()])
    tokens = decode(soft, drafter, PROMPT, **SAMPLING, temperature=2.0, logits_processor=processors)
    assert tokens.tolist() == expected.tolist()


# Extreme settings

EXTREME = {
    "T=1e-4": {"temperature": 1e-4, "top_k": 0},
    "T=1e4": {"temperature": 1e4, "top_k": 0},
    "T=1e30": {"temperature": 1e30, "top_k": 0},
    "lambda=1e30": {"draft_noise_scale": 1e30},
    "kappa=1e-300": {"draft_temperature": 1e-300},
    "kappa=1e300": {"draft_temperature": 1e300},
    "top_p=1": {"top_p": 1},
    "top_k beyond the vocabulary": {"top_k": 10**6},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", EXTREME.values(), ids=EXTREME)
def test_extreme_settings_equal_plain_decoding(soft, settings, way, monkeypatch):
    monkeypatch.setattr(WalkRule, "accept", getattr(WalkRule, way))
    warping = {name: value for name, value in settings.items() if not name.startswith("draft")}
    expected = sampled(soft, PROMPT, NEW, seed=3, **warping)
    for kind in KINDS:
        drafter = drafter_of(soft, kind, expected[0])
        assert decode(soft, drafter, PROMPT, **SAMPLING, **settings).tolist() == expected.tolist()


def test_top_p_of_1_is_off(soft):
    off = sampled(soft, PROMPT, NEW, seed=3, top_k=0)
    for top_p in (1, 1.0):
        tokens = decode(soft, make_drafter(soft), PROMPT, **SAMPLING, top_k=0, top_p=top_p)
        assert tokens.tolist() == off.tolist()


def test_great_heat_is_even(soft, rule):
    """640 tokens, each of 64 expected ten times; none missing has odds of 64 * exp(-10) = 0.3% against it."""
    counts = torch.zeros(64, dtype=torch.int64)
    for seed in range(20):
        fields = {"do_sample": True, "seed": seed, "temperature": 1e4, "top_k": 0, "max_new_tokens": 32}
        counts += decode(soft, make_drafter(soft), PROMPT, **fields, **rule)[0, START:].bincount(minlength=64)
    assert int(counts.min()) > 0 and int(counts.max()) < 30


# NaN, and nothing left to sample

NOTHING = "left no token to sample"


def broken(value, after, token=slice(None)):
    """A target whose head gives `value` for `token` from forward number `after` on."""
    target = make_target("qwen3", seed=10, initializer_range=0.2)
    seen = []

    def spoil(module, inputs, output):
        output[..., token] = value if len(seen) > after else output[..., token]

    target.register_forward_pre_hook(lambda *_: seen.append(1))
    target.lm_head.register_forward_hook(spoil)
    return target


SPOILT = {
    "all NaN": (torch.nan, slice(None)),
    "one NaN": (torch.nan, 7),
    "all -inf": (-torch.inf, slice(None)),
}


@pytest.mark.parametrize("after", [0, 2], ids=["prefill", "later"])
@pytest.mark.parametrize("value, token", SPOILT.values(), ids=SPOILT)
def test_logits_to_sample_nothing_from(rule, value, token, after):
    target = broken(value, after, token)
    fields = {"top_k": 0, **SAMPLING, **rule}
    with pytest.raises(ValueError, match=NOTHING):
        decode(target, make_drafter(target), PROMPT, **fields)


def test_everything_masked_while_sampling(soft, rule):
    with pytest.raises(ValueError, match=f"{NOTHING}.* -inf.* NaN.* Relax the constraints"):
        decode(soft, make_drafter(soft), PROMPT, **SAMPLING, suppress_tokens=list(range(64)), **rule)


GREEDY = {**SPOILT, "one +inf": (torch.inf, 7), "one -inf": (-torch.inf, 7)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value, token", GREEDY.values(), ids=GREEDY)
def test_greedy_decoding_goes_on_as_plain_decoding_does(value, token, way, monkeypatch):
    monkeypatch.setattr(WalkRule, "accept", getattr(WalkRule, way))
    expected = greedy(broken(value, 0, token), PROMPT, NEW)
    target = broken(value, 0, token)
    tokens = decode(target, make_stub(target, "oracle-2", expected[0]), PROMPT, max_new_tokens=NEW)
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_sampling_from_infinite_logits(way, monkeypatch):
    """Not a distribution, but an order: the token at +inf comes first."""
    monkeypatch.setattr(WalkRule, "accept", getattr(WalkRule, way))
    target = broken(torch.inf, 0, 7)
    tokens = decode(target, make_drafter(target), PROMPT, **SAMPLING)
    assert tokens.tolist() == sampled(target, PROMPT, NEW, seed=3).tolist()
    assert tokens[0, START:].tolist() == [7] * NEW


# 16-bit targets

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("way", WAYS)
def test_a_16_bit_target_samples_by_the_returned_scores(dtype, way, monkeypatch):
    """Near-ties may fall otherwise in a tree forward than in a single step, but each choice follows from its scores,
    and the first, which the library's own prefill decides, is plain decoding's.
    """
    monkeypatch.setattr(WalkRule, "accept", getattr(WalkRule, way))
    target = make_target("qwen3", seed=10, initializer_range=0.2).to(dtype)
    for seed, kind in enumerate(KINDS):
        expected = sampled(target, PROMPT, NEW, seed=seed, temperature=0.8)
        fields = {**SAMPLING, "seed": seed, "temperature": 0.8, "repetition_penalty": 1.2}
        result = decode(target, drafter_of(target, kind, expected[0]), PROMPT, **fields, **OUTPUTS)
        new = result.sequences[0, START:]
        noise = gumbel_noise(stream_key(seed, 0), torch.arange(START, START + NEW), torch.arange(64))
        assert new.tolist() == (torch.cat(result.scores).double() + noise).argmax(-1).tolist()
        first = sampled(target, PROMPT, 1, seed=seed, temperature=0.8, repetition_penalty=1.2)
        assert first[0].tolist() == result.sequences[0, : START + 1].tolist()
        assert all(row.dtype == torch.float32 for row in (*result.scores, *result.logits))
        assert all(torch.equal(row, row.to(dtype).float()) for row in result.logits)


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("way", WAYS)
def test_exact_ties_go_to_the_first_token(dtype, way, monkeypatch):
    """Every token has a twin with the same logit, beside the ties that 16 bits make."""
    monkeypatch.setattr(WalkRule, "accept", getattr(WalkRule, way))
    target = make_target("qwen3", seed=10).to(dtype)
    target.lm_head.weight.data[32:] = target.lm_head.weight.data[:32]
    reference = greedy(target, PROMPT, NEW)[0]
    for kind in KINDS:
        result = decode(target, drafter_of(target, kind, reference), PROMPT, max_new_tokens=NEW, **OUTPUTS)
        best = [row[0].eq(row.max()).nonzero()[:, 0].tolist() for row in result.scores]
        assert all(len(tied) >= 2 for tied in best)
        assert result.sequences[0, START:].tolist() == [tied[0] for tied in best]


# Steps of the greatest logit's precision, three times the worst measured over 18 texts (3.2, 5.6 and 12.4).
STEPS = {"float16": (torch.float16, 10), "bfloat16": (torch.bfloat16, 17), "float32": (torch.float32, 37)}


@torch.no_grad()
@pytest.mark.parametrize("dtype, steps", STEPS.values(), ids=STEPS)
def test_logits_are_close_to_those_of_one_forward(rule, dtype, steps):
    target = make_target("qwen3", seed=10, initializer_range=0.2).to(dtype)
    result = decode(target, make_drafter(target), PROMPT, **SAMPLING, **OUTPUTS, **rule)
    forward = target(result.sequences).logits[0, START - 1 : -1].float()
    worst = float((torch.cat(result.logits) - forward).abs().max())
    assert worst <= steps * torch.finfo(dtype).eps * float(forward.abs().max())
