"""Sampling gives, token for token, what stock greedy decoding gives with the same warpers and the keyed noise."""

import itertools

import pytest
import torch
from keyed import Recorder, drafter_of, sampled
from stubs import CORE_FAMILIES, FAMILIES, STUBS, decode, greedy, make_stub, make_target
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkingConfig,
)
from transformers.generation.logits_process import LogitNormalization

from hf_ddtree import DDTreeConfig, plain_sampling_processors

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])
START = PROMPT.shape[1]
NEW = 20
KINDS = (*STUBS, "real")
BUDGETS = (1, 2, 3, 5, 8, 13, 21, 34, 64)
SAMPLING = {"do_sample": True, "max_new_tokens": NEW}


def soft_target(family):
    """A target with flat distributions, so that sampling is not greedy in disguise."""
    fields, soft = FAMILIES[family], {"initializer_range": 0.2}
    if "text_config" in fields:
        return make_target(family, text_config={**fields["text_config"], **soft})
    return make_target(family, seed=10, **soft)


@pytest.fixture(scope="module")
def soft():
    return soft_target("qwen3")


@pytest.fixture(scope="module")
def plain(soft):
    """The text of `sampled`, computed once per setting."""
    texts = {}

    def text(**settings):
        key = repr(sorted(settings.items()))
        if key not in texts:
            texts[key] = sampled(soft, PROMPT, NEW, **settings)[0].tolist()
        return texts[key]

    return text


# Families, drafters, budgets

CASES = ((0, 0.3), (1, 1.0), (2, 2.0))  # seed, temperature


@pytest.fixture(scope="module", params=CORE_FAMILIES)
def family(request):
    target = soft_target(request.param)
    texts = [sampled(target, PROMPT, NEW, seed, temperature=temperature) for seed, temperature in CASES]
    others = [sampled(target, PROMPT, NEW, seed + 3, temperature=temperature) for seed, temperature in CASES]
    greedy_text = greedy(target, PROMPT, NEW)
    assert len({tuple(text[0].tolist()) for text in (greedy_text, *texts, *others)}) == 7
    return list(CORE_FAMILIES).index(request.param), target, texts


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_with_every_drafter(family, kind):
    """Over the cases every budget has its turn with every family."""
    number, target, texts = family
    for index, (seed, temperature) in enumerate(CASES):
        budget = BUDGETS[(number + KINDS.index(kind) + 3 * index) % len(BUDGETS)]
        drafter = drafter_of(target, kind, texts[index][0])
        settings = {"seed": seed, "temperature": temperature, "tree_budget": budget}
        tokens = decode(target, drafter, PROMPT, **SAMPLING, **settings)
        assert tokens.tolist() == texts[index].tolist()


@pytest.mark.parametrize("budget", [0, 7, 64])
def test_every_length(soft, plain, budget):
    reference = plain(seed=5)
    drafter = make_stub(soft, "oracle-2", torch.tensor(reference))
    for length in range(1, NEW + 1):
        tokens = decode(soft, drafter, PROMPT, do_sample=True, seed=5, max_new_tokens=length, tree_budget=budget)
        assert tokens[0].tolist() == reference[: START + length]


# Warpers

SETTINGS = {
    "T=0.3": {"temperature": 0.3},
    "T=0.7": {"temperature": 0.7},
    "T=1.5": {"temperature": 1.5},
    "T=2 top_k=0": {"temperature": 2.0, "top_k": 0},
    "top_k=3": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.3},
    "epsilon": {"epsilon_cutoff": 0.03},
    "eta": {"eta_cutoff": 0.9},
    "top_h": {"top_h": 0.3},
    "all": {"temperature": 0.8, "top_k": 30, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 0.01},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_warpers(soft, plain, settings, kind):
    expected = plain(seed=4, **settings)
    assert expected != plain(seed=4) and expected != plain(seed=3, **settings)
    assert expected != greedy(soft, PROMPT, NEW)[0].tolist()
    drafter = drafter_of(soft, kind, torch.tensor(expected))
    assert decode(soft, drafter, PROMPT, **SAMPLING, seed=4, **settings)[0].tolist() == expected


# How drafts are made changes no token

