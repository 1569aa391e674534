"""Decodes of a step: which rows verify drafts, how many, and what they leave for others."""

from __future__ import annotations

import pytest

from aengine.cache.windows import WindowRoom
from aengine.scheduling.planning import sharing
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import MixedLimit, StepPlan
from tests.scheduling.stepping import Stepper, prompt_of


def launch(stepper: Stepper) -> StepPlan:
    """Launch the next step, which must exist."""
    plan = stepper.schedule()
    assert plan is not None
    return plan


def decoding(stepper: Stepper, *sequences: Sequence) -> None:
    """Step until all sequences have begun to decode and nothing is in flight."""
    while not all(sequence.output for sequence in sequences):
        launch(stepper)
        stepper.commit()


def test_without_speculation_a_plan_says_nothing_of_drafts() -> None:
    stepper = Stepper()
    decoding(stepper, stepper.add(prompt_of(5)))
    plan = launch(stepper)
    assert (plan.drafts, plan.contexts, plan.proposals) == ((), (), 0)


def test_a_row_verifies_the_drafts_that_its_last_step_has_made() -> None:
    stepper = Stepper(most_drafts=3)
    sequence = stepper.add(prompt_of(5), max_tokens=20)
    first = launch(stepper)
    assert (list(first.drafts), first.proposals) == ([], 3)
    second = launch(stepper)  # the prompt's draw and the drafts after it are on the device
    assert (second.decode, list(second.drafts)) == ([sequence.row], [3])
    assert second.num_tokens == 4
    assert second.draw_rows == [sequence.row] * 4
    assert second.sampled_rows == [sequence.row]


def test_rows_without_drafts_come_first() -> None:
    stepper = Stepper(most_drafts=2)
    speculates = [True, False, True, False]
    sequences = [stepper.add(prompt_of(4 + i, i), 20, speculates=which) for i, which in enumerate(speculates)]
    decoding(stepper, *sequences)
    plan = launch(stepper)
    assert plan.decode == [sequences[i].row for i in (1, 3, 0, 2)]
    assert list(plan.drafts) == [0, 0, 2, 2]
    assert plan.decode_tokens == 8


def test_a_plan_in_which_no_row_verifies_drafts_has_no_numbers_of_drafts() -> None:
    stepper = Stepper(most_drafts=2)
    decoding(stepper, stepper.add(prompt_of(4), speculates=False))
    plan = launch(stepper)
    assert (list(plan.drafts), list(plan.contexts)) == ([], [5])


def test_contexts_count_all_drafts_in_flight() -> None:
    stepper = Stepper(most_drafts=3, accepts=[1])
    drafting, plain = stepper.add(prompt_of(5), 20), stepper.add(prompt_of(9, 1), 20, speculates=False)
    decoding(stepper, drafting, plain)
    assert list(launch(stepper).contexts) == [10, 9]  # the row without drafts, then the other: 5 + 1 + 3
    assert list(launch(stepper).contexts) == [11, 13]  # as if all three were accepted
    stepper.commit()  # one of three was
    assert list(launch(stepper).contexts) == [12, 15]  # 5 + 2, then twice 1 + 3


def test_only_rows_without_drafts_share_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LEAST_SAVED", 1)
    stepper = Stepper(page_size=4, most_drafts=2)
    stepper.add(prompt_of(9), max_tokens=1)
    stepper.run()
    speculates = [True, False, True, False, False]
    sequences = [
        stepper.add([*prompt_of(9), *prompt_of(3, 1 + i)], 20, speculates=which) for i, which in enumerate(speculates)
    ]
    decoding(stepper, *sequences)
    (run,) = launch(stepper).shared
    assert (run.members, run.tokens) == ([0, 1, 2], 8)
    assert [stepper.in_flight[0].decode[place] for place in run.members] == [sequences[i].row for i in (1, 3, 4)]
    stepper.run()


