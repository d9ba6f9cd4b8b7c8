"""`tree_budget="auto"`: the text, the choice of nodes, and the times that it rests on."""

import json

import pytest
import torch
from keyed import sampled
from stubs import CORE_FAMILIES, decode, greedy, make_drafter, make_stub, make_target

from hf_ddtree import DDTreeConfig, budget, verify_times
from hf_ddtree.acceptance import Accepted
from hf_ddtree.budget import AutoBudget
from hf_ddtree.target import Target
from hf_ddtree.tree import Tree, root_tree
from hf_ddtree.verify_times import VerifyTimes, key_of, known_or_measured, measure

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [0, 0, 0, 50, 4, 4, 33, 21, 60, 17]])
MASK = (PROMPT > 0).long()
NEW = 40
FLAT = VerifyTimes([1, 256], [1.0, 1.001])
STEEP = VerifyTimes([1, 2, 256], [1.0, 10.0, 2550.0])


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Times are kept in a folder of the test's own."""
    monkeypatch.setattr(verify_times, "KNOWN", {})
    monkeypatch.setattr(verify_times, "folder", lambda: tmp_path)
    budget.LEARNT.clear()
    return tmp_path


def given_times(monkeypatch, times):
    monkeypatch.setattr("hf_ddtree.rounds.known_or_measured", lambda *_: times)


@pytest.fixture(scope="module")
def qwen():
    return make_target("qwen3")


# The text


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_texts_are_the_same_measured_and_known(family, rows):
    target = make_target(family)
    options = {"attention_mask": MASK[:rows], "pad_token_id": 0, "max_new_tokens": NEW}
    expected = greedy(target, PROMPT[:rows], NEW, attention_mask=MASK[:rows], pad_token_id=0)
    drafters = (make_stub(target, "oracle-2", expected[0]), make_drafter(target, seed=5), make_target("llama", seed=4))
    for drafter in (*drafters, drafters[0]):
        assert decode(target, drafter, PROMPT[:rows], tree_budget="auto", **options).tolist() == expected.tolist()


def test_sampling_and_lookup(qwen):
    options = {"temperature": 0.8, "top_k": 20, "seed": 3}
    expected = sampled(qwen, PROMPT[:1], NEW, **options)
    more = {"max_new_tokens": NEW, "tree_budget": "auto", "do_sample": True, **options}
    assert decode(qwen, make_drafter(qwen), PROMPT[:1], **more).tolist() == expected.tolist()
    assert decode(qwen, None, PROMPT[:1], drafter="lookup", **more).tolist() == expected.tolist()


def test_a_rehearsal_leaves_cache_and_taps_alone(qwen, monkeypatch):
    real = Target.rehearse

    def rehearse(self, tree):
        before = [(layer.keys.clone(), layer.length) for layer in self.trees.layers], self.taps
        real(self, tree)
        self.trees.show()
        for layer, (keys, length) in zip(self.trees.layers, before[0], strict=True):
            assert layer.length == length and torch.equal(layer.keys, keys)
        assert self.taps is before[1]

    monkeypatch.setattr(Target, "rehearse", rehearse)
    decode(qwen, make_drafter(qwen), PROMPT[:1], max_new_tokens=4, tree_budget="auto")


# The choice


def test_cheap_nodes_are_taken_and_dear_ones_are_not(qwen, monkeypatch):
    expected = greedy(qwen, PROMPT[:1], NEW)
    drafter, options = make_drafter(qwen), {"max_new_tokens": NEW, "return_dict_in_generate": True}
    given_times(monkeypatch, FLAT)
    wide = decode(qwen, drafter, PROMPT[:1], tree_budget="auto", **options)
    assert max(wide.budgets) > 40 and wide.shapes["tree"] > 5
    given_times(monkeypatch, STEEP)
    narrow = decode(qwen, drafter, PROMPT[:1], tree_budget="auto", **options)
    assert max(narrow.budgets) <= 3
    assert wide.sequences.tolist() == narrow.sequences.tolist() == expected.tolist()
    assert len(wide.budgets) == wide.rounds and sum(wide.budgets) == wide.verified_nodes
    assert sum(narrow.shapes.values()) == narrow.rounds - 1


