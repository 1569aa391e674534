"""Random use of the scheduler over a pool for one or two requests, with host memory and a disk below it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.scheduling.machine import DRAFTS, Drafts, Machine
from tests.scheduling.stepping import Stepper

PAGE = 3
LENGTHS = (9, 13, 20, 24)  # of prompts; few, so that prompts repeat
VOCAB = 6


class TierMachine(Machine):
    """Copies between the tiers end, or fail, in any order."""

    @initialize(
        pages=st.integers(9, 16),
        host_slots=st.sampled_from([4, 8, 16, 60]),
        disk_pages=st.sampled_from([0, 0, 6, 60]),
        copy_pages=st.sampled_from([1, 3, 100]),
        copy_turns=st.sampled_from([1, 3, 6]),
        lookahead=st.integers(0, 1),
        drafts=DRAFTS,
    )
    def start(
        self,
        pages: int,
        host_slots: int,
        disk_pages: int,
        copy_pages: int,
        copy_turns: int,
        lookahead: int,
        drafts: Drafts,
    ) -> None:
        self.stepper = Stepper(
            num_pages=pages + 1,
            page_size=PAGE,
            max_rows=4,
            max_step_tokens=16,
            lookahead=lookahead,
            vocab=VOCAB,
            host_slots=host_slots,
            disk_pages=disk_pages,
            copy_pages=copy_pages,
            copy_turns=copy_turns,
            most_drafts=drafts.most,
            accepts=drafts.accepts,
        )
        assert self.stepper.tiers is not None
        self.tiers = self.stepper.tiers

    @rule(
        base=st.integers(0, 3),
        length=st.sampled_from(LENGTHS),
        max_tokens=st.integers(1, 3),
        n=st.sampled_from([1, 1, 1, 3]),
        tenant=st.sampled_from([0, 0, 0, 1]),
        priority=st.integers(-1, 1),
        turns=st.integers(0, 12),
    )
    def ask(self, base: int, length: int, max_tokens: int, n: int, tenant: int, priority: int, turns: int) -> None:
        prompt = [(base + place * (base + 1)) % VOCAB for place in range(length)]
        self.now += 1.0
        self.stepper.request(prompt, max_tokens, n=n, tenant=tenant, arrival=self.now, priority=priority)
        self.run(turns)

    @rule(length=st.sampled_from(LENGTHS), turns=st.integers(4, 12))
    def ask_for_all(self, length: int, turns: int) -> None:
        """The prompts exceed the pool, so that the last round's pages have been evicted."""
        for base in range(4):
            self.ask(base, length, 1, 1, 0, 0, turns)

    @rule(turns=st.integers(1, 20))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.stepper.step()
            self.check()

    @precondition(lambda self: self.tiers.copies)
    @rule(which=st.integers(0, 2**16), fails=st.sampled_from([False, False, False, True]))
    def end_copy(self, which: int, fails: bool) -> None:
        self.tiers.end(which % len(self.tiers.copies), fails)
        self.check()

    @precondition(lambda self: self.stepper.in_flight)
    @rule()
    def step_fails(self) -> None:
        self.stepper.fail()
        self.check()

    @rule()
    def flush(self) -> None:
        self.stepper.flush()
        self.check()

    def check_end(self) -> None:
        self.tiers.end_all()
        self.check()
        self.check_nothing_is_kept()
        assert len(self.tiers.tiers.host) == 0


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(stateful_step_count=60)
