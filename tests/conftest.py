"""Async tests run on asyncio, the loop that the engine is built on."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
