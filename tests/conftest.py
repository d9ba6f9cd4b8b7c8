import pytest
import torch
from accelerate.state import AcceleratorState
from stubs import StubDrafter, StubGenerator

from hf_ddtree.drafting import make
from hf_ddtree.figures import Figures

torch.set_num_threads(1)  # the models are tiny; more threads only get in each other's way


@pytest.fixture(autouse=True, scope="module")
def fresh_accelerate():
    """accelerate keeps a process's first precision; here each module stands for a process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def stub_generators(monkeypatch):
    """A `StubDrafter` drafts through `StubGenerator`; every other drafter through the real generator."""
    real = make.DDTreeCandidateGenerator

    def generator(drafter, *args):
        return (StubGenerator if isinstance(drafter, StubDrafter) else real)(drafter, *args)

    monkeypatch.setattr(make, "DDTreeCandidateGenerator", generator)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_fallbacks(request, monkeypatch):
    """A round that falls back leaves the text as it is, so it would hide a bug; tests of that are marked."""
    if request.node.get_closest_marker("falls_back"):
        return

    def fall_back(self, cause, message):
        assert cause == "nan", message  # what those tests are about, in a drafter that draws NaN on purpose

    monkeypatch.setattr(Figures, "fall_back", fall_back)
