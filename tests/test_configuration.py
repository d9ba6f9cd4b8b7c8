"""Settings arrive or are refused by name, before the first forward; nothing is left behind."""

import copy
from contextlib import contextmanager

import pytest
import torch
from keyed import sampled
from stubs import BLOCK, HIDDEN, LAYERS, VOCAB, decode, greedy, make_drafter, make_stub, make_target
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.utils import GENERATION_MODES_MAPPING

from hf_ddtree import DDTreeConfig, DDTreeOutput
from hf_ddtree.figures import STAGES
from hf_ddtree.target import Target

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10]])
START = PROMPT.shape[1]


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", seed=10)


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target)


@contextmanager
def forwards_of(model):
    """A list that grows by one with each forward of the model."""
    seen = []
    hook = model.register_forward_pre_hook(lambda *_: seen.append(1))
    yield seen
    hook.remove()


def refused(model, *parts, ids=PROMPT, **call):
    """`generate` raises a ValueError with all `parts` in its message, and the model never ran."""
    call.setdefault("generation_config", DDTreeConfig(do_sample=False, max_new_tokens=4))
    with forwards_of(model) as forwards, pytest.raises(ValueError) as error:
        model.generate(ids, **call)
    assert not forwards
    assert all(part in str(error.value) for part in parts), str(error.value)


# Validation

OUT_OF_RANGE = {
    "tree_budget": (-1, 1.5, True, None, "8"),
    "tree_top_k": (0, -2, 2.0, False),
    "draft_block_size": (0, -1, 4.0),
    "num_beams": (2,),
    "use_cache": (False,),
    "cache_implementation": ("quantized",),
    "drafter": ("looking up", True),
    "prompt_lookup_num_tokens": (3,),
    "assistant_early_exit": (2,),
    "use_mtp": (True,),
    "penalty_alpha": (0.6,),
    "dola_layers": ("low",),
}
WRONG = [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]


@pytest.mark.parametrize("name, value", WRONG, ids=[f"{name}={value!r}" for name, value in WRONG])
def test_fault_23_config_refuses_by_name_and_value(name, value):
    with pytest.raises(ValueError) as error:
        DDTreeConfig(do_sample=True, **{name: value})
    assert f"{name}={value!r}" in str(error.value) or f"`{name}` is {value!r}" in str(error.value)


AS_KEYWORD = [(name, value) for name, value in WRONG if value is not None]


@pytest.mark.parametrize("name, value", AS_KEYWORD, ids=[f"{name}={value!r}" for name, value in AS_KEYWORD])
def test_fault_23_keyword_is_refused_by_name_before_any_forward(target, drafter, name, value):
    config = DDTreeConfig(do_sample=True, max_new_tokens=4)
    refused(target, name, str(value), assistant_model=drafter, generation_config=config, **{name: value})


def test_value_assigned_after_construction_is_refused(target, drafter):
    config = DDTreeConfig(do_sample=False, max_new_tokens=4)
    config.tree_budget = -1
    refused(target, "`tree_budget` is -1", assistant_model=drafter, generation_config=config)


@pytest.mark.parametrize("fields", [{"tree_budget": 0}, {"tree_top_k": 1, "draft_block_size": 1}], ids=str)
def test_least_values_are_accepted(target, drafter, fields):
    tokens = decode(target, drafter, PROMPT, max_new_tokens=6, **fields)
    assert tokens.tolist() == greedy(target, PROMPT, 6).tolist()


# Round trips

FIELDS = {
    "tree_budget": 21,
    "tree_top_k": 5,
    "draft_block_size": 6,
    "synchronize_stages": True,
    "max_new_tokens": 33,
    "repetition_penalty": 1.25,
}


@pytest.mark.parametrize("reader", [DDTreeConfig, GenerationConfig], ids=["ours", "base"])
def test_save_and_load(tmp_path, reader):
    config = DDTreeConfig(**FIELDS)
    config.save_pretrained(tmp_path)
    loaded = reader.from_pretrained(tmp_path)
    assert type(loaded) is reader
    assert {name: getattr(loaded, name) for name in FIELDS} == FIELDS
    assert loaded.to_dict() == config.to_dict()


def test_deepcopy_keeps_class_and_fields():
    config = copy.deepcopy(DDTreeConfig(**FIELDS))
    assert type(config) is DDTreeConfig
    assert {name: getattr(config, name) for name in FIELDS} == FIELDS


# Settings reach the loop


@pytest.fixture
def trees(monkeypatch):
    seen, real = [], Target.verify
    monkeypatch.setattr(Target, "verify", lambda self, tree: (seen.append(tree), real(self, tree))[1])
    return seen


