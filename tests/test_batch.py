"""Batches: every row is what it would be alone, and a batch is what plain decoding makes of it."""

import pytest
import torch
from keyed import sampled
from stubs import decode, greedy, make_drafter, make_stub, make_target, make_tokenizer
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_ddtree.cache import output_cache
from hf_ddtree.emission import Emissions

FAMILIES = ("qwen3", "qwen3-sliding", "gemma3", "deepseek_v3")
PADDING = (0, 3, 6, 9)
NEW = 24


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return make_target(request.param)


@pytest.fixture(scope="module")
def qwen():
    return make_target("qwen3", seed=10)


def batch(rows=4, length=10, seed=0, padding=PADDING):
    """Prompts of several lengths, padded on the left."""
    ids = torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : padding[row]] = ids[row, : padding[row]] = 0
    return ids, mask


def alone(target, ids, mask, **options):
    """Each row's new tokens, by plain decoding of it alone without padding."""
    prompts = [ids[row][mask[row].bool()][None] for row in range(len(ids))]
    outputs = [greedy(target, prompt, options.get("max_new_tokens", NEW), **_rest(options)) for prompt in prompts]
    return [output[0, prompt.shape[1] :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


def _rest(options):
    return {name: value for name, value in options.items() if name != "max_new_tokens"}


def assert_rows(tokens, ids, expected, pad=0):
    """Rows of `tokens` are `expected`, padded to the longest."""
    longest = max(map(len, expected))
    assert tokens[:, ids.shape[1] :].tolist() == [row + [pad] * (longest - len(row)) for row in expected]


def stub_of_rows(target, kind, references):
    """A stub that knows each row's own text: the committed length alone would not tell rows apart."""
    stub = make_stub(target, kind, references[0])
    stub.references = references
    return stub


# Rows are independent


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_fault_28_each_row_equals_itself_alone(target, rows):
    ids, mask = batch(rows)
    tokens = decode(target, make_drafter(target), ids, attention_mask=mask, max_new_tokens=NEW)
    assert_rows(tokens, ids, alone(target, ids, mask))


@pytest.mark.parametrize("budget", [0, 1, 7, 32])
def test_rows_that_are_accepted_at_different_rates(target, budget):
    """An assistant that is the target itself is often right, at places that differ from row to row."""
    ids, mask = batch()
    result = decode(
        target, target, ids, attention_mask=mask, max_new_tokens=NEW, tree_budget=budget, return_dict_in_generate=True
    )
    assert_rows(result.sequences, ids, alone(target, ids, mask))
    if budget > 1:
        assert len({tuple(row) for row in result.acceptance_lengths}) > 1
        assert result.mean_acceptance_length > 1.5
    assert [sum(row) for row in result.acceptance_lengths] == [NEW] * 4
    assert result.rounds == max(map(len, result.acceptance_lengths))


def test_rows_do_not_depend_on_their_neighbours_or_places(target):
    ids, mask = batch()
    whole = decode(target, make_drafter(target), ids, attention_mask=mask, max_new_tokens=NEW)
    order = [2, 0, 3]
    part = decode(target, make_drafter(target), ids[order], attention_mask=mask[order], max_new_tokens=NEW)
    assert part.tolist() == whole[order].tolist()


@pytest.mark.parametrize("drafter", ["dflash", "assistant"])
def test_rows_that_end_at_different_rounds(target, drafter):
    ids, mask = batch()
    texts = alone(target, ids, mask)
    ends = [texts[0][5], texts[1][11], texts[3][17]]
    options = {"eos_token_id": ends, "pad_token_id": 1}
    expected = alone(target, ids, mask, **options)
    assert len(set(map(len, expected))) > 2
    assistant = make_drafter(target) if drafter == "dflash" else target
    tokens = decode(target, assistant, ids, attention_mask=mask, max_new_tokens=NEW, **options)
    assert_rows(tokens, ids, expected, pad=1)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **options)
    assert tokens.tolist() == plain.tolist()


def test_a_row_that_ends_with_its_first_token(qwen):
    ids, mask = batch()
    texts = alone(qwen, ids, mask)
    options = {"eos_token_id": texts[1][0], "pad_token_id": 0}
    tokens = decode(qwen, make_drafter(qwen), ids, attention_mask=mask, max_new_tokens=NEW, **options)
    assert_rows(tokens, ids, alone(qwen, ids, mask, **options))


def test_ended_rows_leave_the_forwards(qwen, monkeypatch):
    ids, mask = batch()
    texts = alone(qwen, ids, mask)
    widths = []
    handle = qwen.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    decode(
        qwen,
        make_drafter(qwen),
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        eos_token_id=[texts[2][4], texts[0][7]],
        pad_token_id=0,
    )
    handle.remove()
    rounds = widths[:-1]  # on transformers 5.17 the last forward may be of all rows, for a cache that somebody may have
    assert widths[0] == 4 and min(rounds) < 4 and rounds == sorted(rounds, reverse=True)


# Sampling


@pytest.mark.parametrize("seed", [3, [5, 6, 7, 8]], ids=["one seed", "a seed per row"])
def test_sampled_batch_equals_plain_decoding_with_the_same_noise(target, seed):
    ids, mask = batch()
    settings = {"temperature": 0.9, "top_k": 20}
    expected = sampled(target, ids, NEW, seed, attention_mask=mask, **settings)
    tokens = decode(
        target,
        make_drafter(target),
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=True,
        seed=seed,
        **settings,
    )
    assert tokens.tolist() == expected.tolist()


def test_a_row_under_its_own_seed_is_what_it_is_alone(qwen):
    ids, mask = batch()
    seeds = [5, 6, 7, 8]
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.2, "top_k": 0}
    tokens = decode(qwen, qwen, ids, attention_mask=mask, seed=seeds, **options)
    for row, seed in enumerate(seeds):
        prompt = ids[row][mask[row].bool()][None]
        single = decode(qwen, make_drafter(qwen), prompt, seed=[seed], **options)
        assert tokens[row, ids.shape[1] :].tolist() == single[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("acceptance, shape", [("token", "chain"), ("block", "chain"), ("recursive", "best_first")])
def test_classical_rules_in_a_batch_give_each_row_its_own_text(qwen, acceptance, shape):
    """Up to where trees are cut to what is left to write, since these rules' text depends on the tree."""
    ids, mask = batch()
    options = {"max_new_tokens": 24, "do_sample": True, "acceptance": acceptance, "tree_shape": shape, "tree_budget": 7}
    tokens = decode(qwen, make_drafter(qwen), ids, attention_mask=mask, seed=[1, 2, 3, 4], **options)
    for row in range(4):
        prompt = ids[row][mask[row].bool()][None]
        single = decode(qwen, make_drafter(qwen), prompt, seed=[row + 1], **options)
        assert tokens[row, ids.shape[1] :][:16].tolist() == single[0, prompt.shape[1] :][:16].tolist()


def test_num_return_sequences(qwen):
    ids, mask = batch(2)
    options = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3, "top_k": 0}
    tokens = decode(qwen, make_drafter(qwen), ids, attention_mask=mask, seed=4, **options)
    wide, wide_mask = ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
    assert tokens.tolist() == sampled(qwen, wide, NEW, 4, attention_mask=wide_mask, top_k=0).tolist()
    assert len({tuple(row) for row in tokens.tolist()}) == 6


