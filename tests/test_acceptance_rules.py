"""The classical acceptance rules in the loop: their law, what they return, where they stop, what they refuse."""

import pytest
import torch
from keyed import exact_law, p_value
from stubs import decode, greedy, make_drafter, make_emissions, make_stub, make_target
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, SynthIDTextWatermarkingConfig
from transformers.generation import logits_process as library

from hf_ddtree import DDTreeConfig
from hf_ddtree.drafting.draft import Draft
from hf_ddtree.rules import make_rule

RULES = {
    "token": {"acceptance": "token", "tree_shape": "chain"},
    "block": {"acceptance": "block", "tree_shape": "chain"},
    "recursive": {"acceptance": "recursive"},
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)

# The law: complete enumeration of all texts of 4 tokens from a vocabulary of 4, chi-square, p > 1e-4 with fixed seeds.
# The rules run in the loop's order on tables instead of models: the first token comes from a tree of the root alone,
# the next from trees of depth 2 and, where drafts were rejected, 1 and 0.

VOCAB, STEPS, DRAWS = 4, 4, 800
START = torch.tensor([[3, 1]])


class Tables:
    """A target and a drafter: random logits after each text of up to `STEPS` tokens, and for each depth."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.logits = 1.5 * torch.randn(sum(VOCAB**n for n in range(STEPS + 1)), VOCAB, generator=generator)
        self.drafts = 1.5 * torch.randn(1, STEPS, VOCAB, generator=generator)

    def after(self, texts):
        """[rows, vocab] logits after texts [rows, length]."""
        numbers = torch.zeros(len(texts), dtype=torch.int64)
        for column in texts.unbind(1):
            numbers = VOCAB * numbers + column + 1
        return self.logits[numbers]


def text_of(tables, seed, processors, figures, **fields):
    """One text [STEPS] drawn by a rule, in the order of the decoding loop."""
    config = DDTreeConfig(do_sample=True, max_length=START.shape[1] + STEPS, tree_budget=5, **fields)
    emissions = make_emissions(START, config, processors, [MaxLengthCriteria(config.max_length)])
    (emission,), rule = emissions.groups, make_rule(config, emissions, seed)
    tree = rule.build(START.new_zeros(1, 1), None)
    while True:
        new = emission.ids[:, START.shape[1] :]
        paths = [path[:depth] for path, depth in zip(tree.path_tokens()[0], tree.depths[0], strict=True)]
        logits = [tables.after(torch.cat([new[0], path])[None]) for path in paths]
        (accepted,) = rule.accept(tree, torch.cat(logits)[None])
        figures["drafted"] += tree.num_nodes - 1
        figures["accepted"] += len(accepted.path) - 1
        if accepted.finished:
            return emission.ids[0, START.shape[1] :].tolist()
        depth = emission.remaining - 1
        root = emission.ids[:, -1:]
        tree = rule.build(root, Draft(root, tables.drafts[:, :depth]) if depth else None)


def warpers(temperature=1.0, top_k=VOCAB):
    return [library.TemperatureLogitsWarper(temperature), library.TopKLogitsWarper(top_k)]


LAWS = {
    "T=1": ([], {}),
    "T=1.3 top_k=3": (warpers(1.3, 3), {"temperature": 1.3}),
    "kappa=0.5": ([], {"draft_temperature": 0.5}),
    "repetition": ([library.RepetitionPenaltyLogitsProcessor(2.0), *warpers(0.8)], {"temperature": 0.8}),
    "2-grams, bias": (
        [library.SequenceBiasLogitsProcessor([[[3, 1], 2.0], [[2], -1.0]]), library.NoRepeatNGramLogitsProcessor(2)],
        {},
    ),
}


def law_of(tables, processors):
    def following(texts):
        rows = [torch.cat([START, text[None]], dim=1) for text in texts]
        scores = [LogitsProcessorList(processors)(row, tables.after(row[:, 2:])) for row in rows]
        return torch.cat(scores).softmax(-1)

    return exact_law(following, VOCAB, STEPS)


@rules
@pytest.mark.parametrize("processors, fields", LAWS.values(), ids=LAWS)
def test_fault_06_07_08_law(rule, processors, fields):
    tables, figures = Tables(), {"drafted": 0, "accepted": 0}
    counts = torch.zeros([VOCAB] * STEPS, dtype=torch.float64)
    for seed in range(DRAWS):
        counts[tuple(text_of(tables, seed, processors, figures, **fields, **rule))] += 1
    assert p_value(counts, law_of(tables, processors)) > 1e-4
    assert p_value(counts, law_of(tables, [*processors, *warpers(1.5)])) < 1e-4  # the test sees such an error
    assert 0.1 < figures["accepted"] / figures["drafted"] < 0.9


def test_block_verification_is_another_rule_than_the_token_wise_one():
    """Of one law, but with other texts: it goes past tokens that fail, so that it accepts more of the same drafts."""
    texts, accepted = {}, {}
    for name in ("token", "block"):
        figures = {"drafted": 0, "accepted": 0}
        seeds = range(DRAWS // 2)
        texts[name] = [text_of(Tables(), seed, [], figures, **RULES[name]) for seed in seeds]
        accepted[name] = figures["accepted"] / figures["drafted"]
    assert 0.7 < sum(a == b for a, b in zip(*texts.values(), strict=True)) / len(seeds) < 1
    assert accepted["block"] > accepted["token"]


WORTHLESS = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@rules
@pytest.mark.parametrize("value", WORTHLESS.values(), ids=WORTHLESS)
def test_law_with_drafts_that_are_no_distribution(rule, value):
    """The second depth's drafts; the first depth's only ever propose one token, so that siblings run out."""
    tables, figures = Tables(), {"drafted": 0, "accepted": 0}
    tables.drafts[:, 0, 1:] = -torch.inf
    tables.drafts[:, 1:] = value
    counts = torch.zeros([VOCAB] * STEPS, dtype=torch.float64)
    for seed in range(DRAWS // 2):
        counts[tuple(text_of(tables, seed, [], figures, **rule))] += 1
    assert p_value(counts, law_of(tables, [])) > 1e-4


KAPPAS = {
    "default": ({"temperature": 3.0}, 3.0),
    "kappa=0.5": ({"temperature": 2.0, "draft_temperature": 0.5}, 0.5),
}


@rules
@pytest.mark.parametrize("fields, kappa", KAPPAS.values(), ids=KAPPAS)
def test_fault_08_drafts_are_drawn_at_the_draft_temperature(rule, fields, kappa):
    """The first draft of each depth, over 400 seeds; by default at the target's temperature."""
    drafts, counts = Tables().drafts[:, :2], torch.zeros(2, VOCAB, dtype=torch.float64)
    for seed in range(400):
        config = DDTreeConfig(do_sample=True, max_length=9, tree_budget=6, **rule, **fields)
        rule_of_call = make_rule(config, make_emissions(START, config), seed)
        tree = rule_of_call.build(START[:, -1:], Draft(START[:, -1:], drafts))
        for depth in (1, 2):
            counts[depth - 1, tree.tokens[tree.depths == depth][0]] += 1
    for depth in (0, 1):
        law = (drafts[0, depth].double() / kappa).softmax(-1)
        assert p_value(counts[depth], law) > 1e-4 > p_value(counts[depth], (drafts[0, depth].double()).softmax(-1))


