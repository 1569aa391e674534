"""A step that also decodes carries only a bounded number of prompt tokens."""

from __future__ import annotations

import msgspec
import pytest

from aengine.cache.radix import packed
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.planning.prefill_budget import PrefillBudget
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import MixedLimit, StepPlan, StepResult

LIMIT = MixedLimit(tokens=64, context=100, multiple=16)


def scheduler() -> Scheduler:
    return Scheduler(
        num_pages=400, page_size=4, max_rows=4, max_step_tokens=256, max_queue=10, mixed_limit=LIMIT, prefix_cache=False
    )


def add(to: Scheduler, number: int, prompt: int, new: int) -> None:
    to.add(
        Sequence(
            prompt=packed([number] * prompt),
            params=SamplingParams(),
            seed=0,
            stop_ids=(),
            max_total=prompt + new,
            rank=(0.0, number),
        )
    )


def step(of: Scheduler) -> StepPlan:
    plan = of.schedule()
    assert plan is not None
    draws = len(plan.sampled_rows)
    of.commit(plan, StepResult(token_ids=[1] * draws, finite=[True] * draws, logprobs=None))
    return plan


def test_alone_a_prompt_fills_the_step() -> None:
    engine = scheduler()
    add(engine, 0, 300, 1)
    assert [step(engine).num_tokens for _ in range(2)] == [256, 44]


def test_next_to_a_stream_chunks_shrink_with_their_context_and_fill_whole_tiles() -> None:
    engine = scheduler()
    add(engine, 0, 4, 100)
    step(engine)
    add(engine, 1, 300, 1)
    plans = [step(engine) for _ in range(20)]
    chunks = [(chunk.start, len(chunk.token_ids)) for plan in plans for chunk in plan.prefill]
    assert all(len(plan.decode) == 1 for plan in plans)
    assert all(plan.num_tokens % 16 == 0 for plan in plans if plan.prefill and not plan.prefill[0].samples)
    assert all(count * (1 + start / 100) <= 64 + 16 / 2 for start, count in chunks)
    assert [count for _, count in chunks] == sorted((count for _, count in chunks), reverse=True)
    assert sum(count for _, count in chunks) == 300


def test_several_prompts_share_what_the_streams_can_wait_for() -> None:
    engine = scheduler()
    add(engine, 0, 4, 100)
    step(engine)
    for number in (1, 2, 3):
        add(engine, number, 30, 1)
    assert [len(chunk.token_ids) for chunk in step(engine).prefill] == [30, 30, 3]  # 1 + 63 is a multiple of 16


@pytest.mark.parametrize(
    ("start", "carried"),
    [
        pytest.param(5, 64, id="a few tokens short of a whole multiple"),
        pytest.param(30, 48, id="as many short as it is over"),
        pytest.param(150, 16, id="few, but far into a prompt they take long"),
    ],
)
def test_a_step_is_filled_up_to_a_whole_multiple_where_that_takes_little_longer(start: int, carried: int) -> None:
    budget = PrefillBudget(1000, 4, LIMIT)
    assert 4 + budget.take(start, 500) == carried


def test_a_step_never_grows_beyond_the_most_that_one_may_carry() -> None:
    assert PrefillBudget(62, 4, LIMIT).take(5, 500) == 44
    assert PrefillBudget(1000, 4, msgspec.structs.replace(LIMIT, tokens=62)).take(5, 500) == 44


def test_what_moves_on_by_one_token_is_not_filled_up() -> None:
    assert PrefillBudget(1000, 15, msgspec.structs.replace(LIMIT, tokens=31)).take(10**4, 500) == 1


def test_a_last_piece_of_a_long_prompt_waits_for_the_next_step() -> None:
    budget = PrefillBudget(1000, 1, LIMIT)
    assert budget.take(0, 61) == 61
    assert budget.take(500, 2) == 1  # 6 times as long as a token at the beginning


@pytest.mark.parametrize("start", [0, 5, 10**6])
@pytest.mark.parametrize("decodes", [0, 1, 30])
def test_a_step_with_room_always_moves_a_prompt_on(start: int, decodes: int) -> None:
    budget = PrefillBudget(31, decodes, LIMIT)
    assert budget.left
    assert 1 <= budget.take(start, 100) <= 31 - decodes
    assert not budget.left
