"""Converts the engine's histograms to metric families of prometheus-client."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily

from aengine.latency import Histogram


def histogram_family(name: str, text: str, histogram: Histogram, labels: Mapping[str, str]) -> HistogramMetricFamily:
    """The family of one histogram under one set of labels."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    family = HistogramMetricFamily(name, text, labels=[*labels])
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    family.add_metric([*labels.values()], buckets, histogram.total)
    return family
