"""The walk: how its trees are built, and that both of its ways to accept agree bit for bit."""

import itertools

import pytest
import torch
from keyed import drafter_of, sampled
from stubs import BLOCK, STUBS, decode, greedy, make_drafter, make_emissions, make_stub, make_target
from transformers import LogitsProcessor, WatermarkingConfig
from transformers.generation import logits_process as library

from hf_ddtree import DDTreeConfig
from hf_ddtree.drafting.draft import Draft
from hf_ddtree.noise import gumbel_noise, stream_key
from hf_ddtree.rules import WalkRule
from hf_ddtree.tree import root_tree

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])
START = PROMPT.shape[1]
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
NEW = 25
KINDS = (*STUBS, "real")
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture(scope="module")
def soft():
    """A target with flat distributions, so that sampling is not greedy in disguise."""
    return make_target("qwen3", seed=10, initializer_range=0.2)


def make_walk(stream, ids=PROMPT, processors=(), padding=0, **fields):
    config = DDTreeConfig(max_length=60, **fields)
    emissions = make_emissions(ids, config, processors, padding=padding)
    return WalkRule(config, emissions, None if stream is None else [stream])


# Building


def best_prefixes(log_probs, budget):
    """{path: score} of the `budget` most probable prefixes, from all there are."""
    depth, vocab = log_probs.shape
    scores = {
        path: sum(float(log_probs[level, token]) for level, token in enumerate(path))
        for length in range(1, depth + 1)
        for path in itertools.product(range(vocab), repeat=length)
    }
    return dict(sorted(scores.items(), key=lambda item: -item[1])[:budget])


def prefixes_of(tree):
    paths = {0: ()}
    for node in range(1, tree.num_nodes):
        paths[node] = (*paths[int(tree.parents[0, node])], int(tree.tokens[0, node]))
    return {paths[node]: float(tree.scores[0, node]) for node in range(1, tree.num_nodes)}


BUILDS = {
    "defaults": ({}, DDTreeConfig().noise_scale, 1.0),
    "lambda=1": ({"draft_noise_scale": 1}, 1.0, 1.0),
    "lambda=0": ({"draft_noise_scale": 0}, 0.0, 1.0),
    "lambda=0.5": ({"draft_noise_scale": 0.5}, 0.5, 1.0),
    "lambda=2 kappa=0.3": ({"draft_noise_scale": 2, "draft_temperature": 0.3}, 2.0, 0.3),
    "lambda=1 kappa=3": ({"draft_noise_scale": 1.0, "draft_temperature": 3}, 1.0, 3.0),
}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("fields, scale, kappa", BUILDS.values(), ids=BUILDS)
def test_tree_of_the_coupled_draft(fields, scale, kappa, sampling, padding):
    """The best prefixes under log_softmax((logits + lambda * T * G) / kappa), G at the positions drafted for."""
    logits = 2 * torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(4))
    key, positions = stream_key(21, 0), torch.arange(3) + START - padding
    noise = gumbel_noise(key, positions, torch.arange(6)) if sampling else torch.zeros(3, 6)
    expected = best_prefixes(((logits[0].double() + scale * 0.7 * noise) / kappa).log_softmax(-1), budget=17)
    settings = {"do_sample": sampling, "temperature": 0.7, "tree_budget": 17, **fields}
    rule = make_walk((21, 0) if sampling else None, padding=padding, **settings)
    actual = prefixes_of(rule.build(PROMPT[:, -1:], Draft(PROMPT[:, -1:], logits)))
    assert actual.keys() == expected.keys()
    assert actual == pytest.approx(expected, abs=1e-5)


def test_no_draft_gives_the_root_alone():
    tree = make_walk((3, 0), do_sample=True).build(PROMPT[:, -1:], None)
    assert tree.tokens.tolist() == [[10]] and tree.num_nodes == 1


