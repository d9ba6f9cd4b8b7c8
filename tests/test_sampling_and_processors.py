"""Sampling and logits processing happen token by token exactly as in plain decoding."""

import itertools

import pytest
import torch
from keyed import Recorder, drafter_of, exact_law, p_value, sampled
from stubs import decode, greedy, make_stub, make_target
from transformers import LogitsProcessor, LogitsProcessorList, set_seed

from hf_ddtree import rules

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])
START = PROMPT.shape[1]
KINDS = ("oracle-1", "oracle-2", "rand", "real")


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


@pytest.fixture(scope="module")
def reference(target):
    return greedy(target, PROMPT, 24)[0]


@pytest.fixture(scope="module")
def soft():
    """A target with flatter distributions, so that sampling is not greedy in disguise."""
    return make_target("qwen3", seed=10, initializer_range=0.2)


# Sampling

SETTINGS = {
    "T=0.3": {"temperature": 0.3},
    "T=1": {"temperature": 1.0},
    "T=2": {"temperature": 2.0, "top_k": 0},
    "top_k=3": {"top_k": 3, "temperature": 1.5},
    "top_p": {"top_p": 0.8, "temperature": 1.5},
    "min_p": {"min_p": 0.1, "temperature": 1.5},
    "with penalty": {"repetition_penalty": 1.3, "top_k": 3, "temperature": 0.7},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_fault_33_a_seed_gives_the_text_of_plain_decoding_with_its_noise(soft, settings, kind):
    for seed, budget in ((0, 16), (1, 3)):
        expected = sampled(soft, PROMPT, 16, seed=seed, **settings)
        sampling = {"do_sample": True, "seed": seed, "tree_budget": budget, **settings}
        tokens = decode(soft, drafter_of(soft, kind, expected[0]), PROMPT, max_new_tokens=16, **sampling)
        assert tokens.tolist() == expected.tolist() != greedy(soft, PROMPT, 16).tolist()


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"min_p": 1.0}], ids=["top_k=1", "min_p=1"])
def test_fault_09_11_sampling_of_one_candidate_is_greedy(target, reference, settings):
    drafter = make_stub(target, "oracle-2", reference)
    tokens = decode(target, drafter, PROMPT, do_sample=True, max_new_tokens=24, **settings)
    assert tokens[0].tolist() == reference.tolist()


def test_fault_09_hot_sampling_gives_many_texts(target, reference):
    drafter = make_stub(target, "oracle-1", reference)
    texts = {
        tuple(decode(target, drafter, PROMPT, do_sample=True, temperature=5.0, max_new_tokens=4)[0].tolist())
        for _ in range(40)
    }
    assert len(texts) > 30


def test_fault_33_set_seed_reproduces_and_seeds_differ(soft):
    reference = greedy(soft, PROMPT, 16)[0]
    drafters = {kind: make_stub(soft, kind, reference) for kind in ("oracle-1", "anti", "rand")}

    def text(seed, kind):
        set_seed(seed)
        return decode(soft, drafters[kind], PROMPT, do_sample=True, max_new_tokens=16).tolist()

    assert text(7, "oracle-1") == text(7, "oracle-1") == text(7, "anti") == text(7, "rand")
    assert text(7, "oracle-1") != text(8, "oracle-1")


@pytest.mark.parametrize("kind", KINDS)
def test_fault_33_greedy_leaves_the_global_generator_alone(target, reference, kind):
    drafter = drafter_of(target, kind, reference)
    before = torch.get_rng_state()
    decode(target, drafter, PROMPT, max_new_tokens=12)
    assert torch.equal(torch.get_rng_state(), before)


# The law itself: exact enumeration on a vocabulary of 8, chi-square, p > 1e-4 with a fixed seed. New tokens 2 and 3 are
# the ones a tree can carry and the bonus token after it.

DRAWS = 800


@torch.no_grad()
def law_of_the_last_two(target, temperature, top_k):
    """[8, 8] exact probabilities of new tokens 2 and 3."""

    def following(texts):
        ids = torch.cat([torch.tensor([[6, 3, 2, 7]]).expand(len(texts), -1), texts], dim=1)
        scores = target(ids).logits[:, -1] / temperature
        threshold = scores.topk(top_k).values[:, -1:]
        return scores.masked_fill(scores < threshold, -torch.inf).softmax(-1)

    return exact_law(following, 8, 3).sum(0)


