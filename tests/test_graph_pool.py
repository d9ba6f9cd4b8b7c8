"""The memory that CUDA's graphs share, with a CUDA that keeps only count of it, as torch's allocator does."""

import gc
from collections import Counter
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from hf_ddtree.compiled import CudaGraph


@pytest.fixture
def uses(monkeypatch):
    """Graphs alive by pool; the device is 0 unless a test says otherwise."""
    uses, numbers = Counter(), count()

    class Graph:
        number = None

        def pool(self):
            return self.number

        def __del__(self):
            if self.number is not None:
                uses[self.number] -= 1

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        assert pool is None or uses[pool] > 0, "INTERNAL ASSERT FAILED: use_count > 0"
        yield
        graph.number = next(numbers) if pool is None else pool
        uses[graph.number] += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return uses


def recorded():
    graph = CudaGraph()
    graph.record(lambda: None)
    return graph


def test_graphs_share_a_pool_while_one_is_there(uses):
    graphs = [recorded() for _ in range(3)]
    del graphs[0]
    graphs.append(recorded())
    assert len({graph.graph.number for graph in graphs}) == 1


def test_a_call_after_all_graphs_are_gone_records_again(uses):
    for _ in range(3):
        graphs = [recorded(), recorded()]
        assert len({graph.graph.number for graph in graphs}) == 1
        del graphs
        gc.collect()
        assert not any(uses.values())


def test_a_capture_that_failed_is_nobodys_pool(uses):
    broken = CudaGraph()
    with pytest.raises(ZeroDivisionError):
        broken.record(lambda: 1 / 0)
    assert recorded().graph.number is not None


def test_devices_have_pools_of_their_own(uses, monkeypatch):
    first = recorded()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    second = recorded()
    assert first.graph.number != second.graph.number
