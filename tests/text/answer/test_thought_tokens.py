"""The tokens of a thought, counted by their bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.text.answer.thought_tokens import ThoughtTokens
from aengine.text.tokens.tokenizer import Tokenizer


def count(pieces: list[bytes], opened: bool = False, at_once: int = 1) -> int:
    counter = ThoughtTokens(pieces.__getitem__, opened)
    ids = range(len(pieces))
    for start in range(0, len(pieces), at_once):
        counter.feed(ids[start : start + at_once])
    return counter.count


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize(
    ("pieces", "opened", "expected"),
    [
        ([b"<think>", b"a", b"b", b"</think>", b"c"], False, 2),
        ([b"a", b"b", b"</think>", b"c"], True, 2),
        ([b"\n", b"<think>", b"\n", b"a", b"</think>"], False, 2),
        ([b"<think>", b"</think>", b"a"], False, 0),
        ([b"</think>", b"a"], True, 0),
        ([b"<", b"think", b">", b"a", b"</", b"think", b">\n", b"c"], False, 1),
        ([b"<think>a", b"b</think>c", b"d"], False, 2),
        ([b"<think>", b"a", b"\xf0\x9f", b"\x91\x8b"], False, 3),  # cut off
        ([b"<think>", b"</think", b"</think", b">"], False, 1),
        ([b"a", b"<think>", b"b", b"</think>"], False, 0),  # only what begins with it is a thought
        ([b"<b>", b"<think>"], False, 0),
        ([b"", b"<think>", b"", b"a", b"</think>"], False, 2),
        ([], False, 0),
    ],
)
def test_what_counts(pieces: list[bytes], opened: bool, expected: int, at_once: int) -> None:
    assert count(pieces, opened, at_once) == expected


@given(st.lists(st.sampled_from([b"a", b"<", b"/", b"think", b">", b"</think", b"\n", b"<th"]), max_size=12))
def test_it_is_the_tokens_that_begin_before_the_end(pieces: list[bytes]) -> None:
    end = b"".join(pieces).find(b"</think>")
    starts = [sum(map(len, pieces[:place])) for place in range(len(pieces))]
    assert count(pieces, opened=True) == sum(end < 0 or start < end for start in starts)


def test_the_demo_models_markers(demo: Tokenizer) -> None:
    ids = demo.encode_now("<think>\nOne and two.\n</think>\n\nThree.")
    counter = ThoughtTokens(demo.token_bytes, False)
    counter.feed(ids)
    markers = demo.answer_format.markers
    assert counter.count == ids.index(markers["</think>"]) - ids.index(markers["<think>"]) - 1
