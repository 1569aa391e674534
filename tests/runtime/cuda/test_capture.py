"""The graphs that start-up captures, their order, and the graph to which a decode step is padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.config import EngineConfig
from aengine.kernels.decodes import torch_decodes
from aengine.runtime.cuda import capture
from aengine.runtime.cuda.capture import GRAPH_BYTES, GraphSizes
from aengine.runtime.cuda.decode_graphs import DecodeGraphs
from aengine.runtime.cuda.decode_shapes import (
    LEAST_SHARERS,
    LEAST_USED,
    SMALL_SIZES,
    DecodeShape,
    ForwardKind,
    graph_sizes,
    shared_sizes,
)
from aengine.runtime.step.rows import Rows
from aengine.step_plan import SharedRun, StepPlan


class Graphs:
    """What a rank captures; notes the order."""

    def __init__(self, name: str, sizes: list[int], log: list[str]) -> None:
        self.name, self.sizes, self.log = name, sizes, log

    def rehearse(self, size: int) -> None:
        self.log.append(f"rehearse {self.name}{size}")

    def record(self, size: int) -> None:
        self.log.append(f"{self.name}{size}")


class Devices:
    """All ranks in one thread, in their order."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __call__(self, calls: Sequence[Callable[[], object]], short: bool = False) -> list[object]:
        return [call() for call in calls]

    def synchronize(self) -> None:
        self.log.append("wait")


def test_everything_is_rehearsed_then_the_largest_are_recorded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(capture, "empty_caches", lambda: log.append("empty caches"))
    ranks = [
        SimpleNamespace(
            prefill_graphs=Graphs("p" * rank + "P", [16, 32], log),
            decode_graphs=Graphs("d" * rank + "D", [1, 2], log),
        )
        for rank in range(2)
    ]
    executors: Any = SimpleNamespace(ranks=ranks, devices=Devices(log))
    capture.capture(executors)
    order = ["P32", "P16", "D2", "D1"]
    both = [(name, f"{name[0].lower()}{name}") for name in order]
    rehearsed = [step for one, other in both for step in (f"rehearse {one}", f"rehearse {other}", "wait")]
    recorded = [name for pair in both for name in pair]
    assert log == [*rehearsed, "empty caches", *recorded, "empty caches"]


@pytest.mark.parametrize("most", [1, 2, 5, 63, 64, 65, 100, 128, 129, 256, 1000])
def test_sizes_are_close_enough_that_padding_costs_little(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for smaller, larger in zip([0, *sizes], sizes):
        assert larger <= 4 or smaller + 1 >= LEAST_USED * larger or larger in (*SMALL_SIZES, most)
        assert (smaller + 1) / larger > 0.5
    if most in (128, 256, 1000):
        assert 128 in sizes


def test_fewer_sizes_have_shared_runs_and_every_batch_that_may_share_fits_one() -> None:
    for most in (1, 3, 4, 64, 256):
        sizes = graph_sizes(most)
        found = shared_sizes(sizes)
        assert found == [size for size in sizes if size in found]
        assert found[-1:] == ([most] if most >= LEAST_SHARERS else [])
        assert all(size >= LEAST_SHARERS for size in found)
        assert 64 in found or most != 256


def test_steps_with_drafts_are_captured_up_to_the_most_drafts() -> None:
    config = EngineConfig(max_num_seqs=40)
    assert GraphSizes.from_config(config, True, 512, 2048).drafted == []
    drafted = GraphSizes.from_config(config, True, 512, 2048, most_drafts=3).drafted
    assert {shape.drafts for shape in drafted} == {1, 2, 3}
    assert drafted[-1] == (40, 3)
    assert GraphSizes([1], [16], drafted=drafted).largest.drafted == [(40, 3)]
    assert GraphSizes([1], [16], drafted=drafted).node_bytes == (2 + len(drafted)) * GRAPH_BYTES
    config = EngineConfig(cuda_graphs=False)
    assert not GraphSizes.from_config(config, True, 512, 2048, most_drafts=3).drafted


def test_memory_for_nodes_grows_with_adapters() -> None:
    assert GraphSizes([1, 4, 8], [16]).node_bytes == 4 * GRAPH_BYTES
    assert GraphSizes([1, 4, 8], [16], adapted=True).node_bytes == 8 * GRAPH_BYTES


class Replays:
    """Decode graphs that record which graph is replayed."""

    def __init__(self, rows: int = 40, window: int | None = None) -> None:
        self.log: list[tuple[int, bool]] = []
        self.rows = Rows(rows, 4, torch.device("cpu"))
        decoder: Any = SimpleNamespace(config=SimpleNamespace(windows=[window]))
        nothing: Any = None
        shapes = list(map(DecodeShape, graph_sizes(rows)))
        self.graphs = DecodeGraphs(decoder, nothing, nothing, self.rows, None, torch_decodes, shapes, None, None)
        self.sizes = [shape.rows for shape in self.graphs.sizes]
        for shape in shapes:
            size = shape.rows
            made: Any = SimpleNamespace(
                forward={kind: self._graph(size, kind.shared) for kind in self.graphs._kinds(shape)},
                logits=torch.zeros(size, 1),
                rows=self.graphs._cells[0, :size],
                positions=torch.zeros(size, dtype=torch.int64),
            )
            self.graphs._graphs[shape] = made

    def _graph(self, size: int, shared: bool) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append((size, shared)))

    def step(self, rows: int, shared: bool = False) -> tuple[int, bool]:
        runs = [SharedRun(tokens=16, members=[0, 1])] if shared else []
        plan = StepPlan(0, [], [], list(range(rows)), [], [], shared=runs)
        shape = self.graphs.exact_shape_for(plan)
        assert shape is not None
        assert shape == self.graphs.shape_for(plan)
        logits, index, positions = self.graphs.replay_forward(plan, shape)
        assert len(logits) == len(positions) == rows
        assert index.tolist() == list(range(rows))
        size = self.log[-1][0]
        assert self.graphs._cells[0, rows:size].tolist() == [self.rows.padding] * (size - rows)
        return self.log[-1]


