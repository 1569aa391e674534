"""Readers of one byte per second do not delay others, cost bounded memory, and are disconnected after a while."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.cli.running import Served, served
from tests.reliability.raw_clients import ask, numbers, port_of, request, resident

pytestmark = [pytest.mark.anyio, pytest.mark.alone]

SLOW = NORMAL = 50
TOKENS = 400  # of a slow reader: about 700 kB of events, more than all buffers between the two together
SPEED_KEPT = 0.65  # of the others, at their best; 0.9 in quiet
BYTES_EACH = 6 * 2**20  # of the server's memory for one stalled stream, at most


class SlowReader:
    """A connection with a small receive buffer that reads one byte each second."""

    def __init__(self, port: int) -> None:
        self._raw = socket.socket()
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._raw.connect(("127.0.0.1", port))
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS, "ignore_eos": True}
        told = {"stream": True, "logprobs": True, "top_logprobs": 20}
        self._raw.sendall(request("/v1/chat/completions", **asked, **told))
        self._raw.setblocking(False)

    async def read(self) -> None:
        """Until it is stopped."""
        while await asyncio.get_running_loop().sock_recv(self._raw, 1):  # noqa: ASYNC110 - this is how slow it is
            await asyncio.sleep(1)

    async def hear_the_end(self) -> None:
        """Read everything at full speed. Raises: ConnectionResetError if the connection was cut."""
        while await asyncio.get_running_loop().sock_recv(self._raw, 65536):
            pass

    def close(self) -> None:
        self._raw.close()


@asynccontextmanager
async def slow_readers(server: Served, count: int) -> AsyncIterator[list[SlowReader]]:
    """So many, each reading on its own."""
    readers = [SlowReader(port_of(server)) for _ in range(count)]
    tasks = [asyncio.create_task(reader.read()) for reader in readers]
    try:
        yield readers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for reader in readers:
            reader.close()


async def until(server: Served, **wanted: float) -> dict[str, float]:
    """The metrics, once they have these values."""
    async with asyncio.timeout(60):
        while True:
            now = numbers(server)
            if all(now[f"aengine_{name}"] == value for name, value in wanted.items()):
                return now
            await asyncio.sleep(0.1)


async def speed(server: Served) -> float:
    """Tokens per second of the normal readers together."""
    began = time.monotonic()
    port = port_of(server)
    asked = [ask(port, "/generate", prompt="One two", max_tokens=40, ignore_eos=True) for _ in range(NORMAL)]
    async with asyncio.timeout(120):
        answers = await asyncio.gather(*asked)
    assert all(b'"finish_reason":"length"' in answer.body for answer in answers)
    return NORMAL * 40 / (time.monotonic() - began)


async def test_readers_beside_slow_ones_keep_their_speed() -> None:
    """Two servers, one with slow readers, measured in turns, so that other load affects both."""
    patient = ("--max-num-seqs", "128", "--stalled-reader-timeout", "600")
    with served("--max-num-seqs", "128") as lonely, served(*patient) as busy:
        for server in (lonely, busy):
            await speed(server)
        before = resident(busy)
        async with slow_readers(busy, SLOW):
            await until(busy, sends_blocked=SLOW, requests_running=0)  # `send` waits, and nothing is left to compute
            each = (resident(busy) - before) / SLOW
            alone, beside = [], []
            while len(alone) < 4 or (len(alone) < 12 and max(beside) <= SPEED_KEPT * max(alone)):  # it may be busy
                alone.append(await speed(lonely))
                beside.append(await speed(busy))
            assert numbers(busy)["aengine_sends_blocked"] == SLOW  # all the while
        kept = max(beside) / max(alone)
        print(f"\nspeed kept: {kept:.3f} of {max(alone):.0f} tok/s; {each / 2**20:.2f} MiB for a stalled stream")
        await until(busy, sends_blocked=0, kv_pages_used=0, requests_running=0, requests_waiting=0)
    assert kept > SPEED_KEPT
    assert each < BYTES_EACH


async def test_a_reader_that_takes_nothing_is_cut_after_its_time() -> None:
    with served("--stalled-reader-timeout", "5") as server:
        async with slow_readers(server, 3) as readers:
            blocked = await until(server, sends_blocked=3)
            assert blocked["aengine_stalled_readers_total"] == 0
            began = time.monotonic()
            await until(server, sends_blocked=0, kv_pages_used=0, requests_running=0, requests_waiting=0)
            assert time.monotonic() - began < 40  # 6 on a machine that is not busy
            assert numbers(server)["aengine_stalled_readers_total"] == 3
            for reader in readers:
                with pytest.raises(ConnectionResetError):
                    await reader.hear_the_end()
        assert (await ask(port_of(server), "/generate", prompt="One two", max_tokens=4)).status == 200
