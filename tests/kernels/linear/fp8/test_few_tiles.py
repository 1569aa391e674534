from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import relative_error
from tests.kernels.linear.fp8.reference import exact_product, random_inputs, random_weight

few_tiles = pytest.importorskip("aengine.kernels.linear.fp8.few_tiles")
fp8_inputs = pytest.importorskip("aengine.kernels.linear.fp8.inputs")
fp8_parts = pytest.importorskip("aengine.kernels.parts")
pytestmark = pytest.mark.gpu

Config = few_tiles.FewTilesConfig
CUTS = {
    "whole": Config(block_m=64, block_n=128, splits=1, stages=3, warps=4),
    "halves": Config(block_m=64, block_n=128, splits=2, stages=2, warps=4),
    "thirds": Config(block_m=64, block_n=64, splits=3, stages=2, warps=4),
}
SHAPES = [
    pytest.param(70, 200, 1536, id="tiny"),
    pytest.param(1, 128, 1536, id="tiny-one"),
    (65, 6144, 4608),
    (256, 4096, 12288),
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_cut_gives_the_product_of_the_rounded_and_the_same_twice(
    m: int, n: int, k: int, cut: str, device: torch.device
) -> None:
    weight = random_weight(n, k, (128, 128), device)
    x = random_inputs(m, k, device) * 2.0 ** (torch.arange(m, device=device) % 3)[:, None]
    bias, residual = torch.randn(n, device=device), torch.randn(m, n, device=device)
    x8, x_scale = fp8_inputs.round_inputs(x, "group")
    parts = fp8_parts.Parts()
    twice = [
        few_tiles.few_tiles(x8, x_scale, weight.weight, weight.scale, CUTS[cut], parts, bias=bias, residual=added)
        for added in (residual.clone(), residual.clone())
    ]
    # A tie in the rounding of an input may be broken differently.
    assert relative_error(twice[0], exact_product(x, weight) + bias.double() + residual.double()) < 3e-3
    assert torch.equal(*twice)
