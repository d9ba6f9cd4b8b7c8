"""The lookup drafter: what it finds, what it votes for, and that the text is plain decoding's whatever it drafts."""

import math
import random

import pytest
import torch
from keyed import sampled
from stubs import FAMILIES, VOCAB, decode, greedy, make_target
from test_tree_of_paths import prefixes_of

from hf_ddtree import DDTreeConfig
from hf_ddtree.drafting import LookupDrafter, Request, lookup
from hf_ddtree.drafting.lookup import DOUBT, LEAST_CHANCE, LENGTHS, TextIndex
from hf_ddtree.tree import check_trees

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8, 7, 3, 44]])
BATCH = torch.tensor([[0, 0, 0, 0, 7, 3, 44, 7], [5, 6, 5, 6, 5, 6, 5, 6], [0, 0, 31, 9, 17, 31, 9, 40]])


def started(rows=1, **fields):
    drafter = LookupDrafter()
    drafter.start(None, DDTreeConfig(**fields), rows)
    return drafter


def ask(drafter, texts, max_depth=64):
    """The trees for lists of tokens, checked; None where there are none."""
    request = Request([torch.tensor(text) for text in texts], None, max_depth, lambda depth, like: None)
    tree = drafter.draft(request)
    if tree is not None:
        check_trees(tree, request.roots, VOCAB)
    return tree


def chances(text, most, depth):
    """{prefix: chance}, by looking at every place of the text."""
    places = []
    for place in range(1, len(text)):
        length = 0
        while length < min(place, max(LENGTHS)) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length:
            found_by = next(n for n in LENGTHS if n <= length)
            places.append((-found_by, -place, length))
    places = sorted(places)[:most]
    total = sum(2.0**length for _, _, length in places)
    summed = {}
    for _, negative_place, length in places:
        path = text[-negative_place:][:depth]
        for step in range(len(path)):
            chance = 2.0**length / (total + DOUBT) * (2.0**length / (2.0**length + DOUBT)) ** step
            summed[tuple(path[: step + 1])] = summed.get(tuple(path[: step + 1]), 0.0) + chance
    return summed


@pytest.mark.parametrize("seed", range(100))
def test_votes_against_a_search_through_the_whole_text(seed):
    rng = random.Random(seed)
    text = [rng.randrange(rng.choice([2, 3, 6])) for _ in range(rng.randint(1, 70))]
    budget, depth = rng.randint(1, 24), rng.randint(1, 6)
    tree = ask(started(tree_budget=budget), [text], max_depth=depth)
    likely = chances(text, lookup.MOST_PLACES, depth)
    expected = {path: chance for path, chance in likely.items() if chance >= LEAST_CHANCE}
    found = {} if tree is None else prefixes_of(tree)
    assert len(found) == min(budget, len(expected))
    for path, score in found.items():
        assert math.exp(score) == pytest.approx(expected.pop(path))
    assert not expected or math.exp(min(found.values())) >= max(expected.values()) - 1e-9


def test_by_hand():
    """After 1 2 comes 3 once and 4 once, later, and after 9 1 2 comes 4."""
    tree = ask(started(tree_budget=8), [[1, 2, 3, 9, 1, 2, 4, 8, 9, 1, 2]], max_depth=2)
    of_two, of_three = 4 / 14, 8 / 14
    found = {path: math.exp(score) for path, score in prefixes_of(tree).items()}
    assert found == pytest.approx({(4,): of_three, (4, 8): of_three * 0.8, (3,): of_two, (3, 9): of_two * 4 / 6})


def test_a_chain_is_the_longest_and_latest_match_alone():
    text = [1, 2, 3, 9, 1, 2, 4, 8, 9, 1, 2]
    tree = ask(started(tree_shape="chain", tree_budget=3), [text])
    assert list(prefixes_of(tree)) == [(4,), (4, 8), (4, 8, 9)]


