"""Graphs that live in one memory, one after the other."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from aengine.runtime.cuda.recording import non_owning_view, recorded

POOL = (0, 7)


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
            results.append(non_owning_view(made))
            del made
        assert torch.cuda.memory_allocated(device) < before + 2**20  # what torch counts random numbers with
        for graph, result in zip(graphs, results, strict=True):
            graph.replay()
            assert torch.equal(result, numbers[: len(result)] + len(result))
    assert len({result.data_ptr() for result in results}) == 1


def test_a_tensor_elsewhere_is_itself() -> None:
    tensor = torch.zeros(3)
    assert non_owning_view(tensor) is tensor


class Torch:
    """What torch knows of recordings: which is under way, and how often a pool is in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = False
        self.uses = 0
        self.invalid = False  # an operation on the stream cannot be recorded
        self.too_large = False  # to become a graph
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)

    def end(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (0, POOL)
        if not self.under_way:
            raise RuntimeError("not currently recording")
        self.under_way = False

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (0, POOL)
        self.uses -= 1


class Graph:
    """In the order in which torch's does it."""

    def __init__(self, known: Torch) -> None:
        self._known = known
        self._ended = False

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._known.under_way = True
        self._known.uses += 1

    def capture_end(self) -> None:
        if self._known.invalid:
            raise RuntimeError("invalidated")
        self._known.end(0, POOL)
        self._ended = True
        if self._known.too_large:
            raise torch.OutOfMemoryError("no room")

    def let_go(self) -> None:
        if self._ended:
            self._known.release(0, POOL)


@pytest.mark.parametrize("state", ["well", "invalid", "too_large"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_recording_that_fails_is_over(state: str, raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch would treat the recording as active forever, and never free cached memory."""
    known = Torch(monkeypatch)
    graph: Any = Graph(known)
    if state != "well":
        setattr(known, state, True)
    try:
        with recorded(graph, POOL):  # type: ignore[arg-type]
            assert known.under_way
            assert not gc.isenabled()
            if raises:
                raise ValueError("what is recorded")
    except (ValueError, RuntimeError) as error:
        assert raises or state != "well"
        assert isinstance(error, ValueError) == (state == "well")  # noqa: PT017
    else:
        assert state == "well"
        assert not raises
    assert gc.isenabled()
    assert not known.under_way
    graph.let_go()
    assert known.uses == 0


def test_collections_that_were_off_stay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Any = Graph(Torch(monkeypatch))
    gc.disable()
    try:
        with recorded(graph, POOL):  # type: ignore[arg-type]
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
