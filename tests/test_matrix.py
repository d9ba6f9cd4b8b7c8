"""The same checks over families, drafters, batch sizes and settings: tokens equal plain `generate`, in float32."""

import functools

import pytest
import torch
from families import FAMILIES
from keyed import sampled
from stubs import decode, greedy, make_drafter, make_target, make_tokenizer

NEW = 14
target_of = functools.cache(make_target)

DRAFTERS = {
    "dflash": make_drafter,
    "sliding dflash": lambda target: make_drafter(target, layer_types=["sliding_attention"] * 2, sliding_window=6),
    "another model": lambda target: target_of("llama", seed=4),
    "the target": lambda target: target,
    "lookup": lambda target: None,
}
SETTINGS = {
    "greedy": {},
    "stops": {"eos_token_id": [11, 23, 35], "pad_token_id": 0, "min_new_tokens": 3},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[9]]},
    "in step": {"prefix_allowed_tokens_fn": lambda row, ids: range((row + int(ids[-1])) % 2, 64, 2)},
    "sampled": {"do_sample": True, "seed": 6, "temperature": 1.1, "top_p": 0.95, "top_k": 0},
}


def prompts(rows):
    """[rows, 12] of different lengths, and what is real of them."""
    ids = torch.randint(2, 64, (rows, 6), generator=torch.Generator().manual_seed(rows)).repeat(1, 2)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row] = ids[row, : 3 * row] = 0
    return ids, mask


@functools.cache
def reference(family, rows, setting):
    """Plain decoding of the whole batch."""
    ids, mask = prompts(rows)
    fields = dict(SETTINGS[setting])
    if fields.pop("do_sample", False):
        return sampled(target_of(family), ids, NEW, attention_mask=mask, **fields).tolist()
    return greedy(target_of(family), ids, NEW, attention_mask=mask, **fields).tolist()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_plain_generate(family, drafter, rows, setting):
    target = target_of(family)
    ids, mask = prompts(rows)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "tree_budget": 12, **SETTINGS[setting]}
    options |= {"drafter": "lookup"} if drafter == "lookup" else {}
    tokens = decode(target, DRAFTERS[drafter](target), ids, **options)
    assert tokens.tolist() == reference(family, rows, setting)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_strings_equal_plain_generate(drafter, rows):
    target, tokenizer = target_of("qwen3"), make_tokenizer()
    ids, mask = prompts(rows)
    text = greedy(target, ids, NEW, attention_mask=mask)[:, 12:]
    options = {"attention_mask": mask, "stop_strings": [tokenizer.decode(row[5:7]) for row in text]}
    options |= {"tokenizer": tokenizer, "eos_token_id": 1, "pad_token_id": 0}
    expected = greedy(target, ids, NEW, **options)
    fields = {"drafter": "lookup"} if drafter == "lookup" else {}
    assert (
        decode(target, DRAFTERS[drafter](target), ids, max_new_tokens=NEW, **options, **fields).tolist()
        == expected.tolist()
    )
