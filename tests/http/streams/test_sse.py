"""Event templates."""

from __future__ import annotations

import json

import pytest

from aengine.http.streams.sse import PLACEHOLDER, encode, event, template

AWKWARD = [
    '"',
    "\\",
    "\n\n",
    "\r\n",
    "data: x",
    "é",
    "👋",
    "漢字",
    "\u2028",
    "\x00",
    "</script>",
    PLACEHOLDER,
    "%b",
    "",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_a_filled_template_is_the_encoded_event(text: str) -> None:
    frame = template({"a": [1, {"text": PLACEHOLDER}], "ids": PLACEHOLDER, "100%": None, "%b": "%s"})
    filled = frame % (encode(text), encode((1, 2)))
    assert filled == event({"a": [1, {"text": text}], "ids": (1, 2), "100%": None, "%b": "%s"})


@pytest.mark.parametrize("text", AWKWARD)
def test_an_event_is_one_line_whatever_it_holds(text: str) -> None:
    data = event({"text": text})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert json.loads(data[6:]) == {"text": text}
