"""Training sees each drafter as decoding runs it, and each target as it is: masks, heads, starting weights."""

import pytest
import torch
from stubs import BLOCK, FAMILIES, HIDDEN, LAYER_TYPES, VOCAB, make_drafter, make_target
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    OPTConfig,
    PhiConfig,
)

from hf_ddtree import DDTreeConfig
from hf_ddtree.training.data import TokenSequence, compute_features
from hf_ddtree.training.evaluation import drafts_over
from hf_ddtree.training.initialise import drafter_from_target
from hf_ddtree.training.objective import RestrictedHead, _HeadCrossEntropy

PROMPT = torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(6))
SMALL = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 4}
GATED = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}


def target_of(config, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("causal", ["none", "sliding", "all"])
@pytest.mark.parametrize("layers", LAYER_TYPES.values(), ids=LAYER_TYPES)
@torch.no_grad()
def test_replay_counts_the_rounds_of_decoding(layers, causal):
    """Text longer than the drafter's window; the same for full, sliding and causal layers."""
    target = make_target("qwen3")
    window = {"sliding_window": 4} if "sliding_attention" in layers else {}
    drafter = make_drafter(target, layer_types=layers, causal_layers=causal, **window)
    config = DDTreeConfig(tree_budget=24, max_new_tokens=60, do_sample=False, return_dict_in_generate=True)
    result = target.generate(PROMPT, assistant_model=drafter, generation_config=config)
    text = TokenSequence(result.sequences[0], PROMPT.shape[1], None)
    (item,) = compute_features(target, [text], drafter.config.target_layer_ids)
    drafts = drafts_over(drafter, target, item)
    assert drafts.rounds(config) != [1] * (text.answer_length - 1)
    config.draft_text_weight = 0.0
    again = target.generate(PROMPT, assistant_model=drafter, generation_config=config)
    assert drafts.rounds(config) == again.acceptance_lengths[1:]


@pytest.mark.parametrize("block_size", [2, 3, 5, BLOCK])
def test_calibrated_drafters_take_shorter_blocks(block_size):
    target = make_target("llama")
    drafter = make_drafter(target, depth_temperatures=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    plain = target.generate(PROMPT, do_sample=False, max_new_tokens=12)
    config = DDTreeConfig(draft_block_size=block_size, max_new_tokens=12, do_sample=False)
    assert target.generate(PROMPT, assistant_model=drafter, generation_config=config).tolist() == plain.tolist()


HEADS = {
    "granite": GraniteConfig(**GATED, logits_scaling=8.0),
    "cohere": CohereConfig(**GATED, logit_scale=0.0625),
    "softcap": Gemma2Config(**GATED, head_dim=8, final_logit_softcapping=2.0),
    "bias": PhiConfig(**SMALL, intermediate_size=64),
}


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_the_loss_has_the_targets_own_logits(config):
    target = target_of(config)
    head = target.get_output_embeddings()
    torch.nn.init.normal_(head.weight)
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    (item,) = compute_features(target, [TokenSequence(PROMPT[0], 3, None)], [0])
    with torch.no_grad():
        ours, theirs = RestrictedHead(target, torch.arange(VOCAB)).logits(item.final), target(PROMPT).logits[0]
    torch.testing.assert_close(ours, theirs)


def test_the_softcaps_slope_is_in_the_gradient():
    head = RestrictedHead(target_of(HEADS["softcap"]), torch.arange(VOCAB))
    head.weight.normal_(generator=torch.Generator().manual_seed(1))
    hidden, final = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(2))
    hidden, weights = hidden.requires_grad_(True), torch.rand(5)
    soft = head.logits(final).softmax(-1).detach()
    expected = (torch.nn.functional.cross_entropy(head.logits(hidden), soft, reduction="none") * weights).sum()
    loss = _HeadCrossEntropy.apply(hidden, final, head, weights, 1.0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden), torch.autograd.grad(expected, hidden))


COPIED = {"llama", "qwen2", "qwen3", "qwen3-sliding", "qwen3_vl", "mistral"}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_layers_of_the_same_kind_are_copied(family):
    """Names and shapes alone would take Gemma's, whose norms scale by one more than their weight."""
    drafter = drafter_from_target(make_target(family), 2, block_size=BLOCK, mask_token_id=5)
    assert torch.equal(drafter.fc.weight[:, -HIDDEN:], torch.eye(HIDDEN)) == (family in COPIED)
    assert all(tensor.isfinite().all() and (tensor.any() or tensor.ndim < 2) for tensor in drafter.parameters())


OTHERS = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=1),
    "opt": OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=HIDDEN, pad_token_id=0),
    "phi, yarn": PhiConfig(
        **SMALL, intermediate_size=64, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    ),
    "gemma2": HEADS["softcap"],
}


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_other_targets_get_a_drafter_that_runs(config):
    target = target_of(config)
    drafter = drafter_from_target(target, 2, block_size=BLOCK, mask_token_id=5)
    (item,) = compute_features(target, [TokenSequence(PROMPT[0], 3, None)], drafter.config.target_layer_ids)
    assert drafts_over(drafter, target, item).logits.isfinite().all()
