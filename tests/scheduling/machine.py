"""What the random uses of the scheduler have in common: steps, aborts and the checks after every rule."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from aengine.scheduling.sequence import Sequence
from tests.scheduling.stepping import Stepper


@dataclass(frozen=True)
class Drafts:
    """The most drafts of a row, and how many are accepted in turn."""

    most: int
    accepts: list[int]


_MOST_DRAFTS = 5
DRAFTS = st.builds(Drafts, st.integers(0, _MOST_DRAFTS), st.lists(st.integers(0, _MOST_DRAFTS), min_size=1, max_size=8))


class Machine(RuleBasedStateMachine):
    """Every rule is followed by `check_integrity`. At the end, all requests must have been served.

    The fake device checks every page that is read or written. A subclass's `start` makes the stepper.
    """

    stepper: Stepper
    now = 0.0

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2**16))
    def abort(self, which: int) -> None:
        self.stepper.abort(self.open[which % len(self.open)])
        self.check()

    def teardown(self) -> None:
        if hasattr(self, "stepper"):
            self.stepper.run()
            self.stepper.check_outputs()
            self.check_end()

    def check_end(self) -> None:
        """Check what must hold once all requests have been served."""

    def check_nothing_is_kept(self) -> None:
        """Clear the prefix cache. All pages must be free."""
        memory = self.stepper.scheduler.memory
        memory.tree.clear()
        assert memory.allocator.free == memory.usable_pages

    @property
    def open(self) -> list[Sequence]:
        return [sequence for sequence, got in self.stepper.got.items() if got.finish_reason is None]

    def check(self) -> None:
        self.stepper.scheduler.check_integrity()


class SteppingMachine(Machine):
    """Launches and commits steps in any order, up to two in flight."""

    @precondition(lambda self: len(self.stepper.in_flight) < 2)
    @rule()
    def schedule(self) -> None:
        self.stepper.schedule()
        self.check()

    @precondition(lambda self: self.stepper.in_flight)
    @rule()
    def commit(self) -> None:
        self.stepper.commit()
        self.check()

    @rule(turns=st.integers(1, 12))
    def run_for_a_while(self, turns: int) -> None:
        for _ in range(turns):
            self.stepper.step()
            self.check()
