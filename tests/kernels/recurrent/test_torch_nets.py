"""The references of delta nets and Mamba2 against float64 token by token: chunks, decodes, saved states and drafts."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.kernels.delta.base import DeltaNet
from aengine.kernels.recurrent.state import RecurrentHeads
from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.recurrent.nets import BOTH, DeltaWorld
from tests.kernels.recurrent.world import Entry, Row, World

CPU = torch.device("cpu")
HEADS = RecurrentHeads(key_heads=2, value_heads=6, key_dim=8, value_dim=12)
QUICK_CUTS = (1, 2, 31, 63, 64, 65, 100, 127, 128, 129, 139)  # other cases are slow tests

pytestmark = BOTH


def world(
    kind: type[World], *lengths: int, most: int = 4, kept: torch.dtype = torch.float32, decay: float = 1.0
) -> tuple[World, DeltaNet, float]:
    """Return a world, its reference and the largest error."""
    it = kind(HEADS, lengths, torch.float32, CPU, most, kept, decay)
    return it, it.net(TorchKernels()), it.of_reference


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [0.01, 1.0, 50.0])
def test_a_chunk_equals_its_tokens_one_by_one(kind: type[World], tokens: int, decay: float) -> None:
    it, net, exact = world(kind, tokens, decay=decay)
    out, errors = it.run(net, [], [Entry(0, tokens, slot=3, source=0)])
    assert max(errors) < exact
    assert out.shape == (tokens, HEADS.values)


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=() if cut in QUICK_CUTS else pytest.mark.slow) for cut in range(1, 140)]
)
def test_a_sequence_may_be_divided_anywhere(kind: type[World], cut: int) -> None:
    it, net, exact = world(kind, 140)
    _, first = it.run(net, [], [Entry(0, cut, slot=3, source=0)])
    _, rest = it.run(net, [], [Entry(0, 140 - cut, slot=3, source=3, at=cut)])
    assert max(first + rest) < exact


def test_tokens_one_by_one_equal_a_chunk(kind: type[World]) -> None:
    it, net, exact = world(kind, 70, 9)
    for t in range(70):
        second = [Entry(1, 1, slot=4, source=4 if t else 0, at=t)] if t < 9 else []
        _, errors = it.run(net, [Entry(0, 1, slot=3, source=3 if t else 0, at=t), *second])
        assert max(errors) < exact


def test_saved_states_are_read_again(kind: type[World]) -> None:
    it, net, exact = world(kind, 300, 70)
    chunks = [
        Entry(0, 200, slot=3, source=0, saves={64: 5, 192: 6, 200: 7}),
        Entry(1, 70, slot=4, source=0, saves={64: 8}),
    ]
    whole, errors = it.run(net, [], chunks)
    assert max(errors) < exact
    for start, source in ((64, 5), (192, 6)):
        again, errors = it.run(net, [], [Entry(0, 200 - start, slot=9, source=source, at=start)])
        assert max(errors) < exact
        if kind is DeltaWorld:
            assert torch.equal(it.state.recurrence[9], it.state.recurrence[3])
        torch.testing.assert_close(it.state.recurrence[9], it.state.recurrence[3], atol=1e-6, rtol=1e-6)
        assert torch.equal(it.state.conv[9], it.state.conv[3])
        torch.testing.assert_close(again, whole[start:200], atol=1e-6, rtol=1e-6)
    # A fork continues from the end of the chunk in its own slot. The decode saves a state as well.
    _, errors = it.run(net, [Entry(0, 1, slot=10, source=7, at=200, saves={1: 11})])
    assert max(errors) < exact
    assert torch.equal(it.state.recurrence[10], it.state.recurrence[11])
    assert torch.equal(it.state.conv[10], it.state.conv[11])
    _, errors = it.run(net, [Entry(0, 1, slot=3, source=11, at=201)])
    assert max(errors) < exact


def test_steps_mix_decodes_chunks_and_padding(kind: type[World]) -> None:
    it, net, exact = world(kind, 100, 130, 5, 20)
    _, errors = it.run(net, [], [Entry(0, 90, 3, 0), Entry(1, 33, 4, 0), Entry(2, 2, 5, 0), Entry(-1, 3, 0, 0)])
    assert max(errors) < exact
    decodes = [Entry(2, 1, 5, 5, at=2), Entry(-1, 1, 0, 0), Entry(0, 1, 3, 3, at=90)]
    chunks = [
        Entry(1, 97, 4, 4, at=33, saves={31: 8, 95: 9}),
        Entry(-1, 0, 0, 0),
        Entry(3, 20, 7, 0),
        Entry(-1, 4, 0, 0),
        Entry(-1, 0, 0, 0),
    ]
    for absent in (0, 5):
        kept = it.state.recurrence.clone(), it.state.conv.clone()
        _, errors = it.run(net, decodes, chunks, absent=absent)
        assert max(errors) < exact
        assert it.state.recurrence[0].isnan().all()
        if kind is DeltaWorld:  # the other's convolution writes padding to slot 0
            assert it.state.conv[0].isnan().all()
        it.state.recurrence.copy_(kept[0])
        it.state.conv.copy_(kept[1])


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_states_may_be_bfloat16(kind: type[World], kept: torch.dtype) -> None:
    it, net, exact = world(kind, 80, kept=kept)
    _, first = it.run(net, [], [Entry(0, 70, slot=3, source=0)])
    _, rest = it.run(net, [Entry(0, 1, slot=3, source=3, at=70)])
    assert max(first + rest) < (exact if kept == torch.float32 else 2e-2)
    assert it.state.recurrence.dtype == kept


@pytest.mark.parametrize("right", range(5))
def test_refused_drafts_leave_no_trace(kind: type[World], right: int) -> None:
    it, net, exact = world(kind, 40)
    row = it.prefill(net, 0, 9, slot=3)
    while row.length + 5 <= 40:
        row.drafts, row.right = 4, right
        assert max(it.verify(net, [row])) < exact
        row.advance()
    row.drafts = row.right = 0
    assert max(it.verify(net, [row])) < exact


@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_rows_accept_any_number_of_drafts(kind: type[World], most: int, seed: int) -> None:
    rng = random.Random(seed)
    it, net, exact = world(kind, 90, 90, 70, 300, most=most)
    rows = [it.prefill(net, sequence, length, slot=1 + sequence) for sequence, length in enumerate((1, 2, 20))]
    prompt = 0
    while rows:
        for row in rows:
            row.drafts = rng.choice([0, rng.randint(0, most)])
            row.right = rng.randint(0, row.drafts)
        chunks = [Entry(3, 7, 6, 6 if prompt else 0, at=prompt)] if prompt < 280 and rng.random() < 0.3 else []
        prompt += 7 * len(chunks)
        chunks += [Entry(-1, 2, 0, 0)] * rng.randint(0, 1)
        assert max(it.verify(net, rows, chunks, absent=rng.randint(0, 2))) < exact
        assert it.state.recurrence[0].isnan().all()
        for row in rows:
            row.advance()
        rows = [row for row in rows if row.length + 1 + most <= len(it.sequences[row.sequence].qkv)]


@pytest.mark.parametrize("after", range(9, 17))
def test_a_state_is_saved_in_the_step_that_reads_its_last_token(kind: type[World], after: int) -> None:
    """The steps read tokens 9 to 13, of which three are right, then 12 to 16. Both are asked to save."""
    it, net, exact = world(kind, 40)
    row = it.prefill(net, 0, 9, slot=3)
    saved = []
    for drafts, right in ((4, 2), (4, 4)):
        row.drafts, row.right, row.save_after, row.save_slot = drafts, right, after, 9
        assert max(it.verify(net, [row])) < exact
        row.advance()
        saved.append(not it.state.recurrence[9].isnan().any())
    assert saved == [10 <= after <= 14, after >= 10]
    if after < 10:
        return
    # Another row continues from the saved state.
    it.state.recurrence[4], it.state.conv[4] = it.state.recurrence[9], it.state.conv[9]
    assert max(it.verify(net, [Row(0, 4, after, after, drafts=4, right=3)])) < exact


def test_a_row_that_never_drafts_has_every_bit_of_a_decode(kind: type[World]) -> None:
    (it, net, _), (plain, other, _) = world(kind, 30), world(kind, 30)
    row = it.prefill(net, 0, 9, slot=3)
    plain.run(other, [], [Entry(0, 9, slot=3, source=0)])
    while row.length < 30:
        it.verify(net, [row])
        plain.run(other, [Entry(0, 1, slot=3, source=3, at=row.length)])
        assert torch.equal(it.state.recurrence[3], plain.state.recurrence[3])
        assert torch.equal(it.state.conv[3], plain.state.conv[3])
        row.advance()


def test_states_in_bfloat16_are_close(kind: type[World]) -> None:
    it, net, _ = world(kind, 40, kept=torch.bfloat16)
    row = it.prefill(net, 0, 9, slot=3)
    for _ in range(3):
        row.drafts, row.right = 4, 3
        assert max(it.verify(net, [row])) < 2e-2
        row.advance()


def test_drafts_need_memory(kind: type[World]) -> None:
    it, net, _ = world(kind, 20)
    row = it.begin(0, 9, slot=3)
    it.state.drafts = None
    with pytest.raises(ValueError, match="no memory for drafts"):
        it.verify(net, [row])
