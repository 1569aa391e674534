from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aengine.kernels.linear.weights import Int4Weight, dequantize
from tests.kernels.conftest import relative_error, tolerance

int4_launch = pytest.importorskip("aengine.kernels.linear.int4.launch")
int4_linear = pytest.importorskip("aengine.kernels.linear.int4.linear")
pytestmark = pytest.mark.gpu


class Halved:
    """A norm that is easily told from none."""

    weight = torch.ones(1)
    eps = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return x / 2


@pytest.mark.thinned
@pytest.mark.parametrize("path", ["unpacked-on-the-way", "written-out-dense"])
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
    monkeypatch.setattr(int4_linear, "DENSE_ROWS", 100 if path == "unpacked-on-the-way" else 1)
    weight = Int4Weight(
        torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device),
        (torch.rand(n, k // 128, device=device) + 0.1).half(),
        torch.randint(0, 16, (n, k // 128), dtype=torch.uint8, device=device),
        torch.randperm(k, device=device) if ordered else None,
    )
    x, bias, residual = (torch.randn(*shape, device=device).to(dtype) for shape in ((5, k), (n,), (5, n)))
    linear = int4_linear.Int4Linear(weight, bias, int4_launch.Int4Product(), dtype)
    assert (linear.inputs, linear.outputs) == (k, n)
    expected = x.double() @ dequantize(weight).double().t()
    assert relative_error(linear(x), expected + bias.double()) < tolerance(dtype)
    assert relative_error(linear.after(Halved(), x), expected / 2 + bias.double()) < tolerance(dtype)
    total = expected + bias.double() + residual.double()
    assert relative_error(linear.add_to(x, residual), total) < tolerance(dtype)


def test_columns_of_x_may_come_several_times(dtype: torch.dtype, device: torch.device) -> None:
    """As where a rank's part of scattered groups is filled up."""
    weight = Int4Weight(
        torch.randint(0, 16, (40, 256), dtype=torch.uint8, device=device),
        (torch.rand(40, 8, device=device) + 0.1).half(),
        order=torch.randperm(256, device=device) % 160,
    )
    x = torch.randn(5, 160, device=device).to(dtype)
    linear = int4_linear.Int4Linear(weight, None, int4_launch.Int4Product(), dtype)
    assert relative_error(linear(x), x.double() @ dequantize(weight).double().t()) < tolerance(dtype)
