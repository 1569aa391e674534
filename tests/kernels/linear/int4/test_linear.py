from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.weights.integers import Int4Weight, Int8Weight
from tests.kernels.conftest import relative_error, tolerance

int4_launch = pytest.importorskip("aengine.kernels.linear.int4.launch")
int4_linear = pytest.importorskip("aengine.kernels.linear.int4.linear")
pytestmark = pytest.mark.gpu


class Halved:
    """A norm with an obvious effect."""

    weight = torch.ones(1)
    eps = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return x / 2


@pytest.mark.thinned
@pytest.mark.parametrize("path", ["unpacked-on-the-way", "written-out-dense", "of-a-copy"])
@pytest.mark.parametrize("ordered", [False, True], ids=["in-order", "sorted-by-group"])
@pytest.mark.parametrize(("n", "k"), [pytest.param(40, 256, id="tiny"), (1024, 4096)])
def test_every_call_of_the_protocol(
    n: int,
    k: int,
    ordered: bool,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int4_linear, "DENSE_ROWS", 1 if path == "written-out-dense" else 100)
    monkeypatch.setattr(int4_linear, "COPY_ROWS", 1)
    weight = Int4Weight(
        torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device),
        (torch.rand(n, k // 128, device=device) + 0.1).half(),
        torch.randint(0, 16, (n, k // 128), dtype=torch.uint8, device=device),
        torch.randperm(k, device=device) if ordered else None,
    )
    x, bias, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((5, k), (n,), (5, n)))
    linear = int4_linear.Int4Linear(weight, bias, int4_launch.Int4Product(), dtype, copy=path == "of-a-copy")
    assert (linear.inputs, linear.outputs) == (k, n)
    expected = x.double() @ weight.dequantize().double().t()
    assert relative_error(linear.apply(x), expected + bias.double()) < tolerance(dtype)
    assert relative_error(linear.apply(x, norm=Halved()), expected / 2 + bias.double()) < tolerance(dtype)
    total = expected + bias.double() + residual.double()
    assert relative_error(linear.apply(x, residual=residual), total) < tolerance(dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("n", "k", "group"), [pytest.param(40, 192, 64, id="tiny"), (1024, 4096, 4096)])
def test_codes_of_8_bits_are_two_of_4(
    n: int,
    k: int,
    group: int,
    dense: bool,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int4_linear, "DENSE_ROWS", 1 if dense else 100)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device)
    weight = Int8Weight(codes, (torch.rand(n, k // group, device=device) + 0.1).bfloat16() / 64)
    assert int4_linear.Int4Linear.fits(weight, torch.bfloat16)
    x, bias = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, k), (n,)))
    linear = int4_linear.Int4Linear(weight, bias, int4_launch.Int4Product(), dtype, copy=True)
    assert (linear.inputs, linear.outputs) == (k, n)
    expected = x.double() @ weight.dequantize().double().t() + bias.double()
    assert relative_error(linear.apply(x), expected) < 2 * tolerance(dtype)


def test_few_rows_leave_a_copy_alone_and_no_scratch_is_kept_beside_it_tiny(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4_linear, "COPY_ROWS", 5)
    weight = Int4Weight(
        torch.randint(0, 16, (40, 256), dtype=torch.uint8, device=device),
        (torch.rand(40, 2, device=device) + 0.1).half(),
    )
    product = int4_launch.Int4Product()
    linear = int4_linear.Int4Linear(weight, None, product, dtype, copy=True)
    assert product._dense.numel() == 0
    assert linear._copy is not None
    assert relative_error(linear._copy, weight.dequantize().double()) < tolerance(dtype)
    linear._copy.fill_(torch.nan)
    x = torch.randn(5, 256, device=device).to(dtype)
    assert linear.apply(x[:4]).isfinite().all()
    assert linear.apply(x).isnan().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_copy_is_made_on_the_gpu_that_it_is_for() -> None:
    weights = Int4Weight(torch.randint(0, 16, (2048, 4096), dtype=torch.uint8), torch.rand(2048, 32).half() + 0.1)
    expected = weights.dequantize().bfloat16()
    for gpu in (0, 1):
        there = Int4Weight(weights.codes.to(f"cuda:{gpu}"), weights.scale.to(f"cuda:{gpu}"))
        linear = int4_linear.Int4Linear(there, None, int4_launch.Int4Product(), torch.bfloat16, copy=True)
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(gpu)
        assert relative_error(linear._copy.cpu(), expected.double()) < 1e-2


def test_columns_of_x_may_come_several_times(dtype: torch.dtype, device: torch.device) -> None:
    """A rank's part of scattered groups is padded in this way."""
    weight = Int4Weight(
        torch.randint(0, 16, (40, 256), dtype=torch.uint8, device=device),
        (torch.rand(40, 8, device=device) + 0.1).half(),
        order=torch.randperm(256, device=device) % 160,
    )
    x = torch.randn(5, 160, device=device).to(dtype)
    linear = int4_linear.Int4Linear(weight, None, int4_launch.Int4Product(), dtype)
    assert relative_error(linear.apply(x), x.double() @ weight.dequantize().double().t()) < tolerance(dtype)


@pytest.mark.parametrize("ordered", [False, True], ids=["in-order", "sorted-by-group"])
def test_gate_and_up_of_many_rows_are_activated_in_the_dense_product_tiny(
    ordered: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated_rows = pytest.importorskip("aengine.kernels.linear.gated_rows")
    launch = replace(launch_for(device), capability=(9, 0), processors=4)
    monkeypatch.setattr("aengine.kernels.linear.int4.linear.launch_for", lambda device: launch)
    cut = gated_rows.GatedConfig(block_m=32, block_n=16, block_k=16, band=3, stages=2, warps=4)
    monkeypatch.setattr(gated_rows, "CONFIG", cut)
    monkeypatch.setattr(gated_rows, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(int4_linear, "DENSE_ROWS", 40)
    weight = Int4Weight(
        torch.randint(0, 16, (64, 256), dtype=torch.uint8, device=device),
        (torch.rand(64, 2, device=device) + 0.1).half() / 64,
        order=torch.randperm(256, device=device) if ordered else None,
    )
    linear = int4_linear.Int4Linear(weight, None, int4_launch.Int4Product(), dtype)
    x = torch.randn(60, 256, device=device).to(dtype)
    assert linear.apply_activated(x[:39]) is None
    out = linear.apply_activated(x, Halved())
    if dtype == torch.float32:
        assert out is None
        return
    gate, up = (x.double() / 2 @ weight.dequantize().double().t()).chunk(2, dim=-1)
    assert out is not None
    assert relative_error(out, torch.nn.functional.silu(gate) * up) < 2 * tolerance(dtype)
