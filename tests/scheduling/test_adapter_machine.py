"""Random use of the scheduler with more adapters than places, over a pool that is far too small.

The fake device counts what lies in an adapter's place among what is computed, so an output is the naive one only if
every step of its sequence found the right adapter there, and none of another's pages.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from aengine.scheduling.addons.adapter_queue import AdapterQueue
from aengine.scheduling.sequence import LoadedAdapter
from tests.scheduling.machine import DRAFTS, Drafts, SteppingMachine
from tests.scheduling.stepping import Stepper

VOCAB = 6
LONGEST_PROMPT = 16
LONGEST_OUTPUT = 8
PROMPT = [1, 2, 3, 4, 5, 0] * 3  # the same for all requests, so that a page of another adapter would be found


class AdapterMachine(SteppingMachine):
    """Adapters are loaded, used by requests and unloaded in any order; loads may fail."""

    @initialize(
        page_size=st.integers(1, 4),
        spare_pages=st.integers(0, 12),
        rows=st.integers(1, 6),
        spare_tokens=st.integers(0, 16),
        lookahead=st.integers(0, 1),
        places=st.integers(1, 4),
        load_steps=st.integers(0, 3),
        adapters=st.integers(1, 8),
        drafts=DRAFTS,
    )
    def start(
        self,
        page_size: int,
        spare_pages: int,
        rows: int,
        spare_tokens: int,
        lookahead: int,
        places: int,
        load_steps: int,
        adapters: int,
        drafts: Drafts,
    ) -> None:
        self.stepper = Stepper(
            num_pages=4 + 12 // page_size + spare_pages,
            page_size=page_size,
            max_rows=rows,
            max_step_tokens=rows + spare_tokens,
            lookahead=lookahead,
            vocab=VOCAB,
            places=places,
            load_steps=load_steps,
            most_drafts=drafts.most,
            accepts=drafts.accepts,
        )
        self.loaded = [self.stepper.adapter() for _ in range(adapters)]
        self.leaving: list[LoadedAdapter] = []

    @rule(
        which=st.integers(0, 8),
        length=st.integers(1, LONGEST_PROMPT),
        max_tokens=st.integers(1, LONGEST_OUTPUT),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        tenant=st.sampled_from([0, 0, 1]),
        priority=st.integers(-1, 1),
    )
    def add(self, which: int, length: int, max_tokens: int, n: int, tenant: int, priority: int) -> None:
        adapter = None if which >= len(self.loaded) else self.loaded[which]
        capacity = self.stepper.scheduler.capacity_tokens
        prompt = PROMPT[: min(length, capacity - 1)]
        self.now += 1.0
        self.stepper.request(
            prompt,
            min(max_tokens, capacity - len(prompt)),
            n=n,
            tenant=tenant,
            arrival=self.now,
            priority=priority,
            adapter=adapter,
        )
        self.check()

    @rule()
    def begin_loads(self) -> None:
        self.stepper.begin_loads()
        self.check()

    @precondition(lambda self: self.stepper.loads)
    @rule(which=st.integers(0, 1))
    def end_load(self, which: int) -> None:
        self.stepper.end_load(which % len(self.stepper.loads))
        self.check()

    @precondition(lambda self: self.stepper.loads)
    @rule(which=st.integers(0, 1))
    def load_fails(self, which: int) -> None:
        self.stepper.fail_load(which % len(self.stepper.loads))
        self.check()

    @precondition(lambda self: self.loaded)
    @rule(which=st.integers(0, 8))
    def preload(self, which: int) -> None:
        if (adapter := self.loaded[which % len(self.loaded)]) and not adapter.place:
            self.queue.preload(adapter)
        self.check()

    @precondition(lambda self: self.loaded)
    @rule(which=st.integers(0, 8), again=st.booleans())
    def unload(self, which: int, again: bool) -> None:
        """No new request names it. again: whether it is loaded again at once."""
        self.leaving.append(self.loaded.pop(which % len(self.loaded)))
        if again:
            self.loaded.append(self.stepper.adapter())
        self.forget()

    @rule()
    def forget(self) -> None:
        for adapter in [adapter for adapter in self.leaving if self.queue.forget(adapter)]:
            self.leaving.remove(adapter)
            assert not any(sequence.adapter is adapter for sequence in self.open)
        self.check()

    @precondition(lambda self: self.stepper.in_flight)
    @rule(place=st.integers(0, 1))
    def step_fails(self, place: int) -> None:
        self.stepper.fail(place % len(self.stepper.in_flight))
        self.check()

    def check_end(self) -> None:
        while self.stepper.loads:
            self.stepper.end_load()
        for adapter in [*self.loaded, *self.leaving]:
            assert self.queue.forget(adapter)
        self.check()
        assert not any(adapter.place for adapter in self.loaded)

    @property
    def queue(self) -> AdapterQueue:
        assert self.stepper.adapters is not None
        return self.stepper.adapters


TestAdapterMachine = AdapterMachine.TestCase
TestAdapterMachine.settings = settings(stateful_step_count=80)
