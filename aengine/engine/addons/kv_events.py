"""KV events for external routers: publishes which blocks the prefix cache stores and drops, in vLLM's ZeroMQ format.

A message on the PUB socket has three frames: topic, sequence number (8 bytes, big-endian), and a batch in msgpack,
`[time, [event, ...]]`. An event is `["BlockStored", hashes, parent's hash, token ids, block size, null, "GPU"]`,
`["BlockRemoved", hashes, "GPU"]` or `["AllBlocksCleared"]`.

A subscriber that missed batches sends the first missing number to the ROUTER socket, with or without an empty frame
before it. It receives the number and the contents of each batch from this number on, then -1 with an empty batch.

A block is a page. Its hash has 64 bits and covers all token ids from the first token of the prompt to the end of the
block. All engines compute the same hash.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from aengine.cache.radix import RadixTree
from aengine.config import EngineConfig
from aengine.errors import ConfigError

if TYPE_CHECKING:
    import zmq.asyncio

_KEPT = 10_000  # batches that are kept for subscribers that missed them
_KEPT_BYTES = 64 * 2**20  # the most bytes of kept batches
_UNSENT = 100_000  # messages that wait for a slow subscriber; further ones are dropped
_MEDIUM = "GPU"  # vLLM's name for the pool that steps read, on any device

_SLICE = 64  # messages that are sent to a peer in a row; about 1 ms
_SLICE_BYTES = 2**20
_FRAMES = 256  # frames that are read in a row
_PAUSE = 4.0  # pause after each slice, as a multiple of the slice's duration
_STALLED = 0.01  # seconds before the next try, if a peer accepted no message
_PATIENCE = 10.0  # seconds; a peer that accepts no message for longer is dropped
_PEERS = 64  # the most peers that are served at once
_LONGEST_FRAME = 256  # bytes; an identity has 255
_END = (-1).to_bytes(8, "big", signed=True)

Event = list[Any]


class BlockEvents:
    """Watches a radix tree and publishes its events, one batch for each pass of the event loop."""

    def __init__(self, page_size: int, publish: Callable[[list[Event]], None]) -> None:
        self._page_size = page_size
        self._publish = publish
        self._hashes: dict[int, int] = {}  # page -> hash
        self._pending: list[Event] = []
        self._loop = asyncio.get_running_loop()

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: object) -> None:
        """Add the event of a new run of pages. before: the page before the run; None: the run begins the prompt."""
        parent = None if before is None else self._hashes[before]
        previous, size, hashes = parent, len(token_ids) // len(pages), []
        for place, page in enumerate(pages):
            previous = _hash(previous, token_ids[place * size : (place + 1) * size], salt)
            self._hashes[page] = previous
            hashes.append(previous)
        ids = array("I", token_ids).tolist()
        self._add(["BlockStored", hashes, parent, ids, self._page_size, None, _MEDIUM])

    def removed(self, pages: Sequence[int]) -> None:
        """Add the event of pages that the tree dropped."""
        gone = (self._hashes.pop(page, None) for page in pages)
        if hashes := [one for one in gone if one is not None]:
            self._add(["BlockRemoved", hashes, _MEDIUM])

    def cleared(self) -> None:
        """Add the event of a cleared tree."""
        self._hashes.clear()
        self._add(["AllBlocksCleared"])

    def flush(self) -> None:
        """Publish the pending events."""
        events, self._pending = self._pending, []
        if events:
            self._publish(events)

    def _add(self, event: Event) -> None:
        if not self._pending:
            self._loop.call_soon(self.flush)
        self._pending.append(event)


def _hash(parent: int | None, token_ids: bytes, salt: object) -> int:
    before = b"" if parent is None else parent.to_bytes(8, "big")
    first = b"" if parent is not None or salt is None else repr(salt).encode()
    return int.from_bytes(blake2b(before + token_ids, digest_size=8, key=blake2b(first).digest()).digest(), "big")


class Publisher:
    """Numbers batches of events, sends them, and keeps the newest for subscribers that missed them."""

    def __init__(self, config: EngineConfig) -> None:
        """Bind the sockets. Raises `ConfigError` if pyzmq is missing or an address cannot be bound."""
        try:
            import zmq
            import zmq.asyncio
        except ModuleNotFoundError:
            raise ConfigError("kv_events: they need pyzmq: pip install '.[kv-events]' in aengine's folder") from None
        self._topic = config.kv_events_topic.encode()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context = zmq.asyncio.Context()
        self._context.linger = 0
        self._out: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUB)
        self._out.set_hwm(_UNSENT)
        self._replay: zmq.asyncio.Socket | None = None
        try:
            knob, address = "kv_events", config.kv_events or ""
            self._out.bind(address)
            if config.kv_events_replay is not None:
                knob, address = "kv_events_replay", config.kv_events_replay
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{knob}: {address!r} cannot be bound: {error.strerror}") from None

    def publish(self, events: list[Event]) -> None:
        """Send a batch to all subscribers. Never waits."""
        batch = msgspec.msgpack.encode([time.time(), events])
        number, self._number = self._number, self._number + 1
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    async def answer_replays(self) -> None:
        """Send missed batches again to peers that request them, until cancelled."""
        if self._replay is not None:
            await Replays(self._replay, self._kept).serve()

    def close(self) -> None:
        """Close the sockets. Unsent messages are dropped."""
        self._out.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()


@dataclass(slots=True)
class _Replay:
    """The progress of one peer."""

    number: int  # of the next batch to send
    moved: float  # monotonic seconds when the peer accepted the last message


class Replays:
    """Sends missed batches to the peers of a ROUTER socket, in turns. It uses at most a fifth of the event loop's time.

    A peer's new request replaces its unfinished request.
    """

    def __init__(self, socket: zmq.asyncio.Socket, kept: Sequence[tuple[int, bytes]]) -> None:
        """kept: numbers and batches, in ascending order without gaps. The publisher changes it meanwhile."""
        import zmq

        socket.set(zmq.ROUTER_MANDATORY, 1)  # raise for peers that are gone or do not read
        socket.set(zmq.MAXMSGSIZE, _LONGEST_FRAME)
        self._readable = socket.poll
        # A plain socket over the same connection. The asyncio socket would make a future for each frame.
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._again, self._error = zmq.Again, zmq.ZMQError
        self._no_wait, self._more = zmq.NOBLOCK, zmq.RCVMORE
        self._kept = kept
        self._frames: list[bytes] = []  # the frames of an unfinished request
        self._replays: dict[bytes, _Replay] = {}  # by peer, in serving order

    async def serve(self) -> None:
        """Serve peers until cancelled."""
        while True:
            if not self._replays:
                await self._readable()
            began = time.perf_counter()
            self._read()
            moved = self._send() if self._replays else True
            took = time.perf_counter() - began
            await asyncio.sleep(_PAUSE * took if moved else max(_STALLED, _PAUSE * took))

    def _read(self) -> None:
        """Read requests, at most `_FRAMES` frames. A long request is continued in the next call."""
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
        """Send the next messages to the next peer. Return False if the peer accepted none and is tried again later."""
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


@asynccontextmanager
async def published_events(config: EngineConfig, tree: RadixTree, publisher: Publisher | None) -> AsyncIterator[None]:
    """Publish the events of the tree inside the block. Does nothing without a publisher."""
    if publisher is None:
        yield
        return
    events = BlockEvents(config.page_size, publisher.publish)
    tree.watchers.append(events)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.answer_replays)
            yield
            tasks.cancel_scope.cancel()
    finally:
        tree.watchers.remove(events)
        events.flush()
        publisher.close()
