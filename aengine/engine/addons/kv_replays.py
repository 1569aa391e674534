"""Sends batches of KV events once more, to those who missed them.

A peer sends the first number that it misses, with or without an empty frame before it. It gets the number and the batch
of each from there on, then number -1 with an empty batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq.asyncio

_SLICE = 64  # messages that are sent at once; about 1 ms
_SLICE_BYTES = 2**20
_FRAMES = 256  # that are read at once
_REST = 4.0  # how long the loop has for others after each slice, in lengths of the slice
_STALLED = 0.01  # seconds until a peer that did not take a message is tried again
_PATIENCE = 10.0  # seconds that it may go on so
_PEERS = 64  # that are served by turns
_LONGEST_FRAME = 256  # bytes; an identity has 255
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(slots=True)
class _Replay:
    """A peer's place in the batches."""

    number: int  # of the next batch
    moved: float  # when the last message was taken


class Replays:
    """Serves the peers of a ROUTER socket by turns, in at most a fifth of the loop's time. A peer that asks again
    before it has been answered begins anew.
    """

    def __init__(self, socket: zmq.asyncio.Socket, kept: Sequence[tuple[int, bytes]]) -> None:
        """kept: numbered batches, one number after the other; it changes meanwhile."""
        import zmq

        socket.set(zmq.ROUTER_MANDATORY, 1)  # tells of peers that are gone or do not read
        socket.set(zmq.MAXMSGSIZE, _LONGEST_FRAME)
        self._readable = socket.poll
        # Reads and writes without futures, which never yield.
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._again, self._error = zmq.Again, zmq.ZMQError
        self._no_wait, self._more = zmq.NOBLOCK, zmq.RCVMORE
        self._kept = kept
        self._frames: list[bytes] = []  # of the request that is being read
        self._replays: dict[bytes, _Replay] = {}  # by peer, the next one first

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            if not self._replays:
                await self._readable()
            began = time.perf_counter()
            self._read()
            moved = self._send() if self._replays else True
            took = time.perf_counter() - began
            await asyncio.sleep(_REST * took if moved else max(_STALLED, _REST * took))

    def _read(self) -> None:
        """Read requests, and of a long one as many frames as may be."""
        for _ in range(_FRAMES):
            try:
                frame = self._socket.recv(self._no_wait)
            except self._again:
                return
            if len(self._frames) < 4:
                self._frames.append(frame)
            if not self._socket.get(self._more):
                self._note(self._frames)
                self._frames = []

    def _note(self, frames: list[bytes]) -> None:
        peer, start = frames[0], frames[-1]
        if len(frames) < 4 and (peer in self._replays or len(self._replays) < _PEERS):
            number = int.from_bytes(start, "big") if len(start) == 8 else 2**64
            self._replays[peer] = _Replay(number, time.monotonic())

    def _send(self) -> bool:
        """Send the next slice to the next peer; returns whether the peer has taken anything."""
        peer = next(iter(self._replays))
        replay = self._replays.pop(peer)
        size = sent = 0
        while sent < _SLICE and size < _SLICE_BYTES:
            first = self._kept[0][0] if self._kept else 0
            place = max(0, replay.number - first)
            over = place >= len(self._kept)
            number, batch = (_END, b"") if over else (self._kept[place][0].to_bytes(8, "big"), self._kept[place][1])
            try:
                self._socket.send_multipart((peer, b"", number, batch), self._no_wait)
            except self._again:
                if time.monotonic() - replay.moved < _PATIENCE:
                    self._replays[peer] = replay
                return sent > 0
            except self._error:  # the peer is gone
                return True
            if over:
                return True
            replay.number, replay.moved = first + place + 1, time.monotonic()
            sent, size = sent + 1, size + len(batch)
        self._replays[peer] = replay
        return True
