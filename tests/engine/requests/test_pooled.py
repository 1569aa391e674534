"""The prompts of one call: the cost of each end does not grow with their number."""

from __future__ import annotations

import sys
from array import array
from types import FrameType
from typing import Any

import pytest

from aengine.engine.requests.pooled import PooledRequest
from aengine.errors import RequestAbortedError
from aengine.latency import Latencies
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.sequence import Sequence, Update

pytestmark = pytest.mark.anyio


def request(count: int) -> PooledRequest:
    sequences = [
        Sequence(
            prompt=array("i", [1, 2]), params=SamplingParams(), seed=0, stop_ids=(), max_total=2, rank=(0.0, number)
        )
        for number in range(count)
    ]
    return PooledRequest("one", sequences, lambda _: None, Latencies())


def end(whole: PooledRequest, prompts: slice) -> None:
    for prompt in whole.prompts[prompts]:
        prompt.deliver(Update(prompt.sequence, (), None, "stop"))


async def test_the_last_end_is_that_of_the_request() -> None:
    whole = request(3)
    end(whole, slice(2))
    assert not whole.done.done()
    end(whole, slice(2, None))
    assert whole.done.done()
    assert whole.latencies.ended == {"stop": 3, "length": 0, "abort": 0, "error": 0}


async def test_prompts_that_have_ended_are_not_aborted() -> None:
    whole = request(3)
    end(whole, slice(1))
    whole.abort()
    assert isinstance(whole.done.exception(), RequestAbortedError)
    assert whole.latencies.ended == {"stop": 1, "length": 0, "abort": 2, "error": 0}


async def test_an_end_costs_the_same_among_thousands() -> None:
    def lines(count: int) -> int:
        whole, run = request(count), 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal run
            run += 1
            return trace

        usual = sys.gettrace()
        sys.settrace(trace)
        try:
            end(whole, slice(None))
        finally:
            sys.settrace(usual)
        return run

    assert lines(2000) < 11 * lines(200)
