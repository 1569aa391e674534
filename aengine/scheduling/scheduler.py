"""The scheduler: plans the next step, and applies the results of the last one.

Pure and synchronous: no clock, no torch, no I/O. `schedule` may be called again before the step it
planned is committed (lookahead): positions, lengths and pages are known ahead of the token ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from aengine.cache.tiers.tiers import Tiers
from aengine.errors import ContextLengthError, QueueFullError
from aengine.scheduling.addons.loading import Loading
from aengine.scheduling.batch import Batch, Counters, Transitions
from aengine.scheduling.flight import Flight, commit_chunks, commit_computed, commit_draws
from aengine.scheduling.holding import Holding
from aengine.scheduling.integrity import check_batch, check_flights, check_idle, check_pages, check_unforked
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.planning.decodes import Decodes
from aengine.scheduling.planning.drafting import Drafting
from aengine.scheduling.planning.prefills import Prefills
from aengine.scheduling.queue import Queue, WaitingQueue
from aengine.scheduling.sequence import Phase, Sequence, Update, sibling_of
from aengine.step_cost import FREE, StepCost
from aengine.step_plan import ImageCost, MixedLimit, StepPlan, StepResult


class Scheduler:
    """Continuous batching with chunked prefill, priorities, preemption and a shared prefix cache.

    Rank decides which sequence is admitted first, which gets pages first, and which is preempted first. All
    chunks of a prompt are planned before the next prompt begins. When pages run out, cached pages are evicted, then the
    running sequence of the largest rank is preempted.

    The other choices of a request are only counted, in `Sequence.siblings`, until they fork. Each becomes a sequence
    when it gets a row.
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
        on_begin: Callable[[Sequence], None] | None = None,
        make_sibling: Callable[[Sequence, int], Sequence] = sibling_of,
        waiting: Queue | None = None,
        holdings: Seq[Holding] = (),
        image_cost: ImageCost | None = None,
        most_drafts: int = 0,
        step_cost: StepCost = FREE,
        counters: Counters | None = None,
    ) -> None:
        """Raises `ValueError` if `max_step_tokens` is below `max_rows`: decoding alone would fill every step.

        Args:
            mixed_limit: bounds the prompt tokens of steps that also decode. None: no bound.
            on_begin: called with each sequence when it gets a row for the first time.
            make_sibling: (leader, index) -> the choice with this index, which forks from the leader.
            waiting: the queue. None: a `WaitingQueue`.
            holdings: memory that sequences hold in addition to pages.
            image_cost: the cost of a tower's work. None: it costs nothing.
            most_drafts: the most drafts that a sequence verifies in a step. 0: none does.
            step_cost: from which the number of drafts is chosen. With `FREE`, rows always verify the most drafts.
            counters: count what steps do. None: new ones.
        """
        if max_rows < 1 or max_step_tokens < max_rows:
            raise ValueError(f"a step of {max_step_tokens} tokens cannot carry {max_rows} sequences")
        self.memory = SequenceMemory(num_pages, page_size, prefix_cache, holdings)
        self._max_queue = max_queue
        self._waiting = WaitingQueue() if waiting is None else waiting
        self._batch = Batch(max_rows, self.memory)
        self.counters = Counters() if counters is None else counters
        self._transitions = Transitions(self._waiting, self._batch, self.counters)
        self._drafting = Drafting(most_drafts, step_cost)
        self._decodes = Decodes(self.memory, self._transitions, self._drafting, max_step_tokens, mixed_limit)
        self._prefills = Prefills(
            self.memory, self._transitions, max_step_tokens, mixed_limit, on_begin, make_sibling, image_cost
        )  # fmt: skip
        self._flights: deque[Flight] = deque()
        self._next_step = 0

    def attach(self, tiers: Tiers) -> Loading:
        """Load pages for waiting sequences from these tiers. The tree must still be empty."""
        self._prefills.loading = Loading(self.memory, tiers, self._waiting)
        return self._prefills.loading

    @property
    def loading(self) -> Loading | None:
        """The loads from lower tiers; None if there are no tiers."""
        return self._prefills.loading

    # ---- for the engine -----------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """The number of sequences that hold a row."""
        return self._batch.held

    @property
    def waiting(self) -> int:
        """The number of sequences in the queue, and of choices that have yet to fork."""
        return len(self._waiting) + self._transitions.unforked

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is in flight."""
        loading = self.loading is not None and self.loading.busy
        return not self._waiting and not self._flights and not self._batch.held and not loading

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence, prompt and output, that the pool can hold alone."""
        return self.memory.usable_pages * self.memory.page_size + 1  # the newest token needs no KV

    def add(self, sequence: Sequence) -> None:
        """Enqueue a sequence. Its `siblings` fork from it after its prefill.

        Raises `QueueFullError` if the queue is full and `ContextLengthError` if the sequence can never fit. An empty
        queue accepts a request with any number of choices.
        """
        if sequence.max_total > self.capacity_tokens:
            raise ContextLengthError(
                f"This model's maximum context length is {self.capacity_tokens} tokens, as the KV pool holds no more. "
                f"However, {sequence.prompt_len} tokens are given as prompt and max_tokens is "
                f"{sequence.max_output}",
                "max_tokens",
            )
        self._check_queue(1 + sequence.siblings)
        self._transitions.unforked += sequence.siblings
        self._waiting.push(sequence)

    def add_pooled(self, sequences: Seq[Sequence]) -> None:
        """Enqueue the pooled prompts of one request: all of them or none. Raises as `add` does."""
        for sequence in sequences:
            if sequence.prompt_len > self.capacity_tokens - 1:
                raise ContextLengthError(
                    f"This model's maximum context length is {self.capacity_tokens - 1} tokens, as the KV pool holds "
                    f"no more. However, {sequence.prompt_len} tokens are given as prompt",
                    "prompt",
                )
        self._check_queue(len(sequences))
        for sequence in sequences:
            self._waiting.push(sequence)

    def _check_queue(self, count: int) -> None:
        """Raise `QueueFullError` if the queue has no space for `count` more sequences."""
        waiting = self.waiting
        if waiting >= self._max_queue or (waiting and waiting + count > self._max_queue):
            raise QueueFullError(f"{waiting} requests are waiting, the bound is {self._max_queue}")

    def schedule(self) -> StepPlan | None:
        """Plan the next step and count it as launched. Returns None if nothing can run now."""
        plan = StepPlan(step=self._next_step, new_rows=[], new_pages=[], decode=[], prefill=[], page_copies=[])
        flight = Flight(plan)
        self._decodes.plan(plan, flight)
        self._prefills.plan(plan, flight)
        if plan.proposals:
            self._decodes.plan_proposals(plan, flight)
        if not plan.decode and not plan.prefill:
            return None
        plan.structured = self._batch.structured > 0 and any(
            sequence.grammar is not None for sequence in flight.draws()
        )
        if self._drafting.most:
            for sequence in flight.draws():
                sequence.proposed = plan.proposals
            if not plan.is_read:
                for sequence in flight.carried():
                    sequence.has_gap = True
        self._next_step += 1
        self._flights.append(flight)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Apply a finished step's results. `plan` must be the oldest step in flight."""
        if not self._flights or self._flights[0].plan is not plan:
            raise RuntimeError(f"step {plan.step} is not the oldest in flight")
        flight = self._flights.popleft()
        self.counters.steps += 1
        self.counters.step_tokens.observe(plan.num_tokens)
        commit_computed(flight, result, self.counters, self._drafting.observe)
        updates = commit_chunks(flight, result, self._transitions.end) if flight.prefill else []
        updates += commit_draws(flight, result, self.counters, self._transitions.end)
        if flight.prefill:
            self._publish(flight)  # after `commit_draws`, which finds values that are not finite
        self._transitions.land(flight.carried())
        return updates

    def _publish(self, flight: Flight) -> None:
        """Add the prompt pages that a committed step has computed to the tree."""
        for sequence, _, forks in flight.prefill:
            for holder in (sequence, *forks):
                if holder.phase is Phase.RUNNING:
                    self.memory.publish(holder)
        self._decodes.invalidate_shared()

    def observe_time(self, plan: StepPlan, seconds: float) -> None:
        """Note how long a committed step took. The number of drafts depends on it."""
        self._drafting.observe_time(plan, seconds)

    def structured_draws(self, plan: StepPlan) -> list[tuple[Sequence, Seq[int]]]:
        """Return the sequences with a grammar that draw in a step in flight, and the drafts that each verifies in it.

        They are in the order of the draws. The step before must be committed.
        """
        flight = next(flight for flight in self._flights if flight.plan is plan)
        return [
            (sequence, sequence.draft_ids[: drawn - 1])
            for sequence, drawn in zip(flight.draws(), flight.drawn(), strict=True)
            if sequence.grammar is not None
        ]

    def finish(self, sequence: Sequence, n_tokens: int) -> None:
        """End a sequence after its first `n_tokens` output tokens (a stop string matched there)."""
        self.counters.generated_tokens -= len(sequence.output) - n_tokens
        sequence.cut(n_tokens)
        self._transitions.end(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in any phase, and the choices that have yet to fork from it. Idempotent."""
        self._transitions.end(sequence)

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """Drop a failed step and all later steps in flight. Returns the sequences of the failed step, which end.

        None of these steps may still be running on the device. Other sequences of the later steps return to the queue.
        Nothing that the failed step computed enters the tree.
        """
        failed: list[Sequence] = []
        kept: deque[Flight] = deque()
        for flight in self._flights:
            if flight.plan.step < plan.step:
                kept.append(flight)
                continue
            for sequence, drawn in zip(flight.draws(), flight.drawn(), strict=True):
                sequence.pending -= drawn
            for sequence in flight.pooling():
                sequence.pending -= 1
            for sequence in flight.carried():
                if flight.plan is plan:
                    sequence.cacheable = False
                    if sequence.phase is not Phase.FINISHED:
                        failed.append(sequence)
                        self._transitions.end(sequence)
                elif sequence.phase is Phase.RUNNING:
                    self._transitions.leave(sequence, Phase.PREEMPTED)
                self._transitions.land([sequence])
        self._flights = kept
        return failed

    def flush_cache(self) -> None:
        """Drop every cached prefix. Running sequences keep their pages, but these will not be cached."""
        self.memory.tree.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows, pages and reference counts add up. For tests and idle checks."""
        running = self._batch.running
        leaving = {sequence for flight in self._flights for sequence in flight.carried()}.difference(running)
        check_batch(self._batch, leaving)
        check_flights(running, leaving, self._flights)
        check_pages(self.memory, {*running, *leaving}, [] if self.loading is None else self.loading.pages)
        self.memory.check_holdings({*running, *leaving})
        check_unforked(self._transitions.unforked, {*self._waiting, *running, *leaving})
        self._waiting.check_integrity([*running, *leaving])
        if self.loading is not None:
            self.loading.check_integrity()
        if self.idle:
            check_idle(self.memory)
