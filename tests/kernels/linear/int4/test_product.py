from __future__ import annotations

import pytest
import torch

from aengine.kernels.linear.weights.e2m1 import E2m1Weight, Mxfp4Weight, Nvfp4Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from tests.kernels.conftest import relative_error, tolerance

int4_launch = pytest.importorskip("aengine.kernels.linear.int4.launch")
packed_codes = pytest.importorskip("aengine.kernels.linear.int4.packed_codes")
pytestmark = pytest.mark.gpu

Int4Config = int4_launch.Int4Config
CUTS = {
    "plain": Int4Config(block_n=64, rows=16, splits=1, stages=2, warps=4, early=0),
    "early-and-split": Int4Config(block_n=32, rows=16, splits=2, stages=3, warps=1, early=1),
    "eight-rows": Int4Config(block_n=64, rows=8, splits=1, stages=2, warps=2, early=2),
    "block-per-warp": Int4Config(block_n=32, rows=32, splits=1, stages=2, warps=2, early=1, block_per_warp=True),
    "block-per-warp-of-many": Int4Config(16, rows=16, splits=1, stages=3, warps=4, early=1, block_per_warp=True),
    "ahead": Int4Config(64, rows=32, splits=1, stages=2, warps=4, early=0, scaled=True, unpacks_ahead=True),
    "ahead-and-split": Int4Config(64, rows=16, splits=2, stages=3, warps=4, early=0, scaled=True, unpacks_ahead=True),
    "ahead-rest-split": Int4Config(
        block_n=16, rows=16, splits=2, stages=2, warps=4, early=0, scaled=True, unpacks_ahead=True, rounds=1
    ),
    "scaled-weights": Int4Config(block_n=64, rows=32, splits=2, stages=2, warps=4, early=0, scaled=True),
}
FORMS = ["row", "128", "64", "32", "zeros-128", "zeros-32", "mxfp4", "nvfp4"]
SHAPES = [
    pytest.param(3, 72, 256, id="tiny"),
    pytest.param(17, 40, 384, id="tiny-wide"),
    pytest.param(16, 1000, 1664),
    pytest.param(61, 4096, 4096),
    pytest.param(300, 1000, 1664),
]


