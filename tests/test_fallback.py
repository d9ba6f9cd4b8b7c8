"""Failures of the drafter, of trees and of memory cost speed; the text stays, one warning names the cause."""

import logging

import pytest
import torch
from keyed import sampled
from stubs import decode, greedy, make_drafter, make_target
from transformers.generation.streamers import BaseStreamer

from hf_ddtree import DDTreeConfig
from hf_ddtree.drafting import Draft, Drafter
from hf_ddtree.drafting.paths import tree_of_paths
from hf_ddtree.models.dflash import DFlashDraftModel
from hf_ddtree.rounds import MOST_FAILURES
from hf_ddtree.tree import Tree

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [1, 50, 4, 4, 33, 21, 60, 2, 9, 17]])
NEW = 20
pytestmark = pytest.mark.falls_back


@pytest.fixture(scope="module", params=["qwen3", "qwen3-sliding"])
def target(request):
    return make_target(request.param)


class Knowing(Drafter):
    """Knows every row's text, so that its drafts are right; breaks as `breaking` says, given the number of the call."""

    def __init__(self, texts, breaking):
        self.texts, self.breaking, self.calls = texts.tolist(), breaking, 0

    def draft(self, request):
        self.calls += 1
        paths = []
        for text in request.texts:
            (whole,) = [each for each in self.texts if each[: len(text)] == text.tolist()]
            paths.append([whole[len(text) :][: min(3, request.max_depth)]])
        tree = tree_of_paths(request.roots, paths, budget=3)
        return self.breaking(self.calls, tree) or tree


def raising(error, calls):
    def breaking(call, tree):
        if call in calls:
            raise error

    return breaking


def run(target, drafter, caplog, rows=2, **options):
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, **options}
    with caplog.at_level(logging.WARNING):
        return decode(target, drafter, PROMPT[:rows], **options)


def warnings_of(caplog, word):
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_drafter_that_raises_now_and_then(target, caplog, rows):
    expected = greedy(target, PROMPT[:rows], NEW)
    drafter = Knowing(expected, raising(ZeroDivisionError("now and then"), {1, 3, 4, 6}))
    result = run(target, drafter, caplog, rows)
    assert result.sequences.tolist() == expected.tolist()
    assert result.fallback_rounds == {"draft": 4}
    assert result.mean_acceptance_length > 1.5  # it is asked again
    (warning,) = warnings_of(caplog, "failed")
    assert "Knowing" in warning and "now and then" in warning


def test_a_drafter_that_always_raises_is_left_alone_after_a_while(target, caplog):
    expected = greedy(target, PROMPT, NEW)
    drafter = Knowing(expected, raising(RuntimeError("always"), range(100)))
    result = run(target, drafter, caplog)
    assert result.sequences.tolist() == expected.tolist()
    assert drafter.calls == MOST_FAILURES and result.fallback_rounds == {"draft": MOST_FAILURES}
    assert result.rounds == NEW and len(warnings_of(caplog, "failed")) == 1


@pytest.mark.parametrize("failing", [{1}, {2}, {2, 3}, {1, 4, 6}], ids=str)
def test_dflash_goes_on_with_the_whole_context_after_an_exception(target, caplog, failing, monkeypatch):
    """The drafts after a failure are those of a drafter that never failed, so nothing it should know was lost."""
    drafter, forward, calls, logits = make_drafter(target), DFlashDraftModel.forward, [], {}

    def run_once(fails):
        calls.clear()

        def broken(self, *args, **kwargs):
            calls.append(None)
            output = forward(self, *args, **kwargs)
            if len(calls) in fails:
                raise OSError("after the cache was written")
            logits.setdefault(bool(fails), {})[len(calls)] = output.last_hidden_state
            return output

        monkeypatch.setattr(DFlashDraftModel, "forward", broken)
        return run(target, drafter, caplog, rows=1, tree_budget=4)

    whole, partial = run_once(()), run_once(failing)
    assert partial.sequences.tolist() == whole.sequences.tolist() == greedy(target, PROMPT[:1], NEW).tolist()
    assert partial.fallback_rounds == {"draft": len(failing)} and whole.fallback_rounds == {}
    after = max(failing) + 1
    shared = [(a, b) for a in logits[False].values() for b in list(logits[True].values())[-1:] if _close(a, b)]
    assert after <= max(logits[True]) and shared


def _close(a, b):
    return torch.allclose(a, b, atol=1e-4, rtol=1e-4)


