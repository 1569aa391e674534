"""Histograms of durations and token counts, for `/metrics`."""

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
TOKEN_BOUNDS = tuple(float(digit * 10**power) for power in range(8) for digit in (1, 2, 5))
STEP_TOKEN_BOUNDS = (1.0, *(float(2**power) for power in range(3, 15)))
CHOICE_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts values by the smallest bound that is not below them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)  # ascending
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.total = 0.0  # the sum of all values

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as `times` says."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Latencies:
    """The histograms of an engine's requests since it started.

    Histograms that are updated at a request's end leave out aborted and failed requests.
    """

    __slots__ = (
        "choices",
        "computed_prompt_tokens",
        "decode",
        "ended",
        "first_token",
        "generated_tokens",
        "inference",
        "inter_token",
        "max_tokens",
        "mean_inter_token",
        "most_generated_tokens",
        "prefill",
        "prompt_tokens",
        "queued",
        "step_tokens",
        "whole",
    )

    def __init__(self) -> None:
        self.queued = Histogram(REQUEST_BOUNDS)  # from arrival to the first step
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)  # from arrival
        # Between two tokens of one choice. Tokens that arrive together share the time since the token before them.
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS)
        self.whole = Histogram(REQUEST_BOUNDS)  # from arrival to the last token
        self.inference = Histogram(REQUEST_BOUNDS)  # from the first step to the last token
        self.prefill = Histogram(REQUEST_BOUNDS)  # from the first step to the first token
        self.decode = Histogram(REQUEST_BOUNDS)  # from the first token to the last
        self.mean_inter_token = Histogram(INTER_TOKEN_BOUNDS)  # `decode` divided by the tokens after the first
        self.prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.computed_prompt_tokens = Histogram(TOKEN_BOUNDS)  # without cached ones
        self.generated_tokens = Histogram(TOKEN_BOUNDS)  # of each choice
        self.most_generated_tokens = Histogram(TOKEN_BOUNDS)  # of a request's longest choice
        self.choices = Histogram(CHOICE_BOUNDS)  # n
        self.max_tokens = Histogram(TOKEN_BOUNDS)  # the bound of each choice
        self.step_tokens = Histogram(STEP_TOKEN_BOUNDS)  # computed in a step
        self.ended: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}  # choices
