"""The token bucket of an HTTP/2 connection."""

from __future__ import annotations

from aengine.http.hypercorn.frame_budget import BURST, PER_MESSAGE, PER_SECOND, FrameBudget


def test_a_burst_is_free_and_what_follows_comes_with_time() -> None:
    now = [0.0]
    budget = FrameBudget(clock=lambda: now[0])
    assert budget.spend(int(BURST))
    assert not budget.spend(1)
    now[0] += 1
    assert budget.spend(int(PER_SECOND) - 1)
    assert not budget.spend(1)
    now[0] += 10_000
    assert budget.spend(int(BURST))
    assert not budget.spend(1)


def test_answers_pay_for_what_their_reader_sends() -> None:
    budget = FrameBudget(clock=lambda: 0.0)
    assert budget.spend(int(BURST))
    for _ in range(1000):
        budget.earn()
        assert budget.spend(int(PER_MESSAGE))
    assert not budget.spend(1)
