"""A pytest plugin for Triton's interpreter: runs few cases of each file, and checks that every kernel runs.

`AENGINE_TEST_KERNELS` names the packages, separated by commas, of which every function of `triton.jit` must run.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction

from aengine import kernels
from tests.covering import covering

CASES = 12  # of a file
# Functions with assembly, which the interpreter does not support, and functions that it replaces in reductions.
NOT_INTERPRETED = (
    "aengine.kernels.collective.lanes.",
    "aengine.kernels.collective.kernels.",
    "aengine.kernels.delta.decode.sums_of_three",
    "aengine.kernels.delta.decode.sums_of_two",
    "aengine.kernels.linear.int4.block._offsets_of_none",
    "aengine.kernels.linear.int4.block.scale_pairs",
    "aengine.kernels.linear.int4.block.offset",
    "aengine.kernels.linear.int4.row.parted",
)
met: set[str] = set()


def name_of(function: Any) -> str:
    return f"{function.fn.__module__}.{function.fn.__name__}"


def every_function() -> set[str]:
    """Return the names of all functions of `triton.jit` in the requested packages."""
    found = set()
    for module in pkgutil.walk_packages(kernels.__path__, "aengine.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            function = getattr(value, "jit", value)
            if isinstance(function, InterpretedFunction):
                found.add(name_of(function))
    packages = tuple(os.environ["AENGINE_TEST_KERNELS"].split(","))
    return {name for name in found if name.startswith(packages)}


def pytest_configure() -> None:
    for method in ("run", "__call__"):  # of kernels, and of functions that they call
        real = getattr(InterpretedFunction, method)

        def noted(self: Any, *args: Any, real: Any = real, **options: Any) -> Any:
            met.add(name_of(self))
            return real(self, *args, **options)

        setattr(InterpretedFunction, method, noted)


def may_be_tried(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return the cases that a test's `thinned` mark allows, or all if it only allows cases for a GPU."""
    marker = cases[0].get_closest_marker("thinned")
    where = marker.kwargs.get("where") if marker else None
    return [case for case in cases if where is None or where(**case.callspec.params)] or cases


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Keep about `CASES` cases of each file, at least one of each test, or the number of a test's mark.

    The tests of a file start alternately at the first and the last of their cases.
    """
    by_file: dict[object, dict[str, list[pytest.Function]]] = {}
    for item in items:
        by_file.setdefault(item.path, {}).setdefault(item.originalname, []).append(item)
    kept = set()
    for tests in by_file.values():
        for number, cases in enumerate(map(may_be_tried, tests.values())):
            in_turn = cases[:: -1 if number % 2 else 1]
            values = [
                {name: str(value) for name, value in case.callspec.params.items()}
                for case in in_turn
                if hasattr(case, "callspec")
            ]
            marker = cases[0].get_closest_marker("interpreted")
            most = marker.args[0] if marker else max(1, CASES // len(tests))
            chosen = covering(values, 1, most) if values else [0]
            kept.update(in_turn[place] for place in chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_sessionfinish(session: pytest.Session) -> None:
    missed = {name for name in every_function() - met if not name.startswith(NOT_INTERPRETED)}
    if missed and session.exitstatus == 0:
        print("\nnever ran:", *sorted(missed), sep="\n  ")
        session.exitstatus = 1