BROKEN_TREES = {
    "another root": lambda tree: Tree(tree.tokens + 1, tree.parents, tree.depths, tree.scores),
    "a token too large": lambda tree: Tree(_with(tree.tokens, 1, 64), tree.parents, tree.depths, tree.scores),
    "a negative token": lambda tree: Tree(_with(tree.tokens, 1, -1), tree.parents, tree.depths, tree.scores),
    "a parent behind": lambda tree: Tree(tree.tokens, _with(tree.parents, 1, 2), tree.depths, tree.scores),
    "a wrong depth": lambda tree: Tree(tree.tokens, tree.parents, _with(tree.depths, 1, 3), tree.scores),
    "a row too few": lambda tree: tree.row(0),
    "no tree": lambda tree: "tree",
    "no scores": lambda tree: Tree(tree.tokens, tree.parents, tree.depths, None),
    "tokens of floats": lambda tree: Tree(tree.tokens.float(), tree.parents, tree.depths, tree.scores),
}


def _with(field, node, value):
    field = field.clone()
    field[:, node] = value
    return field


@pytest.mark.parametrize("broken", BROKEN_TREES.values(), ids=BROKEN_TREES)
def test_trees_that_are_none(target, caplog, broken):
    expected = greedy(target, PROMPT, NEW)
    drafter = Knowing(expected, lambda call, tree: broken(tree) if call in (2, 4) else None)
    result = run(target, drafter, caplog)
    assert result.sequences.tolist() == expected.tolist()
    assert result.fallback_rounds == {"draft": 2} and result.mean_acceptance_length > 1.5


class BadHooks(Knowing):
    """Fails in what is called beside `draft`, and writes into what it is given."""

    def draft(self, request):
        tree = super().draft(request)
        for text in request.texts:
            text.fill_(1)
        return tree

    def keep(self, rows):
        raise RuntimeError("keep")

    def leave(self, pending):
        raise RuntimeError("leave")


def test_hooks_that_fail_cost_no_text(target, caplog):
    expected = greedy(target, PROMPT, NEW)
    end = {"eos_token_id": int(expected[0, 15]), "pad_token_id": 0}
    expected = greedy(target, PROMPT, NEW, **end)
    result = run(target, BadHooks(greedy(target, PROMPT, NEW), lambda call, tree: None), caplog, **end)
    assert result.sequences.tolist() == expected.tolist() and result.fallback_rounds["draft"] >= 1


def test_drafts_that_no_tree_can_be_built_of_are_given_up(target, caplog):
    class Uncorrectable(Logits):
        def draft(self, request):
            drafted = super().draft(request)
            return Draft(drafted.roots, drafted.logits, (lambda parents, children: torch.zeros(1, 2, 3),))

    result = run(target, Uncorrectable(lambda rows: torch.zeros(rows, 3, 64)), caplog)
    assert result.sequences.tolist() == greedy(target, PROMPT, NEW).tolist()
    assert result.fallback_rounds == {"draft": MOST_FAILURES}


class Logits(Drafter):
    gives_logits = True

    def __init__(self, logits):
        self.logits = logits

    def draft(self, request):
        return Draft(request.roots, self.logits(len(request.texts)))


WRONG_LOGITS = {
    "of one row": lambda rows: torch.zeros(1, 3, 64),
    "of two dimensions": lambda rows: torch.zeros(3, 64),
}


@pytest.mark.parametrize("logits", WRONG_LOGITS.values(), ids=WRONG_LOGITS)
def test_drafts_of_another_shape(target, caplog, logits):
    result = run(target, Logits(logits), caplog)
    assert result.sequences.tolist() == greedy(target, PROMPT, NEW).tolist()
    assert result.fallback_rounds == {"draft": MOST_FAILURES}


def test_fault_19_tokens_that_the_target_lacks_are_never_drafted(target, caplog):
    result = run(target, Logits(lambda rows: torch.zeros(rows, 3, 80).index_fill(2, torch.tensor([70]), 9.0)), caplog)
    assert result.sequences.tolist() == greedy(target, PROMPT, NEW).tolist()
    assert result.fallback_rounds == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("depth", [slice(0, 1), slice(None)], ids=["one depth", "everywhere"])
def test_nan_in_drafts_is_counted_and_costs_nothing_else(target, caplog, value, depth):
    def logits(rows):
        drafts = torch.zeros(rows, 3, 64)
        drafts[:, depth] = value
        return drafts

    result = run(target, Logits(logits), caplog)
    assert result.sequences.tolist() == greedy(target, PROMPT, NEW).tolist()
    if value != value:
        assert result.fallback_rounds == {"nan": result.rounds - 2}  # neither the prefill nor the last token is drafted

        assert len(warnings_of(caplog, "NaN")) == 1


class LittleMemory:
    """A target that has memory for `nodes` new tokens a row and no more; it fails after half its layers."""

    def __init__(self, target, nodes, error):
        self.failures = 0

        def hook(module, args, kwargs, output):
            if nodes < kwargs["position_ids"].shape[-1] < 10:
                self.failures += 1
                raise error

        self.handle = target.model.layers[1].register_forward_hook(hook, with_kwargs=True)


