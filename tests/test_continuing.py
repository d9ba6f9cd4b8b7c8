"""Calls that go on from a cache, prompts in chunks or embeddings, and every kind of cache."""

import copy
import io

import pytest
import torch
from stubs import decode, greedy, make_drafter, make_stub, make_target, make_tokenizer
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_ddtree import DDTreeConfig
from hf_ddtree.cache import cache_name, output_cache
from hf_ddtree.models.dflash import DFlashDraftModel
from hf_ddtree.tree_cache import TreeLayer

FAMILIES = ("llama", "qwen3-sliding", "gemma3", "gpt_oss", "deepseek_v3")
FIRST = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8]])
SECOND = torch.tensor([[17, 23, 50, 6]])
NEW = 16


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return make_target(request.param)


@pytest.fixture(scope="module")
def qwen():
    return make_target("qwen3", seed=10)


def turn(target, drafter, ids, cache=None, /, **options):
    """A turn of a conversation: the result, whose cache the next turn goes on from."""
    given = {} if cache is None else {cache_name(target): cache}
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, **options}
    return decode(target, drafter, ids, **given, **options)


def plain_turn(target, ids, before=None, **options):
    """The same by plain decoding, on the cache of its own turn before."""
    given = {} if before is None else {cache_name(target): output_cache(before)}
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, **options}
    return target.generate(ids, do_sample=False, **given, **options)


DRAFTERS = {
    "dflash": make_drafter,
    "sliding dflash": lambda target: make_drafter(target, layer_types=["sliding_attention"] * 2, sliding_window=6),
    "assistant": lambda target: target,
}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("end", ["length", "end token"])
def test_fault_32_three_turns_on_one_cache(target, drafter, end):
    drafter, ids, cache, plain = drafter(target), FIRST, None, None
    for _ in range(3):
        cold = greedy(target, ids, NEW)
        stop = {} if end == "length" else {"eos_token_id": int(cold[0, ids.shape[1] + 6]), "pad_token_id": 0}
        plain = plain_turn(target, ids, plain, **stop)
        result = turn(target, drafter, ids, cache, **stop)
        assert result.sequences.tolist() == plain.sequences.tolist()
        cache = output_cache(result)
        assert cache.get_seq_length() == result.sequences.shape[1] - 1
        ids = torch.cat([result.sequences, SECOND], dim=1)
    swapped = target.generate(ids, do_sample=False, max_new_tokens=NEW, **{cache_name(target): cache})
    assert swapped.tolist() == plain_turn(target, ids, plain).sequences.tolist()


@pytest.mark.parametrize("copied", [False, True], ids=["same object", "deep copy"])
@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
def test_fault_31_the_drafter_goes_on_with_its_own_cache(qwen, monkeypatch, copied, sliding):
    """In the second turn it says what it says in one call over the whole text, and encodes new tokens only."""
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6} if sliding else {}
    drafter, forward, seen = make_drafter(qwen, **fields), DFlashDraftModel.forward, []

    def recording(self, noise_embeds, context_hidden_states, **kwargs):
        output = forward(self, noise_embeds, context_hidden_states, **kwargs)
        seen.append((context_hidden_states.shape[1], output.last_hidden_state))
        return output

    monkeypatch.setattr(DFlashDraftModel, "forward", recording)
    first = turn(qwen, drafter, FIRST)
    cache = copy.deepcopy(output_cache(first)) if copied else output_cache(first)
    ids = torch.cat([first.sequences, SECOND], dim=1)
    seen.clear()
    second = turn(qwen, drafter, ids, cache)
    (new, drafts), *_ = seen
    seen.clear()
    cold = turn(qwen, drafter, ids)
    (all_tokens, cold_drafts), *_ = seen
    assert second.sequences.tolist() == cold.sequences.tolist()
    assert all_tokens == ids.shape[1] and new < SECOND.shape[1] + 9
    torch.testing.assert_close(drafts, cold_drafts, atol=1e-4, rtol=1e-4)


def test_another_drafter_or_a_cropped_cache_starts_anew(qwen):
    first = turn(qwen, make_drafter(qwen), FIRST)
    ids = torch.cat([first.sequences, SECOND], dim=1)
    cache = output_cache(first)
    other = turn(qwen, make_drafter(qwen, seed=9), ids, copy.deepcopy(cache))
    assert other.sequences.tolist() == greedy(qwen, ids, NEW).tolist()
    cache.crop(-9)
    again = torch.cat([first.sequences[:, : cache.get_seq_length()], SECOND], dim=1)
    assert turn(qwen, make_drafter(qwen), again, cache).sequences.tolist() == greedy(qwen, again, NEW).tolist()