DRAFTING = {
    "chain": {"tree_shape": "chain"},
    "top_k=2": {"tree_top_k": 2},
    "scale=0": {"draft_noise_scale": 0},
    "scale=0.5": {"draft_noise_scale": 0.5},
    "scale=1": {"draft_noise_scale": 1.0},
    "scale=2": {"draft_noise_scale": 2.0},
    "kappa=0.3": {"draft_temperature": 0.3},
    "kappa=3": {"draft_temperature": 3.0},
    "chain scale=0": {"tree_shape": "chain", "draft_noise_scale": 0.0, "draft_temperature": 1.0},
    "scale=1 kappa=0.3 top_k=3": {"draft_noise_scale": 1.0, "draft_temperature": 0.3, "tree_top_k": 3},
    "block of 3": {"draft_block_size": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafting", DRAFTING.values(), ids=DRAFTING)
def test_drafting_changes_no_token(soft, plain, drafting, kind):
    for seed, temperature in ((6, 0.5), (7, 1.5)):
        expected = plain(seed=seed, temperature=temperature)
        drafter = drafter_of(soft, kind, torch.tensor(expected))
        settings = {"seed": seed, "temperature": temperature, **drafting}
        assert decode(soft, drafter, PROMPT, **SAMPLING, **settings)[0].tolist() == expected


# Penalties and constraints


def flags(text):
    """Each option with a value that changes the sampled text."""
    new = text[START:]
    end = next(token for token in range(2, 64) if token not in text)
    return {
        "repetition_penalty": {"repetition_penalty": 1.8},
        "no_repeat_ngram": {"no_repeat_ngram_size": 1},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
        "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
        "bad_words": {"bad_words_ids": [[new[4]], [new[8], new[9]]]},
        "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": new[3]},
        "min_length": {"min_length": START + 7, "eos_token_id": new[2]},
        "sequence_bias": {"sequence_bias": {(end,): 5.0, (end, end): -100.0}},
        "forced_eos": {"forced_eos_token_id": end, "eos_token_id": end},
        "forced_bos": {"forced_bos_token_id": end},
        "suppress": {"suppress_tokens": [new[0], new[6]]},
        "suppress_at_begin": {"begin_suppress_tokens": [new[0]]},
        "exponential_decay": {"exponential_decay_length_penalty": (4, 3.0), "eos_token_id": end},
        "two penalties and warpers": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "top_k": 9, "top_p": 0.9},
    }


