"""`GET /metrics`."""

from __future__ import annotations

import time

import httpx2
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aengine.http.loop_delay import LoopDelay
from aengine.latency import Histogram
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
        if family.type in ("gauge", "counter") and not sample.labels
    }
    assert values.pop("aengine_loop_delay_seconds") < 1
    assert values == {
        "aengine_ready": 1,
        "aengine_sends_blocked": 0,
        "aengine_stalled_readers_total": 0,
        "aengine_requests_running": 2,
        "aengine_requests_waiting": 3,
        "aengine_kv_pages": 99,
        "aengine_kv_pages_used": 4,
        "aengine_kv_pages_cached": 9,
        "aengine_kv_pages_free": 90,
        "aengine_kv_usage_ratio": pytest.approx(4 / 99),
        "aengine_prefix_hit_ratio": 0.25,
        "aengine_requests_total": 3,
        "aengine_steps_total": 7,
        "aengine_prompt_tokens_total": 40,
        "aengine_cached_tokens_total": 10,
        "aengine_computed_tokens_total": 50,
        "aengine_generated_tokens_total": 20,
        "aengine_preemptions_total": 1,
    }


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and label value."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_of_the_demo_model_are_timed(demo: httpx2.Client) -> None:
    before = samples(demo.get("/metrics").text)
    whole = {"prompt": "One two three", "max_tokens": 5, "ignore_eos": True, "n": 2}
    demo.post("/v1/completions", json=whole)
    with demo.stream("POST", "/generate", json={"prompt": "a", "ignore_eos": True, "max_tokens": 1000}) as response:
        next(response.iter_lines())
    while (after := samples(demo.get("/metrics").text))["aengine_requests_running", ""]:
        pass

    def grown(name: str, label: str = "") -> float:
        return after[name, label] - before[name, label]

    assert grown("aengine_outputs_total", "length") == 2
    assert grown("aengine_outputs_total", "abort") == 1
    assert grown("aengine_outputs_total", "error") == 0
    assert grown("aengine_requests_total") == 2
    assert grown("aengine_time_to_first_token_seconds_count") == 2
    assert grown("aengine_request_queue_time_seconds_count") == 2
    assert grown("aengine_request_latency_seconds_count") == 1
    tokens = grown("aengine_generated_tokens_total")
    assert 8 <= grown("aengine_inter_token_latency_seconds_count") <= tokens - 3
    for name in ("time_to_first_token", "inter_token_latency", "request_latency", "request_queue_time"):
        name = f"aengine_{name}_seconds"
        assert after[f"{name}_bucket", "+Inf"] == after[f"{name}_count", ""]
        assert grown(f"{name}_sum") > 0
    queued, first, all_of_it = (
        grown(f"aengine_{name}_seconds_sum")
        for name in ("request_queue_time", "time_to_first_token", "request_latency")
    )
    assert queued < first < queued + first + all_of_it


def test_a_histogram_counts_by_the_smallest_bound_not_exceeded() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(seconds)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 14.0


def test_the_worst_delay_is_remembered_for_a_while() -> None:
    delay = LoopDelay()
    now = time.monotonic()
    delay.note(0.5, now)
    delay.note(0.1, now + 61)
    assert delay.worst == 0.5
    delay.note(0.2, now + 123)
    assert delay.worst == 0.2


async def test_a_blocked_loop_shows() -> None:
    async with serving() as server:
        time.sleep(0.2)  # noqa: ASYNC251 - that is what shall show
        text = (await server.client.get("/metrics")).text
    assert samples(text)["aengine_loop_delay_seconds", ""] > 0.1
