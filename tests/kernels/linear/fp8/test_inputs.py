from __future__ import annotations

import pytest
import torch

from aengine.kernels.linear.fp8.quantize import E4M3
from aengine.kernels.linear.weights.fp8 import Activations, Fp8Weight
from tests.kernels.conftest import relative_error
from tests.kernels.linear.fp8.reference import random_inputs, rounded_inputs

fp8_inputs = pytest.importorskip("aengine.kernels.linear.fp8.inputs")
elementwise = pytest.importorskip("aengine.kernels.elementwise")
pytestmark = pytest.mark.gpu

SHAPES = [
    pytest.param(3, 400, id="tiny"),
    pytest.param(2, 16, id="tiny-narrow"),
    pytest.param(1, 2560, id="tiny-long"),
    (7, 4096),
    (5, 12288),
]
KINDS = ["group", "token", "static"]


def spread(x8: torch.Tensor, scale: torch.Tensor, kind: Activations) -> torch.Tensor:
    """Multiply values by scales in float64: [m, k]."""
    wide = scale.double()
    if kind == "group":
        wide = wide.T.repeat_interleave(128, 1)[:, : x8.shape[1]]
    return x8.double() * (wide[:, None] if kind == "token" else wide)


def like(x: torch.Tensor, kind: Activations) -> Fp8Weight:
    """Return a weight for inputs of this kind."""
    known = torch.tensor(2.0**-4, device=x.device) if kind == "static" else None
    empty = torch.zeros(1, x.shape[1], device=x.device)
    return Fp8Weight(empty.to(E4M3), empty[:, :1], (1, x.shape[1]), kind, known)


@pytest.mark.thinned(where=lambda k, **_: k != 4096)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_inputs_are_rounded_as_the_format_says(
    m: int, k: int, kind: Activations, dtype: torch.dtype, device: torch.device
) -> None:
    x = random_inputs(m, k, device).to(dtype)
    x[0, : k // 256 * 128] = 0
    weight = like(x, kind)
    x8, scale = fp8_inputs.round_inputs(x, kind, weight.input_scale)
    assert scale.shape == {"group": (-(-k // 128), m), "token": (m,), "static": ()}[kind]
    assert relative_error(spread(x8, scale, kind), rounded_inputs(x, weight)) < 2e-3  # a tie may be broken differently


@pytest.mark.thinned(where=lambda k, **_: k != 4096)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_a_fused_norm_or_gate_gives_the_result_of_a_separate_launch(
    m: int, k: int, kind: Activations, dtype: torch.dtype, device: torch.device
) -> None:
    x, gate_up = torch.randn(m, k, device=device).to(dtype), torch.randn(m, 2 * k, device=device).to(dtype)
    weight = like(x, kind)

    class Norm:
        weight = torch.randn(k, device=device).to(dtype)
        eps = 1e-5

    for own, (x8, scale) in (
        (
            elementwise.rms_norm(x, Norm.weight, Norm.eps),
            fp8_inputs.round_inputs(x, kind, weight.input_scale, norm=Norm()),
        ),
        (elementwise.silu_mul(gate_up), fp8_inputs.round_inputs(gate_up, kind, weight.input_scale, silu=True)),
    ):
        apart = fp8_inputs.round_inputs(own, kind, weight.input_scale)
        assert relative_error(spread(x8, scale, kind), spread(*apart, kind)) < 5e-3  # a tie may be broken differently


def test_nothing_but_zeros_is_zero_tiny(device: torch.device) -> None:
    for kind in ("group", "token"):
        x8, scale = fp8_inputs.round_inputs(torch.zeros(2, 256, device=device), kind)
        assert (x8.float() == 0).all()
        assert (scale == 1).all()
