"""Experts of 4-bit codes against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import relative_error, tolerance
from tests.kernels.experts.cuts import with_cut

pytest.importorskip("triton")

from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.packed.rows import PackedConfig, PackedCut
from aengine.kernels.experts.packed.single_rows import (
    PackedSingleConfig,
    PackedSingleCut,
    fits_single_rows,
)
from aengine.kernels.experts.products import packed_experts
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.linear.weights.e2m1 import E2m1Weight, Mxfp4Weight, Nvfp4Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from tests.kernels.experts.test_triton_experts import GELU, SPREADS, UNGATED, reference, rule_of, spread
from tests.kernels.linear.int4.test_product import nvfp4_scales

pytestmark = [
    pytest.mark.gpu,
    # Rows of pairs that go nowhere are computed and not stored.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]
CUTS = {
    "single": PackedSingleConfig(PackedSingleCut(16, 2, 2), PackedSingleCut(16, 2, 3)),
    "single-wide": PackedSingleConfig(PackedSingleCut(32, 4), PackedSingleCut(32, 8, 2)),
    "tiles": PackedConfig(16, PackedCut(16, 2, 4), PackedCut(32, 2, 4)),
    "tiles-ahead": PackedConfig(32, PackedCut(32, 2, 4, ahead=True), PackedCut(64, 2, 4, ahead=True)),
    "tiles-ahead-high": PackedConfig(128, PackedCut(64, 3, 8, ahead=True), PackedCut(128, 3, 8, ahead=True)),
}
KINDS = ["int4-32", "int4-64", "int4-128", "int4-zeros", "mxfp4", "nvfp4"]


def packed_weight(experts: int, n: int, k: int, kind: str, device: torch.device) -> Int4Weight | E2m1Weight:
    """Return scales of different magnitudes, so that a misplaced one shows."""
    codes = torch.randint(0, 16, (experts, n, k), dtype=torch.uint8, device=device)
    if kind == "mxfp4":
        return Mxfp4Weight.from_codes(
            codes, torch.randint(120, 124, (experts, n, k // 32), dtype=torch.uint8, device=device)
        )
    if kind == "nvfp4":
        return Nvfp4Weight.from_codes(codes, *nvfp4_scales(experts, n, k, device=device))
    group = {"int4-32": 32, "int4-64": 64}.get(kind, 128)
    shape = (experts, n, k // group)
    scale = 2.0 ** -torch.randint(4, 8, shape, device=device) * (1 + torch.rand(shape, device=device)).bfloat16()
    zero = torch.randint(0, 16, shape, dtype=torch.uint8, device=device) if kind == "int4-zeros" else None
    return Int4Weight(codes, scale, zero)


@pytest.mark.thinned(where=lambda how, kind, **_: how == "nowhere" or kind == "int4-zeros")
@pytest.mark.parametrize("how", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((5, 4, 3, 256, 128), id="tiny"),
        pytest.param((33, 128, 8, 2048, 768), id="a-model's"),
        pytest.param((1000, 32, 4, 512, 640), id="large"),
    ],
)
def test_the_weighted_sum(
    shape: tuple[int, ...], kind: str, how: str, dtype: torch.dtype, device: torch.device
) -> None:
    tokens, experts, top_k, hidden, inter = shape
    ids = spread(how, tokens, experts, top_k).to(device)
    gate_up = packed_weight(experts, 2 * inter, hidden, kind, device)
    down = packed_weight(experts, hidden, inter, kind, device)
    h, residual = (torch.randn(tokens, hidden, device=device).div(16).to(dtype) for _ in range(2))
    weights = torch.rand(tokens, top_k, device=device)
    layer = packed_experts(gate_up, down)
    outs = [layer.add_to(h, ids, weights, residual.clone()) for _ in range(2)]
    expected = reference(h, gate_up.dequantize(), down.dequantize(), ids, weights, residual)
    # With five tokens, sums that nearly cancel may show more of the rounding.
    assert relative_error(outs[0], expected) < tolerance(dtype) * (1.5 if tokens < 33 else 1)
    assert torch.equal(*outs)


def is_for(cut: str, kind: str, dtype: str, shape: tuple[int, ...], **_: object) -> bool:
    """Return whether a GPU runs it.

    Single rows need a block in one group, or 4-bit floats. In float32 they need a small model, because their products
    are unrolled and the compiler takes minutes; no model uses them so. High tiles do not fit with 4 bytes an element.
    """
    if cut.startswith("single"):
        return kind not in ("int4-32", "int4-64") and (dtype != "float32" or shape[-1] < 2880)
    return not cut.endswith("high") or dtype != "float32"


@pytest.mark.thinned(where=is_for)
@pytest.mark.parametrize("rule", ["plain", "clamp", "both"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((3, 4, 3, 192, 96), id="tiny"),  # one and a half blocks, and less than one
        pytest.param((3, 32, 4, 2880, 2880), id="a-model's"),
        pytest.param((300, 32, 4, 2880, 2880), id="large"),
    ],
)
def test_every_cut_gives_the_weighted_sum(
    shape: tuple[int, ...], cut: str, kind: str, rule: str, dtype: torch.dtype, device: torch.device
) -> None:
    tokens, experts, top_k, hidden, inter = shape
    if kind in ("int4-128", "int4-zeros", "int4-64"):
        hidden, inter = (-(-size // 128) * 128 for size in (hidden, inter))
    shape = tokens, experts, top_k, hidden, inter
    ids = spread("nowhere", tokens, experts, top_k).to(device)
    gate_up = packed_weight(experts, 2 * inter, hidden, kind, device)
    down = packed_weight(experts, hidden, inter, kind, device)
    h, residual = (torch.randn(tokens, hidden, device=device).div(16).to(dtype) for _ in range(2))
    weights = torch.rand(tokens, top_k, device=device)
    how = SILU if rule == "plain" else rule_of(rule, shape, dtype, device)
    layer = with_cut(packed_experts(gate_up, down, how), CUTS[cut])
    outs = [layer.add_to(h, ids, weights, residual.clone()) for _ in range(2)]
    expected = reference(h, gate_up.dequantize(), down.dequantize(), ids, weights, residual, how)
    assert relative_error(outs[0], expected) < tolerance(dtype)
    assert torch.equal(*outs)
    nothing = layer.add_to(h, ids, weights, None)
    zeros = torch.zeros_like(residual)
    assert torch.equal(nothing, layer.add_to(h, ids, weights, zeros))


@pytest.mark.interpreted(3)  # every cut, because no other test interprets single rows of MXFP4
@pytest.mark.parametrize("rule", [GELU, UNGATED], ids=["gelu", "ungated"])
@pytest.mark.parametrize("cut", ["single", "tiles", "tiles-ahead"])
def test_other_activations_tiny(cut: str, rule: ExpertRule, dtype: torch.dtype, device: torch.device) -> None:
    gate_up, down = (packed_weight(4, n, k, "mxfp4", device) for n, k in ((rule.parts * 96, 256), (256, 96)))
    h, residual = (torch.randn(2, 256, device=device).div(16).to(dtype) for _ in range(2))
    ids, weights = spread("even", 2, 4, 3).to(device), torch.rand(2, 3, device=device)
    out = with_cut(packed_experts(gate_up, down, rule), CUTS[cut]).add_to(h, ids, weights, residual.clone())
    expected = reference(h, gate_up.dequantize(), down.dequantize(), ids, weights, residual, rule)
    assert relative_error(out, expected) < tolerance(dtype)


@pytest.mark.thinned(where=lambda dtype, **_: dtype != "float32")
@pytest.mark.parametrize("kind", ["int4-128", "mxfp4"])
def test_tall_tiles_of_few_rows_give_the_same_sum(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """One of three experts has a whole tile and 44 rows, one has a tile that is not full, one has a single row."""
    counts, hidden, inter = (300, 100, 1), 256, 384
    config = PackedConfig(256, PackedCut(64, 3, 8, ahead=True), PackedCut(128, 3, 8, ahead=True))
    ids = torch.arange(3).repeat_interleave(torch.tensor(counts))[torch.randperm(401)].int()[:, None].to(device)
    gate_up, down = (packed_weight(3, *size, kind, device) for size in ((2 * inter, hidden), (hidden, inter)))
    h = torch.randn(401, hidden, device=device).div(16).to(dtype)
    weights = torch.rand(401, 1, device=device)
    layer = with_cut(packed_experts(gate_up, down), config)
    outs = [layer.add_to(h, ids, weights, torch.zeros_like(h)) for _ in range(2)]
    expected = reference(h, gate_up.dequantize(), down.dequantize(), ids, weights, torch.zeros_like(h))
    assert relative_error(outs[0], expected) < tolerance(dtype)
    assert torch.equal(*outs)


def test_groups_of_less_than_a_block_are_not_for_single_rows_tiny(device: torch.device) -> None:
    fits = {
        kind: fits_single_rows(PackedMatrices.from_weight(packed_weight(2, 32, 128, kind, device))) for kind in KINDS
    }
    assert [kind for kind in KINDS if fits[kind]] == ["int4-128", "int4-zeros", "mxfp4", "nvfp4"]


def test_columns_in_another_order_have_no_kernel_tiny(device: torch.device) -> None:
    codes = torch.zeros(2, 128, 128, dtype=torch.uint8, device=device)
    weight = Int4Weight(
        codes, torch.ones(2, 128, 1, device=device), order=torch.arange(128, device=device).repeat(2, 1)
    )
    assert not PackedMatrices.fits(weight)
    with pytest.raises(ValueError, match="does not belong"):
        packed_experts(weight, weight)
