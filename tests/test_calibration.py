"""Depth temperatures and reliability: recovered where the truth is known, and used by trees."""

from dataclasses import dataclass

import pytest
import torch
from stubs import BLOCK, VOCAB, make_drafter, make_target

import hf_ddtree.training.calibration as calibration
from hf_ddtree import DDTreeConfig
from hf_ddtree.drafting.draft import Draft
from hf_ddtree.training.calibration import (
    GRID,
    MIN_POSITIONS,
    Bin,
    calibration_error,
    fit_depth_temperatures,
    reliability,
)
from hf_ddtree.training.data import TokenSequence, compute_features
from hf_ddtree.training.evaluation import TextDrafts, drafts_over, held_acceptance, held_configs

DEPTH = BLOCK - 1
TAPS = [0, 2]


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


@dataclass(frozen=True)
class Item:
    """Stands for a text's features."""

    sequence: TokenSequence
    drafts: TextDrafts


def make_item(logits, tokens, temperatures=None):
    """A text of one prompt token and the answer `tokens`, drafted as `logits` [answer - 1, depth, vocab]."""
    states = torch.zeros(*logits.shape[:2], 32)
    whole = torch.cat([torch.tensor([0]), tokens])
    return Item(TokenSequence(whole, 1, None), TextDrafts(whole, 1, logits, states, temperatures))


@pytest.fixture
def scripted(monkeypatch):
    """Drafts are what the items say."""
    monkeypatch.setattr(calibration, "drafts_over", lambda drafter, target, item: item.drafts)


def labels_of(tokens, index):
    """Of each anchor at a depth's index; the last token where there is none."""
    return tokens[(torch.arange(len(tokens) - 1) + 1 + index).clamp(max=len(tokens) - 1)]


def honest_item(generator, answer, scales):
    """A random text whose tokens have the probabilities softmax(z) under z, drafted as scale * z at each depth.

    Exchangeable scores make it so: z is random but for the token's entry, which is moved to a draw from its softmax.
    """
    tokens = torch.randint(0, VOCAB, (answer,), generator=generator)
    logits = torch.empty(answer - 1, len(scales), VOCAB)
    for index, scale in enumerate(scales):
        scores = 2 * torch.randn(answer - 1, VOCAB, generator=generator)
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        labels = labels_of(tokens, index)[:, None]
        at_drawn, at_label = scores.gather(1, drawn), scores.gather(1, labels)
        scores.scatter_(1, drawn, at_label).scatter_(1, labels, at_drawn)
        logits[:, index] = scale * scores
    return make_item(logits, tokens)


