"""The kernel for rows with drafts against float64 token by token: they compute what their tokens give one by one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aengine.kernels.delta.base import DeltaHeads
from aengine.kernels.delta.triton_delta import TritonDelta
from aengine.kernels.recurrent.state import DraftedBatch
from tests.kernels.delta.drafting import DraftingWorld
from tests.kernels.delta.reference import Entry
from tests.kernels.delta.test_triton_delta import HEADS, exactness

pytestmark = pytest.mark.gpu


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kept", ["float32", "half"])
@pytest.mark.parametrize("right", range(4))
def test_refused_drafts_leave_no_trace(
    heads: DeltaHeads, kept: str, right: int, dtype: torch.dtype, device: torch.device
) -> None:
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    states = torch.float32 if kept == "float32" else half
    it = DraftingWorld(heads, [12], dtype, device, most=3, kept=states)
    net, row = TritonDelta(it.weights), it.begin(0, 1, slot=3)
    for row.drafts, row.right in ((3, right), (1, 0)):
        assert max(it.verify(net, [row])) < exactness(dtype, states)
        row.advance()


def test_rows_with_and_without_drafts_prompts_and_padding_share_steps_tiny(device: torch.device) -> None:
    it = DraftingWorld(DeltaHeads(1, 2, 16, 16), [20, 20, 20, 70], torch.float32, device, most=3)
    net = TritonDelta(it.weights)
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
    it = DraftingWorld(DeltaHeads(1, 2, 16, 16), [20], torch.float32, device, most=2)
    net, row = TritonDelta(it.weights), it.begin(0, 9, slot=3)
    saved = []
    for row.drafts, row.right in ((2, 1), (2, 2)):
        row.save_after, row.save_slot = after, 9
        assert max(it.verify(net, [row])) < exactness(torch.float32)
        row.advance()
        saved.append(not it.state.recurrence[9].isnan().any() and not it.state.conv[9].isnan().any())
    assert saved == [10 <= after <= 12, after >= 10]


def test_padding_among_the_decodes_is_zero_tiny(device: torch.device) -> None:
    it = DraftingWorld(DeltaHeads(1, 2, 16, 16), [9], torch.float32, device, most=1)
    batch, _ = it.batch([Entry(-1, 1, 0, 0)], [])
    none = torch.zeros(1, dtype=torch.int64, device=device)
    batch.drafted = DraftedBatch(none - 1, none, none.int())
    assert not TritonDelta(it.weights)(*it.inputs([Entry(-1, 1, 0, 0)]), it.state, batch).any()
    assert it.state.recurrence.isnan().all()


def test_a_step_without_prompts_computes_rows_with_drafts_and_padding_tiny(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step consists of such sequences. Nothing is launched for prompts, and padding is zero."""
    monkeypatch.setattr(TritonDelta, "_prefill", None)
    it = DraftingWorld(DeltaHeads(1, 2, 16, 16), [20, 20], torch.float32, device, most=3)
    net = TritonDelta(it.weights)
    rows = [it.begin(sequence, length, slot=1 + sequence) for sequence, length in enumerate((1, 9))]
    for right in ((3, 0), (1, 2)):
        for row, row.right in zip(rows, right):
            row.drafts = 3
        assert max(it.verify(net, rows, [Entry(-1, 4, 0, 0)], has_prompts=False)) < exactness(torch.float32)
        assert it.state.recurrence[0].isnan().all()
        for row in rows:
            row.advance()
