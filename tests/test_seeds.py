"""Which text a seed gives: the same for every run, padding and batch; and where a seed comes from if none is set."""

import pytest
import torch
from keyed import drafter_of, sampled
from stubs import decode, greedy, make_drafter, make_target
from transformers import LogitsProcessorList, set_seed

from hf_ddtree import DDTreeConfig, KeyedNoiseLogitsProcessor

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])
START = PROMPT.shape[1]
NEW = 16
KINDS = ("oracle-1", "anti", "rand", "real")
RULES = {
    "walk": {},
    "token": {"acceptance": "token", "tree_shape": "chain"},
    "block": {"acceptance": "block", "tree_shape": "chain"},
    "recursive": {"acceptance": "recursive"},
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.fixture(scope="module")
def soft():
    """A target with flat distributions, so that sampling is not greedy in disguise."""
    return make_target("qwen3", seed=10, initializer_range=0.2)


@pytest.fixture(scope="module")
def drafter(soft):
    return make_drafter(soft)


@pytest.fixture(scope="module")
def run(soft, drafter):
    """The new tokens of one sampling run."""

    def run(**fields):
        return decode(soft, drafter, PROMPT, do_sample=True, max_new_tokens=NEW, **fields)[0, START:].tolist()

    return run


# Seeds of the config


@rules
def test_a_seed_fixes_the_text(run, rule):
    assert run(seed=3, **rule) == run(seed=3, **rule)
    set_seed(1)
    first = run(seed=3, **rule)
    set_seed(2)
    assert run(seed=3, **rule) == first


@rules
def test_seeds_differ(run, rule):
    seeds = (0, 1, 2, -1, 2**31, 2**32, 2**63, 10**18)
    texts = [run(seed=seed, **rule) for seed in seeds]
    assert len(set(map(tuple, texts))) == len(seeds)
    # Neighbouring streams must not run in step either.
    assert sum(a == b for a, b in zip(texts[0], texts[1], strict=True)) < NEW / 2


@rules
def test_a_list_of_one_seed_is_that_seed(run, rule):
    assert run(seed=[5], **rule) == run(seed=5, **rule) != run(seed=[6], **rule)


@pytest.mark.parametrize("seed", [[1, 2], [1, 2, 3]], ids=str)
@rules
def test_another_number_of_seeds_is_refused_before_any_forward(soft, drafter, rule, seed):
    forwards = []
    hook = soft.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError, match=f"`seed`.* {len(seed)} .*one per sequence"):
        decode(soft, drafter, PROMPT, do_sample=True, max_new_tokens=NEW, seed=seed, **rule)
    hook.remove()
    assert not forwards


def test_keyword_beats_config(soft, drafter, run):
    config = DDTreeConfig(do_sample=True, max_new_tokens=NEW, seed=3)
    tokens = soft.generate(PROMPT, assistant_model=drafter, generation_config=config, seed=4)
    assert tokens[0, START:].tolist() == run(seed=4) != run(seed=3)
    assert config.seed == 3


# No seed: torch's default generator decides


@rules
@pytest.mark.parametrize("fix", [set_seed, torch.manual_seed], ids=["set_seed", "torch.manual_seed"])
def test_the_global_seed_governs(run, rule, fix):
    texts = []
    for seed in (7, 7, 8):
        fix(seed)
        texts.append([run(**rule), run(**rule)])
    assert texts[0] == texts[1]
    assert len({tuple(text) for pair in texts for text in pair}) == 4  # two calls differ, two seeds differ


def test_the_global_seed_governs_whatever_the_drafter(soft):
    reference, texts = greedy(soft, PROMPT, NEW)[0], []
    for kind in KINDS:
        drafter = drafter_of(soft, kind, reference)
        torch.manual_seed(6)
        texts.append(decode(soft, drafter, PROMPT, do_sample=True, max_new_tokens=NEW)[0].tolist())
    assert all(text == texts[0] for text in texts)


CONSUMPTION = {
    "greedy": ({"do_sample": False}, 0),
    "greedy with seed": ({"do_sample": False, "seed": 3}, 0),
    **{f"{name} with seed": ({"do_sample": True, "seed": 3, **rule}, 0) for name, rule in RULES.items()},
    **{f"{name} without seed": ({"do_sample": True, **rule}, 1) for name, rule in RULES.items()},
}


@pytest.mark.parametrize("fields, draws", CONSUMPTION.values(), ids=CONSUMPTION)
def test_the_global_generator_is_used_once_or_not_at_all(soft, drafter, fields, draws):
    torch.manual_seed(11)
    for _ in range(draws):
        torch.randint(2**62, ())
    expected = torch.get_rng_state()
    torch.manual_seed(11)
    decode(soft, drafter, PROMPT, max_new_tokens=NEW, **fields)
    assert torch.equal(torch.get_rng_state(), expected)


def test_greedy_does_not_mind_the_seed(soft, drafter):
    tokens = decode(soft, drafter, PROMPT, max_new_tokens=NEW, seed=3)
    assert tokens.tolist() == greedy(soft, PROMPT, NEW).tolist()


