from __future__ import annotations

import pytest
import torch

from aengine.kernels.linear.weights.fp8 import Activations
from tests.kernels.conftest import relative_error
from tests.kernels.linear.fp8.reference import BLOCKS, exact_product, random_inputs, random_weight

many_rows = pytest.importorskip("aengine.kernels.linear.fp8.many_rows")
fp8_inputs = pytest.importorskip("aengine.kernels.linear.fp8.inputs")
fp8_scales = pytest.importorskip("aengine.kernels.linear.fp8.quantize")
pytestmark = pytest.mark.gpu

Config = many_rows.ManyRowsConfig
CUTS = {
    "one-each": Config(block_m=64, block_n=64, stages=3, warps=4, band=1),
    "wide": Config(block_m=64, block_n=128, stages=3, warps=4),
    "tall": Config(block_m=128, block_n=64, stages=2, warps=4),
}
SHAPES = [
    pytest.param(70, 136, 400, id="tiny"),
    pytest.param(1, 200, 256, id="tiny-one"),
    pytest.param(300, 1000, 1664),
    pytest.param(512, 4096, 4096),
]


@pytest.mark.thinned
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["group", "token", "static"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_cut_gives_the_product_of_the_rounded(
    m: int, n: int, k: int, block: str, kind: Activations, cut: str, device: torch.device
) -> None:
    weight = random_weight(n, k, BLOCKS[block], device, kind)
    x = random_inputs(m, k, device) * 2.0 ** (torch.arange(m, device=device) % 3)[:, None]
    bias, residual = torch.randn(n, device=device), torch.randn(m, n, device=device)
    x8, x_scale = fp8_inputs.round_inputs(x, kind, weight.input_scale)
    out = many_rows.many_rows(
        x8, x_scale, kind, weight.weight, fp8_scales.kernel_scales(weight), CUTS[cut], bias=bias,
        residual=residual.clone(),
        dtype=torch.float32,
    )  # fmt: skip
    # A tie in the rounding of an input may be broken differently.
    assert relative_error(out, exact_product(x, weight) + bias.double() + residual.double()) < 3e-3
