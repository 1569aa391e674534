"""Plans the prompts of a step: admissions, the next chunk of each prompt, and forks after the last chunk."""

from __future__ import annotations

from collections.abc import Callable

from aengine.scheduling.addons.loading import Loading
from aengine.scheduling.batch import Transitions
from aengine.scheduling.flight import Flight
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.planning.prefill_budget import PrefillBudget
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import ImageCost, ImageWork, MixedLimit, NewRow, PrefillChunk, StepPlan

# A burst of requests must not delay the steps of running sequences. These constants bound the sequences that enter in
# one step, including forks, and the tokens that are looked up in the cache for them.
MAX_ADMISSIONS = 64
MAX_LOOKED_UP = 131_072


class Prefills:
    """Plans prefill chunks and admits sequences by rank. All chunks of a prompt are planned before the next begins."""

    def __init__(
        self,
        memory: SequenceMemory,
        transitions: Transitions,
        max_step_tokens: int,
        mixed_limit: MixedLimit | None,
        on_begin: Callable[[Sequence], None] | None,
        make_sibling: Callable[[Sequence, int], Sequence],
        image_cost: ImageCost | None,
    ) -> None:
        self.loading: Loading | None = None  # set if there are tiers below the pool
        self._memory = memory
        self._transitions = transitions
        self._max_step_tokens = max_step_tokens
        self._mixed_limit = mixed_limit
        self._on_begin = on_begin
        self._make_sibling = make_sibling
        self._image_cost = image_cost

    def plan(self, plan: StepPlan, flight: Flight) -> None:
        """Add prefill chunks after the decodes: first of prompts that have begun, then of admitted sequences."""
        batch, waiting = self._transitions.batch, self._transitions.waiting
        if len(plan.decode) == len(batch.running) and (not batch.free_rows or waiting.head() is None):
            return  # there is no prompt
        budget = PrefillBudget(self._max_step_tokens, plan.decode_tokens, self._mixed_limit)
        for sequence in batch.running:
            if not sequence.decoding:
                if not budget.left:
                    return
                self._plan_chunk(sequence, budget, plan, flight)
        looked_up = 0
        while budget.left and batch.free_rows and (head := waiting.head()) is not None:
            if len(plan.new_rows) >= MAX_ADMISSIONS or looked_up > MAX_LOOKED_UP:
                return
            if self.loading is not None and self.loading.begin(head, headroom=len(batch.running)):
                looked_up += head.length
                continue
            if not self._memory.admit(head, headroom=len(batch.running)):
                return  # no sequence overtakes the head of the queue
            waiting.pop()
            looked_up += head.length
            self._count(head)
            self._enter(head, plan)
            self._plan_chunk(head, budget, plan, flight)

    def _count(self, sequence: Sequence) -> None:
        """Count a request's prompt when it enters for the first time."""
        if sequence.cached is None:
            counters = self._transitions.counters
            sequence.cached = min(sequence.launched, sequence.prompt_len)
            counters.prompt_tokens += sequence.prompt_len
            counters.cached_tokens += sequence.cached
            from_host = min(sequence.from_host, sequence.cached)
            counters.cached_host_tokens += from_host
            counters.cached_disk_tokens += min(sequence.from_disk, sequence.cached - from_host)
            if self._on_begin is not None:
                self._on_begin(sequence)

    def _enter(self, sequence: Sequence, plan: StepPlan, leader: Sequence | None = None) -> None:
        """Give a sequence a row, and add the row to the plan. A sibling's row is a copy of its leader's row."""
        self._transitions.batch.enter(sequence)
        sequence.encoded = sequence.encoded_blocks = 0
        if leader is not None:
            self._memory.fork(leader, sequence, plan)
        row = NewRow(
            row=sequence.row,
            params=sequence.params,
            seed=sequence.seed,
            stop_ids=sequence.stop_ids,
            prompt_len=sequence.prompt_len,
            tokens=sequence.ids(0, sequence.length) if leader is None else sequence.prompt,
            length=sequence.launched,
            pages=list(sequence.pages) if leader is None else [],
            banned=sequence.banned,
            copy_of=None if leader is None else leader.row,
            adapter=0 if sequence.adapter is None else sequence.adapter.place,
            near=sequence.near,
            shift=0 if sequence.images is None else sequence.images.shift,
        )
        for holding in self._memory.holdings:
            holding.enter(sequence, row, plan)
        plan.new_rows.append(row)

    def _plan_chunk(self, sequence: Sequence, budget: PrefillBudget, plan: StepPlan, flight: Flight) -> None:
        """Add the next chunk of a prefill."""
        memory, start = self._memory, sequence.launched
        known = ready = sequence.length  # ready: tokens for which there is memory
        least = start + 1 if sequence.images is None else sequence.images.least_end(start)
        if memory.holdings and (ready := min(known, self._find_memory(sequence, least))) < least:
            budget.close()
            return
        ready = self._plan_images(sequence, ready, budget, plan)
        end = start if ready <= start else start + budget.take(start, ready - start, least - start)
        if sequence.images is not None and end > start:
            end = max(start, sequence.images.last_end(end))
        if end < known:
            budget.close()
        if end == start:
            return
        chunk = PrefillChunk(row=sequence.row, start=start, token_ids=sequence.ids(start, end), samples=end == known)
        if end < known:
            chunk.next_id = sequence.ids(end, end + 1)[0]
        if sequence.images is not None and start < sequence.images.end:
            chunk.images = sequence.images
        if sequence.pool is not None:
            _plan_pool(sequence, chunk)
        if sequence.scoring:
            chunk.score_ids = sequence.prompt[start + 1 : end + 1].tolist()
            chunk.top = sequence.params.prompt_logprobs or 0
        for holding in memory.holdings:  # all pages of keys and values were taken at admission
            holding.grow(sequence, end, plan)
            holding.save(sequence, plan, chunk)
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

    def _plan_images(self, sequence: Sequence, end: int, budget: PrefillBudget, plan: StepPlan) -> int:
        """Add the tower's work for the next chunk, which ends at `end` or before. Return where it ends at the latest.

        An image is computed before the step, or in the step, that computes its first tokens.
        """
        start, cost = sequence.launched, self._image_cost
        if sequence.images is None or cost is None:
            return end
        for image in sequence.images.images[sequence.encoded :]:
            if image.start >= end:
                break
            if image.end > start:
                if not budget.reaches(start, image.start - start):
                    return max(start, image.start)
                left = cost.blocks - sequence.encoded_blocks
                blocks = budget.take_blocks(cost.of_block(image), left, sequence.images.least_end(start) - start)
                if blocks:
                    plan.encodings.append(ImageWork(image, 0 if blocks == left else blocks))
                if blocks < left:
                    sequence.encoded_blocks += blocks
                    return max(start, image.start)
            sequence.encoded += 1
            sequence.encoded_blocks = 0
        return end

    def _find_memory(self, sequence: Sequence, least: int) -> int:
        """Return for how many tokens of a sequence the holdings have memory, after preempting if necessary.

        If the result is less than `least`, the next chunk waits for a later step.
        """
        batch = self._transitions.batch
        while True:
            limit = self._memory.token_limit(sequence, headroom=len(batch.running))
            # The commit of its last chunk, or sequences that leave, will free memory.
            if limit >= least or sequence.in_flight or batch.promised:
                return limit
            victim = batch.running[-1]
            self._transitions.preempt(victim)
            if victim is sequence:
                return 0

    def _plan_forks(self, leader: Sequence, plan: StepPlan) -> list[Sequence]:
        """Give rows to the siblings of a leader. They draw from the leader's logits.

        When rows or pages run out, the next sibling is queued, and the others will fork from it.
        """
        batch = self._transitions.batch
        unforked, leader.siblings = leader.siblings, 0
        forks: list[Sequence] = []
        while unforked:
            sibling = self._make_sibling(leader, leader.index + 1 + len(forks))
            unforked -= 1
            self._transitions.unforked -= 1
            if not batch.free_rows or not self._memory.reserve(1):
                sibling.siblings = unforked
                self._transitions.waiting.push(sibling)
                break
            self._enter(sibling, plan, leader)
            sibling.pending += 1
            sibling.decoding = True
            sibling.in_flight += 1
            forks.append(sibling)
        return forks


def _plan_pool(sequence: Sequence, chunk: PrefillChunk) -> None:
    """Pool a chunk instead of drawing after it. Only the last chunk is pooled, unless the pool needs all tokens."""
    if chunk.samples:
        chunk.samples = False
        sequence.pending += 1
        sequence.decoding = True
    elif sequence.pool is None or not sequence.pool.needs_all_tokens:
        return
    chunk.pool = sequence.pool
