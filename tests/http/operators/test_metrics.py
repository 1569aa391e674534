"""`GET /metrics`."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx2
import msgspec
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from aengine.http.loop_delay import LoopDelay
from aengine.latency import Histogram
from aengine.types import DeviceMemory
from tests.http.fake_engine import IDLE, FakeEngine
from tests.http.serving import Server, serving

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
        if family.type in ("gauge", "counter") and not sample.labels and sample.name.startswith("aengine_")
    }
    assert 0 <= values.pop("aengine_loop_delay_seconds") < 60
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


async def test_figures_of_the_cache_tiers() -> None:
    async with serving() as server:
        server.engine.numbers = msgspec.structs.replace(
            IDLE,
            cached_tokens=100,
            cached_host_tokens=60,
            cached_disk_tokens=30,
            host_pages_total=50,
            host_pages=20,
            host_page_bytes=1000,
            host_stores=7,
            host_loads=6,
            host_misses=5,
            disk_bytes=4000,
            disk_stores=3,
            disk_loads=2,
        )
        response = await server.client.get("/metrics")
    values = {
        (sample.name, sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if "_tier_" in sample.name or "host_cache" in sample.name
    }
    assert {key: value for key, value in values.items() if not key[0].endswith("_created")} == {
        ("aengine_tier_cached_tokens_total", "device"): 10,
        ("aengine_tier_cached_tokens_total", "host"): 60,
        ("aengine_tier_cached_tokens_total", "disk"): 30,
        ("aengine_tier_bytes", "host"): 20_000,
        ("aengine_tier_bytes", "disk"): 4000,
        ("aengine_host_cache_bytes", ""): 50_000,
        ("aengine_tier_stores_total", "host"): 7,
        ("aengine_tier_stores_total", "disk"): 3,
        ("aengine_tier_loads_total", "host"): 6,
        ("aengine_tier_loads_total", "disk"): 2,
        ("aengine_host_cache_misses_total", ""): 5,
    }


async def test_memory_of_every_gpu() -> None:
    async with serving() as server:
        server.engine.gpus = [DeviceMemory(f"cuda:{rank}", "H200", 10 + rank, 140) for rank in range(2)]
        text = (await server.client.get("/metrics")).text
    for rank in range(2):
        labels = f'{{device="cuda:{rank}",name="H200"}}'
        assert f"aengine_device_memory_used_bytes{labels} {10 + rank}.0" in text
        assert f"aengine_device_memory_total_bytes{labels} 140.0" in text


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="prometheus-client reads /proc")
async def test_memory_cpu_time_and_files_of_the_process() -> None:
    async with serving() as server:
        reported = samples((await server.client.get("/metrics")).text)
        with ExitStack() as files:
            for _ in range(20):
                files.enter_context(socket.socket())
            more = samples((await server.client.get("/metrics")).text)
    assert more["process_open_fds", ""] - reported["process_open_fds", ""] >= 20
    assert reported["process_cpu_seconds_total", ""] > 0
    assert reported["process_resident_memory_bytes", ""] > 2**20
    assert {name for name, _ in reported} >= {
        "process_virtual_memory_bytes",
        "process_start_time_seconds",
        "process_max_fds",
    }


async def answers_counted(server: Server) -> dict[tuple[str, str, str], float]:
    text = (await server.client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = families["aengine_http_responses"].samples if "aengine_http_responses" in families else []
    return {(one.labels["method"], one.labels["path"], one.labels["status"]): one.value for one in found}


async def test_answers_are_counted_by_method_path_and_status() -> None:
    async with serving(api_keys=("key",)) as server:
        known = {"Authorization": "Bearer key"}
        await server.post("/generate", prompt="x")
        server.client.headers.update(known)
        for _ in range(2):
            await server.post("/generate", prompt="x")
        await server.post("/generate", prompt=7)
        await server.client.get("/generate")
        await server.client.get("/v1/models/fake")
        await server.client.get("/v1/models/another/one")
        await server.client.get("/nowhere/7")
        await server.client.get("/nowhere/8")
        await server.client.request("BREW", "/health")
        counted = await answers_counted(server)
        again = await answers_counted(server)
    assert counted == {
        ("POST", "/generate", "401"): 1,
        ("POST", "/generate", "200"): 2,
        ("POST", "/generate", "400"): 1,
        ("GET", "/generate", "405"): 1,
        ("GET", "/v1/models/{model:path}", "200"): 1,
        ("GET", "/v1/models/{model:path}", "404"): 1,
        ("GET", "other", "404"): 2,
        ("other", "/health", "405"): 1,
    }
    assert again == counted | {("GET", "/metrics", "200"): 1}


async def test_a_client_that_leaves_before_the_answer_is_counted() -> None:
    engine = FakeEngine(held=True)
    async with serving(engine) as server:
        raw = await server.connect("/generate", prompt="x", stream=False)
        stream = await engine.next_stream()
        raw.close()
        async with asyncio.timeout(30):
            await stream.aborted.wait()
            while len(counted := await answers_counted(server)) < 2:  # the request and GET /metrics
                pass
    assert counted[("POST", "/generate", "499")] == 1


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0", "9.9.9", ""])
async def test_the_content_type_names_the_version_that_is_written(version: str) -> None:
    async with serving() as server:
        requested = f"application/openmetrics-text;version={version}"
        response = await server.client.get("/metrics", headers={"Accept": requested})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert [*openmetrics.text_string_to_metric_families(response.text)]


async def test_openmetrics_on_request() -> None:
    async with serving(vllm_metrics=True) as server:
        await server.post("/generate", prompt="x")
        requested = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
        response = await server.client.get("/metrics", headers={"Accept": requested})
        plain = await server.client.get("/metrics", headers={"Accept": "text/plain"})
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert response.text.endswith("\n# EOF\n")
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(response.text)}
    assert families["aengine_http_responses"].samples[0].name == "aengine_http_responses_total"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    names = {one.name for family in families.values() for one in family.samples}
    assert "vllm:num_requests_running" in names
    assert names == {name for name, _ in samples(plain.text)}
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# EOF" not in plain.text


@pytest.mark.parametrize(
    "requested", ["application/openmetrics-text;version=abc", "text/plain;version=1.0.x", "text/plain;version="]
)
async def test_a_version_that_is_none_gets_the_plain_text(requested: str) -> None:
    async with serving() as server:
        response = await server.client.get("/metrics", headers={"Accept": requested})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_names_that_routers_of_vllm_read() -> None:
    """Each has the value of aengine's own metric."""
    async with serving(served_model_name="mine", vllm_metrics=True) as server:
        latencies = server.engine.latencies
        for histogram in (latencies.first_token, latencies.inter_token, latencies.whole, latencies.queued):
            histogram.observe(len(histogram.bounds) / 7)
        latencies.ended["stop"] = 5
        server.engine.numbers = msgspec.structs.replace(IDLE, running=2, waiting=3, pages_used=4)
        text = (await server.client.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:") and sample.name != "vllm:cache_config_info":
                assert labels.pop("model_name") == "mine"
                assert labels.pop("engine") == "0"
            found[sample.name, *labels.values()] = sample.value
    pairs = {
        "num_requests_running": "requests_running",
        "num_requests_waiting": "requests_waiting",
        "kv_cache_usage_perc": "kv_usage_ratio",
        "gpu_cache_usage_perc": "kv_usage_ratio",
        "prompt_tokens_total": "prompt_tokens_total",
        "generation_tokens_total": "generated_tokens_total",
        "num_preemptions_total": "preemptions_total",
        "prefix_cache_queries_total": "prompt_tokens_total",
        "prefix_cache_hits_total": "cached_tokens_total",
        "gpu_prefix_cache_queries_total": "prompt_tokens_total",
        "gpu_prefix_cache_hits_total": "cached_tokens_total",
        "time_to_first_token_seconds_sum": "time_to_first_token_seconds_sum",
        "inter_token_latency_seconds_sum": "inter_token_latency_seconds_sum",
        "time_per_output_token_seconds_sum": "inter_token_latency_seconds_sum",
        "e2e_request_latency_seconds_sum": "request_latency_seconds_sum",
        "request_queue_time_seconds_sum": "request_queue_time_seconds_sum",
    }
    for theirs, ours in pairs.items():
        assert found[f"vllm:{theirs}",] == found[f"aengine_{ours}",], theirs
    assert found["vllm:request_success_total", "stop"] == 5
    assert found["vllm:time_to_first_token_seconds_bucket", "+Inf"] == 1
    assert found["vllm:cache_config_info", "16", "0", "99"] == 1  # block_size, engine, num_gpu_blocks


async def test_vllms_names_are_off_by_default() -> None:
    async with serving() as server:
        assert "vllm:" not in (await server.client.get("/metrics")).text


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return the samples by name and label values."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_of_the_demo_model_are_timed(demo: httpx2.Client) -> None:
    before = samples(demo.get("/metrics").text)
    whole = {"prompt": "One two three", "max_tokens": 5, "ignore_eos": True, "n": 2}
    demo.post("/v1/completions", json=whole)
    alone = samples(demo.get("/metrics").text)
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
        alone[f"aengine_{name}_seconds_sum", ""] - before[f"aengine_{name}_seconds_sum", ""]
        for name in ("request_queue_time", "time_to_first_token", "request_latency")
    )
    assert 0 < queued < first < all_of_it  # of the one request that has ended


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
        time.sleep(0.2)  # noqa: ASYNC251 - blocks the loop on purpose
        text = (await server.client.get("/metrics")).text
    assert samples(text)["aengine_loop_delay_seconds", ""] > 0.1


async def test_figures_of_state_snapshots() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        assert "aengine_state" not in (await server.client.get("/metrics")).text
        engine.numbers = msgspec.structs.replace(
            engine.numbers, state_snapshots=9, state_snapshots_used=4, state_snapshot_evictions=2
        )
        reported = (await server.client.get("/metrics")).text
    for line in (
        "aengine_state_snapshots 9.0",
        "aengine_state_snapshots_used 4.0",
        "aengine_state_snapshot_evictions_total 2.0",
    ):
        assert line in reported


async def test_figures_of_window_pages() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        assert "aengine_window" not in (await server.client.get("/metrics")).text
        engine.numbers = msgspec.structs.replace(
            engine.numbers, window_pages=9, window_pages_used=4, window_pages_cached=2
        )
        reported = (await server.client.get("/metrics")).text
    for line in ("aengine_window_pages 9.0", "aengine_window_pages_used 4.0", "aengine_window_pages_cached 2.0"):
        assert line in reported
