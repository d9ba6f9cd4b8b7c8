"""What the caches hold after every round, and what a verify forward is given and returns."""

import itertools

import pytest
import torch
from stubs import CORE_FAMILIES, decode, greedy, make_context, make_stub, make_target

from hf_ddtree.cache import cache_name, output_cache
from hf_ddtree.drafting import DDTreeCandidateGenerator
from hf_ddtree.target import Target

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8]])
LONG = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8, 17, 23, 50, 6, 33, 20, 11, 48, 29, 4]])
WINDOW = 8
KINDS = ("oracle-2", "oracle-3", "anti", "rand")
ATTENTION = [
    *((name, attention) for name in ("qwen3-sliding", "mistral", "gemma3") for attention in ("eager", "sdpa")),
    ("gpt_oss", "eager"),  # has no sdpa
]


@pytest.fixture(scope="module", params=CORE_FAMILIES)
def family(request):
    target = make_target(request.param)
    return target, greedy(target, LONG, 40)[0]


def on_commit(monkeypatch, prompt, check):
    """Calls `check(target, committed ids, context)` after every commit; returns the committed ids."""
    committed, real = prompt[0].tolist(), Target.commit

    def commit(self, accepted):
        context = real(self, accepted)
        self.trees.show()
        assert len(accepted) == len(context.lengths) == 1 and context.lengths[0] == context.positions.shape[1]
        committed.extend(accepted[0].tokens)
        check(self, committed, context)
        return context

    monkeypatch.setattr(Target, "commit", commit)
    return committed


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def forward(model, tokens, **kwargs):
    return model(torch.tensor([tokens]), **kwargs)


def assert_same_cache(cache, expected, length):
    assert cache.get_seq_length() == expected.get_seq_length() == length
    assert len(cache.layers) == len(expected.layers)
    for layer, fresh in zip(cache.layers, expected.layers, strict=True):
        kept = min(length, layer.sliding_window - 1) if layer.is_sliding else length
        assert layer.keys.shape[-2] == kept and layer.get_seq_length() == length
        close(layer.keys, fresh.keys[..., -kept:, :])
        close(layer.values, fresh.values[..., -kept:, :])


@pytest.mark.parametrize("kind", KINDS)
def test_fault_02_cache_holds_the_committed_tokens_but_the_last(family, kind, monkeypatch):
    target, reference = family
    lengths = []

    def check(live, committed, context):
        fresh = output_cache(forward(target, committed[:-1], use_cache=True))
        assert_same_cache(live.cache, fresh, len(committed) - 1)
        lengths.append(len(committed))

    committed = on_commit(monkeypatch, LONG, check)
    tokens = decode(target, make_stub(target, kind, reference), LONG, max_new_tokens=18)
    assert tokens[0].tolist() == committed == reference[: len(committed)].tolist()
    steps = {after - before for before, after in itertools.pairwise(lengths)}
    assert kind == "rand" or (steps == {1}) == (kind == "anti")


@torch.no_grad()
def taps(target, committed, layer_ids):
    hidden = forward(target, committed, output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer + 1] for layer in layer_ids], dim=-1)


DRAFTERS = {
    "full": {},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW},
}


