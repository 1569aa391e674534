"""The number of prompt tokens and of blocks of a tower that a step can still contain."""

from __future__ import annotations

import math

from aengine.step_plan import MixedLimit


class PrefillBudget:
    """The number of prompt tokens that a step can still contain. `take` reduces it.

    If the step also decodes, a second bound limits its duration, so that running sequences do not wait too long.
    """

    def __init__(self, tokens: int, decodes: int, limit: MixedLimit | None) -> None:
        """tokens: the most tokens of the step, decodes included."""
        self._tokens = tokens - decodes
        self._limit = limit if decodes else None
        self._time = math.inf  # what is left of the second bound: tokens, each weighted by its cost at its position
        if self._limit is not None:
            self._time = max(self._limit.tokens - decodes, self._limit.multiple)
        self._planned = decodes  # tokens in the step so far
        self._images = False  # whether the step computes images

    @property
    def left(self) -> bool:
        """Whether another chunk may begin."""
        return self._tokens > 0 and self._time >= 1

    def take(self, start: int, count: int, least: int = 1) -> int:
        """Return how many of `count` tokens from position `start` on the step contains.

        It contains at least the first `least` ones, however long they take. If there is no room for them, it has none.
        """
        if least > min(count, self._tokens):
            self._tokens = 0
            return 0
        most = min(count, self._tokens)
        taken = most
        if self._limit is not None:
            cost = 1 + start / self._limit.context
            timely = int(self._time / cost)
            taken = max(least, min(most, timely))
            if timely >= least and taken < count:
                taken = self._round(taken, min(most, self._limit.tokens - self._planned), cost)
            self._time -= taken * cost
        if taken < count:
            self._tokens = 0  # the next prompt begins only after the last chunk of this one
        self._planned += taken
        self._tokens = max(0, self._tokens - taken)
        return taken

    def reaches(self, start: int, count: int) -> bool:
        """Return whether the step has time for more than `count` tokens from position `start` on."""
        if self._limit is not None and count * (1 + start / self._limit.context) >= self._time:
            return False
        return count < self._tokens

    def take_blocks(self, cost: float, count: int, least: int) -> int:
        """Return how many of the last `count` blocks of a tower the step computes for an image.

        If the step also decodes, it computes as many as it has time for, and at least one. Otherwise it computes all
        or none, and at least the first image of the step. cost: of a block, in tokens. least: how many tokens of the
        prompt still fit after that image, because a step must have tokens.
        """
        if self._limit is not None:
            count = min(count, max(1, int(self._time / cost)))
            self._time -= count * cost
        elif (self._planned or self._images) and count * cost >= self._tokens:
            return 0
        else:
            self._tokens = max(min(least, self._tokens), self._tokens - math.ceil(count * cost))
        self._images = True
        return count

    def close(self) -> None:
        """Allow no further chunk in the step."""
        self._tokens = 0

    def _round(self, taken: int, most: int, cost: float) -> int:
        """Round `taken` so that the step's number of tokens is a multiple of `limit.multiple`.

        Rounds up only if that costs at most half a multiple."""
        multiple = 1 if self._limit is None else self._limit.multiple
        over = (self._planned + taken) % multiple
        missing = multiple - over
        if 2 * missing * cost <= multiple and taken + missing <= most:
            return taken + missing
        return taken - over if over < taken else taken
