"""How often drafts are accepted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq


class Acceptance:
    """How often the drafts of one sequence, or of all, were accepted, by their position in a step.

    Older observations weigh less: an observation loses 1 / `window` of its weight with each later one of its position.
    """

    __slots__ = ("_accepted", "_observed", "_window", "gains", "probed", "rates")

    def __init__(self, expected: Seq[float], window: int, weight: float) -> None:
        """Args:
        expected: the rates without any observation, one for each position.
        weight: how many observations the expected rates are worth.
        """
        self._window = window
        self._observed = [0.0] * len(expected)  # weight of all observations of each position
        self._accepted = [0.0] * len(expected)  # weight of those in which the draft was accepted
        self.rates: list[float] = []  # how often a draft is accepted if all drafts before it are
        self.gains: list[float] = []  # [i]: the number of tokens that i + 1 drafts bring on average
        self.probed = -1  # the newest round of probes in which the sequence took part
        self.estimate(expected, weight)

    def observe(self, drafts: int, accepted: int) -> None:
        """Note that `accepted` of `drafts` drafts were accepted. Positions after the first refusal say nothing."""
        kept = 1 - 1 / self._window
        for place in range(min(accepted + 1, drafts)):
            self._observed[place] = self._observed[place] * kept + 1
            self._accepted[place] = self._accepted[place] * kept + (place < accepted)

    def estimate(self, expected: Seq[float], weight: float) -> None:
        """Compute `rates` and `gains`. Args as for the constructor."""
        self.rates = [
            (accepted + weight * rate) / (observed + weight)
            for accepted, observed, rate in zip(self._accepted, self._observed, expected)
        ]
        self._gain()

    def estimate_alone(self, first: float, weight: float) -> None:
        """Compute `rates` and `gains`. The expected rate of the first position is `first`, of others the one before."""
        rate, self.rates = first, []
        for accepted, observed in zip(self._accepted, self._observed):
            rate = (accepted + weight * rate) / (observed + weight)
            self.rates.append(rate)
        self._gain()

    def _gain(self) -> None:
        self.gains = list(
            itertools.accumulate(itertools.accumulate(self.rates, lambda all_before, rate: all_before * rate))
        )
