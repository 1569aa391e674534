from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.fp8 import cublas_lt
from aengine.kernels.linear.fp8.quantize import E4M3
from aengine.model.slots import overwrite
from tests.kernels.conftest import relative_error
from tests.kernels.linear.fp8.reference import exact_product, random_inputs, random_weight

fp8_library = pytest.importorskip("aengine.kernels.linear.fp8.library")
inputs = pytest.importorskip("aengine.kernels.linear.fp8.inputs")


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if launch_for(device).capability[0] != 9:
        pytest.skip("cuBLAS knows these blocks on Hopper alone")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(65, 16, 144), (130, 1552, 1296), (256, 24576, 4096), (1001, 6144, 4096), (8192, 4096, 12288)]
)
def test_direct_calls_equal_torch_and_add_the_residual_before_rounding(
    m: int, n: int, k: int, biased: bool, dtype: torch.dtype, hopper: torch.device
) -> None:
    weight = random_weight(n, k, (128, 128), hopper)
    bias = torch.randn(n, device=hopper).to(dtype) if biased else None
    products = cublas_lt.BlockProducts()
    library = fp8_library.LibraryFp8(weight, bias, products)
    x, residual = random_inputs(m, k, hopper).to(dtype), torch.randn(m, n, device=hopper).to(dtype)
    rounded, scale = inputs.round_inputs(x, "group", multiple=library.multiple(m))
    ours = library(rounded, scale, None, m, dtype)
    product = products(weight.weight, dtype, bias=biased)
    assert product is not None
    assert product._known
    assert torch.equal(ours, library._by_torch(rounded, scale, dtype)[:m])
    expected = exact_product(x, weight) + (0 if bias is None else bias.double())
    assert relative_error(ours, expected) < 5e-3
    added = library(rounded, scale, residual.clone(), m, dtype)
    assert relative_error(added, expected + residual.double()) < 5e-3


class Product:
    """Adds up its inputs: every weight is a matrix of ones, every scale is one."""

    def __init__(self, knows: Callable[[int], bool]) -> None:
        self.knows = knows
        self.added: list[bool] = []

    def __call__(
        self, x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, out: Tensor, bias: Tensor | None, *, add: bool
    ) -> bool:
        self.added.append(add)
        if self.knows(len(out)):
            out.copy_(x.float().sum(1, keepdim=True) + (out if add else 0))
        return self.knows(len(out))


def sums_of_16(self: object, x: Tensor, x_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.float().sum(1, keepdim=True).repeat(1, 16)


@pytest.mark.parametrize(
    ("padded", "rows", "knows", "added"),
    [(8, 8, True, [True]), (8, 6, True, [False]), (8, 8, False, [True]), (8, 6, False, [False])],
)
def test_a_residual_goes_into_the_sum_where_it_has_all_the_rows_and_behind_it_elsewhere(
    padded: int, rows: int, knows: bool, added: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(16, 128, (128, 128), torch.device("cpu"))
    product = Product(lambda m: knows)
    monkeypatch.setattr(fp8_library.LibraryFp8, "_by_torch", sums_of_16)
    library = fp8_library.LibraryFp8(weight, None, lambda weight, dtype, bias: product)
    x = torch.randn(padded, 128).to(E4M3)
    residual = torch.randn(rows, 16)
    sums = x.float().sum(1, keepdim=True)[:rows]
    out = library(x, torch.ones(1, padded), residual.clone(), rows, torch.float32)
    assert product.added == added
    torch.testing.assert_close(out, residual + sums)
    torch.testing.assert_close(library(x, torch.ones(1, padded), None, rows, torch.float32), sums.repeat(1, 16))


def test_new_numbers_replace_those_of_a_weight_that_was_multiplied_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_library.LibraryFp8, "_by_torch", sums_of_16)
    products = cublas_lt.BlockProducts()
    weights = [random_weight(16, 128, (128, 128), torch.device("cpu")) for _ in range(2)]
    kept, made = (fp8_library.LibraryFp8(weight, None, products) for weight in weights)
    kept(torch.randn(8, 128).to(E4M3), torch.ones(1, 8), None, 8, torch.float32)
    assert not torch.equal(kept._scale, made._scale)
    overwrite(kept, made)
    assert torch.equal(kept._scale, made._scale)


def test_without_the_library_there_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", none)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    assert cublas_lt._library.__wrapped__(torch.device("cuda", 0)) is None
    assert cublas_lt.BlockProducts()(torch.empty(16, 128), torch.bfloat16, bias=False) is None
