"""Generation ends on the token where plain decoding ends, wherever in a round that token is."""

import threading

import pytest
import torch
from stubs import decode, greedy, make_stub, make_target, make_tokenizer
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from hf_ddtree import DDTreeConfig

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])
START = PROMPT.shape[1]
# A chain of 7 drafts: the prefill gives new token 1, the next rounds tokens 2-9 and 10-17, token 9 being the bonus.
CHAIN = {"tree_budget": 7, "tree_top_k": 1}
PLACES = {"prefill": 1, "depth-1": 2, "depth-2": 3, "depth-5": 6, "last-depth": 8, "bonus": 9, "next-round": 10}


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


@pytest.fixture(scope="module")
def reference(target):
    tokens = greedy(target, PROMPT, 40)[0]
    assert len(set(tokens[START : START + 12].tolist())) == 12  # so that each of them ends generation at its place
    return tokens


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


class Recorder(BaseStreamer):
    def __init__(self):
        self.tokens, self.ends = [], 0

    def put(self, value):
        assert self.ends == 0
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ends += 1


def nth(reference, number):
    """The id of the reference's new token `number`, counted from 1."""
    return int(reference[START + number - 1])


def test_places_are_where_the_names_say(target, reference):
    result = decode(
        target,
        make_stub(target, "oracle-1", reference),
        PROMPT,
        max_new_tokens=20,
        return_dict_in_generate=True,
        **CHAIN,
    )
    assert result.acceptance_lengths[:3] == [1, 8, 8]


# End-of-sequence tokens


@pytest.mark.parametrize("second_eos", [False, True], ids=["one", "list"])
@pytest.mark.parametrize("kind", ["oracle-1", "oracle-2", "anti", "rand"])
@pytest.mark.parametrize("number", PLACES.values(), ids=PLACES)
def test_fault_03_eos_inside_block(target, reference, number, kind, second_eos):
    eos = nth(reference, number)
    eos = [nth(reference, number + 2), eos] if second_eos else eos
    streamer = Recorder()
    shape = CHAIN if kind == "oracle-1" else {}
    drafter = make_stub(target, kind, reference)
    tokens = decode(target, drafter, PROMPT, max_new_tokens=30, eos_token_id=eos, streamer=streamer, **shape)
    assert tokens[0].tolist() == reference[: START + number].tolist()
    assert streamer.tokens == tokens[0].tolist()
    assert streamer.ends == 1


def test_eos_among_the_drafts_that_are_not_accepted(target, reference):
    """The tree proposes the end token everywhere; only the target may end generation."""
    never = next(token for token in range(64) if token not in reference.tolist())
    stub = make_stub(target, "oracle-1", reference)
    truth = stub.logits_for

    def logits_for(committed, real):
        logits = truth(committed, real)
        logits[..., never] = 10.0
        return logits

    stub.logits_for = logits_for
    tokens = decode(target, stub, PROMPT, max_new_tokens=20, eos_token_id=never)
    assert tokens[0].tolist() == reference[: START + 20].tolist()


PRECEDENCE = {
    "model's generation config": ([4, 8], None, None),
    "config beats model": ([4, 8], 6, None),
    "call beats config": ([4, 8], 6, 3),
    "none runs to the length": (None, None, None),
}


@pytest.mark.parametrize("of_model, of_config, of_call", PRECEDENCE.values(), ids=PRECEDENCE)
def test_fault_30_eos_precedence(reference, of_model, of_config, of_call):
    def ids(numbers):
        many = isinstance(numbers, list)
        return [nth(reference, number) for number in numbers] if many else nth(reference, numbers)

    target = make_target("qwen3", seed=10, eos_token_id=nth(reference, 2))
    target.generation_config.eos_token_id = None if of_model is None else ids(of_model)
    options = {"max_new_tokens": 20}
    if of_config or of_call:
        options["eos_token_id"] = ids(of_call or of_config)
    expected = target.generate(PROMPT, do_sample=False, **options).tolist()
    if of_call:
        options["eos_token_id"] = ids(of_config)
    config = DDTreeConfig(do_sample=False, **options)
    call = {"eos_token_id": ids(of_call)} if of_call else {}
    drafter = make_stub(target, "oracle-1", reference)
    tokens = target.generate(PROMPT, assistant_model=drafter, generation_config=config, **call)
    assert tokens.tolist() == expected
    assert tokens.shape[1] - START == (of_call or of_config or (of_model[0] if of_model else 20))


# Lengths


