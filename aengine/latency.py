"""Histograms of durations, which `/metrics` shows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from aengine.types import FinishReason

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Seconds, counted by the smallest bound that they do not exceed."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)  # ascending
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.total = 0.0  # seconds

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


class Latencies:
    """The histograms of an engine's requests since it started."""

    __slots__ = ("ended", "first_token", "inter_token", "queued", "whole")

    def __init__(self) -> None:
        self.queued = Histogram(REQUEST_BOUNDS)  # from arrival to the first step
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)  # from arrival
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS)  # between two tokens of one choice
        self.whole = Histogram(REQUEST_BOUNDS)  # from arrival to the last token, of requests that ended by themselves
        self.ended: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}  # choices
