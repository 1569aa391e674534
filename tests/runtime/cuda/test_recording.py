"""Graphs that live in one memory, one after the other."""

from __future__ import annotations

import pytest
import torch

from aengine.runtime.cuda.recording import borrowed, recorded


@pytest.mark.gpu
def test_results_of_graphs_of_one_pool_lie_over_each_other() -> None:
    device, pool = torch.device("cuda", 0), torch.cuda.graph_pool_handle()
    numbers = torch.arange(2**22, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream()
    graphs, results = [], []
    with torch.cuda.stream(stream):
        numbers + 1  # loads the kernel
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        for size in (2**22, 2**21, 2**20):
            graph = torch.cuda.CUDAGraph()
            with recorded(graph, pool):
                made = numbers[:size] + size
            graphs.append(graph)
            results.append(borrowed(made))
            del made
        assert torch.cuda.memory_allocated(device) < before + 2**20  # what torch counts random numbers with
        for graph, result in zip(graphs, results, strict=True):
            graph.replay()
            assert torch.equal(result, numbers[: len(result)] + len(result))
    assert len({result.data_ptr() for result in results}) == 1


def test_a_tensor_elsewhere_is_itself() -> None:
    tensor = torch.zeros(3)
    assert borrowed(tensor) is tensor
