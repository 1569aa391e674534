"""The kernel for one row against a float64 reference, in every config."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.conftest import relative_error, tolerance

pytest.importorskip("triton")

from aengine.kernels.elementwise import TritonNorm
from aengine.kernels.linear.one_row import OneRowConfig, one_row

pytestmark = pytest.mark.gpu

CUTS = {
    "whole": OneRowConfig(block_n=4, block_k=128, stages=1, warps=2, early=512),
    "streaming": OneRowConfig(block_n=8, block_k=64, stages=2, warps=2, early=128),
    "nothing-early": OneRowConfig(block_n=16, block_k=128, stages=3, warps=4, early=0),
}
SHAPES = [
    pytest.param(72, 512, id="tiny"),
    pytest.param(9, 400, id="tiny-uneven"),
    pytest.param(5120, 2048),
    pytest.param(1001, 4096),
]


@pytest.mark.thinned
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("normed", ["plain", "normed", "by_float32"])
def test_every_cut_gives_the_product(
    n: int, k: int, normed: str, cut: str, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias, scale = (torch.randn(*s, device=device).to(dtype) for s in ((1, k), (n, k), (n,), (k,)))
    scale = scale.float() if normed == "by_float32" else scale
    norm = None if normed == "plain" else TritonNorm(scale, 1e-5)
    out = one_row(x * 3, weight, CUTS[cut], bias, norm=norm)
    wide = x.double() * 3
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean() + 1e-5) * scale.double()
    assert relative_error(out, F.linear(wide, weight.double(), bias.double())) < tolerance(dtype)
    assert torch.equal(out, one_row(x * 3, weight, CUTS[cut], bias, norm=norm))


@pytest.mark.parametrize("cut", CUTS)
def test_a_residual_is_added_in_its_place_tiny(cut: str, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((1, 256), (24, 256), (1, 24)))
    expected = F.linear(x.double(), weight.double()) + residual.double()
    assert one_row(x, weight, CUTS[cut], residual=residual) is residual
    assert relative_error(residual, expected) < tolerance(dtype)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("k", [256, 400])
@pytest.mark.parametrize("of_norm", [torch.bfloat16, torch.float32])
def test_pairs_of_bfloat16_come_apart_in_their_order_tiny(
    of_norm: torch.dtype, cut: str, k: int, device: torch.device
) -> None:
    x, weight, scale = (torch.randn(*shape, device=device).bfloat16() for shape in ((1, k), (24, k), (k,)))
    scale = scale.to(of_norm)
    out = one_row(x, weight, CUTS[cut], norm=TritonNorm(scale, 1e-5))
    normed = x.double() * torch.rsqrt(x.double().square().mean() + 1e-5) * scale.double()
    assert relative_error(out, F.linear(normed, weight.double())) < 1e-2
