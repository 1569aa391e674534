"""Norms, gated activations and gates of heads give what the torch reference gives."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.conftest import relative_error, tolerance

elementwise = pytest.importorskip("aengine.kernels.elementwise")
pytestmark = pytest.mark.gpu

REFERENCE = TorchKernels()
SHAPES = [pytest.param(3, 96, id="tiny"), pytest.param(1, 4096), pytest.param(257, 1000), pytest.param(33, 5120)]


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm_equals_the_reference(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(tokens, hidden, device=device).to(dtype) * 3
    weight = torch.rand(hidden, device=device).to(dtype) + 0.5
    out = elementwise.rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    assert relative_error(out, REFERENCE.norm(weight, 1e-6)(x)) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("tokens", "inter"), [pytest.param(3, 72, id="tiny"), pytest.param(1, 12288), pytest.param(130, 3000)]
)
def test_silu_mul_equals_the_reference(tokens: int, inter: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(tokens, 2 * inter, device=device).to(dtype) * 2
    out = elementwise.silu_mul(gate_up)
    assert relative_error(out, REFERENCE.silu_mul(gate_up)) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("tokens", "inter", "hidden"),
    [pytest.param(3, 72, 40, id="tiny"), pytest.param(1, 512, 2048), pytest.param(130, 5632, 3000)],
)
def test_the_gate_of_a_shared_expert_is_exact(
    tokens: int, inter: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    gate_up = torch.randn(tokens, 2 * inter, device=device).to(dtype) * 2
    h = torch.randn(tokens, hidden, device=device).to(dtype)
    row = (torch.randn(1, hidden, device=device) * hidden**-0.5).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up * (h.double() @ row.double().T).sigmoid()
    out = elementwise.gated_silu_mul(gate_up, h, row)
    assert out.dtype == dtype
    assert relative_error(out, expected) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_a_norm_that_is_added_equals_the_reference(
    tokens: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = (torch.randn(tokens, hidden, device=device).to(dtype) * 3 for _ in range(2))
    weight = torch.rand(hidden, device=device) + 0.5
    expected = REFERENCE.norm(weight, 1e-6).add_to(x, residual.clone())
    out = elementwise.TritonNorm(weight, 1e-6).add_to(x, residual)
    assert out.dtype == dtype
    assert relative_error(out, expected) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("tokens", "inter"), [pytest.param(3, 72, id="tiny"), pytest.param(1, 21504), pytest.param(130, 3000)]
)
def test_xielu_equals_the_reference(tokens: int, inter: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(tokens, inter, device=device).to(dtype) * 2
    values = torch.tensor([0.9, 1.3, 0.5, -1e-6], device=device)
    assert relative_error(elementwise.xielu(x, values), REFERENCE.xielu(x, values)) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("tokens", "inter"), [pytest.param(3, 72, id="tiny"), pytest.param(1, 15360), pytest.param(130, 3000)]
)
def test_gelu_mul_equals_the_reference(tokens: int, inter: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(tokens, 2 * inter, device=device).to(dtype) * 2
    out = elementwise.gelu_mul(gate_up)
    assert relative_error(out, REFERENCE.gelu_mul(gate_up)) < tolerance(dtype)


@pytest.mark.parametrize("tokens", [3])
def test_a_float32_weight_with_16_bit_rows_tiny(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(tokens, 96, device=device).to(dtype), torch.rand(96, device=device) + 1.0
    out = elementwise.rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    assert relative_error(out, REFERENCE.norm(weight, 1e-6)(x)) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"),
    [pytest.param(3, 3, 24, id="tiny"), pytest.param(1, 16, 256), pytest.param(130, 10, 250)],
)
def test_each_head_has_its_own_gate(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(tokens, heads * dim, device=device).to(dtype)
    projected = (torch.randn(tokens, (2 * heads + 2) * dim, device=device) * 3).to(dtype)
    gates = projected.unflatten(1, (-1, dim))[:, 1 : 2 * heads : 2]
    expected = REFERENCE.gate_output(x.clone(), gates)
    out = elementwise.gate_output(x, gates)
    assert out is x
    assert relative_error(out, expected) < tolerance(dtype)


@pytest.mark.parametrize(
    ("tokens", "heads", "pieces", "dim"),
    [pytest.param(3, 3, 2, 24, id="tiny"), pytest.param(130, 16, 1, 72), pytest.param(7, 12, 2, 64)],
)
def test_the_pieces_of_heads_are_rotated_in_place(
    tokens: int, heads: int, pieces: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """q and k are rotated together, without the v behind them."""
    qkv = torch.randn(tokens, 3 * heads, dim, device=device).to(dtype)
    cos, sin = torch.randn(2, tokens, pieces, dim // pieces // 2, device=device)
    before, x = qkv.clone(), qkv[:, : 2 * heads]
    expected = REFERENCE.rotate(x.clone(), cos, sin)
    assert elementwise.rotate(x, cos, sin) is x
    assert relative_error(x, expected) < tolerance(dtype)
    assert torch.equal(qkv[:, 2 * heads :], before[:, 2 * heads :])


def test_no_tokens_is_no_work_tiny(device: torch.device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert elementwise.rms_norm(empty, torch.ones(64, device=device), 1e-6).shape == (0, 64)
    assert elementwise.silu_mul(empty).shape == (0, 32)
    assert elementwise.gated_silu_mul(empty, empty, torch.ones(1, 64, device=device)).shape == (0, 32)
    gates = torch.empty(0, 2, 4, device=device)
    assert elementwise.gate_output(torch.empty(0, 8, device=device), gates).shape == (0, 8)
    angles = torch.empty(0, 1, 2, device=device)
    assert elementwise.rotate(torch.empty(0, 2, 4, device=device), angles, angles).shape == (0, 2, 4)