# Processors and criteria: known ones row by row, others in step

PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": 11, "pad_token_id": 0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[9], [3, 4]]},
    "sequence_bias": {"sequence_bias": [[[17], 4.0]]},
}


@pytest.mark.parametrize("options", PROCESSED.values(), ids=PROCESSED)
def test_fault_10_11_processors_in_a_batch(qwen, options):
    ids, mask = batch(padding=(0, 0, 0, 0))
    expected = qwen.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **options)
    for assistant in (make_drafter(qwen), qwen):
        tokens = decode(qwen, assistant, ids, attention_mask=mask, max_new_tokens=NEW, **options)
        assert tokens.tolist() == expected.tolist()


def parity(batch_id, ids):
    """Odd rows take odd tokens after even ones; even rows never take multiples of 3."""
    if batch_id % 2:
        return [token for token in range(64) if token % 2 != int(ids[-1]) % 2]
    return [token for token in range(64) if token % 3]


def test_fault_12_prefix_function_gets_the_right_row(qwen):
    ids, mask = batch()
    options = {"attention_mask": mask, "max_new_tokens": NEW, "prefix_allowed_tokens_fn": parity}
    expected = qwen.generate(ids, do_sample=False, **options)
    assert decode(qwen, qwen, ids, **options).tolist() == expected.tolist()


