"""Rows with drafts compute what their tokens give one by one, whatever was drafted and refused before."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.kernels.delta.base import DeltaHeads
from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.delta.drafting import DraftingWorld, Row
from tests.kernels.delta.reference import Entry

CPU = torch.device("cpu")
HEADS = DeltaHeads(key_heads=2, value_heads=6, key_dim=8, value_dim=12)
EXACT = 3e-6


def world(*lengths: int, most: int = 4) -> DraftingWorld:
    return DraftingWorld(HEADS, lengths, torch.float32, CPU, most)


@pytest.mark.parametrize("right", range(5))
def test_refused_drafts_leave_no_trace(right: int) -> None:
    it = world(40)
    net = TorchKernels().delta_net(it.weights)
    row = it.prefill(net, 0, 9, slot=3)
    while row.length + 5 <= 40:
        row.drafts, row.right = 4, right
        assert max(it.verify(net, [row])) < EXACT
        row.advance()
    row.drafts = row.right = 0
    assert max(it.verify(net, [row])) < EXACT


@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_rows_accept_any_number_of_drafts(most: int, seed: int) -> None:
    rng = random.Random(seed)
    it = world(90, 90, 70, 300, most=most)
    net = TorchKernels().delta_net(it.weights)
    rows = [it.prefill(net, sequence, length, slot=1 + sequence) for sequence, length in enumerate((1, 2, 20))]
    prompt = 0
    while rows:
        for row in rows:
            row.drafts = rng.choice([0, rng.randint(0, most)])
            row.right = rng.randint(0, row.drafts)
        chunks = [Entry(3, 7, 6, 6 if prompt else 0, at=prompt)] if prompt < 280 and rng.random() < 0.3 else []
        prompt += 7 * len(chunks)
        chunks += [Entry(-1, 2, 0, 0)] * rng.randint(0, 1)
        assert max(it.verify(net, rows, chunks, absent=rng.randint(0, 2))) < EXACT
        assert it.state.recurrence[0].isnan().all()
        for row in rows:
            row.advance()
        rows = [row for row in rows if row.length + 1 + most <= len(it.sequences[row.sequence].qkv)]


@pytest.mark.parametrize("after", range(9, 17))
def test_a_state_is_saved_in_the_step_that_reads_its_last_token(after: int) -> None:
    """The steps read tokens 9 to 13, of which three are right, then 12 to 16. Both are asked to save."""
    it = world(40)
    net = TorchKernels().delta_net(it.weights)
    row = it.prefill(net, 0, 9, slot=3)
    saved = []
    for drafts, right in ((4, 2), (4, 4)):
        row.drafts, row.right, row.save_after, row.save_slot = drafts, right, after, 9
        assert max(it.verify(net, [row])) < EXACT
        row.advance()
        saved.append(not it.state.recurrence[9].isnan().any())
    assert saved == [10 <= after <= 14, after >= 10]
    if after < 10:
        return
    # Another row continues from the saved state.
    it.state.recurrence[4], it.state.conv[4] = it.state.recurrence[9], it.state.conv[9]
    assert max(it.verify(net, [Row(0, 4, after, after, drafts=4, right=3)])) < EXACT


def test_a_row_that_never_drafts_has_every_bit_of_a_decode() -> None:
    it, plain = world(30), world(30)
    net, other = TorchKernels().delta_net(it.weights), TorchKernels().delta_net(plain.weights)
    row = it.prefill(net, 0, 9, slot=3)
    plain.run(other, [], [Entry(0, 9, slot=3, source=0)])
    while row.length < 30:
        it.verify(net, [row])
        plain.run(other, [Entry(0, 1, slot=3, source=3, at=row.length)])
        assert torch.equal(it.state.recurrence[3], plain.state.recurrence[3])
        assert torch.equal(it.state.conv[3], plain.state.conv[3])
        row.advance()


def test_states_in_bfloat16_are_close() -> None:
    it = DraftingWorld(HEADS, [40], torch.float32, CPU, 4, kept=torch.bfloat16)
    net = TorchKernels().delta_net(it.weights)
    row = it.prefill(net, 0, 9, slot=3)
    for _ in range(3):
        row.drafts, row.right = 4, 3
        assert max(it.verify(net, [row])) < 2e-2
        row.advance()