def nvfp4_scales(*shape: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and factors of a random matrix [..., n, k]. Some scales are 0 or subnormal, some the largest."""
    *lead, n, k = shape
    exponents = torch.randint(-10, 9, (*lead, n, k // 16), device=device)
    scale = (2.0**exponents * (1 + torch.rand(exponents.shape, device=device))).clamp(max=448).to(torch.float8_e4m3fn)
    return scale, 2.0 ** -torch.randint(9, 13, (*lead, n, 1), device=device) * (
        1 + torch.rand(*lead, n, 1, device=device)
    )


def random_weight(form: str, n: int, k: int, device: torch.device) -> Int4Weight | E2m1Weight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    if form == "mxfp4":
        return Mxfp4Weight.from_codes(codes, torch.randint(110, 135, (n, k // 32), dtype=torch.uint8, device=device))
    if form == "nvfp4":
        return Nvfp4Weight.from_codes(codes, *nvfp4_scales(n, k, device=device))
    group = k if form == "row" else int(form.removeprefix("zeros-"))
    scale = (torch.rand(n, k // group, device=device) + 0.1).half()
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, device=device) if "zeros" in form else None
    return Int4Weight(codes, scale, zero)


def fits(cut: str, m: int, k: int, **_: object) -> bool:
    """Return whether the config is for this shape."""
    return not CUTS[cut].block_per_warp or m <= CUTS[cut].rows


@pytest.mark.interpreted(15)
@pytest.mark.thinned(where=fits)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_cut_gives_the_product(
    m: int, n: int, k: int, form: str, cut: str, dtype: torch.dtype, device: torch.device
) -> None:
    if not fits(cut, m, k):
        pytest.skip("not for this cut")
    weight = random_weight(form, n, k, device)
    packed = packed_codes.pack_codes(weight)
    x, bias, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n,), (m, n)))
    expected = x.double() @ weight.dequantize().double().t() + bias.double() + residual.double()
    product = int4_launch.Int4Product()
    again = product(x, packed, bias, residual=residual.clone(), config=CUTS[cut])
    out = product(x, packed, bias, residual=residual, config=CUTS[cut])
    assert out is residual
    assert relative_error(out, expected) < tolerance(dtype)
    assert torch.equal(out, again)


@pytest.mark.interpreted(4)
@pytest.mark.thinned(where=lambda n, **_: n != 1000)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [pytest.param(72, 256, id="tiny"), (1000, 1664), (4096, 12288)])
def test_a_weight_is_written_out_dense(n: int, k: int, form: str, dtype: torch.dtype, device: torch.device) -> None:
    weight = random_weight(form, n, k, device)
    dense = int4_launch.Int4Product().dequantised(packed_codes.pack_codes(weight), dtype)
    assert relative_error(dense, weight.dequantize().double()) < tolerance(dtype)


def meets_each_shape_and_each_number_of_rows(m: int, n: int, k: int, **_: object) -> bool:
    """Choose every number of rows for three shapes, and for each shape one row and more than a tile has."""
    return (n, k) in ((6144, 4096), (24576, 4096), (5760, 2880)) or m in (1, 65)


@pytest.mark.thinned(where=meets_each_shape_and_each_number_of_rows)
@pytest.mark.parametrize(
    ("n", "k", "form"),
    [
        pytest.param(40, 32, "32", id="tiny"),
        pytest.param(40, 160, "zeros-32", id="tiny-uneven"),
        pytest.param(9, 288, "mxfp4", id="tiny-uneven-mxfp4"),
        pytest.param(24, 320, "row", id="tiny-uneven-row"),
        pytest.param(9, 272, "nvfp4", id="tiny-uneven-nvfp4"),
        (6144, 4096, "128"),
        (4096, 4096, "zeros-128"),
        (24576, 4096, "128"),
        (4096, 12288, "64"),
        (5760, 2880, "mxfp4"),
        (5760, 2880, "nvfp4"),
        (896, 4864, "128"),
    ],
)
@pytest.mark.parametrize("m", [1, 2, 16, 27, 64, 65, 256, 500])
def test_the_chosen_cut_gives_the_product(
    m: int, n: int, k: int, form: str, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type == "cpu" and m > 65:
        pytest.skip("long in the interpreter, and nothing new")
    weight = random_weight(form, n, k, device)
    x = torch.randn(m, k, device=device).to(dtype)
    out = int4_launch.Int4Product()(x, packed_codes.pack_codes(weight))
    assert relative_error(out, x.double() @ weight.dequantize().double().t()) < tolerance(dtype)


def test_dtypes_may_take_turns_in_the_memory_of_dense_weights_tiny(device: torch.device) -> None:
    weight = random_weight("zeros-32", 40, 256, device)
    product, packed = int4_launch.Int4Product(), packed_codes.pack_codes(weight)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        dense = product.dequantised(packed, dtype)
        assert dense.dtype == dtype
        assert relative_error(dense, weight.dequantize().double()) < tolerance(dtype)


def test_no_rows_are_no_work_tiny(device: torch.device) -> None:
    packed = packed_codes.pack_codes(random_weight("128", 16, 128, device))
    assert int4_launch.Int4Product()(torch.zeros(0, 128, device=device), packed).shape == (0, 16)


def test_more_early_blocks_than_a_piece_has_are_refused_tiny(device: torch.device) -> None:
    packed = packed_codes.pack_codes(random_weight("128", 16, 384, device))
    with pytest.raises(ValueError, match="2 early blocks do not fit 2 pieces of 3 blocks"):
        int4_launch.Int4Product()(torch.zeros(1, 384, device=device), packed, config=Int4Config(16, 16, 2, 2, 1, 2))


@pytest.mark.parametrize(("m", "splits", "early"), [(9, 1, 1), (8, 2, 1), (8, 1, 0)], ids="tiny-{}".format)
def test_configs_that_block_per_warp_does_not_support_are_refused(
    m: int, splits: int, early: int, device: torch.device
) -> None:
    packed = packed_codes.pack_codes(random_weight("128", 16, 384, device))
    cut = Int4Config(16, 8, splits, 2, 1, early, block_per_warp=True)
    with pytest.raises(ValueError, match=f"{m} rows of x are not for"):
        int4_launch.Int4Product()(torch.zeros(m, 384, device=device), packed, config=cut)
