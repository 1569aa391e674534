"""`GET /metrics`."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.fake_engine import IDLE
from tests.http.serving import serving

pytestmark = pytest.mark.anyio


async def test_the_engines_numbers_in_prometheus_format() -> None:
    async with serving() as server:
        server.engine.numbers = msgspec.structs.replace(IDLE, running=2, waiting=3, pages_used=4)
        response = await server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert values == {
        "aengine_ready": 1,
        "aengine_requests_running": 2,
        "aengine_requests_waiting": 3,
        "aengine_kv_pages": 99,
        "aengine_kv_pages_used": 4,
        "aengine_kv_pages_cached": 9,
        "aengine_kv_pages_free": 90,
        "aengine_prefix_hit_ratio": 0.25,
        "aengine_requests_total": 3,
        "aengine_steps_total": 7,
        "aengine_prompt_tokens_total": 40,
        "aengine_cached_tokens_total": 10,
        "aengine_computed_tokens_total": 50,
        "aengine_generated_tokens_total": 20,
        "aengine_preemptions_total": 1,
    }
