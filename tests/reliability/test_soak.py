"""All kinds of requests at once for a long time: memory stays flat, nothing leaks, and the accounts always add up.

`SOAK_SECONDS` sets the duration, 60 by default.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import pairwise

import msgspec
import pytest

from tests.reliability.soak_server import Sample
from tests.reliability.traffic import CALLERS, KINDS, Traffic

pytestmark = pytest.mark.anyio

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
WARM = 3000  # requests until everything that is kept once, and every cache, is there
# What may be kept of a request after the warm-up, and once. A leak of 1 KB per request is above the first two at once.
HEAP, HEAP_ROOM = 300, 2**20  # bytes that malloc has given out, at quiet moments
BLOCKS, BLOCKS_ROOM = 0.25, 1000  # of Python's allocator, at quiet moments
# Resident memory includes free but fragmented memory. It varied by 24 MiB while the heap was constant.
RSS, RSS_ROOM = 500, 48 * 2**20  # bytes, at any moment


class Watched:
    """The server's process and its samples."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.samples: list[Sample] = []
        self.more = asyncio.Event()

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.samples.append(msgspec.json.decode(line, type=Sample))
            self.more.set()

    async def quiet(self) -> Sample:
        """Return a sample of the idle server. hypercorn keeps a closed connection for 5 s."""
        seen = len(self.samples)
        with suppress(TimeoutError):
            async with asyncio.timeout(15):
                while len(self.samples) < seen + 2 or self.samples[-1].tasks != self.samples[0].tasks:
                    self.more.clear()
                    await self.more.wait()
        return self.samples[-1]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
async def test_a_server_under_all_kinds_of_requests_stays_as_it_was() -> None:
    async with AsyncExitStack() as stack:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.reliability.soak_server"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        stack.push_async_callback(process.communicate, b"")  # closes its input, which ends it
        assert process.stdout is not None
        traffic = Traffic(int(await process.stdout.readline()), seed=1)
        watched = Watched(process)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        listening = tasks.create_task(watched.listen())
        start = await watched.quiet()
        for number in range(CALLERS):
            tasks.create_task(traffic.call(number))
        quarters = []
        for _ in range(4):
            await traffic.flow(SECONDS / 4)
            while sum(traffic.served.values()) < WARM:
                await traffic.flow(5)
            quarters.append(await watched.quiet())
        traffic.end()
        listening.cancel()
    tell(start, quarters, watched.samples, traffic)
    assert traffic.faults == []
    assert [sample.fault for sample in watched.samples if sample.fault] == []
    assert [quarter.tasks for quarter in quarters] == [start.tasks] * 4  # no task leaked
    assert set(traffic.served) == set(KINDS)
    assert quarters[-1].preemptions > 0
    warm, end = quarters[0], quarters[-1]
    requests = end.requests - warm.requests
    assert end.heap - warm.heap < HEAP * requests + HEAP_ROOM
    assert end.blocks - warm.blocks < BLOCKS * requests + BLOCKS_ROOM
    highest = max(sample.rss for sample in watched.samples if sample.at > quarters[1].at)
    assert highest - warm.rss < RSS * requests + RSS_ROOM
    assert process.returncode == 0


def tell(start: Sample, quarters: Sequence[Sample], samples: Sequence[Sample], traffic: Traffic) -> None:
    """Print the memory's curve and the counts (`pytest -s` shows them)."""
    minutes = [sample for before, sample in pairwise(samples) if before.at // 60 < sample.at // 60]
    for sample in sorted((start, *minutes, *quarters), key=lambda sample: sample.at):
        print(
            f"{sample.at:7.1f} s  rss {sample.rss / 2**20:8.2f} MiB  heap {sample.heap / 2**20:8.2f} MiB  "
            f"blocks {sample.blocks:8d}  "
            f"requests {sample.requests:7d}  preemptions {sample.preemptions}"
        )
    worst = [max(s.rss for s in samples if lo <= s.at < hi) / 2**20 for lo, hi in _spans(quarters)]
    print("highest of each quarter:", " ".join(f"{value:.2f}" for value in worst), "MiB")
    print("asked:", dict(traffic.served), "answered:", dict(traffic.statuses))


def _spans(quarters: Sequence[Sample]) -> list[tuple[float, float]]:
    ends = [0.0, *(quarter.at for quarter in quarters)]
    return list(pairwise(ends))