@torch.no_grad()
def truthful(target, text, padding):
    """A drafter whose logits are the target's own along `text` [1, length], which begins with `padding` tokens."""
    stub, mask = make_stub(target, "rand", text[0]), torch.ones_like(text)
    mask[:, :padding] = 0
    logits = target(text, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    logits = torch.cat([logits, logits[:, :BLOCK]], dim=1)  # a block may reach beyond the text

    def logits_for(committed, real):  # which leaves the padding out
        return logits[:, committed + padding - 1 :][:, : real.shape[1]]

    stub.logits_for = logits_for
    return stub


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("seed, temperature", [(1, 0.4), (2, 1.0), (3, 2.0)], ids=["T=0.4", "T=1", "T=2"])
def test_coupled_drafts_of_a_perfect_drafter_are_all_right(soft, seed, temperature, padding):
    """Draft and target see the same noise at the same position; without it, or twice as much, drafts miss."""
    inputs = {"attention_mask": MASK} if padding else {}
    settings = {"seed": seed, "temperature": temperature, "top_k": 0, **inputs}
    text = sampled(soft, PROMPT, NEW, **settings)
    drafter = truthful(soft, text, padding)
    settings |= {"do_sample": True, "tree_shape": "chain", "max_new_tokens": NEW, "return_dict_in_generate": True}

    def rounds(**fields):
        result = decode(soft, drafter, PROMPT, **settings, **fields)
        assert result.sequences.tolist() == text.tolist()
        return result.rounds

    fewest = 1 + (NEW - 1) // BLOCK
    assert rounds(draft_noise_scale=1.0) == fewest <= rounds()
    assert rounds(draft_noise_scale=0.0) > max(rounds(), fewest)
    assert rounds(draft_noise_scale=2.0) > fewest


# The two ways to accept

ROWWISE = {
    "nothing": {},
    "warpers": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "eta_cutoff": 0.01},
    "repetition": {"repetition_penalty": 1.4},
    "2-grams": {"no_repeat_ngram_size": 2},
    "bias": {"sequence_bias": {(3,): 4.0, (3, 3): -9.0}},
    "bad words": {"bad_words_ids": [[44], [3, 7]]},
    "suppress": {"suppress_tokens": [1, 2, 3], "begin_suppress_tokens": [4, 5]},
    "decay": {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": [3, 61]},
    "minimum": {"min_new_tokens": 9, "min_length": START + 10, "eos_token_id": list(range(20))},
    "forced": {"forced_eos_token_id": 7, "eos_token_id": 7},
    "end tokens": {"eos_token_id": [9, 18, 27, 36]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "normalised": {"renormalize_logits": True, "remove_invalid_values": True},
    "padding": {"attention_mask": MASK},
    "padding and repetition": {"attention_mask": MASK, "repetition_penalty": 1.4},
}


@pytest.fixture
def run(monkeypatch):
    """Decodes with one of the two ways, whatever the device."""

    def run(way, target, drafter, **fields):
        calls, real = [], getattr(WalkRule, way)
        monkeypatch.setattr(WalkRule, "accept", lambda *args: (calls.append(1), real(*args))[1])
        result = decode(target, drafter, PROMPT, **{"max_new_tokens": NEW, **OUTPUTS, **fields})
        assert len(calls) == result.rounds
        return result

    return run


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("fields", ROWWISE.values(), ids=ROWWISE)
def test_both_ways_agree_bit_for_bit(soft, run, fields, sampling):
    warpers = {"temperature", "top_k", "top_p", "min_p", "typical_p", "eta_cutoff"}
    fields = {name: value for name, value in fields.items() if sampling or name not in warpers}
    fields |= {"do_sample": True, "seed": 5} if sampling else {}
    text, deepest = run("accept_in_order", soft, make_drafter(soft), **fields).sequences, 0
    for kind, budget in (("oracle-1", 9), ("oracle-3", 31), ("anti", 4), ("rand", 60), ("real", 1)):
        drafter = drafter_of(soft, kind, text[0, 3 if "attention_mask" in fields else 0 :])  # it counts no padding
        one = run("accept_in_order", soft, drafter, tree_budget=budget, **fields)
        other = run("accept_at_once", soft, drafter, tree_budget=budget, **fields)
        assert one.sequences.tolist() == other.sequences.tolist() == text.tolist()
        assert one.acceptance_lengths == other.acceptance_lengths
        deepest = max(deepest, *one.acceptance_lengths)
        for name in ("scores", "logits"):
            pairs = zip(getattr(one, name), getattr(other, name), strict=True)
            assert all(mine.shape == (1, 64) and torch.equal(mine, theirs) for mine, theirs in pairs)
            assert len(getattr(one, name)) == text.shape[1] - START
    assert deepest > 2


@pytest.mark.parametrize("way", ["accept_in_order", "accept_at_once"])
def test_nothing_is_asked_of_what_comes_after_the_end(soft, run, way):
    """No token may follow the end token, so no score does either; drafts behind it must not matter."""
    text = sampled(soft, PROMPT, NEW, seed=5)[0]
    end = int(text[START + 4])
    assert end not in text[START : START + 4].tolist()
    drafter = make_stub(soft, "oracle-1", text)
    words = [[end, token] for token in range(64)]
    fields = {"do_sample": True, "seed": 5, "eos_token_id": end, "bad_words_ids": words}
    assert run(way, soft, drafter, **fields).sequences[0].tolist() == text[: START + 5].tolist()


class Elsewhere:
    """Logits that say they are on an accelerator."""

    device = torch.device("cuda", 0)

    def to(self, device):
        return self


class Custom(LogitsProcessor):
    pass


BY_INDEX = library.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1], num_beams=1)
ORDERED = {
    "none": ([], False),
    "known": ([library.TopKLogitsWarper(3), library.RepetitionPenaltyLogitsProcessor(1.2)], False),
    "custom": ([library.TopKLogitsWarper(3), Custom()], True),
    "by row index": ([BY_INDEX], True),
}


@pytest.mark.parametrize("processors, ordered", ORDERED.values(), ids=ORDERED)
def test_which_way_is_taken(processors, ordered, monkeypatch):
    """In order on a CPU, and wherever a processor may keep state or call user code; else all nodes at once."""
    taken = []
    for way in ("accept_in_order", "accept_at_once"):
        monkeypatch.setattr(WalkRule, way, lambda self, tree, logits, way=way: taken.append(way))
    rule, tree = make_walk(None, processors=processors), root_tree(PROMPT[:, -1:])
    rule.accept(tree, torch.zeros(1, 1, 64))
    rule.accept(tree, Elsewhere())
    assert taken == ["accept_in_order", "accept_in_order" if ordered else "accept_at_once"]


@pytest.mark.parametrize("way", ["accept_in_order", "accept_at_once"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_exact_ties(run, sampling, way):
    """Every token has a twin with the same logit: greedy ties go as in plain decoding, and noise settles the others."""
    target = make_target("qwen3", seed=10)
    target.lm_head.weight.data[32:] = target.lm_head.weight.data[:32]
    reference = sampled(target, PROMPT, NEW, seed=2) if sampling else greedy(target, PROMPT, NEW)
    assert sampling == bool((reference[0, START:] >= 32).any())
    fields = {"do_sample": True, "seed": 2} if sampling else {}
    for kind in KINDS:
        result = run(way, target, drafter_of(target, kind, reference[0]), **fields)
        assert result.sequences.tolist() == reference.tolist()
        assert all(torch.equal(scores[:, :32], scores[:, 32:]) for scores in result.logits)
