"""The load for routers."""

from __future__ import annotations

import httpx2
import pytest

from tests.http.demo_server import DemoEngine, hosted_demo

pytestmark = pytest.mark.anyio


async def test_the_load_counts_requests_and_their_tokens() -> None:
    engine = DemoEngine()
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
    async with hosted_demo(engine) as url, httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        steps = engine._serving().loop
        assert (await client.get("/load")).json() == {"server_load": 0}
        async with client.stream("POST", "/generate", json=body) as response:
            lines = response.aiter_lines()  # kept, because the connection is closed with it
            await anext(lines)
            await steps.pause()  # so that the request cannot end
            assert (await client.get("/load")).json() == {"server_load": 1}
            (load,) = (await client.get("/get_load")).json()
            assert (load["dp_rank"], load["num_reqs"], load["num_waiting_reqs"]) == (0, 1, 0)
            assert load["num_tokens"] > 0
            (load,) = (await client.get("/v1/loads?include=core")).json()["loads"]
            assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (1, 0, 1)
            assert 0 < load["token_usage"] <= load["num_used_tokens"] / load["max_total_num_tokens"] + 1e-3
            steps.resume()
