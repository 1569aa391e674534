"""Metrics of the pages that layers with a sliding window keep."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from aengine.types import Stats


def window_families(stats: Stats) -> Iterator[Metric]:
    """How many pages there are, and what they are in use for."""
    yield GaugeMetricFamily("aengine_window_pages", "Pages of layers with a sliding window.", stats.window_pages)
    yield GaugeMetricFamily(
        "aengine_window_pages_used", "Of these, those of running requests.", stats.window_pages_used
    )
    yield GaugeMetricFamily(
        "aengine_window_pages_cached", "Of the others, those that the prefix cache has.", stats.window_pages_cached
    )