def honest_text(scales, texts=30, answer=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [honest_item(generator, answer, scales) for _ in range(texts)]


# Fitting


def test_the_scale_of_the_logits_is_recovered(scripted, target):
    """A grid step is 5%, and 2,000 positions of this spread leave 3% of chance."""
    scales = [0.5, 0.7, 1.0, 1.4, 2.0, 2.5, 1.0]
    fitted = fit_depth_temperatures(make_drafter(target), target, honest_text(scales))
    assert fitted == pytest.approx(scales, rel=0.1)


def test_the_fit_has_the_least_cross_entropy_of_the_grid(target):
    """By hand, over a real drafter with a transition, after the text's own tokens."""
    drafter = random_transition(target)
    features = real_features(target, 3)
    fitted = fit_depth_temperatures(drafter, target, features)
    for index in (0, 3):
        losses = torch.zeros(len(GRID))
        for item in features:
            drafts = drafts_over(drafter, target, item)
            answer = drafts.tokens[drafts.start :]
            for anchor in range(len(answer) - 1 - index):
                states = drafts.states[anchor, index]
                if index:
                    states = states + drafter.transition(states, target.get_input_embeddings()(answer[anchor + index]))
                logits = target.lm_head(states)
                losses -= torch.stack([(logits / t).log_softmax(-1)[answer[anchor + index + 1]] for t in GRID])
        assert fitted[index] == pytest.approx(float(GRID[losses.argmin()]), abs=1e-3)


def test_depths_with_too_little_text_take_the_one_above(scripted, target):
    """Answers of 4 tokens reach depths 1 to 3."""
    scales = [0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    fitted = fit_depth_temperatures(make_drafter(target), target, honest_text(scales, texts=1000, answer=4))
    assert fitted[:3] == pytest.approx(scales[:3], rel=0.15)
    assert fitted[3:] == [fitted[2]] * 4


def test_no_text_means_no_calibration(scripted, target):
    drafter = make_drafter(target)
    assert fit_depth_temperatures(drafter, target, []) == [1.0] * DEPTH
    few = honest_text([2.0] * DEPTH, texts=1, answer=MIN_POSITIONS)  # 29 anchors
    assert fit_depth_temperatures(drafter, target, few) == [1.0] * DEPTH


def test_wild_logits_stay_within_the_grid(scripted, target):
    fitted = fit_depth_temperatures(make_drafter(target), target, honest_text([100.0] * DEPTH, texts=5))
    assert fitted == [round(float(GRID[-1]), 3)] * DEPTH


# Reliability


def test_bins_of_an_honest_drafter_hold_what_they_promise(scripted, target):
    """Each within 4 standard errors of a share."""
    config = DDTreeConfig(tree_budget=16, draft_text_weight=0.0)
    bins = reliability(make_drafter(target), target, honest_text([1.0]), config)
    assert sum(each.nodes for each in bins) == 30 * 79 * 16
    for each in bins:
        error = (each.predicted * (1 - each.predicted) / each.nodes) ** 0.5
        assert abs(each.predicted - each.observed) < 4 * error + 1e-3
    assert [each.predicted for each in bins] == sorted(each.predicted for each in bins)
    sharper = reliability(make_drafter(target), target, honest_text([2.0]), config)
    assert calibration_error(sharper) > 3 * calibration_error(bins)


def test_an_oracle_is_in_the_last_bin_and_right(scripted, target):
    tokens = torch.arange(20)
    logits = torch.full((19, DEPTH, VOCAB), -50.0)
    for index in range(DEPTH):
        logits[torch.arange(19), index, labels_of(tokens, index)] = 50.0
    bins = reliability(
        make_drafter(target), target, [make_item(logits, tokens)], DDTreeConfig(tree_budget=1, draft_text_weight=0.0)
    )
    assert bins == [Bin(predicted=pytest.approx(1.0), observed=1.0, nodes=19)]
    assert calibration_error(bins) == pytest.approx(0.0)


def test_nodes_are_counted_and_observed_is_the_share_on_the_path(scripted, target):
    """One anchor, two candidates of probability 3/4 and 1/4; the text goes through the second."""
    logits = torch.full((1, 1, VOCAB), -torch.inf)
    logits[0, 0, 7], logits[0, 0, 9] = 3.0, 1.0
    logits = logits.clamp(min=0).log()
    config = DDTreeConfig(tree_budget=2, draft_text_weight=0.0)
    bins = reliability(make_drafter(target), target, [make_item(logits, torch.tensor([1, 9]))], config)
    assert bins == [Bin(pytest.approx(0.25), 1.0, 1), Bin(pytest.approx(0.75), 0.0, 1)]
    assert calibration_error(bins) == pytest.approx(0.75)


def test_calibration_error_of_no_nodes_is_0():
    assert calibration_error([]) == 0.0


def test_calibration_lowers_the_error_of_an_overconfident_drafter(scripted, target):
    scales = [3.0, 2.5, 2.0, 2.0, 2.0, 2.0, 2.0]
    drafter, config = make_drafter(target), DDTreeConfig(tree_budget=16, draft_text_weight=0.0)
    fitted = torch.tensor(fit_depth_temperatures(drafter, target, honest_text(scales, seed=0)))[:, None]
    fresh = honest_text(scales, texts=8, seed=1)
    calibrated = [make_item(each.drafts.logits, each.drafts.tokens[1:], fitted) for each in fresh]
    before, after = (reliability(drafter, target, each, config) for each in (fresh, calibrated))
    assert calibration_error(after) < 0.5 * calibration_error(before)


# Use


def random_transition(target, **overrides):
    drafter = make_drafter(target, transition_rank=6, **overrides)
    torch.nn.init.normal_(drafter.transition.up_proj.weight, generator=torch.Generator().manual_seed(2))
    return drafter


def real_features(target, count):
    prompts = torch.randint(2, VOCAB, (count, 6), generator=torch.Generator().manual_seed(3))
    rows = target.generate(prompts, do_sample=False, max_new_tokens=24, attention_mask=torch.ones_like(prompts))
    return compute_features(target, [TokenSequence(row, 6, None) for row in rows], TAPS)


TEMPERATURES = torch.tensor([0.5, 2.0, 1.0])[:, None]


def marginals(temperatures, **fields):
    logits = 3 * torch.randn(1, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    return logits, Draft(torch.tensor([[1]]), logits, (), temperatures).marginals(DDTreeConfig(tree_budget=9, **fields))


def test_trees_use_the_calibrated_temperatures():
    logits, each = marginals(TEMPERATURES)
    expected = (logits / TEMPERATURES).log_softmax(-1).topk(9).values
    torch.testing.assert_close(each.log_probs, expected)


def test_without_calibration_the_temperature_is_1():
    logits, each = marginals(None)
    torch.testing.assert_close(each.log_probs, logits.log_softmax(-1).topk(9).values)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draft_temperature_overrides_the_calibration(temperature):
    logits, each = marginals(TEMPERATURES, draft_temperature=temperature)
    torch.testing.assert_close(each.log_probs, (logits / temperature).log_softmax(-1).topk(9).values)


def test_a_shallower_draft_keeps_its_depths_temperatures():
    logits, whole = marginals(TEMPERATURES)
    cut = Draft(torch.tensor([[1]]), logits, (), TEMPERATURES).cut(2).marginals(DDTreeConfig(tree_budget=9))
    assert torch.equal(cut.log_probs, whole.log_probs[:, :2])


def test_decoding_and_replay_follow_the_calibration(target):
    """Tokens per round over held text, counted by the replay, are those of decoding, calibrated and not."""
    features = real_features(target, 8)
    counts = {}
    for name, temperatures in (("calibrated", [0.3, 3.0, 0.3, 3.0, 0.3, 3.0, 0.3]), ("raw", None)):
        drafter = random_transition(target, depth_temperatures=temperatures)
        tokens = rounds = 0
        for item in features:
            config = DDTreeConfig(
                tree_budget=16,
                max_new_tokens=item.sequence.answer_length,
                do_sample=False,
                return_dict_in_generate=True,
            )
            prompt = item.sequence.tokens[None, :6]
            result = target.generate(prompt, assistant_model=drafter, generation_config=config)
            assert result.sequences[0].tolist() == item.sequence.tokens.tolist()
            tokens, rounds = tokens + sum(result.acceptance_lengths[1:]), rounds + result.rounds - 1
        replayed = held_acceptance(drafter, target, features, held_configs(drafter))["tree-16"]
        assert replayed == pytest.approx(tokens / rounds)
        counts[name] = rounds
    assert counts["calibrated"] != counts["raw"]
