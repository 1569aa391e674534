"""The scheduler: decides what the next step carries, and what its draws mean.

Pure and synchronous: no clock, no torch, no I/O. `schedule` may be called again before the step it
planned is committed (lookahead): positions, lengths and pages are known ahead of the token ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from aengine.cache.snapshots import SnapshotRoom, slot_of
from aengine.cache.tiers.tiers import Tiers
from aengine.cache.windows import WindowRoom
from aengine.errors import ContextLengthError, QueueFullError
from aengine.scheduling.adapter_queue import AdapterQueue
from aengine.scheduling.batch import Batch
from aengine.scheduling.budget import PrefillBudget
from aengine.scheduling.commit import commit_chunks, commit_draws
from aengine.scheduling.counters import Counters
from aengine.scheduling.flight import Flight
from aengine.scheduling.integrity import (
    check_batch,
    check_flights,
    check_idle,
    check_pages,
    check_snapshots,
    check_unforked,
    check_windows,
)
from aengine.scheduling.loading import Loading
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.queue import WaitingQueue
from aengine.scheduling.sequence import Phase, Sequence, Update, sibling_of
from aengine.scheduling.sharing import shared_runs
from aengine.scheduling.snapshots import SequenceSnapshots
from aengine.scheduling.windows import SequenceWindows
from aengine.step_plan import MixedLimit, PrefillChunk, SharedRun, StepPlan, StepResult

# A burst must not delay the steps of those who run. Once so many sequences have entered in a step, those that forked
# included, or so many tokens were looked up in the cache for them, no further request enters.
MAX_ADMISSIONS = 64
MAX_LOOKED_UP = 131_072


class Scheduler:
    """Continuous batching with chunked prefill, priorities, preemption and a shared prefix cache.

    Rank orders everything: who is admitted first, who gets pages first, who has to give way. A prompt that
    has begun is read to its end before the next one begins, so that at most one stands half read. When pages
    run out the cache is evicted, then the running sequence of the largest rank is preempted.

    The choices of a request wait as a number on the sequence that they will fork from; `make_sibling(leader, index)`
    makes each when it gets a row.

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
        on_begin: Callable[[Sequence], None] | None = None,  # called with each request that enters for the first time
        make_sibling: Callable[[Sequence, int], Sequence] = sibling_of,
        adapters: AdapterQueue | None = None,  # where sequences may have some
        snapshots: SnapshotRoom | None = None,  # of a model that keeps states
        windows: WindowRoom | None = None,  # of one some of whose layers keep no more than a window of each sequence
    ) -> None:
        if max_rows < 1 or max_step_tokens < max_rows:
            raise ValueError(f"a step of {max_step_tokens} tokens cannot carry {max_rows} sequences")
        self._snapshots = None if snapshots is None else SequenceSnapshots(snapshots, slot_of(max_rows), page_size)
        self._windows = None if windows is None else SequenceWindows(windows, page_size)
        self.memory = SequenceMemory(num_pages, page_size, prefix_cache, self._snapshots, self._windows)
        self.counters = Counters()
        self._max_step_tokens = max_step_tokens
        self._mixed_limit = mixed_limit
        self._max_queue = max_queue
        self._page_size = page_size
        self._on_begin = on_begin
        self._make_sibling = make_sibling
        self._unforked = 0  # choices that wait as a number
        self.adapters = adapters
        self._waiting = WaitingQueue() if adapters is None else adapters
        self._batch = Batch(max_rows, self.memory)
        self._flights: deque[Flight] = deque()
        self._next_step = 0
        self.loading: Loading | None = None  # where there are tiers below the pool
        self._shared_rows: list[int] | None = None  # the decode rows that `_shared` was worked out for
        self._shared: list[SharedRun] = []

    def attach(self, tiers: Tiers) -> Loading:
        """Let waiting sequences have pages from the tiers below the tree, which is still empty."""
        self.loading = Loading(self.memory, tiers, self._waiting)
        return self.loading

    # ---- what the engine sees -----------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """The number of sequences that hold a row."""
        return self._batch.held

    @property
    def waiting(self) -> int:
        """The number of sequences in the queue, and of choices that are still to fork from one."""
        return len(self._waiting) + self._unforked

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is in flight."""
        loading = self.loading is not None and self.loading.busy
        return not self._waiting and not self._flights and not self._batch.held and not loading

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence, prompt and output, that the pool can hold alone."""
        return self.memory.usable_pages * self._page_size + 1  # the newest token needs no KV

    def add(self, sequence: Sequence) -> None:
        """Enqueue a sequence; its `siblings` fork from it behind its prefill.

        Raises `QueueFullError` beyond the queue bound and `ContextLengthError` if it can never fit. Into an empty
        queue goes any request, of however many choices.
        """
        if sequence.max_total > self.capacity_tokens:
            raise ContextLengthError(
                f"This model's maximum context length is {self.capacity_tokens} tokens, as the KV pool holds no more. "
                f"However, {sequence.prompt_len} tokens are given as prompt and max_tokens is "
                f"{sequence.max_output}",
                "max_tokens",
            )
        self._check_room(1 + sequence.siblings)
        self._unforked += sequence.siblings
        self._waiting.push(sequence)

    def add_pooled(self, sequences: Seq[Sequence]) -> None:
        """Enqueue the prompts of one request that are pooled: all of them or none. Raises as `add` does."""
        for sequence in sequences:
            if sequence.prompt_len > self.capacity_tokens - 1:
                raise ContextLengthError(
                    f"This model's maximum context length is {self.capacity_tokens - 1} tokens, as the KV pool holds "
                    f"no more. However, {sequence.prompt_len} tokens are given as prompt",
                    "prompt",
                )
        self._check_room(len(sequences))
        for sequence in sequences:
            self._waiting.push(sequence)

    def _check_room(self, places: int) -> None:
        waiting = self.waiting
        if waiting >= self._max_queue or (waiting and waiting + places > self._max_queue):
            raise QueueFullError(f"{waiting} requests are waiting, the bound is {self._max_queue}")

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
        """Apply a finished step's results: the oldest one in flight, which must be `plan`."""
        if not self._flights or self._flights[0].plan is not plan:
            raise RuntimeError(f"step {plan.step} is not the oldest in flight")
        flight = self._flights.popleft()
        self.counters.steps += 1
        self.counters.computed_tokens += plan.num_tokens
        for sequence in flight.decode:
            if sequence.phase is not Phase.FINISHED:
                sequence.computed += 1
        updates = commit_chunks(flight, result, self._end)
        updates += commit_draws(flight, result, self.counters, self._end)
        for sequence, _, forks in flight.prefill:  # after the draws, which tell whose numbers are not finite
            for holder in (sequence, *forks):
                if holder.phase is Phase.RUNNING:
                    self.memory.publish(holder)
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
        del sequence.output[n_tokens:]
        self._end(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in whatever phase it is, and the choices that have yet to fork from it; once is enough."""
        self._end(sequence)

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """Give up a step and its successors in flight, none of which may still be running on the device.

        The sequences of `plan` itself end and are returned; those that only its successors carried go back to the
        queue. Nothing of the failed step enters the tree.
        """
        failed: list[Sequence] = []
        kept: deque[Flight] = deque()
        for flight in self._flights:
            if flight.plan.step < plan.step:
                kept.append(flight)
                continue
            for sequence in (*flight.draws(), *flight.pooling()):
                sequence.pending -= 1
            for sequence in flight.carried():
                if flight.plan is plan:
                    sequence.cacheable = False
                    if sequence.phase is not Phase.FINISHED:
                        failed.append(sequence)
                        self._end(sequence)
                elif sequence.phase is Phase.RUNNING:
                    self._leave(sequence, Phase.PREEMPTED)
                self._land(sequence)
        self._flights = kept
        return failed

    def flush_cache(self) -> None:
        """Drop every cached prefix.

        Those who run keep their pages, and go on; nothing that was begun before enters the cache any more.
        """
        self.memory.tree.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows, pages and reference counts add up. For tests and idle checks."""
        running = self._batch.running
        leaving = {sequence for flight in self._flights for sequence in flight.carried()}.difference(running)
        check_batch(self._batch, leaving)
        check_flights(running, leaving, self._flights)
        check_pages(self.memory, {*running, *leaving}, [] if self.loading is None else self.loading.pages)
        check_snapshots(self.memory, {*running, *leaving})
        check_windows(self.memory, {*running, *leaving})
        check_unforked(self._unforked, {*self._waiting, *running, *leaving})
        if self.adapters is not None:
            self.adapters.check_integrity([*running, *leaving])
        if self.loading is not None:
            self.loading.check_integrity()
        if self.idle:
            check_idle(self.memory)

    # ---- planning -----------------------------------------------------------------------------------------

    def _plan_decode(self, plan: StepPlan, flight: Flight) -> None:
        stalled = 0  # sequences that wait for promised pages
        page_size, windows = self._page_size, self._windows
        running = self._batch.running
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
                plan.new_pages.append((sequence.row, len(sequence.pages), self.memory.grow(sequence)))
                if windows is not None:
                    plan.new_window_pages += windows.grow(sequence, launched + 1)
            elif windows is not None and sequence.window_shown < sequence.window_first:
                plan.new_window_pages += windows.grow(sequence, launched)
            sequence.launched = launched + 1
            if self._snapshots is not None and self.memory.prefix_cache:
                plan.state_copies += self._snapshots.after_decode(sequence)
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
        looked_up = 0
        while budget.left and batch.free_rows and (head := self._waiting.head()) is not None:
            if len(plan.new_rows) >= MAX_ADMISSIONS or looked_up > MAX_LOOKED_UP:
                return
            if self.loading is not None and self.loading.begin(head, headroom=len(batch.running)):
                looked_up += head.length
                continue
            if not self.memory.admit(head, headroom=len(batch.running)):
                return  # first come, first served: nobody overtakes the head, but for those whose adapter is not there
            self._waiting.pop()
            looked_up += head.length
            self._begin(head)
            plan.new_rows.append(batch.enter(head))
            if head.resumes_from and head.launched:
                plan.state_loads.append((head.resumes_from, slot_of(head.row)))
            self._plan_chunk(head, budget, plan, flight)

    def _begin(self, sequence: Sequence) -> None:
        """Count a request's prompt when it enters for the first time."""
        if sequence.cached is None:
            sequence.cached = min(sequence.launched, sequence.prompt_len)
            self.counters.prompt_tokens += sequence.prompt_len
            self.counters.cached_tokens += sequence.cached
            from_host = min(sequence.from_host, sequence.cached)
            self.counters.cached_host_tokens += from_host
            self.counters.cached_disk_tokens += min(sequence.from_disk, sequence.cached - from_host)
            if self._on_begin is not None:
                self._on_begin(sequence)

    def _plan_chunk(self, sequence: Sequence, budget: PrefillBudget, plan: StepPlan, flight: Flight) -> None:
        """Add the next chunk of a prefill."""
        start = sequence.launched
        known = ready = sequence.length
        if self._windows is not None and (ready := min(known, self._window_room(sequence))) <= start:
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
        if self._snapshots is not None and self.memory.prefix_cache:
            chunk.saves = self._snapshots.in_chunk(sequence, start, end)
        if self._windows is not None:
            plan.new_window_pages += self._windows.grow(sequence, end)
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
        windows = self._windows
        if windows is None:
            return sequence.length
        while True:
            room = windows.room(sequence, headroom=len(self._batch.running))
            # What comes back from its own last chunk, or from those who leave, is on its way.
            if room > sequence.launched or sequence.in_flight or self._batch.promised:
                return room
            victim = self._batch.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return 0

    def _plan_forks(self, leader: Sequence, plan: StepPlan) -> list[Sequence]:
        """Fork the siblings of a leader, which draw from the leader's logits.

        Where rows or pages run out, the next sibling queues up, and the others will fork from that one.
        """
        unforked, leader.siblings = leader.siblings, 0
        forks: list[Sequence] = []
        while unforked:
            sibling = self._make_sibling(leader, leader.index + 1 + len(forks))
            unforked -= 1
            self._unforked -= 1
            if not self._batch.free_rows or not self.memory.reserve(1):
                sibling.siblings = unforked
                self._waiting.push(sibling)
                break
            copy = self.memory.fork(leader, sibling)
            if self._windows is not None and (window_copy := self._windows.fork(leader, sibling)) is not None:
                plan.window_copies.append(window_copy)
            plan.new_rows.append(self._batch.enter(sibling, leader))
            if self._snapshots is not None:
                plan.state_copies.append((slot_of(leader.row), slot_of(sibling.row)))
            if copy is not None:
                plan.page_copies.append(copy)
                plan.new_pages.append((sibling.row, len(sibling.pages) - 1, copy[1]))
            sibling.pending += 1
            sibling.decoding = True
            sibling.in_flight += 1
            forks.append(sibling)
        return forks

    # ---- leaving ------------------------------------------------------------------------------------------

    def _land(self, sequence: Sequence) -> None:
        """Note that a step that named the sequence is over."""
        if self._batch.land(sequence):
            self._requeue(sequence)

    def _leave(self, sequence: Sequence, phase: Phase) -> None:
        """Take a RUNNING sequence out of the batch, at once or when its last step in flight lands."""
        if self._batch.leave(sequence, phase):
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Return a preempted sequence that has given everything back to its place in the queue."""
        if sequence.phase is Phase.PREEMPTED:
            sequence.phase = Phase.WAITING
            sequence.sought = False
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
        self._unforked -= sequence.siblings
        sequence.siblings = 0


def _plan_pool(sequence: Sequence, chunk: PrefillChunk) -> None:
    """Pool a chunk: the last one in place of a draw, and of a mean every one."""
    if chunk.samples:
        chunk.samples = False
        sequence.pending += 1
        sequence.decoding = True
    elif sequence.pool is None or not sequence.pool.of_all_tokens:
        return
    chunk.pool = sequence.pool
