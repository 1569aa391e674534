from __future__ import annotations

import pytest
import torch

from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.conftest import relative_error, tolerance

gelu = pytest.importorskip("aengine.kernels.gelu")
norms = pytest.importorskip("aengine.kernels.norms")
pytestmark = pytest.mark.gpu

REFERENCE = TorchKernels()
SHAPES = [pytest.param(3, 96, id="tiny"), pytest.param(1, 4096), pytest.param(257, 1000), pytest.param(33, 5120)]


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm_is_the_references(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(tokens, hidden, device=device).to(dtype) * 3
    weight = torch.rand(hidden, device=device).to(dtype) + 0.5
    out = norms.rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    assert relative_error(out, REFERENCE.norm(weight, 1e-6)(x)) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("tokens", "inter"), [pytest.param(3, 72, id="tiny"), pytest.param(1, 12288), pytest.param(130, 3000)]
)
def test_silu_mul_is_the_references(tokens: int, inter: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(tokens, 2 * inter, device=device).to(dtype) * 2
    out = norms.silu_mul(gate_up)
    assert relative_error(out, REFERENCE.silu_mul(gate_up)) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("tokens", "inter"), [pytest.param(3, 72, id="tiny"), pytest.param(1, 15360), pytest.param(130, 3000)]
)
def test_gelu_mul_is_the_references(tokens: int, inter: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(tokens, 2 * inter, device=device).to(dtype) * 2
    out = gelu.gelu_mul(gate_up)
    assert relative_error(out, REFERENCE.gelu_mul(gate_up)) < tolerance(dtype)


@pytest.mark.parametrize("tokens", [3])
def test_a_weight_in_float32_beside_rows_of_less_tiny(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(tokens, 96, device=device).to(dtype), torch.rand(96, device=device) + 1.0
    out = norms.rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    assert relative_error(out, REFERENCE.norm(weight, 1e-6)(x)) < tolerance(dtype)


def test_no_tokens_is_no_work_tiny(device: torch.device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert norms.rms_norm(empty, torch.ones(64, device=device), 1e-6).shape == (0, 64)
    assert norms.silu_mul(empty).shape == (0, 32)
