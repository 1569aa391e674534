"""`GET /metrics` for Prometheus: collected when asked, from counts that are kept anyway."""

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

from aengine.http.endpoints.operators.metrics.adapters import adapter_families, vllm_adapter_info
from aengine.http.endpoints.operators.metrics.families import histogram_family
from aengine.http.endpoints.operators.metrics.states import state_families
from aengine.http.endpoints.operators.metrics.tiers import tier_families
from aengine.http.endpoints.operators.metrics.vllm import vllm_families
from aengine.http.endpoints.operators.metrics.windows import window_families
from aengine.http.hypercorn.in_flight import StatusCounts
from aengine.http.state import ServerState
from aengine.latency import Latencies
from aengine.types import DeviceMemory, Stats

_GAUGES = {  # field of Stats -> name, help
    "running": ("aengine_requests_running", "Sequences that hold a row of the running batch."),
    "waiting": ("aengine_requests_waiting", "Choices that wait for a row."),
    "pages_total": ("aengine_kv_pages", "KV pages in the pool."),
    "pages_used": ("aengine_kv_pages_used", "KV pages held by running sequences."),
    "pages_cached": ("aengine_kv_pages_cached", "KV pages held by the prefix cache alone; evictable."),
    "pages_free": ("aengine_kv_pages_free", "KV pages that hold nothing."),
    "kv_usage": ("aengine_kv_usage_ratio", "Share of the pool's pages that running sequences hold."),
    "hit_rate": ("aengine_prefix_hit_ratio", "Share of prompt tokens served from the prefix cache since start."),
}
_COUNTERS = {  # Prometheus appends _total
    "requests": ("aengine_requests", "Requests that ended, however they did."),
    "steps": ("aengine_steps", "Steps of the engine."),
    "prompt_tokens": ("aengine_prompt_tokens", "Prompt tokens of requests."),
    "cached_tokens": ("aengine_cached_tokens", "Prompt tokens served from the prefix cache."),
    "computed_tokens": ("aengine_computed_tokens", "Tokens that went through the model."),
    "generated_tokens": ("aengine_generated_tokens", "Tokens generated."),
    "preemptions": ("aengine_preemptions", "Running sequences put back into the queue for want of pages."),
}
_HISTOGRAMS = {  # field of Latencies
    "first_token": ("aengine_time_to_first_token_seconds", "From a request's arrival to its first token."),
    "inter_token": ("aengine_inter_token_latency_seconds", "Between two tokens of one output."),
    "whole": ("aengine_request_latency_seconds", "From a request's arrival to its last token, unless aborted."),
    "queued": ("aengine_request_queue_time_seconds", "From a request's arrival to its first step."),
    "prefill": ("aengine_request_prefill_seconds", "From a request's first step to its first token."),
    "decode": ("aengine_request_decode_seconds", "From a request's first token to its last."),
    "step_tokens": ("aengine_step_tokens", "Tokens that went through the model in a step."),
}
_TOKEN_HISTOGRAMS = {  # the same, of no more tokens than a context has
    "prompt_tokens": ("aengine_request_prompt_tokens", "Tokens of a request's prompt."),
    "generated_tokens": ("aengine_request_generated_tokens", "Tokens generated for one output."),
}


class Metrics:
    """The registry of one server; nothing global. As Prometheus' text, or as OpenMetrics where `Accept` names it."""

    def __init__(self, state: ServerState) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(state))
        ProcessCollector(registry=self._registry)

    async def show(self, request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(",".join(request.headers.getlist("accept")))
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = choose_encoder("")
        if content_type.startswith("application/openmetrics-text"):
            encode = partial(openmetrics.generate_latest, escaping=ALLOWUTF8)  # its default makes vllm: a vllm_
        return Response(encode(self._registry), headers={"Content-Type": content_type})


class _EngineCollector(Collector):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        engine = self._state.engine
        yield GaugeMetricFamily("aengine_ready", "1 when the engine serves.", value=float(engine is not None))
        yield GaugeMetricFamily(
            "aengine_loop_delay_seconds",
            "The longest that the event loop kept anyone waiting in the last minute or two, to within 0.01 s.",
            value=self._state.loop_delay.worst,
        )
        if (readers := self._state.in_flight) is not None:
            yield GaugeMetricFamily(
                "aengine_sends_blocked", "Responses that wait for their readers.", value=readers.blocked
            )
            yield CounterMetricFamily(
                "aengine_stalled_readers", "Connections cut because nothing was read for too long.", readers.stalled
            )
            yield _answers(readers.statuses)
        if engine is not None:
            stats, latencies = engine.stats(), engine.latencies
            yield from _families(stats)
            yield from _latency_families(latencies, engine.max_model_len)
            if devices := engine.devices():
                yield from _device_families(devices)
            if stats.host_pages_total:
                yield from tier_families(stats)
            if adapters := stats.adapter_places > 0:
                yield from adapter_families(stats, engine.adapters)
            if stats.state_snapshots > 0:
                yield from state_families(stats)
            if stats.window_pages > 0:
                yield from window_families(stats)
            if self._state.config.vllm_metrics:
                if adapters:
                    yield vllm_adapter_info(stats, engine.adapters)
                name = self._state.model_name or engine.model_name
                yield from vllm_families(stats, latencies, name, engine.max_model_len)


def _answers(counts: StatusCounts) -> Metric:
    family = CounterMetricFamily(
        "aengine_http_responses",
        "Answers that ended, by the path as the routes write it; 499: the client left before its answer began.",
        labels=["method", "path", "status"],
    )
    for (method, path, status), count in counts.answers.items():
        family.add_metric([method, path, str(status)], count)
    return family


def _families(stats: Stats) -> Iterator[Metric]:
    for field, (name, text) in _GAUGES.items():
        yield GaugeMetricFamily(name, text, value=getattr(stats, field))
    for field, (name, text) in _COUNTERS.items():
        yield CounterMetricFamily(name, text, value=getattr(stats, field))


def _device_families(devices: list[DeviceMemory]) -> Iterator[Metric]:
    for field, text in (("used", "Bytes of a GPU's memory in use, by anyone."), ("total", "Bytes of a GPU's memory.")):
        family = GaugeMetricFamily(f"aengine_device_memory_{field}_bytes", text, labels=["device", "name"])
        for device in devices:
            family.add_metric([device.device, device.name], getattr(device, field))
        yield family


def _latency_families(latencies: Latencies, context: int) -> Iterator[Metric]:
    for field, (name, text) in _HISTOGRAMS.items():
        yield histogram_family(name, text, getattr(latencies, field), {})
    for field, (name, text) in _TOKEN_HISTOGRAMS.items():
        yield histogram_family(name, text, getattr(latencies, field), {}, context)
    ended = CounterMetricFamily("aengine_outputs", "Outputs (n of a request) that ended.", labels=["finish_reason"])
    for reason, count in latencies.ended.items():
        ended.add_metric([reason], count)
    yield ended
