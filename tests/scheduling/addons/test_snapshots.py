"""A prefix of a sequence with states is found up to its deepest snapshot."""

from __future__ import annotations

import pytest

from aengine.cache.snapshots import SnapshotRoom
from aengine.scheduling.sequence import Sequence
from tests.scheduling.stepping import Stepper, prompt_of

PAGE = 4


def stepper(count: int = 50, grain: int = 8, prompt_grain: int = 8, **knobs: object) -> Stepper:
    return Stepper(page_size=PAGE, snapshots=SnapshotRoom(count, grain, prompt_grain), **knobs)


def run(steps: Stepper, prompt: list[int], max_tokens: int = 1, **params: object) -> Sequence:
    (sequence,) = steps.request(prompt, max_tokens, **params)
    steps.run()
    steps.scheduler.check_integrity()
    steps.check_outputs()
    return sequence


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_hit_ends_where_the_deepest_snapshot_is(lookahead: int) -> None:
    steps = stepper(lookahead=lookahead)
    run(steps, prompt_of(30))
    assert run(steps, prompt_of(30)).cached == 24
    assert run(steps, prompt_of(23)).cached == 16
    assert run(steps, prompt_of(24)).cached == 16  # its last token is computed in any case
    assert run(steps, prompt_of(7)).cached == 0
    assert run(steps, prompt_of(30, first=1)).cached == 0


def test_an_output_leaves_its_newest_snapshot_alone() -> None:
    steps = stepper(prompt_grain=800)
    sequence = run(steps, prompt_of(10), 40)
    snapshots = steps.snapshots
    assert snapshots is not None
    assert snapshots.slots.free == 48  # after 8 tokens of the prompt, and after 48 in all: the 50th was never fed
    assert run(steps, [*prompt_of(10), *sequence.output, 7, 7], 1).cached == 48
    assert run(steps, [*prompt_of(10), *sequence.output[:30], 7, 7], 1).cached == 8


def test_what_two_prompts_share_is_kept_for_the_third() -> None:
    steps = stepper(prompt_grain=800)
    found = [run(steps, [*prompt_of(50), *prompt_of(60, first=tail)]).cached for tail in (1, 2, 3)]
    assert found == [0, 0, 48]


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    steps = stepper(count=2)
    run(steps, prompt_of(9, first=1))
    run(steps, prompt_of(9, first=2))
    assert run(steps, prompt_of(9, first=1)).cached == 8  # used
    run(steps, prompt_of(9, first=3))
    assert [run(steps, prompt_of(10, first=first)).cached for first in (1, 3)] == [8, 8]
    assert run(steps, prompt_of(10, first=2)).cached == 0
    snapshots = steps.snapshots
    assert snapshots is not None
    assert snapshots.slots.evictions >= 1


def test_snapshots_go_with_their_pages() -> None:
    steps = stepper(num_pages=14)
    run(steps, prompt_of(40, first=1))
    run(steps, prompt_of(44, first=2))
    assert run(steps, prompt_of(44, first=2)).cached == 40
    assert run(steps, prompt_of(40, first=1)).cached == 0


def test_a_flush_drops_snapshots_and_running_sequences_file_none() -> None:
    steps = stepper()
    run(steps, prompt_of(30))
    steps.request(prompt_of(30), 20)
    steps.step()
    steps.flush()
    steps.run()
    steps.scheduler.check_integrity()
    snapshots = steps.snapshots
    assert snapshots is not None
    assert snapshots.slots.free == 50
    assert run(steps, prompt_of(30)).cached == 0


def test_a_failed_step_leaves_none() -> None:
    steps = stepper()
    steps.request(prompt_of(30), 4)
    steps.schedule()
    steps.fail()
    steps.run()
    assert run(steps, prompt_of(30)).cached == 0


def test_without_slots_nothing_is_found() -> None:
    steps = stepper(count=0)
    run(steps, prompt_of(30))
    assert run(steps, prompt_of(30)).cached == 0


def test_choices_fork_with_the_state_of_their_leader() -> None:
    steps = stepper()
    steps.request(prompt_of(13), 20, n=4)
    steps.run()
    steps.check_outputs()
    steps.scheduler.check_integrity()


def test_a_grain_is_a_whole_number_of_pages() -> None:
    with pytest.raises(ValueError, match="every 6 and 12 tokens, in pages of 4"):
        stepper(grain=6, prompt_grain=12)