class Stateful(LogitsProcessor):
    """Suppresses what the whole batch wrote in the step before; keeps the ids of every call."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, input_ids[:, -1]] = -torch.inf
        return scores


@pytest.mark.parametrize("eos", [None, 11], ids=["no end token", "end token"])
def test_fault_57_processors_that_look_at_the_whole_batch_see_it_as_in_plain_decoding(qwen, eos):
    ids, mask = batch()
    options = {"max_new_tokens": NEW} | ({} if eos is None else {"eos_token_id": eos, "pad_token_id": 0})
    plain, ours = Stateful(), Stateful()
    expected = qwen.generate(
        ids, attention_mask=mask, do_sample=False, logits_processor=LogitsProcessorList([plain]), **options
    )
    tokens = decode(qwen, qwen, ids, attention_mask=mask, logits_processor=LogitsProcessorList([ours]), **options)
    assert tokens.tolist() == expected.tolist()
    assert ours.calls == plain.calls


class Criterion(StoppingCriteria):
    """Ends a row after its `stop`-th token that is divisible by 3; keeps the ids of every call."""

    def __init__(self, stop=4):
        self.stop, self.calls = stop, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        return (input_ids[:, 10:] % 3 == 0).sum(1) >= self.stop


@pytest.mark.parametrize("eos", [None, 1], ids=["no end token", "end token"])
def test_custom_criteria_are_called_as_in_plain_decoding(qwen, eos):
    ids, mask = batch()
    options = {"max_new_tokens": NEW} | ({} if eos is None else {"eos_token_id": eos, "pad_token_id": 1})
    plain, ours = Criterion(), Criterion()
    expected = qwen.generate(
        ids, attention_mask=mask, do_sample=False, stopping_criteria=StoppingCriteriaList([plain]), **options
    )
    tokens = decode(qwen, qwen, ids, attention_mask=mask, stopping_criteria=StoppingCriteriaList([ours]), **options)
    assert tokens.tolist() == expected.tolist()
    assert ours.calls == plain.calls


@pytest.mark.parametrize("eos", [None, 1], ids=["no end token", "end token"])
def test_fault_04_stop_strings_in_a_batch(qwen, eos):
    tokenizer = make_tokenizer()
    ids, mask = batch()
    texts = alone(qwen, ids, mask)
    stops = [tokenizer.decode(texts[0][6:8]), tokenizer.decode(texts[2][10:13])]
    options = {"stop_strings": stops, "tokenizer": tokenizer, "attention_mask": mask, "max_new_tokens": NEW}
    options |= {} if eos is None else {"eos_token_id": eos, "pad_token_id": 0}
    expected = qwen.generate(ids, do_sample=False, **options)
    assert decode(qwen, qwen, ids, **options).tolist() == expected.tolist()


def test_known_processors_do_not_make_rows_wait_for_each_other(qwen):
    config = GenerationConfig(max_length=30, repetition_penalty=1.2, no_repeat_ngram_size=3)
    known = qwen._get_logits_processor(config, input_ids_seq_length=10, device="cpu")
    criteria = StoppingCriteriaList([MaxLengthCriteria(30), MaxTimeCriteria(9.0), EosTokenCriteria(3)])
    assert not Emissions.must_step(known, criteria)
    assert Emissions.must_step(LogitsProcessorList([Stateful()]), criteria)
    assert Emissions.must_step(known, StoppingCriteriaList([*criteria, Criterion()]))


# What comes back


def test_fault_26_scores_of_a_batch(qwen):
    ids, mask = batch()
    texts = alone(qwen, ids, mask)
    options = {"eos_token_id": texts[1][6], "pad_token_id": 0, "max_new_tokens": NEW, "repetition_penalty": 1.3}
    options |= {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    ours = decode(qwen, qwen, ids, attention_mask=mask, **options)
    plain = qwen.generate(ids, attention_mask=mask, do_sample=False, **options)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert len(ours.scores) == len(plain.scores) == len(ours.logits)
    answer = ours.sequences[:, ids.shape[1] :]
    for row in range(4):
        ends = (answer[row] == texts[1][6]).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(ours.scores)
        for step in range(len(ours.scores)):
            for name in ("scores", "logits"):
                wanted = getattr(plain, name)[step][row] if step < length else torch.zeros(64)
                torch.testing.assert_close(getattr(ours, name)[step][row], wanted, atol=1e-4, rtol=1e-4)
        transitions = [
            qwen.compute_transition_scores(each.sequences, each.scores)[row, :length] for each in (ours, plain)
        ]
        torch.testing.assert_close(*transitions, atol=1e-4, rtol=1e-4)


def test_trees_of_a_batch_do_not_leave_the_models_positions():
    """GPT-2 has an embedding per position; a row near its greatest length is drafted as deep as the others."""
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.5}
    target = GPT2LMHeadModel(GPT2Config(**fields, n_positions=34, bos_token_id=1, eos_token_id=None)).eval()
    ids, mask = batch(padding=(0, 0, 0, 0))
    for drafter in (make_target("llama", seed=4), make_drafter(target, num_target_layers=2, target_layer_ids=[0, 1])):
        result = decode(
            target, drafter, ids, attention_mask=mask, max_new_tokens=24, tree_budget=32, return_dict_in_generate=True
        )
        assert result.sequences.tolist() == greedy(target, ids, 24, attention_mask=mask).tolist()


class Recorder(BaseStreamer):
    def __init__(self):
        self.steps, self.ends = [], 0

    def put(self, value):
        self.steps.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("drafter", ["dflash", "assistant"])
def test_a_streamer_of_batches_gets_the_steps_of_plain_decoding(qwen, drafter):
    ids, mask = batch()
    texts = alone(qwen, ids, mask)
    options = {"eos_token_id": [texts[1][6], texts[3][12]], "pad_token_id": 0, "max_new_tokens": NEW}
    plain, ours = Recorder(), Recorder()
    qwen.generate(ids, attention_mask=mask, do_sample=False, streamer=plain, **options)
    assistant = make_drafter(qwen) if drafter == "dflash" else qwen
    decode(qwen, assistant, ids, attention_mask=mask, streamer=ours, **options)
    assert ours.steps == plain.steps
    assert ours.ends == 1


@pytest.mark.parametrize("in_step", [False, True], ids=["free", "in step"])
@pytest.mark.parametrize("eos", [False, True], ids=["to the length", "rows that end early"])
def test_fault_32_the_cache_of_a_batch_holds_what_plain_decoding_caches(target, eos, in_step):
    ids, mask = batch()
    texts = alone(target, ids, mask)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    options |= {"prefix_allowed_tokens_fn": lambda row, ids: range(64)} if in_step else {}
    options |= {"eos_token_id": [texts[0][5], texts[2][11]], "pad_token_id": 0} if eos else {}
    ours = decode(target, target, ids, attention_mask=mask, **options)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, **options)
    caches = output_cache(ours), output_cache(plain)
    answer = plain.sequences[:, ids.shape[1] :]
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == plain.sequences.shape[1] - 1
    for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape
        for row in range(4):
            ended = torch.isin(answer[row], torch.tensor(options.get("eos_token_id", []))).nonzero()
            length = ids.shape[1] + (int(ended[0]) + 1 if len(ended) else answer.shape[1] - 1)
            first = plain.sequences.shape[1] - 1 - mine.keys.shape[-2]  # a sliding layer has dropped the slots before
            rows = slice(max(PADDING[row] - first, 0), max(length - first, 0))
            for name in ("keys", "values"):
                torch.testing.assert_close(
                    getattr(mine, name)[row, :, rows], getattr(theirs, name)[row, :, rows], atol=1e-4, rtol=1e-4
                )
