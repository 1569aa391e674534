"""The kernels of Mamba2 against float64 token by token: all shapes, and all kinds of steps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aengine.kernels.delta.base import DeltaHeads, DeltaNet
from aengine.kernels.mamba.triton_mamba import TritonMamba
from tests.kernels.delta.reference import Entry
from tests.kernels.mamba.world import MambaWorld, as_delta_net

pytestmark = pytest.mark.gpu

HEADS = [
    pytest.param(DeltaHeads(1, 2, 16, 16), id="tiny"),
    pytest.param(DeltaHeads(2, 4, 24, 40), id="tiny-uneven"),
    pytest.param(DeltaHeads(1, 48, 128, 64), id="granite"),
    pytest.param(DeltaHeads(1, 24, 256, 64), id="falcon"),
    pytest.param(DeltaHeads(8, 64, 128, 64), id="nemotron"),
]


def exactness(*dtypes: torch.dtype) -> float:
    # A decay within a block is the difference of sums of g that reach hundreds.
    return 1e-4 if all(dtype == torch.float32 for dtype in dtypes) else 3e-2


def world(
    heads: DeltaHeads,
    lengths: list[int],
    dtype: torch.dtype,
    device: torch.device,
    most: int = 3,
    kept: torch.dtype = torch.float32,
    decay: float = 1.0,
) -> tuple[MambaWorld, DeltaNet]:
    it = MambaWorld(heads, lengths, dtype, device, most, kept=kept, decay=decay)
    return it, as_delta_net(TritonMamba(it.mamba))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kept", ["float32", "half"])
def test_tokens_one_by_one(heads: DeltaHeads, kept: str, dtype: torch.dtype, device: torch.device) -> None:
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    states = torch.float32 if kept == "float32" else half
    it, net = world(heads, [7, 3], dtype, device, kept=states)
    for t in range(7):
        second = [Entry(1, 1, slot=4, source=4 if t else 0, at=t)] if t < 3 else []
        padding = [Entry(-1, 1, 0, 0)]
        _, errors = it.run(net, [Entry(0, 1, slot=3, source=3 if t else 0, at=t), *padding, *second])
        assert max(errors) < exactness(dtype, states)
    assert it.state.recurrence[0].isnan().all()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 150])
@pytest.mark.parametrize("decay", [0.01, 1.0, 50.0])
def test_a_chunk_equals_its_tokens_one_by_one(
    heads: DeltaHeads, tokens: int, decay: float, dtype: torch.dtype, device: torch.device
) -> None:
    it, net = world(heads, [tokens], dtype, device, decay=decay)
    _, errors = it.run(net, [], [Entry(0, tokens, slot=3, source=0)])
    # Sums of g over a block reach -3,000; float32 is exact to 2e-4 there.
    assert max(errors) < max(exactness(dtype), 4e-4 if decay > 1 else 0.0)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cut", [1, 2, 3, 30, 62, 63, 64, 65, 68, 127, 128, 129])
def test_a_sequence_may_be_divided_anywhere(
    heads: DeltaHeads, cut: int, dtype: torch.dtype, device: torch.device
) -> None:
    it, net = world(heads, [140], dtype, device)
    _, first = it.run(net, [], [Entry(0, cut, slot=3, source=0)])
    _, rest = it.run(net, [], [Entry(0, 139 - cut, slot=4, source=3, at=cut)])
    _, last = it.run(net, [Entry(0, 1, slot=4, source=4, at=139)])
    assert max(first + rest + last) < exactness(dtype)


@pytest.mark.parametrize("heads", HEADS)
def test_saved_states_are_read_again(heads: DeltaHeads, dtype: torch.dtype, device: torch.device) -> None:
    it, net = world(heads, [201, 70], dtype, device)
    chunks = [
        Entry(0, 200, slot=3, source=0, saves={64: 5, 192: 6, 200: 7}),
        Entry(1, 70, slot=4, source=0, saves={64: 8}),
    ]
    _, errors = it.run(net, [], chunks)
    assert max(errors) < exactness(dtype)
    for start, source in ((64, 5), (192, 6)):
        _, errors = it.run(net, [], [Entry(0, 200 - start, slot=9, source=source, at=start)])
        assert max(errors) < exactness(dtype)
        assert torch.equal(it.state.conv[9], it.state.conv[3])
    _, errors = it.run(net, [Entry(0, 1, slot=10, source=7, at=200, saves={1: 11})])
    assert max(errors) < exactness(dtype)
    assert torch.equal(it.state.recurrence[10], it.state.recurrence[11])
    assert torch.equal(it.state.conv[10], it.state.conv[11])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("absent", [0, 5])
def test_steps_mix_decodes_chunks_and_padding(
    heads: DeltaHeads, absent: int, dtype: torch.dtype, device: torch.device
) -> None:
    it, net = world(heads, [100, 130, 5, 20], dtype, device)
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


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kept", ["float32", "half"])
@pytest.mark.parametrize("right", range(4))
def test_refused_drafts_leave_no_trace(
    heads: DeltaHeads, kept: str, right: int, dtype: torch.dtype, device: torch.device
) -> None:
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    states = torch.float32 if kept == "float32" else half
    it, net = world(heads, [12], dtype, device, kept=states)
    row = it.begin(0, 1, slot=3)
    for row.drafts, row.right in ((3, right), (1, 0)):
        assert max(it.verify(net, [row])) < exactness(dtype, states)
        row.advance()


def test_rows_with_and_without_drafts_prompts_and_padding_share_steps_tiny(device: torch.device) -> None:
    it, net = world(DeltaHeads(1, 2, 16, 16), [20, 20, 20, 70], torch.float32, device)
    rows = [it.begin(sequence, length, slot=1 + sequence) for sequence, length in enumerate((1, 2, 9))]
    steps = [
        ([3, 1, 0], [Entry(3, 3, 6, 0), Entry(-1, 2, 0, 0)]),
        ([0, 3, 2], [Entry(-1, 2, 0, 0), Entry(3, 4, 6, 6, 3)]),
    ]
    for drafts, chunks in steps:
        for row, row.drafts in zip(rows, drafts):
            row.right = row.drafts // 2
        assert max(it.verify(net, rows, chunks, absent=1)) < exactness(torch.float32)
        assert it.state.recurrence[0].isnan().all()
        for row in rows:
            row.advance()


@pytest.mark.interpreted(3)
@pytest.mark.parametrize("after", [9, 10, 11, 12, 14])
def test_a_state_is_saved_in_the_step_that_reads_its_last_token_tiny(after: int, device: torch.device) -> None:
    """The steps compute tokens 9 to 11, of which two are right, then 11 to 13. Both are asked to save."""
    it, net = world(DeltaHeads(1, 2, 16, 16), [20], torch.float32, device, most=2)
    row = it.begin(0, 9, slot=3)
    saved = []
    for row.drafts, row.right in ((2, 1), (2, 2)):
        row.save_after, row.save_slot = after, 9
        assert max(it.verify(net, [row])) < exactness(torch.float32)
        row.advance()
        saved.append(not it.state.recurrence[9].isnan().any())
    assert saved == [10 <= after <= 12, after >= 10]


def test_a_step_without_prompts_computes_rows_with_drafts_and_padding_tiny(device: torch.device) -> None:
    """A captured step consists of such sequences."""
    it, net = world(DeltaHeads(1, 2, 16, 16), [20, 20], torch.float32, device)
    rows = [it.begin(sequence, length, slot=1 + sequence) for sequence, length in enumerate((1, 9))]
    for right in ((3, 0), (1, 2)):
        for row, row.right in zip(rows, right):
            row.drafts = 3
        assert max(it.verify(net, rows, [Entry(-1, 4, 0, 0)], has_prompts=False)) < exactness(torch.float32)
        assert it.state.recurrence[0].isnan().all()
        for row in rows:
            row.advance()
