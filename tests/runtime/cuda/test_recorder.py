"""Few graphs are recorded before anything is served, the others one by one; steps take what is recorded by then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.model.config import ModelConfig
from aengine.model.loading.hub import resolve_model
from aengine.runtime.cuda import recorder as recording
from aengine.runtime.cuda.capture import GRAPH_BYTES, GraphSizes
from aengine.runtime.cuda.decode_graphs import DecodeGraphs, ForwardKind, graph_sizes
from aengine.runtime.cuda.prefill_graphs import prefill_sizes
from aengine.runtime.cuda.recorder import Recorder, covering
from aengine.runtime.cuda.recording import GraphPart
from aengine.runtime.step.rows import Rows
from aengine.step_plan import SharedRun

DECODE, PREFILL = [1, 2, 3, 5, 6], [16, 32, 64]


class Graphs:
    """What a rank would record, and in what order it was asked to."""

    def __init__(self, name: str, sizes: list[int], shared: bool, log: list[str]) -> None:
        self.name, self.sizes, self.log = name, sizes, log
        parts = [GraphPart(size) for size in reversed(sizes)]
        self.parts = parts + [GraphPart(part.size, True) for part in parts] if shared else parts
        self.missed: GraphPart | None = None
        self.failing: GraphPart | None = None
        self.failures = 0  # of it

    def rehearse(self, part: GraphPart) -> None:
        self.log.append(f"rehearse {self._called(part)}")

    def record(self, part: GraphPart) -> None:
        if part == self.failing and self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("no room")
        self.log.append(self._called(part))

    def _called(self, part: GraphPart) -> str:
        return f"{self.name}{part.size}{'+' * part.shared}"


class Ranks:
    """All in one thread, in the order of the ranks."""

    def __call__(self, calls: Sequence[Callable[[], object]], short: bool = False) -> list[object]:
        return [call() for call in calls]

    def synchronize(self) -> None:
        pass


class Rig:
    """Ranks of one model, whose graphs are recorded."""

    def __init__(self, ranks: int = 1) -> None:
        self.log: list[str] = []
        self.ranks: list[Any] = [
            SimpleNamespace(
                prefill_graphs=Graphs("p" * rank + "P", PREFILL, False, self.log),
                decode_graphs=Graphs("d" * rank + "D", DECODE, True, self.log),
            )
            for rank in range(ranks)
        ]
        devices: Any = Ranks()
        self.recorder = Recorder(self.ranks, devices)

    def fail(self, part: GraphPart, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first rank's part; and note from now on when memory is given back."""
        graphs = self.ranks[0].decode_graphs
        graphs.failing, graphs.failures = part, times
        monkeypatch.setattr(recording, "give_back", lambda: self.log.append("give back"))

    def took(self) -> list[str]:
        """Since this was asked last."""
        log = self.log[:]
        self.log.clear()
        return log


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "give_back", lambda: None)


def test_what_graphs_keep_of_logits_is_set_aside_where_shared_runs_are_recorded_later() -> None:
    model = ModelConfig.from_folder(resolve_model(None, None))
    sizes = GraphSizes([1, 4, 8, 256], [])
    nodes = 4 * GRAPH_BYTES
    assert sizes.more_bytes(model, torch.bfloat16) == nodes + (4 + 8) * model.vocab_size * 2
    replace = msgspec.structs.replace
    layers = [replace(layer, attention=replace(layer.attention, window=128)) for layer in model.layers]
    assert sizes.more_bytes(replace(model, layers=layers), torch.bfloat16) == nodes


@pytest.mark.parametrize(
    "sizes", [[1], [16, 8192], DECODE, graph_sizes(256), graph_sizes(1000), prefill_sizes(3072, 3072, 8192)]
)
def test_every_step_can_be_padded_to_what_is_recorded_first(sizes: list[int]) -> None:
    kept = sorted(covering(sizes))
    assert kept[-1] == sizes[-1]
    assert kept[0] == sizes[0]
    assert len(kept) <= len(sizes) / 3 or len(sizes) < 20
    for size in sizes:  # none is padded to more than the double, and one size more
        following = min(one for one in kept if one >= size)
        assert following <= 2 * sizes[min(sizes.index(size) + 1, len(sizes) - 1)]


def test_all_is_rehearsed_then_the_largest_come_first() -> None:
    rig = Rig()
    rig.recorder.rehearse()
    plain = ["P64", "P32", "P16", "D6", "D5", "D3", "D2", "D1"]
    shared = ["D6+", "D5+", "D3+", "D2+", "D1+"]
    assert rig.took() == [f"rehearse {name}" for name in plain + shared]
    rig.recorder.record()
    assert rig.took() == plain + shared
    assert not rig.recorder.record_next()


def test_what_was_left_out_is_rehearsed_again_and_recorded_one_by_one() -> None:
    rig = Rig()
    rig.recorder.record(least=True)
    assert rig.took() == ["P64", "P32", "P16", "D6", "D3", "D1"]
    for left, name in zip(range(7, 0, -1), ("D5", "D2", "D6+", "D5+", "D3+", "D2+", "D1+"), strict=True):
        assert rig.recorder.left == left
        assert rig.recorder.record_next()
        assert rig.took() == [f"rehearse {name}", name]
    assert not rig.recorder.record_next()
    assert rig.took() == []


def test_what_a_step_has_missed_comes_first_and_alone_where_that_is_asked() -> None:
    rig = Rig()
    rig.recorder.record(least=True)
    rig.took()
    decode = rig.ranks[0].decode_graphs
    assert not rig.recorder.record_next(missed=True)
    decode.missed = GraphPart(3, True)
    assert rig.recorder.record_next(missed=True)
    assert rig.took() == ["rehearse D3+", "D3+"]
    assert not rig.recorder.record_next(missed=True)  # it is there now
    decode.missed = GraphPart(2)
    assert rig.recorder.record_next()
    assert rig.recorder.record_next()
    assert rig.took() == ["rehearse D2", "D2", "rehearse D5", "D5"]


