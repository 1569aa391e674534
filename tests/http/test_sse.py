"""Events encoded once around what changes."""

from __future__ import annotations

import json

import pytest

from aengine.http.sse import Template, event

AWKWARD = ['"', "\\", "\n\n", "\r\n", "data: x", "é", "👋", "漢字", "\u2028", "\x00", "</script>", "\x00hole\x00", ""]


@pytest.mark.parametrize("text", AWKWARD)
def test_a_filled_template_is_the_encoded_event(text: str) -> None:
    template = Template({"a": [1, {"text": Template.HOLE}], "ids": Template.HOLE, "z": None})
    assert template.fill(text, (1, 2)) == event({"a": [1, {"text": text}], "ids": (1, 2), "z": None})


@pytest.mark.parametrize("text", AWKWARD)
def test_an_event_is_one_line_whatever_it_holds(text: str) -> None:
    data = event({"text": text})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert json.loads(data[6:]) == {"text": text}
