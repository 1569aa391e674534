"""Metrics of the states that linear attention keeps."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from aengine.types import Stats


def state_families(stats: Stats) -> Iterator[Metric]:
    """How many snapshots there are, and how often one gave way to another."""
    yield GaugeMetricFamily(
        "aengine_state_snapshots",
        "States of linear attention that there is room for.",
        stats.state_snapshots,
    )
    yield GaugeMetricFamily("aengine_state_snapshots_used", "Of these, those in use.", stats.state_snapshots_used)
    yield CounterMetricFamily(
        "aengine_state_snapshot_evictions", "Of these, those that gave way to another.", stats.state_snapshot_evictions
    )
