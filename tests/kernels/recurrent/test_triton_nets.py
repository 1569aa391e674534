"""The kernels of delta nets and Mamba2 against float64 token by token: all shapes, and all kinds of steps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aengine.kernels.delta.base import DeltaNet
from aengine.kernels.delta.triton_delta import TritonDelta
from aengine.kernels.mamba import triton_mamba
from aengine.kernels.recurrent.state import DraftedBatch, RecurrentHeads
from aengine.kernels.triton_kernels import TritonKernels
from tests.kernels.recurrent.nets import BOTH, DeltaWorld, MambaWorld
from tests.kernels.recurrent.world import Entry, World

pytestmark = pytest.mark.gpu

TINY = RecurrentHeads(1, 2, 16, 16)
NETS = [
    pytest.param(DeltaWorld, TINY, id="delta-tiny"),
    pytest.param(DeltaWorld, RecurrentHeads(2, 2, 24, 40), id="delta-tiny-uneven"),
    pytest.param(DeltaWorld, RecurrentHeads(16, 32, 128, 128), id="delta-9b"),
    pytest.param(MambaWorld, TINY, id="mamba-tiny"),
    pytest.param(MambaWorld, RecurrentHeads(2, 4, 24, 40), id="mamba-tiny-uneven"),
    pytest.param(MambaWorld, RecurrentHeads(1, 48, 128, 64), id="mamba-granite"),
    pytest.param(MambaWorld, RecurrentHeads(1, 24, 256, 64), id="mamba-falcon"),
    pytest.param(MambaWorld, RecurrentHeads(8, 64, 128, 64), id="mamba-nemotron"),
]
EACH = pytest.mark.parametrize(("kind", "heads"), NETS)


def world(
    kind: type[World],
    heads: RecurrentHeads,
    lengths: list[int],
    dtype: torch.dtype,
    device: torch.device,
    most: int = 3,
    kept: str = "float32",
    decay: float = 1.0,
) -> tuple[World, DeltaNet, float]:
    """Return a world, its kernels and their largest error."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    it = kind(heads, lengths, dtype, device, most, torch.float32 if kept == "float32" else half, decay)
    return it, it.net(TritonKernels()), it.of_kernels


@pytest.mark.interpreted(3)
@EACH
@pytest.mark.parametrize("kept", ["float32", "half"])
def test_tokens_one_by_one(
    kind: type[World], heads: RecurrentHeads, kept: str, dtype: torch.dtype, device: torch.device
) -> None:
    it, net, exact = world(kind, heads, [7, 3], dtype, device, kept=kept)
    for t in range(7):
        second = [Entry(1, 1, slot=4, source=4 if t else 0, at=t)] if t < 3 else []
        padding = [Entry(-1, 1, 0, 0)]
        _, errors = it.run(net, [Entry(0, 1, slot=3, source=3 if t else 0, at=t), *padding, *second])
        assert max(errors) < exact
    assert it.state.recurrence[0].isnan().all()
    if kind is DeltaWorld:  # the other's convolution writes padding to slot 0
        assert it.state.conv[0].isnan().all()


@pytest.mark.interpreted(5)
@EACH
@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 150])
@pytest.mark.parametrize("decay", [50.0, 1.0, 0.01])
def test_a_chunk_equals_its_tokens_one_by_one(
    kind: type[World], heads: RecurrentHeads, tokens: int, decay: float, dtype: torch.dtype, device: torch.device
) -> None:
    it, net, exact = world(kind, heads, [tokens], dtype, device, decay=decay)
    _, errors = it.run(net, [], [Entry(0, tokens, slot=3, source=0)])
    assert max(errors) < exact


@pytest.mark.interpreted(3)
@EACH
@pytest.mark.parametrize("cut", [1, 2, 3, 30, 62, 63, 64, 65, 68, 127, 128, 129])
def test_a_sequence_may_be_divided_anywhere(
    kind: type[World], heads: RecurrentHeads, cut: int, dtype: torch.dtype, device: torch.device
) -> None:
    it, net, exact = world(kind, heads, [140], dtype, device)
    _, first = it.run(net, [], [Entry(0, cut, slot=3, source=0)])
    _, rest = it.run(net, [], [Entry(0, 139 - cut, slot=4, source=3, at=cut)])
    _, last = it.run(net, [Entry(0, 1, slot=4, source=4, at=139)])
    assert max(first + rest + last) < exact


@pytest.mark.interpreted(3)
@EACH
def test_saved_states_are_read_again(
    kind: type[World], heads: RecurrentHeads, dtype: torch.dtype, device: torch.device
) -> None:
    it, net, exact = world(kind, heads, [201, 70], dtype, device)
    chunks = [
        Entry(0, 200, slot=3, source=0, saves={64: 5, 192: 6, 200: 7}),
        Entry(1, 70, slot=4, source=0, saves={64: 8}),
    ]
    whole, errors = it.run(net, [], chunks)
    assert max(errors) < exact
    for start, source in ((64, 5), (192, 6)):
        again, errors = it.run(net, [], [Entry(0, 200 - start, slot=9, source=source, at=start)])
        assert max(errors) < exact
        assert torch.equal(it.state.conv[9], it.state.conv[3])
        if dtype == torch.float32 and kind is DeltaWorld:  # saved states are rounded, the running state is not
            assert torch.equal(it.state.recurrence[9], it.state.recurrence[3])
            assert torch.equal(again, whole[start:200])
    _, errors = it.run(net, [Entry(0, 1, slot=10, source=7, at=200, saves={1: 11})])
    assert max(errors) < exact
    assert torch.equal(it.state.recurrence[10], it.state.recurrence[11])
    assert torch.equal(it.state.conv[10], it.state.conv[11])