ERRORS = {
    "accelerator": torch.OutOfMemoryError("CUDA out of memory"),
    "cpu": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
    "python": MemoryError("none left"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_no_memory_for_the_whole_tree(target, caplog, nodes, error):
    expected = greedy(target, PROMPT, NEW)
    memory = LittleMemory(target, nodes, error)
    try:
        result = run(target, make_drafter(target), caplog, tree_budget=8)
    finally:
        memory.handle.remove()
    assert result.sequences.tolist() == expected.tolist()
    assert memory.failures == result.fallback_rounds["memory"] >= 1
    assert memory.failures <= 4  # trees stay small: the failure is not met again each round
    assert len(warnings_of(caplog, "memory")) == 1


@pytest.mark.parametrize("acceptance, shape", [("block", "chain"), ("recursive", "best_first")])
def test_no_memory_under_the_classical_rules(target, caplog, acceptance, shape):
    memory = LittleMemory(target, 3, MemoryError("none left"))
    try:
        rule = {"acceptance": acceptance, "tree_shape": shape, "do_sample": True, "seed": 3}
        result = run(target, make_drafter(target), caplog, tree_budget=8, **rule)
    finally:
        memory.handle.remove()
    assert result.sequences.shape[1] == PROMPT.shape[1] + NEW and result.fallback_rounds["memory"] >= 1


def test_no_memory_for_a_single_token_is_an_error_and_the_cache_is_whole(target):
    memory = LittleMemory(target, 0, torch.OutOfMemoryError("CUDA out of memory"))
    try:
        with pytest.raises(torch.OutOfMemoryError):
            decode(target, make_drafter(target), PROMPT, max_new_tokens=NEW, tree_budget=8)
    finally:
        memory.handle.remove()
    tokens = decode(target, make_drafter(target), PROMPT, max_new_tokens=NEW)
    assert tokens.tolist() == greedy(target, PROMPT, NEW).tolist()


def test_other_errors_of_the_target_are_not_hidden(target):
    memory = LittleMemory(target, 2, RuntimeError("a real fault"))
    try:
        with pytest.raises(RuntimeError, match="a real fault"):
            decode(target, make_drafter(target), PROMPT, max_new_tokens=NEW, tree_budget=8)
    finally:
        memory.handle.remove()


def test_sampled_text_stays_when_the_drafter_fails(target, caplog):
    expected = sampled(target, PROMPT, NEW, seed=5, top_k=0)
    drafter = Knowing(expected, raising(RuntimeError("now"), {2, 5}))
    result = run(target, drafter, caplog, do_sample=True, seed=5, top_k=0)
    assert result.sequences.tolist() == expected.tolist() and result.fallback_rounds == {"draft": 2}


class Interrupting(BaseStreamer):
    """Raises in the `step`-th put."""

    def __init__(self, step):
        self.step, self.puts, self.ends = step, 0, 0

    def put(self, value):
        self.puts += 1
        if self.puts == self.step:
            raise KeyboardInterrupt

    def end(self):
        self.ends += 1


def _state(model):
    hooks = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks)) for name, module in model.named_modules()
    ]
    generation = getattr(model, "generation_config", None)
    return hooks, model.config.to_dict(), generation and generation.to_dict(), model.training


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("drafter", ["dflash", "assistant", "lookup"])
def test_fault_22_an_interrupt_leaves_everything_as_it_was(target, step, drafter):
    assistant = {"dflash": make_drafter(target), "assistant": make_target("llama"), "lookup": None}[drafter]
    fields = {"drafter": "lookup"} if drafter == "lookup" else {}
    # Hooks that transformers puts on a model for good when hidden states are asked for first.
    decode(target, assistant, PROMPT[:1], max_new_tokens=2, **fields)
    models = [target] if assistant is None else [target, assistant]
    before = [_state(model) for model in models]
    streamer = Interrupting(step)
    with pytest.raises(KeyboardInterrupt):
        decode(target, assistant, PROMPT[:1], max_new_tokens=NEW, streamer=streamer, **fields)
    assert [_state(model) for model in models] == before
    assert streamer.ends == (step > 1)  # the prompt is put by `generate` itself, before the strategy is reached
    tokens = decode(target, assistant, PROMPT[:1], max_new_tokens=NEW, **fields)
    assert tokens.tolist() == greedy(target, PROMPT[:1], NEW).tolist()


def test_the_config_of_a_call_is_not_changed(target):
    config = DDTreeConfig(max_new_tokens=NEW, do_sample=False)
    before = config.to_dict()
    target.generate(PROMPT, assistant_model=make_drafter(target), generation_config=config)
    assert config.to_dict() == before
