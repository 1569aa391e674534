"""Covering arrays: of all combinations of many parameters, few in which every two values still meet.

On a GPU nearly every combination of a kernel's parameters is one more that is compiled, and what is wrong with one is
hardly ever wrong with three values at once only. The interpreter compiles nothing and tries what it likes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

import pytest

Case = Mapping[str, str]  # parameter -> how its value prints


def covering(cases: Sequence[Case], strength: int) -> list[int]:
    """The places of cases with all combinations of so many parameters' values that there are in `cases`.

    Greedy: the case with the most that are new comes next, the last one among equals. That is the largest shape, and
    the narrow type.
    """
    combinations = [set(itertools.combinations(case.items(), min(strength, len(case)))) for case in cases]
    missing = set().union(*combinations)
    chosen = []
    while missing:
        best = max(reversed(range(len(cases))), key=lambda place: len(combinations[place] & missing))
        missing -= combinations[best]
        chosen.append(best)
    return sorted(chosen)


def thin_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, unless kernels are interpreted, the combinations that tests marked as `thinned` need not try.

    strength: of the covering that stays, 2 if not given. where: given a case's parameters, whether it may be tried.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    kept: set[pytest.Item] = set()
    marked = [item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("thinned")]
    for _, group in itertools.groupby(marked, key=lambda item: (item.path, item.originalname)):
        cases = list(group)
        options = cases[0].get_closest_marker("thinned").kwargs  # type: ignore[union-attr]
        if "where" in options:
            cases = [case for case in cases if options["where"](**case.callspec.params)]
        values = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        kept.update(cases[place] for place in covering(values, options.get("strength", 2)))
    if dropped := [item for item in marked if item not in kept]:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]
