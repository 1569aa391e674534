"""Plans the prompts of a step: who is admitted, the next chunk of each, and the choices that fork behind the last."""

from __future__ import annotations

from collections.abc import Callable

from aengine.cache.snapshots import slot_of
from aengine.scheduling.flight import Flight
from aengine.scheduling.holdings.loading import Loading
from aengine.scheduling.holdings.memory import SequenceMemory
from aengine.scheduling.phases import Phases
from aengine.scheduling.planning.budget import PrefillBudget
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import MixedLimit, PrefillChunk, StepPlan

# A burst must not delay the steps of those who run. Once so many sequences have entered in a step, those that forked
# included, or so many tokens were looked up in the cache for them, no further request enters.
MAX_ADMISSIONS = 64
MAX_LOOKED_UP = 131_072


class Prefills:
    """Admits by rank. A prompt that has begun is read to its end before the next one begins."""

    def __init__(
        self,
        memory: SequenceMemory,
        phases: Phases,
        max_step_tokens: int,
        mixed_limit: MixedLimit | None,
        on_begin: Callable[[Sequence], None] | None,
        make_sibling: Callable[[Sequence, int], Sequence],
    ) -> None:
        self.loading: Loading | None = None  # where there are tiers below the pool
        self._memory = memory
        self._phases = phases
        self._max_step_tokens = max_step_tokens
        self._mixed_limit = mixed_limit
        self._on_begin = on_begin
        self._make_sibling = make_sibling

    def plan(self, plan: StepPlan, flight: Flight) -> None:
        """Add chunks of prompts, after the decodes: the one that has begun first, then of those who are admitted."""
        budget = PrefillBudget(self._max_step_tokens, len(plan.decode), self._mixed_limit)
        batch, waiting = self._phases.batch, self._phases.waiting
        for sequence in batch.running:
            if not budget.left:
                return
            if not sequence.decoding:
                self._plan_chunk(sequence, budget, plan, flight)
        looked_up = 0
        while budget.left and batch.free_rows and (head := waiting.head()) is not None:
            if len(plan.new_rows) >= MAX_ADMISSIONS or looked_up > MAX_LOOKED_UP:
                return
            if self.loading is not None and self.loading.begin(head, headroom=len(batch.running)):
                looked_up += head.length
                continue
            if not self._memory.admit(head, headroom=len(batch.running)):
                return  # first come, first served: nobody overtakes the head, but for those whose adapter is not there
            waiting.pop()
            looked_up += head.length
            self._begin(head)
            plan.new_rows.append(batch.enter(head))
            if head.resumes_from and head.launched:
                plan.state_loads.append((head.resumes_from, slot_of(head.row)))
            self._plan_chunk(head, budget, plan, flight)

    def _begin(self, sequence: Sequence) -> None:
        """Count a request's prompt when it enters for the first time."""
        if sequence.cached is None:
            counters = self._phases.counters
            sequence.cached = min(sequence.launched, sequence.prompt_len)
            counters.prompt_tokens += sequence.prompt_len
            counters.cached_tokens += sequence.cached
            from_host = min(sequence.from_host, sequence.cached)
            counters.cached_host_tokens += from_host
            counters.cached_disk_tokens += min(sequence.from_disk, sequence.cached - from_host)
            if self._on_begin is not None:
                self._on_begin(sequence)

    def _plan_chunk(self, sequence: Sequence, budget: PrefillBudget, plan: StepPlan, flight: Flight) -> None:
        """Add the next chunk of a prefill."""
        memory, start = self._memory, sequence.launched
        known = ready = sequence.length
        if memory.windows is not None and (ready := min(known, self._window_room(sequence))) <= start:
            budget.close()
            return
        end = start + budget.take(start, ready - start)
        if ready < known:
            budget.close()
        chunk = PrefillChunk(row=sequence.row, start=start, token_ids=sequence.ids(start, end), samples=end == known)
        if sequence.pool is not None:
            _plan_pool(sequence, chunk)
        if sequence.scoring:
            chunk.score_ids = sequence.prompt[start + 1 : end + 1].tolist()
            chunk.top = sequence.params.prompt_logprobs or 0
        if memory.snapshots is not None and memory.prefix_cache:
            chunk.saves = memory.snapshots.in_chunk(sequence, start, end)
        if memory.windows is not None:
            plan.new_window_pages += memory.windows.grow(sequence, end)
        sequence.launched = end
        sequence.in_flight += 1
        forks: list[Sequence] = []
        if chunk.samples:
            sequence.pending += 1
            sequence.decoding = True
            forks = self._plan_forks(sequence, plan)
            chunk.forks = [fork.row for fork in forks]
        plan.prefill.append(chunk)
        flight.prefill.append((sequence, chunk, forks))

    def _window_room(self, sequence: Sequence) -> int:
        """How many tokens of a prompt there are pages of windows for, if need be by preempting.

        None for more than are launched: not in this step.
        """
        windows, batch = self._memory.windows, self._phases.batch
        if windows is None:
            return sequence.length
        while True:
            room = windows.room(sequence, headroom=len(batch.running))
            # What comes back from its own last chunk, or from those who leave, is on its way.
            if room > sequence.launched or sequence.in_flight or batch.promised:
                return room
            victim = batch.running[-1]
            self._phases.preempt(victim)
            if victim is sequence:
                return 0

    def _plan_forks(self, leader: Sequence, plan: StepPlan) -> list[Sequence]:
        """Fork the siblings of a leader, which draw from the leader's logits.

        Where rows or pages run out, the next sibling queues up, and the others will fork from that one.
        """
        memory, batch = self._memory, self._phases.batch
        unforked, leader.siblings = leader.siblings, 0
        forks: list[Sequence] = []
        while unforked:
            sibling = self._make_sibling(leader, leader.index + 1 + len(forks))
            unforked -= 1
            self._phases.unforked -= 1
            if not batch.free_rows or not memory.reserve(1):
                sibling.siblings = unforked
                self._phases.waiting.push(sibling)
                break
            copy = memory.fork(leader, sibling)
            if memory.windows is not None and (window_copy := memory.windows.fork(leader, sibling)) is not None:
                plan.window_copies.append(window_copy)
            plan.new_rows.append(batch.enter(sibling, leader))
            if memory.snapshots is not None:
                plan.state_copies.append((slot_of(leader.row), slot_of(sibling.row)))
            if copy is not None:
                plan.page_copies.append(copy)
                plan.new_pages.append((sibling.row, len(sibling.pages) - 1, copy[1]))
            sibling.pending += 1
            sibling.decoding = True
            sibling.in_flight += 1
            forks.append(sibling)
        return forks


def _plan_pool(sequence: Sequence, chunk: PrefillChunk) -> None:
    """Pool a chunk: the last one in place of a draw, and of a mean every one."""
    if chunk.samples:
        chunk.samples = False
        sequence.pending += 1
        sequence.decoding = True
    elif sequence.pool is None or not sequence.pool.of_all_tokens:
        return
    chunk.pool = sequence.pool