def test_shared_runs_follow_the_rows_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that gets no drafts in one step shares in it, and not in the next one."""
    monkeypatch.setattr(sharing, "LEAST_SAVED", 1)
    stepper = Stepper(page_size=4, most_drafts=2, max_step_tokens=9)
    family = stepper.request(prompt_of(8), 30, n=3)
    decoding(stepper, *family)
    plans = stepper.run()
    assert {len(plan.decode) - len([drafts for drafts in plan.drafts if drafts]) for plan in plans} == {0, 3}
    for plan in plans:
        undrafted = len(plan.decode) - len([drafts for drafts in plan.drafts if drafts])
        assert [run.members for run in plan.shared] == ([list(range(undrafted))] if undrafted > 1 else [])


def test_drafts_fill_a_step_up_to_its_budget() -> None:
    stepper = Stepper(max_rows=4, max_step_tokens=13, most_drafts=4)
    decoding(stepper, *[stepper.add(prompt_of(2, i), 40) for i in range(4)])
    plan = launch(stepper)
    assert list(plan.drafts) == [0, 4, 4, 1]
    assert plan.num_tokens == 13
    stepper.run()
    stepper.check_outputs()


def test_a_prompt_that_waits_gets_half_of_what_decodes_leave() -> None:
    stepper = Stepper(max_rows=4, max_step_tokens=15, most_drafts=5)
    decoding(stepper, *[stepper.add(prompt_of(2, i), 200) for i in range(3)])
    assert launch(stepper).num_tokens == 15  # 3 decodes and 12 drafts
    waiting = stepper.add(prompt_of(40, 9), 2)
    chunks = []
    while not waiting.decoding:
        plan = launch(stepper)
        chunks += [len(chunk.token_ids) for chunk in plan.prefill]
        stepper.commit()
    assert chunks == [6, 7, 7, 7, 7, 6]  # rows in prefill count as decodes, but leave their token to the prompt
    stepper.run()
    stepper.check_outputs()


def test_drafts_leave_prompts_half_of_a_mixed_step() -> None:
    stepper = Stepper(max_rows=4, most_drafts=5, mixed_limit=MixedLimit(tokens=18, context=1e9, multiple=1))
    decoding(stepper, *[stepper.add(prompt_of(2, i), 200) for i in range(2)])
    stepper.add(prompt_of(40, 9), 2)
    plan = launch(stepper)
    assert list(plan.drafts) == [5, 3]
    assert [len(chunk.token_ids) for chunk in plan.prefill] == [8]
    stepper.run()
    stepper.check_outputs()


@pytest.mark.parametrize("left", [1, 2, 3, 5])
def test_no_draft_may_become_a_token_after_the_last_one(left: int) -> None:
    stepper = Stepper(most_drafts=3, lookahead=0)
    sequence = stepper.add(prompt_of(5), max_tokens=1 + left)
    launch(stepper)
    stepper.commit()
    assert list(launch(stepper).drafts) == ([min(3, left - 1)] if left > 1 else [])
    stepper.run()
    assert sequence.output == stepper.expected(sequence)


def test_when_all_drafts_in_flight_may_be_the_last_tokens_a_row_waits() -> None:
    stepper = Stepper(most_drafts=5)
    sequence = stepper.add(prompt_of(5), max_tokens=7)
    launch(stepper)
    assert list(launch(stepper).drafts) == [5]
    assert stepper.schedule() is None
    stepper.commit()
    stepper.commit()  # all five were refused
    assert len(sequence.output) == 2
    assert list(launch(stepper).drafts) == [4]
    stepper.run()
    stepper.check_outputs()


# ---- pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_a_row_gets_pages_for_its_token_and_all_its_drafts_and_for_those_that_it_makes(page_size: int) -> None:
    stepper = Stepper(page_size=page_size, most_drafts=5, accepts=[5])
    sequence = stepper.add(prompt_of(16), max_tokens=40)
    decoding(stepper, sequence)
    launch(stepper)
    assert len(sequence.pages) == -(-(16 + 6 + 6) // page_size)
    stepper.run()
    stepper.check_outputs()


def test_pages_of_refused_drafts_serve_the_next_tokens() -> None:
    stepper = Stepper(page_size=2, most_drafts=5, accepts=[0])
    sequence = stepper.add(prompt_of(4), max_tokens=30)
    decoding(stepper, sequence)
    held = len(sequence.pages)
    plans = stepper.run()
    pages = [page for plan in plans for _, _, page in plan.new_pages]
    assert len(pages) == len(set(pages)) == -(-(4 + 29) // 2) - held  # one for every two tokens, and none twice
    stepper.check_outputs()


def test_where_pages_are_short_a_row_gets_one_for_its_token_and_no_drafts() -> None:
    stepper = Stepper(num_pages=8, page_size=4, most_drafts=5, accepts=[5], lookahead=0)
    first, second = stepper.add(prompt_of(8), 8), stepper.add(prompt_of(8, 1), 8)
    launch(stepper)
    stepper.commit()
    plan = launch(stepper)  # three of seven pages are free, which is fewer than two for each row
    assert (list(plan.drafts), len(plan.new_pages)) == ([], 2)
    stepper.run()
    assert (first.output, second.output) == (stepper.expected(first), stepper.expected(second))


def test_drafts_take_only_pages_that_nobody_needs_soon() -> None:
    stepper = Stepper(num_pages=9, page_size=2, most_drafts=5, accepts=[5], lookahead=0)
    sequence = stepper.add(prompt_of(4), 12)
    plan = launch(stepper)  # six are free after the prompt: two for tokens, and four for the drafts that it makes
    assert len(plan.new_pages) == 3
    stepper.commit()
    plan = launch(stepper)  # three are free: two for tokens, and one, which is too few for further drafts
    assert (list(plan.drafts), len(plan.new_pages)) == ([5], 0)
    stepper.commit()
    plan = launch(stepper)  # three are free: only one for drafts, and the token's page has room for another
    assert (list(plan.drafts), len(plan.new_pages)) == ([3], 2)
    stepper.run()
    assert sequence.output == stepper.expected(sequence)


@pytest.mark.parametrize("accepts", [(0,), (5,), (0, 3, 1)])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_lone_sequence_that_fills_the_pool_is_never_preempted(page_size: int, accepts: tuple[int, ...]) -> None:
    stepper = Stepper(num_pages=1 + 64 // page_size, page_size=page_size, most_drafts=5, accepts=accepts)
    sequence = stepper.add(prompt_of(8), max_tokens=57)
    assert sequence.max_total == stepper.scheduler.capacity_tokens
    stepper.run()
    assert stepper.scheduler.counters.preemptions == 0
    stepper.check_outputs()


@pytest.mark.parametrize("accepts", [(0,), (5,), (0, 3, 1)])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_lone_sequence_with_the_fewest_window_pages_is_never_preempted(
    window: int, page_size: int, accepts: tuple[int, ...]
) -> None:
    room = WindowRoom(window, WindowRoom.min_pages(window, page_size))
    stepper = Stepper(page_size=page_size, most_drafts=5, accepts=accepts, windows=room)
    stepper.add(prompt_of(8), max_tokens=60)
    stepper.run()
    assert stepper.scheduler.counters.preemptions == 0
    stepper.check_outputs()


@pytest.mark.parametrize("page_size", [1, 4])
def test_drafts_that_are_refused_cause_no_preemption(page_size: int) -> None:
    def preemptions(most_drafts: int) -> int:
        stepper = Stepper(num_pages=1 + 96 // page_size, page_size=page_size, most_drafts=most_drafts)
        for first in range(4):
            stepper.add(prompt_of(8, first), max_tokens=16)
        stepper.run()
        stepper.check_outputs()
        return stepper.scheduler.counters.preemptions

    assert preemptions(0) == preemptions(5) == 0


def test_cached_pages_are_evicted_for_tokens_that_are_accepted() -> None:
    stepper = Stepper(num_pages=21, page_size=2, most_drafts=4, accepts=[4])
    stepper.add(prompt_of(30, 1), max_tokens=1)
    stepper.run()
    assert stepper.scheduler.memory.tree.cached_pages == 15
    sequence = stepper.add(prompt_of(4), max_tokens=30)
    plans = stepper.run()
    assert max(max(plan.drafts, default=0) for plan in plans) == 4
    assert sequence.output == stepper.expected(sequence)
