"""Loading pages from lower tiers: for which sequences, when, and what happens to the pages."""

from __future__ import annotations

from aengine.cache.tiers.tiers import Load, Store
from aengine.scheduling.sequence import Phase, Sequence
from tests.scheduling.fake_tiers import FakeTiers
from tests.scheduling.stepping import Stepper, prompt_of

PAGE = 4
PROMPT = 20  # tokens: 5 pages of the pool's 12
CACHED = PROMPT - PAGE  # tokens found by the same prompt again; its last token is computed


def stepper(copy_turns: int = 1, host_slots: int = 64, copy_pages: int = 1000) -> tuple[Stepper, FakeTiers]:
    made = Stepper(
        num_pages=13, page_size=PAGE, host_slots=host_slots, copy_turns=copy_turns, copy_pages=copy_pages, lookahead=0
    )
    assert made.tiers is not None
    return made, made.tiers


def run(steps: Stepper, first: int) -> Sequence:
    """Run a prompt to its end, then all copies that are due."""
    sequence = steps.add(prompt_of(PROMPT, first), 2)
    steps.run()
    if steps.tiers is not None:
        steps.tiers.end_all()
    return sequence


def evicted(copy_turns: int = 1) -> tuple[Stepper, FakeTiers]:
    """Return a stepper with prompt 1 only in host memory."""
    steps, tiers = stepper(copy_turns)
    for first in (1, 2, 3):
        run(steps, first)
    return steps, tiers


def begun(steps: Stepper, sequence: Sequence) -> Load:
    """Return the load for which a sequence is parked."""
    steps.schedule()
    assert sequence.phase is Phase.WAITING
    loading = steps.scheduler.loading
    assert loading is not None
    (load,) = loading.tiers.loading
    return load


def test_a_prompt_that_was_evicted_comes_back() -> None:
    steps, _ = evicted()
    again = run(steps, 1)
    steps.check_outputs()
    assert again.cached == CACHED
    assert again.from_host > 0
    assert steps.scheduler.counters.cached_host_tokens == again.from_host


def test_without_a_tier_it_is_computed() -> None:
    steps = Stepper(num_pages=13, page_size=PAGE, lookahead=0)
    for first in (1, 2, 3, 1):
        again = run(steps, first)
    assert again.cached is not None
    assert again.cached < CACHED


def test_others_overtake_a_parked_sequence() -> None:
    steps, _ = evicted(copy_turns=6)
    slow = steps.add(prompt_of(PROMPT, 1), 2, arrival=1.0)
    begun(steps, slow)
    quick = steps.add(prompt_of(5, 9), 1, arrival=2.0)
    steps.step()
    assert quick.phase is Phase.FINISHED or quick.row >= 0
    assert slow.phase is Phase.WAITING
    assert steps.scheduler.waiting == 1
    steps.run()
    steps.check_outputs()
    assert slow.cached == CACHED


def test_requests_for_the_same_pages_wait_for_one_load() -> None:
    steps, tiers = evicted(copy_turns=4)
    both = [steps.add(prompt_of(PROMPT, 1), 1, arrival=moment) for moment in (1.0, 2.0)]
    load = begun(steps, both[0])
    steps.schedule()
    assert tiers.tiers.loading == [load]
    steps.run()
    steps.check_outputs()
    assert [sequence.cached for sequence in both] == [CACHED, CACHED]


def test_an_abort_leaves_the_load_alone() -> None:
    steps, _ = evicted(copy_turns=3)
    gone = steps.add(prompt_of(PROMPT, 1), 2)
    begun(steps, gone)
    steps.abort(gone)
    assert steps.scheduler.waiting == 0
    assert not steps.scheduler.idle
    steps.scheduler.check_integrity()
    steps.run()
    assert run(steps, 1).cached == CACHED


def test_choices_fork_after_a_load() -> None:
    steps, _ = evicted()
    family = steps.request(prompt_of(PROMPT, 1), 3, n=3)
    steps.run()
    steps.check_outputs()
    assert family[0].cached == CACHED


def test_a_load_that_fails_is_computed() -> None:
    steps, tiers = evicted(copy_turns=9)
    sequence = steps.add(prompt_of(PROMPT, 1), 2)
    begun(steps, sequence)
    tiers.begin()
    (which,) = [place for place, (copy, _) in enumerate(tiers.copies) if isinstance(copy, Load)]
    tiers.end(which, fails=True)
    steps.scheduler.check_integrity()
    steps.run()
    steps.check_outputs()


def test_a_flush_while_pages_come_back_brings_none() -> None:
    steps, _ = evicted(copy_turns=3)
    sequence = steps.add(prompt_of(PROMPT, 1), 2)
    begun(steps, sequence)
    steps.flush()
    steps.run()
    steps.check_outputs()
    assert sequence.cached == 0
    assert steps.scheduler.counters.cached_host_tokens == 0


def test_a_flush_while_pages_go_down_brings_none_either() -> None:
    """Not even if a sequence still holds them when the copy ends."""
    steps, tiers = stepper(copy_turns=99)
    run_alone = steps.add(prompt_of(PROMPT, 1), 2)
    steps.run()
    assert run_alone.phase is Phase.FINISHED
    steps.add(prompt_of(PROMPT, 2), 1)
    steps.run()
    tiers.begin()
    (store,) = [copy for copy, _ in tiers.copies]
    assert isinstance(store, Store)
    held = steps.add(prompt_of(12, 1), 8)  # finds the pages that are being copied
    steps.schedule()
    steps.commit()
    assert held.row >= 0
    steps.flush()
    tiers.end()
    assert len(tiers.tiers.host) == 0
    steps.run()
    steps.check_outputs()


def test_a_page_that_left_while_it_was_copied_was_copied_in_vain() -> None:
    steps, tiers = stepper(copy_turns=99)
    for first in (1, 2):
        steps.add(prompt_of(PROMPT, first), 1)
        steps.run()
    tiers.begin()
    ((store, _),) = tiers.copies
    assert isinstance(store, Store)
    steps.add(prompt_of(PROMPT, 3), 1)
    steps.run()
    assert store.gone
    tiers.end()
    assert len(tiers.tiers.host) == len(set(store.pages) - store.gone)
    assert tiers.tiers.counters.lost_pages > 0


def test_host_memory_is_bounded() -> None:
    steps, tiers = stepper(host_slots=5)
    for first in range(6):
        run(steps, first)
        assert len(tiers.tiers.host) <= 5
        steps.scheduler.check_integrity()


def test_tenants_share_nothing_below_either() -> None:
    steps, _ = evicted()
    other = steps.add(prompt_of(PROMPT, 1), 2, tenant=1)
    steps.run()
    steps.check_outputs()
    assert other.cached == 0