def tree_of(chances):
    """A chain, whose nodes have these path probabilities."""
    count = len(chances) + 1
    depths = torch.arange(count)[None]
    scores = torch.tensor([[1.0, *chances]], dtype=torch.float64).log()
    return Tree(depths, (depths - 1).clamp(min=0), depths, scores, depth_bound=count - 1)


def accepted(length):
    return [Accepted(list(range(length)), [1] * length, False)]


def test_nodes_are_taken_as_long_as_they_bring_more_than_their_time_does_elsewhere():
    """At a rate of one token per second a node of 0.1 s pays if its chance is above a tenth."""
    auto = AutoBudget(VerifyTimes([1, 101], [1.0, 11.0]), rows=1)
    assert auto.choose(tree_of([0.9, 0.5, 0.11, 0.09, 0.01])) == 4
    assert auto.choose(tree_of([0.05, 0.01])) == 1


def test_chances_are_corrected_by_what_was_accepted():
    times = VerifyTimes([1, 101], [1.0, 11.0])
    for hit, taken in ((True, 2), (False, 1)):
        auto = AutoBudget(times, rows=1)
        for _ in range(60):
            auto.chosen = torch.tensor([0.3]), torch.tensor([1])
            auto._count_hits(accepted(2 if hit else 1))
        assert auto.choose(tree_of([0.12])) == taken


def test_drafts_that_do_not_pay_are_left_out_for_longer_and_longer(monkeypatch):
    auto = AutoBudget(VerifyTimes([1, 2], [1.0, 1.1]), rows=1)
    rests = []
    for _ in range(5):
        while not auto.rests:
            auto.choose(tree_of([0.5]))
            auto.learn(tree_of([0.5]), accepted(1), seconds=3.0, verify_seconds=1.1)
        rests.append(auto.resting)
        while auto.rests:
            auto.rested()
    assert rests == [4, 8, 16, 32, 64] and max(rests) == budget.RESTS[1]


def test_drafts_that_pay_are_never_left_out():
    auto = AutoBudget(VerifyTimes([1, 2], [1.0, 1.1]), rows=1)
    for _ in range(100):
        auto.learn(tree_of([0.5]), accepted(2), seconds=1.5, verify_seconds=1.1)
        assert not auto.rests


def test_a_drafter_that_is_always_wrong_ends_up_in_plain_decoding(qwen, monkeypatch):
    expected = greedy(qwen, PROMPT[:1], 200)
    given_times(monkeypatch, VerifyTimes([1, 256], [1e-7, 1.1e-7]))  # drafting costs more than anything
    drafter = make_stub(qwen, "anti", torch.nn.functional.pad(expected[0], (0, 8), value=2))
    options = {"max_new_tokens": 190, "return_dict_in_generate": True}
    result = decode(qwen, drafter, PROMPT[:1], tree_budget="auto", **options)
    assert result.sequences.tolist() == expected[:, :200].tolist()
    assert result.shapes["plain"] > 100 and result.fallback_rounds == {}


def test_drafts_of_which_nothing_is_verified_cost_time_and_are_left_out(qwen, monkeypatch):
    given_times(monkeypatch, VerifyTimes([1, 2, 256], [1e-7, 1.0, 256.0]))
    options = {"max_new_tokens": 60, "tree_budget": "auto", "return_dict_in_generate": True}
    rests = []
    monkeypatch.setattr(AutoBudget, "rested", lambda self: rests.append(self.resting))
    result = decode(qwen, make_drafter(qwen), PROMPT[:1], **options)
    assert not any(result.budgets) and rests


def test_a_call_goes_on_from_what_the_last_one_learnt(qwen, monkeypatch):
    given_times(monkeypatch, FLAT)
    drafter = make_stub(qwen, "oracle-3", greedy(qwen, PROMPT[:1], NEW)[0])
    options = {"max_new_tokens": NEW, "tree_budget": "auto", "return_dict_in_generate": True}
    decode(qwen, drafter, PROMPT[:1], **options)
    (((rows, name), kept),) = budget.LEARNT[qwen].items()
    assert kept.hits[1] > 0
    again = AutoBudget.recall(qwen, name, FLAT, rows)
    assert again is not kept and again.hits == kept.hits and again.times is FLAT and not again.rests
    assert not AutoBudget.recall(qwen, "another", FLAT, 1).hits


# The times