@pytest.mark.parametrize("as_keyword", [False, True], ids=["config", "keyword beats config"])
def test_fault_23_settings_reach_the_trees(target, as_keyword, trees):
    """No draft is ever right here, so each of 12 rounds drafts anew, up to what is left to generate."""
    for wanted, nodes, depth in (
        ({"tree_budget": 3, "tree_top_k": 1, "draft_block_size": 8}, 3, 3),
        ({"tree_budget": 9, "tree_top_k": 1, "draft_block_size": 3}, 2, 2),
        ({"tree_budget": 5, "tree_top_k": 2, "draft_block_size": 2}, 2, 1),
        ({"tree_budget": 5, "tree_top_k": 9, "draft_block_size": 2}, 5, 1),
    ):
        trees.clear()
        others = {"tree_budget": 4, "tree_top_k": 4, "draft_block_size": 4}
        config = DDTreeConfig(do_sample=False, max_new_tokens=12, **(others if as_keyword else wanted))
        before = config.to_dict()
        stub = make_stub(target, "anti", greedy(target, PROMPT, 20)[0])
        call = wanted if as_keyword else {}
        target.generate(PROMPT, assistant_model=stub, generation_config=config, **call)
        assert {(tree.num_nodes - 1, int(tree.depths.max())) for tree in trees[:6]} == {(nodes, depth)}
        assert config.to_dict() == before  # the user's object stays as it was


