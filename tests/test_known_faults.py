"""Known public faults that no other file's tests carry the number of."""

import accelerate
import pytest
import torch
from stubs import NormedEmbedding, decode, greedy, make_drafter, make_stub, make_target
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, OPTConfig

from hf_ddtree import DDTreeConfig, Drafter, tree_of_paths
from hf_ddtree.attention import TreeMasks
from hf_ddtree.benchmark import race
from hf_ddtree.cache import cache_name, output_cache
from hf_ddtree.drafting.assistant import table_of_positions
from hf_ddtree.target import Target

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [1, 50, 4, 4, 33, 21, 60, 2, 9, 17]])
NEW = 24


@pytest.fixture(scope="module")
def qwen():
    return make_target("qwen3", seed=10)


# Devices


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("drafter", ["dflash", "hooked dflash", "assistant", "hooked assistant"])
def test_fault_15_weights_that_accelerate_moves_in_and_out(offload, drafter, tmp_path):
    """Every module's weights are on the meta device between its forwards, so nothing may read them."""
    expected = greedy(make_target("qwen3"), PROMPT, NEW)
    target, assistant = make_target("qwen3"), make_target("llama", seed=4)
    if "dflash" in drafter:
        assistant = make_drafter(target, transition_rank=4, depth_temperatures=[1.1] * 7)
    for model in [target, assistant] if "hooked" in drafter else [target]:
        if offload == "cpu":
            accelerate.cpu_offload(model, execution_device="cpu")
        else:
            accelerate.disk_offload(model, tmp_path / type(model).__name__, execution_device="cpu")
    assert target.lm_head.weight.device.type == "meta"
    assert decode(target, assistant, PROMPT, max_new_tokens=NEW).tolist() == expected.tolist()


def test_fault_15_an_embedding_with_a_norm_that_accelerate_moves():
    target = make_target("qwen3")
    target.set_input_embeddings(NormedEmbedding(64, 32))
    expected = decode(target, make_drafter(target), PROMPT, max_new_tokens=NEW, return_dict_in_generate=True)
    accelerate.cpu_offload(target, execution_device="cpu")
    assert target.get_input_embeddings().weight.device.type == "meta"
    result = decode(target, make_drafter(target), PROMPT, max_new_tokens=NEW, return_dict_in_generate=True)
    assert result.sequences.tolist() == expected.sequences.tolist()
    assert result.acceptance_lengths == expected.acceptance_lengths


# Caches


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gemma3"])
def test_fault_17_every_round_takes_its_tree_back(family, monkeypatch):
    target = make_target(family)
    expected, lengths, commit = greedy(target, PROMPT[:1], NEW), [], Target.commit

    def recording(self, accepted):
        context = commit(self, accepted)
        lengths.append(int(self.cache.get_seq_length()))
        return context

    monkeypatch.setattr(Target, "commit", recording)
    stub = make_stub(target, "anti", expected[0])
    result = decode(target, stub, PROMPT[:1], max_new_tokens=NEW, return_dict_in_generate=True)
    assert result.sequences.tolist() == expected.tolist()
    assert lengths == list(range(PROMPT.shape[1], PROMPT.shape[1] + NEW))
    assert output_cache(result).get_seq_length() == PROMPT.shape[1] + NEW - 1


# Precision


def test_fault_20_in_16_bit_texts_part_at_near_ties_only():
    differences = []
    for seed in range(6):
        target = make_target("qwen3", seed=seed).bfloat16()
        ids = torch.randint(2, 64, (1, 12), generator=torch.Generator().manual_seed(seed))
        plain = greedy(target, ids, 60)[0, 12:].tolist()
        for drafter in (make_drafter(target).bfloat16(), target):
            ours = decode(target, drafter, ids, max_new_tokens=60)[0, 12:].tolist()
            differences.append(race.first_difference(target, ids, ours, plain))
    # A tiny model's logits carry the rounding of all its layers: some units more than the last place's two.
    assert all(each is None or each.gap <= 4 * each.rounding for each in differences)
    assert None in differences


