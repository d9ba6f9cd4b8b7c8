"""Arguments and states at the edges: what plain `generate` accepts gives the same text, or is refused by name."""

import pytest
import torch
from stubs import FAMILIES, STUBS, NormedEmbedding, decode, greedy, make_drafter, make_emissions, make_stub, make_target
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LogitsProcessor, LogitsProcessorList

from hf_ddtree import DDTreeConfig
from hf_ddtree.cache import CACHE_NAMES, cache_name
from hf_ddtree.figures import Figures
from hf_ddtree.models.dflash import noise_embeddings

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8]])


def from_config(model_type, **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=64, initializer_range=0.5, eos_token_id=None, **fields)
    return AutoModelForCausalLM.from_config(config).float().eval()


GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "pad_token_id": 0}


@pytest.mark.parametrize("keep", [0, 1, 5])
def test_prefill_logits_of_any_number_of_rows(keep):
    target = make_target("qwen3")
    tokens = decode(target, make_drafter(target), PROMPT, max_new_tokens=12, logits_to_keep=keep)
    assert tokens.tolist() == greedy(target, PROMPT, 12).tolist()


@pytest.mark.parametrize("kind", STUBS)
def test_token_type_ids_go_on_as_in_plain_decoding(kind):
    target = from_config("gpt2", **GPT2)
    types = torch.tensor([[3, 4, 3, 3, 4, 4, 3, 4, 3, 4]])
    reference = greedy(target, PROMPT, 16, token_type_ids=types)
    assert reference.tolist() != greedy(target, PROMPT, 16).tolist()
    stub = make_stub(target, kind, reference[0])
    assert decode(target, stub, PROMPT, max_new_tokens=16, token_type_ids=types).tolist() == reference.tolist()


def test_router_logits_asked_for_by_the_model():
    target = make_target("gpt_oss", output_router_logits=True)
    tokens = decode(target, make_drafter(target), PROMPT, max_new_tokens=12)
    assert tokens.tolist() == greedy(target, PROMPT, 12).tolist()


def test_local_attention_is_refused():
    fields = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]}
    target = from_config("gpt_neo", window_size=8, bos_token_id=1, **fields)
    with pytest.raises(ValueError, match="local"):
        decode(target, make_drafter(target, num_target_layers=4), PROMPT, max_new_tokens=4)


def test_positions_not_the_length_count_for_rope():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    target = make_target("llama", rope_parameters=rope, max_position_embeddings=32)
    positions = torch.arange(20, 30)[None]
    with pytest.raises(ValueError, match="RoPE"):
        decode(target, make_drafter(target), PROMPT, max_new_tokens=3, position_ids=positions)
    tokens = decode(target, make_drafter(target), PROMPT, max_new_tokens=2, position_ids=positions)
    assert tokens.tolist() == greedy(target, PROMPT, 2, position_ids=positions).tolist()


class FailsAt(LogitsProcessor):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.length:
            raise RuntimeError("a processor failed")
        return scores


def test_an_exception_leaves_no_rejected_nodes_in_a_given_cache():
    target = make_target("qwen3")
    cache = DynamicCache(config=target.config)
    processors = LogitsProcessorList([FailsAt(15)])
    with pytest.raises(RuntimeError, match="a processor failed"):
        decode(target, make_drafter(target), PROMPT, logits_processor=processors, **{cache_name(target): cache})
    assert PROMPT.shape[1] <= cache.get_seq_length() <= 15


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_the_returned_caches_layers_are_the_librarys_own(family):
    target = make_target(family)
    result = decode(target, make_drafter(target), PROMPT, max_new_tokens=12, return_dict_in_generate=True)
    cache = next(result[name] for name in CACHE_NAMES if name in result)
    own = DynamicCache(config=target.config)
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in own.layers]
    assert not any(layer.record_past for layer in cache.layers if layer.is_sliding)


def test_a_norm_inside_the_embedding_is_not_for_the_noise_block():
    target = make_target("llama")
    target.set_input_embeddings(NormedEmbedding(64, 32))
    embedding = target.get_input_embeddings()
    torch.testing.assert_close(noise_embeddings(embedding, PROMPT), embedding.weight[PROMPT])
    assert not torch.allclose(embedding(PROMPT), embedding.weight[PROMPT])


@pytest.mark.parametrize(("device", "waits"), [(None, 0), (torch.device("cpu"), 0), (torch.device("cuda"), 2)])
def test_stages_wait_for_the_device_only_if_asked(device, waits, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.accelerator, "synchronize", calls.append)
    figures = Figures(make_emissions(PROMPT, DDTreeConfig()), device)
    for _ in range(2):
        with figures.stage("draft"):
            pass
    assert len(calls) == waits and figures.seconds["draft"] > 0


def test_config_from_a_model_config():
    config = DDTreeConfig.from_model_config(AutoConfig.for_model(**FAMILIES["llama"]))
    assert config.tree_budget == 32 and config.pad_token_id == 0


@pytest.mark.parametrize("name", ["budget", "block_size", "tree_budgett"])
def test_a_misspelt_field_is_named(name):
    with pytest.raises(ValueError, match=f"`{name}`.*did you mean"):
        DDTreeConfig(**{name: 3})
