"""A reader's deltas are the same for fragments and for a whole choice, and content may have its tokens' logprobs."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.config import ServerConfig
from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta, join_deltas
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.parser import AnswerFormat
from aengine.text.answer.reader import Reader, ReadStream
from aengine.text.reading import AnswerReading, CallRules
from aengine.types import Choice, FinishReason, Fragment, TokenLogprob
from tests.text.cutting import shape

HEAD = '{"name": "f", "arguments": '
TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", HEAD, "{}", "}", "\n", " ", "a"]
CALL = [2, 4, 5, 6, 3]
FORMS = [AnswerFormat(), AnswerFormat(thoughts=True), AnswerFormat(calls="hermes", thoughts=True)]
ONE_OR_A_CALL = st.one_of(st.integers(0, 9).map(lambda one: [one]), st.just(CALL))
IDS = st.lists(ONE_OR_A_CALL, max_size=8).map(lambda parts: [one for part in parts for one in part])


def reader(form: AnswerFormat, *, logprobs: bool = False) -> Reader:
    rules = CallRules((CallableTool("f"),))
    made = AnswerReading(ServerConfig(), form, rules).reader(False, lambda token_id: TOKENS[token_id].encode())
    if logprobs:
        made.attach_logprobs()
    return made


def scores(ids: list[int]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(one, TOKENS[one], -1.0) for one in ids)


def fragments(ids: list[int], reason: FinishReason) -> list[Fragment]:
    ends: dict[int, FinishReason | None] = {len(ids) - 1: reason}
    told = [Fragment(TOKENS[one], (one,), scores([one]), ends.get(place)) for place, one in enumerate(ids)]
    return told or [Fragment("", finish_reason=reason)]


def fed(made: Reader, ids: list[int], reason: FinishReason) -> list[Delta]:
    return [delta for fragment in fragments(ids, reason) for delta in made.feed(fragment)]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [one.token_id for delta in deltas if isinstance(delta, ContentDelta) for one in delta.logprobs]


@given(form=st.sampled_from(FORMS), ids=IDS, reason=st.sampled_from(["stop", "length"]), logprobs=st.booleans())
def test_a_whole_choice_is_read_like_its_fragments(
    form: AnswerFormat, ids: list[int], reason: FinishReason, logprobs: bool
) -> None:
    streamed, whole = reader(form, logprobs=logprobs), reader(form, logprobs=logprobs)
    deltas = fed(streamed, ids, reason)
    choice = Choice(0, "".join(TOKENS[one] for one in ids), tuple(ids), reason, scores(ids))
    read = asyncio.run(whole.read(choice))
    assert shape(join_deltas(read)) == shape(join_deltas(deltas))
    assert whole.thought_tokens == streamed.thought_tokens
    assert whole.ends_with_calls == streamed.ends_with_calls
    if logprobs and ids:
        assert tokens_of(read) == tokens_of(deltas)
        assert whole.take_logprobs() == streamed.take_logprobs()


@given(form=st.sampled_from(FORMS), ids=IDS)
def test_logprobs_change_no_answer(form: AnswerFormat, ids: list[int]) -> None:
    without, with_logprobs = reader(form), reader(form, logprobs=True)
    one, other = (fed(made, ids, "stop") for made in (without, with_logprobs))
    assert shape(join_deltas(one)) == shape(join_deltas(other))
    assert without.thought_tokens == with_logprobs.thought_tokens


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ([9, 8, 9], [9, 8, 9]),
        ([0, 9, 1, 9], [9]),
        ([0, 9, 1, 7, 9], [7, 9]),  # a line break that is dropped belongs to the content after it
        ([9, *CALL], [9]),
        ([9, *CALL, 9], [9, 9]),
        (CALL, []),
    ],
)
def test_content_has_the_logprobs_of_its_tokens(ids: list[int], kept: list[int]) -> None:
    assert tokens_of(fed(reader(FORMS[2], logprobs=True), ids, "stop")) == kept


def test_logprobs_of_text_that_is_held_back_wait_for_it() -> None:
    made = reader(FORMS[2], logprobs=True)
    assert made.feed(Fragment("a", (9,), scores([9]))) == [ContentDelta("a", scores([9]))]
    assert made.feed(Fragment("\n", (7,), scores([7]))) == []
    assert made.feed(Fragment("a", (9,), scores([9]))) == [ContentDelta("\na", scores([7, 9]))]
    assert made.feed(Fragment("", (8,), scores([8]), "stop")) == []  # an end token is not part of the text
    assert made.take_logprobs() == scores([8])


def test_a_reader_is_plain_once_nothing_but_content_can_follow() -> None:
    assert reader(FORMS[0]).plain
    assert not reader(FORMS[2]).plain
    made = reader(FORMS[1])
    assert not made.plain
    assert made.feed(Fragment("<think>a", (0, 9))) == [ReasoningDelta("a")]
    assert made.feed(Fragment("</think>", (1,))) == []
    assert made.feed(Fragment("\na", (7, 9))) == [ContentDelta("a")]
    assert made.plain
    assert made.feed(Fragment("</think>", (1,), None, "stop")) == [ContentDelta("</think>")]
    assert made.thought_tokens == 1


def test_a_streams_fragments_have_thoughts_and_calls_apart() -> None:
    class Stream:
        id, prompt_tokens, backlog = "r", 3, 0

        async def take(self) -> list[Fragment]:
            return fragments([0, 9, 1, 9, *CALL], "stop")

        def abort(self) -> None: ...

    taken = asyncio.run(ReadStream(Stream(), [reader(FORMS[2])]).take())
    assert "".join(fragment.reasoning for fragment in taken) == "a"
    assert "".join(fragment.text for fragment in taken) == "a"
    begun = [call for fragment in taken for call in fragment.tool_calls if call.id is not None]
    assert [(type(call), call.name) for call in begun] == [(CallDelta, "f")]
    assert [fragment.token_ids for fragment in taken] == [(one,) for one in [0, 9, 1, 9, *CALL]]
