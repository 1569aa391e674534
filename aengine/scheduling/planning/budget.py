"""The budget of prompt tokens in a step."""

from __future__ import annotations

import math

from aengine.step_plan import MixedLimit


class PrefillBudget:
    """The prompt tokens that one step may still carry; `take` uses them up.

    Beside decodes there is a second bound, on the time that their streams have to wait for the step.
    """

    def __init__(self, tokens: int, decodes: int, limit: MixedLimit | None) -> None:
        """tokens: that the step may carry, the decodes' included."""
        self._tokens = tokens - decodes
        self._limit = limit if decodes else None
        self._time = math.inf
        if self._limit is not None:
            self._time = max(self._limit.tokens - decodes, self._limit.multiple)
        self._carried = decodes

    @property
    def left(self) -> bool:
        """Whether another chunk may begin."""
        return self._tokens > 0 and self._time >= 1

    def take(self, start: int, count: int) -> int:
        """How many of `count` tokens at position `start` the step carries: at least one while anything is `left`."""
        most = min(count, self._tokens)
        taken = most
        if self._limit is not None:
            cost = 1 + start / self._limit.context
            timely = int(self._time / cost)
            taken = max(1, min(most, timely))
            if timely and taken < count:
                taken = self._whole(taken, min(most, self._limit.tokens - self._carried), cost)
            self._time -= taken * cost
        if taken < count:
            self._tokens = 0  # a prompt that has begun is read to its end before the next one begins
        self._carried += taken
        self._tokens = max(0, self._tokens - taken)
        return taken

    def close(self) -> None:
        """Carry nothing more."""
        self._tokens = 0

    def _whole(self, taken: int, most: int, cost: float) -> int:
        """Round the count, such that the step is a whole multiple: up only if the added tokens take no longer than half
        of one.
        """
        multiple = 1 if self._limit is None else self._limit.multiple
        over = (self._carried + taken) % multiple
        missing = multiple - over
        if 2 * missing * cost <= multiple and taken + missing <= most:
            return taken + missing
        return taken - over if over < taken else taken
