import pytest
import torch
from accelerate.state import AcceleratorState
from stubs import StubDrafter, StubGenerator

import hf_ddtree.strategy

torch.set_num_threads(1)  # the models are tiny; more threads only get in each other's way


@pytest.fixture(autouse=True, scope="module")
def fresh_accelerate():
    """accelerate keeps a process's first precision; here each module stands for a process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def stub_generators(monkeypatch):
    """A `StubDrafter` drafts through `StubGenerator`; every other drafter through the real generator."""
    real = hf_ddtree.strategy.DDTreeCandidateGenerator

    def make(drafter, *args):
        return (StubGenerator if isinstance(drafter, StubDrafter) else real)(drafter, *args)

    monkeypatch.setattr(hf_ddtree.strategy, "DDTreeCandidateGenerator", make)
    torch.manual_seed(0)