def test_decodes_are_padded_to_the_next_size() -> None:
    replays = Replays()
    for rows in range(1, 41):
        assert replays.step(rows) == (min(size for size in replays.sizes if size >= rows), False)


def test_more_decodes_than_the_largest_size_are_launched() -> None:
    graphs = Replays().graphs
    plan = StepPlan(0, [], [], list(range(41)), [], [])
    assert graphs.shape_for(plan) is graphs.exact_shape_for(plan) is None


def test_decodes_that_share_runs_are_padded_to_the_next_size_that_has_them() -> None:
    replays = Replays()
    found = shared_sizes(replays.sizes)
    for rows in range(1, 41):
        if rows < LEAST_SHARERS:  # too few rows: shared runs are read row by row
            assert replays.step(rows, shared=True) == (min(s for s in replays.sizes if s >= rows), False)
        else:
            assert replays.step(rows, shared=True) == (min(size for size in found if size >= rows), True)
    # Without shared runs, these rows use their own size again.
    assert replays.step(9, shared=True) == (16, True)
    assert replays.step(9) == (16, False)
    assert replays.step(7, shared=True) == (16, True)
    assert replays.step(7) == (8, False)
    assert replays.step(7, shared=True) == (16, True)


def test_models_with_windows_in_all_layers_share_no_runs() -> None:
    assert Replays(window=100).step(9, shared=True) == (16, False)


def test_a_rehearsal_runs_over_the_padding_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = Replays()
    graphs, seen = replays.graphs, []
    assert replays.step(9, shared=True) == (16, True)
    assert graphs._shared._cells.any()

    def forward(shape: DecodeShape, kind: ForwardKind, rehearsal: bool) -> None:
        seen.append((shape, kind, rehearsal))
        assert set(graphs._cells[0].tolist()) == {replays.rows.padding}
        assert not graphs._shared._cells.any()

    monkeypatch.setattr(graphs, "forward", forward)
    monkeypatch.setattr(graphs, "end", lambda *_: None)
    graphs.rehearse(DecodeShape(16))
    assert seen == [(DecodeShape(16), ForwardKind(), True), (DecodeShape(16), ForwardKind(shared=True), True)]
    assert replays.step(9, shared=True) == (16, True)  # which sends its rows and runs again
    assert graphs._shared._cells.any()