def test_budget_as_a_keyword_shows_in_the_result(target):
    config = DDTreeConfig(do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
    stub = make_stub(target, "anti", greedy(target, PROMPT, 20)[0])
    result = target.generate(PROMPT, assistant_model=stub, generation_config=config, tree_budget=3)
    assert result.verified_nodes == 4 * 3  # the prefill and the last of six rounds draft nothing


def test_fault_25_misspelt_keyword_is_refused(target, drafter):
    refused(target, "tree_budgett", assistant_model=drafter, tree_budgett=3)


# The result


@pytest.mark.parametrize("kind", ["oracle-1", "oracle-2", "anti", "rand"])
def test_output_figures(target, kind, trees):
    stub = make_stub(target, kind, greedy(target, PROMPT, 30)[0])
    with forwards_of(target) as forwards:
        result = decode(target, stub, PROMPT, max_new_tokens=21, return_dict_in_generate=True)
    assert isinstance(result, DDTreeOutput)
    assert sum(result.acceptance_lengths) == result.sequences.shape[1] - START == 21
    assert result.rounds == len(result.acceptance_lengths) == len(forwards) == len(trees) + 1
    assert result.acceptance_lengths[0] == 1 and max(result.acceptance_lengths) <= BLOCK
    assert result.verified_nodes == sum(tree.num_nodes - 1 for tree in trees)
    assert result.mean_acceptance_length == pytest.approx(20 / (result.rounds - 1))
    assert set(result.stage_seconds) == {"prefill", *STAGES}
    assert all(seconds > 0 for seconds in result.stage_seconds.values())
    assert (kind == "anti") == (result.rounds == 21)
    assert result.scores is None and result.logits is None


# Several texts


def test_fault_28_batch(target, drafter):
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    result = decode(target, drafter, ids, max_new_tokens=12, return_dict_in_generate=True)
    assert result.sequences.tolist() == greedy(target, ids, 12).tolist()
    assert [sum(lengths) for lengths in result.acceptance_lengths] == [12, 12]


def test_fault_28_num_return_sequences_with_sampling(target, drafter):
    """Sequences of one prompt have noise of their own, as rows of a batch have."""
    config = DDTreeConfig(do_sample=True, max_new_tokens=12, seed=3)
    call = {"assistant_model": drafter, "generation_config": config}
    tokens = target.generate(PROMPT, num_return_sequences=2, **call)
    assert tokens.tolist() == sampled(target, PROMPT.expand(2, -1), 12, seed=3).tolist()
    assert tokens[0].tolist() != tokens[1].tolist()


# Refusals before the first forward


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_fault_27_per_token_states(target, drafter, name):
    config = DDTreeConfig(do_sample=False, return_dict_in_generate=True, **{name: True})
    refused(target, name, assistant_model=drafter, generation_config=config)


def test_synced_gpus(target, drafter):
    refused(target, "synced_gpus", assistant_model=drafter, synced_gpus=True)


def test_no_assistant(target):
    refused(target, "assistant_model", "DFlashDraftModel.from_pretrained")


def test_assistant_that_is_no_drafter(target):
    refused(target, "Qwen3Model", "DFlashDraftModel", assistant_model=make_target("qwen3").model)


def test_drafter_folder_read_by_another_class(target, drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    refused(target, "Qwen3Model", "read by another class", assistant_model=AutoModel.from_pretrained(tmp_path))


TINY = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
UNFIT_TARGETS = {
    "mamba": {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 4},
    "qwen3_next": {
        **TINY,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "lfm2": {**TINY, "layer_types": ["conv", "full_attention"] * 2},  # its stateful flag is unset
    "minimax": {**TINY, "head_dim": 8, "num_local_experts": 2},  # unset as well
    "llama4_text": {**TINY, "head_dim": 8, "intermediate_size_mlp": 32, "num_local_experts": 2},  # chunked attention
    "bloom": {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 4},  # no positions
    "t5": {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 8, "d_ff": 32, "num_layers": LAYERS, "num_heads": 4},
}


@pytest.mark.parametrize("family", UNFIT_TARGETS)
def test_fault_18_targets_that_cannot_verify_a_tree(drafter, family):
    fields = {**UNFIT_TARGETS[family], **({"decoder_start_token_id": 0} if family == "t5" else {})}
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(family, **fields)).eval()
    refused(model, type(model).__name__, assistant_model=drafter)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_fault_21_attention_that_takes_no_tree_mask(drafter, name):
    model = make_target("qwen3")
    model.config._attn_implementation = name
    refused(model, name, "set_attn_implementation", assistant_model=drafter)


MISFITS = {
    "hidden_size": ({"hidden_size": 2 * HIDDEN}, str(2 * HIDDEN), str(HIDDEN)),
    "vocab_size": ({"vocab_size": VOCAB + 8}, str(VOCAB + 8), str(VOCAB)),
    "num_target_layers": ({"num_target_layers": 9}, "9", str(LAYERS)),
    "target_layer_ids": ({"target_layer_ids": [0, LAYERS]}, f"[0, {LAYERS}]", f"0..{LAYERS - 1}"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_fault_37_41_drafter_of_another_target(target, name):
    overrides, *values = MISFITS[name]
    refused(target, f"`{name}`", *values, assistant_model=make_drafter(target, **overrides))


def test_draft_block_size_beyond_the_trained_one(target, drafter):
    config = DDTreeConfig(do_sample=False, draft_block_size=BLOCK + 1)
    refused(target, "draft_block_size", str(BLOCK + 1), assistant_model=drafter, generation_config=config)


# Nothing is left behind


def state_of(*models):
    state = [dict(GENERATION_MODES_MAPPING)]
    for model in models:
        generation_config = getattr(model, "generation_config", None)
        state += [
            model.config.to_dict(),
            generation_config and generation_config.to_dict(),
            model.config._attn_implementation,
            sorted(model.__dict__),
            [(module.training, len(module._forward_hooks)) for module in model.modules()],
            {name: parameter.data_ptr() for name, parameter in model.named_parameters()},
        ]
    return state


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > START + 4:
            raise RuntimeError("a processor failed")
        return scores


def test_fault_22_state_is_unchanged_after_a_run_and_after_an_exception(target):
    reference = greedy(target, PROMPT, 20)
    stub = make_stub(target, "oracle-2", reference[0])
    target(PROMPT, output_hidden_states=[1])  # the library installs its capturing hooks for good at their first use
    before = copy.deepcopy(state_of(target, stub))
    assert decode(target, stub, PROMPT, max_new_tokens=20).tolist() == reference.tolist()
    assert state_of(target, stub) == before
    with pytest.raises(RuntimeError, match="a processor failed"):
        decode(target, stub, PROMPT, max_new_tokens=20, logits_processor=LogitsProcessorList([Failing()]))
    assert state_of(target, stub) == before
    assert decode(target, stub, PROMPT, max_new_tokens=20).tolist() == reference.tolist()


def test_fault_22_calls_a_b_a(target, drafter):
    other = torch.tensor([[3, 4, 5, 9, 9, 2, 61, 33, 12, 8, 40, 22, 7]])
    first = decode(target, drafter, PROMPT, max_new_tokens=12).tolist()
    assert decode(target, drafter, other, max_new_tokens=20).tolist() == greedy(target, other, 20).tolist()
    assert decode(target, drafter, PROMPT, max_new_tokens=12).tolist() == first == greedy(target, PROMPT, 12).tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_worthless_drafts_never_change_the_text(target, value):
    reference = greedy(target, PROMPT, 16)
    stub = make_stub(target, "rand", reference[0])
    stub.logits_for = lambda committed, real: torch.full_like(real, value)
    assert decode(target, stub, PROMPT, max_new_tokens=16).tolist() == reference.tolist()
