"""Drafts on the fake device: a row makes as many as a plan allows, and a test decides how many are accepted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

from aengine.step_plan import StepPlan

REFUSED = -3  # content of a slot that a refused draft has written


class FakeDrafts:
    """Decides how many drafts each row accepts. A row may only verify drafts that its last step has made."""

    def __init__(self, accepts: Seq[int]) -> None:
        """accepts: how many drafts are accepted, one number for each row of each step, over and over again."""
        self._accepts = itertools.cycle(accepts)
        self._made: dict[int, int] = {}  # row -> the number of drafts that its last step made

    def accept(self, row: int, drafts: int) -> int:
        """Return how many of a row's drafts are accepted."""
        if drafts > self._made.get(row, 0):
            raise AssertionError(f"row {row} verifies {drafts} drafts, but has made {self._made.get(row, 0)}")
        return min(next(self._accepts), drafts) if drafts else 0

    def make(self, plan: StepPlan) -> None:
        """Make drafts in every row that draws."""
        for row in plan.sampled_rows:
            self._made[row] = plan.proposals

    def launch(self, plan: StepPlan) -> list[int]:
        """Return the number of drafts of each row of `plan.decode`, after checking their order."""
        drafts = list(plan.drafts) or [0] * len(plan.decode)
        if len(drafts) != len(plan.decode):
            raise AssertionError(f"{len(plan.decode)} rows decode, and {len(drafts)} have numbers of drafts")
        without = drafts.count(0)
        if any(drafts[:without]) or min(drafts, default=0) < 0:
            raise AssertionError(f"rows without drafts come first: {drafts}")
        if plan.drafts and without == len(drafts):
            raise AssertionError("a step without drafts has numbers of drafts")
        if any(place >= without for run in plan.shared for place in run.members):
            raise AssertionError("a row with drafts is in a shared run")
        return drafts
