"""The prompt before each choice, once, and in pieces that do not block the loop."""

from __future__ import annotations

import pytest

from aengine.http.openai.echo import EchoingStream
from aengine.http.streams.fragments import SLICE, collect
from aengine.types import Fragment, PromptLogprob, Usage
from tests.http.fake_engine import FakeStream, FakeTokenizer

pytestmark = pytest.mark.anyio


def echoing(tokens: int, choices: int, logprobs: int | None = 2) -> tuple[FakeStream, EchoingStream]:
    scores = [PromptLogprob(3, -1.0, 2, [1, 2, 4], [-0.5, -1.5, -2.5])] * (tokens - 1)
    stream = FakeStream("r", tokens, one_by_one=False)
    reported = None if logprobs is None else scores
    stream.put(*(Fragment("x", (1,), index=index, prompt_logprobs=reported) for index in range(choices)))
    return stream, EchoingStream(stream, FakeTokenizer(), "prompt", [3] * tokens, logprobs, mute=False)


async def test_the_text_comes_first_and_the_tokens_in_slices() -> None:
    tokens = 3 * SLICE + 1
    _, echoed = echoing(tokens, choices=1)
    fragments = await echoed.take()
    assert [fragment.text for fragment in fragments] == ["prompt", "", "", "", "x"]
    assert [len(fragment.logprobs or ()) for fragment in fragments] == [SLICE, SLICE, SLICE, 1, 0]
    reported = [one for fragment in fragments for one in fragment.logprobs or ()]
    assert reported[0].top == ()  # the first token has no candidates
    assert all([top.logprob for top in one.top] == [-0.5, -1.5] for one in reported[1:])


async def test_the_choices_share_the_echoed_logprobs() -> None:
    stream, echoed = echoing(10, choices=3)
    stream.put(*(Fragment("", (), None, "stop", Usage(10, 3, 0) if index == 2 else None, index) for index in range(3)))
    choices = (await collect(echoed)).choices
    assert [choice.text for choice in choices] == ["promptx"] * 3
    for choice in choices:
        assert choice.logprobs is not None
        assert choice.prompt_logprobs is not None
        assert all(one is other for one, other in zip(choice.logprobs, choices[0].logprobs or (), strict=True))


async def test_an_echo_of_the_text_alone() -> None:
    _, echoed = echoing(10, choices=2, logprobs=None)
    fragments = await echoed.take()
    assert [(fragment.index, fragment.text) for fragment in fragments] == [
        (0, "prompt"),
        (0, "x"),
        (1, "prompt"),
        (1, "x"),
    ]
    assert all(fragment.logprobs is None for fragment in fragments)
