"""Long calls: what a round needs is given back, so only the text and its keys and values grow."""

import gc
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from stubs import VOCAB, decode, make_drafter, make_target

from hf_ddtree import DDTreeConfig
from hf_ddtree.benchmark.meters import STATM, give_back_memory, resident_bytes
from hf_ddtree.drafting import DDTreeCandidateGenerator, make

EARLY, MIDDLE, LATE = 200, 1100, 2000  # rounds
PROMPT = torch.tensor([[6, 34, 56, 50]])
MEGABYTE = 1 << 20
MOST_BLOCKS = 1200  # an object left by every round would be 1800; those of first times are some 700


@dataclass
class Snapshot:
    """Memory held in the middle of a call."""

    blocks: int  # of Python's allocator
    resident: int | None  # bytes; None where there is no /proc
    tensors: int = 0
    tensor_bytes: int = 0


def snapshot():
    gc.collect()
    resident = None
    if STATM.exists():
        give_back_memory()
        resident = resident_bytes()
    taken = Snapshot(sys.getallocatedblocks(), resident)
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            taken.tensors += 1
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    taken.tensor_bytes = sum(storages.values())
    return taken


class NeverRight(DDTreeCandidateGenerator):
    """Runs the real drafter, and then drafts anything but the token that comes next."""

    truth: ClassVar[list[int]] = []

    def draft_block(self, root_tokens, context):
        logits, states = super().draft_block(root_tokens, context)
        committed = int(context.positions[0, -1]) + 2
        logits = logits.clone()
        if committed < len(self.truth):
            logits[:, 0, self.truth[committed]] = -torch.inf
        return logits, states


def cached_bytes_per_token(*models):
    """Of keys and values in float32."""
    configs = [model.config for model in models]
    return sum(2 * 4 * each.num_hidden_layers * each.num_key_value_heads * each.head_dim for each in configs)


@pytest.fixture(scope="module")
def models():
    target = make_target("llama", num_hidden_layers=2, max_position_embeddings=4096)
    return target, make_drafter(target, num_hidden_layers=1, target_layer_ids=[0])


@pytest.fixture
def never_right(models, monkeypatch):
    target, _ = models
    text = target.generate(PROMPT, do_sample=False, max_new_tokens=LATE + 60, eos_token_id=None)
    monkeypatch.setattr(NeverRight, "truth", text[0].tolist())
    monkeypatch.setattr(make, "DDTreeCandidateGenerator", NeverRight)
    return text


def test_rounds_leave_nothing_behind(models, never_right):
    target, drafter = models
    taken, rounds = {}, 0

    def count(*_):
        nonlocal rounds
        rounds += 1
        if rounds in (EARLY, MIDDLE, LATE):
            taken[rounds] = snapshot()

    handle = target.register_forward_pre_hook(count)
    try:
        config = {"tree_budget": 6, "max_new_tokens": LATE + 50, "eos_token_id": None}
        result = decode(target, drafter, PROMPT, return_dict_in_generate=True, **config)
    finally:
        handle.remove()
    assert torch.equal(result.sequences, never_right[:, : result.sequences.shape[1]])
    assert result.rounds >= LATE and set(result.acceptance_lengths) == {1}
    early, middle, late = taken[EARLY], taken[MIDDLE], taken[LATE]
    assert late.tensors <= early.tensors + 4
    # Something kept from every round shows in both halves; what else runs in the process may show in one.
    assert min(late.blocks - middle.blocks, middle.blocks - early.blocks) < MOST_BLOCKS / 2
    # Buffers grow by doubling, so at most twice the tokens have room in them.
    room = 2 * (LATE + 60) * cached_bytes_per_token(target, drafter)
    assert late.tensor_bytes - early.tensor_bytes < room + MEGABYTE / 4
    if late.resident is not None and early.resident is not None:
        assert late.resident - early.resident < room + 16 * MEGABYTE


def test_calls_leave_nothing_behind(models):
    target, drafter = models
    config = DDTreeConfig(tree_budget=16, max_new_tokens=8, do_sample=False)
    prompts = [torch.randint(2, VOCAB, (1, 6), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    def calls(count):
        for call in range(count):
            target.generate(prompts[call % len(prompts)], assistant_model=drafter, generation_config=config)
        return snapshot()

    early, late = calls(10), calls(40)
    assert late.tensors <= early.tensors and late.tensor_bytes <= early.tensor_bytes
    assert late.blocks - early.blocks < MOST_BLOCKS
