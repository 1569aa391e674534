"""Experts for single rows, where a type or a cut has a way of its own."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import relative_error

pytest.importorskip("triton")

from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.single_rows import SingleConfig, SingleCut, single_rows
from tests.kernels.experts.test_triton_experts import make, reference, spread

pytestmark = [
    pytest.mark.gpu,
    # What an expert that is not there left unwritten is computed with, and thrown away.
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
