import pytest
import torch
from stubs import StubDrafter, StubGenerator

import hf_ddtree.strategy


@pytest.fixture(autouse=True)
def stub_generators(monkeypatch):
    """A `StubDrafter` drafts through `StubGenerator`; every other drafter through the real generator."""
    real = hf_ddtree.strategy.DDTreeCandidateGenerator

    def make(drafter, *args):
        return (StubGenerator if isinstance(drafter, StubDrafter) else real)(drafter, *args)

    monkeypatch.setattr(hf_ddtree.strategy, "DDTreeCandidateGenerator", make)
    torch.manual_seed(0)