def test_ranks_record_the_same_in_turns() -> None:
    rig = Rig(ranks=2)
    rig.recorder.record(least=True)
    assert rig.took()[:4] == ["P64", "pP64", "P32", "pP32"]
    rig.ranks[0].decode_graphs.missed = GraphPart(2)
    rig.ranks[1].decode_graphs.missed = GraphPart(5)
    assert rig.recorder.record_next(missed=True)
    assert rig.took() == ["rehearse D2", "rehearse dD2", "D2", "dD2"]


def test_where_one_fails_the_others_are_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    rig.recorder.record(least=True)
    rig.fail(GraphPart(2), times=2, monkeypatch=monkeypatch)
    assert rig.recorder.record_next()
    rig.took()
    with caplog.at_level(logging.WARNING, "aengine"):
        assert rig.recorder.record_next()
    assert rig.took() == ["rehearse D2", "give back", "rehearse D2"]
    assert "6 graphs are left out, and steps padded to larger ones: no room" in caplog.text
    assert not rig.recorder.record_next()


def test_memory_that_steps_left_behind_is_given_back_to_one_that_needs_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While torch records, it gives back nothing by itself."""
    rig = Rig()
    rig.recorder.record(least=True)
    rig.fail(GraphPart(5), times=1, monkeypatch=monkeypatch)
    rig.took()
    with caplog.at_level(logging.WARNING, "aengine"):
        assert rig.recorder.record_next()
    assert rig.took() == ["rehearse D5", "give back", "rehearse D5", "D5"]
    assert not caplog.text
    assert rig.recorder.left == 6


def test_nothing_is_recorded_once_it_is_closed() -> None:
    rig = Rig()
    rig.recorder.record(least=True)
    rig.recorder.close()
    rig.took()
    assert not rig.recorder.record_next()
    assert rig.took() == []


class Replays:
    """Decode graphs that say which of them is replayed."""

    def __init__(self, rows: int = 40) -> None:
        self.log: list[tuple[int, bool]] = []
        self.rows = Rows(rows, 4, torch.device("cpu"))
        decoder: Any = SimpleNamespace(config=SimpleNamespace(windows=[None]))
        nothing: Any = None
        self.graphs = DecodeGraphs(decoder, nothing, nothing, self.rows, graph_sizes(rows))

    def record(self, size: int, shared: bool = False) -> None:
        kinds = {ForwardKind(one): self._graph(size, one) for one in (False, True)[: 1 + shared]}
        made: Any = SimpleNamespace(forward=kinds, logits=torch.zeros(size, 1))
        self.graphs._graphs[size] = made

    def _graph(self, size: int, shared: bool) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append((size, shared)))

    def step(self, rows: int, shared: bool = False) -> tuple[int, bool]:
        runs = [SharedRun(tokens=16, members=[0, 1])] if shared else []
        logits, index = self.graphs.forward(list(range(rows)), runs)
        assert len(logits) == rows
        assert index.tolist() == list(range(rows))
        size = self.log[-1][0]
        assert self.graphs._row_index[rows:size].tolist() == [self.rows.padding] * (size - rows)
        return self.log[-1]


def test_decodes_are_padded_to_the_next_size_that_is_recorded() -> None:
    replays = Replays()
    sizes = replays.graphs.sizes
    assert sizes[:9] == [1, 2, 3, 4, 5, 6, 7, 9, 11]
    for size in covering(sizes):
        replays.record(size)
    for rows in range(1, 41):
        size, _ = replays.step(rows)
        assert size == min(one for one in covering(sizes) if one >= rows)
        best = min(one for one in sizes if one >= rows)
        assert replays.graphs.missed == (None if size == best else GraphPart(best))
    replays.record(9)
    assert replays.step(8) == (9, False)
    assert replays.graphs.missed is None
    assert replays.step(10) == (19, False)


def test_runs_that_rows_share_are_read_row_by_row_until_their_graph_is_recorded() -> None:
    replays = Replays()
    replays.record(40)
    assert replays.step(9, shared=True) == (40, False)
    assert replays.graphs.missed == GraphPart(9)
    replays.record(9)
    assert replays.step(9, shared=True) == (9, False)
    assert replays.graphs.missed == GraphPart(9, True)
    replays.record(9, shared=True)
    assert replays.step(9, shared=True) == (9, True)
    assert replays.graphs.missed is None
    replays.record(2)
    assert replays.step(2, shared=True) == (2, False)  # so few never have one
    assert replays.graphs.missed is None


def test_a_rehearsal_between_two_steps_runs_over_rows_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rows of the step before have written, others may have cached by now."""
    replays = Replays()
    graphs, seen = replays.graphs, []
    replays.record(9)
    replays.record(9, shared=True)
    assert replays.step(9, shared=True) == (9, True)
    assert graphs._shared._cells.any()

    def forward(size: int, kind: ForwardKind, rehearsal: bool) -> tuple[None, None]:
        seen.append((size, kind, rehearsal))
        assert set(graphs._row_index.tolist()) == {replays.rows.padding}
        assert not graphs._shared._cells.any()
        return None, None

    monkeypatch.setattr(graphs, "_forward", forward)
    monkeypatch.setattr(graphs, "_draw", lambda *_: None)
    for part in (GraphPart(9), GraphPart(9, True)):
        graphs.rehearse(part)
    assert seen == [(9, ForwardKind(), True), (9, ForwardKind(shared=True), True)]
    assert replays.step(9, shared=True) == (9, True)  # which tells the device anew of its rows
    assert graphs._shared._cells.any()
