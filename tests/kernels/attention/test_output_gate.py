"""Gates of what heads have attended to, as the reference computes them, wherever they lie in a projection."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.conftest import relative_error, tolerance

output_gate = pytest.importorskip("aengine.kernels.attention.output_gate")
pytestmark = pytest.mark.gpu


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
    expected = TorchKernels().gate_output(x.clone(), gates)
    out = output_gate.gate_output(x, gates)
    assert out is x
    assert relative_error(out, expected) < tolerance(dtype)


def test_no_tokens(device: torch.device) -> None:
    assert output_gate.gate_output(torch.empty(0, 8, device=device), torch.empty(0, 2, 4, device=device)).shape == (
        0,
        8,
    )
