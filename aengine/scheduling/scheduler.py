"""The scheduler: decides what the next step carries, and what its draws mean.

Pure and synchronous: no clock, no torch, no I/O. `schedule` may be called again before the step it
planned is committed (lookahead): positions, lengths and pages are known ahead of the token ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from aengine.errors import ContextLengthError, QueueFullError
from aengine.scheduling.batch import Batch
from aengine.scheduling.budget import PrefillBudget
from aengine.scheduling.counters import Counters
from aengine.scheduling.flight import Flight
from aengine.scheduling.integrity import check_batch, check_flights, check_idle, check_pages
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.queue import WaitingQueue
from aengine.scheduling.sequence import Phase, Sequence, Update
from aengine.scheduling.sharing import shared_runs
from aengine.types import MixedLimit, NewRow, PrefillChunk, SharedRun, StepPlan, StepResult

MAX_ADMISSIONS = 64  # sequences that enter in one step, and
MAX_LOOKED_UP = 131_072  # tokens looked up in the cache for them: a burst must not delay the steps of those who run


class Scheduler:
    """Continuous batching with chunked prefill, priorities, preemption and a shared prefix cache.

    Rank orders everything: who is admitted first, who gets pages first, who has to give way. A prompt that
    has begun is read to its end before the next one begins, so that at most one stands half read. When pages
    run out the cache is evicted, then the running sequence of the largest rank is preempted.

    `max_step_tokens` must not be below `max_rows` (`ValueError`): decoding alone would fill every step. `mixed_limit`
    bounds the prompt tokens of steps that also decode.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_step_tokens: int,
        max_queue: int,
        prefix_cache: bool = True,
        mixed_limit: MixedLimit | None = None,
        on_begin: Callable[[Sequence], None] | None = None,  # told of each sequence that enters for the first time
    ) -> None:
        if max_rows < 1 or max_step_tokens < max_rows:
            raise ValueError(f"a step of {max_step_tokens} tokens cannot carry {max_rows} sequences")
        self.memory = SequenceMemory(num_pages, page_size, prefix_cache)
        self.counters = Counters()
        self._max_step_tokens = max_step_tokens
        self._mixed_limit = mixed_limit
        self._max_queue = max_queue
        self._page_size = page_size
        self._on_begin = on_begin
        self._waiting = WaitingQueue()
        self._batch = Batch(max_rows, self.memory)
        self._flights: deque[Flight] = deque()
        self._next_step = 0
        self._shared_rows: list[int] | None = None  # the decode rows that `_shared` was worked out for
        self._shared: list[SharedRun] = []

    # ---- what the engine sees -----------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that hold a row."""
        return self._batch.held

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self._waiting and not self._flights and not self._batch.held

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence, prompt and output, that the pool can hold alone."""
        return self.memory.usable_pages * self._page_size + 1  # the newest token needs no KV

    def add(self, sequence: Sequence) -> None:
        """Enqueue a sequence; its `siblings` join it after the prefill.

        Raises `QueueFullError` beyond the queue bound and `ContextLengthError` if it can never fit.
        """
        if sequence.max_total > self.capacity_tokens:
            raise ContextLengthError(
                f"This model's maximum context length is {self.capacity_tokens} tokens, as the KV pool holds no more. "
                f"However, {sequence.prompt_len} tokens are given as prompt and max_tokens is "
                f"{sequence.max_total - sequence.prompt_len}",
                "max_tokens",
            )
        if len(self._waiting) >= self._max_queue:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting, the bound is {self._max_queue}")
        self._waiting.push(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan the next step and count it as launched, or return None when nothing can run now."""
        plan = StepPlan(step=self._next_step, new_rows=[], new_pages=[], decode=[], prefill=[], page_copies=[])
        flight = Flight(plan)
        self._plan_decode(plan, flight)
        self._plan_prefill(plan, flight)
        if not plan.decode and not plan.prefill:
            return None
        plan.structured = self._batch.structured > 0 and any(
            sequence.grammar is not None for sequence in flight.draws()
        )
        self._next_step += 1
        self._flights.append(flight)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Take over a finished step's draws: the oldest one in flight, which must be `plan`."""
        if not self._flights or self._flights[0].plan is not plan:
            raise RuntimeError(f"step {plan.step} is not the oldest in flight")
        flight = self._flights.popleft()
        self.counters.steps += 1
        self.counters.computed_tokens += plan.num_tokens
        for sequence in flight.decode:
            if sequence.phase is not Phase.FINISHED:
                sequence.computed += 1
        for sequence, chunk, forks in flight.prefill:
            for holder in (sequence, *forks):
                if holder.phase is not Phase.FINISHED:
                    holder.computed = chunk.start + len(chunk.token_ids)
        scores = iter(result.scores)
        for sequence, chunk, _ in flight.prefill:
            if chunk.score_ids:  # a resumed prompt starts anew, and says the same again
                sequence.scores[chunk.start : chunk.start + len(chunk.score_ids)] = next(scores)
        updates = self._commit_draws(flight, result)
        for sequence, _, forks in flight.prefill:  # after the draws, which tell whose numbers are not finite
            for holder in (sequence, *forks):
                if holder.phase is Phase.RUNNING:
                    self.memory.publish(holder, holder.computed)
        if flight.prefill:
            self._shared_rows = None  # those who are decoding already may share more now
        for sequence in flight.carried():
            self._land(sequence)
        return updates

    def structured(self, plan: StepPlan) -> list[Sequence]:
        """The sequences with a grammar that draw in a step in flight, in the order of the draws."""
        flight = next(flight for flight in self._flights if flight.plan is plan)
        return [sequence for sequence in flight.draws() if sequence.grammar is not None]

    def finish(self, sequence: Sequence, n_tokens: int) -> None:
        """End a sequence after its first `n_tokens` output tokens (a stop string matched there)."""
        # A new list: the old one may stand in a plan that the device has yet to read.
        sequence.tokens = sequence.tokens[: sequence.prompt_len + n_tokens]
        self._end(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in whatever phase it is; ended ones stay as they are."""
        self._end(sequence)

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """Give up a step and its successors in flight, none of which may still be running on the device.

        The sequences of `plan` itself end and are returned, with siblings that wait for their prefill; those
        that only its successors carried go back to the queue. Nothing of the failed step enters the tree.
        """
        failed: list[Sequence] = []
        kept: deque[Flight] = deque()
        for flight in self._flights:
            if flight.plan.step < plan.step:
                kept.append(flight)
                continue
            for sequence in flight.draws():
                sequence.pending -= 1
            for sequence in flight.carried():
                if flight.plan is plan:
                    failed += self._fail(sequence)
                elif sequence.phase is Phase.RUNNING:
                    self._leave(sequence, Phase.PREEMPTED)
                self._land(sequence)
        self._flights = kept
        return failed

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows, pages and reference counts add up. For tests and idle checks."""
        running = self._batch.running
        leaving = {sequence for flight in self._flights for sequence in flight.carried()}.difference(running)
        check_batch(self._batch, leaving)
        check_flights(running, leaving, self._flights)
        check_pages(self.memory, {*running, *leaving})
        if self.idle:
            check_idle(self.memory)

    # ---- planning -----------------------------------------------------------------------------------------

    def _plan_decode(self, plan: StepPlan, flight: Flight) -> None:
        stalled = 0  # sequences that wait for promised pages
        page_size = self._page_size
        running = self._batch.running
        index = 0
        while index < len(running):  # preemption may shorten the list behind `index`
            sequence = running[index]
            index += 1
            launched = sequence.launched
            total = len(sequence.tokens) + sequence.pending
            if not sequence.decoding or total >= sequence.max_total:
                continue  # still in prefill, or its last draw is in flight
            if launched == len(sequence.pages) * page_size:
                if not self._find_page(sequence, stalled):
                    stalled += 1
                    continue
                plan.new_pages.append((sequence.row, len(sequence.pages), self.memory.grow(sequence)))
            sequence.launched = launched + 1
            sequence.pending += 1
            sequence.in_flight += 1
            plan.decode.append(sequence.row)
            flight.decode.append(sequence)
        if plan.decode != self._shared_rows:
            self._shared_rows = plan.decode
            self._shared = shared_runs(flight.decode, page_size)
        plan.shared = self._shared

    def _find_page(self, sequence: Sequence, stalled: int) -> bool:
        """One free page for a decoding sequence; the youngest pay for it. False: not in this step."""
        while not self.memory.reserve(1):
            if stalled < self._batch.promised:
                return False  # a page is on its way
            victim = self._batch.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _plan_prefill(self, plan: StepPlan, flight: Flight) -> None:
        budget = PrefillBudget(self._max_step_tokens, len(plan.decode), self._mixed_limit)
        batch = self._batch
        for sequence in batch.running:
            if not budget.left:
                return
            if not sequence.decoding:
                self._plan_chunk(sequence, budget, plan, flight)
        admitted = looked_up = 0
        while budget.left and batch.free_rows and (head := self._waiting.head()) is not None:
            if admitted == MAX_ADMISSIONS or looked_up > MAX_LOOKED_UP:
                return
            if not self.memory.admit(head, headroom=len(batch.running)):
                return  # first come, first served: nobody overtakes the head
            self._waiting.pop()
            admitted += 1
            looked_up += len(head.tokens)
            self._enter(head, plan)
            self._plan_chunk(head, budget, plan, flight)

    def _enter(self, sequence: Sequence, plan: StepPlan) -> None:
        """Put an admitted sequence on a row."""
        if sequence.cached is None:
            sequence.cached = min(sequence.launched, sequence.prompt_len)
            self.counters.prompt_tokens += sequence.prompt_len
            self.counters.cached_tokens += sequence.cached
            if self._on_begin is not None:
                self._on_begin(sequence)
        self._batch.enter(sequence)
        plan.new_rows.append(
            NewRow(
                row=sequence.row,
                params=sequence.params,
                seed=sequence.seed,
                stop_ids=sequence.stop_ids,
                prompt_len=sequence.prompt_len,
                tokens=sequence.tokens,
                length=sequence.launched,
                pages=list(sequence.pages),
                banned=sequence.banned,
            )
        )

    def _plan_chunk(self, sequence: Sequence, budget: PrefillBudget, plan: StepPlan, flight: Flight) -> None:
        """Add the next chunk of a prefill."""
        start = sequence.launched
        end = start + budget.take(start, len(sequence.tokens) - start)
        chunk = PrefillChunk(
            row=sequence.row,
            start=start,
            token_ids=sequence.tokens[start:end],
            samples=end == len(sequence.tokens),
        )
        if sequence.scoring:
            chunk.score_ids = sequence.tokens[start + 1 : min(end + 1, sequence.prompt_len)]
            chunk.top = sequence.params.prompt_logprobs or 0
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

    def _plan_forks(self, leader: Sequence, plan: StepPlan) -> list[Sequence]:
        """Let the siblings draw from the leader's logits; those without a row or page queue up instead."""
        siblings, leader.siblings = leader.siblings, []
        forks: list[Sequence] = []
        for sibling in siblings:
            if sibling.phase is not Phase.WAITING:
                continue
            if not self._batch.free_rows or not self.memory.reserve(1):
                self._waiting.push(sibling)
                continue
            copy = self.memory.fork(leader, sibling)
            if copy is not None:
                plan.page_copies.append(copy)
            sibling.launched, sibling.computed = leader.launched, leader.computed
            sibling.cached = leader.prompt_len  # computed once, counted once
            self._enter(sibling, plan)
            sibling.pending += 1
            sibling.decoding = True
            sibling.in_flight += 1
            forks.append(sibling)
        return forks

    # ---- leaving ------------------------------------------------------------------------------------------

    def _commit_draws(self, flight: Flight, result: StepResult) -> list[Update]:
        updates: list[Update] = []
        logprobs = result.logprobs
        for place, sequence in enumerate(flight.draws()):
            sequence.pending -= 1
            if sequence.phase is Phase.FINISHED:
                continue  # ended while this step was in flight: its token appears nowhere
            if not result.finite[place]:
                sequence.tainted = True
                updates.append(Update(sequence, -1, None, "error", finite=False))
                self._end(sequence)
                continue
            token_id = result.token_ids[place]
            sequence.tokens.append(token_id)
            if sequence.grammar is not None:
                sequence.grammar.accept(token_id)
            self.counters.generated_tokens += 1
            update = Update(sequence, token_id, logprobs[place] if logprobs else None, None)
            if token_id in sequence.stops:
                update.finish_reason = "stop"
                self._end(sequence)
            elif len(sequence.tokens) >= sequence.max_total:
                update.finish_reason = "length"
                self._end(sequence)
            updates.append(update)
        return updates

    def _land(self, sequence: Sequence) -> None:
        """A step that named the sequence is over."""
        if self._batch.land(sequence):
            self._requeue(sequence)

    def _leave(self, sequence: Sequence, phase: Phase) -> None:
        """Take a RUNNING sequence out of the batch, at once or when its last step in flight lands."""
        if self._batch.leave(sequence, phase):
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """A preempted sequence that has given everything back returns to its place in the queue."""
        if sequence.phase is Phase.PREEMPTED:
            sequence.phase = Phase.WAITING
            self._waiting.push(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self._leave(sequence, Phase.PREEMPTED)

    def _end(self, sequence: Sequence) -> None:
        match sequence.phase:
            case Phase.FINISHED:
                return
            case Phase.WAITING:
                self._waiting.remove(sequence)
                sequence.phase = Phase.FINISHED
            case Phase.PREEMPTED:
                sequence.phase = Phase.FINISHED
            case Phase.RUNNING:
                self._leave(sequence, Phase.FINISHED)
        self.counters.ended += 1
        heirs = [sibling for sibling in sequence.siblings if sibling.phase is Phase.WAITING]
        sequence.siblings = []
        if heirs:  # it ended before its prefill did: the next sibling does the prefill
            heirs[0].siblings = heirs[1:]
            self._waiting.push(heirs[0])

    def _fail(self, sequence: Sequence) -> list[Sequence]:
        """End a sequence whose step failed, and the siblings that wait for it; return those that had not ended."""
        family = [sequence, *sequence.siblings]
        sequence.siblings = []
        failed = [member for member in family if member.phase is not Phase.FINISHED]
        for member in family:
            member.tainted = True
        for member in failed:
            self._end(member)
        return failed


def enqueue_all(scheduler: Scheduler, sequences: Seq[Sequence]) -> None:
    """Add the choices of one request: the first prefills, the others fork from it."""
    leader, *siblings = sequences
    leader.siblings = siblings
    scheduler.add(leader)
