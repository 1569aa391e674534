"""Merging of waiting fragments."""

from __future__ import annotations

import pytest

from aengine.errors import EngineFailedError
from aengine.http.streams.fragments import collect, merge
from aengine.types import Choice, Fragment, TokenLogprob, Usage
from tests.http.fake_engine import FakeStream

USAGE = Usage(1, 4, 0)
LOGPROB = TokenLogprob(1, "a", -1.0)


def test_one_fragment_stays_as_it_is() -> None:
    fragments = [Fragment("a", (1,))]
    assert merge(fragments) == fragments


def test_fragments_of_one_choice_become_one() -> None:
    assert merge([Fragment("a", (1,)), Fragment("", ()), Fragment("b", (2, 3), None, "stop", USAGE)]) == [
        Fragment("ab", (1, 2, 3), None, "stop", USAGE)
    ]


def test_the_merged_fragment_has_the_last_finish_reason() -> None:
    end = Fragment("", (2,), None, "stop", USAGE, stop_string="END")
    assert merge([Fragment("a", (1,)), end]) == [Fragment("a", (1, 2), None, "stop", USAGE, stop_string="END")]


def test_each_choice_has_its_own_and_usage_stays_last() -> None:
    first, second = Fragment("a", (1,), index=0), Fragment("b", (2,), index=1)
    second_end, first_end = Fragment("c", (3,), None, "stop", None, 1), Fragment("d", (4,), None, "stop", USAGE, 0)
    assert merge([first, second, second_end, first_end]) == [
        Fragment("bc", (2, 3), None, "stop", None, 1),
        Fragment("ad", (1, 4), None, "stop", USAGE, 0),
    ]


def test_logprobs_are_joined_even_if_the_last_fragment_has_none() -> None:
    joined = merge([Fragment("a", (1,), (LOGPROB,)), Fragment("", (), None, "abort")])
    assert joined[0].logprobs == (LOGPROB,)


@pytest.mark.anyio
async def test_collecting_a_stream() -> None:
    stream = FakeStream("id", 1, one_by_one=True)
    stream.put(Fragment("a", (1,), index=1), Fragment("b", (2,), None, "length", index=0))
    stream.put(Fragment("c", (3,), None, "stop", USAGE, 1))
    completion = await collect(stream)
    assert completion.choices == (Choice(0, "b", (2,), "length"), Choice(1, "ac", (1, 3), "stop"))
    assert completion.usage == USAGE


@pytest.mark.anyio
async def test_a_stream_that_ends_without_usage_was_aborted() -> None:
    stream = FakeStream("id", 1, one_by_one=True)
    stream.put(Fragment("a", (1,)))
    stream.abort()
    with pytest.raises(EngineFailedError, match="aborted"):
        await collect(stream)


@pytest.mark.anyio
async def test_a_choice_without_a_reason_was_aborted() -> None:
    """Some of several choices have no reason if a request ends early."""
    stream = FakeStream("id", 1, one_by_one=True)
    stream.put(Fragment("a", (1,), index=1), Fragment("b", (2,), None, "stop", USAGE, 0))
    completion = await collect(stream)
    assert [choice.finish_reason for choice in completion.choices] == ["stop", "abort"]