@pytest.mark.parametrize("kind", ["oracle-1", "oracle-2", "anti"])
@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_fault_05_length_limits_are_exact(target, reference, kind, limit):
    drafter = make_stub(target, kind, reference, block_size=16)
    for new_tokens in range(1, 18):
        value = new_tokens if limit == "max_new_tokens" else START + new_tokens
        tokens = decode(target, drafter, PROMPT, tree_budget=32, **{limit: value})
        assert tokens[0].tolist() == reference[: START + new_tokens].tolist()


@pytest.mark.parametrize("number", PLACES.values(), ids=PLACES)
def test_min_new_tokens_suppresses_eos_inside_a_block(target, reference, number):
    options = {"min_new_tokens": number, "eos_token_id": nth(reference, number)}
    expected = greedy(target, PROMPT, 20, **options)
    drafter = make_stub(target, "oracle-1", expected[0])
    assert decode(target, drafter, PROMPT, max_new_tokens=20, **options, **CHAIN).tolist() == expected.tolist()


@pytest.mark.parametrize("seconds, new_tokens", [(1e-9, 1), (1e6, 12)], ids=["at once", "never"])
def test_max_time(target, reference, seconds, new_tokens):
    drafter = make_stub(target, "oracle-1", reference)
    tokens = decode(target, drafter, PROMPT, max_new_tokens=12, max_time=seconds, **CHAIN)
    assert tokens[0].tolist() == reference[: START + new_tokens].tolist()


# Stop strings

STOP_STRINGS = {
    "inside a block": (5, 6),
    "at the last depth": (7, 8),
    "on the bonus token": (8, 9),
    "straddling two rounds": (9, 10),  # fault 35: completed by the first of eight accepted tokens
    "over a whole round": (9, 18),
}


@pytest.mark.parametrize("first, last", STOP_STRINGS.values(), ids=STOP_STRINGS)
def test_fault_04_35_stop_strings(target, reference, tokenizer, first, last):
    stop = tokenizer.decode(reference[START + first - 1 : START + last])
    options = {"stop_strings": [stop], "tokenizer": tokenizer}
    assert greedy(target, PROMPT, 30, **options)[0].tolist() == reference[: START + last].tolist()
    for kind, shape in (("oracle-1", CHAIN), ("oracle-2", {}), ("anti", {})):
        tokens = decode(target, make_stub(target, kind, reference), PROMPT, max_new_tokens=30, **options, **shape)
        assert tokens[0].tolist() == reference[: START + last].tolist()


def test_fault_25_stop_strings_without_a_tokenizer_raise_the_librarys_error(target, reference):
    with pytest.raises(ValueError) as plain:
        greedy(target, PROMPT, 5, stop_strings="ab")
    with pytest.raises(ValueError) as ours:
        decode(target, make_stub(target, "oracle-1", reference), PROMPT, max_new_tokens=5, stop_strings="ab")
    assert str(ours.value) == str(plain.value)


# Custom criteria


class Criterion(StoppingCriteria):
    """Records the ids of every call; stops once `length` is reached."""

    def __init__(self, length=None):
        self.length, self.calls = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        return torch.tensor([input_ids.shape[1] == self.length], device=input_ids.device)


@pytest.mark.parametrize("stop_at", [None, START + 6, START + 9], ids=["never", "inside", "bonus"])
@pytest.mark.parametrize("kind", ["oracle-1", "oracle-2", "anti"])
def test_criteria_see_what_plain_decoding_shows_them(target, reference, kind, stop_at):
    plain, ours = Criterion(stop_at), Criterion(stop_at)
    expected = greedy(target, PROMPT, 20, stopping_criteria=StoppingCriteriaList([plain]))
    drafter = make_stub(target, kind, reference)
    tokens = decode(target, drafter, PROMPT, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([ours]))
    assert tokens.tolist() == expected.tolist()
    assert ours.calls == plain.calls


# Streamers


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == START + 5:
            raise RuntimeError("a processor failed")
        return scores


def test_streamer_ends_once_when_a_processor_raises(target, reference):
    streamer = Recorder()
    with pytest.raises(RuntimeError, match="a processor failed"):
        decode(
            target,
            make_stub(target, "oracle-1", reference),
            PROMPT,
            max_new_tokens=20,
            streamer=streamer,
            logits_processor=LogitsProcessorList([Failing()]),
            **CHAIN,
        )
    assert streamer.ends == 1
    assert streamer.tokens == reference[: len(streamer.tokens)].tolist()


@pytest.mark.parametrize("kind", ["oracle-1", "rand"])
def test_fault_24_text_iterator_streamer_in_a_thread(target, reference, tokenizer, kind):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    arguments = (target, make_stub(target, kind, reference), PROMPT)
    thread = threading.Thread(target=decode, args=arguments, kwargs={"max_new_tokens": 20, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert text == tokenizer.decode(reference[START : START + 20])