@pytest.mark.parametrize("seed", [None, 9, [9], 2**70], ids=str)
def test_the_result_tells_its_seed(soft, drafter, seed):
    fields = {"do_sample": True, "temperature": 0.8, "max_new_tokens": NEW, "return_dict_in_generate": True}
    results = [decode(soft, drafter, PROMPT, seed=seed, **fields) for _ in range(2)]
    for result in results:
        assert result.seed == (seed if seed is not None else result.seed)
        assert result.sequences.tolist() == sampled(soft, PROMPT, NEW, seed=result.seed, temperature=0.8).tolist()
        again = decode(soft, drafter, PROMPT, seed=result.seed, **fields)
        assert again.sequences.tolist() == result.sequences.tolist()
    assert (results[0].seed == results[1].seed) == (seed is not None)
    assert decode(soft, drafter, PROMPT, seed=seed, **{**fields, "do_sample": False}).seed is None


# Padding: positions count real tokens


def padded(ids, padding):
    mask = torch.cat([torch.zeros(1, padding, dtype=torch.int64), torch.ones_like(ids)], dim=1)
    return torch.nn.functional.pad(ids, (padding, 0)), mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_left_padding_changes_no_token(soft, padding, kind):
    expected = sampled(soft, PROMPT, NEW, seed=4)[0]
    ids, mask = padded(PROMPT, padding)
    assert sampled(soft, ids, NEW, seed=4, attention_mask=mask)[0, padding:].tolist() == expected.tolist()
    drafter = drafter_of(soft, kind, expected)
    tokens = decode(soft, drafter, ids, do_sample=True, max_new_tokens=NEW, seed=4, attention_mask=mask)
    assert tokens[0, padding:].tolist() == expected.tolist()


@pytest.mark.parametrize("padding", [0, 3])
def test_a_prompt_of_embeddings_has_no_positions_of_its_own(soft, drafter, padding):
    """`generate` keeps no ids of it, so its sampling differs from the ids', but plain decoding's differs alike."""
    ids, mask = padded(PROMPT, padding)
    inputs = {"inputs_embeds": soft.get_input_embeddings()(ids), "attention_mask": mask}
    expected = sampled(soft, None, NEW, seed=4, **inputs)
    tokens = decode(soft, drafter, None, do_sample=True, max_new_tokens=NEW, seed=4, **inputs)
    assert tokens.tolist() == expected.tolist() and tokens.shape == (1, NEW)


@pytest.mark.parametrize("kept", [1, 7, NEW - 1])
def test_a_text_continues_as_if_it_had_not_been_stopped(soft, drafter, kept):
    whole = sampled(soft, PROMPT, NEW, seed=4)
    tokens = decode(soft, drafter, whole[:, : START + kept], do_sample=True, max_new_tokens=NEW - kept, seed=4)
    assert tokens.tolist() == whole.tolist()


# Plain decoding of a batch with the keyed noise

OTHER = torch.tensor([[3, 4, 5, 9, 9, 2, 61]])


def test_with_a_seed_per_row_a_row_is_what_it_is_alone(soft):
    (short, mask), seeds = padded(OTHER, 3), [21, 22, 21]
    ids = torch.cat([PROMPT, short, PROMPT])
    masks = torch.cat([torch.ones_like(PROMPT), mask, torch.ones_like(PROMPT)])
    rows = sampled(soft, ids, NEW, seed=seeds, attention_mask=masks)[:, START:].tolist()
    assert rows[0] == rows[2] == sampled(soft, PROMPT, NEW, seed=21)[0, START:].tolist()
    assert rows[1] == sampled(soft, OTHER, NEW, seed=22)[0, OTHER.shape[1] :].tolist()


def test_under_one_seed_rows_differ(soft):
    rows = sampled(soft, PROMPT.expand(4, -1), NEW, seed=21).tolist()
    assert len(set(map(tuple, rows))) == 4
    assert rows[0] == sampled(soft, PROMPT, NEW, seed=21)[0].tolist()


UNFIT = {
    "seeds": ([1, 2, 3], None, "`seed` has 3 entries for 2 sequences"),
    "masks": ([1, 2], torch.ones_like(PROMPT), "`attention_mask` has 1 rows for 2 sequences"),
}


@pytest.mark.parametrize("seed, mask, message", UNFIT.values(), ids=UNFIT)
def test_another_number_of_seeds_or_masks_than_rows(soft, seed, mask, message):
    noise = LogitsProcessorList([KeyedNoiseLogitsProcessor(seed, mask)])
    with pytest.raises(ValueError, match=message):
        soft.generate(PROMPT.expand(2, -1), do_sample=False, max_new_tokens=2, logits_processor=noise)


@pytest.mark.parametrize("seed", ["7", 1.5, True, [], [None], None], ids=repr)
def test_noise_without_a_proper_seed(seed):
    with pytest.raises(ValueError, match=r"`seed` is .*integer"):
        KeyedNoiseLogitsProcessor(seed)


@pytest.mark.parametrize("kind", KINDS)
def test_budget_and_drafter_only_change_the_rounds(soft, kind):
    expected = sampled(soft, PROMPT, NEW, seed=4)[0]
    drafter = drafter_of(soft, kind, expected)
    fields = {"do_sample": True, "max_new_tokens": NEW, "seed": 4, "return_dict_in_generate": True}
    results = [decode(soft, drafter, PROMPT, tree_budget=budget, **fields) for budget in (0, 3, 40)]
    assert all(result.sequences[0].tolist() == expected.tolist() for result in results)
    rounds = [result.rounds for result in results]
    assert rounds[0] == NEW and (kind == "anti" or rounds[2] < NEW)
