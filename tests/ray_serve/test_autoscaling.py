"""An engine is added when the queue is long."""

from __future__ import annotations

import asyncio
import time

import httpx2
import pytest

from tests.ray_serve.cluster import Cluster, cluster
from tests.ray_serve.test_replicas import stream

pytest.importorskip("ray")
pytestmark = [pytest.mark.anyio, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


async def crowded(running: Cluster, users: int, seconds: float) -> None:
    """Keep this many streams running until a second engine exists, or the time is over."""
    end = time.monotonic() + seconds
    limits = httpx2.Limits(max_connections=100)

    async with httpx2.AsyncClient(base_url=running.url, timeout=120, limits=limits) as client:

        async def user(number: int) -> None:
            while time.monotonic() < end and len(running.engines()) < 2:
                await stream(client, number, 300)

        await asyncio.gather(*map(user, range(users)))


async def test_more_requests_than_an_engine_should_have_bring_another() -> None:
    with cluster("replicas=1", "max_replicas=2", "target_requests=3") as running:
        assert len(running.engines()) == 1
        await crowded(running, users=12, seconds=120)
        assert len(running.engines()) == 2
