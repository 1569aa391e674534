"""`GET /metrics` for Prometheus. The figures are collected for each request to it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from aengine.http.hypercorn.in_flight import StatusCounts
from aengine.http.operation import Operation
from aengine.http.operators.metric_families import (
    adapter_families,
    device_families,
    latency_families,
    speculation_families,
    state_families,
    stats_families,
    tier_families,
    vllm_adapter_info,
    vllm_families,
    window_families,
)
from aengine.http.state import ServerState


class Metrics:
    """The registry of one server. It answers with Prometheus' text format, or with OpenMetrics if `Accept` names it."""

    def __init__(self, state: ServerState) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(state))
        ProcessCollector(registry=self._registry)

    async def show(self, request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(",".join(request.headers.getlist("accept")))
        except (TypeError, ValueError):  # `Accept` has a malformed version
            encode, content_type = choose_encoder("")
        if content_type.startswith("application/openmetrics-text"):
            content_type = openmetrics.CONTENT_TYPE_LATEST  # always this version, because `generate_latest` writes it
            # The default escaping would replace `vllm:` by `vllm_`.
            encode = partial(openmetrics.generate_latest, escaping=ALLOWUTF8)
        return Response(encode(self._registry), headers={"Content-Type": content_type})


class _EngineCollector(Collector):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        engine = self._state.engine
        yield GaugeMetricFamily("aengine_ready", "1 when the engine serves.", value=float(engine is not None))
        yield GaugeMetricFamily(
            "aengine_loop_delay_seconds",
            "The longest time that the event loop was blocked in the last one to two minutes, to within 0.01 s.",
            value=self._state.loop_delay.worst,
        )
        if (readers := self._state.in_flight) is not None:
            yield GaugeMetricFamily(
                "aengine_sends_blocked", "Responses that wait for their readers.", value=readers.blocked
            )
            yield CounterMetricFamily(
                "aengine_stalled_readers",
                "Connections closed because their clients read nothing for too long.",
                readers.stalled,
            )
            yield _answers(readers.statuses)
        if engine is not None:
            stats, latencies = engine.stats(), engine.latencies
            yield from stats_families(stats)
            yield from latency_families(latencies, engine.max_model_len)
            if devices := engine.devices():
                yield from device_families(devices)
            if stats.host_pages_total:
                yield from tier_families(stats)
            if adapters := stats.adapter_places > 0:
                yield from adapter_families(stats, engine.adapters)
            if stats.state_snapshots > 0:
                yield from state_families(stats)
            if stats.window_pages > 0:
                yield from window_families(stats)
            if stats.speculation != "off":
                yield from speculation_families(stats)
            if self._state.config.vllm_metrics:
                if adapters:
                    yield vllm_adapter_info(stats, engine.adapters)
                name = self._state.model_name or engine.model_name
                yield from vllm_families(stats, latencies, name, engine.max_model_len)


def _answers(counts: StatusCounts) -> Metric:
    family = CounterMetricFamily(
        "aengine_http_responses",
        "Answers that ended, by method, route and status; 499: the client left before its answer began.",
        labels=["method", "path", "status"],
    )
    for (method, path, status), count in counts.answers.items():
        family.add_metric([method, path, str(status)], count)
    return family


def operations(state: ServerState) -> list[Operation]:
    return [Operation("GET", "/metrics", Metrics(state).show, "Metrics for Prometheus.")]
