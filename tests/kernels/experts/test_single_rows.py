"""Experts for single rows: types and configs with code of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import relative_error

pytest.importorskip("triton")

from aengine.kernels.elementwise import gated_silu_mul
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.products import float_experts
from aengine.kernels.experts.single_rows import SharedMatrices, SingleConfig, SingleCut, single_rows
from aengine.kernels.triton_kernels import TritonKernels
from tests.kernels.experts.test_triton_experts import make, reference, spread

pytestmark = [
    pytest.mark.gpu,
    # The rows of missing experts are computed with undefined values and not used.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

CUTS = {
    "all-at-once": SingleConfig(SingleCut(4, 64, 2, 2), SingleCut(4, 32, 2, 2)),
    "more-than-there-is": SingleConfig(SingleCut(4, 128, 4, 2), SingleCut(4, 64, 4, 2)),
    "in-turns": SingleConfig(SingleCut(4, 32, 2, 1), SingleCut(2, 16, 1, 1)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("hidden", [128, 80])
def test_pairs_of_bfloat16_come_apart_in_their_order_tiny(hidden: int, cut: str, device: torch.device) -> None:
    shape = (2, 5, 3, hidden, 24)
    h, gate_up, down, weights, residual = make(shape, torch.bfloat16, device)
    ids = spread("nowhere", *shape[:3]).to(device)
    expected = reference(h, gate_up, down, ids, weights, residual)
    out = single_rows(h, Matrices(gate_up), Matrices(down), ids, weights, residual, CUTS[cut])
    assert relative_error(out, expected) < 1e-2


def shared_of(hidden: int, inter: int, gate: bool, device: torch.device) -> SharedMatrices:
    shapes = ((2 * inter, hidden), hidden), ((hidden, inter), inter), ((1, hidden), hidden)
    gate_up, down, row = (torch.randn(*s, device=device).mul(n**-0.5).bfloat16() for s, n in shapes)
    return SharedMatrices(gate_up, down, row if gate else None)


def of_all(h: Tensor, shared: SharedMatrices) -> Tensor:
    """Return what the shared expert adds to every token, in float64."""
    gate, up = F.linear(h.double(), shared.gate_up.double()).chunk(2, dim=-1)
    result = F.linear(F.silu(gate) * up, shared.down.double())
    return result if shared.gate is None else result * (h.double() @ shared.gate.double().T).sigmoid()


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(
    "inter", [32, 96]
)  # whole blocks of each piece; or more than one, the last of which is not whole
@pytest.mark.parametrize("cut", CUTS)
def test_the_shared_expert_is_fused_tiny(cut: str, inter: int, gate: bool, device: torch.device) -> None:
    shape = (2, 5, 3, 80, 24)
    h, gate_up, down, weights, residual = make(shape, torch.bfloat16, device)
    ids = spread("nowhere", *shape[:3]).to(device)
    shared = shared_of(80, inter, gate, device)
    assert shared.can_fuse(h, 3)
    expected = reference(h, gate_up, down, ids, weights, residual) + of_all(h, shared)
    matrices = Matrices(gate_up), Matrices(down)
    outs = [single_rows(h, *matrices, ids, weights, residual.clone(), CUTS[cut], shared=shared) for _ in range(2)]
    assert relative_error(outs[0], expected) < 1e-2
    assert torch.equal(*outs)
    alone = single_rows(h, *matrices, ids, weights, None, CUTS[cut], shared=shared)
    assert relative_error(alone, expected - residual.double()) < 1e-2


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_models_widths(tokens: int, device: torch.device) -> None:
    shape = (tokens, 256, 8, 2048, 512)
    h, gate_up, down, weights, residual = make(shape, torch.bfloat16, device)
    ids, shared, kernels = spread("even", *shape[:3]).to(device), shared_of(2048, 512, True, device), TritonKernels()
    assert shared.gate is not None
    layer, first, second = (
        float_experts(gate_up, down),
        *(kernels.dense(w, None) for w in (shared.gate_up, shared.down)),
    )
    together = kernels.with_shared(layer, first, second, shared.gate, h, 8)
    assert together is not None
    inner = gated_silu_mul(first.apply(h), h, shared.gate)
    one_by_one = layer.add_to(h, ids, weights, second.apply(inner, residual=residual.clone()))
    out = together.add_to(h, ids, weights, residual.clone())
    expected = reference(h, gate_up, down, ids, weights, residual) + of_all(h, shared)
    assert relative_error(out, expected) < 1e-2
    assert relative_error(out, expected) <= relative_error(one_by_one, expected)


def test_unsupported_shared_experts_are_not_fused_tiny(device: torch.device) -> None:
    h, gate_up, down, _, _ = make((2, 5, 3, 80, 24), torch.bfloat16, device)
    shared, kernels = shared_of(80, 32, False, device), TritonKernels()
    layer, first, second = (
        float_experts(gate_up, down),
        *(kernels.dense(w, None) for w in (shared.gate_up, shared.down)),
    )
    assert kernels.with_shared(layer, first, second, None, h, 3) is not None
    biased = kernels.dense(shared.down, torch.zeros(80, dtype=h.dtype, device=device))
    narrow = shared_of(80, 24, False, device)
    assert kernels.with_shared(layer, first, biased, None, h, 3) is None
    assert kernels.with_shared(layer, first, second, None, h.repeat(8, 1), 3) is None  # too many tokens
    assert not narrow.can_fuse(h, 3)
    assert not shared.can_fuse(h.float(), 3)