@pytest.mark.parametrize("drafter_layers", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_fault_66_drafter_cache_equals_one_built_from_scratch(family, kind, drafter_layers, monkeypatch):
    target, reference = family
    stub = make_stub(target, kind, reference, **drafter_layers)
    committed = on_commit(monkeypatch, LONG, lambda *_: None)
    real, rounds = DDTreeCandidateGenerator.draft_block, []

    def draft_block(self, root_tokens, context):
        logits, states = real(self, root_tokens, context)
        length = len(committed) - 1
        fresh = DDTreeCandidateGenerator(stub, target, self.config)
        everything = make_context(taps(target, committed[:-1], self.target_layer_ids))
        close(logits, real(fresh, root_tokens, everything)[0])
        self.trees.show()
        fresh.trees.show()
        assert self.trees.width == length and self.trees.ends.tolist() == [length]
        for layer, scratch in zip(self.trees.layers, fresh.trees.layers, strict=True):
            kept = min(length, WINDOW) if layer.is_sliding else length
            assert layer.keys.shape[-2] == scratch.keys.shape[-2] == kept and layer.get_seq_length() == length
            close(layer.keys, scratch.keys)
            close(layer.values, scratch.values)
        rounds.append(length)
        return logits, states

    monkeypatch.setattr(DDTreeCandidateGenerator, "draft_block", draft_block)
    tokens = decode(target, stub, LONG, max_new_tokens=16)
    assert tokens[0].tolist() == reference[: LONG.shape[1] + 16].tolist()
    assert len(rounds) >= 2


# What one verify forward is given and returns


def on_verify(monkeypatch, target, check):
    """Calls `check(tree, forward's kwargs, logits)` for every verify forward."""
    seen, real = [], Target.verify

    def verify(self, tree):
        with_kwargs = []
        hook = target.register_forward_pre_hook(lambda _, __, kwargs: with_kwargs.append(kwargs), with_kwargs=True)
        try:
            logits = real(self, tree)
        finally:
            hook.remove()
        (kwargs,) = with_kwargs
        check(tree, kwargs, logits)
        seen.append(tree)
        return logits

    monkeypatch.setattr(Target, "verify", verify)
    return seen


@pytest.mark.parametrize("kind", ["oracle-2", "rand"])
def test_fault_01_positions_are_start_plus_depth(family, kind, monkeypatch):
    target, reference = family
    committed = on_commit(monkeypatch, LONG, lambda *_: None)

    def check(tree, kwargs, logits):
        assert kwargs["position_ids"].tolist() == [[len(committed) - 1 + depth for depth in tree.depths[0].tolist()]]
        assert kwargs["input_ids"].tolist() == tree.tokens.tolist() and kwargs["input_ids"][0, 0] == committed[-1]

    seen = on_verify(monkeypatch, target, check)
    decode(target, make_stub(target, kind, reference), LONG, tree_budget=7, max_new_tokens=12)
    assert any(len(set(tree.depths[0].tolist())) < tree.num_nodes for tree in seen)  # siblings did occur


@pytest.mark.parametrize("prompt", [PROMPT[:, :4], LONG], ids=["short", "long"])
def test_fault_21_node_logits_equal_a_chain_forward(family, prompt, monkeypatch):
    target, reference = family
    committed = on_commit(monkeypatch, prompt, lambda *_: None)

    def check(tree, kwargs, logits):
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        path = {0: []}
        for node in range(tree.num_nodes):
            if node:
                path[node] = [*path[parents[node]], tokens[node]]
            close(logits[0, node], forward(target, committed + path[node]).logits[0, -1])

    seen = on_verify(monkeypatch, target, check)
    decode(target, make_stub(target, "rand", reference), prompt, tree_budget=12, max_new_tokens=12)
    assert max(int(tree.depths.max()) for tree in seen) >= 2


def decoder_layers(target):
    return target.get_decoder().layers


@pytest.mark.parametrize("tapped", [[1, 0], [2, 0], [2, 0, 3]], ids=["early", "late", "last"])
def test_fault_14_context_is_the_output_of_the_tapped_layers(family, tapped, monkeypatch):
    """Layer 3 is the last: its entry comes after the final norm."""
    target, reference = family
    contexts, outputs = [], {}
    committed = on_commit(monkeypatch, LONG, lambda _, __, context: contexts.append(context))
    stub = make_stub(target, "oracle-2", reference, target_layer_ids=tapped)
    decode(target, stub, LONG, max_new_tokens=14)

    def keep(layer):
        def hook(module, args, output):
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    decoder = target.get_decoder()
    modules = {layer: decoder.norm if layer == 3 else decoder.layers[layer] for layer in tapped}
    hooks = [module.register_forward_hook(keep(layer)) for layer, module in modules.items()]
    forward(target, committed[:-1])
    for hook in hooks:
        hook.remove()

    given = torch.cat([context.hidden_states for context in contexts], dim=1)
    close(given, torch.cat([outputs[layer] for layer in tapped], dim=-1))
    assert torch.cat([context.positions for context in contexts], dim=1).tolist() == [list(range(len(committed) - 1))]


@pytest.mark.parametrize("hidden", [[0, 1, 2], [4], []], ids=["left", "inside", "none"])
def test_fault_29_padding_is_invisible_to_nodes_and_drafter(family, hidden, monkeypatch):
    target, _ = family
    mask = torch.ones_like(PROMPT)
    mask[:, hidden] = 0
    reference = greedy(target, PROMPT, 20, attention_mask=mask)
    contexts = []
    committed = on_commit(monkeypatch, PROMPT, lambda _, __, context: contexts.append(context))
    stub = make_stub(target, "oracle-2", reference[0])
    tokens = decode(target, stub, PROMPT, max_new_tokens=20, attention_mask=mask)
    assert tokens.tolist() == reference.tolist()
    positions = torch.cat([context.positions for context in contexts], dim=1)
    assert positions.tolist() == [list(range(len(committed) - 1 - len(hidden)))]


# Sliding windows


@pytest.mark.parametrize("length", [4, 7, 8, 9, 20])
@pytest.mark.parametrize("family_name, attention", ATTENTION)
def test_fault_16_sliding_window_and_prompt_length(family_name, length, attention):
    target = make_target(family_name, attention=attention)
    assert target.config._attn_implementation == attention
    prompt = LONG[:, :length]
    reference = greedy(target, prompt, 30)
    drafter = make_stub(target, "oracle-2", reference[0])
    assert decode(target, drafter, prompt, max_new_tokens=30).tolist() == reference.tolist()


# The returned cache


def ended_by(reference, eos_cuts):
    """Ends at the 6th new token, which oracle drafts put inside a block; or at the length."""
    return {"eos_token_id": int(reference[LONG.shape[1] + 5])} if eos_cuts else {}


@pytest.mark.parametrize("eos_cuts", [False, True], ids=["length", "eos"])
def test_fault_32_returned_cache_continues_in_plain_generate(family, eos_cuts):
    target, reference = family
    result = decode(
        target,
        make_stub(target, "oracle-2", reference),
        LONG,
        max_new_tokens=14,
        return_dict_in_generate=True,
        **ended_by(reference, eos_cuts),
    )
    cache = output_cache(result)
    assert (result.sequences.shape[1] < LONG.shape[1] + 14) == eos_cuts
    assert cache.get_seq_length() == result.sequences.shape[1] - 1

    turn = torch.cat([result.sequences, PROMPT], dim=1)
    all_real = torch.ones_like(turn)  # without a mask `generate` takes pad ids for padding
    continued = greedy(target, turn, 12, attention_mask=all_real, **{cache_name(target): cache})
    assert continued.tolist() == greedy(target, turn, 12, attention_mask=all_real).tolist()
