"""Plans the decodes of a step: their new pages, and the runs of pages that several of them share."""

from __future__ import annotations

from aengine.scheduling.batch import Transitions
from aengine.scheduling.flight import Flight
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.planning.sharing import shared_runs
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import SharedRun, StepPlan


class Decodes:
    """Plans decodes in order of rank. If pages run out, the running sequence of the largest rank is preempted."""

    def __init__(self, memory: SequenceMemory, transitions: Transitions) -> None:
        self._memory = memory
        self._transitions = transitions
        self._shared_rows: list[int] | None = None  # the decode rows for which `_shared` was computed
        self._shared: list[SharedRun] = []

    def invalidate_shared(self) -> None:
        """Compute the shared runs again in the next plan, because new prefixes have entered the tree."""
        self._shared_rows = None

    def plan(self, plan: StepPlan, flight: Flight) -> None:
        """Add one token of each decoding sequence that has a page for it. Other sequences wait for a later step."""
        stalled = 0  # sequences that wait for promised pages
        memory = self._memory
        page_size, holdings = memory.page_size, memory.holdings
        running = self._transitions.batch.running
        index = 0
        while index < len(running):  # preemption may shorten the list after `index`
            sequence = running[index]
            index += 1
            launched = sequence.launched
            drawn = len(sequence.output) + sequence.pending
            if not sequence.decoding or drawn >= sequence.max_output:
                continue  # still in prefill, or its last draw is in flight
            if sequence.grammar is not None and sequence.grammar.late:
                continue  # the grammar mask is not ready; skip the row in this step
            if launched == len(sequence.pages) * page_size:
                if not self._find_page(sequence, stalled):
                    stalled += 1
                    continue
                memory.grow(sequence, launched + 1, plan)
            elif holdings and sequence.has_stale_table:
                memory.grow(sequence, launched + 1, plan)
            sequence.launched = launched = launched + 1
            if holdings and not launched % page_size:
                for holding in holdings:
                    holding.save(sequence, plan, None)
            sequence.pending += 1
            sequence.in_flight += 1
            plan.decode.append(sequence.row)
            flight.decode.append(sequence)
        if plan.decode != self._shared_rows:
            self._shared_rows = plan.decode
            self._shared = shared_runs(flight.decode, page_size)
        plan.shared = self._shared

    def _find_page(self, sequence: Sequence, stalled: int) -> bool:
        """Free one page for a decoding sequence. Preempts the sequences of the largest rank if necessary.

        Returns False if the sequence gets no page in this step.
        """
        batch = self._transitions.batch
        while not self._memory.reserve(1):
            if stalled < batch.promised:
                return False  # a page becomes free when a step lands
            victim = batch.running[-1]
            self._transitions.preempt(victim)
            if victim is sequence:
                return False
        return True
