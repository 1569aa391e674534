"""Parameters of a test of which one in a few is quick."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def one_in(count: int, values: Iterable[object]) -> list[object]:
    """Each of the values, all but one in `count` of them marked as slow."""
    return [pytest.param(value, marks=pytest.mark.slow if place % count else ()) for place, value in enumerate(values)]
