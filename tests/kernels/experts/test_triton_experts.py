"""Every kernel of a mixture of experts against a float64 reference, for several spreads of the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import relative_error, tolerance
from tests.kernels.experts.cuts import with_cut

pytest.importorskip("triton")

from aengine.kernels.experts.few_rows import FewConfig, FewCut
from aengine.kernels.experts.many_rows import ManyConfig, ManyCut
from aengine.kernels.experts.products import float_experts
from aengine.kernels.experts.rule import SILU, ExpertRule, GateClamp
from aengine.kernels.experts.single_rows import SingleConfig, SingleCut

pytestmark = [
    pytest.mark.gpu,
    # Rows after an expert's last one are computed and not stored.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

CUTS = {
    "single": SingleConfig(SingleCut(8, 32, 2, 1), SingleCut(16, 16, 1, 1)),
    "few": FewConfig(16, FewCut(16, 32, 2, 4), FewCut(32, 32, 2, 4)),
    "few-tall": FewConfig(32, FewCut(32, 32, 2, 4), FewCut(64, 32, 2, 4)),
    "many": ManyConfig(16, ManyCut(16, 32, 2, 4), ManyCut(32, 32, 2, 4, crowd=0), gather=True),
    "many-sorted-flat": ManyConfig(32, ManyCut(32, 32, 2, 4, flatten=True), ManyCut(32, 32, 2, 4, 2, flatten=True)),
}
# tokens, experts, top_k, hidden, inter
SHAPES = [
    pytest.param(5, 4, 3, 40, 24, id="tiny"),
    pytest.param(1, 5, 5, 32, 16, id="tiny-one-token-to-all"),
    pytest.param(4097, 64, 8, 1024, 704),
    pytest.param(33, 128, 8, 2048, 768),
]
GELU, UNGATED = ExpertRule(gelu=True), ExpertRule(gated=False)
SPREADS = ["even", "one", "nowhere", "row_of_equals"]


def reference(
    h: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, residual: Tensor, rule: ExpertRule = SILU
) -> Tensor:
    """Compute in float64, with the experts in order."""
    of_inner, of_rows = (None, None) if rule.biases is None else (bias.double() for bias in rule.biases)
    total = residual.double()
    for expert in range(len(down)):
        token, j = (ids == expert).nonzero(as_tuple=True)
        inner = F.linear(h[token].double(), gate_up[expert].double())
        inner = activation(inner if of_inner is None else inner + of_inner[expert], rule)
        rows = F.linear(inner, down[expert].double())
        rows = rows if of_rows is None else rows + of_rows[expert]
        total.index_add_(0, token, weights[token, j, None].double() * rows)
    return total


def activation(inner: Tensor, rule: ExpertRule) -> Tensor:
    """Return what is between the two products, of gate and up, [rows, 2 * inter], or of up."""
    if not rule.gated:
        return F.relu(inner) ** 2
    gate, up = inner.chunk(2, dim=-1)
    if rule.clamp is None:
        return (F.gelu(gate, approximate="tanh") if rule.gelu else F.silu(gate)) * up
    gate, up = gate.clamp(max=rule.clamp.limit), up.clamp(-rule.clamp.limit, rule.clamp.limit)
    return gate * torch.sigmoid(rule.clamp.alpha * gate) * (up + 1)


def spread(how: str, tokens: int, experts: int, top_k: int) -> Tensor:
    """Return ids int32 [tokens, top_k]."""
    ids = torch.rand(tokens, experts).argsort(dim=1)[:, :top_k]
    if how == "one":  # the first top_k experts have every token, the others have none
        ids = torch.arange(top_k).expand(tokens, -1)
    if how == "nowhere":  # padding
        ids[tokens // 2 :] = torch.tensor([-1, experts]).repeat(top_k)[:top_k]
    if how == "row_of_equals":  # padding too
        ids[-1] = experts - 1
    return ids.to(torch.int32).contiguous()


def rule_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> ExpertRule:
    """Return limits that some gates and ups exceed, and biases that are never 0."""
    _, experts, _, hidden, inter = shape
    sizes = (experts, 2 * inter), (experts, hidden)
    biases = tuple(torch.randn(*size, device=device).to(dtype) for size in sizes)
    clamp = None if kind == "biases" else GateClamp(1.702, 0.75)
    return ExpertRule(clamp, None if kind == "clamp" else (biases[0], biases[1]))


def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, parts: int = 2) -> tuple[Tensor, ...]:
    """Return h, gate_up, down, weights, residual. parts: 1 means up alone."""
    tokens, experts, top_k, hidden, inter = shape
    h, gate_up, down, residual = (
        torch.randn(*size, device=device).mul(scale).to(dtype)
        for size, scale in (
            ((tokens, hidden), 1),
            ((experts, parts * inter, hidden), hidden**-0.5),
            ((experts, hidden, inter), inter**-0.5),
            ((tokens, hidden), 1),
        )
    )
    return h, gate_up, down, torch.rand(tokens, top_k, device=device), residual


def is_known_to_a_gpu(cut: str, dtype: str, **_: object) -> bool:
    """Return whether a GPU runs it: the kernels for many rows do not take 4 bytes an element."""
    return not cut.startswith("many") or dtype != "float32"


@pytest.mark.thinned(where=is_known_to_a_gpu)
@pytest.mark.parametrize("how", SPREADS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", [(param.values, param.id) for param in SHAPES], ids=lambda s: s[1] or "large")
def test_every_cut_gives_the_weighted_sum(
    shape: Any, cut: str, how: str, dtype: torch.dtype, device: torch.device
) -> None:
    ids = spread(how, *shape[0][:3]).to(device)
    h, gate_up, down, weights, residual = make(shape[0], dtype, device)
    expected = reference(h, gate_up, down, ids, weights, residual)
    layer = with_cut(float_experts(gate_up, down), CUTS[cut])
    outs = [layer.add_to(h, ids, weights, residual.clone()) for _ in range(2)]
    assert relative_error(outs[0], expected) < tolerance(dtype)
    assert torch.equal(*outs)


@pytest.mark.interpreted(3)
@pytest.mark.thinned(where=is_known_to_a_gpu)
@pytest.mark.parametrize("kind", ["clamp", "biases", "both"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "shape", [pytest.param((5, 4, 3, 40, 24), id="tiny"), pytest.param((33, 32, 4, 2880, 2880), id="large")]
)
def test_biases_and_limits(
    shape: tuple[int, ...], cut: str, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    ids = spread("nowhere", *shape[:3]).to(device)
    h, gate_up, down, weights, residual = make(shape, dtype, device)
    rule = rule_of(kind, shape, dtype, device)
    expected = reference(h, gate_up, down, ids, weights, residual, rule)
    layer = with_cut(float_experts(gate_up, down, rule), CUTS[cut])
    outs = [layer.add_to(h, ids, weights, residual.clone()) for _ in range(2)]
    assert relative_error(outs[0], expected) < tolerance(dtype)
    assert torch.equal(*outs)


@pytest.mark.parametrize("rule", [ExpertRule(GateClamp(1.702, 0.75)), UNGATED], ids=["clamp", "ungated"])
@pytest.mark.parametrize("cut", CUTS)
def test_nan_stays_nan_tiny(cut: str, rule: ExpertRule, device: torch.device) -> None:
    shape = (5, 4, 3, 40, 24)
    ids = spread("even", *shape[:3]).to(device)
    h, gate_up, down, weights, residual = make(shape, torch.float32, device, rule.parts)
    h[2, 7] = float("nan")
    layer = with_cut(float_experts(gate_up, down, rule), CUTS[cut])
    out = layer.add_to(h, ids, weights, residual)
    assert out.isnan().any(dim=1).tolist() == [False, False, True, False, False]


@pytest.mark.interpreted(2)
@pytest.mark.thinned(where=is_known_to_a_gpu)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((5, 4, 3, 40, 24), id="tiny"),
        pytest.param((4, 128, 6, 2688, 1856), id="few"),
        pytest.param((300, 128, 6, 2688, 1856), id="large"),
    ],
)
def test_the_square_of_relu_instead_of_a_gate(
    shape: tuple[int, ...], cut: str, biases: bool, dtype: torch.dtype, device: torch.device
) -> None:
    ids = spread("nowhere", *shape[:3]).to(device)
    h, up, down, weights, residual = make(shape, dtype, device, parts=1)
    added = tuple(torch.randn(len(one), one.shape[1], device=device).to(dtype) for one in (up, down))
    rule = ExpertRule(biases=(added[0], added[1]), gated=False) if biases else UNGATED
    layer = with_cut(float_experts(up, down, rule), CUTS[cut])
    outs = [layer.add_to(h, ids, weights, residual.clone()) for _ in range(2)]
    assert relative_error(outs[0], reference(h, up, down, ids, weights, residual, rule)) < tolerance(dtype)
    assert torch.equal(*outs)


@pytest.mark.thinned(where=is_known_to_a_gpu)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "shape", [pytest.param((5, 4, 3, 40, 24), id="tiny"), pytest.param((300, 128, 8, 2816, 704), id="large")]
)
def test_gelu_instead_of_silu(shape: tuple[int, ...], cut: str, dtype: torch.dtype, device: torch.device) -> None:
    ids = spread("nowhere", *shape[:3]).to(device)
    h, gate_up, down, weights, residual = make(shape, dtype, device)
    out = with_cut(float_experts(gate_up, down, GELU), CUTS[cut]).add_to(h, ids, weights, residual.clone())
    assert relative_error(out, reference(h, gate_up, down, ids, weights, residual, GELU)) < tolerance(dtype)


@pytest.mark.parametrize("rule", [SILU, UNGATED], ids=["silu", "ungated"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_chosen_cut_gives_the_weighted_sum_tiny(
    tokens: int, rule: ExpertRule, dtype: torch.dtype, device: torch.device
) -> None:
    shape = (tokens, 4, 2, 64, 48)
    h, gate_up, down, weights, residual = make(shape, dtype, device, rule.parts)
    ids = spread("even", *shape[:3]).to(device)
    expected = reference(h, gate_up, down, ids, weights, residual, rule)
    out = float_experts(gate_up, down, rule).add_to(h, ids, weights, residual)
    assert relative_error(out, expected) < tolerance(dtype)


@pytest.mark.parametrize("cut", CUTS)
def test_nothing_to_add_to_is_zero_tiny(cut: str, dtype: torch.dtype, device: torch.device) -> None:
    shape = (5, 4, 2, 64, 48)
    h, gate_up, down, weights, residual = make(shape, dtype, device)
    ids = spread("even", *shape[:3]).to(device)
    layer = with_cut(float_experts(gate_up, down), CUTS[cut])
    expected = layer.add_to(h, ids, weights, torch.zeros_like(residual))
    assert torch.equal(layer.add_to(h, ids, weights, None), expected)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("tokens", [1, 3, 8, 32, 64, 256, 1000, 4097])
def test_the_chosen_cut_gives_the_weighted_sum(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    shape = (tokens, 128, 8, 2048, 768)
    h, gate_up, down, weights, residual = make(shape, dtype, device)
    ids = spread("even", *shape[:3]).to(device)
    expected = reference(h, gate_up, down, ids, weights, residual)
    out = float_experts(gate_up, down).add_to(h, ids, weights, residual)
    assert relative_error(out, expected) < tolerance(dtype)


def test_no_tokens_are_no_work_tiny(device: torch.device) -> None:
    layer = float_experts(torch.zeros(4, 32, 16, device=device), torch.zeros(4, 16, 16, device=device))
    residual = torch.zeros(0, 16, device=device)
    ids = torch.zeros(0, 2, dtype=torch.int32, device=device)
    assert layer.add_to(residual, ids, ids.float(), residual).shape == (0, 16)


def test_weights_that_do_not_belong_together_are_refused_tiny(device: torch.device) -> None:
    with pytest.raises(ValueError, match="does not belong"):
        float_experts(torch.zeros(4, 32, 16, device=device), torch.zeros(4, 16, 8, device=device))
