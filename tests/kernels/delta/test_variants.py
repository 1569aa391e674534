"""Variants for chunks depend only on the config, not on the number of chunks or their lengths."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aengine.kernels.delta.base import DeltaWeights
from aengine.kernels.delta.triton_delta import TritonDelta
from aengine.kernels.recurrent.state import RecurrentHeads, RecurrentState, StateBatch
from tests.kernels.offline import MARKS, record_variants

pytestmark = MARKS


def test_steps_of_all_sizes_use_the_same_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = record_variants(monkeypatch, device=3000)
    heads = RecurrentHeads(16, 32, 8, 8)  # a shape that no other test compiles
    channels, values, each = heads.channels, heads.values, heads.value_heads

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    weights = DeltaWeights(heads, half(channels, 4), torch.zeros(each), torch.zeros(each), half(8), 1e-6)
    state = RecurrentState(half(3, 4, channels), torch.zeros(3, each, 8, 8))
    net = TritonDelta(weights)
    for chunks in (1, 2, 3, 72):
        for tokens in (65, 66, 130, 200, 3000, 3064, 3130, 3200):
            slots = torch.zeros(chunks, dtype=torch.int32)
            starts = torch.linspace(0, tokens, chunks + 1).int()
            positions, saves = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int32)
            batch = StateBatch(slots, slots, starts, positions, saves, 0)
            net(half(tokens, channels), half(tokens, values), half(tokens, each), half(tokens, each), state, batch)
    cuts = {"_convolve_kernel": 2}  # for many blocks and for few
    assert len(variants) >= 4
    assert {name: len(found) for name, found in variants.items()} == {name: cuts.get(name, 1) for name in variants}
