"""What a GPU tries of all combinations: few of them, and everything in some."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering

AXES = {"cut": "abcd", "form": "vwxyz", "dtype": "fn", "shape": "123"}
CASES = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def met(cases: list[dict[str, str]], strength: int) -> set[tuple[tuple[str, str], ...]]:
    return {combination for case in cases for combination in itertools.combinations(case.items(), strength)}


@pytest.mark.parametrize(("strength", "count"), [(1, 5), (2, 20), (3, 60), (4, 120)])
def test_all_combinations_of_so_many_values_stay_in_hardly_more_cases_than_they_take(strength: int, count: int) -> None:
    chosen = [CASES[place] for place in covering(CASES, strength)]
    assert met(chosen, strength) == met(CASES, strength)
    assert count <= len(chosen) <= 1.25 * count


def test_a_single_parameter_keeps_all_its_values() -> None:
    assert covering([{"m": "1"}, {"m": "2"}], 2) == [0, 1]
    assert covering([], 2) == []
