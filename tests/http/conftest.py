"""The demo model in a real hypercorn, shared by all tests that only send requests to it."""

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
    """A client of the demo server, after the requests of the previous test have ended."""
    with httpx2.Client(base_url=demo_url, timeout=30, trust_env=False) as client:
        while client.get("/load").json()["server_load"]:
            pass
        yield client
