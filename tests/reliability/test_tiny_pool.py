"""A KV pool for three requests, and 40 at once: all finish with the tokens they get when alone."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import httpx2
import pytest

from tests.http.demo_server import DemoEngine, hosted_demo

pytestmark = pytest.mark.anyio

PAGE = 16
REQUESTS = 40
PROMPT, OUTPUT = (8, 40), (16, 48)  # tokens
AVERAGE = (sum(PROMPT) + sum(OUTPUT)) // 2
PAGES = -(-3 * AVERAGE // PAGE) + 1  # and the reserved one


def bodies() -> list[dict[str, Any]]:
    """Half of the requests are greedy, half sampled with a seed."""
    rng = random.Random(1)
    return [
        {
            "input_ids": [rng.randint(300, 3000) for _ in range(rng.randint(*PROMPT))],
            "max_tokens": rng.randint(*OUTPUT),
            "ignore_eos": True,
            "stream": False,
            **({"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}),
        }
        for number in range(REQUESTS)
    ]


async def ids(client: httpx2.AsyncClient, body: dict[str, Any]) -> list[int]:
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == body["max_tokens"]
    told: list[int] = answer["token_ids"]
    return told


@pytest.mark.slow
async def test_all_finish_with_the_same_ids() -> None:
    engine = DemoEngine(page_size=PAGE, num_pages=PAGES, max_num_seqs=REQUESTS, max_model_len=128, torch_threads=1)
    limits = httpx2.Limits(max_connections=REQUESTS)
    async with (
        hosted_demo(engine) as url,
        httpx2.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client,
    ):
        alone = [await ids(client, body) for body in bodies()]
        assert engine.stats().preemptions == 0
        engine.flush_cache()
        together = await asyncio.gather(*(ids(client, body) for body in bodies()))
        metrics = (await client.get("/metrics")).text
        assert together == alone
        assert int(float(re.findall(r"^aengine_preemptions_total (\S+)", metrics, re.M)[0])) > 2
        assert engine.stats().pages_used == 0
        engine.check_integrity()