FLAGS = list(flags(list(range(START + NEW))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flag", FLAGS)
def test_penalties_and_constraints(soft, flag, kind):
    ids = PROMPT[:, :1] if flag == "forced_bos" else PROMPT  # which it acts on only
    without = sampled(soft, ids, NEW, seed=8)
    options = flags(without[0].tolist() if flag != "forced_bos" else list(range(START + NEW)))[flag]
    expected = sampled(soft, ids, NEW, seed=8, **options)
    assert expected.tolist() != without.tolist()
    tokens = decode(soft, drafter_of(soft, kind, expected[0]), ids, **SAMPLING, seed=8, **options)
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_grammar_follows_the_path_of_row_0(soft, kind):
    def grammar():
        calls = []

        def even_after_odd(batch, ids):
            calls.append((batch, ids.tolist()))
            return list(range(1 - int(ids[-1]) % 2, 64, 2))

        return even_after_odd, calls

    (stock, stock_calls), (ours, our_calls) = grammar(), grammar()
    expected = sampled(soft, PROMPT, NEW, seed=9, prefix_allowed_tokens_fn=stock)
    assert all((a + b) % 2 for a, b in itertools.pairwise(expected[0, START - 1 :].tolist()))
    drafter = drafter_of(soft, kind, expected[0])
    tokens = decode(soft, drafter, PROMPT, **SAMPLING, seed=9, prefix_allowed_tokens_fn=ours)
    assert tokens.tolist() == expected.tolist()
    assert our_calls == stock_calls and {batch for batch, _ in our_calls} == {0}


# Watermarks and normalisation, which `generate` puts after the warpers

WATERMARKS = {
    "lefthash": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash"),
    "selfhash": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2),
    "SynthID": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123, 340, 443, 597, 160]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", WATERMARKS.values(), ids=WATERMARKS)
def test_watermarks(soft, plain, config, kind):
    settings = {"seed": 11, "top_k": 20, "temperature": 1.3}
    after = [config.construct_processor(64, soft.device)]
    expected = sampled(soft, PROMPT, NEW, around=((), after), **settings)
    assert expected[0].tolist() != plain(**settings)
    assert expected.tolist() == sampled(soft, PROMPT, NEW, watermarking_config=config, **settings).tolist()
    drafter = drafter_of(soft, kind, expected[0])
    tokens = decode(soft, drafter, PROMPT, **SAMPLING, watermarking_config=config, **settings)
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_renormalised_scores(soft, plain, kind):
    settings = {"seed": 12, "top_p": 0.7}
    expected = sampled(soft, PROMPT, NEW, around=((), [LogitNormalization()]), **settings)
    assert expected[0].tolist() == plain(**settings)  # a constant per row decides nothing
    drafter = drafter_of(soft, kind, expected[0])
    asked = {"renormalize_logits": True, "return_dict_in_generate": True, "output_scores": True}
    result = decode(soft, drafter, PROMPT, **SAMPLING, **settings, **asked)
    assert result.sequences.tolist() == expected.tolist()
    torch.testing.assert_close(torch.cat(result.scores).logsumexp(-1), torch.zeros(NEW), atol=1e-5, rtol=0)


# Processors with a state


NEGATIVE = torch.tensor([[9, 8, 7, 33]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_classifier_free_guidance(soft, sampling, kind):
    """It runs the target on a context of its own, one token per call."""
    fields = {"seed": 13, "temperature": 0.8} if sampling else {}

    def stock(**options):
        return (sampled if sampling else greedy)(soft, PROMPT, NEW, **fields, **options)

    expected = stock(guidance_scale=2.5, negative_prompt_ids=NEGATIVE)
    others = [stock(), stock(guidance_scale=2.5, negative_prompt_ids=NEGATIVE + 1)]
    assert len({tuple(text[0].tolist()) for text in (expected, *others)}) == 3
    drafter, fields = drafter_of(soft, kind, expected[0]), {**SAMPLING, "do_sample": sampling, **fields}
    config = DDTreeConfig(guidance_scale=2.5, **fields)
    tokens = soft.generate(PROMPT, assistant_model=drafter, generation_config=config, negative_prompt_ids=NEGATIVE)
    assert tokens.tolist() == expected.tolist()
    guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.5, soft, unconditional_ids=NEGATIVE)
    tokens = decode(soft, drafter, PROMPT, logits_processor=LogitsProcessorList([guide]), **fields)
    assert tokens.tolist() == expected.tolist()


class Stateful(LogitsProcessor):
    """Discourages tokens by what it was called with so far, and fails if it is not called once per token, in order."""

    def __init__(self):
        self.seen = PROMPT[0].tolist()[:-1]

    def __call__(self, input_ids, scores):
        assert input_ids[0, :-1].tolist() == self.seen
        self.seen = input_ids[0].tolist()
        scores = scores.clone()
        scores[:, (sum(self.seen) + len(self.seen)) % 3 :: 3] -= 2.0
        return scores


@pytest.mark.parametrize("kind", KINDS)
def test_custom_processors_see_what_plain_decoding_shows_them(soft, plain, kind):
    theirs, ours = Recorder(), Recorder()
    settings = {"seed": 14, "temperature": 1.4, "repetition_penalty": 1.2}
    expected = sampled(soft, PROMPT, NEW, around=([theirs, Stateful()], ()), **settings)
    assert expected[0].tolist() != plain(**settings)
    drafter, processors = drafter_of(soft, kind, expected[0]), LogitsProcessorList([ours, Stateful()])
    tokens = decode(soft, drafter, PROMPT, **SAMPLING, logits_processor=processors, **settings)
    assert tokens.tolist() == expected.tolist()
    assert ours.ids == theirs.ids == [[expected[0, : START + n].tolist()] for n in range(NEW)]
    torch.testing.assert_close(torch.cat(ours.scores), torch.cat(theirs.scores), atol=1e-4, rtol=1e-4)


def test_warpers_left_to_the_models_own_config(soft):
    """The oracle's processors fill open fields as `generate` does: from the model's config, then the defaults."""
    target = soft_target("qwen3")
    target.generation_config.top_k, target.generation_config.temperature = 4, 0.6
    expected = sampled(target, PROMPT, NEW, seed=15)
    assert expected.tolist() == sampled(soft, PROMPT, NEW, seed=15, top_k=4, temperature=0.6).tolist()
    tokens = decode(target, make_stub(target, "oracle-2", expected[0]), PROMPT, **SAMPLING, seed=15)
    assert tokens.tolist() == expected.tolist()


INCOMPARABLE = {
    "no seed": ({"do_sample": True}, "`seed` is None"),
    "greedy": ({"do_sample": False, "seed": 3}, "`do_sample` is False"),
    "drawn drafts": ({"do_sample": True, "seed": 3, "acceptance": "recursive"}, '`acceptance` is "recursive"'),
}


@pytest.mark.parametrize("fields, message", INCOMPARABLE.values(), ids=INCOMPARABLE)
def test_configs_that_plain_decoding_cannot_follow(soft, fields, message):
    with pytest.raises(ValueError, match=message):
        plain_sampling_processors(soft, DDTreeConfig(**fields))


def test_a_seed_given_to_the_plain_processors_beats_the_configs(soft):
    config = DDTreeConfig(do_sample=True)
    assert plain_sampling_processors(soft, config, seed=[5])[-1].seed == [5]
    config.seed = 4
    assert plain_sampling_processors(soft, config)[-1].seed == 4
    assert plain_sampling_processors(soft, config, seed=0)[-1].seed == 0
