"""The kernels of delta nets against float64 token by token: all shapes, and all kinds of steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from aengine.kernels.delta import triton_delta
from aengine.kernels.delta.base import DeltaHeads
from aengine.kernels.delta.convolve import ConvolveConfig
from aengine.kernels.delta.triton_delta import TritonDelta
from aengine.kernels.recurrent.state import RecurrentState, StateBatch
from tests.kernels.delta.reference import Entry, World, reference

pytestmark = pytest.mark.gpu

HEADS = [
    pytest.param(DeltaHeads(1, 2, 16, 16), id="tiny"),
    pytest.param(DeltaHeads(2, 2, 24, 40), id="tiny-uneven"),
    pytest.param(DeltaHeads(16, 32, 128, 128), id="9b"),
]


def exactness(*dtypes: torch.dtype) -> float:
    return 5e-6 if all(dtype == torch.float32 for dtype in dtypes) else 2e-2


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kept", ["float32", "half"])
def test_tokens_one_by_one(heads: DeltaHeads, kept: str, dtype: torch.dtype, device: torch.device) -> None:
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    states = torch.float32 if kept == "float32" else half
    it = World(heads, [7, 3], dtype, device, kept=states)
    net = TritonDelta(it.weights)
    for t in range(7):
        second = [Entry(1, 1, slot=4, source=4 if t else 0, at=t)] if t < 3 else []
        padding = [Entry(-1, 1, 0, 0)]
        _, errors = it.run(net, [Entry(0, 1, slot=3, source=3 if t else 0, at=t), *padding, *second])
        assert max(errors) < exactness(dtype, states)
    assert it.state.recurrence[0].isnan().all()
    assert it.state.conv[0].isnan().all()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 150])
@pytest.mark.parametrize("decay", [0.01, 1.0, 50.0])
def test_a_chunk_equals_its_tokens_one_by_one(
    heads: DeltaHeads, tokens: int, decay: float, dtype: torch.dtype, device: torch.device
) -> None:
    it = World(heads, [tokens], dtype, device, decay=decay)
    _, errors = it.run(TritonDelta(it.weights), [], [Entry(0, tokens, slot=3, source=0)])
    # Sums of g over a block reach -3,000; float32 is exact to 2e-4 there.
    assert max(errors) < max(exactness(dtype), 2e-4 if decay > 1 else 0.0)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cut", [1, 2, 3, 30, 62, 63, 64, 65, 68, 127, 128, 129])
def test_a_sequence_may_be_divided_anywhere(
    heads: DeltaHeads, cut: int, dtype: torch.dtype, device: torch.device
) -> None:
    it = World(heads, [140], dtype, device)
    net = TritonDelta(it.weights)
    _, first = it.run(net, [], [Entry(0, cut, slot=3, source=0)])
    _, rest = it.run(net, [], [Entry(0, 139 - cut, slot=4, source=3, at=cut)])
    _, last = it.run(net, [Entry(0, 1, slot=4, source=4, at=139)])
    assert max(first + rest + last) < exactness(dtype)


@pytest.mark.parametrize("heads", HEADS)
def test_saved_states_are_read_again_with_the_same_bits(
    heads: DeltaHeads, dtype: torch.dtype, device: torch.device
) -> None:
    it = World(heads, [201, 70], dtype, device)
    net = TritonDelta(it.weights)
    chunks = [
        Entry(0, 200, slot=3, source=0, saves={64: 5, 192: 6, 200: 7}),
        Entry(1, 70, slot=4, source=0, saves={64: 8}),
    ]
    whole, errors = it.run(net, [], chunks)
    assert max(errors) < exactness(dtype)
    for start, source in ((64, 5), (192, 6)):
        again, errors = it.run(net, [], [Entry(0, 200 - start, slot=9, source=source, at=start)])
        assert max(errors) < exactness(dtype)
        assert torch.equal(it.state.conv[9], it.state.conv[3])
        if dtype == torch.float32:  # saved states are rounded, while the running state was not
            assert torch.equal(it.state.recurrence[9], it.state.recurrence[3])
            assert torch.equal(again, whole[start:200])
    _, errors = it.run(net, [Entry(0, 1, slot=10, source=7, at=200, saves={1: 11})])
    assert max(errors) < exactness(dtype)
    assert torch.equal(it.state.recurrence[10], it.state.recurrence[11])
    assert torch.equal(it.state.conv[10], it.state.conv[11])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("absent", [0, 5])
def test_steps_mix_decodes_chunks_and_padding(
    heads: DeltaHeads, absent: int, dtype: torch.dtype, device: torch.device
) -> None:
    it = World(heads, [100, 130, 5, 20], dtype, device)
    net = TritonDelta(it.weights)
    _, errors = it.run(net, [], [Entry(0, 90, 3, 0), Entry(1, 33, 4, 0), Entry(2, 2, 5, 0), Entry(-1, 3, 0, 0)])
    assert max(errors) < exactness(dtype)
    decodes = [Entry(2, 1, 5, 5, at=2), Entry(-1, 1, 0, 0), Entry(0, 1, 3, 3, at=90)]
    chunks = [
        Entry(1, 97, 4, 4, at=33, saves={31: 8, 95: 9}),
        Entry(-1, 0, 0, 0),
        Entry(3, 20, 7, 0),
        Entry(-1, 70, 0, 0),
        Entry(-1, 0, 0, 0),
    ]
    _, errors = it.run(net, decodes, chunks, absent=absent)
    assert max(errors) < exactness(dtype)
    assert it.state.recurrence[0].isnan().all()
    assert it.state.conv[0].isnan().all()


def test_heads_wider_than_a_program_are_normed_by_another_kernel_tiny(dtype: torch.dtype, device: torch.device) -> None:
    it = World(DeltaHeads(2, 2, 24, 80), [20], dtype, device)
    _, errors = it.run(TritonDelta(it.weights), [], [Entry(0, 20, slot=3, source=0)])
    assert max(errors) < exactness(dtype)


@pytest.mark.interpreted(4)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("turns", [(0, 64, 4), (0, 16, 2), (1, 64, 1), (2, 16, 4)])
def test_every_config_of_the_convolution(
    heads: DeltaHeads,
    turns: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if heads.key_heads % max(1, turns[0]):
        pytest.skip("not for so many heads")
    monkeypatch.setattr(triton_delta, "convolve_config", lambda *_: ConvolveConfig(*turns))
    it = World(heads, [140, 70], dtype, device)
    net = TritonDelta(it.weights)
    for at, tokens in ((0, 2), (2, 3), (5, 66), (71, 57), (128, 12)):
        last = [Entry(1, 70, 6, 0, saves={64: 5})] if at else []
        _, errors = it.run(net, [], [Entry(0, tokens, 3, 3 if at else 0, at=at), Entry(-1, 5, 0, 0), *last])
        # The first two tokens may read almost nothing, so that rounding shows.
        assert max(errors) < exactness(dtype) * (1 if at or dtype == torch.float32 else 3)
    _, errors = it.run(net, [], [Entry(1, 6, 7, 5, at=64)])
    assert max(errors) < exactness(dtype)


@pytest.mark.parametrize("heads", HEADS)
def test_tokens_that_are_all_alike_stay_exact(heads: DeltaHeads, dtype: torch.dtype, device: torch.device) -> None:
    """Each token finds itself completely in earlier writes, which is the hardest system."""
    it = World(heads, [130], dtype, device, decay=1e-4)
    s = it.sequences[0]
    s.qkv[:], s.z[:], s.a[:], s.b[:] = s.qkv[:1].clone(), s.z[:1].clone(), s.a[:1].clone(), 4.0
    s.out, s.states = reference(it.weights, s.qkv, s.z, s.b, s.a)
    _, (result, state) = it.run(TritonDelta(it.weights), [], [Entry(0, 130, slot=3, source=0)])
    assert state < 4 * exactness(dtype)
    if dtype == torch.float32:  # q may read almost nothing of k
        assert result < 4 * exactness(dtype)


class Captured:
    """A graph of the whole net for steps of one size, with any mix of decodes and chunks."""

    def __init__(self, it: World, tokens: int, decodes: int, chunks: int) -> None:
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
    it = World(DeltaHeads(2, 4, 128, 128), [150, 150, 40], torch.bfloat16, device)
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
        assert max(errors) < exactness(torch.bfloat16)
    assert it.state.recurrence[0].isnan().all()


def test_the_same_step_gives_the_same_bits(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the interpreter has one order")
    it = World(DeltaHeads(4, 8, 128, 128), [300, 40], torch.bfloat16, device)
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
