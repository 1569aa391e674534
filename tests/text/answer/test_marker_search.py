"""The markers that are found do not depend on how the text is cut."""

from __future__ import annotations

import itertools

import pytest

from aengine.text.answer.marker_search import MarkerSearch


def parts(markers: tuple[str, ...], pieces: list[str]) -> list[str]:
    """Return the text before the first marker, the marker, the text after it, and so on."""
    search, found, before = MarkerSearch(*markers), [], ""
    for piece in pieces:
        rest: str | None = piece
        while rest is not None:
            text, rest = search.feed(rest)
            before += text
            if rest is not None:
                found += [before, search.found]
                before = ""
    return [*found, before + search.flush()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a ``` b", ["a ", "```", " b"]),
        ("Action: ```json\n[", ["", "Action: ```json", "\n["]),  # the shorter marker is a part of the longer one
        ("Action: ```jso```", ["Action: ", "```", "jso", "```", ""]),
        ("xAction: ```", ["xAction: ```"]),  # it may still become the longer one
    ],
)
def test_the_marker_that_begins_first_is_found_however_the_text_is_cut(text: str, expected: list[str]) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert parts(("```", "Action: ```json"), pieces) == expected
    assert parts(("```", "Action: ```json"), list(text)) == expected
