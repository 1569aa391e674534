from __future__ import annotations

import pytest
import torch

from aengine.kernels.linear import fp8_weight
from aengine.kernels.linear.fp8_weight import E4M3, Activations, Fp8Weight, quantize_fp8
from tests.kernels.linear.fp8_reference import BLOCKS, exact_weight, random_weight

CPU = torch.device("cpu")


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(256, 256), (200, 330), (3, 7), (1, 129)])
def test_the_numbers_are_values_times_their_blocks_scales(n: int, k: int, block: tuple[int, int]) -> None:
    weight = random_weight(n, k, block, CPU)
    plain = weight.dequantized(torch.float32)
    assert plain.dtype == torch.float32
    torch.testing.assert_close(plain.double(), exact_weight(weight), rtol=1e-7, atol=0)


@pytest.mark.parametrize("slab", [2**24, 40000, 5000, 900, 1])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_quantised_numbers_are_near_and_the_largest_of_a_block_is_448(
    block: tuple[int, int], slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_weight, "_SLAB", slab)
    n, k = 300, 260
    weight = torch.randn(n, k) * torch.logspace(3, -3, n)[:, None]
    rows, columns = block[0] or n, block[1] or k
    values, scale = quantize_fp8(weight, (rows, columns))
    made = Fp8Weight(values, scale, (rows, columns))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            largest = weight[part].abs().max()
            assert values[part].float().abs().max() == 448
            # Half a step of three bits of mantissa, or of the smallest step there is.
            error = (made.dequantized(torch.float32)[part] - weight[part]).abs()
            assert (error <= (weight[part].abs() / 15).clamp_min(largest / 448 * 2**-10) * 1.001).all()


def test_blocks_of_zeros_have_a_scale_and_stay_zero() -> None:
    values, scale = quantize_fp8(torch.zeros(130, 140, dtype=torch.bfloat16))
    assert scale.shape == (2, 2)
    assert (scale == 1).all()
    assert (values.float() == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(130, 140)}, "float8_e4m3fn with float32 scales, not torch.float32"),
        ({"scale": torch.ones(2, 2, dtype=torch.bfloat16)}, "not torch.float8_e4m3fn with torch.bfloat16"),
        ({"scale": torch.ones(1, 2)}, r"scales of shape \[1, 2\] do not fit \[130, 140\] in 128 x 128"),
        ({"block": (128, 64)}, "columns must be a multiple of 128, or all 140"),
        ({"input_scale": torch.ones(())}, "input_scale goes with activations whose scale is known"),
        ({"activations": Activations.TENSOR}, "input_scale goes with activations whose scale is known"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, object], message: str) -> None:
    whole: dict[str, object] = {
        "values": torch.zeros(130, 140).to(E4M3), "scale": torch.ones(2, 2), "block": (128, 128)
    }  # fmt: skip
    Fp8Weight(**whole)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Fp8Weight(**whole | change)  # type: ignore[arg-type]
