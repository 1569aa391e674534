"""Metrics of adapters, under our names and as vLLM has them for routers that send requests where their adapter is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from aengine.types import AdapterInfo, Stats


def adapter_families(stats: Stats, adapters: Sequence[AdapterInfo]) -> Iterator[Metric]:
    """How many adapters there are, where they are, and how often they moved."""
    there = sum(adapter.on_device for adapter in adapters)
    size = sum(adapter.bytes for adapter in adapters)
    yield GaugeMetricFamily("aengine_adapters", "Adapters that requests may name.", value=len(adapters))
    yield GaugeMetricFamily("aengine_adapters_on_device", "Of these, those that lie on the device.", value=there)
    yield GaugeMetricFamily("aengine_adapter_places", "Adapters that the device has room for.", stats.adapter_places)
    yield GaugeMetricFamily("aengine_adapter_host_bytes", "Host memory that they take.", value=size)
    yield CounterMetricFamily("aengine_adapter_loads", "Adapters copied to the device.", stats.adapter_loads)
    yield CounterMetricFamily(
        "aengine_adapter_evictions", "Adapters that gave way to another one there.", stats.adapter_evictions
    )


def vllm_adapter_info(stats: Stats, adapters: Sequence[AdapterInfo]) -> Metric:
    """`vllm:lora_requests_info`: the names stand in its labels, its value is the time."""
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters with running and with waiting requests; the value is the time in seconds.",
        labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    waiting = ",".join(adapter.name for adapter in adapters if adapter.waiting)
    running = ",".join(adapter.name for adapter in adapters if adapter.running)
    info.add_metric([str(stats.adapter_places), waiting, running], time.time())
    return info