def test_times_between_and_beyond_what_was_measured():
    times = VerifyTimes([1, 4, 8], [1.0, 1.0, 2.0])
    assert [times(tokens) for tokens in (1, 2, 4, 6, 8, 16)] == [1.0, 1.0, 1.0, 1.5, 2.0, 4.0]


def test_measuring_never_falls_and_stops_in_time(monkeypatch):
    clock = iter([cost for step in range(10_000) for cost in (step, step)])
    monkeypatch.setattr(verify_times.time, "perf_counter", lambda: next(clock))
    sizes = []
    times = measure(sizes.append, rows=2)
    assert times.tokens == [2, 4] and len(sizes) == 2 * verify_times.RUNS
    assert verify_times._rising([1.0, 3.0, 2.0, 4.0, 0.0]) == [1.0, 2.25, 2.25, 2.25, 2.25]


def test_sizes_there_is_no_memory_for_are_left_out():
    def forward(nodes):
        if nodes > 4:
            raise MemoryError

    assert list(measure(forward, rows=1).tokens) == [1, 2, 4]
    with pytest.raises(MemoryError):
        measure(lambda nodes: forward(nodes + 4), rows=1)


def test_times_are_measured_once_and_kept(kept, monkeypatch):
    calls = []
    first = known_or_measured({"model": "a"}, calls.append, 1)
    count = len(calls)
    assert count and known_or_measured({"model": "a"}, calls.append, 1) is first
    monkeypatch.setattr(verify_times, "KNOWN", {})  # another process
    assert known_or_measured({"model": "a"}, calls.append, 1).seconds == first.seconds and len(calls) == count
    known_or_measured({"model": "b"}, calls.append, 1)
    assert len(calls) == 2 * count and len(list(kept.glob("*.json"))) == 2
    assert not list(kept.glob("*.part"))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"tokens": [1], "seconds": [1]}', '{"tokens": [2, 1], "seconds": [1, 2]}',
     '{"tokens": [1, 2], "seconds": [0, 0]}', '{"tokens": [1, 2], "seconds": ["a", "b"]}',
     '{"tokens": [1, 2], "seconds": [1, NaN]}'],
)  # fmt: skip
def test_files_that_make_no_sense_are_measured_anew(text, kept):
    known_or_measured({}, lambda nodes: None, 1)
    (path,) = kept.glob("*.json")
    path.write_text(text)
    verify_times.KNOWN.clear()
    calls = []
    known_or_measured({}, calls.append, 1)
    assert calls and json.loads(path.read_text())["tokens"][0] == 1


def test_a_folder_that_cant_be_written(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(verify_times, "folder", lambda: tmp_path / "nowhere")
    monkeypatch.setattr(verify_times.logger, "warning_once", found.append)
    assert known_or_measured({}, lambda nodes: None, 1)(1) > 0
    assert "can't be kept" in found[0]


def test_keys_tell_settings_apart(qwen):
    keys = [key_of(qwen, 1, 100, "off"), key_of(qwen, 2, 100, "off"), key_of(qwen, 1, 200, "off")]
    keys += [key_of(qwen, 1, 100, "inductor"), key_of(make_target("llama"), 1, 100, "off")]
    assert len({json.dumps(key) for key in keys}) == len(keys)
    assert key_of(qwen, 1, 65, "off") == key_of(qwen, 1, 128, "off")


# What is refused


@pytest.mark.parametrize("value", ["car", -1, 1.5, True, None])
def test_budgets_that_are_none(value):
    with pytest.raises(ValueError, match=r'`tree_budget` is .*at least 0, or "auto"'):
        DDTreeConfig(tree_budget=value)


def test_rules_that_judge_the_whole_tree():
    with pytest.raises(ValueError, match=r'`tree_budget="auto"` does not go with `acceptance="recursive"`'):
        DDTreeConfig(tree_budget="auto", acceptance="recursive", do_sample=True)


def test_saved_and_loaded(tmp_path):
    DDTreeConfig(tree_budget="auto").save_pretrained(tmp_path)
    assert DDTreeConfig.from_pretrained(tmp_path).tree_budget == "auto"


def test_a_root_alone_is_chosen_as_it_is():
    assert AutoBudget(FLAT, 1).choose(root_tree(torch.tensor([[3]]))) == 1
