"""Prompt logprobs are encoded in slices."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from aengine.http.streams.document import document
from aengine.http.streams.fragments import SLICE
from aengine.http.streams.prompt_logprobs import PromptLogprobsStream
from aengine.types import Fragment, PromptLogprob
from tests.http.fake_engine import FakeStream, FakeTokenizer

pytestmark = pytest.mark.anyio


async def test_the_loop_turns_in_between() -> None:
    scores = [PromptLogprob(3, -1.0, 2, [1], [-0.5])] * (SLICE * 10)
    stream = FakeStream("a", 1, one_by_one=False)
    stream.put(*(Fragment("x", (1,), index=index, prompt_logprobs=scores) for index in range(2)))
    encoded = PromptLogprobsStream(stream, FakeTokenizer())
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await encoded.take()
    turning.cancel()
    assert 10 <= turns < 20  # once for both choices
    for index in range(2):
        answered = msgspec.json.decode(b"".join(document(encoded.answer_fields(index))))["prompt_logprobs"]
        assert len(answered) == len(scores) + 1
        assert answered[:2] == [
            None,
            {
                "1": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
                "3": {"logprob": -1.0, "rank": 2, "decoded_token": "xxx"},
            },
        ]
    assert encoded.answer_fields(2) == {}
