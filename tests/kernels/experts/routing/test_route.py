"""The router's kernel against the reference on float64 logits."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import tolerance

pytest.importorskip("triton")

from aengine.kernels.experts.routing.route import Route, RouteConfig
from aengine.kernels.experts.routing.router import Router, route_reference

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")]

RULES = {
    "softmax": Router(3, "softmax"),
    "renormalised": Router(4, "softmax", True),
    "of_chosen": Router(3, "softmax_of_chosen", scale=0.5),
    "sigmoid": Router(2, "sigmoid", True, scale=2.5),
    "sigmoid_of_chosen": Router(2, "sigmoid_of_chosen"),
    "groups": Router(3, "sigmoid", True, 4, 2, "top2", 2.5),
    "best": Router(2, "softmax", False, 4, 2, "max"),
    "all": Router(20, "softmax"),
    "sparsemixer": Router(2, "sparsemixer", jitter=0.2),
}
INF, NAN = float("inf"), float("nan")
CUTS = {
    "split": RouteConfig(16, 16, 2, 1, 4),
    "padded": RouteConfig(16, 32, 2, 1, 4),
    "loop": RouteConfig(16, 16, 1, 2, 4),
}


def check(rule: Router, tokens: int, experts: int, hidden: int, dtype: torch.dtype, device: torch.device,
          cut: RouteConfig | None = None) -> None:  # fmt: skip
    """Check that ids are equal if the reference's choice does not depend on rounding. The hidden states make it
    clear.
    """
    # Logits of a few units, because the error of a weight grows with them.
    weight = (torch.randn(experts, hidden, device=device) * 4 / hidden**0.5).to(dtype)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    bias, correction = (torch.randn(experts, device=device) * 0.1 for _ in range(2))
    logits = (x.double() @ weight.double().t() + bias.double()).float()
    route = Route()
    ids, weights = route(x, weight, rule, bias, correction, config=cut)
    expected_ids, expected = route_reference(logits, rule, correction)
    same = (ids == expected_ids).all(dim=1)
    assert same.double().mean() > 0.98
    assert ids.dtype == torch.int32
    torch.testing.assert_close(weights[same], expected[same], rtol=1e-4, atol=1e-5)
    again = route(x, weight, rule, bias, correction, config=cut)
    assert torch.equal(ids, again[0])
    assert torch.equal(weights, again[1])


@pytest.mark.thinned
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", CUTS)
def test_every_rule_chooses_as_the_reference_tiny(
    rule: str, cut: str, dtype: torch.dtype, device: torch.device
) -> None:
    check(RULES[rule], 3, 20, 32, dtype, device, CUTS[cut])


@pytest.mark.thinned(where=lambda tokens, experts, **_: experts == 128 or tokens in (1, 16384))
@pytest.mark.parametrize("tokens", [1, 17, 64, 65, 1000, 16384])
@pytest.mark.parametrize(
    ("experts", "hidden"), [(128, 2048), (60, 2048), (32, 2880), (8, 4096), (256, 7168), (384, 7168), (512, 1024)]
)
def test_the_chosen_cut_chooses_as_the_reference(
    tokens: int, experts: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    groups = Router(8, "sigmoid", True, 8, 4) if experts == 256 else Router(min(8, experts), "softmax", True)
    check(groups, tokens, experts, hidden, dtype, device)


def test_a_router_of_another_dtype_is_widened_tiny(device: torch.device) -> None:
    x, weight = torch.randn(2, 32, device=device).half(), torch.randn(4, 32, device=device)
    ids, weights = Route()(x, weight, Router(2))
    expected_ids, expected = route_reference((x.double() @ weight.double().t()).float(), Router(2))
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=tolerance(torch.float32), atol=1e-6)


def test_logits_that_are_not_numbers_lead_nowhere_else_tiny(device: torch.device) -> None:
    x = torch.full((1, 16), float("nan"), device=device)
    ids, _ = Route()(x, torch.ones(5, 16, device=device), Router(3))
    assert ids.tolist() == [[0, 1, 2]]


def test_a_group_is_as_good_as_its_best_two_together_tiny(device: torch.device) -> None:
    """0.99 and 0.05 are more than 0.5 twice."""
    x, bias = torch.zeros(1, 16, device=device), torch.tensor([4.6, -2.9, 0.0, 0.0], device=device)
    ids, _ = Route()(x, torch.ones(4, 16, device=device), Router(2, "sigmoid", False, 2, 1, "top2"), bias)
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("logits", "chosen"),
    [
        ([0.0, 0.0, 0.0, -1.0, 0.0], [0, 1, 2]),
        ([-3.0, -2.0, 1.0, -2.0, 0.5], [2, 4, 1]),
        ([INF, NAN, -INF, INF, NAN], [0, 3, 1]),
        ([-INF, NAN, 2.0, -INF, NAN], [2, 0, 1]),
    ],
)
def test_equal_scores_are_ordered_by_ids_and_no_expert_is_chosen_twice_tiny(
    logits: list[float], chosen: list[int], device: torch.device
) -> None:
    """NaN is the least score and comes last."""
    x, bias = torch.zeros(1, 16, device=device), torch.tensor(logits, device=device)
    ids, _ = Route()(x, torch.ones(5, 16, device=device), Router(3, "softmax_of_chosen"), bias)
    assert ids.tolist() == [chosen]


def test_among_equals_the_lowest_id_wins_tiny(device: torch.device) -> None:
    ids, _ = Route()(torch.zeros(2, 16, device=device), torch.zeros(5, 16, device=device), Router(3))
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_too_many_experts_are_refused_tiny(device: torch.device) -> None:
    with pytest.raises(ValueError, match="512 at most"):
        Route()(torch.zeros(1, 16, device=device), torch.zeros(513, 16, device=device), Router(2))


def test_padding_goes_nowhere_tiny(device: torch.device) -> None:
    x, weight = torch.randn(3, 16, device=device), torch.randn(5, 16, device=device)
    slots = torch.tensor([16, 15, 40], device=device)
    ids, _ = Route()(x, weight, Router(2), slots=slots, first_slot=16)
    expected, _ = Route()(x, weight, Router(2))
    assert ids[1].tolist() == [-1, -1]
    assert torch.equal(ids[::2], expected[::2])