def test_a_prefix_filled_once_serves_many_prompts(qwen):
    drafter = make_drafter(qwen)
    prefix = DynamicCache(config=qwen.config)
    with torch.no_grad():
        qwen(FIRST, use_cache=True, **{cache_name(qwen): prefix})
    for end in (SECOND, SECOND + 3, SECOND.flip(1)):
        ids = torch.cat([FIRST, end], dim=1)
        result = turn(qwen, drafter, ids, copy.deepcopy(prefix))
        assert result.sequences.tolist() == greedy(qwen, ids, NEW).tolist()
    assert prefix.get_seq_length() == FIRST.shape[1]


def test_a_batch_goes_on_from_its_cache(target):
    ids = torch.cat([FIRST, FIRST.flip(1)])
    drafter = make_drafter(target)
    first, plain = turn(target, drafter, ids), plain_turn(target, ids)
    more = torch.cat([first.sequences, SECOND.expand(2, -1)], dim=1)
    mask = {"attention_mask": torch.ones_like(more)}  # else `generate` takes the pad tokens in the answers for padding
    second = turn(target, drafter, more, output_cache(first), **mask)
    assert second.sequences.tolist() == plain_turn(target, more, plain, **mask).sequences.tolist()


def test_a_batch_whose_rows_ended_apart_goes_on_from_its_cache(target):
    """The end token and the padding after it are masked in the next turn, as a chat does it."""
    ids = torch.cat([FIRST, FIRST.flip(1)])
    texts = greedy(target, ids, NEW)
    stop = {"eos_token_id": int(texts[0, 14]), "pad_token_id": 0}
    first = turn(target, target, ids, **stop)
    answer = first.sequences[:, ids.shape[1] :]
    real = (answer == stop["eos_token_id"]).cumsum(1) - (answer == stop["eos_token_id"]).long() == 0
    mask = torch.cat([torch.ones_like(ids), real.long(), torch.ones(2, 4, dtype=torch.int64)], dim=1)
    more = torch.cat([first.sequences, SECOND.expand(2, -1)], dim=1)
    plain = target.generate(more, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    second = turn(target, target, more, output_cache(first), attention_mask=mask)
    assert second.sequences.tolist() == plain.tolist()


def test_returned_caches_go_into_files(qwen):
    result = turn(qwen, make_drafter(qwen), FIRST)
    file = io.BytesIO()
    torch.save(output_cache(result), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    ids = torch.cat([result.sequences, SECOND], dim=1)
    assert turn(qwen, make_drafter(qwen), ids, loaded).sequences.tolist() == greedy(qwen, ids, NEW).tolist()


# Prompts


@pytest.mark.parametrize("chunk", [1, 3, 4, 9, 10, 64])
def test_prompts_in_chunks(target, chunk):
    ids = torch.cat([FIRST, FIRST.flip(1)])
    options = {"prefill_chunk_size": chunk}
    expected = greedy(target, ids, NEW)
    result = turn(target, make_drafter(target), ids, **options)
    assert result.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("chunk", [1, 4])
def test_the_drafter_gets_every_chunk(qwen, chunk, monkeypatch):
    stub = make_stub(qwen, "rand", greedy(qwen, FIRST, NEW)[0])
    seen, forward = [], DFlashDraftModel.forward

    def recording(self, noise_embeds, context_hidden_states, **kwargs):
        seen.append(context_hidden_states)
        return forward(self, noise_embeds, context_hidden_states, **kwargs)

    monkeypatch.setattr(DFlashDraftModel, "forward", recording)
    turn(qwen, stub, FIRST)
    whole = seen[0]
    seen.clear()
    turn(qwen, stub, FIRST, prefill_chunk_size=chunk)
    torch.testing.assert_close(seen[0], whole, atol=1e-4, rtol=1e-4)


def test_embedded_prompts_of_a_batch(target):
    ids = torch.cat([FIRST, FIRST.flip(1)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    embeds = {"inputs_embeds": target.get_input_embeddings()(ids), "attention_mask": mask}
    expected = target.generate(**embeds, do_sample=False, max_new_tokens=NEW)
    config = DDTreeConfig(max_new_tokens=NEW, do_sample=False)
    for assistant in (make_drafter(target), target):
        tokens = target.generate(**embeds, assistant_model=assistant, generation_config=config)
        assert tokens.tolist() == expected.tolist()


def test_token_healing(qwen):
    tokenizer = make_tokenizer()
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": NEW}
    plain = qwen.generate(FIRST, do_sample=False, **options)
    assert turn(qwen, make_drafter(qwen), FIRST, **options).sequences.tolist() == plain.tolist()


# Kinds of caches


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 20])
def test_fault_16_53_kinds_of_caches(target, kind, length):
    ids = torch.cat([FIRST, FIRST.flip(1)], dim=1)[:, :length]
    expected = greedy(target, ids, NEW)
    drafter = make_drafter(target)
    for _ in range(2):  # transformers keeps a static cache on the model
        result = turn(target, drafter, ids, cache_implementation=kind)
        assert result.sequences.tolist() == expected.tolist()


def test_a_static_cache_is_gone_on_from(target):
    cache = StaticCache(config=target.config, max_cache_len=64)
    first = turn(target, make_drafter(target), FIRST, cache)
    assert output_cache(first) is cache and int(cache.get_seq_length()) == first.sequences.shape[1] - 1
    ids = torch.cat([first.sequences, SECOND], dim=1)
    expected = greedy(target, ids, NEW)
    plain = copy.deepcopy(cache)
    tokens = target.generate(ids, do_sample=False, max_new_tokens=NEW, **{cache_name(target): plain})
    assert tokens.tolist() == expected.tolist()
    assert turn(target, make_drafter(target), ids, cache).sequences.tolist() == expected.tolist()


def test_a_static_cache_that_is_too_small_is_refused(qwen):
    cache, forwards = StaticCache(config=qwen.config, max_cache_len=20), []
    handle = qwen.register_forward_pre_hook(lambda module, inputs: forwards.append(1))
    try:
        with pytest.raises(ValueError, match="max_cache_len"):
            turn(qwen, make_drafter(qwen), FIRST, cache)
    finally:
        handle.remove()
    assert not forwards
    assert turn(qwen, make_drafter(qwen), FIRST, cache, max_new_tokens=11).sequences.shape[1] == 21


def test_returned_caches_hold_no_slack(target):
    result = turn(target, make_drafter(target), FIRST.repeat(1, 9), max_new_tokens=40)
    for layer in output_cache(result).layers:
        for states in (layer.keys, layer.values):
            assert states.untyped_storage().nbytes() <= 1.25 * states.numel() * states.element_size()


@pytest.mark.parametrize("change", ["inference mode", "dtype"])
def test_a_kept_cache_that_cannot_be_written_is_dropped(qwen, change):
    drafter = make_drafter(qwen)
    with torch.inference_mode(change == "inference mode"):
        first = turn(qwen, drafter, FIRST)
    drafter.to(torch.bfloat16 if change == "dtype" else torch.float32)
    ids = torch.cat([first.sequences.clone(), SECOND], dim=1)
    second = turn(qwen, drafter, ids, output_cache(first))
    assert second.sequences.tolist() == greedy(qwen, ids, NEW).tolist()


def test_a_dynamic_cache_that_knows_no_windows(target):
    """`DynamicCache()` holds all tokens of sliding layers too."""
    result = turn(target, make_drafter(target), FIRST, DynamicCache())
    assert result.sequences.tolist() == greedy(target, FIRST, NEW).tolist()


class Streams:
    """Stands for CUDA's streams, which offloaded caches wait for."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_offloaded_caches(target, monkeypatch):
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Streams())
    monkeypatch.setattr(torch, "Stream", Streams)
    moves, offload = [], TreeLayer.offload
    monkeypatch.setattr(TreeLayer, "offload", lambda self: (moves.append(self), offload(self)))
    cache = DynamicCache(config=target.config, offloading=True)
    result = turn(target, make_drafter(target), FIRST, cache)
    assert result.sequences.tolist() == greedy(target, FIRST, NEW).tolist()
    assert moves


def test_quantised_and_paged_caches_are_refused():
    for kind in ("quantized", "paged"):
        with pytest.raises(ValueError, match="cache_implementation"):
            DDTreeConfig(cache_implementation=kind)


def test_rounds_do_not_copy_the_context(qwen, monkeypatch):
    """Buffers grow a few times in a call; between that, a round writes into what is there."""
    storages = []
    update = TreeLayer.update

    def recording(self, *args, **kwargs):
        output = update(self, *args, **kwargs)
        storages.append((id(self), self.buffers[0].data_ptr()))
        return output

    monkeypatch.setattr(TreeLayer, "update", recording)
    ids = torch.randint(2, 64, (1, 300), generator=torch.Generator().manual_seed(0))
    result = turn(qwen, qwen, ids, max_new_tokens=150, tree_budget=4)
    assert result.rounds > 30
    assert len(set(storages)) <= 3 * len({layer for layer, _ in storages})


def test_generate_twice_with_the_same_objects(target):
    drafter, config = make_drafter(target), DDTreeConfig(max_new_tokens=NEW, do_sample=False)
    other = torch.cat([FIRST, SECOND], dim=1)
    calls = [target.generate(ids, assistant_model=drafter, generation_config=config) for ids in (FIRST, other, FIRST)]
    assert calls[0].tolist() == calls[2].tolist() == greedy(target, FIRST, NEW).tolist()
    assert calls[1].tolist() == greedy(target, other, NEW).tolist()


def test_plain_config_fields_are_untouched(target):
    before = target.generation_config.to_dict()
    turn(target, make_drafter(target), FIRST)
    assert target.generation_config.to_dict() == before
    assert isinstance(GenerationConfig.from_dict(before), GenerationConfig)
