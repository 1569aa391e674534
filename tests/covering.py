"""Selects few of all combinations of a test's parameters: all pairs of values, or values that take turns.

On a GPU nearly every combination of a kernel's parameters must be compiled, and a fault hardly ever needs three
specific values at once. The interpreter compiles nothing and can try more. The same is true of families of models and
the ways to run them: a fault in one way shows in several families.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Case = Mapping[str, str]  # parameter -> how its value prints


def covering(cases: Sequence[Case], strength: int, most: int | None = None) -> list[int]:
    """Return indices of cases that together contain every combination of `strength` values that `cases` has.

    If that takes more than `most` cases, return those that come nearest. The choice is greedy: the next case is the one
    with the most new combinations. Among equals it is the last, which has the largest shape and the narrowest type.
    """
    combinations = [set(itertools.combinations(case.items(), min(strength, len(case)))) for case in cases]
    missing = set().union(*combinations)
    chosen = []
    while missing and len(chosen) != most:
        best = max(reversed(range(len(cases))), key=lambda place: len(combinations[place] & missing))
        missing -= combinations[best]
        chosen.append(best)
    return sorted(chosen)


def turns(
    cases: Sequence[Case], name: str, count: int = 1, always: Sequence[str] = (), every: int = 1, each: bool = False
) -> list[int]:
    """Return indices of cases in which the values of the parameter `name` take turns.

    Each combination of the other parameters gets the values in `always`. The first of every `every` combinations gets
    `count` more. Values that have met the fewest other values come first, then the least frequent ones. each: values
    that have not had a turn then get a case, in the combinations with the fewest values.
    """
    groups: dict[Any, list[int]] = {}
    chosen = []
    for place, case in enumerate(cases):
        if case[name] in always:
            chosen.append(place)
        else:
            groups.setdefault(tuple(item for item in case.items() if item[0] != name), []).append(place)
    left = {case[name] for case in cases}.difference(always) if each else set()
    met: set[tuple[str, tuple[str, str]]] = set()
    used: Counter[str] = Counter()
    for others, places in itertools.islice(groups.items(), 0, None, every):
        for _ in range(min(count, len(places))):
            best = min(
                places,
                key=lambda place: (sum((cases[place][name], one) in met for one in others), used[cases[place][name]]),
            )
            met.update((cases[best][name], one) for one in others)
            used[cases[best][name]] += 1
            places.remove(best)
            chosen.append(best)
    for value in sorted(left.difference(used)):
        places = max(
            groups.values(), key=lambda places: (any(cases[place][name] == value for place in places), len(places))
        )
        best = next(place for place in places if cases[place][name] == value)
        places.remove(best)
        chosen.append(best)
    return sorted(chosen)


def thin_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect combinations of tests that are marked `thinned` or `turns`. Quick cases stay.

    `thinned` applies unless kernels are interpreted. Its arguments are `strength` (of the covering, 2 by default) and
    `where`, a function that returns whether a case with these parameters may run. `turns` has the arguments of `turns`.
    """
    by_test: dict[object, list[pytest.Function]] = {}  # cases of one need not follow one another
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and _marker(item) is not None:
            by_test.setdefault((item.path, item.originalname), []).append(item)
    kept: set[pytest.Item] = set()
    for marked in by_test.values():
        marker = _marker(marked[0])
        assert marker is not None
        if marker.name == "turns":
            name = marker.args[0]
            cases = [case for case in marked if name in case.callspec.params and case.get_closest_marker("slow")]
            kept.update(set(marked) - set(cases))
            kept.update(cases[place] for place in turns(_values(cases), *marker.args, **marker.kwargs))
        else:
            where = marker.kwargs.get("where", lambda **_: True)
            cases = [case for case in marked if where(**case.callspec.params)]
            kept.update(cases[place] for place in covering(_values(cases), marker.kwargs.get("strength", 2)))
    if dropped := [item for marked in by_test.values() for item in marked if item not in kept]:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]


def _marker(item: pytest.Item) -> pytest.Mark | None:
    """How the item's combinations are thinned out, if they are: `thinned` goes before `turns`."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return item.get_closest_marker("turns")
    return item.get_closest_marker("thinned") or item.get_closest_marker("turns")


def _values(cases: Sequence[pytest.Function]) -> list[Case]:
    return [{name: str(value) for name, value in case.callspec.params.items()} for case in cases]
