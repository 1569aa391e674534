"""Metrics of the tiers below the pool: host memory and the disk."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from aengine.types import Stats


def tier_families(stats: Stats) -> Iterator[Metric]:
    """Where cached tokens were found, what lies below the pool, and how much went down and came back."""
    found = CounterMetricFamily(
        "aengine_tier_cached_tokens", "Prompt tokens served from the prefix cache, by where they lay.", labels=["tier"]
    )
    below = stats.cached_host_tokens + stats.cached_disk_tokens
    found.add_metric(["device"], stats.cached_tokens - below)
    found.add_metric(["host"], stats.cached_host_tokens)
    found.add_metric(["disk"], stats.cached_disk_tokens)
    yield found
    size = stats.host_page_bytes
    held = GaugeMetricFamily("aengine_tier_bytes", "Bytes of KV pages that lie below the pool.", labels=["tier"])
    held.add_metric(["host"], stats.host_pages * size)
    held.add_metric(["disk"], stats.disk_bytes)
    yield held
    yield GaugeMetricFamily(
        "aengine_host_cache_bytes", "Host memory that is kept for KV pages.", stats.host_pages_total * size
    )
    stores = CounterMetricFamily("aengine_tier_stores", "KV pages that went down to a tier.", labels=["tier"])
    stores.add_metric(["host"], stats.host_stores)
    stores.add_metric(["disk"], stats.disk_stores)
    yield stores
    loads = CounterMetricFamily("aengine_tier_loads", "KV pages that came up from a tier.", labels=["tier"])
    loads.add_metric(["host"], stats.host_loads)
    loads.add_metric(["disk"], stats.disk_loads)
    yield loads
    yield CounterMetricFamily(
        "aengine_host_cache_misses", "KV pages that left the pool before they were copied.", stats.host_misses
    )
