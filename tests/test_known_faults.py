"""Known public faults that no other file's tests carry the number of."""

import accelerate
import pytest
import torch
from stubs import decode, greedy, make_drafter, make_stub, make_target
from transformers import GPT2Config, GPT2LMHeadModel

from hf_ddtree import Drafter, tree_of_paths
from hf_ddtree.attention import LayerKinds
from hf_ddtree.benchmark import race
from hf_ddtree.cache import output_cache
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


@pytest.mark.parametrize("seed", range(6))
def test_fault_20_in_16_bit_texts_part_at_near_ties_only(seed):
    target = make_target("qwen3", seed=seed).bfloat16()
    ids = torch.randint(2, 64, (1, 12), generator=torch.Generator().manual_seed(seed))
    plain = greedy(target, ids, 60)[0, 12:].tolist()
    for drafter in (make_drafter(target).bfloat16(), target):
        ours = decode(target, drafter, ids, max_new_tokens=60)[0, 12:].tolist()
        difference = race.first_difference(target, ids, ours, plain)
        # A tiny model's logits carry the rounding of all its layers: some units more than the last place's two.
        assert difference is None or difference.gap <= 4 * difference.rounding


@pytest.mark.parametrize(
    "target_dtype, drafter_dtype", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_fault_46_47_drafters_of_another_precision_keep_it(target_dtype, drafter_dtype):
    target = make_target("qwen3").to(target_dtype)
    drafter = make_drafter(target).to(drafter_dtype)
    result = decode(target, drafter, PROMPT, max_new_tokens=NEW, return_dict_in_generate=True)
    assert result.sequences.shape[1] == PROMPT.shape[1] + NEW and drafter.dtype == drafter_dtype


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


# Drafters that end before the text does


def test_fault_43_44_text_longer_than_the_drafters_positions(qwen):
    for fields in (
        {"max_position_embeddings": 16},
        {"max_position_embeddings": 16, "layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    ):
        tokens = decode(qwen, make_drafter(qwen, **fields), PROMPT, max_new_tokens=60)
        assert tokens.tolist() == greedy(qwen, PROMPT, 60).tolist()


@pytest.mark.falls_back
def test_fault_44_an_assistant_of_few_positions(qwen):
    """GPT-2 has an embedding per position; beyond its last one all is decoded plainly, with a warning."""
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=24, bos_token_id=1, eos_token_id=1)
    assistant = GPT2LMHeadModel(config).eval()
    result = decode(qwen, assistant, PROMPT, max_new_tokens=50, return_dict_in_generate=True)
    assert result.sequences.tolist() == greedy(qwen, PROMPT, 50).tolist()
    assert result.fallback_rounds == {"draft": 3}


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


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_fault_59_wide_trees_over_experts(family):
    target = make_target(family)
    for drafter in (make_stub(target, "oracle-3", greedy(target, PROMPT[:1], NEW)[0]), target):
        tokens = decode(target, drafter, PROMPT[:1], max_new_tokens=NEW, tree_budget=64)
        assert tokens.tolist() == greedy(target, PROMPT[:1], NEW).tolist()


def test_fault_58_a_round_costs_its_nodes_not_the_square_of_the_text(qwen, monkeypatch):
    """Masks have a row per node; logits one row in the prefill and a row per node after it."""
    sizes, make, logits = [], LayerKinds.masks, []

    def masks(self, *args):
        made = make(self, *args)
        sizes.append(tuple(made.shape))
        return made

    monkeypatch.setattr(LayerKinds, "masks", masks)
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
    ids, cache = PROMPT[:1], None
    for budget in (7, 0, 32, 1):
        given = {} if cache is None else {next(iter(cache)): next(iter(cache.values()))}
        expected = greedy(qwen, ids, 8)
        result = decode(
            qwen, make_drafter(qwen), ids, max_new_tokens=8, tree_budget=budget, return_dict_in_generate=True, **given
        )
        assert result.sequences.tolist() == expected.tolist()
        cache = {"cache" if "cache" in result else "past_key_values": output_cache(result)}
        ids = torch.cat([result.sequences, PROMPT[1:, :3]], dim=1)
