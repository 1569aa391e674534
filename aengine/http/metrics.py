"""`GET /metrics`, for Prometheus: read from the engine's counters when asked, so that serving pays nothing for it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from aengine.http.state import ServerState
from aengine.types import Stats

_GAUGES = {  # field of Stats -> name, help
    "running": ("aengine_requests_running", "Sequences that hold a row of the running batch."),
    "waiting": ("aengine_requests_waiting", "Sequences in the queue."),
    "pages_total": ("aengine_kv_pages", "KV pages in the pool."),
    "pages_used": ("aengine_kv_pages_used", "KV pages held by running sequences."),
    "pages_cached": ("aengine_kv_pages_cached", "KV pages held by the prefix cache alone; evictable."),
    "pages_free": ("aengine_kv_pages_free", "KV pages that hold nothing."),
    "hit_rate": ("aengine_prefix_hit_ratio", "Share of prompt tokens served from the prefix cache since start."),
}
_COUNTERS = {  # Prometheus appends _total
    "requests": ("aengine_requests", "Requests taken in."),
    "steps": ("aengine_steps", "Steps of the engine."),
    "prompt_tokens": ("aengine_prompt_tokens", "Prompt tokens of requests."),
    "cached_tokens": ("aengine_cached_tokens", "Prompt tokens served from the prefix cache."),
    "computed_tokens": ("aengine_computed_tokens", "Tokens that went through the model."),
    "generated_tokens": ("aengine_generated_tokens", "Tokens generated."),
    "preemptions": ("aengine_preemptions", "Running sequences put back into the queue for want of pages."),
}


class Metrics:
    """One registry per server; nothing global."""

    def __init__(self, state: ServerState) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(state))

    async def show(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _EngineCollector(Collector):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        engine = self._state.engine
        yield GaugeMetricFamily("aengine_ready", "1 when the engine serves.", value=float(engine is not None))
        if engine is not None:
            yield from _families(engine.stats())


def _families(stats: Stats) -> Iterator[Metric]:
    for field, (name, text) in _GAUGES.items():
        yield GaugeMetricFamily(name, text, value=getattr(stats, field))
    for field, (name, text) in _COUNTERS.items():
        yield CounterMetricFamily(name, text, value=getattr(stats, field))
