"""The reference of Mamba2 against float64 token by token: chunks, decodes, saved states and drafts."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.kernels.delta.base import DeltaHeads, DeltaNet
from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.delta.drafting import Row
from tests.kernels.delta.reference import Entry
from tests.kernels.mamba.world import MambaWorld, as_delta_net

CPU = torch.device("cpu")
HEADS = DeltaHeads(key_heads=2, value_heads=6, key_dim=8, value_dim=12)
EXACT = 8e-6  # sums of g over a block are differences of larger sums


def world(*lengths: int, most: int = 4, decay: float = 1.0) -> tuple[MambaWorld, DeltaNet]:
    it = MambaWorld(HEADS, lengths, torch.float32, CPU, most, decay=decay)
    return it, as_delta_net(TorchKernels().mamba(it.mamba))


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [0.01, 1.0, 50.0])
def test_a_chunk_equals_its_tokens_one_by_one(tokens: int, decay: float) -> None:
    it, net = world(tokens, decay=decay)
    out, errors = it.run(net, [], [Entry(0, tokens, slot=3, source=0)])
    assert max(errors) < EXACT * max(1.0, decay)  # sums of g over a block reach thousands
    assert out.shape == (tokens, HEADS.values)


@pytest.mark.parametrize("cut", [1, 2, 31, 63, 64, 65, 100, 127, 128, 129, 139])
def test_a_sequence_may_be_divided_anywhere(cut: int) -> None:
    it, net = world(140)
    _, first = it.run(net, [], [Entry(0, cut, slot=3, source=0)])
    _, rest = it.run(net, [], [Entry(0, 140 - cut, slot=3, source=3, at=cut)])
    assert max(first + rest) < EXACT


def test_tokens_one_by_one_equal_a_chunk() -> None:
    it, net = world(70, 9)
    for t in range(70):
        second = [Entry(1, 1, slot=4, source=4 if t else 0, at=t)] if t < 9 else []
        _, errors = it.run(net, [Entry(0, 1, slot=3, source=3 if t else 0, at=t), *second])
        assert max(errors) < EXACT


def test_saved_states_are_read_again() -> None:
    it, net = world(300, 70)
    chunks = [
        Entry(0, 200, slot=3, source=0, saves={64: 5, 192: 6, 200: 7}),
        Entry(1, 70, slot=4, source=0, saves={64: 8}),
    ]
    _, errors = it.run(net, [], chunks)
    assert max(errors) < EXACT
    for start, source in ((64, 5), (192, 6)):
        _, errors = it.run(net, [], [Entry(0, 200 - start, slot=9, source=source, at=start)])
        assert max(errors) < EXACT
        torch.testing.assert_close(it.state.recurrence[9], it.state.recurrence[3], atol=1e-6, rtol=1e-6)
        assert torch.equal(it.state.conv[9], it.state.conv[3])
    _, errors = it.run(net, [Entry(0, 1, slot=10, source=7, at=200, saves={1: 11})])
    assert max(errors) < EXACT
    assert torch.equal(it.state.recurrence[10], it.state.recurrence[11])
    _, errors = it.run(net, [Entry(0, 1, slot=3, source=11, at=201)])
    assert max(errors) < EXACT


@pytest.mark.parametrize("absent", [0, 5])
def test_steps_mix_decodes_chunks_and_padding(absent: int) -> None:
    it, net = world(100, 130, 5, 20)
    _, errors = it.run(net, [], [Entry(0, 90, 3, 0), Entry(1, 33, 4, 0), Entry(2, 2, 5, 0), Entry(-1, 3, 0, 0)])
    assert max(errors) < EXACT
    decodes = [Entry(2, 1, 5, 5, at=2), Entry(-1, 1, 0, 0), Entry(0, 1, 3, 3, at=90)]
    chunks = [
        Entry(1, 97, 4, 4, at=33, saves={31: 8, 95: 9}),
        Entry(-1, 0, 0, 0),
        Entry(3, 20, 7, 0),
        Entry(-1, 4, 0, 0),
        Entry(-1, 0, 0, 0),
    ]
    _, errors = it.run(net, decodes, chunks, absent=absent)
    assert max(errors) < EXACT
    assert it.state.recurrence[0].isnan().all()


def test_states_may_be_bfloat16() -> None:
    it = MambaWorld(HEADS, [80], torch.float32, CPU, 1, kept=torch.bfloat16)
    net = as_delta_net(TorchKernels().mamba(it.mamba))
    _, first = it.run(net, [], [Entry(0, 70, slot=3, source=0)])
    _, rest = it.run(net, [Entry(0, 1, slot=3, source=3, at=70)])
    assert max(first + rest) < 2e-2
    assert it.state.recurrence.dtype == torch.bfloat16


@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_rows_accept_any_number_of_drafts(most: int, seed: int) -> None:
    rng = random.Random(seed)
    it, net = world(90, 90, 70, 300, most=most)
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
    it, net = world(40)
    row = it.prefill(net, 0, 9, slot=3)
    saved = []
    for drafts, right in ((4, 2), (4, 4)):
        row.drafts, row.right, row.save_after, row.save_slot = drafts, right, after, 9
        assert max(it.verify(net, [row])) < EXACT
        row.advance()
        saved.append(not it.state.recurrence[9].isnan().any())
    assert saved == [10 <= after <= 14, after >= 10]
    if after >= 10:  # another row continues from the saved state
        it.state.recurrence[4], it.state.conv[4] = it.state.recurrence[9], it.state.conv[9]
        assert max(it.verify(net, [Row(0, 4, after, after, drafts=4, right=3)])) < EXACT


def test_drafts_need_memory() -> None:
    it, net = world(20)
    row = it.begin(0, 9, slot=3)
    it.state.drafts = None
    with pytest.raises(ValueError, match="no memory for drafts"):
        it.verify(net, [row])