@pytest.mark.interpreted(3)
@EACH
@pytest.mark.parametrize("absent", [0, 5])
def test_steps_mix_decodes_chunks_and_padding(
    kind: type[World], heads: RecurrentHeads, absent: int, dtype: torch.dtype, device: torch.device
) -> None:
    it, net, exact = world(kind, heads, [100, 130, 5, 20], dtype, device)
    _, errors = it.run(net, [], [Entry(0, 90, 3, 0), Entry(1, 33, 4, 0), Entry(2, 2, 5, 0), Entry(-1, 3, 0, 0)])
    assert max(errors) < exact
    decodes = [Entry(2, 1, 5, 5, at=2), Entry(-1, 1, 0, 0), Entry(0, 1, 3, 3, at=90)]
    chunks = [
        Entry(1, 97, 4, 4, at=33, saves={31: 8, 95: 9}),
        Entry(-1, 0, 0, 0),
        Entry(3, 20, 7, 0),
        Entry(-1, 70, 0, 0),
        Entry(-1, 0, 0, 0),
    ]
    _, errors = it.run(net, decodes, chunks, absent=absent)
    assert max(errors) < exact
    assert it.state.recurrence[0].isnan().all()
    if kind is DeltaWorld:  # the other's convolution writes padding to slot 0
        assert it.state.conv[0].isnan().all()


@pytest.mark.interpreted(4)
@EACH
@pytest.mark.parametrize("kept", ["float32", "half"])
@pytest.mark.parametrize("right", range(4))
def test_refused_drafts_leave_no_trace(
    kind: type[World], heads: RecurrentHeads, kept: str, right: int, dtype: torch.dtype, device: torch.device
) -> None:
    it, net, exact = world(kind, heads, [12], dtype, device, most=3, kept=kept)
    row = it.begin(0, 1, slot=3)
    for row.drafts, row.right in ((3, right), (1, 0)):
        assert max(it.verify(net, [row])) < exact
        row.advance()


@pytest.mark.interpreted(2)
@BOTH
def test_rows_with_and_without_drafts_prompts_and_padding_share_steps_tiny(
    kind: type[World], device: torch.device
) -> None:
    it, net, exact = world(kind, TINY, [20, 20, 20, 70], torch.float32, device, most=3)
    rows = [it.begin(sequence, length, slot=1 + sequence) for sequence, length in enumerate((1, 2, 9))]
    steps = [
        ([3, 1, 0], [Entry(3, 3, 6, 0), Entry(-1, 2, 0, 0)]),
        ([0, 3, 2], [Entry(-1, 2, 0, 0), Entry(3, 4, 6, 6, 3)]),
    ]
    for drafts, chunks in steps:
        for row, row.drafts in zip(rows, drafts):
            row.right = row.drafts // 2
        assert max(it.verify(net, rows, chunks, absent=1)) < exact
        assert it.state.recurrence[0].isnan().all()
        for row in rows:
            row.advance()


@BOTH
@pytest.mark.interpreted(5)
@pytest.mark.parametrize("after", [9, 10, 11, 12, 14])
def test_a_state_is_saved_in_the_step_that_reads_its_last_token_tiny(
    kind: type[World], after: int, device: torch.device
) -> None:
    """The steps compute tokens 9 to 11, of which two are right, then 11 to 13. Both are asked to save."""
    it, net, exact = world(kind, TINY, [20], torch.float32, device, most=2)
    row = it.begin(0, 9, slot=3)
    saved = []
    for row.drafts, row.right in ((2, 1), (2, 2)):
        row.save_after, row.save_slot = after, 9
        assert max(it.verify(net, [row])) < exact
        row.advance()
        saved.append(not it.state.recurrence[9].isnan().any() and not it.state.conv[9].isnan().any())
    assert saved == [10 <= after <= 12, after >= 10]


@pytest.mark.interpreted(2)
@BOTH
def test_padding_among_the_decodes_is_zero_tiny(kind: type[World], device: torch.device) -> None:
    it, net, _ = world(kind, TINY, [9], torch.float32, device, most=1)
    batch, _ = it.batch([Entry(-1, 1, 0, 0)], [])
    none = torch.zeros(1, dtype=torch.int64, device=device)
    batch.drafted = DraftedBatch(none - 1, none, none.int())
    assert not net(*it.inputs([Entry(-1, 1, 0, 0)]), it.state, batch).any()
    assert it.state.recurrence.isnan().all()


@pytest.mark.interpreted(2)
@BOTH
def test_a_step_without_prompts_computes_rows_with_drafts_and_padding_tiny(
    kind: type[World], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step consists of such sequences. Nothing is launched for prompts, and padding is zero."""
    monkeypatch.setattr(TritonDelta, "_prefill", None)
    monkeypatch.setattr(triton_mamba, "run_chunks", None)
    it, net, exact = world(kind, TINY, [20, 20], torch.float32, device, most=3)
    rows = [it.begin(sequence, length, slot=1 + sequence) for sequence, length in enumerate((1, 9))]
    for right in ((3, 0), (1, 2)):
        for row, row.right in zip(rows, right):
            row.drafts = 3
        assert max(it.verify(net, rows, [Entry(-1, 4, 0, 0)], has_prompts=False)) < exact
        assert it.state.recurrence[0].isnan().all()
        for row in rows:
            row.advance()
