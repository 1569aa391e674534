from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import relative_error, tolerance
from tests.kernels.linear.fp8.reference import BLOCKS, exact_product, exact_weight, random_inputs, random_weight

few_rows = pytest.importorskip("aengine.kernels.linear.fp8.few_rows")
fp8_inputs = pytest.importorskip("aengine.kernels.linear.fp8.inputs")
fp8_scales = pytest.importorskip("aengine.kernels.linear.fp8.quantize")
pytestmark = pytest.mark.gpu

Config, OneRow = few_rows.FewRowsConfig, few_rows.OneRowConfig
CUTS = {
    "plain": Config(block_n=64, splits=1, stages=2, warps=4, early=0),
    "early": Config(block_n=64, splits=1, stages=3, warps=4, early=1),
    "split": Config(block_n=128, splits=2, stages=3, warps=4, early=2),
    "one-row": OneRow(block_n=4, warps=2, width=1, ahead=2),
    "one-row-high": OneRow(block_n=8, warps=4, width=2),
}
SHAPES = [
    pytest.param(3, 136, 512, id="tiny"),
    pytest.param(2, 200, 464, id="tiny-uneven"),
    pytest.param(16, 1000, 1664),
    pytest.param(33, 4096, 4096),
    pytest.param(64, 6144, 4096),
]


def divides(cut: str, k: int, **_: object) -> bool:
    """Return whether the config's splits divide the groups of columns."""
    return isinstance(CUTS[cut], OneRow) or -(-k // 128) % CUTS[cut].splits == 0


@pytest.mark.thinned(where=divides)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_cut_gives_the_product_with_the_exact_weight(
    m: int, n: int, k: int, block: str, cut: str, dtype: torch.dtype, device: torch.device
) -> None:
    config = CUTS[cut]
    if not divides(cut, k):
        pytest.skip("splits divide the groups of columns")
    m = 1 if isinstance(config, OneRow) else m
    weight = random_weight(n, k, BLOCKS[block], device)
    x, bias, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n,), (m, n)))
    expected = x.double() @ exact_weight(weight).T + bias.double() + residual.double()
    scales = fp8_scales.kernel_scales(weight)
    product = few_rows.Fp8FewRows()
    twice = [
        product(x, weight.weight, scales, config, bias, residual=added)
        for added in (residual.clone(), residual.clone())
    ]
    assert relative_error(twice[0], expected) < tolerance(dtype)
    assert torch.equal(*twice)


@pytest.mark.thinned(where=lambda m, cut, k, **_: m <= 16 and divides(cut, k))
@pytest.mark.parametrize("cut", ["plain", "split"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_inputs_in_fp8_are_scaled(m: int, n: int, k: int, block: str, cut: str, device: torch.device) -> None:
    if not divides(cut, k):
        pytest.skip("splits divide the groups of columns")
    weight = random_weight(n, k, BLOCKS[block], device)
    x = random_inputs(m, k, device)
    x8, x_scale = fp8_inputs.round_inputs(x, "group")
    out = few_rows.Fp8FewRows()(
        x8, weight.weight, fp8_scales.kernel_scales(weight), CUTS[cut], None,
        x_scale=x_scale, dtype=torch.float32,
    )  # fmt: skip
    assert (
        relative_error(out, exact_product(x, weight)) < 3e-3
    )  # a tie in the rounding of inputs may be broken differently


@pytest.mark.parametrize(("n", "k"), [pytest.param(72, 464, id="tiny"), (6144, 1024)])
def test_a_single_row_is_normed_on_the_way(n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = random_weight(n, k, (128, 128), device)
    x, scale = torch.randn(1, k, device=device).to(dtype), torch.randn(k, device=device).to(dtype)

    class Norm:
        weight = scale
        eps = 1e-5

    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean() + 1e-5) * scale.double()
    product = few_rows.Fp8FewRows()
    scales = fp8_scales.kernel_scales(weight)
    out = product(x, weight.weight, scales, CUTS["one-row"], None, norm=Norm())
    assert relative_error(out, normed @ exact_weight(weight).T) < tolerance(dtype)


def test_several_rows_are_not_normed_tiny(device: torch.device) -> None:
    x, weight = torch.ones(2, 256, device=device), random_weight(64, 256, (128, 128), device)

    class Norm:
        weight = x[0]
        eps = 1e-5

    with pytest.raises(ValueError, match="one row"):
        few_rows.Fp8FewRows()(x, weight.weight, fp8_scales.kernel_scales(weight), CUTS["plain"], None, norm=Norm())