@pytest.mark.parametrize("kind", ["oracle-1", "rand"])
@pytest.mark.parametrize("temperature, top_k", [(1.0, 8), (2.0, 3)], ids=["T=1", "T=2 top_k=3"])
def test_fault_06_07_08_law(temperature, top_k, kind):
    target = make_target("qwen3", vocab_size=8, initializer_range=0.2)
    prompt = torch.tensor([[6, 3, 2, 7]])
    drafter = make_stub(target, kind, greedy(target, prompt, 6)[0])
    settings = {"temperature": temperature, "top_k": top_k, "tree_budget": 6, "max_new_tokens": 3}
    counts = torch.zeros(8, 8, dtype=torch.float64)
    torch.manual_seed(0)
    for _ in range(DRAWS):
        tokens = decode(target, drafter, prompt, do_sample=True, **settings)
        counts[tokens[0, -2], tokens[0, -1]] += 1
    assert p_value(counts, law_of_the_last_two(target, temperature, top_k)) > 1e-4
    if top_k == 8:  # the test would see a temperature that is off by a half
        assert p_value(counts, law_of_the_last_two(target, 1.5 * temperature, top_k)) < 1e-4


# Logits processors under greedy decoding


def flags(reference):
    """Each option with a value that changes the reference."""
    new = reference[START:].tolist()
    never = next(token for token in range(2, 64) if token not in reference.tolist())
    return {
        "repetition_penalty": {"repetition_penalty": 1.5},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": new[3]},
        "min_length": {"min_length": START + 7, "eos_token_id": new[2]},
        "bad_words_ids": {"bad_words_ids": [[new[4]], [new[8], new[9]]]},
        "suppress_tokens": {"suppress_tokens": [new[0], new[6]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [new[0]]},
        "forced_eos_token_id": {"forced_eos_token_id": never, "eos_token_id": never},
        "sequence_bias": {"sequence_bias": {(never,): 50.0, (never, never): -100.0}},
        "exponential_decay": {"exponential_decay_length_penalty": (4, 3.0), "eos_token_id": never},
    }


FLAGS = list(flags(torch.arange(START + 10)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flag", FLAGS)
def test_fault_10_11_processors(soft, flag, kind):
    options = flags(greedy(soft, PROMPT, 40)[0])[flag]
    expected = greedy(soft, PROMPT, 40, **options)
    without = {"eos_token_id": options["eos_token_id"]} if "eos_token_id" in options else {}
    assert expected.tolist() != greedy(soft, PROMPT, 40, **without).tolist()
    tokens = decode(soft, drafter_of(soft, kind, expected[0]), PROMPT, max_new_tokens=40, **options)
    assert tokens.tolist() == expected.tolist()


class Stateful(LogitsProcessor):
    """Bans the token it saw win last time; fails if the sequence did not grow by what it allowed."""

    def __init__(self):
        self.length, self.winner = START, None

    def __call__(self, input_ids, scores):
        assert input_ids.shape == (1, self.length)
        assert self.winner is None or int(input_ids[0, -1]) == self.winner
        scores = scores.clone()
        if self.winner is not None:
            scores[:, (self.winner + self.length) % 64 :: 3] -= 4.0
        self.length, self.winner = self.length + 1, int(scores.argmax())
        return scores


@pytest.mark.parametrize("kind", KINDS)
def test_fault_10_processor_sees_the_committed_prefix_and_the_path(target, reference, kind):
    plain, ours = Recorder(), Recorder()
    greedy(target, PROMPT, 20, logits_processor=LogitsProcessorList([plain]))
    drafter = drafter_of(target, kind, reference)
    decode(target, drafter, PROMPT, max_new_tokens=20, logits_processor=LogitsProcessorList([ours]))
    assert ours.ids == plain.ids == [[reference[: START + n].tolist()] for n in range(20)]
    torch.testing.assert_close(torch.cat(ours.scores), torch.cat(plain.scores), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_57_stateful_processor(target, reference, kind):
    expected = greedy(target, PROMPT, 20, logits_processor=LogitsProcessorList([Stateful()]))
    assert expected[0].tolist() != reference[: START + 20].tolist()
    drafter = drafter_of(target, kind, expected[0])
    tokens = decode(target, drafter, PROMPT, max_new_tokens=20, logits_processor=LogitsProcessorList([Stateful()]))
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_fault_12_grammar_follows_the_path(target, reference, kind):
    def make_rule():
        calls = []

        def even_after_odd(batch, ids):
            calls.append((batch, ids.tolist()))
            return list(range(1 - int(ids[-1]) % 2, 64, 2))

        return even_after_odd, calls

    (plain, plain_calls), (ours, our_calls) = make_rule(), make_rule()
    expected = greedy(target, PROMPT, 20, prefix_allowed_tokens_fn=plain)
    assert all((a + b) % 2 for a, b in itertools.pairwise(expected[0, START - 1 :].tolist()))
    drafter = drafter_of(target, kind, expected[0])
    tokens = decode(target, drafter, PROMPT, max_new_tokens=20, prefix_allowed_tokens_fn=ours)
    assert tokens.tolist() == expected.tolist()
    assert our_calls == plain_calls


# Returned scores

OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
SCORED = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.5},
    "sampling": {"seed": 3, "temperature": 0.5},
    "sampling with penalty": {"seed": 3, "temperature": 2.0, "top_k": 5, "repetition_penalty": 1.5},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SCORED.values(), ids=SCORED)
def test_fault_26_scores_and_logits(soft, settings, kind):
    """Sampling returns what the noise was added to, which in plain decoding a processor before the noise sees."""
    sampling, seen = "seed" in settings, Recorder()
    if sampling:
        plain = sampled(soft, PROMPT, 14, around=((), [seen]), **OUTPUTS, **settings)
    else:
        plain = greedy(soft, PROMPT, 14, logits_processor=LogitsProcessorList([seen]), **OUTPUTS, **settings)
    drafter, asked = drafter_of(soft, kind, plain.sequences[0]), {"max_new_tokens": 14, "do_sample": sampling}
    ours = decode(soft, drafter, PROMPT, **asked, **OUTPUTS, **settings)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for mine, theirs in ((ours.scores, seen.scores), (ours.logits, plain.logits)):
        assert isinstance(mine, tuple) and len(mine) == len(theirs) == 14
        assert all(row.shape == (1, 64) and row.dtype == torch.float32 for row in mine)
        torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), atol=1e-4, rtol=1e-4)
    assert bool(settings) != torch.equal(torch.cat(ours.scores), torch.cat(ours.logits))
    chances, expected = (
        soft.compute_transition_scores(plain.sequences, tuple(scores), normalize_logits=True)
        for scores in (ours.scores, seen.scores)
    )
    torch.testing.assert_close(chances, expected, atol=1e-4, rtol=1e-4)
    assert bool((chances < 0).all() and chances.isfinite().all())


