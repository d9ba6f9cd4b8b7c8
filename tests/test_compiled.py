"""Compiled forwards: each way in which a replay of something recorded earlier could go wrong, and the text."""

import pytest
import torch
from fake_graph import FakeGraph
from keyed import sampled
from stubs import CORE_FAMILIES, decode, greedy, make_drafter, make_stub, make_target
from transformers.utils import logging

from hf_ddtree import DDTreeConfig, compiled
from hf_ddtree.compiled import Forwards

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [0, 0, 0, 50, 4, 4, 33, 21, 60, 17]])
MASK = (PROMPT > 0).long()
NEW = 40
# Experts are chosen by counting tokens, which waits for the host.
WITH_EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "kimi_k25")
DENSE = [family for family in CORE_FAMILIES if family not in WITH_EXPERTS]


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Graphs for the CPU."""
    monkeypatch.setattr(FakeGraph, "made", [])
    monkeypatch.setattr(compiled, "GRAPHS", {"cpu": FakeGraph})
    return FakeGraph.made


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(compiled.logger, "warning", found.append)
    monkeypatch.setattr(compiled.logger, "warning_once", found.append)
    return found


@pytest.fixture(scope="module")
def qwen():
    return make_target("qwen3")


# What a recording holds on to


class State:
    """A function over a buffer of its own, as forwards have a cache."""

    def __init__(self):
        self.buffer = torch.zeros(4, 3)
        self.forwards = Forwards("graphs", torch.device("cpu"))

    def call(self, **inputs):
        return self.forwards.run(self.forward, inputs, [self.buffer]).clone()

    def forward(self, tokens, positions, mask):
        self.buffer.index_copy_(0, positions, tokens)
        return (self.buffer * mask).sum(1)


def inputs(seed, tokens=2):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(4, generator=generator)[:tokens]
    return {
        "tokens": torch.rand(tokens, 3, generator=generator),
        "positions": positions,
        "mask": torch.rand(4, 3, generator=generator),
    }


def same_as_eager(state, other, **given):
    assert torch.equal(state.call(**given), other.forward(**given)) and torch.equal(state.buffer, other.buffer)


def test_inputs_are_read_where_they_are_now(graphs):
    """Tokens, positions and masks in other tensors than those recorded, or in the same ones written anew."""
    state, eager = State(), State()
    for seed in range(4):
        same_as_eager(state, eager, **inputs(seed))
    kept = inputs(9)
    for seed in range(3):
        for name, tensor in inputs(seed).items():
            kept[name].copy_(tensor)
        same_as_eager(state, eager, **kept)
    assert len(graphs) == 1 and graphs[0].replays == 6


def test_buffers_that_were_replaced_are_not_written_any_more(graphs):
    state, eager = State(), State()
    for seed in range(3):
        same_as_eager(state, eager, **inputs(seed))
    old = state.buffer
    before, state.buffer, eager.buffer = old.clone(), old.clone() + 1, old.clone() + 1
    for seed in range(3, 6):
        same_as_eager(state, eager, **inputs(seed))
    assert torch.equal(old, before) and len(graphs) == 2


def test_shapes_that_were_not_recorded(graphs):
    state, eager = State(), State()
    for seed, tokens in enumerate((2, 2, 3, 1, 3, 2, 1, 1)):
        same_as_eager(state, eager, **inputs(seed, tokens))
    assert len(graphs) == 3


def test_more_shapes_than_are_kept(graphs, monkeypatch):
    monkeypatch.setattr(compiled, "MOST_GRAPHS", 1)
    state, eager = State(), State()
    for seed, tokens in enumerate((2, 3, 2, 3, 2, 3)):
        same_as_eager(state, eager, **inputs(seed, tokens))
    assert len(graphs) == 1 and graphs[0].replays == 2


def test_what_waits_for_the_host_is_not_recorded(graphs, warnings):
    class Waiting(State):
        def forward(self, tokens, positions, mask):
            return super().forward(tokens * float(tokens.sum()), positions, mask)

    state, eager = Waiting(), Waiting()
    for seed in range(4):
        same_as_eager(state, eager, **inputs(seed))
    assert len(warnings) == 1 and "can't be recorded" in warnings[0] and 'compile="off"' in warnings[0]


def test_buckets_are_few_and_near():
    forwards = Forwards("graphs", torch.device("cpu"))
    assert all(tokens <= forwards.bucket(tokens) <= 1.25 * tokens + 1 for tokens in range(1, 300))
    assert len({forwards.bucket(tokens) for tokens in range(1, 300)}) < 32


# Whole calls


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", DENSE)
def test_texts_are_the_same(family, rows, graphs, warnings):
    """Over several growths of the cache, with padding, and with a drafter that has graphs of its own."""
    target = make_target(family)
    options = {"attention_mask": MASK[:rows], "pad_token_id": 0}
    expected = greedy(target, PROMPT[:rows], 90, **options)
    drafter = make_stub(target, "oracle-2", expected[0])
    for given in (drafter, make_drafter(target, seed=5)):
        tokens = decode(target, given, PROMPT[:rows], max_new_tokens=90, tree_budget=7, compile="graphs", **options)
        assert tokens.tolist() == expected.tolist()
    assert not warnings and sum(graph.replays for graph in graphs) > 20
    assert len(graphs) >= 4  # each recorded anew when buffers grew


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_what_cant_be_recorded_runs_as_it_is(family, warnings):
    target = make_target(family)
    tokens = decode(target, make_drafter(target), PROMPT, max_new_tokens=NEW, compile="graphs", attention_mask=MASK)
    assert tokens.tolist() == greedy(target, PROMPT, NEW, attention_mask=MASK).tolist()
    assert len([text for text in warnings if "can't be recorded" in text]) <= 2


def test_rows_that_end_and_budgets_that_change(qwen, graphs):
    plain = greedy(qwen, PROMPT, NEW, attention_mask=MASK)
    ends = [int(plain[0, 22]), int(plain[1, 31])]
    options = {"attention_mask": MASK, "eos_token_id": ends, "pad_token_id": 0}
    expected = greedy(qwen, PROMPT, NEW, **options)
    for budget in (3, 16, 1, 40):
        tokens = decode(
            qwen, make_drafter(qwen), PROMPT, max_new_tokens=NEW, tree_budget=budget, compile="graphs", **options
        )
        assert tokens.tolist() == expected.tolist()
    assert graphs


def test_sampling(qwen, graphs):
    options = {"temperature": 0.8, "top_k": 20, "seed": 3}
    expected = sampled(qwen, PROMPT[:1], NEW, **options)
    drafter = make_drafter(qwen)
    tokens = decode(
        qwen, drafter, PROMPT[:1], max_new_tokens=NEW, do_sample=True, compile="graphs", tree_budget=6, **options
    )
    assert tokens.tolist() == expected.tolist() and graphs


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_both_ways_of_attention(qwen, implementation, graphs):
    qwen.set_attn_implementation(implementation)
    try:
        tokens = decode(qwen, make_drafter(qwen), PROMPT[:1], max_new_tokens=NEW, compile="graphs")
        assert tokens.tolist() == greedy(qwen, PROMPT[:1], NEW).tolist() and graphs
    finally:
        qwen.set_attn_implementation("sdpa")


def test_modes(qwen, graphs, warnings, monkeypatch):
    decode(qwen, make_drafter(qwen), PROMPT[:1], max_new_tokens=NEW)
    assert graphs  # "auto" where there are graphs
    graphs.clear()
    decode(qwen, make_drafter(qwen), PROMPT[:1], max_new_tokens=NEW, compile="off")
    assert not graphs
    monkeypatch.setattr(compiled, "GRAPHS", {})
    decode(qwen, make_drafter(qwen), PROMPT[:1], max_new_tokens=NEW)
    assert not warnings
    decode(qwen, make_drafter(qwen), PROMPT[:1], max_new_tokens=NEW, compile="graphs")
    assert 'compile="graphs"' in warnings[0]
    with pytest.raises(ValueError, match="`compile` is 'fast'"):
        DDTreeConfig(compile="fast")


def test_compiled_by_inductor(warnings):
    """Target and drafter, over growing caches; a second call compiles nothing."""
    target = make_target("qwen3", num_hidden_layers=2)
    drafter = make_drafter(target, target_layer_ids=[0, 1])
    torch._dynamo.reset()
    expected = greedy(target, PROMPT[:1], NEW)
    for _ in range(2):
        tokens = decode(target, drafter, PROMPT[:1], max_new_tokens=NEW, compile="inductor", tree_budget=6)
        assert tokens.tolist() == expected.tolist()
        compiled_frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not warnings and compiled_frames == 2
    decode(target, drafter, PROMPT[:1], max_new_tokens=NEW, compile="inductor", tree_budget=9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled_frames


def test_weights_that_change_after_they_were_compiled(qwen):
    target = make_target("qwen3", num_hidden_layers=2)
    options = {"max_new_tokens": 12, "tree_budget": 4}
    for _ in range(2):
        tokens = decode(target, make_drafter(target, target_layer_ids=[0]), PROMPT[:1], compile="inductor", **options)
        assert tokens.tolist() == greedy(target, PROMPT[:1], 12).tolist()
        with torch.no_grad():
            target.lm_head.weight.add_(torch.randn_like(target.lm_head.weight))


def test_what_cant_be_compiled_runs_as_it_is(qwen, warnings, monkeypatch):
    def broken():
        def call(model, inputs):
            raise torch._dynamo.exc.TorchRuntimeError("no compiler")

        return call

    monkeypatch.setattr(compiled, "_compiled_call", broken)
    tokens = decode(qwen, make_drafter(qwen), PROMPT[:1], max_new_tokens=NEW, compile="inductor")
    assert tokens.tolist() == greedy(qwen, PROMPT[:1], NEW).tolist()
    assert warnings and all("can't be compiled" in text for text in warnings)
    assert logging.get_verbosity() >= 0
