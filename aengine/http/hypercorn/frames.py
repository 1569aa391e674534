"""Cuts what an HTTP/2 connection receives into slices of few frames, so that none holds the event loop for long.

One read of 64 KiB may be 7,000 frames or 2,500 requests, which the HTTP/2 library would all take in one call. A frame
that is too long it refuses only once all of it has come, 16 MiB of it in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from h2.exceptions import FrameTooLargeError, ProtocolError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = 9  # bytes: length (3), type, flags, stream (4)
_END_STREAM = 0x1
_TINY = 64  # bytes; data in such pieces costs more than it brings

_SETTING = 6  # bytes
_SETTINGS = 10  # settings of a frame, honest ones have fewer; so many more cost as much as another frame

_SLICE = 64  # the work of a slice, in frames that carry nothing
_REQUEST = 8  # the work of a request, in the same unit


class FrameType(IntEnum):
    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4


# Tokens of the connection's budget (`frame_budget`): what is not here costs one.
_PRICES = {FrameType.RST_STREAM: 5, FrameType.SETTINGS: 5}


class Slice(NamedTuple):
    data: bytes
    price: int  # of the frames that begin in it
    full: bool  # it holds as much work as one may


class FrameSlices:
    """Follows one connection's frames from its preface on. max_frame_size: of a frame without its head, in bytes."""

    def __init__(self, max_frame_size: int) -> None:
        self._max_frame_size = max_frame_size
        self._first = True  # frame of the connection
        self._skip = len(PREFACE)  # bytes until the next head
        self._head = bytearray()  # as much of one as has come

    def cut(self, data: bytes) -> Iterator[Slice]:
        """Cut `data` into slices, in order.

        Raises `FrameTooLargeError` at the head of a frame that is too long, and `ProtocolError` where the first one is
        not SETTINGS: what follows such a head is no HTTP/2.
        """
        begin = at = work = price = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            step = min(_HEAD - len(self._head), len(data) - at)
            self._head += data[at : at + step]
            at += step
            if len(self._head) < _HEAD:
                break
            self._skip, kind, flags = int.from_bytes(self._head[:3]), self._head[3], self._head[4]
            self._head.clear()
            self._check(kind, self._skip)
            price += _price(kind, flags, self._skip)
            work += _REQUEST if kind == FrameType.HEADERS else 1 + _surplus(kind, self._skip)
            if work >= _SLICE:
                end = min(at + self._skip, len(data))
                self._skip -= end - at
                yield Slice(data[begin:end], price, full=True)
                begin = at = end
                work = price = 0
        if begin < len(data):
            yield Slice(data[begin:], price, full=False)

    def _check(self, kind: int, length: int) -> None:
        if length > self._max_frame_size:
            raise FrameTooLargeError(f"a frame of {length} bytes, where {self._max_frame_size} are the most")
        if self._first and kind != FrameType.SETTINGS:
            raise ProtocolError(f"the first frame is of type {kind}, not SETTINGS")
        self._first = False


def _price(kind: int, flags: int, length: int) -> int:
    if kind == FrameType.DATA and (length >= _TINY or flags & _END_STREAM):
        return 0
    return _PRICES.get(kind, 1) + _surplus(kind, length)  # type: ignore[call-overload, no-any-return]


def _surplus(kind: int, length: int) -> int:
    """What a frame costs beyond others of its kind: one may hold 2,730 settings."""
    return max(0, length - 1) // (_SETTING * _SETTINGS) if kind == FrameType.SETTINGS else 0
