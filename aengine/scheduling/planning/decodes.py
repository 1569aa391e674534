"""Plans the decodes of a step: their new pages, and the runs of pages that several of them share."""

from __future__ import annotations

from aengine.scheduling.batch import Transitions
from aengine.scheduling.flight import Flight
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.planning.drafting import Drafting, DraftRoom
from aengine.scheduling.planning.sharing import shared_runs
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import MixedLimit, SharedRun, StepPlan


class Decodes:
    """Plans decodes in order of rank. If pages run out, the running sequence of the largest rank is preempted."""

    def __init__(
        self,
        memory: SequenceMemory,
        transitions: Transitions,
        drafting: Drafting,
        max_step_tokens: int,
        mixed_limit: MixedLimit | None,
    ) -> None:
        self._memory = memory
        self._transitions = transitions
        self._drafting = drafting
        self._max_step_tokens = max_step_tokens
        self._mixed_limit = mixed_limit
        self._shared_rows: list[int] | None = None  # the decode rows for which `_shared` was computed
        self._shared: list[SharedRun] = []

    def invalidate_shared(self) -> None:
        """Compute the shared runs again in the next plan, because new prefixes have entered the tree."""
        self._shared_rows = None

    def plan(self, plan: StepPlan, flight: Flight) -> None:
        """Add the next token of each decoding sequence that has a page for it, and its drafts.

        Other sequences wait for a later step.
        """
        stalled = 0  # sequences that wait for promised pages
        memory = self._memory
        page_size, holdings = memory.page_size, memory.holdings
        running = self._transitions.batch.running
        room = None
        if self._drafting.most:
            room = self._room()
            self._drafting.begin(running, plan, room.drafts(len(running), page_size))
        drafted: list[tuple[Sequence, int]] = []
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
            if room is not None and sequence.proposed and (drafts := self._plan_drafts(sequence, room, plan)):
                drafted.append((sequence, drafts))
                continue
            if launched == len(sequence.pages) * page_size:
                if not self._find_page(sequence, stalled, index):
                    stalled += 1
                    continue
                memory.grow(sequence, launched + 1, plan)
            elif holdings and sequence.has_stale_table:
                memory.grow(sequence, launched + 1, plan)
            sequence.launched = launched = launched + 1
            if holdings and (room is not None or not launched % page_size):
                for holding in holdings:
                    holding.save(sequence, plan, None)
            sequence.pending += 1
            sequence.in_flight += 1
            plan.decode.append(sequence.row)
            flight.decode.append(sequence)
        if plan.decode != self._shared_rows:
            self._shared_rows = list(plan.decode)
            self._shared = shared_runs(flight.decode, page_size)
        plan.shared = self._shared
        if drafted:
            plan.drafts = [0] * len(plan.decode) + [drafts for _, drafts in drafted]
            plan.decode += [sequence.row for sequence, _ in drafted]
            flight.decode += [sequence for sequence, _ in drafted]
        if room is not None:
            plan.contexts = [sequence.launched for sequence in flight.decode]

    def plan_proposals(self, plan: StepPlan, flight: Flight) -> None:
        """Give each drawing sequence the pages of the drafts that it makes in this step, if pages are left.

        A draft head writes its own keys of them there. Without pages it writes them to page 0, and its later drafts of
        the step are worse. The next step needs the same pages to verify the drafts. Call it after the prompts are
        planned: as for drafts to verify, no sequence is preempted, and no prompt waits for these pages.
        """
        memory = self._memory
        left = memory.available_to_all - 2 * len(self._transitions.batch.running)
        for sequence in flight.draws():
            drafts = min(plan.proposals, sequence.max_output - len(sequence.output) - sequence.pending - 1)
            if drafts <= 0 or not sequence.speculates:
                continue
            tokens = sequence.launched + 1 + drafts
            missing = memory.pages_for(tokens) - len(sequence.pages)
            if 0 < missing <= left and memory.reserve(missing):
                memory.grow(sequence, tokens, plan)
                left -= missing

    def _room(self) -> DraftRoom:
        """Return what drafts may use.

        Two pages for each running sequence stay available, for its tokens of this step and of the next one. So drafts
        never cause a preemption. If prompts wait, they get at least half of the tokens that decodes leave.
        """
        batch, waiting = self._transitions.batch, self._transitions.waiting
        rows = len(batch.running)
        tokens = self._max_step_tokens
        if (batch.free_rows and len(waiting)) or any(not sequence.decoding for sequence in reversed(batch.running)):
            if self._mixed_limit is not None:
                tokens = min(tokens, self._mixed_limit.tokens)
            return DraftRoom((tokens - rows) // 2, self._memory.available_to_all - 2 * rows)
        return DraftRoom(tokens - rows, self._memory.available_to_all - 2 * rows)

    def _plan_drafts(self, sequence: Sequence, room: DraftRoom, plan: StepPlan) -> int:
        """Plan the next token of a sequence with drafts after it. Returns their number; 0: nothing is planned."""
        drafts = min(self._drafting.wanted(sequence), room.tokens)
        if drafts <= 0 or room.pages < 0:
            return 0
        memory = self._memory
        held, known = len(sequence.pages), sequence.launched + 1
        for_token = max(held, memory.pages_for(known))
        drafts = min(drafts, (for_token + room.pages) * memory.page_size - known)
        missing = memory.pages_for(known + drafts) - held
        if drafts <= 0 or not memory.reserve(missing):
            return 0
        if missing > 0 or (memory.holdings and sequence.has_stale_table):
            memory.grow(sequence, known + drafts, plan)
        room.tokens -= drafts
        room.pages -= max(held + missing - for_token, 0)
        sequence.launched = known + drafts
        for holding in memory.holdings:
            holding.save(sequence, plan, None)
        sequence.pending += 1 + drafts
        sequence.in_flight += 1
        return drafts

    def _find_page(self, sequence: Sequence, stalled: int, index: int) -> bool:
        """Free one page for a decoding sequence. Preempts the sequences of the largest rank if necessary.

        index: the sequences from this one on have yet to be planned. Returns False if the sequence gets no page in this
        step.
        """
        batch, memory = self._transitions.batch, self._memory
        if not memory.reserve(1):
            for waiting in (sequence, *batch.running[index:]):  # the tables of others may not change in this step
                for holding in memory.holdings:
                    holding.trim(waiting)
        while not memory.reserve(1):
            if stalled < batch.promised:
                return False  # a page becomes free when a step lands
            victim = batch.running[-1]
            self._transitions.preempt(victim)
            if victim is sequence:
                return False
        return True