@pytest.mark.parametrize("most_tokens", [4, 16, 10**6])
@pytest.mark.parametrize("seed", range(10))
def test_index_equals_one_built_from_scratch(seed, most_tokens, monkeypatch):
    monkeypatch.setattr(lookup, "MOST_TOKENS", most_tokens)
    rng = random.Random(seed)
    text, index = [], TextIndex()
    for _ in range(30):
        new = [rng.randrange(3) for _ in range(rng.choice([0, 1, 1, 2, 5, 40]))]
        text += new
        index.extend(new)
        scratch = TextIndex()
        scratch.extend(text)
        assert vars(index) == vars(scratch)
        assert index.tokens == text[len(text) - len(index.tokens) :]
        assert min(len(text), most_tokens // 2) <= len(index.tokens) <= most_tokens


@pytest.mark.parametrize("draft_block_size", [None, 1, 2, 5])
@pytest.mark.parametrize("budget", [1, 3, 40])
def test_budget_and_depth(budget, draft_block_size):
    drafter = started(tree_budget=budget, draft_block_size=draft_block_size)
    deepest = lookup.MOST_DEPTH if draft_block_size is None else draft_block_size - 1
    text = [1, 2, 3, 4, 5] * 12
    for max_depth in (1, 3, 50):
        tree = ask(drafter, [text], max_depth)
        nodes, depth = (0, 0) if tree is None else (tree.num_nodes - 1, int(tree.depths.max()))
        assert nodes <= budget and depth == min(budget, deepest, max_depth)


def test_rows_are_read_on_dropped_and_replaced():
    drafter = started(rows=3)
    texts = [[1, 2, 1], [4, 5, 6, 4], [7, 8, 9]]
    tree = ask(drafter, texts)
    assert [next(iter(prefixes_of(tree, row))) for row in range(3)] == [(2,), (5,), (9,)]  # the last has no match
    drafter.keep([2, 0])
    tree = ask(drafter, [[7, 8, 9, 7], [1, 2, 1, 2]])
    assert [next(iter(prefixes_of(tree, row))) for row in range(2)] == [(8,), (1,)]
    tree = ask(drafter, [[7, 8, 9, 7], [3, 5, 3]])  # shorter than what was read
    assert [next(iter(prefixes_of(tree, row))) for row in range(2)] == [(8,), (5,)]
    assert ask(drafter, [[7, 8, 9, 7, 6], [3, 5, 3, 1]]) is None


def test_only_new_tokens_are_copied(monkeypatch):
    read, real = [], TextIndex.extend
    monkeypatch.setattr(TextIndex, "extend", lambda self, new: (read.append(list(new)), real(self, new)))
    drafter = started()
    for length in (4, 5, 5, 9):
        ask(drafter, [list(range(10))[:length]])
    assert read == [[0, 1, 2, 3], [4], [], [5, 6, 7, 8]]


# Decoding


@pytest.mark.parametrize("budget", [1, 8, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_plain_decodings(family, budget):
    target = make_target(family)
    result = decode(
        target, LookupDrafter(), PROMPT, tree_budget=budget, max_new_tokens=60, return_dict_in_generate=True
    )
    assert result.sequences.tolist() == greedy(target, PROMPT, 60).tolist()
    assert result.verified_nodes > 0 and not result.fallback_rounds


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gemma3"])
def test_a_padded_batch_whose_rows_end_apart(family):
    target = make_target(family)
    mask = (BATCH != 0).long()
    plain = target.generate(BATCH, attention_mask=mask, do_sample=False, max_new_tokens=40)
    end = int(plain[1, BATCH.shape[1] + 6])  # ends one row early, perhaps others
    fields = {"max_new_tokens": 40, "eos_token_id": end, "pad_token_id": 0}
    expected = target.generate(BATCH, attention_mask=mask, do_sample=False, **fields)
    drafter = LookupDrafter()
    assert decode(target, drafter, BATCH, attention_mask=mask, **fields).tolist() == expected.tolist()
    # The same object again: nothing of the first call is left.
    assert decode(target, drafter, BATCH, attention_mask=mask, **fields).tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_sampled_text_is_that_of_plain_decoding_with_the_seeds_noise(seed):
    target = make_target("qwen3", seed=10, initializer_range=0.2)
    drawn = decode(target, LookupDrafter(), PROMPT, do_sample=True, temperature=0.7, seed=seed, max_new_tokens=40)
    assert drawn.tolist() == sampled(target, PROMPT, 40, seed, temperature=0.7).tolist()


def test_acceptance_on_a_text_that_repeats_itself():
    """With small weights a greedy model soon goes round in a loop; there rounds are as deep as the budget."""
    target = make_target("llama", initializer_range=0.05)
    result = decode(target, LookupDrafter(), PROMPT, max_new_tokens=120, return_dict_in_generate=True)
    assert result.sequences.tolist() == greedy(target, PROMPT, 120).tolist()
    assert result.mean_acceptance_length > 4 and max(result.acceptance_lengths) == 17


def test_without_a_match_decoding_is_plain():
    """No token of the text comes twice."""
    target = make_target("llama")
    text = [7]
    while (token := int(target(torch.tensor([text])).logits[0, -1].argmax())) not in text:
        text.append(token)
    ids, new = torch.tensor([text[:1]]), len(text) - 1
    result = decode(target, LookupDrafter(), ids, max_new_tokens=new, return_dict_in_generate=True)
    assert result.sequences.tolist() == [text] and new > 3
    assert result.verified_nodes == 0 and result.acceptance_lengths == [1] * new
