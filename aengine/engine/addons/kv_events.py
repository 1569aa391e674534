"""KV events for routers outside: what the prefix cache stores and drops, published over ZeroMQ in vLLM's format.

A message on the PUB socket has three parts: topic, sequence number (8 bytes, big-endian), and a batch in msgpack,
`[time, [event, ...]]` where an event is `["BlockStored", hashes, parent's hash, token ids, block size, null, "GPU"]`,
`["BlockRemoved", hashes, "GPU"]` or `["AllBlocksCleared"]`. Whoever missed some sends the first missing number to the
ROUTER socket, and gets number and batch of each from there on, then number -1 with an empty batch.

A block is a page. Its hash is 64 bits of a chain over the ids from the first token on, the same in every engine.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from aengine.cache.radix import RadixTree
from aengine.config import EngineConfig
from aengine.engine.addons.kv_replays import Replays
from aengine.errors import ConfigError

if TYPE_CHECKING:
    import zmq.asyncio

_KEPT = 10_000  # batches for whoever missed them,
_KEPT_BYTES = 64 * 2**20  # and of these at most so much
_UNSENT = 100_000  # messages to a subscriber that does not read, before it misses some
_MEDIUM = "GPU"  # as vLLM calls the pool that steps read, whatever it lies on

Event = list[Any]


class BlockEvents:
    """Watches a radix tree and hands on what it hears, as one batch for each pass of the loop."""

    def __init__(self, page_size: int, publish: Callable[[list[Event]], None]) -> None:
        self._page_size = page_size
        self._publish = publish
        self._hashes: dict[int, int] = {}  # by page
        self._pending: list[Event] = []
        self._loop = asyncio.get_running_loop()

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: object) -> None:
        """Add the event of a run that the tree took."""
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
        """Add the event of a tree that begins anew."""
        self._hashes.clear()
        self._add(["AllBlocksCleared"])

    def flush(self) -> None:
        """Hand on what waits."""
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
    """Numbers batches of events, sends them, and keeps the newest for whoever missed them."""

    def __init__(self, config: EngineConfig) -> None:
        """Bind the sockets. Raises `ConfigError` where pyzmq is missing or an address cannot be had."""
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
        """Send a batch to whoever listens; never waits."""
        batch = msgspec.msgpack.encode([time.time(), events])
        number, self._number = self._number, self._number + 1
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    async def answer_replays(self) -> None:
        """Answer those who missed batches, until cancelled."""
        if self._replay is not None:
            await Replays(self._replay, self._kept).serve()

    def close(self) -> None:
        """Close the sockets; what was not sent is dropped."""
        self._out.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()


@asynccontextmanager
async def published_events(config: EngineConfig, tree: RadixTree, publisher: Publisher | None) -> AsyncIterator[None]:
    """Publish what happens in the tree, a batch for each pass of the loop in which something did."""
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
