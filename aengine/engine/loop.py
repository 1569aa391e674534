"""The step loop: plan, launch, await the previous step, commit it, fill grammar masks, deliver its tokens.

If a step has updates of many sequences, the loop launches the next step before it delivers them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aengine.engine.requests.live import LiveChoice
from aengine.engine.requests.request import Owner
from aengine.errors import AengineError, DeviceLostError, EngineFailedError, InvalidRequestError
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Phase, Sequence, Update
from aengine.step_plan import StepPlan, StepResult
from aengine.text.grammar.drafted import Masks
from aengine.text.grammar.grammars import Matcher
from aengine.timeline import Timeline, ignore_mark

if TYPE_CHECKING:
    from aengine.runtime.runner import LaunchedStep, Runner

log = logging.getLogger("aengine")

DELIVERY_SLICE = 64  # after this many delivered tokens the loop lets other tasks run; those of one update stay together


class StepLoop:
    """Drives the scheduler and the runner, step by step.

    With lookahead, step N+1 is launched before the draws of step N are read.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        news: asyncio.Event,
        *,
        lookahead: bool,
        fill_masks: Callable[[Seq[Matcher | None], Seq[Seq[int]]], Awaitable[Masks]],
        prepare_mask: Callable[[Matcher, Callable[[], None]], None],
        fail: Callable[[Sequence, AengineError], None],
        timeline: Timeline | None,
        poll: Callable[[], None],
        observers: Seq[Callable[[StepPlan, float], None]],
    ) -> None:
        """Args:
        news: set when the scheduler may have new work.
        fill_masks: returns the masks of the given matchers, and of the places after their drafts.
        prepare_mask: computes a late mask in the background, then calls the given function.
        fail: ends the request of a sequence with an error.
        poll: called after each launch, and before the loop waits for `news`.
        observers: called with each committed step and its duration in seconds.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._lookahead = lookahead
        self._fill_masks = fill_masks
        self._prepare_mask = prepare_mask
        self._fail = fail
        self._poll = poll
        self._observers = observers
        self._launched: dict[int, float] = {}  # monotonic seconds, by step
        self._mark = ignore_mark if timeline is None else timeline.mark
        self._news = news
        self._stopping = False
        self._paused = False
        self._idle = asyncio.Event()
        self.last_step: float | None = None  # monotonic seconds when the newest step was committed

    def wake(self) -> None:
        """Wake the loop, because the scheduler may have new work."""
        self._news.set()

    def stop(self) -> None:
        """Launch no new step, and let `run` return when no step is in flight."""
        self._stopping = True
        self._news.set()

    async def pause(self) -> None:
        """Launch no step until `resume`, and wait until no step is in flight or `run` has ended."""
        self._paused = True
        self._news.set()
        await self._idle.wait()

    def resume(self) -> None:
        """Allow new steps again after `pause`."""
        self._paused = False
        self._idle.clear()
        self._news.set()

    async def run(self) -> None:
        """Run steps until `stop`. Returns when all launched steps have ended.

        Raises `DeviceLostError` if the device is lost, so that no further step can succeed.
        """
        try:
            await self._run()
        finally:
            self._paused = True
            self._idle.set()

    async def _run(self) -> None:
        step: LaunchedStep | None = None  # the newest step
        updates: list[Update] = []  # committed and not delivered yet
        while True:
            previous, step = step, self._launch_next(step)
            self._poll()
            if updates:
                await self._deliver_all(updates)
                updates = []
            try:
                if previous is not None:
                    updates = await self._commit(previous)
                if step is not None and step.plan.structured:
                    await self._draw(step)
            except _StepFailed as failed:
                if step is not None:
                    await _wait_and_ignore(step)  # it may still write to pages that `_fail_step` releases
                    step = None
                self._launched.clear()
                self._fail_step(failed.plan, failed.error)
            # Delivering many updates may take as long as the running step, so the next step is launched first.
            if updates and (step is None or len(updates) <= DELIVERY_SLICE):
                await self._deliver_all(updates)
                updates = []
            if previous is None and step is None:
                if self._stopping:
                    return
                if self._paused:
                    self._idle.set()
                await self._news.wait()
                self._mark("idle")
            self._news.clear()

    def _launch_next(self, previous: LaunchedStep | None) -> LaunchedStep | None:
        """Launch the next step. Returns None if no step can run, or if it must wait for the results of `previous`."""
        if (
            self._stopping
            or self._paused
            or (previous is not None and not self._lookahead)
            or isinstance(previous, _FailedLaunch)
        ):
            return None
        plan = self._scheduler.schedule()
        self._mark("schedule")
        if plan is None:
            return None
        self._launched[plan.step] = time.monotonic()
        try:
            step = self._runner.launch(plan)
        except Exception as error:  # noqa: BLE001 - a failed launch ends this step's requests, not the engine
            return _FailedLaunch(plan, error)
        self._mark("launch", plan)
        return step

    async def _commit(self, step: LaunchedStep) -> list[Update]:
        """Await and commit a step. Return its updates. Raises `_StepFailed`."""
        try:
            result = await step.result()
        except Exception as error:
            raise _StepFailed(step.plan, error) from error
        self._mark("await", step.plan)
        now, before = time.monotonic(), self.last_step or 0.0
        self.last_step = now
        seconds = now - max(before, self._launched.pop(step.plan.step))
        for observe in self._observers:
            observe(step.plan, seconds)
        updates = self._scheduler.commit(step.plan, result)
        counts = result.counts
        self._mark("commit", count=len(updates), accepted=sum(counts) - len(counts) if counts else 0)
        if step.plan.structured:
            for sequence in (update.sequence for update in updates):
                grammar = sequence.owner.grammar if isinstance(sequence.owner, LiveChoice) else None
                if grammar is not None and grammar.late and sequence.phase is not Phase.FINISHED:
                    self._prepare_mask(grammar, self.wake)
        return updates

    async def _draw(self, step: LaunchedStep) -> None:
        """Fill the masks of a structured step and let it draw. Call it after the previous step is committed.

        Raises `_StepFailed`.
        """
        drawing = self._scheduler.structured_draws(step.plan)
        choices = [sequence.owner for sequence, _ in drawing]
        matchers = [
            choice.grammar if isinstance(choice, LiveChoice) and choice.sequence.phase is not Phase.FINISHED else None
            for choice in choices
        ]
        try:
            masks = await self._fill_masks(matchers, [drafts for _, drafts in drawing])
            for (sequence, _), usable in zip(drawing, masks.usable, strict=True):
                step.plan.draft_limits[sequence.row] = usable
            step.draw(masks.bits)
        except Exception as error:
            raise _StepFailed(step.plan, error) from error
        self._mark("masks", count=len(masks.bits))
        for choice, matcher in zip(choices, matchers, strict=True):
            if matcher is not None and matcher.error is not None and isinstance(choice, LiveChoice):
                written = len(choice.sequence.output)
                reason = f"{matcher.param}: the output cannot go on after {written} tokens: {matcher.error}"
                self._fail(choice.sequence, InvalidRequestError(reason, matcher.param))

    async def _deliver_all(self, updates: list[Update]) -> None:
        """Deliver updates. If a stop string ends a sequence, the tokens after that are removed from it."""
        delivered, pause = 0, DELIVERY_SLICE
        for update in updates:
            if delivered >= pause:
                await asyncio.sleep(0)
                pause = delivered + DELIVERY_SLICE
            sequence = update.sequence
            owner = sequence.owner
            # It may have been aborted between two slices.
            if isinstance(owner, Owner) and owner.finish_reason is None and not owner.request.ended:
                try:
                    if length := owner.deliver(update):
                        self._scheduler.finish(sequence, length)
                except AengineError as error:
                    self._fail(sequence, error)
            delivered += len(update.token_ids)
        self._mark("deliver", count=delivered)

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        log.error("step %d failed: %s: %s", plan.step, type(error).__name__, error, exc_info=error)
        for sequence in self._scheduler.fail(plan):
            failure = EngineFailedError(f"a step of this request failed: {type(error).__name__}")
            failure.__cause__ = error
            self._fail(sequence, failure)
        from aengine.runtime.cuda.lost import is_lost  # torch was imported when the model was loaded

        if is_lost(error):
            raise DeviceLostError("the device is lost") from error


class _StepFailed(Exception):
    """Carries the plan and the error of a step that failed."""

    def __init__(self, plan: StepPlan, error: Exception) -> None:
        super().__init__(f"step {plan.step} failed")
        self.plan = plan
        self.error = error


class _FailedLaunch:
    """A step that could not be launched. `result` raises the error, so that the previous step can end first."""

    def __init__(self, plan: StepPlan, error: Exception) -> None:
        self.plan = plan
        self._error = error

    def draw(self, masks: NDArray[np.int32] | None) -> None:
        """Do nothing: no step was launched."""

    async def result(self) -> StepResult:
        await asyncio.sleep(0)  # so that failures in a row do not block the loop
        raise self._error


async def _wait_and_ignore(step: LaunchedStep) -> None:
    """Wait until a step has ended, and ignore its results and errors."""
    try:
        if step.plan.structured:
            step.draw(None)
        await step.result()
    except Exception as error:  # noqa: BLE001 - the previous step's error is reported
        log.debug("step %d was dropped: %s", step.plan.step, error)
