"""The sum of two parts on one device has the same bits as a sum of two ranks."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.conftest import relative_error, tolerance

overlapped = pytest.importorskip("aengine.kernels.collective.overlapped")
pytestmark = pytest.mark.gpu

SHAPES = [pytest.param(3, 96, id="tiny"), pytest.param(130, 4096), pytest.param(33, 5120)]


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_both_are_added_to_the_residual_and_rounded_once(
    tokens: int, hidden: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    first, second, residual = (torch.randn(tokens, hidden, device=device).to(dtype) for _ in range(3))
    expected = (first.float() + second.float() + residual.float()).to(dtype)
    norm = TorchKernels().norm(torch.rand(hidden, device=device).to(dtype) + 0.5, 1e-6)
    out = torch.empty_like(residual)
    overlapped.sum_two_parts(first, second, residual, *((norm, out) if normed else ()))
    assert residual.equal(expected)
    if normed:
        assert relative_error(out, norm(expected)) < tolerance(dtype)


def test_no_tokens_is_no_work_tiny(device: torch.device) -> None:
    empty = torch.empty(0, 64, device=device)
    overlapped.sum_two_parts(empty, empty, empty)
