"""Drafters of one's own: the documentation's, one that reads hidden states and gives logits; and shared layers."""

import re
from pathlib import Path

import pytest
import torch
from keyed import sampled
from stubs import decode, greedy, make_drafter, make_target, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_ddtree import Draft, Drafter

PAGE = Path(__file__).parent.parent / "docs" / "drafters.md"
PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [1, 50, 4, 4, 33, 21, 60, 2, 9, 17]])
NEW = 24


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


def test_the_documentations_drafter(target):
    code = re.search(r"```python\n(import torch\n.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    assert len(code.splitlines()) <= 30
    names = {}
    exec(code, names)
    tokenizer, expected = make_tokenizer(), greedy(target, PROMPT, NEW)
    texts = [tokenizer.decode(row[10:]) for row in expected]
    drafter = names["Phrases"](tokenizer, texts)
    drafter.phrases = [row[10:].tolist() for row in expected]  # the tokenizer may cut the text otherwise
    for rows in (1, 2):
        result = decode(target, drafter, PROMPT[:rows], max_new_tokens=NEW, return_dict_in_generate=True)
        assert result.sequences.tolist() == expected[:rows].tolist()
        assert result.mean_acceptance_length > 2


class Reading(Drafter):
    """Reads a layer's hidden states and the noise; drafts logits, right or wrong, of two depths."""

    target_layer_ids = (1,)
    gives_logits = True

    def __init__(self):
        self.seen, self.rows = [], []

    def draft(self, request):
        context = request.context
        assert context.hidden_states.shape[2] == 32 and len(context.lengths) == len(request.texts)
        self.seen.append(context.lengths)
        logits = context.hidden_states[:, :1].sum(-1, keepdim=True).expand(-1, 2, 64) * torch.arange(64).cos()
        noise = request.noise(2, logits)
        assert noise is None or noise.shape == logits.shape
        return Draft(request.roots, logits)

    def keep(self, rows):
        self.rows.append(rows)


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
def test_logits_from_hidden_states(target, sampling):
    options = {"do_sample": True, "seed": 3, "top_k": 0} if sampling else {}
    expected = sampled(target, PROMPT, NEW, 3, top_k=0) if sampling else greedy(target, PROMPT, NEW)
    drafter = Reading()
    assert decode(target, drafter, PROMPT, max_new_tokens=NEW, **options).tolist() == expected.tolist()
    told = [sum(lengths) for lengths in zip(*(each for each in drafter.seen if len(each) == 2), strict=True)]
    assert drafter.seen[0] == [PROMPT.shape[1]] * 2 and min(told) > PROMPT.shape[1]


def test_a_drafter_is_told_which_rows_go_on(target):
    expected = greedy(target, PROMPT, NEW)
    drafter, end = Reading(), int(expected[0, 14])
    decode(target, drafter, PROMPT, max_new_tokens=NEW, eos_token_id=end, pad_token_id=0)
    assert drafter.rows == [[1]]
    assert [len(lengths) for lengths in drafter.seen] == sorted((len(each) for each in drafter.seen), reverse=True)


@pytest.mark.parametrize("acceptance, shape", [("token", "chain"), ("recursive", "best_first")])
def test_logits_serve_the_classical_rules(target, acceptance, shape):
    options = {"do_sample": True, "seed": 3, "acceptance": acceptance, "tree_shape": shape}
    tokens = decode(target, Reading(), PROMPT, max_new_tokens=NEW, **options)
    assert tokens.shape[1] == PROMPT.shape[1] + NEW


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING_NAMES, reason="this transformers has no gemma4")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layers_that_share_keys_and_values(attention):
    """Gemma 4's last layers read those of earlier ones; the cache has placeholders for them."""
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 8}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 8, "sliding_window": 8}
    fields |= {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2}
    fields |= {"hidden_size_per_layer_input": 8, "initializer_range": 0.5, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model("gemma4_text", vocab_size_per_layer_input=64, **fields)
    target = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    expected = greedy(target, PROMPT, NEW)
    for drafter in (make_drafter(target, num_target_layers=6, target_layer_ids=[0, 3, 5]), target):
        result = decode(target, drafter, PROMPT, max_new_tokens=NEW, return_dict_in_generate=True)
        assert result.sequences.tolist() == expected.tolist()
