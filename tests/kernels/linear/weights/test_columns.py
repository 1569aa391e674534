"""Columns of an int4 matrix whose groups are scattered stand for the same numbers when they are picked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.kernels.linear.weights.integers import CHUNK, Int4Weight


def random_weight(groups: int, group: int, zeros: bool, seed: int) -> Int4Weight:
    generator = torch.Generator().manual_seed(seed)
    n, k = 5, groups * group
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    zero = torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.uint8) if zeros else None
    scale = torch.randn(n, groups, generator=generator)
    return Int4Weight(codes, scale, zero, torch.randperm(k, generator=generator))


@given(
    groups=st.integers(1, 6),
    group=st.sampled_from([8, 16, 32, 128]),
    ranks=st.sampled_from([2, 4, 8]),
    zeros=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_picked_columns_stand_for_the_same_numbers(groups: int, group: int, ranks: int, zeros: bool, seed: int) -> None:
    weight = random_weight(groups, group, zeros, seed)
    width = groups * group // ranks
    for rank in range(ranks):
        columns = rank * width, (rank + 1) * width
        picked = weight.columns(*columns)
        assert torch.equal(picked.dequantize(), weight.dequantize()[:, slice(*columns)])
        assert picked.group == min(CHUNK, group)


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_have_few_shapes(ranks: int) -> None:
    """Each is a kernel to be compiled."""
    width = 96 * 128 // ranks
    picked = [random_weight(96, 128, False, layer).columns(0, width).codes.shape for layer in range(36)]
    assert len(set(picked)) <= 2
    assert max(k for _, k in picked) < 2 * width
