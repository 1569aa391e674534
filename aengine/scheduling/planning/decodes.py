"""Plans the sequences of a step that decode: a page where one is full, and what several of them read together."""

from __future__ import annotations

from aengine.scheduling.flight import Flight
from aengine.scheduling.holdings.memory import SequenceMemory
from aengine.scheduling.phases import Phases
from aengine.scheduling.planning.sharing import shared_runs
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import SharedRun, StepPlan


class Decodes:
    """Pages go to the smallest rank first; where they run out, the running one of the largest rank is preempted."""

    def __init__(self, memory: SequenceMemory, phases: Phases) -> None:
        self._memory = memory
        self._phases = phases
        self._shared_rows: list[int] | None = None  # the decode rows that `_shared` was worked out for
        self._shared: list[SharedRun] = []

    def share_more(self) -> None:
        """Work out anew what is shared: prompts were published, whose prefixes those who decode already may have."""
        self._shared_rows = None

    def plan(self, plan: StepPlan, flight: Flight) -> None:
        """Add a token of each sequence that decodes and has a page for it; what does not fit stays for a later step."""
        stalled = 0  # sequences that wait for promised pages
        memory, batch = self._memory, self._phases.batch
        page_size, windows, snapshots = memory.page_size, memory.windows, memory.snapshots
        running = batch.running
        index = 0
        while index < len(running):  # preemption may shorten the list behind `index`
            sequence = running[index]
            index += 1
            launched = sequence.launched
            drawn = len(sequence.output) + sequence.pending
            if not sequence.decoding or drawn >= sequence.max_output:
                continue  # still in prefill, or its last draw is in flight
            if sequence.grammar is not None and sequence.grammar.late:
                continue  # what it may draw is being worked out: nobody waits for that
            if launched == len(sequence.pages) * page_size:
                if not self._find_page(sequence, stalled):
                    stalled += 1
                    continue
                plan.new_pages.append((sequence.row, len(sequence.pages), memory.grow(sequence)))
                if windows is not None:
                    plan.new_window_pages += windows.grow(sequence, launched + 1)
            elif windows is not None and sequence.window_shown < sequence.window_first:
                plan.new_window_pages += windows.grow(sequence, launched)
            sequence.launched = launched + 1
            if snapshots is not None and memory.prefix_cache:
                plan.state_copies += snapshots.after_decode(sequence)
            sequence.pending += 1
            sequence.in_flight += 1
            plan.decode.append(sequence.row)
            flight.decode.append(sequence)
        if plan.decode != self._shared_rows:
            self._shared_rows = plan.decode
            self._shared = shared_runs(flight.decode, page_size)
        plan.shared = self._shared

    def _find_page(self, sequence: Sequence, stalled: int) -> bool:
        """Make one page free for a decoding sequence, if need be by preempting the one of the largest rank. False: not
        in this step.
        """
        batch = self._phases.batch
        while not self._memory.reserve(1):
            if stalled < batch.promised:
                return False  # a page is on its way
            victim = batch.running[-1]
            self._phases.preempt(victim)
            if victim is sequence:
                return False
        return True
