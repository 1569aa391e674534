"""Long answers are encoded in slices, kept once, and sent in pieces."""

from __future__ import annotations

import json

import msgspec
import pytest

from aengine.http.streams.document import document, encoded_list
from aengine.http.streams.fragments import SLICE, sliced
from aengine.types import Fragment, PromptLogprob, TokenLogprob

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("count", [0, 1, SLICE, SLICE + 1, 3 * SLICE])
async def test_a_list_in_slices_is_the_list(count: int) -> None:
    items = await encoded_list(range(count), lambda item: {"item": item})
    assert json.loads(b"".join(items.pieces)) == [{"item": item} for item in range(count)]
    assert max(map(len, items.pieces)) < 20 * SLICE


async def test_encoded_lists_are_in_their_places() -> None:
    first, second = await encoded_list([1, 2], str), await encoded_list([], str)
    payload = {"a": first, "b": ["x", second, {"c": first}], "d": "été"}
    plain = {"a": ["1", "2"], "b": ["x", [], {"c": ["1", "2"]}], "d": "été"}
    pieces = document(payload)
    assert json.loads(b"".join(pieces)) == plain
    assert sum(piece is first.pieces[1] for piece in pieces) == 2  # not copied


def test_a_document_without_lists_is_one_piece() -> None:
    assert document({"a": 1}) == [msgspec.json.encode({"a": 1})]


async def test_an_unencodable_value_raises() -> None:
    with pytest.raises(TypeError, match="object in a document"):
        document({"a": object()})


def sizes(fragments: list[Fragment]) -> list[int]:
    runs = list(sliced(fragments))
    assert [fragment for run in runs for fragment in run] == fragments
    return list(map(len, runs))


def test_fragments_go_together_until_they_are_many_or_large() -> None:
    small = Fragment("a", (1,))
    large = Fragment("a", (1,), tuple([TokenLogprob(1, "a", -1.0)] * SLICE))
    prompt = Fragment("a", (1,), prompt_logprobs=[PromptLogprob(1, -1.0, 1, [], [])] * 1000)
    assert sizes([small]) == [1]
    assert sizes([small] * SLICE) == [SLICE]
    assert sizes([small] * (2 * SLICE + 1)) == [SLICE, SLICE, 1]
    assert sizes([large] * 3) == [1, 1, 1]
    assert sizes([small, prompt, prompt, small]) == [1, 1, 1, 1]
