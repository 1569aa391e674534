"""The demo model behind a real hypercorn, once for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.http.demo_server import demo_server


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    with demo_server() as url:
        yield url


@pytest.fixture
def demo(demo_url: str) -> Iterator[httpx2.Client]:
    """A client of it, once nothing runs there any more of what the test before has left."""
    with httpx2.Client(base_url=demo_url, timeout=30, trust_env=False) as client:
        while client.get("/load").json()["server_load"]:
            pass
        yield client
