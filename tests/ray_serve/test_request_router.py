"""The router counts a request as long as Ray does: until its end, or until it is given up before it is sent."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from aengine.ray_serve.routing.prompt import prompt_from_text

pytest.importorskip("ray")
with warnings.catch_warnings():  # of Ray itself
    warnings.simplefilter("ignore", DeprecationWarning)
    from aengine.ray_serve import request_router
    from aengine.ray_serve.request_router import PrefixRequestRouter

pytestmark = [pytest.mark.anyio, pytest.mark.ray]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(request_router, "time", made)
    return made


@pytest.fixture
def router() -> PrefixRequestRouter:
    """A router with one replica, without a running Ray."""
    made = PrefixRequestRouter.__new__(PrefixRequestRouter)
    made.initialize_state()
    made._by_name = {"one": SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))}
    made._router.join("one")
    return made


def pending(number: int) -> Any:
    prompt = prompt_from_text(number.to_bytes(2, "little") * 2000)
    kwargs = {"prompt": type(prompt)(prompt.keys, prompt.ends, prompt.tokens, streamed=True), "number": number}
    return SimpleNamespace(
        kwargs={"router": "me", **kwargs}, metadata=SimpleNamespace(internal_request_id=f"request {number}")
    )


async def chosen(router: PrefixRequestRouter, request: Any) -> Any:
    ((replica,),) = await router.choose_replicas([replica := router._by_name["one"]], request)
    return replica


def load(router: PrefixRequestRouter) -> Any:
    return router._router._loads[router._router._slots["one"]]


async def test_a_request_that_was_given_up_before_it_was_sent_is_forgotten_later(
    router: PrefixRequestRouter, clock: Clock
) -> None:
    """Its client left while Ray asked the replica for its queue. Ray then reports neither its sending nor its end."""
    for number in range(5):
        await chosen(router, pending(number))
    sent = pending(5)
    replica = await chosen(router, sent)
    router.on_request_routed(sent, replica.replica_id, None)
    assert load(router).running == 6
    clock.now += 300
    last = pending(6)
    await chosen(router, last)
    assert load(router).running == 2  # the request that was sent, and the new one
    router.on_request_routed(last, replica.replica_id, None)
    router.on_request_completed(replica.replica_id, "request 6")
    router.on_request_completed(replica.replica_id, "request 5")
    assert load(router).running == 0
    assert load(router).delay(clock.now) == 0
    assert not router._chosen
    assert not router._ahead
    router.check_integrity()


async def test_one_that_ends_after_it_was_forgotten_counts_once(router: PrefixRequestRouter, clock: Clock) -> None:
    slow = pending(0)
    replica = await chosen(router, slow)
    clock.now += 300
    other = pending(1)
    await chosen(router, other)
    router.on_request_routed(slow, replica.replica_id, None)
    router.on_request_completed(replica.replica_id, "request 0")
    assert load(router).running == 1


async def test_a_request_that_runs_for_hours_goes_on_to_count(router: PrefixRequestRouter, clock: Clock) -> None:
    long = pending(0)
    replica = await chosen(router, long)
    router.on_request_routed(long, replica.replica_id, None)
    clock.now += 36_000
    await chosen(router, pending(1))
    assert load(router).running == 2
