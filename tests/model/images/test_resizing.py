"""Sizes are those that transformers' processors choose."""

from __future__ import annotations

import random

import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from aengine.errors import InvalidRequestError
from aengine.model.images.resizing import AreaRule, BudgetRule, EdgeRule, FixedRule, ResizeRule


class _Size:
    """An image of which only the size is known."""

    def __init__(self, height: int, width: int) -> None:
        self.shape = (3, height, width)


def sizes(count: int = 400) -> list[tuple[int, int]]:
    rng = random.Random(5)
    some = [(round(2 ** rng.uniform(0, 14)), round(2 ** rng.uniform(0, 14))) for _ in range(count)]
    return [*some, (1, 1), (1, 200), (200, 1), (1024, 1024), (4000, 3000), (3000, 4000), (8, 8), (12, 12), (2**14, 100)]


@pytest.mark.parametrize("limits", [(65536, 16777216), (3136, 1003520), (1, 4096)])
@pytest.mark.parametrize("unit", [28, 32])
def test_an_area_between_two_limits(unit: int, limits: tuple[int, int]) -> None:
    rule = AreaRule(unit, *limits)
    for width, height in sizes():
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(InvalidRequestError, match="200 times"):
                rule.plan(width, height)
            continue
        plan = rule.plan(width, height)
        assert (plan.height, plan.width) == smart_resize(height, width, unit, *limits), (width, height)
        assert (plan.rows * unit, plan.columns * unit) == (plan.height, plan.width)


@pytest.mark.parametrize("tokens", [70, 280, 1120])
def test_a_budget_of_tokens(tokens: int) -> None:
    rule = BudgetRule(48, 16, tokens)
    for width, height in sizes():
        expected = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
        plan = rule.plan(width, height)
        assert (plan.height, plan.width) == expected, (width, height)
        assert 1 <= plan.tokens <= tokens


@pytest.mark.parametrize(("unit", "longest"), [(28, 1540), (32, 1024)])
def test_a_longest_edge(unit: int, longest: int) -> None:
    rule = EdgeRule(unit, longest)
    for width, height in sizes():
        expected = get_resize_output_image_size(_Size(height, width), longest, unit, "channels_first")
        if 0 in expected:
            with pytest.raises(InvalidRequestError, match=f"its size is {width} x {height}, and one side vanishes"):
                rule.plan(width, height)
            continue
        plan = rule.plan(width, height)
        assert (plan.height, plan.width) == expected, (width, height)


def test_a_fixed_square() -> None:
    plan = FixedRule(56, 16).plan(3000, 20)
    assert (plan.width, plan.height, plan.tokens) == (896, 896, 256)


def test_an_image_that_cannot_be_resized_is_refused_with_its_size_and_a_remedy() -> None:
    with pytest.raises(InvalidRequestError, match=r"5000 x 1.*crop or pad") as refused:
        AreaRule(32, 65536, 16777216).plan(5000, 1)
    assert refused.value.param == "image"


RULES = [
    AreaRule(32, 65536, 16777216),
    AreaRule(28, 3136, 1003520),
    AreaRule(8, 64, 4096),
    AreaRule(32, 400_000, 400_000),
    BudgetRule(48, 16, 280),
    EdgeRule(28, 1540),
    EdgeRule(14, 1541),
    FixedRule(56, 16),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_no_image_is_larger_than_the_largest(rule: ResizeRule) -> None:
    largest, some = rule.largest(10**9), rule.largest(100)
    most = 0
    for width, height in [*sizes(), (3200, 16), (600, 3)]:
        try:
            plan = rule.plan(width, height)
        except InvalidRequestError:
            continue
        most = max(most, plan.tokens)
        assert plan.tokens <= largest.tokens, (width, height)
        assert plan.tokens <= rule.most_tokens
        assert plan.tokens > 100 or plan.tokens <= some.tokens
    assert largest.tokens < 1.1 * most + 130
