"""Target and drafter on a GPU, in float32: the text is plain decoding's on the same device, with graphs and without."""

import pytest
import torch
from keyed import sampled
from stubs import decode, greedy, make_drafter, make_target

from hf_ddtree import compiled

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [0, 0, 0, 50, 4, 4, 33, 21, 60, 17]])
MASK = (PROMPT > 0).long()
NEW = 40
FAMILIES = ("qwen3", "gemma3", "deepseek_v3")  # full and sliding layers, latent attention with experts
DENSE = ("qwen3", "gemma3")
MODES = ("off", "graphs")


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    """Of each family, on the device."""
    target = make_target(request.param).to(DEVICE)
    target.family = request.param
    return target


@pytest.fixture(autouse=True)
def graphs_or_fail(request, monkeypatch):
    """A forward that could not be recorded is a failure where nothing in the model waits for the host."""
    found = []
    monkeypatch.setattr(compiled.logger, "warning", found.append)
    yield
    if request.getfixturevalue("target").family in DENSE:
        assert not found


def drafters(target):
    """A DFlash drafter, one with a window, and another model."""
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    made = make_drafter(target), make_drafter(target, seed=3, **sliding), make_target("llama", seed=4)
    return [each.to(DEVICE) for each in made]


@pytest.mark.parametrize("mode", MODES)
def test_greedy(target, mode):
    prompt = PROMPT[:1].to(DEVICE)
    expected = greedy(target, prompt, NEW)
    for drafter in drafters(target):
        tokens = decode(target, drafter, prompt, max_new_tokens=NEW, compile=mode)
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_sampled(target, mode):
    prompt, settings = PROMPT[:1].to(DEVICE), {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "seed": 3}
    expected = sampled(target, prompt, NEW, **settings)
    for drafter in drafters(target):
        tokens = decode(target, drafter, prompt, max_new_tokens=NEW, do_sample=True, compile=mode, **settings)
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_batch_with_padding_and_rows_that_end(target, mode):
    prompt, padding = PROMPT.to(DEVICE), {"attention_mask": MASK.to(DEVICE), "pad_token_id": 0}
    plain = greedy(target, prompt, NEW, **padding)
    padding["eos_token_id"] = [int(plain[0, 22]), int(plain[1, 31])]
    expected = greedy(target, prompt, NEW, **padding)
    for drafter in drafters(target):
        tokens = decode(target, drafter, prompt, max_new_tokens=NEW, compile=mode, tree_budget=7, **padding)
        assert tokens.tolist() == expected.tolist()


def test_graphs_are_replayed(target, monkeypatch):
    """What the tests above compare is what they say."""
    replays = []
    replay = compiled.CudaGraph.replay
    monkeypatch.setattr(compiled.CudaGraph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    drafter = make_drafter(target).to(DEVICE)
    decode(target, drafter, PROMPT[:1].to(DEVICE), max_new_tokens=NEW, compile="graphs")
    assert len(set(map(id, replays))) >= 2 or target.family not in DENSE