@pytest.mark.parametrize(
    "target_dtype, drafter_dtype", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_fault_46_47_drafters_of_another_precision_keep_it(target_dtype, drafter_dtype):
    target = make_target("qwen3").to(target_dtype)
    drafter = make_drafter(target).to(drafter_dtype)
    result = decode(target, drafter, PROMPT, max_new_tokens=NEW, return_dict_in_generate=True)
    assert result.sequences.shape[1] == PROMPT.shape[1] + NEW and drafter.dtype == drafter_dtype
    for ids, ours, plain in zip(PROMPT, result.sequences, greedy(target, PROMPT, NEW), strict=True):
        difference = race.first_difference(target, ids[None], ours[len(ids) :].tolist(), plain[len(ids) :].tolist())
        assert difference is None or difference.gap <= 4 * difference.rounding
    assert sum(map(len, result.acceptance_lengths)) < len(PROMPT) * NEW  # some drafts were right


class Int8Linear(torch.nn.Module):
    """A quantised linear layer: int8 rows with a scale each, and no floating-point `weight`."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("quantised", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, states):
        return states @ (self.quantised.to(states.dtype) * self.scale).T


@pytest.mark.parametrize("drafter", ["dflash", "transition", "assistant"])
@pytest.mark.parametrize("rows", [1, 2])
def test_fault_48_49_quantised_targets(drafter, rows):
    """Compared with the quantised target's own text, its head included."""
    target = make_target("qwen3")
    original = greedy(target, PROMPT[:rows], NEW)
    for name, module in list(target.named_modules()):
        if isinstance(module, torch.nn.Linear):
            target.set_submodule(name, Int8Linear(module))
    expected = greedy(target, PROMPT[:rows], NEW)
    assert expected.tolist() != original.tolist()
    fields = {"transition_rank": 4} if drafter == "transition" else {}
    assistant = target if drafter == "assistant" else make_drafter(target, **fields)
    assert decode(target, assistant, PROMPT[:rows], max_new_tokens=NEW).tolist() == expected.tolist()


def test_fault_47_49_quantised_drafters(qwen):
    """The states they are given stay floating-point, and aren't cut to the whole numbers that their weights are."""
    drafter = make_drafter(qwen)
    for name, module in list(drafter.named_modules()):
        if isinstance(module, torch.nn.Linear):
            drafter.set_submodule(name, Int8Linear(module))
    result = decode(qwen, drafter, PROMPT[:1], max_new_tokens=60, return_dict_in_generate=True)
    assert result.sequences.tolist() == greedy(qwen, PROMPT[:1], 60).tolist()
    drafter.fc.weight = torch.nn.Parameter(drafter.fc.quantised, requires_grad=False)  # as bitsandbytes' layers have it
    assert drafter(torch.zeros(1, 8, 32), torch.rand(1, 3, 64)).last_hidden_state.isfinite().all()


# Drafters that end before the text does


def test_fault_43_44_text_longer_than_the_drafters_positions(qwen):
    for fields in (
        {"max_position_embeddings": 16},
        {"max_position_embeddings": 16, "layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    ):
        tokens = decode(qwen, make_drafter(qwen, **fields), PROMPT, max_new_tokens=60)
        assert tokens.tolist() == greedy(qwen, PROMPT, 60).tolist()


TINY = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
GPT = {**TINY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
OPT = {**TINY, "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TABLES = {
    "gpt2": GPT2Config(**GPT),
    "gptj": GPTJConfig(**GPT, rotary_dim=4),
    "opt": OPTConfig(**OPT, ffn_dim=64, max_position_embeddings=24),
}


@pytest.mark.falls_back
@pytest.mark.parametrize("config", TABLES.values(), ids=TABLES)
def test_fault_44_an_assistant_of_few_positions(qwen, config):
    """It looks them up in a table. Beyond its end all is decoded plainly, with a warning, and the table isn't asked: an
    accelerator would abort, which nothing catches.
    """
    assistant, given = AutoModelForCausalLM.from_config(config).eval(), []
    assert table_of_positions(assistant) == 24 and table_of_positions(qwen) is None
    assistant.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    result = decode(qwen, assistant, PROMPT, max_new_tokens=50, return_dict_in_generate=True)
    assert result.sequences.tolist() == greedy(qwen, PROMPT, 50).tolist()
    assert result.fallback_rounds == {"draft": 3} and max(given) == 23


# Trees and their cost


class Spine(Drafter):
    """The true next tokens, now and then a wrong one among them; with `siblings` before them in the tree, or alone."""

    def __init__(self, text, siblings):
        self.text, self.siblings = text.tolist(), siblings

    def draft(self, request):
        start = len(request.texts[0])
        spine = [token if place % 5 else (token + 1) % 64 for place, token in enumerate(self.text)][start : start + 6]
        wrong = [[*spine[:depth], (token + 2) % 64] for depth, token in enumerate(spine) for _ in range(self.siblings)]
        return tree_of_paths(request.roots, [[*wrong, spine]], budget=64)


def test_fault_50_a_tree_accepts_what_its_spine_would(qwen):
    reference = greedy(qwen, PROMPT[:1], 40)[0]
    chain, tree = (
        decode(qwen, Spine(reference, siblings), PROMPT[:1], max_new_tokens=40, return_dict_in_generate=True)
        for siblings in (0, 1)
    )
    assert chain.acceptance_lengths == tree.acceptance_lengths and max(chain.acceptance_lengths) > 2
    assert tree.verified_nodes > chain.verified_nodes
    assert tree.sequences[0].tolist() == reference.tolist()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "kimi_k25"])
def test_fault_59_wide_trees_over_experts(family):
    target = make_target(family)
    for drafter in (make_stub(target, "oracle-3", greedy(target, PROMPT[:1], NEW)[0]), target):
        tokens = decode(target, drafter, PROMPT[:1], max_new_tokens=NEW, tree_budget=64)
        assert tokens.tolist() == greedy(target, PROMPT[:1], NEW).tolist()


def test_fault_58_a_round_costs_its_nodes_not_the_square_of_the_text(qwen, monkeypatch):
    """Masks have a row per node; logits one row in the prefill and a row per node after it."""
    sizes, make, logits = [], TreeMasks.write, []

    def masks(self, *args):
        made = make(self, *args)
        sizes.append(tuple(made.shape))
        return made

    monkeypatch.setattr(TreeMasks, "write", masks)
    handle = qwen.register_forward_hook(lambda module, inputs, output: logits.append(output.logits.shape[1]))
    ids = torch.randint(2, 64, (1, 3000), generator=torch.Generator().manual_seed(0))
    decode(qwen, make_drafter(qwen), ids, max_new_tokens=8, tree_budget=20)
    handle.remove()
    assert logits[0] == 1 and max(logits[1:]) <= 21
    assert all(rows == 1 and nodes <= 21 and keys <= 3000 + 8 + 21 for rows, _, nodes, keys in sizes)


def test_fault_61_the_result_says_what_every_round_accepted(qwen):
    expected = greedy(qwen, PROMPT[:1], NEW)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "tree_budget": 7, "tree_top_k": 1}
    result = decode(qwen, make_stub(qwen, "oracle-1", expected[0]), PROMPT[:1], **options)
    assert result.acceptance_lengths[:3] == [1, 8, 8] and sum(result.acceptance_lengths) == NEW
    assert len(result.acceptance_lengths) == result.rounds


def test_fault_64_budgets_may_change_between_turns(qwen):
    """By keyword, 0 included; the drafter goes on from what it knew before a turn without it, or from nothing."""
    config = DDTreeConfig(tree_budget=5, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    ids, options = PROMPT[:1], {}
    for budget in (7, 0, 32, 0, 1):
        expected = greedy(qwen, ids, 8)
        drafter = make_stub(qwen, "anti", torch.nn.functional.pad(expected[0], (0, 8), value=2))
        result = qwen.generate(ids, assistant_model=drafter, generation_config=config, tree_budget=budget, **options)
        assert result.sequences.tolist() == expected.tolist()
        assert result.verified_nodes == 6 * budget or budget == 32
        ids = torch.cat([result.sequences, PROMPT[1:, :3]], dim=1)
        options = {cache_name(qwen): output_cache(result)}
    assert config.tree_budget == 5
