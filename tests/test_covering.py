"""The selected combinations are few, and every value occurs in some."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.covering import covering, turns

AXES = {"cut": "abcd", "form": "vwxyz", "dtype": "fn", "shape": "123"}
CASES = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def met(cases: list[dict[str, str]], strength: int) -> set[tuple[tuple[str, str], ...]]:
    return {combination for case in cases for combination in itertools.combinations(case.items(), strength)}


@pytest.mark.parametrize(("strength", "count"), [(1, 5), (2, 20), (3, 60), (4, 120)])
def test_all_combinations_of_so_many_values_stay_in_hardly_more_cases_than_they_take(strength: int, count: int) -> None:
    chosen = [CASES[place] for place in covering(CASES, strength)]
    assert met(chosen, strength) == met(CASES, strength)
    assert count <= len(chosen) <= 1.25 * count


def test_of_few_cases_none_has_a_value_of_another() -> None:
    first, second = (CASES[place] for place in covering(CASES, 1, most=2))
    assert not set(first.items()) & set(second.items())


def test_a_single_parameter_keeps_all_its_values() -> None:
    assert covering([{"m": "1"}, {"m": "2"}], 2) == [0, 1]
    assert covering([], 2) == []


def test_values_take_turns_and_each_meets_every_value_of_the_others() -> None:
    chosen = [CASES[place] for place in turns(CASES, "cut")]
    others = [tuple(case.items())[1:] for case in chosen]
    assert len(others) == len(set(others)) == len(CASES) // 4
    assert met(chosen, 2) == met(CASES, 2)


@pytest.mark.parametrize(("count", "always", "expected"), [(2, (), 2), (1, ("a",), 2), (9, (), 4)])
def test_more_than_one_value_a_turn_and_some_in_all(count: int, always: tuple[str, ...], expected: int) -> None:
    places = turns(CASES, "cut", count, always)
    assert places == sorted(set(places))
    assert len(places) == len(CASES) // 4 * expected
    assert sum(CASES[place]["cut"] == "a" for place in places) >= (len(CASES) // 4 if always else 1)


def test_each_value_has_a_turn_even_if_there_are_fewer_combinations() -> None:
    few = [{"cut": cut, "n": n} for n in ("1", "2") for cut in "abcd" if (cut, n) != ("d", "1")]
    chosen = [few[place] for place in turns(few, "cut", always=("a",), every=2, each=True)]
    assert Counter(case["cut"] for case in chosen) == {"a": 2, "b": 1, "c": 1, "d": 1}
    assert len({case["n"] for case in chosen if case["cut"] != "a"}) == 2


def test_every_third_combination_has_a_value_beside_those_in_all() -> None:
    chosen = [CASES[place] for place in turns(CASES, "cut", always=("a",), every=3)]
    assert Counter(case["cut"] for case in chosen) == {"a": 30, "b": 4, "c": 3, "d": 3}
