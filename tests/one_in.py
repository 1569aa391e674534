"""Marks most parameters of a test as slow."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def one_in(count: int, values: Iterable[object]) -> list[object]:
    """Return the values, with all but every `count`-th marked as slow."""
    return [pytest.param(value, marks=pytest.mark.slow if place % count else ()) for place, value in enumerate(values)]