PROMPT = torch.tensor([[6, 3, 2, 7]])


@torch.no_grad()
@rules
def test_fault_06_law_of_a_model(rule):
    """The whole call: all texts of 3 tokens from a vocabulary of 8, of which a tree may hold the second."""
    target = make_target("qwen3", vocab_size=8, initializer_range=0.2)
    drafter = make_stub(target, "rand", greedy(target, PROMPT, 6)[0])
    counts = torch.zeros(8, 8, 8, dtype=torch.float64)
    for seed in range(300):
        tokens = decode(target, drafter, PROMPT, do_sample=True, seed=seed, max_new_tokens=3, temperature=0.7, **rule)
        counts[tuple(tokens[0, 4:].tolist())] += 1

    def law(temperature):
        def following(texts):
            logits = target(torch.cat([PROMPT.expand(len(texts), -1), texts], dim=1)).logits[:, -1]
            return (logits / temperature).softmax(-1)

        return exact_law(following, 8, 3).sum(0)

    assert p_value(counts.sum(0), law(0.7)) > 1e-4
    assert p_value(counts.sum(0), law(1.2)) < 1e-4


# What is returned

IDS = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
NEW = 24


@pytest.fixture(scope="module")
def soft():
    return make_target("qwen3", seed=10, initializer_range=0.2)


