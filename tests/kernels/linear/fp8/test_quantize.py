from __future__ import annotations

import pytest
import torch

from aengine.kernels.linear.fp8 import quantize as fp8_weight
from aengine.kernels.linear.fp8.quantize import quantize_fp8
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from tests.kernels.linear.fp8.reference import BLOCKS, exact_weight, random_weight
from tests.one_in import one_in

CPU = torch.device("cpu")


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(256, 256), (200, 330), (3, 7), (1, 129)])
def test_the_numbers_are_values_times_their_blocks_scales(n: int, k: int, block: tuple[int, int]) -> None:
    weight = random_weight(n, k, block, CPU)
    plain = weight.dequantize()
    assert plain.dtype == torch.float32
    torch.testing.assert_close(plain.double(), exact_weight(weight), rtol=1e-7, atol=0)


@pytest.mark.parametrize("slab", one_in(2, [2**24, 40000, 900, 5000, 1]))
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_quantised_numbers_are_near_and_the_largest_of_a_block_is_448(
    block: tuple[int, int], slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_weight, "_SLAB", slab)
    n, k = 300, 260
    weight = torch.randn(n, k) * torch.logspace(3, -3, n)[:, None]
    rows, columns = block[0] or n, block[1] or k
    values, scale = quantize_fp8(weight, (rows, columns))
    made = Fp8Weight(values, scale, (rows, columns), "group")
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            largest = weight[part].abs().max()
            assert values[part].float().abs().max() == 448
            # Half a step of three bits of mantissa, or half of the smallest step.
            error = (made.dequantize()[part] - weight[part]).abs()
            assert (error <= (weight[part].abs() / 15).clamp_min(largest / 448 * 2**-10) * 1.001).all()


def test_blocks_of_zeros_have_a_scale_and_stay_zero() -> None:
    values, scale = quantize_fp8(torch.zeros(130, 140, dtype=torch.bfloat16))
    assert scale.shape == (2, 2)
    assert (scale == 1).all()
    assert (values.float() == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matrix_itself_stays_as_it_is(dtype: torch.dtype) -> None:
    weight = torch.randn(200, 300).to(dtype)
    before = weight.clone()
    values, _ = quantize_fp8(weight)
    assert torch.equal(weight, before)
    assert torch.equal(values.float() < 0, (before < 0) & (values.float() != 0))
