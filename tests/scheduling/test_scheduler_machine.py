"""Random use of the scheduler over a pool that is far too small, against a model that caches nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from aengine.cache.snapshots import SnapshotRoom
from aengine.cache.windows import WindowRoom
from aengine.scheduling.planning import sharing
from tests.scheduling.machine import DRAFTS, Drafts, SteppingMachine
from tests.scheduling.stepping import Kind, Stepper

VOCAB = 6  # so few tokens that outputs match cached pages of other requests by chance
STOP_IDS = ((), (), (3,), (1, 4))
LONGEST_PROMPT = 24
LONGEST_OUTPUT = 12


class SchedulerMachine(SteppingMachine):
    """Requests of all kinds come, are aborted, stop and fail in any order."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 5, 16]),
        spare_pages=st.integers(0, 8),
        rows=st.integers(1, 6),
        spare_tokens=st.integers(0, 16),
        prefix_cache=st.sampled_from([True, True, False]),
        lookahead=st.integers(0, 1),
        snapshots=st.one_of(st.none(), st.integers(0, 6)),
        grain=st.integers(1, 3),
        prompt_grain=st.integers(1, 3),
        window=st.one_of(st.none(), st.integers(1, 20)),
        spare_windows=st.integers(0, 8),
        drafts=DRAFTS,
        bases=st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=LONGEST_PROMPT, max_size=LONGEST_PROMPT),
            min_size=1,
            max_size=2,
        ),
    )
    def start(
        self,
        page_size: int,
        spare_pages: int,
        rows: int,
        spare_tokens: int,
        prefix_cache: bool,
        lookahead: int,
        snapshots: int | None,
        grain: int,
        prompt_grain: int,
        window: int | None,
        spare_windows: int,
        drafts: Drafts,
        bases: list[list[int]],
    ) -> None:
        """snapshots: None: the model keeps no states. grain: in pages. prompt_grain: in grains."""
        pages = 3 + 12 // page_size + spare_pages  # enough for one or two requests
        self.stepper = Stepper(
            num_pages=pages + 1,
            page_size=page_size,
            max_rows=rows,
            max_step_tokens=rows + spare_tokens,
            prefix_cache=prefix_cache,
            lookahead=lookahead,
            vocab=VOCAB,
            snapshots=None
            if snapshots is None
            else SnapshotRoom(snapshots, grain * page_size, prompt_grain * grain * page_size),
            windows=None
            if window is None
            else WindowRoom(window, WindowRoom.min_pages(window, page_size) + spare_windows),
            most_drafts=drafts.most,
            accepts=drafts.accepts,
        )
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(sharing, "LEAST_SAVED", 1)
        self.bases = bases

    @rule(
        base=st.integers(0, 1),
        length=st.integers(1, LONGEST_PROMPT),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        max_tokens=st.integers(1, LONGEST_OUTPUT),
        n=st.sampled_from([1, 1, 1, 2, 3, 4]),
        stop_ids=st.sampled_from(STOP_IDS),
        seed=st.integers(0, 3),
        tenant=st.sampled_from([0, 0, 0, 1]),
        priority=st.integers(-1, 1),
        speculates=st.sampled_from([True, True, True, False]),
    )
    def add(
        self,
        base: int,
        length: int,
        own: list[int],
        max_tokens: int,
        n: int,
        stop_ids: tuple[int, ...],
        seed: int,
        tenant: int,
        priority: int,
        speculates: bool,
    ) -> None:
        capacity = self.stepper.scheduler.capacity_tokens
        prompt = [*self.bases[base % len(self.bases)][:length], *own][: capacity - 1]
        self.now += 1.0
        self.stepper.request(
            prompt,
            min(max_tokens, capacity - len(prompt)),
            n=n,
            stop_ids=stop_ids,
            seed=seed,
            tenant=tenant,
            arrival=self.now,
            priority=priority,
            speculates=speculates,
        )
        self.check()

    @rule(
        base=st.integers(0, 1),
        lengths=st.lists(st.integers(1, LONGEST_PROMPT), min_size=1, max_size=3),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        kind=st.sampled_from(["last", "mean"]),
        tenant=st.sampled_from([0, 0, 0, 1]),
        priority=st.integers(-1, 1),
    )
    def add_pooled(self, base: int, lengths: list[int], own: list[int], kind: Kind, tenant: int, priority: int) -> None:
        prompts = [
            [*self.bases[base % len(self.bases)][:length], *own][: self.stepper.scheduler.capacity_tokens - 1]
            for length in lengths
        ]
        self.now += 1.0
        self.stepper.pool(prompts, kind, tenant=tenant, arrival=self.now, priority=priority)
        self.check()

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2**16))
    def abort_every_choice(self, which: int) -> None:
        rank = self.open[which % len(self.open)].rank
        for sequence in [sequence for sequence in self.open if sequence.rank == rank]:
            self.stepper.abort(sequence)
        self.check()

    @precondition(lambda self: any(len(sequence.output) for sequence in self.open))
    @rule(which=st.integers(0, 2**16), late=st.integers(0, 3))
    def stop_string(self, which: int, late: int) -> None:
        """A stop string is found `late` tokens after it was drawn."""
        writing = [sequence for sequence in self.open if len(sequence.output)]
        sequence = writing[which % len(writing)]
        self.stepper.finish(sequence, max(len(sequence.output) - late, 1))
        self.check()

    @precondition(lambda self: self.stepper.in_flight)
    @rule(which=st.integers(0, 2**16))
    def commit_with_a_broken_row(self, which: int) -> None:
        """Also a row that draws nothing."""
        plan = self.stepper.in_flight[0]
        rows = [*plan.sampled_rows, *(chunk.row for chunk in plan.prefill)]
        self.stepper.commit(broken={rows[which % len(rows)]} if rows else ())
        self.check()

    @precondition(lambda self: self.stepper.in_flight)
    @rule(place=st.integers(0, 1), ahead=st.booleans())
    def step_fails(self, place: int, ahead: bool) -> None:
        if ahead and len(self.stepper.in_flight) == 1:
            self.stepper.schedule()
        self.stepper.fail(place % len(self.stepper.in_flight))
        self.check()

    @rule(length=st.integers(1, LONGEST_PROMPT), n=st.integers(1, 4))
    def step_fails_while_its_successor_begins_a_request(self, length: int, n: int) -> None:
        while len(self.stepper.in_flight) > 1:
            self.stepper.commit()
        if self.stepper.in_flight or self.stepper.schedule() is not None:
            prompt = self.bases[0][: min(length, self.stepper.scheduler.capacity_tokens - 2)]
            self.now += 1.0
            self.stepper.request(prompt, 2, n=n, arrival=self.now, priority=-9)
            self.stepper.schedule()
            self.check()
            self.stepper.fail()
        self.check()

    @rule()
    def flush(self) -> None:
        self.stepper.flush()
        self.check()

    def teardown(self) -> None:
        if hasattr(self, "stepper"):
            self.patch.undo()
        super().teardown()

    def check_end(self) -> None:
        self.check_nothing_is_kept()
        if (snapshots := self.stepper.snapshots) is not None:
            assert snapshots.slots.free == snapshots.slots.room.count
        if (windows := self.stepper.windows) is not None:
            assert windows.pages.allocator.free == windows.pages.usable


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=80)