@pytest.fixture(scope="module")
def drafter(soft):
    return make_drafter(soft)


SETTINGS = {
    "plain": ({"top_k": 0}, []),
    "warpers": ({"temperature": 0.7, "top_k": 20}, warpers(0.7, 20)),
    "repetition": (
        {"repetition_penalty": 1.6, "top_k": 0, "temperature": 0.5},
        [library.RepetitionPenaltyLogitsProcessor(1.6), library.TemperatureLogitsWarper(0.5)],
    ),
    "1-grams": ({"no_repeat_ngram_size": 1, "top_k": 0}, [library.NoRepeatNGramLogitsProcessor(1)]),
    "encoder repetition": (
        {"encoder_repetition_penalty": 3.0, "top_k": 0},
        [library.EncoderRepetitionPenaltyLogitsProcessor(3.0, IDS)],
    ),
}


@torch.no_grad()
@rules
@pytest.mark.parametrize("fields, processors", SETTINGS.values(), ids=SETTINGS)
def test_fault_26_scores_and_logits_are_those_of_the_committed_tokens(soft, drafter, rule, fields, processors):
    result = decode(soft, drafter, IDS, do_sample=True, seed=3, max_new_tokens=NEW, **OUTPUTS, **fields, **rule)
    text, start = result.sequences, IDS.shape[1]
    assert max(result.acceptance_lengths) > 1 and sum(result.acceptance_lengths) == NEW == text.shape[1] - start
    torch.testing.assert_close(torch.cat(result.logits), soft(text).logits[0, start - 1 : -1], atol=1e-4, rtol=1e-4)
    for step in range(NEW):
        prefix = text[:, : start + step]
        expected = LogitsProcessorList(processors)(prefix, result.logits[step].clone())
        assert torch.equal(result.scores[step], expected)
        assert result.scores[step][0, text[0, start + step]] > -torch.inf
    chances = soft.compute_transition_scores(text, result.scores, normalize_logits=True)
    rows = torch.cat(result.scores).log_softmax(-1)
    torch.testing.assert_close(chances[0], rows[torch.arange(NEW), text[0, start:]])


@torch.no_grad()
@rules
def test_repetition_penalty_over_a_padded_prompt(soft, drafter, rule):
    fields = {"do_sample": True, "seed": 4, "max_new_tokens": NEW, "repetition_penalty": 1.6, "top_k": 0}
    whole = decode(soft, drafter, IDS[:, 3:], **fields, **rule)
    padded = torch.cat([IDS[:, 3:4].expand(-1, 3), IDS[:, 3:]], dim=1)  # a token the penalty is on in any case
    assert decode(soft, drafter, padded, attention_mask=MASK, **fields, **rule)[0, 3:].tolist() == whole[0].tolist()


# Stops


@rules
def test_fault_03_generation_ends_with_the_first_end_token(soft, drafter, rule):
    ends, lengths = list(range(0, 64, 8)), set()
    for seed in range(8):
        fields = {"do_sample": True, "seed": seed, **OUTPUTS, **rule}
        whole = decode(soft, drafter, IDS, max_new_tokens=NEW, **fields).sequences[0].tolist()
        places = [place for place in range(IDS.shape[1], len(whole)) if whole[place] in ends]
        result = decode(soft, drafter, IDS, max_new_tokens=NEW, eos_token_id=ends, **fields)
        assert result.sequences[0].tolist() == (whole[: places[0] + 1] if places else whole)
        count = result.sequences.shape[1] - IDS.shape[1]
        assert len(result.scores) == len(result.logits) == sum(result.acceptance_lengths) == count
        lengths.add(count)
    assert len(lengths) > 3


@rules
@pytest.mark.parametrize("budget", [0, 1, 9])
def test_every_length(soft, drafter, rule, budget):
    for length in range(1, 12):
        fields = {"do_sample": True, "seed": 3, "max_new_tokens": length, "tree_budget": budget, **rule}
        assert decode(soft, drafter, IDS, **fields).shape[1] == IDS.shape[1] + length


