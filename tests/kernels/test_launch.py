"""Where a search finds that kernels change; that needs no device."""

from __future__ import annotations

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from aengine.kernels.launch import find_borders


@given(st.sets(st.integers(1, 40), max_size=20), st.integers(1, 2000))
def test_borders_are_found_where_kinds_hold_long_enough(widths: set[int], most: int) -> None:
    expected, last = [], 0
    for width in sorted(widths):
        last += max(width, last // 32 + 1)
        expected.append(last)
    found = find_borders(lambda rows: bisect.bisect_left(expected, rows) % 2, most)
    assert found == [border for border in expected if border < most]


def test_a_kind_that_comes_back_has_two_borders() -> None:
    assert find_borders(lambda rows: 100 < rows <= 104, 8192) == [100, 104]
    assert find_borders(lambda rows: 1, 8192) == []
