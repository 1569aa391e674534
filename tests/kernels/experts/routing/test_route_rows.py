"""The norm, the router and the choice for a few rows, in one launch, against the norm and the reference router."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import relative_error, tolerance

pytest.importorskip("triton")

from aengine.kernels.elementwise import TritonNorm
from aengine.kernels.experts.routing import route_rows
from aengine.kernels.experts.routing.route import Route, TritonRoute
from aengine.kernels.experts.routing.route_rows import MAX_TOKENS, RouteRows
from aengine.kernels.experts.routing.router import Router, route_reference
from aengine.kernels.launch import power_of_two

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")]

RULES = {
    "softmax": Router(3, "softmax"),
    "renormalised": Router(4, "softmax", True),
    "of_chosen": Router(3, "softmax_of_chosen", scale=0.5),
    "sigmoid": Router(2, "sigmoid", True, scale=2.5),
    "sigmoid_of_chosen": Router(2, "sigmoid_of_chosen"),
    "all": Router(20, "softmax"),
}
SHAPES = [  # tokens, experts, hidden
    pytest.param((1, 20, 64), id="tiny"),
    pytest.param((3, 20, 40), id="tiny-several"),
    pytest.param((1, 128, 2048), id="a-model's"),
    pytest.param((4, 60, 4096), id="another's"),
]


def make(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, TritonNorm, Tensor]:
    """Return x, a norm, the router's weight."""
    tokens, experts, hidden = shape
    x, scale, weight = (
        torch.randn(*s, device=device).to(dtype) for s in ((tokens, hidden), (hidden,), (experts, hidden))
    )
    return x * 3, TritonNorm(scale, 1e-5), weight


@pytest.mark.thinned
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [None, 4])
def test_rows_are_normed_and_sent_as_the_reference_does(
    shape: tuple[int, int, int],
    rule: str,
    block: int | None,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if block is not None:  # experts of a program
        monkeypatch.setattr(route_rows, "PROGRAM", block * power_of_two(shape[2]))
    x, norm, weight = make(shape, dtype, device)
    correction = torch.randn(shape[1], device=device) * 0.1
    bias = torch.randn(shape[1], device=device).to(dtype) * 3 if rule == "of_chosen" else None
    route, slots = RouteRows(), torch.full((shape[0],), 16, device=device)
    h, ids, weights = route(x, norm, weight, RULES[rule], correction, bias, slots=slots, first_slot=16)
    normed = norm(x)
    assert relative_error(h, normed) < tolerance(dtype)
    logits = F.linear(h.double(), weight.double(), None if bias is None else bias.double()).float()
    expected_ids, expected = route_reference(logits, RULES[rule], correction)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    again = route(x, norm, weight, RULES[rule], correction, bias, slots=slots, first_slot=16)
    assert all(torch.equal(*pair) for pair in zip((h, ids, weights), again))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "all"])
def test_scores_and_corrections_of_one_size_give_every_place_to_one_expert(rule: str, device: torch.device) -> None:
    """Choices that differ by the rounding of a sum may swap places, but no place is left empty."""
    for _ in range(20):
        x, norm, weight = make((MAX_TOKENS, 128, 2048), torch.bfloat16, device)
        weight /= 32  # logits of a few units, so that few scores are 0
        correction, slots = torch.randn(128, device=device) * 0.1, torch.full((MAX_TOKENS,), 16, device=device)
        h, ids, _ = RouteRows()(x, norm, weight, RULES[rule], correction, slots=slots, first_slot=16)
        logits = F.linear(h.double(), weight.double()).float()
        expected, _ = route_reference(logits, RULES[rule], correction)
        scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(RULES[rule].scoring, logits)
        choice = scores + correction
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        torch.testing.assert_close(choice.gather(1, ids.long()), choice.gather(1, expected.long()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
def test_both_routers_of_a_layer_choose_alike_tiny(with_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, norm, weight = make((6, 20, 64), dtype, device)
    slots = torch.tensor([16, 15, 40, 16, 3, 16], device=device)
    bias = torch.randn(20, device=device).to(dtype) * 3 if with_bias else None
    layer = TritonRoute(weight, None, Router(3, "softmax", True), Route(), RouteRows(), bias)
    together = layer.after(norm, x, slots, 16)
    for one, row in zip(zip(*together), range(6)):
        alone = layer.after(norm, x[row : row + 1], slots[row : row + 1], 16)
        for mine, theirs in zip(one, alone):
            torch.testing.assert_close(mine, theirs[0], rtol=1e-3, atol=1e-5)


def test_logits_that_are_not_numbers_lead_nowhere_else_tiny(device: torch.device) -> None:
    x, norm, weight = make((1, 5, 16), torch.float32, device)
    _, ids, weights = RouteRows()(x * float("nan"), norm, weight, Router(3), slots=slots_of(16, device), first_slot=16)
    assert ids.tolist() == [[0, 1, 2]]
    assert weights.isnan().all()


def test_among_equals_the_lowest_id_wins_tiny(device: torch.device) -> None:
    x, norm, weight = make((1, 5, 16), torch.float32, device)
    _, ids, _ = RouteRows()(x, norm, weight * 0, Router(3), slots=slots_of(16, device), first_slot=16)
    assert ids.tolist() == [[0, 1, 2]]


def test_padding_goes_nowhere_tiny(device: torch.device) -> None:
    x, norm, weight = make((3, 5, 16), torch.float32, device)
    _, ids, _ = RouteRows()(x, norm, weight, Router(2), slots=slots_of(16, device, 15, 40), first_slot=16)
    assert [row == [-1, -1] for row in ids.tolist()] == [False, True, False]


def slots_of(first: int, device: torch.device, *more: int) -> Tensor:
    return torch.tensor([first, *more], device=device)


def test_what_does_not_fit_is_refused_tiny(device: torch.device) -> None:
    x, norm, weight = make((MAX_TOKENS, 8, 16), torch.float32, device)
    router, route = Router(2), RouteRows()
    assert route.supports(x, weight, router)
    grouped = replace(router, groups=2)
    refused = [
        (x.repeat(2, 1), weight, router),
        (x[:0], weight, router),
        (x, weight.repeat(64, 1), router),
        (x, weight, grouped),
    ]
    assert not any(route.supports(*those) for those in refused)
    with pytest.raises(ValueError, match="not for this kernel"):
        route(x.repeat(2, 1), norm, weight, router, slots=slots_of(16, device), first_slot=16)


def test_all_experts_are_chosen_though_one_is_no_number_tiny(device: torch.device) -> None:
    x, norm, weight = make((1, 5, 16), torch.float32, device)
    bias = torch.tensor([0.0, 1.0, float("nan"), 3.0, 2.0], device=device)
    slots = slots_of(16, device)
    _, ids, _ = RouteRows()(x, norm, weight * 0, Router(5, "softmax_of_chosen"), None, bias, slots=slots, first_slot=16)
    assert ids.tolist() == [[3, 4, 1, 0, 2]]
