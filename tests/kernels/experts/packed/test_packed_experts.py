"""Experts of 4-bit codes against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import relative_error, tolerance

pytest.importorskip("triton")

from aengine.kernels.experts.packed.experts import PackedExperts
from aengine.kernels.linear.weights import Int4Weight, Mxfp4Weight, dequantize
from tests.kernels.experts.test_triton_experts import SPREADS, reference, spread

pytestmark = pytest.mark.gpu
KINDS = ["int4-32", "int4-64", "int4-128", "int4-zeros", "mxfp4"]


def packed_weight(experts: int, n: int, k: int, kind: str, device: torch.device) -> Int4Weight | Mxfp4Weight:
    """Scales of different magnitudes, so that one in the wrong place shows."""
    codes = torch.randint(0, 16, (experts, n, k), dtype=torch.uint8, device=device)
    if kind == "mxfp4":
        return Mxfp4Weight(codes, torch.randint(120, 124, (experts, n, k // 32), dtype=torch.uint8, device=device))
    group = {"int4-32": 32, "int4-64": 64}.get(kind, 128)
    shape = (experts, n, k // group)
    scale = 2.0 ** -torch.randint(4, 8, shape, device=device) * (1 + torch.rand(shape, device=device))
    zero = torch.randint(0, 16, shape, dtype=torch.uint8, device=device) if kind == "int4-zeros" else None
    return Int4Weight(codes, scale, zero)


@pytest.mark.thinned(where=lambda how, kind, **_: how == "nowhere" or kind == "int4-zeros")
@pytest.mark.parametrize("how", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((5, 4, 3, 256, 128), id="tiny"),
        pytest.param((33, 128, 8, 2048, 768), id="a-model's"),
        pytest.param((1000, 32, 4, 512, 640), id="large"),
    ],
)
def test_the_weighted_sum(
    shape: tuple[int, ...], kind: str, how: str, dtype: torch.dtype, device: torch.device
) -> None:
    tokens, experts, top_k, hidden, inter = shape
    ids = spread(how, tokens, experts, top_k).to(device)
    gate_up = packed_weight(experts, 2 * inter, hidden, kind, device)
    down = packed_weight(experts, hidden, inter, kind, device)
    h, residual = (torch.randn(tokens, hidden, device=device).div(16).to(dtype) for _ in range(2))
    weights = torch.rand(tokens, top_k, device=device)
    layer = PackedExperts(gate_up, down)
    outs = [layer.add_to(h, ids, weights, residual.clone()) for _ in range(2)]
    expected = reference(h, dequantize(gate_up), dequantize(down), ids, weights, residual)
    assert relative_error(outs[0], expected) < tolerance(dtype)
    assert torch.equal(*outs)


def test_columns_in_another_order_have_no_kernel_tiny(device: torch.device) -> None:
    codes = torch.zeros(2, 128, 128, dtype=torch.uint8, device=device)
    weight = Int4Weight(
        codes, torch.ones(2, 128, 1, device=device), order=torch.arange(128, device=device).repeat(2, 1)
    )
    assert not PackedExperts.fits(weight, weight)
    with pytest.raises(ValueError, match="does not belong"):
        PackedExperts(weight, weight)
