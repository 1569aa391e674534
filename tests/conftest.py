"""Async tests run on asyncio, the loop that the engine is built on."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: while one worker is busy with a test of minutes, the other does the rest."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
