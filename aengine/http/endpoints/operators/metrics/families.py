"""Converts the engine's histograms to metric families of prometheus-client."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from math import inf

from prometheus_client.core import HistogramMetricFamily

from aengine.latency import Histogram


def histogram_family(
    name: str, text: str, histogram: Histogram, labels: Mapping[str, str], most: float = inf
) -> HistogramMetricFamily:
    """Return the family of one histogram under one set of labels. Bounds above `most` are left out."""
    bounds = [*histogram.bounds, inf]
    family = HistogramMetricFamily(name, text, labels=[*labels])
    counts = zip(bounds, accumulate(histogram.counts), strict=True)
    buckets = [
        ("+Inf" if bound == inf else str(bound), count) for bound, count in counts if bound <= most or bound == inf
    ]
    family.add_metric([*labels.values()], buckets, histogram.total)
    return family
