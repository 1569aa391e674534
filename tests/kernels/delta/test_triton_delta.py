"""The kernels of delta nets against float64 token by token: what only they have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from aengine.kernels.delta import triton_delta
from aengine.kernels.delta.convolve import ConvolveConfig
from aengine.kernels.delta.triton_delta import TritonDelta
from aengine.kernels.recurrent.state import RecurrentHeads, RecurrentState, StateBatch
from tests.kernels.recurrent.nets import DeltaWorld
from tests.kernels.recurrent.world import Entry

pytestmark = pytest.mark.gpu

HEADS = [
    pytest.param(RecurrentHeads(1, 2, 16, 16), id="tiny"),
    pytest.param(RecurrentHeads(2, 2, 24, 40), id="tiny-uneven"),
    pytest.param(RecurrentHeads(16, 32, 128, 128), id="9b"),
]


def test_heads_wider_than_a_program_are_normed_by_another_kernel_tiny(dtype: torch.dtype, device: torch.device) -> None:
    it = DeltaWorld(RecurrentHeads(2, 2, 24, 80), [20], dtype, device)
    _, errors = it.run(TritonDelta(it.weights), [], [Entry(0, 20, slot=3, source=0)])
    assert max(errors) < it.of_kernels


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("turns", [(1, 64, 1), (2, 16, 4)])
def test_every_config_of_the_convolution(
    heads: RecurrentHeads,
    turns: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if heads.key_heads % turns[0]:
        pytest.skip("not for so many heads")
    monkeypatch.setattr(triton_delta, "convolve_config", lambda *_: ConvolveConfig(*turns))
    it = DeltaWorld(heads, [140, 70], dtype, device)
    net = TritonDelta(it.weights)
    for at, tokens in ((0, 2), (2, 3), (5, 66), (71, 57), (128, 12)):
        last = [Entry(1, 70, 6, 0, saves={64: 5})] if at else []
        _, errors = it.run(net, [], [Entry(0, tokens, 3, 3 if at else 0, at=at), Entry(-1, 5, 0, 0), *last])
        # The first two tokens may read almost nothing, so that rounding shows.
        assert max(errors) < it.of_kernels * (1 if at or dtype == torch.float32 else 3)
    _, errors = it.run(net, [], [Entry(1, 6, 7, 5, at=64)])
    assert max(errors) < it.of_kernels


@pytest.mark.parametrize("heads", HEADS)
def test_tokens_that_are_all_alike_stay_exact(heads: RecurrentHeads, dtype: torch.dtype, device: torch.device) -> None:
    """Each token finds itself completely in earlier writes, which is the hardest system."""
    it = DeltaWorld(heads, [130], dtype, device, decay=1e-4)
    s = it.sequences[0]
    s.qkv[:], s.z[:], s.a[:], s.b[:] = s.qkv[:1].clone(), s.z[:1].clone(), s.a[:1].clone(), 4.0
    s.out, s.states = it.reference(s.qkv, s.z, s.b, s.a)
    _, (result, state) = it.run(TritonDelta(it.weights), [], [Entry(0, 130, slot=3, source=0)])
    assert state < 4 * it.of_kernels
    if dtype == torch.float32:  # q may read almost nothing of k
        assert result < 4 * it.of_kernels


class Captured:
    """A graph of the whole net for steps of one size, with any mix of decodes and chunks."""

    def __init__(self, it: DeltaWorld, tokens: int, decodes: int, chunks: int) -> None:
        self._net, heads = TritonDelta(it.weights), it.heads
        self._batch, _ = it.batch([], [Entry(-1, tokens, 0, 0)] + [Entry(-1, 0, 0, 0)] * (chunks - 1), decodes)
        widths = (heads.channels, heads.values, heads.value_heads, heads.value_heads)
        self._inputs = [torch.zeros(tokens, width, dtype=it.dtype, device=it.device) for width in widths]
        self._net(*self._inputs, it.state, self._batch)
        torch.cuda.synchronize()
        self._batch.plans.clear()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self._net(*self._inputs, it.state, self._batch)

    def __call__(
        self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: RecurrentState, batch: StateBatch
    ) -> Tensor:
        for own, new in zip(self._inputs, (qkv, z, b, a), strict=True):
            own.copy_(new)
        for name in ("slots", "sources", "starts", "positions", "saves"):
            getattr(self._batch, name).copy_(getattr(batch, name))
        self._graph.replay()
        return self._out


def test_a_graph_takes_any_step_of_its_size(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("there are no graphs without a GPU")
    it = DeltaWorld(RecurrentHeads(2, 4, 128, 128), [150, 150, 40], torch.bfloat16, device)
    net = Captured(it, tokens=160, decodes=3, chunks=4)
    nothing = Entry(-1, 0, 0, 0)
    steps: list[tuple[list[Entry], list[Entry]]] = [
        ([], [Entry(0, 100, 3, 0, saves={64: 6}), Entry(1, 40, 4, 0), Entry(-1, 20, 0, 0), nothing]),
        (
            [Entry(0, 1, 3, 3, at=100)],
            [Entry(1, 110, 4, 4, at=40, saves={24: 8}), Entry(2, 40, 5, 0), Entry(-1, 9, 0, 0), nothing],
        ),
        ([Entry(0, 1, 3, 3, at=101)], [Entry(0, 86, 7, 6, at=64), Entry(-1, 73, 0, 0), nothing, nothing]),
    ]
    for decodes, chunks in steps:
        _, errors = it.run(net, decodes, chunks, absent=3 - len(decodes))
        assert max(errors) < it.of_kernels
    assert it.state.recurrence[0].isnan().all()


def test_the_same_step_gives_the_same_bits(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the interpreter has one order")
    it = DeltaWorld(RecurrentHeads(4, 8, 128, 128), [300, 40], torch.bfloat16, device)
    net = TritonDelta(it.weights)
    it.run(net, [], [Entry(1, 39, 4, 0)])
    before = it.state.recurrence.clone(), it.state.conv.clone()
    seen = []
    for _ in range(5):
        it.state.recurrence.copy_(before[0])
        it.state.conv.copy_(before[1])
        out, _ = it.run(net, [Entry(1, 1, 4, 4, at=39)], [Entry(0, 300, 3, 0)])
        seen.append((out, it.state.recurrence[3].clone(), it.state.recurrence[4].clone()))
    for later in seen[1:]:
        assert all(map(torch.equal, seen[0], later))
