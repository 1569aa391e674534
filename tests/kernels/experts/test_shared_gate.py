"""The shared expert weighted by its gate, as the reference computes it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import relative_error, tolerance

shared_gate = pytest.importorskip("aengine.kernels.experts.shared_gate")
pytestmark = pytest.mark.gpu


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("tokens", "inter", "hidden"),
    [pytest.param(3, 72, 40, id="tiny"), pytest.param(1, 512, 2048), pytest.param(130, 5632, 3000)],
)
def test_it_is_the_references(tokens: int, inter: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(tokens, 2 * inter, device=device).to(dtype) * 2
    h = torch.randn(tokens, hidden, device=device).to(dtype)
    row = (torch.randn(1, hidden, device=device) * hidden**-0.5).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up * (h.double() @ row.double().T).sigmoid()
    out = shared_gate.gated_silu_mul(gate_up, h, row)
    assert out.dtype == dtype
    assert relative_error(out, expected) < tolerance(dtype)


def test_no_tokens(device: torch.device) -> None:
    empty = shared_gate.gated_silu_mul(
        torch.empty(0, 16, device=device), torch.empty(0, 8, device=device), torch.ones(1, 8, device=device)
    )
    assert empty.shape == (0, 8)
