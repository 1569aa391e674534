from __future__ import annotations

import pytest
import torch

from aengine.kernels.linear.four_bit import Int4Weight, Mxfp4Weight

CODES = torch.tensor([[0, 1, 8, 15], [7, 9, 2, 3]], dtype=torch.uint8)


def test_a_code_counts_from_eight_where_there_is_no_zero() -> None:
    weight = Int4Weight(CODES, torch.tensor([[0.5], [2.0]]))
    assert weight.group == 4
    assert weight.dequantised().tolist() == [[-4.0, -3.5, 0.0, 3.5], [-2.0, 2.0, -12.0, -10.0]]


def test_each_group_has_a_scale_and_a_zero() -> None:
    scale = torch.tensor([[1.0, 10.0], [1.0, 100.0]])
    zero = torch.tensor([[1, 8], [15, 2]], dtype=torch.uint8)
    dense = Int4Weight(CODES, scale, zero).dequantised()
    assert dense.tolist() == [[-1.0, 0.0, 0.0, 70.0], [-8.0, -6.0, 0.0, 100.0]]


def test_sorted_columns_multiply_what_their_order_says() -> None:
    order = torch.tensor([2, 0, 3, 1])
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    plain = Int4Weight(CODES, torch.ones(2, 1))
    sorted_by_group = Int4Weight(CODES, torch.ones(2, 1), order=order)
    assert torch.equal(sorted_by_group.dequantised() @ x, plain.dequantised() @ x[order])


def test_mxfp4_is_a_small_float_times_a_power_of_two() -> None:
    codes = torch.arange(32, dtype=torch.uint8).fmod(16).repeat(1, 2)
    scale = torch.tensor([[127, 124]], dtype=torch.uint8)
    dense = Mxfp4Weight(codes, scale).dequantised()
    assert dense[0, :8].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert dense[0, 8:16].tolist() == [-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    assert torch.equal(dense[:, 32:], dense[:, :32] / 8)


@pytest.mark.parametrize("rows", [1, 3])
def test_shapes_that_do_not_fit_are_named(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"scale \[{rows}, 1\] does not fit codes \[2, 4\]"):
        Int4Weight(CODES, torch.ones(rows, 1))
    with pytest.raises(ValueError, match=rf"zero \[{rows}, 1\] does not fit scale"):
        Int4Weight(CODES, torch.ones(2, 1), torch.zeros(rows, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=rf"order \[{rows}\] does not fit"):
        Int4Weight(CODES, torch.ones(2, 1), order=torch.arange(rows))
    with pytest.raises(ValueError, match=rf"scale \[{rows}, 1\] does not fit codes \[2, 32\] in groups of 32"):
        Mxfp4Weight(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(rows, 1, dtype=torch.uint8))
