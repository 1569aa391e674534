"""SiLU(gate) * up at the end of the product that makes both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from aengine.kernels.launch import Launch, launch_for
from tests.kernels.conftest import relative_error, tolerance

gated = pytest.importorskip("aengine.kernels.linear.gated_rows")
elementwise = pytest.importorskip("aengine.kernels.elementwise")
kernels = pytest.importorskip("aengine.kernels.triton_kernels")

H200 = Launch(processors=132, overlap=True, shared_memory=227 * 1024, capability=(9, 0))
SMALL = gated.GatedConfig(block_m=32, block_n=16, block_k=16, band=3, stages=2, warps=4)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        pytest.param(1, 16, 32, SMALL, id="tiny-row"),
        pytest.param(32, 48, 32, SMALL, id="tiny-one-tile-high"),
        pytest.param(100, 32, 64, SMALL, id="tiny-part-of-a-tile"),
        pytest.param(270, 16, 32, SMALL, id="tiny-three-bands"),
        pytest.param(1536, 12288, 4096, gated.CONFIG),
        pytest.param(8192, 3072, 1024, gated.CONFIG),
        pytest.param(8191, 18944, 3584, gated.CONFIG),
        pytest.param(300, 6144, 4096, gated.CONFIG),
    ],
)
def test_gives_what_the_product_and_the_activation_give(
    m: int, n: int, k: int, config: object, device: torch.device, dtype: torch.dtype
) -> None:
    if dtype == torch.float32 and config is not SMALL:
        pytest.skip("no room for so large blocks of float32, and none asked for")
    x = torch.randn(m, k, device=device).to(dtype)
    weight = (torch.randn(2 * n, k, device=device) / k**0.5).to(dtype)
    out = gated.gated_rows(x, weight, config)
    assert relative_error(out, exact(x, weight)) < 2 * tolerance(dtype)
    assert torch.equal(out, gated.gated_rows(x, weight, config))
    if dtype != torch.float32:  # rounded as by a product and a launch of its own
        assert relative_error(out, elementwise.silu_mul((x.float() @ weight.float().t()).to(dtype))) < 3e-4


@pytest.mark.gpu
def test_rows_may_be_a_part_of_something_wider_tiny(device: torch.device) -> None:
    x, weight = torch.randn(40, 64, device=device)[:, 16:48], torch.randn(64, 32, device=device)
    assert relative_error(gated.gated_rows(x, weight, SMALL), exact(x, weight)) < 2 * tolerance(torch.float32)


@pytest.mark.gpu
def test_no_rows_are_no_launch_tiny(device: torch.device) -> None:
    assert gated.gated_rows(torch.empty(0, 32, device=device), torch.ones(32, 32, device=device), SMALL).shape == (
        0,
        16,
    )


@pytest.mark.gpu
def test_a_row_with_a_nan_is_nan_and_no_other_tiny(device: torch.device) -> None:
    x, weight = torch.randn(40, 32, device=device), torch.randn(32, 32, device=device)
    x[7, 3] = float("nan")
    out = gated.gated_rows(x, weight, SMALL)
    assert bool(out[7].isnan().all())
    assert int(out.isnan().sum()) == 16


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_activates_its_outputs_where_that_is_faster_tiny(
    bias: bool, normed: bool, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = replace(launch_for(device), capability=(9, 0), processors=6)
    for module in ("aengine.kernels.linear.triton_linear", "aengine.kernels.linear.gated_rows"):
        monkeypatch.setattr(f"{module}.launch_for", lambda device: launch)
    monkeypatch.setattr(gated, "CONFIG", SMALL)
    monkeypatch.setattr(gated, "LEAST_ROUNDS", 1)
    x, weight = torch.randn(90, 32, device=device).to(dtype), torch.randn(64, 32, device=device).to(dtype)
    norm = elementwise.TritonNorm(torch.rand(32, device=device).to(dtype), 1e-5) if normed else None
    linear = kernels.TritonKernels().dense(weight, weight[:, 0].contiguous() if bias else None)
    assert linear.apply_activated(x[:64], norm) is None  # too few tiles for all processors
    turned = kernels.TritonKernels().dense(weight.t().contiguous().t(), None)
    assert turned.apply_activated(x, norm) is None
    out = linear.apply_activated(x, norm)
    if bias or dtype == torch.float32:
        assert out is None
        return
    assert out is not None
    assert relative_error(out, exact(x if norm is None else norm(x), weight)) < 2 * tolerance(dtype)


@pytest.mark.parametrize(
    ("m", "n", "k", "size", "launch", "own"),
    [
        (512, 12288, 4096, 2, H200, True),
        (384, 12288, 4096, 2, H200, False),
        (513, 12288, 4096, 2, H200, False),  # one row in the last tile of rows
        (768, 12288, 4096, 2, H200, False),  # the last round is nearly empty
        (1, 53248, 4096, 2, H200, False),
        (64, 53248, 4096, 2, H200, False),
        (129, 25600, 5120, 2, H200, False),
        (2048, 3072, 1024, 2, H200, True),
        (1024, 3072, 1024, 2, H200, False),
        (8192, 12288, 4096, 4, H200, False),  # float32
        (8192, 11008 + 64, 4096, 2, H200, False),  # outputs end within a block
        (8192, 12288, 4096 + 32, 2, H200, False),  # inputs end within a block
        (8192, 12288, 4096, 2, replace(H200, capability=(8, 9)), False),
        (8192, 12288, 4096, 2, replace(H200, capability=(10, 0)), False),  # not measured
    ],
)
def test_is_chosen_where_it_was_measured_to_be_faster(
    m: int, n: int, k: int, size: int, launch: Launch, own: bool
) -> None:
    assert (gated.gated_config(m, n, k, size, launch) is not None) == own


def test_the_fewest_rows_are_the_first_that_it_is_chosen_for() -> None:
    fewest = gated.fewest_rows(12288, 4096, 2, H200, range(1, 8193))
    assert fewest is not None
    chosen = [gated.gated_config(m, 12288, 4096, 2, H200) is not None for m in range(fewest + 1)]
    assert chosen == [False] * fewest + [True]
    assert gated.fewest_rows(12288, 4096, 2, H200, range(1, fewest)) is None
    assert gated.fewest_rows(12288, 4096, 2, H200, range(1000, 8193)) == 1000
    assert gated.fewest_rows(12288, 4096, 4, H200, range(1, 8193)) is None
