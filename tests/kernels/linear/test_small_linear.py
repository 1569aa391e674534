from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aengine.kernels.launch import launch_for
from tests.kernels.conftest import relative_error, tolerance

small_linear = pytest.importorskip("aengine.kernels.linear.small_linear")
triton_linear = pytest.importorskip("aengine.kernels.linear.triton_linear")
elementwise = pytest.importorskip("aengine.kernels.elementwise")
pytestmark = pytest.mark.gpu

LinearConfig, linear_config = small_linear.LinearConfig, small_linear.linear_config
CUTS = {
    "plain": LinearConfig(block_n=16, block_k=32, splits=1, stages=2, warps=1, early=32),
    "split": LinearConfig(block_n=64, block_k=32, splits=4, stages=3, warps=4, early=16),
}
SHAPES = [
    pytest.param(3, 72, 256, id="tiny"),
    pytest.param(1, 130, 512, id="tiny-one"),
    pytest.param(16, 1000, 1664),
    pytest.param(8, 4096, 4096),
]


@pytest.mark.thinned(where=lambda n, **_: n != 4096)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_cut_gives_the_product(
    m: int, n: int, k: int, cut: str, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k), (n,)))
    linear = small_linear.SmallLinear()
    out = linear(x, weight, bias, config=CUTS[cut])
    assert relative_error(out, F.linear(x.double(), weight.double(), bias.double())) < tolerance(dtype)
    assert torch.equal(out, linear(x, weight, bias, config=CUTS[cut]))


@pytest.mark.thinned(where=lambda n, **_: n != 4096)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_residual_is_added_in_its_place(
    m: int, n: int, k: int, cut: str, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k), (m, n)))
    expected = F.linear(x.double(), weight.double()) + residual.double()
    out = small_linear.SmallLinear()(x, weight, config=CUTS[cut], residual=residual)
    assert out is residual
    assert relative_error(out, expected) < tolerance(dtype)


def meets_each_shape_and_each_number_of_rows(m: int, n: int, k: int, **_: object) -> bool:
    """Choose every number of rows for two shapes, and 1 and 27 rows for each shape."""
    return (n, k) in ((6144, 4096), (1000, 896)) or m in (1, 27)


@pytest.mark.thinned(where=meets_each_shape_and_each_number_of_rows)
@pytest.mark.parametrize("m", [1, 2, 16, 27, 32, 33, 64])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        pytest.param(96, 160, id="tiny"),
        pytest.param(64, 16, id="tiny-narrow"),
        (6144, 4096),
        (4096, 4096),
        (24576, 4096),
        (4096, 12288),
        (151936, 1024),
        (1000, 896),
        (9000, 2048),
        (37888, 3584),
    ],
)
def test_the_chosen_cut_gives_the_product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
    linear = small_linear.SmallLinear()
    if linear_config(m, n, k, x.element_size(), launch_for(x.device)) is None:
        with pytest.raises(ValueError, match="not for this kernel"):
            linear(x, weight)
    out = triton_linear.TritonLinear(weight, None, linear).apply(x)
    reference = F.linear(x.float(), weight.float())
    assert relative_error(out, reference) < tolerance(dtype)


@pytest.mark.parametrize(("n", "k"), [(5120, 2048), (6144, 4096), (24576, 4096), (4096, 1024), (1000, 896)])
def test_a_single_row_is_normed_on_the_way_where_it_says_so(
    n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, scale = (torch.randn(*shape, device=device).to(dtype) for shape in ((1, k), (n, k), (k,)))
    linear, norm = small_linear.SmallLinear(), elementwise.TritonNorm(scale, 1e-5)
    if not triton_linear.TritonLinear(weight, None, linear).norms(x, norm):
        return
    wide = x.double() * 3
    normed = wide * torch.rsqrt(wide.square().mean() + 1e-5) * scale.double()
    assert relative_error(linear(x * 3, weight, norm=norm), F.linear(normed, weight.double())) < tolerance(dtype)


@pytest.mark.parametrize(("k", "along"), [(2048, True), (3840, False)])
def test_norms_of_float32_weights_go_along_where_columns_are_whole_blocks_tiny(
    k: int, along: bool, device: torch.device
) -> None:
    x, weight = (torch.empty(rows, k, dtype=torch.bfloat16, device=device) for rows in (1, 8192))
    norm = elementwise.TritonNorm(torch.empty(k, device=device), 1e-5)
    assert triton_linear.TritonLinear(weight, None, small_linear.SmallLinear()).norms(x, norm) is along


def test_several_rows_are_not_normed_tiny(device: torch.device) -> None:
    linear, x, weight = (
        small_linear.SmallLinear(),
        torch.zeros(2, 64, device=device),
        torch.zeros(32, 64, device=device),
    )
    assert not triton_linear.TritonLinear(weight, None, linear).norms(x, elementwise.TritonNorm(x[0], 1e-5))
    with pytest.raises(ValueError, match="one row only"):
        linear(x, weight, norm=elementwise.TritonNorm(x[0], 1e-5))


@pytest.mark.parametrize("rows", [0, 1, 16, 17])
@pytest.mark.parametrize("turned", [False, True])
def test_too_many_rows_and_other_layouts_go_to_the_library_tiny(rows: int, turned: bool, device: torch.device) -> None:
    config = linear_config(rows, 32, 64, 4, launch_for(device))
    assert (config is None) == (rows not in (1, 16))
    weight = torch.randn(64, 32, device=device).t() if turned else torch.randn(32, 64, device=device)
    x = torch.randn(rows, 64, device=device)
    out = triton_linear.TritonLinear(weight, None, small_linear.SmallLinear()).apply(x)
    torch.testing.assert_close(out, F.linear(x, weight), rtol=1e-3, atol=1e-3)
