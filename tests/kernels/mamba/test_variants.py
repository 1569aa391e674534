"""Variants depend only on the shape and on whether rows may have drafts, not on the sizes of a step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aengine.kernels.mamba.base import MambaWeights
from aengine.kernels.mamba.triton_mamba import TritonMamba
from aengine.kernels.recurrent.state import RecurrentHeads, RecurrentState, StateBatch
from tests.kernels.offline import MARKS, record_variants

pytestmark = MARKS


def test_steps_of_all_sizes_use_the_same_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = record_variants(monkeypatch, device=3001)
    heads = RecurrentHeads(2, 16, 8, 8)  # a shape that no other test compiles
    parts = (heads.values, heads.channels, heads.value_heads)

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    each = [torch.zeros(heads.value_heads) for _ in range(3)]
    mamba = TritonMamba(MambaWeights(heads, half(heads.channels, 4), half(heads.channels), *each))
    state = RecurrentState(half(3, 4, heads.channels), torch.zeros(3, heads.value_heads, 8, 8))
    for decodes, chunks in ((0, 1), (1, 2), (2, 0), (3, 3), (16, 0), (17, 72)):
        for more in (65, 66, 128, 200, 1000):
            tokens = decodes + (more if chunks else 0)
            slots = torch.zeros(decodes + chunks, dtype=torch.int32)
            starts = torch.linspace(decodes, tokens, chunks + 1).int()
            positions, saves = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int32)
            z, xbc, dt = half(tokens, sum(parts)).split(parts, dim=1)
            mamba(xbc, z, dt, state, StateBatch(slots, slots, starts, positions, saves, decodes))
    assert {name: len(found) for name, found in variants.items()} == {
        "_blocks_kernel": 1,
        "_chunks_kernel": 1,
        "_decode_kernel": 1,
    }
