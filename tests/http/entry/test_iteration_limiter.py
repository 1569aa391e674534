"""A burst of requests passes in order, a few in each pass of the loop."""

from __future__ import annotations

import asyncio

import pytest

from aengine.http.entry.body import IterationLimiter

pytestmark = pytest.mark.anyio


async def burst(iteration_limiter: IterationLimiter, count: int) -> tuple[list[int], list[int]]:
    """Return the admitted tasks in order, and their number in each pass of the loop."""
    order: list[int] = []
    passes: list[int] = []

    async def enter(number: int) -> None:
        await iteration_limiter.enter()
        order.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(count)]
    while len(order) < count:
        before = len(order)
        await asyncio.sleep(0)
        passes.append(len(order) - before)
    await asyncio.gather(*tasks)
    return order, passes


async def test_a_burst_is_admitted_in_order_a_few_in_each_iteration() -> None:
    order, passes = await burst(IterationLimiter(4), 19)
    assert order == list(range(19))
    assert max(passes) == 4
    assert len(passes) < 12  # no pass is wasted


async def test_single_requests_do_not_wait() -> None:
    iteration_limiter = IterationLimiter(1)
    for _ in range(5):
        await iteration_limiter.enter()
        await asyncio.sleep(0)


async def test_a_cancelled_task_does_not_use_up_a_turn() -> None:
    iteration_limiter = IterationLimiter(1)
    entered: list[int] = []

    async def enter(number: int) -> None:
        await iteration_limiter.enter()
        entered.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(4)]
    await asyncio.sleep(0)  # the first has passed, the others wait
    tasks[1].cancel()
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == [0, 2]
    await burst(iteration_limiter, 3)
