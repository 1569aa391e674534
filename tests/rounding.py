"""Compares results of two runs of a model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest


def near(result: Any) -> Any:
    """Returns plain data that equals another run's result up to rounding of floats.

    A step may carry drafts or not, and more or fewer sequences. That depends on time, and moves the last bits.
    """
    data = msgspec.to_builtins(result)
    if isinstance(data, float):
        return pytest.approx(data, abs=1e-4)
    if isinstance(data, dict):
        return {name: near(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(near(value) for value in data)
    return data
