"""Events come out whole, however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.client.events import EventReader
from aengine.errors import ServerError

STREAM = 'data: {"text":"é👋"}\n\n: ping\n\ndata:a\r\ndata: b\r\n\r\nid: 7\rdata: c\r\rdata: [DONE]\n\n'.encode()
EVENTS = ['{"text":"é👋"}'.encode(), b"a\nb", b"c", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_wherever_it_is_cut(cuts: list[int]) -> None:
    reader, edges = EventReader(), [0, *sorted(cuts), len(STREAM)]
    found = [event for a, b in itertools.pairwise(edges) for event in reader.feed(STREAM[a:b])]
    assert found == EVENTS


def test_an_event_that_has_not_ended_is_held() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\n") == []
    assert reader.feed(b"\n") == [b"a"]


@pytest.mark.parametrize("endless", [b"x" * 10, b"data: xxxx\n"])
def test_an_event_without_end_is_refused(endless: bytes) -> None:
    reader = EventReader(max_bytes=100)
    for _ in range(10):
        reader.feed(endless)
    with pytest.raises(ServerError, match="100 bytes"):
        reader.feed(endless)


def test_comments_and_events_may_go_on_for_ever() -> None:
    reader = EventReader(max_bytes=100)
    found = [event for _ in range(100) for event in reader.feed(b": ping\n" * 10 + b"data: x\n\n")]
    assert found == [b"x"] * 100
