"""What the numbers of quantised weights mean, against plain loops."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.linear.weights.e2m1 import Mxfp4Weight, Nvfp4Weight
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight, Int8Weight

GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (1, 200), (130, 200), (1, 128)])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_fp8(block: tuple[int, int], experts: tuple[int, ...]) -> None:
    n, k = 130, 200
    weight = torch.randn(*experts, n, k, generator=GENERATOR).to(torch.float8_e4m3fn)
    scale = torch.rand(*experts, -(-n // block[0]), -(-k // block[1]), generator=GENERATOR)
    out = Fp8Weight(weight, scale, block, "group").dequantize()
    rows, columns = torch.arange(n) // block[0], torch.arange(k) // block[1]
    torch.testing.assert_close(out, weight.float() * scale[..., rows, :][..., columns], rtol=0, atol=0)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("experts", [0, 3])
def test_int4(ordered: bool, zeros: bool, experts: int) -> None:
    n, k, group = 5, 24, 8
    lead = (experts,) if experts else ()
    codes = torch.randint(0, 16, (*lead, n, k), dtype=torch.uint8, generator=GENERATOR)
    scale = torch.rand(*lead, n, k // group, generator=GENERATOR).bfloat16()
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, generator=GENERATOR) if zeros else None
    orders = torch.stack([torch.randperm(k, generator=GENERATOR) for _ in range(experts or 1)])
    order = (orders if experts else orders[0]) if ordered else None
    out = Int4Weight(codes, scale, zero, order).dequantize().view(-1, n, k)
    for e in range(experts or 1):
        at = (e,) if experts else ()
        for i in range(n):
            for j in range(k):
                middle = int(zero[(*at, i, j // group)]) if zero is not None else 8
                value = (int(codes[(*at, i, j)]) - middle) * float(scale[(*at, i, j // group)])
                assert out[e, i, int(orders[e, j]) if ordered else j] == value


def test_mxfp4_has_sixteen_values_and_powers_of_two_down_to_the_subnormal_one() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).repeat(1, 4, 1).reshape(4, 32)
    scale = torch.tensor([[127], [128], [0], [252]], dtype=torch.uint8)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*magnitudes, *(-value for value in magnitudes)] * 2, dtype=torch.float64)
    out = Mxfp4Weight.from_codes(codes, scale).dequantize()
    for row, exponent in zip(out, (0, 1, -127, 125)):
        assert torch.equal(row.double(), values * 2.0**exponent)
    assert out.isfinite().all()


def test_mxfp4_keeps_two_codes_in_a_byte() -> None:
    codes = torch.randint(0, 16, (2, 3, 64), dtype=torch.uint8)
    weight = Mxfp4Weight.from_codes(codes, torch.zeros(2, 3, 2, dtype=torch.uint8))
    assert weight.pairs.shape == (2, 3, 32)
    assert weight.shape == codes.shape
    assert torch.equal(weight.codes, codes)


def test_nvfp4_scales_groups_of_sixteen_and_rows() -> None:
    n, k = 3, 48
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=GENERATOR)
    scale = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8, generator=GENERATOR).view(torch.float8_e4m3fn)
    factor = torch.rand(n, 1, generator=GENERATOR)
    out = Nvfp4Weight.from_codes(codes, scale, factor).dequantize()
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for i in range(n):
        for j in range(k):
            byte, code = int(scale.view(torch.uint8)[i, j // 16]), int(codes[i, j])
            exponent, mantissa = byte >> 3, byte & 7
            unit = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
            number = magnitudes[code & 7] * (-1 if code > 7 else 1) * unit
            assert out[i, j] == torch.tensor(number, dtype=torch.float64).mul(factor[i].double()).float()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 96, 160, 256])
def test_int8_is_two_halves_of_4_bits(group: int, zeros: bool, ordered: bool) -> None:
    n, k = 5, 2 * group
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=GENERATOR)
    scale = torch.rand(n, 2, generator=GENERATOR).bfloat16()
    zero = torch.randint(0, 256, scale.shape, dtype=torch.uint8, generator=GENERATOR) if zeros else None
    weight = Int8Weight(codes, scale, zero, torch.randperm(k, generator=GENERATOR) if ordered else None)
    middle = 128 if zero is None else zero.int().repeat_interleave(group, 1)
    meant = (codes.int() - middle) * scale.float().repeat_interleave(group, 1)
    exact = weight.dequantize() if weight.order is None else weight.dequantize()[:, weight.order]
    assert torch.equal(exact, meant)
    halves = weight.halves()
    assert (halves.shape, halves.group % 32) == ((n, 2 * k), 0)
    assert (halves.codes < 16).all()
    torch.testing.assert_close(halves.dequantize(), weight.dequantize(), rtol=1e-5, atol=1e-5)