class InPlace(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, ::3] = -50.0
        return scores


@torch.no_grad()
def test_fault_26_raw_logits_survive_a_processor_that_works_in_place(soft):
    """Against a forward, since plain decoding returns raw logits that such a processor has overwritten."""
    processors = LogitsProcessorList([InPlace()])
    expected = greedy(soft, PROMPT, 14, logits_processor=processors)
    drafter = make_stub(soft, "oracle-2", expected[0])
    ours = decode(soft, drafter, PROMPT, max_new_tokens=14, logits_processor=processors, **OUTPUTS)
    assert ours.sequences.tolist() == expected.tolist()
    raw = torch.cat(ours.logits)
    torch.testing.assert_close(raw, soft(expected).logits[0, START - 1 : -1], atol=1e-4, rtol=1e-4)
    assert bool((torch.cat(ours.scores)[:, ::3] == -50.0).all())


@pytest.mark.parametrize("acceptance", ["walk", "recursive"])
def test_fault_26_raw_logits_survive_processing_of_a_whole_tree_in_place(soft, reference, acceptance, monkeypatch):
    monkeypatch.setattr(rules.WalkRule, "accept", rules.WalkRule.accept_at_once)
    monkeypatch.setattr(rules, "process_tree", lambda processors, ids, tree, scores: scores.neg_())
    drafter, sampling = make_stub(soft, "oracle-2", reference), {"do_sample": True, "seed": 3, "acceptance": acceptance}
    result = decode(soft, drafter, PROMPT, max_new_tokens=14, **sampling, **OUTPUTS)
    assert torch.equal(torch.cat(result.scores), -torch.cat(result.logits))
    # Rows of their own: a view of one would keep the whole tree's rows.
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in (*result.scores, *result.logits))


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_fault_26_only_what_was_asked_is_returned(target, reference, name):
    drafter = make_stub(target, "oracle-1", reference)
    asked = {"return_dict_in_generate": True, name: True}
    result = decode(target, drafter, PROMPT, max_new_tokens=6, **asked)
    assert (result.scores is not None, result.logits is not None) == (name == "output_scores", name == "output_logits")
