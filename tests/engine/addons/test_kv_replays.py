"""Replays of KV events: the event loop stays responsive, and no peer blocks another."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aengine.engine.addons import kv_events
from aengine.engine.addons.kv_events import Replays

zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")
pytestmark = pytest.mark.anyio

BATCHES = [(number, bytes([number % 256]) * 100) for number in range(5, 905)]


class Loop:
    """Measures the event loop for other tasks: how often they run, and their longest wait."""

    def __init__(self) -> None:
        self.turns, self.longest, self.cpu = 0, 0.0, time.thread_time()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turns += 1
            now = time.thread_time()
            self.longest, self.cpu = max(self.longest, now - self.cpu), now


@asynccontextmanager
async def served(batches: list[tuple[int, bytes]] = BATCHES) -> AsyncIterator[tuple[Any, Any, Loop]]:
    """Sockets of peers, and the measured loop that serves them."""
    context = zmq_asyncio.Context()
    context.linger = 0
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    loop = Loop()
    tasks = [asyncio.create_task(one) for one in (Replays(router, deque(batches)).serve(), loop.watch())]

    def connect(**options: int) -> Any:
        peer = context.socket(zmq.DEALER)
        for name, value in options.items():
            peer.set(getattr(zmq, name), value)
        peer.connect(f"tcp://127.0.0.1:{port}")
        return peer

    try:
        yield connect, router, loop
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


async def answer(peer: Any) -> list[tuple[int, bytes]]:
    """Return all messages up to the end mark."""
    found = []
    async with asyncio.timeout(20):
        while True:
            _, number, batch = await peer.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                assert batch == b""
                return found
            found.append((int.from_bytes(number, "big"), batch))


@pytest.mark.parametrize(
    ("request_", "first"),
    [
        ((b"", (0).to_bytes(8, "big")), 0),
        (((0).to_bytes(8, "big"),), 0),
        ((b"", (700).to_bytes(8, "big")), 695),
        ((b"", (905).to_bytes(8, "big")), 900),
        ((b"", b"no number"), 900),
    ],
)
async def test_a_peer_gets_what_it_missed(request_: tuple[bytes, ...], first: int) -> None:
    async with served() as (connect, _, _):
        peer = connect()
        await peer.send_multipart(request_)
        assert await answer(peer) == BATCHES[first:]


async def test_nothing_was_kept() -> None:
    async with served([]) as (connect, _, _):
        peer = connect()
        await peer.send_multipart((b"", bytes(8)))
        assert await answer(peer) == []


async def test_many_requests_with_many_frames_leave_the_loop_to_others() -> None:
    async with served() as (connect, _, loop):
        modest, other = connect(), connect()
        greedy = zmq.Socket.shadow(other.underlying)

        def ask() -> None:  # in another thread, because making this many frames takes long
            for _ in range(100):
                greedy.send_multipart((b"", bytes(8)))
                greedy.send_multipart([b""] * 1500)

        await asyncio.to_thread(ask)
        await modest.send_multipart((b"", bytes(8)))
        assert await answer(modest) == BATCHES
        assert loop.turns > 1000
        assert loop.longest < 0.05


async def test_a_peer_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_PATIENCE", 0.1)
    large = [(number, bytes(2**16)) for number in range(5000)]
    async with served(large) as (connect, router, _):
        router.set(zmq.SNDHWM, 10)
        stalled, reading = connect(RCVHWM=1), connect()
        await stalled.send_multipart((b"", bytes(8)))
        await asyncio.sleep(0.3)
        await reading.send_multipart((b"", (4900).to_bytes(8, "big")))
        assert await answer(reading) == large[4900:]
