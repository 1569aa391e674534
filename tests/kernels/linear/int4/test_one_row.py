from __future__ import annotations

import pytest
import torch

from aengine.kernels.linear.weights import Int4Weight, dequantize
from tests.kernels.conftest import relative_error, tolerance

int4_launch = pytest.importorskip("aengine.kernels.linear.int4.launch")
int4_linear = pytest.importorskip("aengine.kernels.linear.int4.linear")
norms = pytest.importorskip("aengine.kernels.norms")
packed_codes = pytest.importorskip("aengine.kernels.linear.int4.packed_codes")
pytestmark = pytest.mark.gpu

OneRowConfig = int4_launch.OneRowConfig
CUTS = {
    "plain": OneRowConfig(block_n=16, warps=4, steps=1),
    "more-than-there-is": OneRowConfig(block_n=16, warps=4, steps=4, chunks=3),
    "low-and-long": OneRowConfig(block_n=16, warps=2, steps=2, chunks=2),
    "high": OneRowConfig(block_n=32, warps=2, steps=2),
    "few-registers": OneRowConfig(block_n=16, warps=8, steps=2, registers=64),
    "split": OneRowConfig(block_n=16, warps=2, steps=1, splits=2),
}
SHAPES = [pytest.param(40, 384, id="tiny"), (1000, 512), (4096, 4096), (4096, 12288)]


def random_weight(n: int, k: int, device: torch.device, zeros: bool = True) -> Int4Weight:
    scale = (torch.rand(n, k // 128, device=device) + 0.1).half()
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    return Int4Weight(
        codes, scale, torch.randint(0, 16, scale.shape, dtype=torch.uint8, device=device) if zeros else None
    )


def covers(cut: OneRowConfig, k: int) -> bool:
    return cut.warps * cut.steps * cut.chunks * cut.splits * 128 >= k


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_cut_gives_the_product_the_same_each_time(
    n: int, k: int, cut: str, dtype: torch.dtype, device: torch.device
) -> None:
    if not covers(CUTS[cut], k):
        pytest.skip("a longer row than the cut holds")
    weight = random_weight(n, k, device)
    packed, product = packed_codes.pack_codes(weight), int4_launch.Int4Product()
    x, bias, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((1, k), (n,), (1, n)))
    expected = x.double() @ dequantize(weight).double().t() + bias.double() + residual.double()
    again = product.row(x, packed, bias, CUTS[cut], residual=residual.clone())
    out = product.row(x, packed, bias, CUTS[cut], residual=residual)
    assert out is residual
    assert relative_error(out, expected) < tolerance(dtype)
    assert torch.equal(out, again)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_gate_goes_along(n: int, k: int, cut: str, dtype: torch.dtype, device: torch.device) -> None:
    if not covers(CUTS[cut], k):
        pytest.skip("a longer row than the cut holds")
    weight = random_weight(n, k, device, zeros=False)
    gate_up = torch.randn(1, 2 * k, device=device).to(dtype)
    out = int4_launch.Int4Product().row(gate_up, packed_codes.pack_codes(weight), None, CUTS[cut], gated=True)
    expected = norms.silu_mul(gate_up).double() @ dequantize(weight).double().t()
    assert relative_error(out, expected) < tolerance(dtype)


@pytest.mark.parametrize("cut", [name for name in CUTS if CUTS[name].splits == 1])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_norm_goes_along(n: int, k: int, cut: str, dtype: torch.dtype, device: torch.device) -> None:
    if not covers(CUTS[cut], k):
        pytest.skip("a longer row than the cut holds")
    weight = random_weight(n, k, device)
    norm = norms.TritonNorm((torch.rand(k, device=device) + 0.5).to(dtype), 1e-5)
    x = 3 * torch.randn(1, k, device=device).to(dtype)
    out = int4_launch.Int4Product().row(x, packed_codes.pack_codes(weight), None, CUTS[cut], norm=norm)
    wide = x.double()
    normed = wide * (wide.square().mean() + norm.eps).rsqrt() * norm.weight.double()
    assert relative_error(out, normed @ dequantize(weight).double().t()) < tolerance(dtype)


@pytest.mark.parametrize("ordered", [False, True], ids=["in-order", "sorted-by-group"])
@pytest.mark.parametrize(("n", "k"), [pytest.param(40, 256, id="tiny"), (6144, 4096), (4096, 12288)])
def test_every_call_of_the_protocol(n: int, k: int, ordered: bool, dtype: torch.dtype, device: torch.device) -> None:
    weight = random_weight(n, k, device)
    weight = Int4Weight(weight.codes, weight.scale, weight.zero, torch.randperm(k, device=device) if ordered else None)
    x, bias, gate_up, residual = (
        torch.randn(*shape, device=device).to(dtype) for shape in ((1, k), (n,), (1, 2 * k), (1, n))
    )
    norm = norms.TritonNorm((torch.rand(k, device=device) + 0.5).to(dtype), 1e-5)
    linear = int4_linear.Int4Linear(weight, bias, int4_launch.Int4Product(), dtype)
    dense = dequantize(weight).double().t()
    assert relative_error(linear(x), x.double() @ dense + bias.double()) < tolerance(dtype)
    assert relative_error(linear.after(norm, x), norm(x).double() @ dense + bias.double()) < tolerance(dtype)
    total = norms.silu_mul(gate_up).double() @ dense + bias.double() + residual.double()
    assert relative_error(linear.add_gated_to(gate_up, residual), total) < tolerance(dtype)
