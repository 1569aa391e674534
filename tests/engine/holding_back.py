"""A scheduler whose commits return several tokens of a sequence at once, as steps with accepted drafts do."""

from __future__ import annotations

from typing import Any

from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Sequence, Update
from aengine.step_plan import StepPlan, StepResult

TOGETHER = 4


class HoldingBack(Scheduler):
    """Holds updates of each sequence back until `TOGETHER` have come. The first one comes alone, as after a prefill."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._held: dict[Sequence, Update] = {}
        self._begun: set[Sequence] = set()

    def commit(self, plan: StepPlan, result: StepResult) -> list[Update]:
        ready: list[Update] = []
        for update in super().commit(plan, result):
            held = self._held.pop(update.sequence, None)
            if held is not None and update.finite:
                update.token_ids = held.token_ids + update.token_ids
                if held.logprobs is not None and update.logprobs is not None:
                    update.logprobs = [*held.logprobs, *update.logprobs]
            elif held is not None:
                ready.append(held)
            if (
                len(update.token_ids) == TOGETHER
                or update.finish_reason is not None
                or update.sequence not in self._begun
            ):
                ready.append(update)
            else:
                self._held[update.sequence] = update
            self._begun.add(update.sequence)
        return ready
