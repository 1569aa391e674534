"""Every benchmark can be imported: the interfaces and configs that it names exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import bench

MODULES = sorted(path.stem for path in Path(bench.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_is_imported(name: str) -> None:
    pytest.importorskip("triton")  # kernels are timed with it
    assert importlib.import_module(f"bench.{name}").__doc__