@rules
def test_nothing_is_asked_of_what_comes_after_the_end(soft, rule):
    """No token may follow the end token, so no score does either; an accepted draft of it must still end the text."""
    stub = make_stub(soft, "rand", IDS[0])
    stub.logits_for = lambda committed, real: torch.zeros_like(real).index_fill(-1, torch.tensor([9]), 6.0)
    fields = {"do_sample": True, "max_new_tokens": NEW, "eos_token_id": 9, "sequence_bias": {(9,): 6.0}, **rule}
    for seed in range(12):
        text = decode(soft, stub, IDS, seed=seed, **fields)[0].tolist()
        again = decode(soft, stub, IDS, seed=seed, bad_words_ids=[[9, token] for token in range(64)], **fields)
        assert again[0].tolist() == text and text[-1] == 9


@rules
def test_a_token_that_nothing_may_follow_ends_in_an_error(soft, drafter, rule):
    """Wherever it comes, and even if drafts behind it would be welcome."""
    words = [[token, other] for token in range(0, 64, 8) for other in range(64)]
    texts, errors = [], 0
    for seed in range(12):
        try:
            fields = {"do_sample": True, "seed": seed, "max_new_tokens": 12, "temperature": 2.0, **rule}
            texts.append(decode(soft, drafter, IDS, bad_words_ids=words, **fields)[0, IDS.shape[1] : -1])
        except ValueError as error:
            assert "left no token to sample" in str(error)
            errors += 1
    assert errors and texts
    assert all(bool((text % 8 > 0).all()) for text in texts)


# Refusals


class Custom(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
CHAIN, TREE = ("token", "block"), ("recursive",)
REFUSED = {
    "greedy": ({"do_sample": False}, (*CHAIN, *TREE), ("do_sample", "False", "walk")),
    "custom": ({"logits_processor": LogitsProcessorList([Custom()])}, (*CHAIN, *TREE), ("Custom", "walk")),
    "grammar": ({"prefix_allowed_tokens_fn": lambda batch, ids: [1]}, (*CHAIN, *TREE), ("PrefixConstrained", "walk")),
    "guidance": ({"guidance_scale": 2.0}, (*CHAIN, *TREE), ("UnbatchedClassifierFreeGuidance", "walk")),
    "SynthID": ({"watermarking_config": SYNTHID}, (*CHAIN, *TREE), ("SynthIDTextWatermark", "walk")),
    "coupling": ({"draft_noise_scale": 0.5}, (*CHAIN, *TREE), ("`draft_noise_scale=0.5`", "leave it unset")),
    "top_k": ({"tree_top_k": 4}, CHAIN, ("`tree_top_k=4`", "leave it unset")),
    "tree": ({"tree_shape": "best_first"}, CHAIN, ('`tree_shape="best_first"`', '`tree_shape="chain"`')),
    "chain": ({"tree_shape": "chain"}, TREE, ('`tree_shape="chain"`', '`tree_shape="best_first"`')),
}
REFUSALS = [(name, rule) for name, (_, names, _) in REFUSED.items() for rule in names]


@pytest.mark.parametrize("name, rule", REFUSALS, ids=[f"{name} {rule}" for name, rule in REFUSALS])
def test_refused_before_any_forward(soft, drafter, name, rule):
    fields, _, parts = REFUSED[name]
    forwards = []
    hook = soft.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError) as error:
        decode(soft, drafter, IDS, **{"do_sample": True, "max_new_tokens": 4, **RULES[rule], **fields})
    hook.remove()
    assert not forwards
    assert rule in str(error.value) and all(part in str(error.value) for part in parts), str(error.value)


@rules
def test_what_the_refusals_leave(soft, drafter, rule):
    """No coupling is not refused, nor are the known processors; with a tree, nor is a limit of its width."""
    fields = {"draft_noise_scale": 0, "repetition_penalty": 1.2, "top_p": 0.9, "sequence_bias": {(4,): 1.0}}
    fields |= {"tree_top_k": 2} if rule["acceptance"] == "recursive" else {}
    tokens = decode(soft, drafter, IDS, do_sample=True, max_new_tokens=8, **fields, **rule)
    assert tokens.shape[1] == IDS.shape[1] + 8
