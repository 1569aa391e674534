"""Dashboards with figures of `/metrics`: our own, and vLLM's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import aengine
from tests.http.demo_server import demo_server

OURS = Path(aengine.__file__).parent / "http" / "operators" / "grafana.json"
FUNCTIONS = {"histogram_quantile", "increase", "instance", "le", "max", "rate", "sum"}  # PromQL functions, and labels

# Metrics of the dashboard in vLLM's examples (observability/prometheus_grafana), without the prefix vllm:.
VLLMS = (
    *("e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count"),
    *("inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum", "inter_token_latency_seconds_count"),
    *("time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum", "time_to_first_token_seconds_count"),
    *("prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting"),
    *("kv_cache_usage_perc", "request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_success_total", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
)
# Further metrics of requests and steps in vLLM's documentation.
HISTOGRAMS = (
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_params_max_tokens", "request_prefill_kv_computed_tokens", "request_time_per_output_token_seconds"),
    "iteration_tokens_total",
)
LATENCIES = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0]

CONTEXT = 256
PROMPT = list(range(300, 320))


@pytest.fixture(scope="module")
def shown() -> list[Sample]:
    """Return a server's samples after three requests: of 5 tokens, of 8 and 8, and the cached first one again."""
    with (
        demo_server({"max_model_len": CONTEXT}, vllm_metrics=True) as url,
        httpx2.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        for body in ({"max_tokens": 5}, {"max_tokens": 8, "n": 2}, {"max_tokens": 5}):
            requested = {"model": "aengine-demo", "prompt": PROMPT, "ignore_eos": True, **body}
            assert client.post("/v1/completions", json=requested).status_code == 200
        text = client.get("/metrics").text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(samples: Iterable[Sample], name: str, **labels: str) -> float:
    [found] = [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]
    return found


def test_our_dashboard_queries_existing_metrics(shown: list[Sample]) -> None:
    board = json.loads(OURS.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    names = {sample.name for sample in shown}
    labels = {label for sample in shown for label in sample.labels}
    for query in queries:
        words = set(re.findall(r"(?<![$\w.\"])[a-z_]\w*", query)) - {"by"}
        requested = {word for word in words if word.startswith("aengine_")}
        assert requested, query
        assert requested <= names, query
        assert words - requested <= FUNCTIONS | labels, query
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len({*places}) == len({panel["id"] for panel in board["panels"]}) == len(places)


def test_vllms_dashboard_finds_everything_that_it_asks_for(shown: list[Sample]) -> None:
    named = {sample.name for sample in shown if sample.labels.get("model_name") == "aengine-demo"}
    assert {f"vllm:{name}" for name in VLLMS} <= named
    assert {f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")} <= named
    assert value(shown, "vllm:request_success_total", finished_reason="length") == 4


def test_requests_are_counted_as_vllm_counts_them(shown: list[Sample]) -> None:
    sums = {
        "request_prompt_tokens": (60, 3),
        "request_prefill_kv_computed_tokens": (20 + 4 + 4, 3),  # only whole pages of 16 are cached
        "request_generation_tokens": (26, 4),  # for each output
        "request_max_num_generation_tokens": (18, 3),
        "request_params_n": (4, 3),
        "request_params_max_tokens": (18, 3),
    }
    for name, (total, count) in sums.items():
        assert value(shown, f"vllm:{name}_sum") == total, name
        assert value(shown, f"vllm:{name}_count") == count, name
    steps = value(shown, "vllm:iteration_tokens_total_sum")
    assert steps == value(shown, "aengine_computed_tokens_total")
    assert value(shown, "vllm:iteration_tokens_total_count") == value(shown, "aengine_steps_total")


def test_a_requests_time_has_parts(shown: list[Sample]) -> None:
    whole, queue, inference, prefill, decode = (
        value(shown, f"vllm:{name}_seconds_sum")
        for name in (
            *("e2e_request_latency", "request_queue_time", "request_inference_time"),
            *("request_prefill_time", "request_decode_time"),
        )
    )
    assert min(queue, prefill, decode) > 0
    assert inference == pytest.approx(prefill + decode)
    assert whole == pytest.approx(queue + inference)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("request_prompt_tokens", [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]),  # of CONTEXT
        ("request_max_num_generation_tokens", [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]),
        ("request_params_n", [1.0, 2.0, 5.0, 10.0, 20.0]),
        ("iteration_tokens_total", [1.0, *(float(2**power) for power in range(3, 15))]),
        ("request_decode_time_seconds", [0.01, 0.05, 0.1, *LATENCIES, 960.0, 1920.0, 7680.0]),  # three of our own
    ],
)
def test_buckets_are_vllms(name: str, bounds: list[float], shown: list[Sample]) -> None:
    buckets = [sample for sample in shown if sample.name == f"vllm:{name}_bucket"]
    assert [float(sample.labels["le"]) for sample in buckets] == [*bounds, float("inf")]
    assert buckets[-1].value == value(shown, f"vllm:{name}_count")
