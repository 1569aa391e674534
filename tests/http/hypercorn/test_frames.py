"""An HTTP/2 byte stream in slices: nothing is lost, each holds little work, and frames have their price."""

from __future__ import annotations

import pytest
from h2.exceptions import FrameTooLargeError, ProtocolError

from aengine.http.hypercorn.frames import PREFACE, FrameSlices, Slice
from tests.http.hypercorn.http2_client import frame

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, WINDOW = 0, 1, 2, 3, 4, 6, 8
END_STREAM = 1
MAX_FRAME_SIZE = 2**14
BEGIN = PREFACE + frame(SETTINGS)


def cut(*frames: bytes, at_once: int = 2**16) -> list[Slice]:
    """The slices of these frames, which arrive so many bytes at a time, behind the preface and its SETTINGS."""
    slices, data = FrameSlices(MAX_FRAME_SIZE), BEGIN + b"".join(frames)
    return [one for at in range(0, len(data), at_once) for one in slices.cut(data[at : at + at_once])]


@pytest.mark.parametrize("at_once", [1, 2, 7, 9, 10, 100, 2**16])
def test_slices_are_the_whole_however_it_arrives(at_once: int) -> None:
    frames = [frame(PING, payload=bytes(8)), frame(DATA, 0, 1, bytes(300)), frame(HEADERS, 4, 3, b"xy")] * 30
    slices = cut(*frames, at_once=at_once)
    assert b"".join(one.data for one in slices) == BEGIN + b"".join(frames)
    assert sum(one.price for one in slices) == 60 + 5


def test_a_slice_holds_64_frames_or_8_requests() -> None:
    pings = cut(*[frame(PING, payload=bytes(8))] * 200)
    assert [len(one.data) for one in pings] == [len(BEGIN) + 63 * 17, 64 * 17, 64 * 17, 9 * 17]
    assert [one.full for one in pings] == [True, True, True, False]
    requests = cut(*[frame(HEADERS, 4, 1, b"head")] * 20)
    assert [len(one.data) for one in requests] == [len(BEGIN) + 8 * 13, 8 * 13, 4 * 13]


def test_a_long_frame_of_settings_fills_a_slice() -> None:
    settings = frame(SETTINGS, payload=b"\0\4\0\1\0\0" * 2000)
    assert [one.full for one in cut(settings, settings, settings)] == [True, True, True]


@pytest.mark.parametrize(
    ("sent", "price"),
    [
        (frame(RESET, 0, 1, bytes(4)), 5),
        (frame(SETTINGS), 5),
        (frame(SETTINGS, payload=b"\0\4\0\1\0\0" * 10), 5),
        (frame(SETTINGS, payload=b"\0\4\0\1\0\0" * 2000), 5 + 199),
        (frame(PING, payload=bytes(8)), 1),
        (frame(PRIORITY, 0, 1, bytes(5)), 1),
        (frame(WINDOW, 0, 0, bytes(4)), 1),
        (frame(HEADERS, 4, 1, b"head"), 1),
        (frame(0xBB), 1),
        (frame(DATA, 0, 1), 1),
        (frame(DATA, 0, 1, bytes(63)), 1),
        (frame(DATA, 0, 1, bytes(64)), 0),
        (frame(DATA, END_STREAM, 1), 0),
    ],
)
def test_what_brings_nothing_has_a_price(sent: bytes, price: int) -> None:
    assert sum(one.price for one in cut(sent)) - 5 == price


@pytest.mark.parametrize("length", [MAX_FRAME_SIZE + 1, 2**24 - 1])
@pytest.mark.parametrize("at_once", [1, 9, 2**16])
def test_a_frame_that_is_too_long_is_refused_at_its_head(length: int, at_once: int) -> None:
    head = length.to_bytes(3) + bytes([DATA, 0]) + (1).to_bytes(4)
    with pytest.raises(FrameTooLargeError, match=f"a frame of {length} bytes, where 16384 are the most"):
        cut(frame(PING, payload=bytes(8)), head, at_once=at_once)


def test_the_longest_frames_are_taken() -> None:
    longest = frame(DATA, 0, 1, bytes(MAX_FRAME_SIZE))
    assert b"".join(one.data for one in cut(longest, longest)) == BEGIN + longest + longest


def test_a_connection_begins_with_settings() -> None:
    with pytest.raises(ProtocolError, match="the first frame is of type 6, not SETTINGS"):
        list(FrameSlices(MAX_FRAME_SIZE).cut(PREFACE + frame(PING, payload=bytes(8))))
